"""The head of a model for draft tokens (multi-token prediction, MTP).

1. `names.py` finds the head's weights in a model's files.
2. `head.py` takes the head's layer out of the model and drafts with it.
3. `state.py` holds what the head keeps of a sequence.
"""
