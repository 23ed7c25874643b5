"""Replies held to a form while they are decoded.

`compiler` gets the shape a reply must have and writes it as a grammar, with each family's notation
of calls from `tool_calls`. Before the server compiles a grammar itself, `trial` lets a
process that can be ended, `worker`, try it; where that fails, `compiler` finds the part of the
schema to blame. A `constraint` then says, token by token, what may come next, and near the end of
the budget what closes the reply. `vocabulary` is the model's tokens as the grammar library wants
them.
"""
