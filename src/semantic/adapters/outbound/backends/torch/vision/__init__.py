"""Images on PyTorch.

`halves.py` divides a model that sees: its language model is loaded like one without images, and
its vision tower by the modules of transformers. `tower.py` computes the features of an image, which
it keeps for the next request with the same image. `merging.py` gives the language model features
instead of embeddings, and the positions that follow from the images.
"""
