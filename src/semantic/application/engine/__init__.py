"""The device loop: batches many requests on one device.

A request passes through these modules:

1. `device_thread.py`: `submit` queues the job from any thread; the thread that owns the model
   (`model.py`) takes it from the queue.
2. `request.py`: the `Job` that the engine receives; `generation.py`: the job in progress, which
   counts what is computed, sealed, restored and drafted.
3. `scheduler.py`: selects the requests to admit and the tokens of the next step; fair, with bounded
   waits. `speculative/` adds draft tokens where they save time.
4. `kv_reuse.py`: reuses the state of the first tokens from an idle copy, a running sequence or
   sealed blocks, which `restore.py` loads part by part while other sequences decode.
5. `admission.py`: opens the sequence. `memory.py` reserves its memory, closing idle copies first;
   if that is not enough, `admission.py` preempts running sequences.
6. `engine.py`: the loop: schedule a step, launch it, collect the previous one, emit its events.
   `steps.py` holds the launched steps and learns from their durations.
7. `kv_reuse.py`: seals blocks into the cache as they fill, and the tail at the end; the sequence
   stays open as an idle copy for the agent's next turn.

`embedding.py` computes embeddings, a piece of a text after each step.
"""
