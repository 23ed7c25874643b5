"""Semantic: an inference server that keeps every agent's KV cache.

Each package's docstring tells its chapter, with file names. Imports point one way:

    entrypoints -> adapters -> application -> ports -> domain

`domain/` has the values and rules, `ports/` the interfaces of the core, `application/` what the
server does, `adapters/` protocols, models, devices and files, `entrypoints/` the wiring and the
command line. To follow a request, start at `adapters/inbound/`; a block, at `application/cache/`.
"""

__version__ = "0.1.0"
