"""What looks at the engine: metrics, traces, the audit of weight files, and the simulated executor that tests run.

Others use `metrics.ServerMetrics`, `tracing.Tracer` and `simulated.SimulatedExecutor`.
"""
