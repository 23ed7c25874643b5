"""The `semantic` command.

1. `app.py`: the commands, their help, and the mapping of errors to messages and exit statuses.
2. `flags.py`: flags that many commands share; `screen.py`: formatting for a terminal.
3. Without a server: `doctor/` checks this machine, `keys.py` manages API keys, and `service.py`
   makes the server a service of the system. `storage/` has the commands on files of KV cache.
4. `client.py` calls a running server, for `chat.py`, `agents.py`, `models.py` and `watch.py` (`top`
   and `bench`).
5. `launch.py` runs coding agents and other clients against a running server, and offers its agents
   to them as tools.
"""
