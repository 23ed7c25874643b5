"""The simulation of EXP-013: which blocks to keep when memory or disk is full.

1. `traces.py`: workloads, as turns of agents over days.
2. `machine.py`: the real store with its eviction code, driven by a trace.
3. `policies.py`: the candidates that rank blocks, and an oracle that knows the future.
4. `replay.py`: sends a trace to a real server and reads the ledger that it wrote.
"""
