"""What the server does: it moves token ids, names, counts and bytes between the ports.

A request: `requests/` receives it, waits in `models/` for its model, has `prompt/` turn the
conversation into tokens, and submits them to `engine/`, the loop that owns the device. Text comes
back through `parsing/`, and the turn is logged in `agents/`.

A block of KV cache: `engine/` seals it, `cache/` keeps it in memory and on disk, finds it again
for the next prompt and evicts it (`cache/eviction.py`). Agents are names for chains of blocks, as
branches are for commits: `agents/`.
"""
