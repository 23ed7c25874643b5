"""Semantic: an inference server that keeps every agent's attention state."""

__version__ = "0.1.0"
