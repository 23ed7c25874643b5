"""What the server knows, in plain Python: no framework, no tensor, no I/O.

`chat` is what a client asks, `sampling` how tokens are chosen, `events` what a reply is made of,
and `reply_format` how a model family writes thinking and tool calls. `spec` is the shape of a
model's attention state, which `model_families` reads off its config. `blocks` names pieces of that
state by their content, `pool` counts them within a budget, and `agents` are names for a place in a
history of turns. `access` says who may ask; `errors` is the tree of everything that can be refused.
"""
