"""Blocks of KV cache on disk, and exported agents.

1. `directory.py` marks the cache directory as Semantic's and locks it while the server runs.
2. `files.py` receives a block from the cache's writer as one payload per kind of layer.
3. `codec.py` quantises the payload if it is stored in 8 or 4 bits; `format.py` lays it out as a
   safetensors file with a header and a checksum.
4. `tree.py` determines the path; the file is written under a temporary name and renamed.
5. On reading, `files.py` compares header and checksum with the requested part before it uses any
   data, and moves a bad file to quarantine.

`agent_archive.py` packs block files and an agent's turns into a signed tar archive, and reads
untrusted archives.
"""
