"""Backends: one loaded model on one device, behind `ModelBackendPort`.

The engine opens a sequence, loads its saved KV cache, launches steps and takes snapshots.
`common.py` tracks, for all backends, which sequences are open and where each can be continued and
truncated; `images.py` keeps features of images and derives positions from them; `sampler.py`
samples a token from a row of logits on the host; `drafting.py` drops rejected draft tokens from
recurrent layers; `mtp/` drafts tokens with a model's own head; `pinned.py` provides host memory
that a CUDA device reads and writes directly. The backends:

- `fake.py`: no weights; its KV cache is the tokens themselves. For tests and client developers.
  `fake_vision.py` is how it sees images.
- `torch/`: Hugging Face models on a CPU; computes each step before the next is planned.
- `mlx/`: mlx-lm models on Apple Silicon, CUDA or a CPU; launches the next step before the tokens of
  the last one are known.
"""
