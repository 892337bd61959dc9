"""One module for each engine that `bench.compare` measures. Each runs in its own virtual environment, by
`python -m bench.peers.<module> JOB`, so nothing here may import headrace or another peer's packages.
"""
