"""Small experiments on the real engine: what each measures, what textbooks print wrongly, and the right figure.

`headrace lab NAME` runs one, and `docs/labs` has a page of each."""
