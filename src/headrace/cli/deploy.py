"""`headrace deploy`: a fleet on a Ray cluster, as a file says. A composition root of `ray`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.protocol.errors import HeadraceError


def deploy(
    app: Annotated[Path, typer.Argument(help="A YAML file with models and a front; see howto-scale.md.")],
    *,
    address: Annotated[
        str, typer.Option(help="HOST:PORT of the Ray cluster's head; auto: that of the cluster on this host.")
    ] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds to wait until the deployment makes tokens.")] = 600.0,
    check: Annotated[bool, typer.Option("--check", help="Read and check the file, and do nothing else.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the deployment that the file names.")] = False,
) -> None:
    """Run engines and a front on a Ray cluster, as the file says; again after a change of it.

    Needs the extra ray. Refuses a cluster without token authentication. Exit status: 0 when the front makes tokens, 1
    if the cluster will not do or the deployment did not start, 2 for a file at fault.
    """
    # Of modules that need no Ray.
    from headrace.ray.app import read

    plan = read(app)
    if check:
        num = f"{plan.models[0].min_replicas} to {plan.models[0].most_replicas}"
        print(f"{app}: {plan.name}, {num} engines of {plan.models[0].label}")
        return
    try:
        import ray

        from headrace.ray import deploy as deployment
    except ModuleNotFoundError as error:
        raise HeadraceError("this needs Ray, which is not installed: pip install 'headrace[ray]'") from error
    deployment.connect(address)
    try:
        if delete:
            names = deployment.delete(plan)
            print(f"removed: {', '.join(names)}" if names else f"{plan.name} does not run")
        else:
            print(f"ready: {deployment.deploy(plan, timeout)}")
    finally:
        ray.shutdown()
