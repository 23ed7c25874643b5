"""Constrained decoding: replies that follow a JSON schema, a pattern or a tool's arguments.

1. `compiler.py` writes the required form of a reply as a grammar, with each family's notation of
   tool calls from `tool_calls.py`.
2. `trial.py` has a process that can be killed compile it first; if that fails, `compiler.py` finds
   the part of the schema to blame.
3. `constraint.py` says, token by token, what may come next and, near the end of the budget, what
   closes the reply.

`vocabulary.py` has the model's tokens in the form that the grammar library wants.
"""
