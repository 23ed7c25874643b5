"""OpenAI's Chat Completions, older Completions and Models.

1. `routes.py` takes a request and starts its replies, several if `n` says so.
2. `requests.py` checks and translates the body; `fields.py` holds what all of OpenAI's bodies
   share (`responses/` too): sampling, stops, the reply's form, and who is asking.
3. `events.py` shows the replies: whole objects or chunks, for chat and for completions.
"""
