"""OpenAI's Responses API: a response is a turn, and has the turn's id.

1. `routes.py` receives a request and finds the turn it continues. It drives the reply to its end,
   in the background too, and keeps recent responses.
2. `requests.py` validates the body; `items.py` turns its input items into messages.
3. `events.py` writes the response as it grows, and its events.
4. `stored.py` rebuilds responses and items from logged turns, for later requests that refer to
   them, and lists the settings that a response repeats.
5. `compaction.py` writes the response of `POST /v1/responses/compact`.
"""
