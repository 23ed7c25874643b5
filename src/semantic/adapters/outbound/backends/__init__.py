"""What computes: torch, MLX and a fake."""
