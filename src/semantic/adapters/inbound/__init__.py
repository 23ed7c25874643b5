"""HTTP requests in, HTTP responses out: the first and the last chapter of a request.

1. Every request passes `http/`: connection limits, middleware, API keys.
2. The protocol's `routes.py` receives it; its `requests.py` validates the body and translates it
   into the domain's `ChatRequest`, with the helpers of `wire.py`. It refuses values that the server
   cannot honour, and names the field. `images.py` reads the images of a request.
3. The routes call `ports/inbound.py`, which returns events.
4. The protocol's `events.py` translates them to the vendor's objects, and `http/streaming.py` sends
   these, whole or as server-sent events. The OpenAPI document shows their types.

`openai/`, `responses/`, `anthropic/` and `ollama/` implement the vendors' protocols, `agents/` our
own; `mcp/` offers agents as tools to models; `admin/` is for operators, and `page/` is the web
page, which uses the same API.
"""
