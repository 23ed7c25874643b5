"""The `semantic` command.

1. `app`: the commands, their help, and how errors become a sentence and an exit status.
2. `flags`: flags that many commands share; `screen`: how values look on a terminal.
3. `cache`: a cache directory, while no server has it. `doctor`: this machine. `keys`: API keys.
4. `client`: how all other commands speak to a running server: `chat`, `agents`,
   `models`, and `watch` (`top` and `bench`).
5. `launch`: runs other programs' clients against it.
"""
