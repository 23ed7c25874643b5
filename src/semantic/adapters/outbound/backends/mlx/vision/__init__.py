"""Images on MLX.

mlx-lm has the language models. The vision towers are here, as functions over the weights of the
files: `siglip.py` (Idefics3, SmolVLM and Gemma 3) and `qwen.py` (Qwen 2.5 VL and Qwen 3 VL), with
the operations of `layers.py`. `loading.py` reads them and completes the language model. `tower.py`
computes the features of images and gives them to the language model.
"""
