"""Domain types in plain Python: no framework, no tensors, no I/O.

`chat.py` defines requests and conversations, `sampling.py` how tokens are chosen, `events.py` the
events of a reply, and `reply_format.py` how a model family writes thinking and tool calls.
`spec.py` describes the shape of a model's KV cache, which `model_families.py` reads from its
config; `model_names.py` maps requested names to models. `blocks.py` names pieces of KV cache by
their content, `pool.py` keeps them within a memory budget, and `agents.py` defines agents as named
pointers into a history of turns. `images/` gives images their place in a sequence of token ids.
`volatile/` finds and repairs prompts that change each turn.
`access.py` defines API keys and tenants; `errors.py` is the tree
of all errors.
"""
