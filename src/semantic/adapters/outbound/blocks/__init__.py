"""Blocks of KV cache on disk, and exported agents.

1. `directory.py` marks the cache directory as Semantic's and locks it while the server runs.
2. `files.py` receives a block from the cache's writer as one payload per kind of layer.
3. `format.py` lays it out as a safetensors file with a header and a checksum; `quantisation.py`
   quantises the payload first if it is stored in 8 or 4 bits. `encryption.py` encrypts the file if
   a key is set.
4. `files.py` determines the path, writes the file under a temporary name and renames it.
5. On reading, `files.py` compares header and checksum with the requested part before it uses any
   data, and moves a bad file to quarantine. A scan finds the files with `listing.py`, and
   `usage.py` counts their bytes for the disk budget.

`agent_archive.py` puts block files and an agent's turns into a signed tar archive, and reads
untrusted archives. `pack_archive.py` does the same for a cache pack, which `pack_keys.py` signs.
`archive.py` has what both files have in common.
"""
