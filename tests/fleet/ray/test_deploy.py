"""What `headrace deploy` refuses before it starts anything, with and without Ray."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli import main
from headrace.ray.app import app_of


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", "deploy", *words])
    try:
        main.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.fixture
def app(tmp_path: Path) -> Path:
    pytest.importorskip("yaml")
    path = tmp_path / "app.yaml"
    path.write_text("models:\n  - model: builtin\n    max_replicas: 3\n")
    return path


def test_a_file_is_checked_without_ray(
    app: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert command(monkeypatch, str(app), "--check") == 0
    assert "1 to 3 engines of builtin" in capsys.readouterr().out
    assert command(monkeypatch, str(app)) == 1
    assert "headrace[ray]" in capsys.readouterr().err
    app.write_text("models:\n  - model: builtin\n    max_replicas: 0\n")
    assert command(monkeypatch, str(app), "--check") == 2
    assert "models.0.max_replicas: 0" in capsys.readouterr().err


@pytest.fixture
def service() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """The address of a server that answers every call of Ray's control service, and the answers that it will give: None
    for a reply, or the status of an error."""
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("ray.serve")
    answers: list[Any] = []

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            def answer(request: bytes, context: Any) -> bytes:
                status = answers.pop()
                if status is not None:
                    context.abort(status, "refused")
                return b""

            assert not [key for key, _ in details.invocation_metadata if key == "authorization"]
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", answers
    server.stop(None)


def test_S_34_a_cluster_that_needs_no_token_is_refused_with_the_commands(service: tuple[str, list[Any]]) -> None:
    import grpc

    from headrace.ray.deploy import ClusterError, refuse_open

    address, answers = service
    answers.append(None)
    with pytest.raises(ClusterError, match="without a token") as refused:
        refuse_open(address)
    for word in ("RAY_AUTH_MODE=token", "ray get-auth-token --generate", "--include-dashboard=false"):
        assert word in str(refused.value)
    answers.append(grpc.StatusCode.UNIMPLEMENTED)
    with pytest.raises(ClusterError, match="does not answer: UNIMPLEMENTED"):
        refuse_open(address)
    answers.append(grpc.StatusCode.UNAUTHENTICATED)
    refuse_open(address)


def test_serves_config_is_what_the_file_says() -> None:
    pytest.importorskip("ray.serve")
    from ray.serve.config import AutoscalingConfig

    from headrace.ray.deploy import autoscaling
    from headrace.ray.scaling import replicas_for

    [model] = app_of({"models": [{"model": "builtin", "max_replicas": 3, "downscale_delay_seconds": 60}]}).models
    config = AutoscalingConfig(**autoscaling(model))
    assert (config.min_replicas, config.max_replicas, config.downscale_delay_s) == (1, 3, 60)
    context = SimpleNamespace(aggregated_metrics=None, target_num_replicas=2)
    assert config.policy.get_policy()(context) == replicas_for(context) == (2, {})
