"""The path of a request from a protocol to the engine and back.

1. `access.py`: the HTTP adapter authenticates the request by its API key.
2. `service.py`: a protocol calls `InferenceService.start`. If the model must be loaded first, the
   request waits for it (`application/models`); then rate limits are checked (`limits.py`).
3. `prepare.py`: in a separate thread, the conversation becomes tokens (`application/prompt`) and
   then a job with a maximum length, a grammar, and a budget for thinking (`thinking_budget.py`).
   If the conversation is too long, `truncation.py` drops its oldest turns, if the request permits.
4. `identity.py`: as part of that, the agent of the turn is found by name or by the prompt's tokens,
   and claimed.
5. `service.py` submits the job to the device's thread (`application/engine`).
6. `reply.py`: the engine's events cross to the event loop, are parsed (`application/parsing`) and
   queued for the reader. At the end the turn is logged (`application/agents`). Then end hooks run:
   they release the claim, publish an event to the feed, and start the agent's next turn.

If the reply ends in tool calls, `ahead.py` has the beginning of the next prompt rendered and
computed while the tools run.

`compaction/` replaces the oldest part of a conversation by a summary.

If rules that repair volatile prompts are on, `rewriting/` changes the conversation before step 3.
`stateful.py` precedes these steps if the server stores the conversation: it queues the turns of an
agent, and drops the oldest messages when they no longer fit. `explain.py` compares a prompt with an
earlier turn before the job is submitted, if the request asks for that. `branches.py` sends
requests on behalf of models, which may ask, fork and compare agents within limits. Embedding
requests also pass through `service.py`, with their texts in `embeddings/`.
"""
