"""`headrace engine`: an engine without HTTP, for a front on another host; and the flags of that front.

A composition root of `fleet.remote`: reads the files that the flags name, and hands over their contents.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from headrace.cli.options import build, options
from headrace.protocol.config import EngineConfig, Rendezvous, ServerConfig
from headrace.protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace.engine.client import EngineClient
    from headrace.secure.credentials import Credentials

FRONT_FIELDS = ("model", "tokenizer", "revision", "seed", "skip_tokenizer_init")
"""The settings of an engine that its front reads, too."""
NOT_REMOTE = ("models_dir", "slot_save_path")
"""Settings of a server that need an engine on the same host."""


class FleetFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The files by which an engine and its front, or the hosts of ranks, prove themselves to each other."""

    fleet_secret_file: Annotated[
        str | None,
        msgspec.Meta(description="File of the secret that all hosts share: 32 bytes or more."),
    ] = None
    tls_cert: Annotated[
        str | None, msgspec.Meta(description="PEM file of the certificate that the other side sees.")
    ] = None
    tls_key: Annotated[
        str | None, msgspec.Meta(description="PEM file of the certificate's key, without a password.")
    ] = None
    tls_ca: Annotated[
        str | None,
        msgspec.Meta(description="PEM file of the CA that the other side's certificate must come from."),
    ] = None


class RankFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of an engine whose other ranks are on other hosts."""

    rendezvous: Annotated[
        str | None,
        msgspec.Meta(
            description="IP:PORT of this host at which the other ranks come, each by a headrace rank on its own host; "
            "needs the files of the fleet, and with --tensor-parallel-size the extra torch. See howto-scale.md."
        ),
    ] = None
    distributed_interface: Annotated[
        str | None,
        msgspec.Meta(
            description="Network interface through which ranks of several hosts gather, unencrypted: a trusted "
            "network. Stages of a pipeline need none."
        ),
    ] = None


class FrontFlags(FleetFlags, frozen=True, kw_only=True):
    """The flags of a front."""

    engine: Annotated[
        list[str] | None,
        msgspec.Meta(
            description="HOST:PORT of a headrace engine that computes, in place of a process here; may be given "
            "several times. MODEL is then read for its tokenizer and settings only. See howto-scale.md."
        ),
    ] = None


@options(EngineConfig, FleetFlags, RankFlags, skip=("model", "seed"))
def engine(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or 'builtin'.")] = "builtin",
    *,
    listen: Annotated[str, typer.Option(metavar="IP:PORT", help="Address to listen on; port 0 chooses a free one.")],
    **fields: Any,
) -> None:
    """Run an engine without HTTP, for one front: headrace serve MODEL --engine IP:PORT, on another host.

    Both sides need a certificate of one CA, and the same secret; see howto-scale.md. Exit status: 0 after a signal, 1
    if the engine did not start, or not again, 2 for a flag or a value at fault.
    """
    config = build(EngineConfig, fields | {"model": model, "rendezvous": rendezvous_of(fields)})
    if config.scheduling_policy == "auto":
        # The front alone knows the holders of keys. With one of them, fair is the order of arrival.
        config = msgspec.structs.replace(config, scheduling_policy="fair")
    host, port = address_of("listen", listen)
    credentials = credentials_of(build(FleetFlags, fields), is_server=True)
    from headrace import hub
    from headrace.engine import logs
    from headrace.engine.library.model_settings import with_adapter
    from headrace.engine.links import ProcessLink
    from headrace.fleet.remote.server import EngineServer, logger

    logs.set_up("info")
    config = with_adapter(config)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        bound = f"an address of this machine and a free port ({error.strerror or error})"
        raise RequestError("listen", listen, bound) from error
    with listener:
        logger.info("listens on %s port %d; loading %s", *listener.getsockname()[:2], model)
        server = EngineServer(
            ProcessLink(config, log_level="info"),
            credentials,
            lambda: hub.weights_digest(config.model, config.revision),
        )

        async def run() -> None:
            task = asyncio.create_task(server.serve(listener))
            for name in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(name, task.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await task

        asyncio.run(run())


def remote_client(
    engine: EngineConfig, server: ServerConfig, flags: FrontFlags
) -> Callable[[EngineConfig, ServerConfig], EngineClient] | None:
    """Return a function that makes the client of the engine that the flags name; None if they name none.

    Raises `RequestError` for a flag that would have no effect, or that is missing.
    """
    if flags.engine is None:
        if engine.rendezvous is None:
            for name in FleetFlags.__struct_fields__:
                if getattr(flags, name) is not None:
                    raise RequestError(name, getattr(flags, name), "left out without --engine or --rendezvous")
        elif server.data_parallel_size != "1":
            raise RequestError("data_parallel_size", server.data_parallel_size, "1 with --rendezvous")
        elif server.models_dir is not None:
            raise RequestError("models_dir", server.models_dir, "left out with --rendezvous, which is one model's")
        return None
    if server.data_parallel_size != "1":
        raise RequestError(
            "data_parallel_size", server.data_parallel_size, "1 with --engine, given once for each engine"
        )
    for field in msgspec.structs.fields(EngineConfig):
        if field.name not in FRONT_FIELDS and (value := getattr(engine, field.name)) != field.default:
            raise RequestError(field.name, value, "left out with --engine: it is set where the engine runs")
    for name in NOT_REMOTE:
        if getattr(server, name) is not None:
            raise RequestError(name, getattr(server, name), "left out with --engine, which is on another host")
    addresses = [address_of("engine", text) for text in flags.engine]
    if len(set(addresses)) < len(addresses):
        raise RequestError("engine", ", ".join(flags.engine), "a different address each time")
    credentials = credentials_of(flags, is_server=False)

    def make(engine: EngineConfig, server: ServerConfig) -> EngineClient:
        from headrace import hub
        from headrace.engine.client import EngineClient
        from headrace.engine.records.crash_reports import CrashReports
        from headrace.fleet.engines.client import Fleet
        from headrace.fleet.remote.link import RemoteLink

        weights = functools.cache(lambda: hub.weights_digest(engine.model, engine.revision))
        links = [RemoteLink(host, port, credentials, weights) for host, port in addresses]
        bounds: dict[str, Any] = {
            "max_num_queued_reqs": server.max_num_queued_reqs,
            "max_num_queued_tokens": server.max_num_queued_tokens,
            "max_restarts": server.max_restarts,
            "watchdog_timeout": server.watchdog_timeout,
        }
        if len(links) == 1:
            client = EngineClient(links[0], **bounds)
        else:
            # A front that starts again finds the keys that its engines have kept.
            secret = blake2b(b"prefix keys", key=credentials.secret[: blake2b.MAX_KEY_SIZE], digest_size=32).digest()
            client = Fleet(links, router=server.router, secret=secret, **bounds)
        if server.crash_report_dir:
            for replica in client.replicas:
                replica.reports = CrashReports(server.crash_report_dir, engine, server)
        return client

    return make


def rendezvous_of(fields: dict[str, Any]) -> Rendezvous | None:
    """Return where the ranks of other hosts come, of the flags of a command; None if they come from none.

    Raises `RequestError` for a flag or a file at fault."""
    flags, files = build(RankFlags, fields), build(FleetFlags, fields)
    if flags.rendezvous is None:
        if flags.distributed_interface is not None:
            bound = "left out without --rendezvous"
            raise RequestError("distributed_interface", flags.distributed_interface, bound)
        return None
    host, port = address_of("rendezvous", flags.rendezvous)
    check_interface(flags.distributed_interface)
    credentials_of(files, is_server=True)
    interface = flags.distributed_interface
    return Rendezvous(host=host, port=port, distributed_interface=interface, **msgspec.structs.asdict(files))


def check_interface(name: str | None) -> None:
    """Check the interface of the gathers, if there is one, and that a library to move them is installed. Raises
    `RequestError`."""
    if name is None:
        return
    from headrace.parallel.gloo import address_of as address_of_interface
    from headrace.parallel.gloo import require_gloo

    address_of_interface(name)
    require_gloo()


def address_of(name: str, text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[IPv6]:PORT`. Raises `RequestError`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not text.startswith("[")):
        raise RequestError(name, text, "an address such as 10.0.0.5:7070 or [fd00::5]:7070")
    return host, int(port)


def credentials_of(flags: FleetFlags, is_server: bool) -> Credentials:
    """Read the files of the flags. Raises `RequestError`."""
    from headrace.secure.credentials import Credentials

    names: list[str] = []
    for name in FleetFlags.__struct_fields__:
        value = getattr(flags, name)
        if value is None:
            raise RequestError(name, None, "a file; see howto-scale.md")
        names.append(value)
    return Credentials.read(*names, is_server=is_server)
