"""The served model, and swapping it for another while requests wait.

1. `gate.py`: admits every request. A request for the loaded model passes at once; a request for a
   model that is being loaded waits, and its client receives progress events.
2. `registry.py`: knows the loaded model and the available ones. A swap is one job on its thread:
   fetch and check the new model while the old one still serves, drain, exchange the two on the
   device thread, and load the old one again if that fails. It also unloads an idle model, and
   loads it again on demand.
3. `downloads.py`: downloads models while another one serves.
4. `runtime.py`: the settings that may change while the server runs.

ADR-007 explains why one model is loaded at a time, and what two would require.
"""
