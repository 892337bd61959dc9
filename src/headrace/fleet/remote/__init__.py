"""An engine on another host: `link.RemoteLink` is the front's side of it, `server.EngineServer` the engine's.

Frames go over TCP with mutual TLS, between hosts whose clocks differ. Made by the commands `serve` and `engine`.
"""
