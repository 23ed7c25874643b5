"""What servers share: a database, an object store, and the processes of a model.

`postgres.py` is the shared ledger: the rows of `adapters/outbound/ledger/`, leases on agents, and
notifications of changes by other servers. `shared_parts.py` is the index of the object store, in
the same database. `objects.py` stores the bytes of block files in S3, GCS, Azure or a shared
directory. `sharded.py` is a backend that forwards every call to the processes that hold a model's
shards.
"""
