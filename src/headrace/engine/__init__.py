"""The engine and its client: the core in a process of its own, links to it, resumption, admission, recording, replay.

Others use `build.build_engine`, `core.EngineCore`, `client.EngineClient` and `generation`. Knows no HTTP.
"""
