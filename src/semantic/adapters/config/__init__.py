"""What the server is told before it starts.

`settings.py` has every setting, its bounds, and the order of the places it can come from. `keys.py`
reads and edits the key file: API keys, tenants and their limits. `logging.py` sends log lines to
the terminal and the log file.
"""
