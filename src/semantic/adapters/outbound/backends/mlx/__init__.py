"""mlx-lm models on MLX."""
