"""The parts that the server and the command line load by name.

`shared_store.py` wires the database and the object store of `store = shared`. `supervisor.py` is
the command `semantic cluster`; it runs `ray_driver.py`, which deploys `ray_app.py`: servers as
replicas under Ray Serve. `shards.py` starts the processes of a model that is split over several,
and runs as one of them (`semantic shard`).
"""
