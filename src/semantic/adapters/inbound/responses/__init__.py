"""OpenAI's Responses: a response is a turn, and its id the turn's.

1. `routes.py` takes a request, and finds the turn it goes on from. It drives the reply to its end,
   in the background too, and keeps what was made lately.
2. `requests.py` checks the body and makes messages of its input items.
3. `events.py` writes the response as it grows, the events that tell of it, and what it repeats of
   its request; it also makes responses again from logged turns.
"""
