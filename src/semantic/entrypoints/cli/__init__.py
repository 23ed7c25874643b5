"""The `semantic` command.

1. `app`: the commands, their help, and how errors become a sentence and an exit status.
2. `cache`: looks at a cache directory while no server has it.
3. `client`: how the commands below speak to a running server.
"""
