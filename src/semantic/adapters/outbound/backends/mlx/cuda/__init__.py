"""CUDA-only parts: custom kernels, with measurements in docs/mlx.md.

1. `device.py` reports whether CUDA is in use; `weights.py` reads weights through pinned memory.
2. `tuning.py` fuses and replaces layers of a loaded model; `linear.py` multiplies a few rows, and
   `quantised/` by quantised weights; `recurrent.py` computes Mamba 2's recurrence.
3. `prompts.py` pads prompts to lengths that have an attention plan: a new length costs 80 ms.
4. In a decode step, `decode.py` plans the calls of `attention.py`, whose kernel also applies norms
   and RoPE and stores keys and values, as `rope.py` describes.
5. `transfer.py` copies KV cache to pinned host memory and back on a separate stream.

`kernels.py` compiles all kernels, and caches each by its source.
"""
