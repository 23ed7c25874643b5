"""Agents: named conversations whose heads point into the block cache, as git branches do.

1. `ledger.py`: all agents and tenants. A finished request is committed here as a turn, and moves
   its agent's head; forking and rewinding copy or move the head, never the turns.
   `storage_quota.py` enforces the disk quotas of tenants, if there are any, and
   `block_owners.py` finds the tenant of a block.
2. `turn_log.py`: the log of turns, including turns not written yet; `comparison.py` explains why a
   turn did not reuse the KV cache of the turn before it. `running_turns.py`: the turns that run
   now, and the queue of an agent's turns where the server keeps the conversation.
3. `service.py`: the operations of the agent API: create, list, fork, rewind, explain.
4. `cache_admin.py`: the location of the agents' KV cache, and operations on it.
5. `transfer.py`: export and import of an agent with its turns and blocks as a file.
6. `upkeep.py`: background work: garbage collection, pins, verification, warm-up, backups.
7. `volatile.py`: what changes in an agent's prompts each turn, what it costs, and the remedy.
8. `feed.py`: events about agents, for subscribers.
"""
