"""Everything that knows a framework, a file format or a protocol.

`inbound/` turns HTTP requests into calls of the core and its events into replies; `outbound/`
computes, stores and measures on the core's behalf; `config/` reads settings and keys and sets up
logging. The three do not import each other; `validation.py`, which says in plain words what
pydantic finds wrong, is for all of them.
"""
