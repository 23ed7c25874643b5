"""The operator's endpoints, under `/admin`.

`routes.py` loads, swaps and unloads models, drains the server before a shutdown, and changes the
settings that can change while it runs.
`models.py` has the bodies that describe models, and the downloads.

If API keys are configured, `http/guard.py` requires an admin key on these paths. A swap reports its
progress as events on `/v1/events`.
"""
