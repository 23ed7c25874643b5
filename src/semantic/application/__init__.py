"""The use cases of the server; they reach models, storage and protocols through ports.

A request: `requests/` receives it and waits until `models/` has loaded its model. `prompt/` turns
the conversation into tokens, and `engine/`, the loop that owns the device, computes the reply.
`parsing/` splits the reply's text into thinking, text and tool calls, and `agents/` logs the turn.

A block of KV cache: `engine/` seals it; `cache/` stores it in memory and on disk, finds it for the
next prompt, and evicts it (`cache/eviction.py`). An agent is a name for a chain of blocks, as a
branch is a name for a chain of commits: `agents/`. The blocks of a client's system prompt and tools
can be passed on as a file: `packs/`.

`settings.py` defines the settings that these parts read while they run.
"""
