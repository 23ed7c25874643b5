"""Where the parts are wired and the process starts."""
