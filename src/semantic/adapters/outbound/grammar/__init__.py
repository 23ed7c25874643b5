"""Constrained decoding: replies that follow a JSON schema, a pattern or a tool's arguments.

1. `compiler.py` writes the required form of a reply as a grammar; `tool_calls.py` has each model
   family's syntax of tool calls.
2. `trial.py` first compiles the grammar in a process that can be killed; if that fails,
   `compiler.py` locates the part of the schema that causes it.
3. `constraint.py` computes, token by token, which tokens may follow and, near the end of the token
   budget, which tokens complete the reply.

`vocabulary.py` holds the model's tokens in the form that the grammar library needs.
"""
