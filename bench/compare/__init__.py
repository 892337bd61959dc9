"""headrace beside other CPU engines: the same work for each, in turn, on random weights of real shapes.

`python -m bench.compare`; how to use it and what the words mean is in docs/maintainers/compare.md.
"""
