"""The parts of the MLX backend."""
