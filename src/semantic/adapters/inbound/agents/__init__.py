"""Our own protocol: agents as things one can hold.

1. `routes.py` makes, lists, changes, forks, rewinds, explains, exports and imports agents.
2. `generate.py` answers what is new in an agent's conversation; the server keeps the rest.
3. `cache.py` shows the cache, looks after it by hand, and streams what happens.

`requests.py` holds all bodies that clients send (unknown fields are refused), `views.py` what is
answered; each answer shows an example made from its fields.
"""
