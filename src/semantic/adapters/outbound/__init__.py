"""Outbound adapters: models, grammars, compute backends, files and databases.

`models/` locates a model's files and loads its tokenizer, `vision/` prepares images for it,
`grammar/` constrains a reply to a schema, and `backends/` run the model. `blocks/` stores blocks of
KV cache as files and `ledger/` stores agents and turns as rows; `cipher.py` encrypts both if a key
is set. `host_memory.py` allocates the memory that blocks are read into. `telemetry/` exports
metrics and traces.
`limited_process.py` processes untrusted schemas and chat templates under time and memory limits.
"""
