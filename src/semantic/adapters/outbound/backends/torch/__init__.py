"""Hugging Face models on PyTorch."""
