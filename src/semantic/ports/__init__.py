"""The interfaces between the core and its adapters: protocols and value types, no behaviour.

`inbound.py` is the interface that protocol adapters call: replies (`InferencePort`, and for stored
conversations `StatefulInferencePort`), models, and the values that the services of
`application/agents` return. The core calls the other interfaces.
`text.py` converts a conversation to tokens, and constrains the tokens of a reply to a grammar.
`vision.py` prepares images for a model, or recognises the text in them.
`models.py` finds and fetches models. `backend.py` computes steps of sequences, and exports and
imports their KV cache as `KVPayload`. `storage.py` stores payloads in files (`BlockFilesPort`),
agents and turns in a ledger (`LedgerPort`), and one agent as a file (`AgentFilePort`). `sharing.py`
has the interfaces where servers that share agents differ from a single one. `packs.py` stores the
KV cache of a system prompt as a file. `telemetry.py` receives counters, durations, and the timeline
of each request.
"""
