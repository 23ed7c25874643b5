"""What computes: one loaded model on one device, behind `ModelBackendPort`.

The engine opens a sequence, loads what of its state was saved, launches steps and takes snapshots.
`common` knows which sequences are open and where each can go on and be cut, for all backends;
`sampler` chooses a token from a row of logits on the host; `pinned` is host memory that a CUDA
device reads and writes by itself. Then, by library:

- `fake`: no weights; its state is the tokens themselves. For tests and developers of clients.
- `torch`: Hugging Face's models on a CPU or CUDA, a step computed at once.
- `mlx`: mlx-lm's models on Apple Silicon, CUDA or a CPU, the next step launched before the last
  one's tokens are known.
- `sharded`: a model of either in several processes, which it tells every call.
"""
