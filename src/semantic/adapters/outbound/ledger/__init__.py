"""Agents, turns, tenants, replays and the index of block files, in SQLite.

1. `sqlite.py` is the ledger of one server: one connection writes, in transactions; others read.
   `statements.py` has the SQL; `schema.py` the tables, their versions and the row checksums.
2. `codec.py` encodes agents and turns as JSON; `encryption.py` encrypts their content.
3. `files.py` opens, copies and moves the database files, and turns errors into messages;
   `opening.py` checks and migrates a file that is opened.
4. `rescue.py` rebuilds a damaged, truncated or missing ledger from its remains and its backups.
"""
