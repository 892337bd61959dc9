"""The engine and its client: the core in its own process, links to it, resumption, admission, recording, replay.

Others use `build.build_engine`, `core.EngineCore`, `client.EngineClient` and `generation`. Knows no HTTP.
"""
