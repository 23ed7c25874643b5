"""Configuration that the server reads at the start.

`settings.py` defines every setting and its bounds; `sources.py` reads them from the command line,
the environment and files. `keys.py` reads and edits the key file: API keys, tenants and limits.
`repairs.py` reads the rules that repair volatile prompts.
`logging.py` sends log lines to the terminal and the log file; `terminal.py` makes untrusted text
safe to print there.
"""
