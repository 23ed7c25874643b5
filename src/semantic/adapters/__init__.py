"""All code that depends on a framework, a file format or a protocol.

`inbound/` translates HTTP requests into calls of the core, and the core's events into replies.
`outbound/` implements the core's ports: model backends, storage and telemetry. `config/` reads
settings and keys and sets up logging. The three do not import each other. All of them may use
`images/`, which decodes image files, `validation.py`, which rewords pydantic's validation errors,
and `extras.py`, which says how to install a missing optional package.
"""
