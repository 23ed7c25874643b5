"""The `semantic` command.

1. `app.py`: the commands, their help, and how errors become a message and an exit status.
2. `flags.py`: flags that many commands share; `screen.py`: how values look on a terminal.
3. Without a server: `cache.py` works on a cache directory, `doctor.py` checks this machine, and
   `keys.py` manages API keys.
4. `client.py` calls a running server, for `chat.py`, `agents.py`, `models.py` and `watch.py` (`top`
   and `bench`).
5. `launch.py` runs other programs' clients against it.
"""
