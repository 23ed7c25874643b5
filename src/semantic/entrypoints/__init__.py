"""Where the process starts, and the only place where parts are wired.

1. `cli`: the `semantic` command: reads the command line and the settings.
2. `bootstrap`: wires the application, top to bottom, and starts nothing. Models are loaded later,
   on the device's thread, by `loading`.
3. `persistence`: the part of it that outlives the process: ledger, blocks, housekeeping.
4. `server`: the HTTP application over it all, its signals, and the end.
"""
