"""Metrics and traces.

1. The parts of the server count events where they happen, in the `Counts` of `ports/telemetry.py`.
2. `metrics.py` implements `TelemetryPort`: it records measurements in histograms, and a collector
   reads the counts and current usage whenever `/metrics` is scraped. It keeps an hour of history
   of selected metrics.
3. `tracing.py` creates the spans of a request when it has ended, if a tracer is configured.
"""
