"""What every protocol needs of HTTP, in the order in which a request meets it.

1. `connections.py`: how many there may be, and how long a client may keep one waiting.
2. `middleware.py`: short paths, the access log, HEAD, hosts and pages that are refused, bodies
   that are unpacked and limited.
3. `errors.py`: one table from errors to statuses and to both vendors' shapes.
4. `streaming.py`: replies as server-sent events, in one loop: signs of life, progress, failure,
   and a cancel when the client leaves.

`health.py` and `docs_page.py` are the endpoints that belong to no protocol.
"""
