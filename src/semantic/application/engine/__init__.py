"""The device loop: many requests, one device.

1. `device_thread.py`: `submit`, from any thread; the thread that owns the model (`model.py`) takes
   the job from its queue.
2. `request.py`: a `Job` becomes a `Generation`, which knows how far it has got.
3. `scheduler.py`: who is admitted next, and whose tokens go into the next step; fair, with bounded
   waits. `speculation.py` adds draft tokens where that pays, from what `drafts.py` remembers.
4. `kv_reuse.py`: its first tokens come from an idle copy, a running sequence or sealed blocks,
   which `restore.py` loads part by part while others decode.
5. `memory.py`: makes room for the sequence by closing idle copies; then others are preempted.
6. `engine.py`: the loop: schedule a step, launch it, collect the one before it, emit its events.
7. `request.py`: sampled tokens become text that may be shown; stop strings end the reply.
8. `kv_reuse.py`: full blocks are sealed into the cache as they fill, the tail at the end; the
   sequence stays open, idle, for the agent's next turn.

`embedding.py` computes embeddings, a piece of a text after each step.
"""
