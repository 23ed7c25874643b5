"""What exists for CUDA alone: our own kernels, which are measured (docs/mlx.md).

Used from outside are `device.is_in_use` and `is_available`, `tuning.tune` and `untune` for a loaded
model, `decode.KernelStep` for a step's attention, and how many groups it takes at once, `prompts`
for that of a prompt's tokens, and `transfer` for state on its way to the host and back.

`tuning` joins and replaces a model's layers; `linear` multiplies a few rows; in a decode step
`decode` plans the calls of `attention`, whose kernel also norms and turns heads and keeps keys and
values as `rope` says. `prompts` brings prompts into lengths that were met before; `transfer` copies
state to pinned host memory and back, on a stream of its own, and `weights` brings a model's weights
the same way. `kernels` compiles all of ours, which are named by their source.
"""
