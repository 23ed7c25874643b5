"""OpenAI's Chat Completions, older Completions, Embeddings and Models.

1. `routes.py` receives a request and starts its replies, several if `n` is above 1.
2. `requests.py` validates and translates the body; `fields.py` has what all of OpenAI's bodies
   share (those of `responses/` too): sampling, stop strings, output format, agent and session;
   `custom_tools.py` shows custom tools to the model as functions.
3. `events.py` writes the replies: whole objects or chunks, for chat and for completions.
"""
