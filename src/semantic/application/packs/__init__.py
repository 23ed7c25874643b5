"""Cache packs: the KV cache of a client's system prompt and tools, computed once and passed on.

1. `service.py`: makes a pack of an agent's leading blocks, adds packs to tenants, lists and removes
   them. A pack that was added is kept by a pinned agent that no client can name, so restarts,
   garbage collection, quotas and backups treat its blocks like those of any agent.
2. `recompute.py`: before a pack is used, computes some of its blocks again and compares them.
"""
