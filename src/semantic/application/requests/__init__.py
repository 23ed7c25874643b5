"""A request's way from a protocol to the engine and back.

1. `service`: a protocol calls `InferenceService.start`; where the model must be brought first, the
   request waits for it (`application/models`), and the rest of the way begins after that.
2. `prepare`: in a thread of its own, the conversation becomes tokens (`application/prompt`), and a
   job: with its limits, its grammar, and a budget for thinking (`thinking_budget`).
3. `identity`: on the way it is found out whose turn it is, and that agent is claimed.
4. `service` submits the job to the device's thread (`application/engine`).
5. `reply`: the engine's events cross to the event loop, are parsed (`application/parsing`), and
   wait for their reader. At the end the turn is logged (`application/agents`), then its
   end hooks run: the claim is released, the feed gets an event, the agent's next turn begins.

`service` also takes texts whose vectors the device computes between the steps of replies. Who asks,
and whether that much may be asked, is in `limits`.

`stateful` stands before all this where the server keeps the conversation: an agent's turns wait for
each other there, and the oldest messages go when they no longer fit.
"""
