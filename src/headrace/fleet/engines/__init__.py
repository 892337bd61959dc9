"""Engines behind one client: `client.Fleet`, and `local`, which starts several on this host.

Above the engine, unlike the pure parts of the fleet. Called by `serve` and `async_llm`.
"""
