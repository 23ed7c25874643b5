"""Agents are to blocks what branches are to git's objects: names for a place in a history.

1. `ledger`: all agents and tenants; a finished request is committed here as a turn, and moves its
   agent. Forking and rewinding move or copy the name, never the turns. Who exists, and who may move
   whom, is in `sharing`: one process has all agents in memory, several lease them.
2. `turns`: the log behind it: turns are read from memory until they are written, follow their
   blocks when those are replaced, and are found by their request. Turns that run are watched and
   counted here too, and where the server keeps the conversation they wait in an agent's lane.
3. `service`: what the API of agents does with both: create, list, fork, rewind, explain.
4. `cache_admin`: where the agents' attention state is, and what is done to it by hand.
5. `transfer`: an agent with its turns and blocks as a file, out and in.
6. `upkeep`: in the background, what serving must not wait for: garbage that no agent reaches, pins,
   checks, warming up, backups.
7. `feed`: tells those who listen what happened to agents.
"""
