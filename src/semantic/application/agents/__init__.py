"""Agents are to blocks what branches are to git's objects: names for a place in a history.

1. `ledger.py`: all agents and tenants. A finished request is committed here as a turn, and moves
   its agent's head; forking and rewinding copy or move the head, never the turns. `sharing.py` says
   which agents exist and who may move them: one process has all in memory, several lease them.
2. `turns.py`: the log of turns, with those that are not written yet; the turns that are running,
   and the queue of an agent's turns where the server keeps the conversation.
3. `service.py`: what the agent API does with both: create, list, fork, rewind, explain.
4. `cache_admin.py`: where the agents' KV cache is, and the operations on it.
5. `transfer.py`: an agent with its turns and blocks as a file, out and in.
6. `upkeep.py`: background work: garbage collection, pins, verification, warming up, backups.
7. `feed.py`: events about agents, for subscribers.
"""
