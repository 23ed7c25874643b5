"""The head of a model for draft tokens (multi-token prediction, MTP), for all backends.

1. `names.py` finds the head's weights in a model's files.
2. `state.py` holds what the head keeps of a sequence.
3. `head.py` drafts with the modules that `torch_head.py` and `mlx_head.py` make of the weights.
"""
