"""What computes: one loaded model on one device, behind `ModelBackendPort`.

The engine opens a sequence, loads what was saved of its state, launches steps and takes snapshots.
`common.py` tracks, for all backends, which sequences are open and where each can be continued and
cut; `sampler.py` picks a token from a row of logits on the host; `pinned.py` is host memory that a
CUDA device reads and writes directly. Then, by library:

- `fake.py`: no weights; its state is the tokens themselves. For tests and client developers.
- `torch/`: Hugging Face models on a CPU or CUDA; each step is computed before the next is planned.
- `mlx/`: mlx-lm models on Apple Silicon, CUDA or a CPU; the next step is launched before the
  tokens of the last one are known.
- `sharded.py`: a model of either library split over several processes; it forwards every call.
"""
