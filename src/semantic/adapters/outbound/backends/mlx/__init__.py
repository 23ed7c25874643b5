"""mlx-lm models on MLX.

1. `runtime.py` says whether MLX is the better choice here and prepares its import; `loading.py`
   loads a model.
2. `backend.py` checks a step's chunks; `runner.py` builds its computation: prompts one by one
   through the library's caches, which `caches.py` builds from plain arrays and takes apart again,
   then the last tokens of all sequences together.
3. For these, `groups.py` keeps sequences of similar length in shared arrays, and `decode.py` stands
   in for the library's caches over several groups.
4. `sampling.py` samples on the device where it can, so that a token feeds the next step before
   the host has seen it.
5. `payloads.py` copies state to the host and back. `cuda/` has what exists for CUDA alone.
"""
