"""Images in prompts: how a sequence of token ids identifies them.

`spans.py` defines prepared images, their positions in a prompt, and the key ids that stand at them.
"""
