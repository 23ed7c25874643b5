"""HTTP code that all protocols share, in the order in which a request passes it.

1. `connections.py` limits the number of connections, and how long a client may stay silent.
2. `middleware.py` completes short paths, writes the access log, answers HEAD, refuses foreign hosts
   and origins, and decompresses and limits bodies.
3. `guard.py` refuses requests on surplus connections, authenticates the request by its API key, and
   checks what the key permits.
4. `errors.py` has one table from errors to statuses and to both vendors' formats.
5. `streaming.py` sends replies as server-sent events in one loop, with heartbeats, progress and
   failures, and cancels the reply when the client disconnects.

`uploads.py` receives a large file. `health.py` has the endpoints that belong to no protocol.
If rules repair prompts, `repairs.py` tells them the client, and the client which of them changed
its request.
"""
