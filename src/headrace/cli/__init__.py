"""The `headrace` command. One module per subcommand; `main` puts them together and turns errors into one line.

The command line is a composition root: it may import every layer, but only inside the functions that need it, so
that `headrace --help` loads neither torch nor the server's libraries.
"""
