"""mlx-lm models on MLX.

1. `runtime.py` decides whether MLX is the better choice on this machine and prepares its import;
   `loading.py` loads a model; `device_limits.py` limits the memory that MLX keeps besides.
2. `backend.py` checks a step's chunks (`rows.py`); `runner.py` builds its computation: prompts one
   by one through the library's caches, which `caches.py` builds from plain arrays and converts
   back, then the last tokens of all sequences together. `probing.py` finds how they can be batched.
3. For these last tokens, `groups.py` keeps sequences of similar length in shared arrays, and
   `decode.py` replaces the library's caches by views over several groups.
4. `sampling.py` samples and scores tokens on the device where it can, so that a token feeds the
   next step before the host has seen it.
5. `payloads.py` copies KV cache to the host and back. `cuda/` contains the CUDA-only parts.
   `loop/` samples several tokens of a draft model in a row there.
6. `vision/` computes features of images and gives them to the language model.

Importing this package disables TF32, in which MLX multiplies float32 on CUDA by default: it has ten
bits of mantissa, and a reply then depends on the other rows of its batch. MLX reads the variable at
its first product of float32 numbers and keeps it for the process, so it is set here, before any
module of this package imports MLX.
"""

import os

os.environ.setdefault("MLX_ENABLE_TF32", "0")
