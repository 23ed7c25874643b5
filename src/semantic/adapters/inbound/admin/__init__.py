"""The operator's endpoints, under `/admin`.

`routes.py` loads, swaps and unloads models, drains the server before it is stopped, and changes
the settings that may change while it runs.

Where keys are configured, `http/guard.py` asks for an admin key on these paths. A swap reports its
progress as events on `/v1/events`.
"""
