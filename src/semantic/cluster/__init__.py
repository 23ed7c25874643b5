"""Optional: several servers that share agents and blocks, and models split over processes.

The rest of Semantic is a server for one machine and does not import this package;
`entrypoints/cluster_loader.py` loads it by name when a setting or a command asks for it. It has the
same layers:

1. `ports.py`: interfaces of what servers share: leases, an object store and the index of objects.
2. `application/`: leases on agents, the shared table of agents, uploads and downloads of blocks.
3. `adapters/`: PostgreSQL, object stores, and the backend that calls the processes of a model.
4. `entrypoints/`: the wiring of a shared store, replicas under Ray Serve, and shards.

`store = shared` and `semantic cluster` need the extra `cluster`; shards need no extra.
"""
