"""Anthropic's Messages.

1. `routes.py` takes a request; keys are accepted and not looked at.
2. `requests.py` checks the body, block by block, and translates it; headers and metadata may tell
   which session is asking.
3. `events.py` writes the stream in the order clients rely on, and the message it adds up to; it
   also shows models as Anthropic's clients list them.

Errors in Anthropic's shape are in `http/errors.py`.
"""
