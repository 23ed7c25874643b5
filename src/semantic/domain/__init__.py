"""What the server knows, in plain Python: no framework, no tensor, no I/O.

`chat.py` is what a client asks, `sampling.py` how tokens are chosen, `events.py` what a reply is
made of, and `reply_format.py` how a model family writes thinking and tool calls. `spec.py` is the
shape of a model's KV cache, which `model_families.py` reads from its config; `model_names.py` maps
the names clients ask for to models. `blocks.py` names pieces of KV cache by their content,
`pool.py` counts them within a budget and evicts, and `agents.py` are names for a place in a history
of turns. `access.py` has API keys and tenants; `errors.py` is the tree of all errors.
"""
