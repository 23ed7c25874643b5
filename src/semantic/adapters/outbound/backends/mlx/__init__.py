"""mlx-lm's models by MLX.

`runtime` says whether MLX is the better choice here and prepares its import; `loading` loads a
model. `backend` checks a step's chunks; `runner` builds its computation: prompts one by one through
the library's caches, which `caches` makes of plain arrays and takes apart again, then the last
tokens of all sequences together. For these `groups` keeps sequences of like length side by side in
shared arrays, and `decode` stands in for the library's caches over several groups. `sampling` draws
on the device where it can, so that a token feeds the next step before anyone has seen it.
`payloads` copies state to the host and back. `cuda` holds what exists for CUDA alone.
"""
