"""The device loop: many requests, one device.

A request's way through it:

1. `device_thread`: `submit` from any thread; the thread that owns the model (`model`) takes it in.
2. `request`: a `Job` becomes a `Generation`, which knows how far it got and what can be restored.
3. `scheduler`: who is admitted, and whose tokens go into the next step; fair, with bounded waits.
   `ahead` adds guesses of what follows them where that pays, from what `drafts` remembers.
4. `memory`: room for the sequence, made by closing idle copies, or by preemption.
5. `kv_reuse`: its first tokens come from an idle copy, a running sequence or sealed blocks;
   `restore` loads those, part by part, while others decode.
6. `engine`: schedules a step, launches it, collects the one before it, applies what came of it.
7. `request`: sampled tokens become text that may be shown; stop strings end the reply.
8. `kv_reuse` again: full blocks are sealed into the cache as they fill, the tail at the end; the
   sequence stays open, idle, for the agent's next turn.

`embedding` computes texts whose vectors are asked for, a piece after each step.
"""
