"""Hugging Face models on PyTorch.

1. `loading.py` chooses device, number format and threads, and puts our attention into the library's
   model. `grouped.py` loads weights that stay in 4 or 8 bits, `shares.py` one rank's share of a
   model; on a CPU that computes in bfloat16, `cpu.py` replaces slow and inexact modules.
2. In a step `threads.py` says how many cores are free, and `backend.py` packs all chunks into one
   row; in each layer `attention.py` appends the row's keys and values to each sequence's buffers
   and attends within it. `backend.py` samples, and copies buffers to the host and back, on CUDA
   through `copies.py`.
3. On an ARM CPU with a compiler, `native.py` builds a small C library, and `decoding.py` runs whole
   steps of Llama-like models in one call of it; `plain.py` builds such models from their files
   without importing the library, which would take most of the start.
"""
