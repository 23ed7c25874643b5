"""What the server knows, in plain Python: no framework, no tensor, no I/O."""
