"""The step: from a scheduled batch to sampled tokens.

Others use `runner.Runner`. Knows a `Program`, a sampler and a speculator; no requests and no policy.
"""
