"""What exists for CUDA alone."""
