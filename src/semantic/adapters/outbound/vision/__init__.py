"""Images for models that see: from a file to pixels and prompt tokens, as the model was trained.

`families.py` lists the model types. `processors.py` reads a model's processor settings; each family
resizes and divides images in its own way: `tiles.py` (Idefics3 and SmolVLM), `patches.py` (Qwen 2.5
VL and Qwen 3 VL) and `square.py` (Gemma 3). `preparing.py` joins this with the tokenizer: it
implements `VisionPort`. Results equal those of the processors of transformers. Pixels stay integers
until a backend scales them by `pixels.py`, which makes them four times smaller.
"""
