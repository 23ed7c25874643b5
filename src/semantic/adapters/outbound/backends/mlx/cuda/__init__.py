"""What exists for CUDA alone: our own kernels, which are measured (docs/mlx.md).

Used from outside are `device.is_in_use` and `is_available`, `tuning.tune` and `untune` for a loaded
model, `decode.KernelStep` for a step's attention, and how many groups it takes at once.

`tuning` joins and replaces a model's layers; `linear` multiplies a few rows; in a decode step
`decode` plans the calls of `attention`, whose kernel also norms and turns heads and keeps keys and
values as `rope` says. Kernels are named by their source: MLX keeps what it compiled by name.
"""
