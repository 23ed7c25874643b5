"""What the one who runs the server does to it while it runs: under `/admin`.

1. `routes`: models that are loaded, swapped and unloaded; a drain, before the server is stopped.

Like the rest it answers this machine alone unless the server was told otherwise; a key that guards
it is asked for by the path. Progress of a swap comes as events on `/v1/events`.
"""
