"""`deploy`: makes an app of app.yaml run in a Ray cluster, or removes it.

It refuses a cluster without token authentication, in which everybody who reaches a port of Ray runs code on every host.
Ray Serve's own proxies are not started. Called by `cli.deploy`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import grpc
import msgspec
import ray
from ray import serve

from headrace.protocol.errors import HeadraceError
from headrace.ray import identity
from headrace.ray.app import App, Model, Placement
from headrace.ray.engine import EngineActor
from headrace.ray.front import FrontActor
from headrace.ray.plans import ENGINE, FRONT, EnginePlan, FrontPlan, engine_app, front_app

logger = logging.getLogger("headrace.server")

START = """\
  export RAY_AUTH_MODE=token
  ray get-auth-token --generate
  ray start --head --include-dashboard=false"""
POLICY = "headrace.ray.scaling:replicas_for"
PROBED = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
"""A call to Ray's control service that changes nothing."""
PROBE_S = 10.0
CHECK_S = 1.0
"""Seconds between two checks of an actor's health."""
LOOK_BACK_S = 15.0
"""Seconds of reports whose mean decides how many engines there are."""
PATIENCE_S = 30.0
"""Seconds that an answer to a check may take: an actor's host may be busy."""
MAX_CALLS = 1024
"""Calls of engines that a front takes at once."""
NUM_TRIES = 3
"""Starts of actors that may fail before a deployment has failed."""
MAX_LINES = 1
"""Lines of an actor's error that are shown: the last ones."""
POLL_S = 0.5


class ClusterError(HeadraceError):
    """There is no Ray cluster to deploy to, or it is not safe to use."""

    code = "cluster_error"


def connect(address: str) -> None:
    """Connect to the cluster. Raises `ClusterError` if there is none, if it refuses the token, or if it needs none."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # of many kinds
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise ClusterError(f"no Ray cluster at {address!r} lets this command in: {text}\nStart one:\n{START}\n"
                           "and set RAY_AUTH_MODE=token here, too, with the same token.") from error  # fmt: skip
    try:
        refuse_open(ray.get_runtime_context().gcs_address)
    except BaseException:
        ray.shutdown()
        raise


def refuse_open(address: str) -> None:
    """Call Ray's control service at HOST:PORT without a token. Raises `ClusterError` unless it refuses that."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(PROBED, request_serializer=None, response_deserializer=None)
        try:
            call(b"", timeout=PROBE_S)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return
            raise ClusterError(f"the Ray cluster at {address} does not answer: {error.code().name}") from error
    raise ClusterError(
        f"the Ray cluster at {address} takes commands without a token: who reaches its ports runs code on all its "
        f"hosts. Stop it (ray stop), and start it with tokens:\n{START}\nOn the other hosts, with the same token in "
        "~/.ray/auth_token and RAY_AUTH_MODE=token: ray start --address=HEAD:6379"
    )


def deploy(app: App, seconds: float) -> str:
    """Run `app`, in place of the one that ran under its name, and wait until it makes tokens. Returns the front's
    address.

    Raises `ClusterError` if it does not within `seconds`, and `RequestError` for credentials that will not do.
    """
    folder = Path(app.credentials or "")
    if not folder.exists():
        identity.make(folder)
        logger.warning("made certificates and a secret in %s; keep the folder, and keep it private", folder)
    end = time.monotonic() + seconds
    serve.start(proxy_location="Disabled")
    try:
        serve.run(_front(app, folder), name=front_app(app.name), route_prefix=None)
        for place, model in enumerate(app.models):
            serve.run(_engine(app, place, model, folder), name=engine_app(app.name, model.label), route_prefix=None)
    except RuntimeError as error:
        raise ClusterError(f"Ray Serve could not start it: {_reason(app) or error}") from error
    front = serve.get_deployment_handle(FRONT, front_app(app.name))
    status: dict[str, str] = {}
    while status.get("status") != "ready":
        if time.monotonic() > end:
            raise ClusterError(f"not ready within {seconds:.0f} s: {status.get('status', 'no answer')}")
        time.sleep(POLL_S)
        status = front.status.remote().result(timeout_s=PATIENCE_S)
    return status["url"]


def _reason(app: App) -> str:
    """Return the last lines of Ray Serve's message on why the actors of `app` do not start; "" without one."""
    running = serve.status().applications
    names = [front_app(app.name), *(engine_app(app.name, model.label) for model in app.models)]
    messages = [
        deployment.message
        for name in names
        if name in running
        for deployment in running[name].deployments.values()
        if deployment.message and deployment.status != "HEALTHY"
    ]
    # Lines that are indented are places in the code.
    lines = [[line for line in message.splitlines() if line and not line.startswith(" ")] for message in messages]
    return "\n".join("\n".join(each[-MAX_LINES:]) for each in lines)


def delete(app: App) -> list[str]:
    """Remove the applications that run under the name of `app`. Returns the names of its applications that ran."""
    names = [front_app(app.name), *(engine_app(app.name, model.label) for model in app.models)]
    running = [name for name in names if name in serve.status().applications]
    for name in running:
        serve.delete(name)
    return running


def _front(app: App, folder: Path) -> Any:
    model = app.models[0]
    plan = FrontPlan(
        model.label,
        model.engine_config("models.0"),
        app.front.server_config([model.label]),
        identity.identity_of(folder, "front", app.send_credentials),
    )
    deployment = serve.deployment(
        name=FRONT,
        num_replicas=1,
        ray_actor_options=_options(app.front),
        max_ongoing_requests=MAX_CALLS,
        max_constructor_retry_count=NUM_TRIES,
        health_check_period_s=CHECK_S,
        health_check_timeout_s=PATIENCE_S,
        graceful_shutdown_timeout_s=plan.server.shutdown_timeout + PATIENCE_S,
    )(FrontActor)
    return deployment.bind(msgspec.msgpack.encode(plan))


def _engine(app: App, place: int, model: Model, folder: Path) -> Any:
    plan = EnginePlan(
        model.label,
        model.engine_config(f"models.{place}"),
        identity.identity_of(folder, "engine", app.send_credentials),
        app.ports,
        front_app(app.name),
        model.target_queue_seconds,
    )
    number: dict[str, Any] = {"num_replicas": model.min_replicas}
    if model.most_replicas > model.min_replicas:
        number = {"autoscaling_config": autoscaling(model)}
    deployment = serve.deployment(
        name=ENGINE,
        **number,
        ray_actor_options=_options(model),
        max_constructor_retry_count=NUM_TRIES,
        health_check_period_s=CHECK_S,
        health_check_timeout_s=PATIENCE_S,
        graceful_shutdown_timeout_s=model.drain_seconds,
    )(EngineActor)
    return deployment.bind(msgspec.msgpack.encode(plan))


def autoscaling(model: Model) -> dict[str, Any]:
    """Return the autoscaling config of a model's engines."""
    return {
        "min_replicas": model.min_replicas,
        "max_replicas": model.most_replicas,
        "upscale_delay_s": model.upscale_delay_seconds,
        "downscale_delay_s": model.downscale_delay_seconds,
        # Engines report every ten seconds, and their reports are already means over half a minute.
        "look_back_period_s": LOOK_BACK_S,
        "policy": {"policy_function": POLICY},
    }


def _options(placement: Placement) -> dict[str, Any]:
    return {
        "num_cpus": placement.num_cpus,
        "num_gpus": placement.num_gpus,
        "resources": dict(placement.resources),
    }
