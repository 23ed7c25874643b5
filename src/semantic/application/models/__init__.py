"""Which model is served, and how another takes its place while requests wait.

1. `registry`: knows the model that is loaded and those that could be. A swap is one job on its
   thread: fetch and check the other model while this one still serves, let what runs end, exchange
   the two on the device's thread, and bring the old one back if that fails. It unloads a model that
   nobody has asked for, and loads it again.
2. `gate`: stands before every request. Whoever asks for the model that is there goes through;
   whoever asks for one that is on its way waits, and is told what is being done.
3. `runtime`: the settings that may change while the server runs.

ADR-007 says why there is one model at a time, and what two would take.
"""
