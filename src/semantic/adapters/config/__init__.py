"""Configuration that the server reads at the start.

`settings.py` defines every setting, its bounds, and the precedence of its sources. `keys.py` reads
and edits the key file: API keys, tenants and their limits. `logging.py` sends log lines to the
terminal and the log file; `terminal.py` makes untrusted text safe to print there.
"""
