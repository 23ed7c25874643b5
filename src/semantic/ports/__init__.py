"""The interfaces between the core and the world: protocols and their values, no behaviour.

`inbound.py` is what protocol adapters ask of the core: a reply (`InferencePort`), models, and the
values that the services of `application/agents` return. The rest is what the core asks of others.
`text.py` turns a conversation into tokens and says which tokens may come next in a reply.
`backend.py` finds models, computes steps of sequences, and exports and imports their state as
`KVPayload`. `storage.py` keeps it: payloads in files (`BlockFilesPort`), agents and turns in a
ledger (`LedgerPort`), one agent as a file (`AgentFilePort`). `telemetry.py` is what the core
reports: counts, durations, and the times of each request.
"""
