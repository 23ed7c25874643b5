"""Ollama's API, for clients that speak only it.

1. `origins.py`: on Ollama's port, desktop apps and browser extensions may use the inference routes.
2. `routes.py` receives a request, finds its model and starts the reply.
3. `requests.py` validates the body and translates it; `conversation.py` translates messages, and
   gives ids to tool calls that have none.
4. `events.py` writes the reply, whole or as one JSON object on each line.

`models.py` describes models as Ollama's files would. `http/errors.py` formats errors for Ollama's
clients.
"""
