"""Agents, turns, tenants, replays and the index of block files, in SQLite or PostgreSQL.

`sqlite.py` is the ledger: one connection writes, in transactions that are all or nothing, and
others read. What it is asked and told is in `statements.py` as SQL; `schema.py` has the tables,
their versions and what a row stands for, with a checksum on each row that nothing else could
replace. What was said is in a row as JSON, which `codec.py` writes and reads by one schema; it also
reads what comes in with an agent's file. `files.py` opens, copies and moves the database's files
and says for people why it cannot. When a start finds the ledger damaged, cut or gone, `rescue.py`
moves it aside and makes a whole one of it and its backup.

`postgres.py` is the ledger of several servers: the same rows, in a database that all of them reach.
It leases agents, moves a head only from where its writer saw it, and tells what others did.
"""
