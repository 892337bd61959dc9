"""The engine's own process: `python -m headrace.engine.child FD`, started by `engine.links.ProcessLink`.

It builds the engine of the config in the first frame, then steps while there is work and sleeps on the socket while
there is none. One thread, no event loop; it knows neither HTTP nor text. When the server is gone the socket is at its
end, and this process ends too. A fault that belongs to no request ends it with a traceback on stderr and a `Failed`
frame.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable

from headrace import env
from headrace.core.journal import Journal
from headrace.core.reports import KeyReports
from headrace.engine import logs, orders
from headrace.engine.adapter_reads import AdapterReads
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore, Executor, Ticket
from headrace.engine.holding import Hold
from headrace.engine.parts import parts_of
from headrace.engine.records.black_box import MAX_CHUNKS, BlackBox, StepShape
from headrace.protocol import frames
from headrace.protocol.adapters import LoadAdapter
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.step import Abort, Add, ResetPrefixCache, ScheduledBatch, StepOutput, StepResult
from headrace.text.bounded import die_with_parent

logger = logging.getLogger("headrace.engine")

LAST_WORDS_S = 0.3
"""Time in which the engine's own thread notices that its ranks are lost."""

Receive = Callable[[bool], "list[frames.ToEngine] | None"]
Send = Callable[[frames.FromEngine], None]


def drive(core: EngineCore, receive: Receive, send: Send) -> None:
    """Step `core` until a `Shutdown` or the end of the connection. The same loop runs in a thread for `InprocLink`.

    Args:
        receive: called between steps; with True it may wait, with False it must not. Returns None at the end of the
            connection.
        send: may block, so that the engine waits for a server that is slow to read.
    """
    debug = env.debug_level()
    journal = core.journal = core.journal or Journal(core.scheduler, core.clock)
    reports: KeyReports | None = None
    hold, reads = Hold(), AdapterReads(core, send)
    send(frames.Ready(core.info))
    while True:
        if core.on_idle is not None and not core.has_work() and core.num_steps:
            core.on_idle()
        reads.settle()
        has_work = core.has_work()
        messages = hold.wait(receive) if has_work and hold.must_wait else reads.wait(receive, not has_work)
        if messages is None:
            return
        for message in messages:
            match message:
                case Add(request, times):
                    try:
                        core.add(request, times)
                    except RequestError as error:
                        reason = (error.field, repr(error.value)[:80], error.bound, error.code)
                        send(frames.Rejected(request.request_id, *reason))
                    except Exception as error:
                        # A fault of the engine, but it belongs to one request: the others go on.
                        logger.error("a request could not be taken in", exc_info=error)
                        reason = ("request", type(error).__name__, "one that the engine can take in", "internal_error")
                        send(frames.Rejected(request.request_id, *reason))
                case Abort(request_id):
                    core.abort(request_id)
                case ResetPrefixCache():
                    core.reset_prefix_cache()
                case frames.Watch(is_watched):
                    journal.watch(is_watched)
                case frames.ShareKeys(secret):
                    reports = share_keys(core, secret, reports)
                case frames.Order(order_id, body):
                    order = orders.decode(body)
                    if isinstance(order, LoadAdapter):
                        reads.begin(order_id, order)
                    else:
                        send(frames.Reply(order_id, orders.carry_out(core, order, hold)))
                case frames.Shutdown():
                    return
                case frames.Start():
                    raise frames.TransportError("the engine was started already")
        # After aborts alone there is no step to compute, but the gauges have changed.
        output = StepOutput(step_id=-1)
        if core.has_work() and not hold.must_wait:
            output = core.step()
            hold.stepped()
        output.stats = output.stats or core.stats()
        output.cache_keys = None if reports is None else reports.take()
        for part in parts_of(output) if output.has_rows else (output,):
            send(frames.Output(part))
        if debug:
            show(output)


def share_keys(core: EngineCore, secret: bytes, reports: KeyReports | None) -> KeyReports:
    """Return the reports of the prefix cache's keys; the next one has all keys."""
    if reports is not None and reports.secret == secret:
        reports.request_all()
        return reports
    if core.scheduler.sequences:
        raise frames.TransportError("the keys of the cache can not change while requests are open")
    core.reset_prefix_cache()
    return KeyReports(core.scheduler.cache, secret, secrets.randbits(62))


def show(output: StepOutput) -> None:
    """Print one line for a step on stderr, for HEADRACE_DEBUG=1."""
    stats = output.stats
    gauges = f"running={stats.num_running} waiting={stats.num_waiting} blocks={stats.num_blocks_held}" if stats else ""
    milliseconds = 1e3 * (output.end_time - output.start_time)
    ended = {request_id[:8]: finish.reason for request_id, finish in output.finished.items()}
    line = f"step {output.step_id} {milliseconds:.2f} ms rows={len(output.request_ids)} {gauges} ended={ended}"
    with contextlib.suppress(OSError):  # a full or closed log must not end the engine
        print(line, file=sys.stderr)


class BlackBoxExecutor(Executor):
    """An executor that writes the shape of each step into a black box before it computes the step."""

    def __init__(self, core: EngineCore, box: BlackBox) -> None:
        self.inner: Executor = core.executor
        self._core = core
        self._box = box

    def start(self, batch: ScheduledBatch) -> Ticket:
        num = min(len(batch), MAX_CHUNKS)
        shape = StepShape(
            batch.step_id,
            time.monotonic(),
            len(batch),
            [seq.request_id for seq in self._core.scheduler.flight[:num]],
            batch.starts[:num],
            batch.lens[:num],
            [len(table) for table in batch.block_tables[:num]],
            sum(len(draft.token_ids) for draft in batch.drafts.values()),
            len(batch.copies),
        )
        self._box.begin(shape)
        return batch.step_id, self.inner.start(batch)

    def finish(self, ticket: Ticket) -> StepResult:
        step_id, inner = ticket
        result = self.inner.finish(inner)
        self._box.end(step_id)
        return result

    def close(self) -> None:
        self.inner.close()


def end_without_ranks(reason: str) -> None:
    """End this process, unless it ends by itself in a moment: where a step was under way, that has failed and says
    why."""
    time.sleep(LAST_WORDS_S)
    logger.error("%s", reason)
    # Lines are written on a thread, which ends with the process.
    logging.shutdown()
    os._exit(1)


def set_up_process() -> None:
    """Let the parent alone decide when this process ends, and let crashes leave their stacks."""
    # A Ctrl-C or a SIGTERM to the whole group must not cut open streams.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    die_with_parent()
    logs.set_up("warning")
    # A crash in native code leaves its stacks, too.
    faulthandler.enable()
    faulthandler.register(frames.STACKS_SIGNAL, all_threads=True)


def main(fd: int, build: Callable[[EngineConfig, bool], EngineCore] | None = None) -> int:
    """Serve one socket until it closes. Returns the exit status.

    `build` makes the engine of the config in the first frame; by default see `engine.build.build_engine`.
    """
    build = build or functools.partial(build_engine, on_lost=end_without_ranks)
    set_up_process()
    faulthandler.register(frames.LAST_WORDS_SIGNAL, all_threads=True)
    channel = frames.EngineSocket(socket.socket(fileno=fd))
    core = None
    box = None
    try:
        start = channel.receive_start()
        if start is None:
            return 0
        if (start.log_level, start.log_format) != ("warning", "text"):
            logs.set_up(start.log_level, start.log_format)
        if start.black_box is not None:
            box = BlackBox.inherit(start.black_box)
            faulthandler.enable(box.stacks_file)
            faulthandler.register(frames.LAST_WORDS_SIGNAL, box.stacks_file, all_threads=True)
        if start.cpus:
            os.sched_setaffinity(0, start.cpus)
        core = build(start.config, start.is_restart)
        if box is not None:
            core.executor = BlackBoxExecutor(core, box)
        # Modules, weights and the model live as long as this process: the collector need not walk them in mid-step.
        gc.collect()
        gc.freeze()
        drive(core, channel.receive, channel.send)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except BaseException as error:
        # The server reports a refusal to start in one line; every other error gets its traceback.
        if core is not None or not isinstance(error, HeadraceError):
            if box is not None:
                box.note_error(error)
            else:
                logger.error("the engine failed", exc_info=error)
        # The message of an unforeseen exception may quote a request (S-22), except before the first request.
        message = str(error) or repr(error) if isinstance(error, HeadraceError) or core is None else ""
        with contextlib.suppress(OSError):
            channel.send(frames.Failed(type(error).__name__, message))
        return 1
    finally:
        if core is not None:
            core.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
