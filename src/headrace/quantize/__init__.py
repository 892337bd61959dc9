"""Makes quantised checkpoints. Knows checkpoints, models on the reference backend and the layouts of others; must not
know requests or the server. Called by `cli.quantize`."""
