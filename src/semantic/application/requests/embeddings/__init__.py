"""Requests for embeddings.

`texts.py` tokenises and checks their texts, and scales the vectors that the engine computes.
"""
