"""Which model is served, and how another replaces it while requests wait.

1. `gate.py`: every request passes it. One for the loaded model goes through at once; one for a
   model that is being loaded waits, and its client is told what is happening.
2. `registry.py`: knows the loaded model and those that could be. A swap is one job on its thread:
   fetch and check the new model while the old one still serves, drain, exchange the two on the
   device's thread, and bring the old one back if that fails. It also unloads an idle model, and
   loads it again on demand.
3. `runtime.py`: the settings that may change while the server runs.

ADR-007 says why there is one model at a time, and what two would take.
"""
