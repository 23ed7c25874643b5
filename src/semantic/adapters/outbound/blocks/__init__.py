"""Blocks of attention state on disk, and agents as files.

The server first makes sure that the cache directory is its own: `directory.py` marks and locks it.
A block that leaves memory comes to `files.py` as one payload for each kind of layers. `codec.py`
quantises its numbers if they are to rest at 8 or 4 bits, `format.py` lays it out as a safetensors
file that says what it is, with a checksum, and `tree.py` knows the one place where it may lie. The
file is written beside that place and moved there. On the way back everything is compared with what
was asked for before a byte is believed; a bad file goes to quarantine. `agent_archive.py` packs the
same block files with an agent's turns into a signed tar archive, and reads one that a stranger may
have written.
"""
