"""The KV cache of a torch model: what the library keeps, and where this backend keeps it.

1. `geometry.py` reads from the library's own cache which arrays each layer keeps.
2. `sequences.py` holds the keys and values of a sequence in buffers, and views of them for a step.
   `library_cache.py` lets the library's cache objects work on these buffers.
3. `payloads.py` converts buffers and recurrent states to payloads and back.
"""
