"""Our own protocol: agents as resources.

1. `routes.py` creates, lists, changes, forks, rewinds, explains, exports and imports agents, and
   continues their conversations: the client sends only what is new.
2. `generate.py` writes the replies, whole or as events.
3. `packs.py` makes, adds, lists and removes cache packs.
4. `cache.py` shows the cache, has the operations on it, and streams events.
5. `volatile.py` names what changes in an agent's prompts from turn to turn.

`requests.py` has the bodies that clients send (unknown fields are refused), `views.py` and
`cache_views.py` the bodies of the replies, each with an example for the OpenAPI document.
"""
