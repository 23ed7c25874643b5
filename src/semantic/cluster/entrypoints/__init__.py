"""The parts that the server and the command line load by name.

`shared_store.py` wires the database and the object store of `store = shared`. `ray_app.py` runs
servers as replicas under Ray Serve (`semantic cluster`). `shards.py` starts the processes of a
model that is split over several, and runs as one of them (`semantic shard`).
"""
