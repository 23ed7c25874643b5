"""The process's entry points, and the only package that wires parts together.

1. `cli/`: the `semantic` command, which reads the command line and the settings.
2. `bootstrap.py`: wires the application, top to bottom, and does not start it. `loading.py` loads
   models later, on the device thread.
3. `persistence.py`: the state that outlives the process: ledger, blocks, upkeep.
4. `server.py`: the HTTP application, signals, and shutdown; `banner.py`: what it prints.

`mcp_loader.py` loads the Model Context Protocol when a client asks for it.
`cluster_loader.py` loads the optional package `cluster/`, for shared stores, replicas and shards.
"""
