"""A request's way from a protocol to the engine and back.

1. `service.py`: a protocol calls `InferenceService.start`. If the model must be loaded first, the
   request waits for it (`application/models`); then rate limits are checked (`limits.py`).
2. `prepare.py`: in a thread of its own, the conversation becomes tokens (`application/prompt`) and
   then a job: with its length, its grammar, and a budget for thinking (`thinking_budget.py`).
3. `identity.py`: in between, its name or its tokens say whose turn it is; that agent is claimed.
4. `service.py` submits the job to the device's thread (`application/engine`).
5. `reply.py`: the engine's events cross to the event loop, are parsed (`application/parsing`), and
   wait for their reader. At the end the turn is logged (`application/agents`); then end hooks run:
   the claim is released, the feed gets an event, the agent's next turn begins.

`stateful.py` stands before all this where the server keeps the conversation: an agent's turns queue
there, and its oldest messages are dropped when they no longer fit. Embeddings take the same way
through `service.py`.
"""
