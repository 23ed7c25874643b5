"""How servers share agents and blocks.

`leases.py` leases an agent to one request at a time, across all servers. `shared_agents.py` is the
table of agents, read from the ledger on every access. `object_tier.py` is the tier of blocks below
the disk: it uploads blocks of this machine, downloads those of others, and deletes objects that no
agent reaches.
"""
