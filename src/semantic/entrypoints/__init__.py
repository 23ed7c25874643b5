"""Where the process starts, and the only place where parts are wired.

1. `cli/`: the `semantic` command: reads the command line and the settings.
2. `bootstrap.py`: wires the application, top to bottom, and starts nothing. Models are loaded
   later, on the device's thread, by `loading.py`.
3. `persistence.py`: the parts that outlive the process: ledger, blocks, upkeep.
4. `server.py`: the HTTP application over them, signals, and shutdown.

`shards.py` starts the processes of a model that is split over several, and `ray_app.py` runs
servers as replicas under Ray Serve.
"""
