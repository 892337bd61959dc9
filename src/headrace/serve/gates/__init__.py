"""The checks that every call passes before its route: sizes, hosts, keys, rates, deadlines, and the connection
itself."""
