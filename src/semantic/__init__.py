"""Semantic: an inference server that keeps every agent's KV cache.

Each package's docstring describes its modules. Imports go in one direction only:

    entrypoints -> adapters -> application -> ports -> domain

`domain/` has the values and rules, `ports/` the interfaces of the core, `application/` the use
cases, `adapters/` the protocols, models, devices and files, and `entrypoints/` the wiring and the
command line. To follow a request, start at `adapters/inbound/`; to follow a block of KV cache, at
`application/cache/`.

Together they are a server for one machine. `cluster/` is optional and has the same layers: servers
that share agents, and models split over processes. The others do not import it.
"""

__version__ = "0.2.0"
