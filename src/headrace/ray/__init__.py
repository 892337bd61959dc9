"""Engines and a front as actors that Ray Serve places, restarts and scales: the schema of app.yaml, the actors, and the
work of `headrace deploy`.

Requests and tokens never pass through Ray: the front is headrace's own server, and its engines are connected as in
`fleet.remote`. Through Ray go the plans of the actors, and each second the address of an engine.
"""
