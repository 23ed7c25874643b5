"""Model Context Protocol: agents as tools for other agents, over streamable HTTP.

1. `tools.py` defines the tools: their arguments, and what each does with agents.
2. `endpoint.py` serves them at `/mcp` with the package `mcp`. The package is optional, and
   `entrypoints/mcp_loader.py` imports it on the first request.
"""
