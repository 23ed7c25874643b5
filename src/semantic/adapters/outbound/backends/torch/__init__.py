"""Hugging Face models on PyTorch.

1. `loading.py` chooses device, number format and thread count, and installs the packed attention
   function in the transformers model. `reading.py` reads weights that stay quantised into the
   modules of `grouped.py` and `experts.py`, `shares.py` one rank's share of a model. On a CPU that
   computes in bfloat16, `cpu.py` replaces slow and inexact modules.
2. For each step, `threads.py` sets the number of threads from the free cores, and `backend.py`
   packs all chunks into one row. In each layer, `attention.py` appends the row's keys and values to
   each sequence's buffers and attends within that sequence. `backend.py` samples, and copies
   buffers to the host and back, on CUDA through `copies.py`.
3. On a CPU in float32, `native/` contains a small C library, built for several instruction sets,
   and `decoding.py` runs whole steps of the most common models in one call of it. `plain.py` builds
   Llama-like models from their files without importing transformers, which would take most of the
   start time.
"""
