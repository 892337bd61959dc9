"""The plans that `headrace deploy` sends through Ray, as bytes of msgpack: the task of each actor. Knows no Ray."""

from __future__ import annotations

import msgspec

from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.ray.identity import Identity

FRONT = "front"
ENGINE = "engine"
"""The names of the deployments, each in an application of Ray Serve."""
ANNOUNCE_S = 1.0
"""Seconds between two announcements of an engine."""


class EnginePlan(msgspec.Struct, frozen=True):
    """An engine of `model`. `ports` are the first and the last that it may listen on, or none: then any. `front_app` is
    the application of its front."""

    model: str
    config: EngineConfig
    identity: Identity
    ports: list[int]
    front_app: str
    target_seconds: float


class FrontPlan(msgspec.Struct, frozen=True):
    """A front for the engines of `model`."""

    model: str
    engine: EngineConfig
    server: ServerConfig
    identity: Identity


def front_app(name: str) -> str:
    """Return the name of the front's application in the deployment `name`."""
    return name


def engine_app(name: str, model: str) -> str:
    """Return the name of the application of a model's engines."""
    return f"{name}-{model}"
