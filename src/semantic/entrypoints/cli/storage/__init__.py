"""Commands on files of KV cache.

`cache.py` works on a cache directory while no server uses it. `packs.py` makes cache packs with a
running server and adds them there; it reads the files and manages the keys that sign them itself.
"""
