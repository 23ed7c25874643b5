"""What the core drives: models, grammars, devices, files and databases.

`models/` finds a model's files and has its tokenizer, `grammar/` constrains a reply to a schema,
`backends/` compute. `blocks/` stores blocks of KV cache as files, `ledger/` agents and turns as
rows, both encrypted by `cipher.py` if a key is set. `host_memory.py` allocates the memory that
blocks are read into. `telemetry/` has metrics and traces.
"""
