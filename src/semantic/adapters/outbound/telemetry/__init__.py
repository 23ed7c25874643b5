"""Metrics and traces.

1. The parts of the server count events where they happen, in the `Counts` of `ports/telemetry.py`.
2. `metrics.py` implements `TelemetryPort`: it puts measurements into histograms, and a collector
   reads the counts and current usage whenever `/metrics` is scraped. It keeps an hour of history
   of a few of them.
3. `tracing.py` makes the spans of a request when it has ended, if a tracer is configured.
"""
