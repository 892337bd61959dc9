"""Observation of the engine: metrics, traces, and the audit of weight files.

Other rooms use `metrics.ServerMetrics`, `tracing.Tracer` and `audit`.
"""
