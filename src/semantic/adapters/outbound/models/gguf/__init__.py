"""Converts a GGUF file, once, into an ordinary Hugging Face model directory.

1. `importing.py` builds the directory: atomically, and never over a directory of the user's.
2. `header.py` reads sizes and configuration from the file's metadata.
3. `weights.py` reads tensors; quantised matrices stay quantised.
4. `vocabulary.py` rebuilds the tokenizer.
"""
