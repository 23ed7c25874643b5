"""Blocks of KV cache on disk and in object stores, and agents as files.

1. `directory.py` marks the cache directory as ours and locks it while the server runs.
2. `files.py` gets a block from the cache's writer as one payload for each kind of layer.
3. `codec.py` quantises it if it is to rest in 8 or 4 bits; `format.py` lays it out as a safetensors
   file with a header and a checksum.
4. `tree.py` knows its path; the file is written beside it and renamed.
5. On the way back `files.py` compares header and checksum with what was asked for before it uses a
   byte; a bad file goes to quarantine.

`objects.py` stores the same bytes in S3, GCS, Azure or a shared directory. `agent_archive.py` packs
block files and an agent's turns into a signed tar archive, and reads archives it does not trust.
"""
