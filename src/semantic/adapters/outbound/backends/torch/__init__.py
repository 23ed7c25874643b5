"""Hugging Face models on PyTorch.

1. `loading.py` chooses number format and thread count, and loads the transformers model.
   `forward.py` reads from the library's cache what the model keeps, and chooses how steps run: all
   sequences packed into one call, or each in a call of its own. `reading.py` reads weights that
   stay quantised into the modules of `grouped.py` and `experts.py`, `shares.py` one rank's share of
   a model. On a CPU that computes in bfloat16, `cpu.py` replaces slow and inexact modules.
2. For each step, `threads.py` sets the number of threads from the free cores, and `backend.py`
   runs the chunks and samples. In a packed call, `attention.py` appends the row's keys and values
   to each sequence's buffers and attends within that sequence. `kv/` holds these buffers, lets the
   library's cache objects work on them, and copies them to the host and back.
3. On a CPU in float32, `native/` contains a small C library, built for several instruction sets,
   and `decoding.py` runs whole steps of the most common models in one call of it. `plain.py` builds
   Llama-like models from their files without importing transformers, which would take most of the
   start time.
4. `vision/` computes features of images and merges them with the embeddings of tokens.
"""
