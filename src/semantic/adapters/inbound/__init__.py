"""The first and the last chapter of a request: HTTP in, HTTP out.

1. `http/` is passed by all: connections, middleware, errors, streams, health, the page of docs.
2. A protocol's `routes.py` takes the request; its `requests.py` checks the body and translates it
   to the domain's `ChatRequest`, with the builders of `wire.py`. What cannot be honoured is
   refused by the name of its field.
3. `ports.inbound` starts it; events come back.
4. The protocol's `events.py` makes the vendor's shapes of them, whole or frame by frame; their
   types are what the OpenAPI document shows.

`openai/`, `responses/` and `anthropic/` speak as the vendors do; `agents/` is our own protocol,
and `admin/` is for whoever runs the server. `page/` is what a browser sees, fed by the same API.
"""
