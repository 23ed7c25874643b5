"""What the server does: it moves token ids, names, counts and bytes between the ports."""
