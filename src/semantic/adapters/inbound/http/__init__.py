"""What all protocols need from HTTP, in the order in which a request meets it.

1. `connections.py`: how many connections there may be, and how long a client may stay silent.
2. `middleware.py`: short paths, the access log, HEAD, foreign hosts and pages, compressed and
   oversized bodies.
3. `guard.py`: whose request it is, by its API key, and whether that key allows it.
4. `errors.py`: one table from errors to statuses, and to both vendors' forms.
5. `streaming.py`: replies as server-sent events, in one loop: heartbeats, progress, failure, and
   a cancel when the client disconnects.

`health.py` has the endpoints that belong to no protocol.
"""
