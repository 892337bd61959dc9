"""Small experiments on the real engine: each has a measurement, a wrong statement of textbooks, and the right figure.

`headrace lab NAME` runs one, and `docs/labs` has a page of each."""
