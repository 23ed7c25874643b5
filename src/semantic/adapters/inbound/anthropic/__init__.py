"""Anthropic's Messages API.

1. `routes.py` receives a request and starts the reply.
2. `requests.py` validates the body, block by block, and translates it; headers and metadata may
   identify the client's session.
3. `events.py` writes the stream in the order that clients rely on, and builds the whole message
   from the stream's events; it also lists models in Anthropic's format.

`http/errors.py` formats errors for Anthropic's clients.
"""
