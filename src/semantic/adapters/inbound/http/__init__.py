"""What every protocol needs of HTTP."""
