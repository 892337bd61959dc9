"""Observation of the engine: metrics, traces, the audit of weight files, and the simulated executor for tests.

Other rooms use `metrics.ServerMetrics`, `tracing.Tracer` and `simulated.SimulatedExecutor`.
"""
