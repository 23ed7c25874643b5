"""What the server tells those who watch it.

1. The parts of the server count where things happen, in the `Counts` of `ports/telemetry.py`.
2. `metrics.py`: a `TelemetryPort` that takes what is measured at the event into histograms, and a
   collector that reads the counts and how much is used now whenever `/metrics` is asked for. It
   keeps the last hour of a few.
3. `tracing.py`: spans of a request and its parts, made when it has ended, if a tracer is there.
"""
