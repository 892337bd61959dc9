"""From logits to a token: filters, keyed noise, penalties, the watermark.

Others use `sampler.Sampler` and, for tests and drafters, `noise`. Knows neither batches nor models.
"""
