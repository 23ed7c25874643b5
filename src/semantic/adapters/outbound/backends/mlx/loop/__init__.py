"""Samples several tokens in a row on a CUDA device without the host, for draft models.

Read `kernel.py` for what it does, `source_passes.py` and `source_parts.py` for how, and
`sequences.py` for what it means for a backend's sequences.
"""
