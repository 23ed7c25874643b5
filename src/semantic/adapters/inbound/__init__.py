"""The first and the last chapter of a request: HTTP in, HTTP out.

1. Every request passes `http/`: connection limits, middleware, API keys.
2. The protocol's `routes.py` receives it; its `requests.py` validates the body and translates it
   into the domain's `ChatRequest`, with the builders of `wire.py`. Anything that cannot be honoured
   is refused with the name of its field.
3. `ports/inbound.py` is what the routes call; events come back.
4. The protocol's `events.py` turns them into the vendor's objects, and `http/streaming.py` sends
   them, whole or as server-sent events. Their types are what the OpenAPI document shows.

`openai/`, `responses/` and `anthropic/` speak the vendors' protocols, `agents/` our own; `admin/`
is for operators, and `page/` is the web page, which uses the same API.
"""
