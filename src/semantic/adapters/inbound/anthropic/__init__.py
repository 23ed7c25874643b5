"""Anthropic's Messages API.

1. `routes.py` receives a request and starts the reply.
2. `requests.py` validates the body, block by block, and translates it; headers and metadata may
   say which session is asking.
3. `events.py` writes the stream in the order clients rely on, and the whole message that the
   stream adds up to; it also lists models in Anthropic's form.

`http/errors.py` has errors in Anthropic's form.
"""
