"""The seams between the core and the world; protocols and their values, no behaviour.

`inbound.py` is what protocol adapters ask of the core: a reply (`InferencePort`), models, and the
values that the services of `application/agents` show. The rest is what the core asks of the
outside. `text.py` turns a conversation into tokens and says which tokens a reply may go on with.
`backend.py` finds models, computes steps of sequences, and hands their state out and in as
`KVPayload`. `storage.py` keeps it: payloads in files (`BlockFilesPort`), agents and turns in a
ledger (`LedgerPort`), one agent as a file (`AgentFilePort`).
"""
