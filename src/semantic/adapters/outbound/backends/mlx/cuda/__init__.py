"""What exists for CUDA alone: our own kernels, which are measured (docs/mlx.md).

1. `device.py` says whether CUDA is in use; `weights.py` reads weights through pinned memory.
2. `tuning.py` fuses and replaces layers of a loaded model; `linear.py` multiplies a few rows.
3. `prompts.py` pads prompts to lengths that have been planned before: a new one costs 80 ms.
4. In a decode step `decode.py` plans the calls of `attention.py`, whose kernel also applies norms
   and RoPE and stores keys and values, as `rope.py` describes.
5. `transfer.py` copies state to pinned host memory and back on a stream of its own.

`kernels.py` compiles all of them, and caches each by its source.
"""
