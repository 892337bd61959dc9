"""`headrace explain`: why the requests of a recording took so long, without the model (`engine.records.blind`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

REPLY = re.compile("^(cmpl-|chatcmpl-|msg_|resp_)")
"""The prefixes of a call's id in the ids of replies."""


def explain(
    log: Annotated[Path, typer.Argument(help="A file that --record-schedule wrote.", exists=True, dir_okay=False)],
    request_id: Annotated[
        str | None,
        typer.Argument(help="The request, by the beginning of its reply's id or of its own; all if left out."),
    ] = None,
    *,
    without: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER",
            help="Estimate the request's times had this one not come: the beginning of its id. The scheduler runs "
            "again; the times of its steps are fitted to the recorded ones.",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="File for a trace of all steps and requests, for Perfetto.")
    ] = None,
) -> None:
    """Tell where each millisecond of a recorded request went, and why the prefix cache had no more of its prompt."""
    import msgspec

    from headrace.engine.records.blind import notes_of, open_recording
    from headrace.insight import explain as words
    from headrace.insight.counterfactual import simulate
    from headrace.insight.lives import Life, Lives
    from headrace.insight.trace import trace_of
    from headrace.protocol import step_model
    from headrace.protocol.errors import RequestError

    lives, recording = Lives(max_lives=2**62), open_recording(log)
    lives.reads.set_sizes(recording.head.info)
    lives.step_model = step_model.load(step_model.path_of_engine(recording.head.info))
    steps = []
    for note in notes_of(recording):
        lives.follow(note)
        steps.append(note.step)
    if trace is not None:
        trace.write_bytes(msgspec.json.encode(trace_of(steps, [*lives.ended.values(), *lives.open()])))
        print(f"{trace}: {len(steps):,} steps and {len(lives.ended):,} requests; open it at https://ui.perfetto.dev")
    if request_id is None and without is not None:
        raise RequestError("--without", without, "given with the ID of the request that it is about")
    if request_id is None:
        for life in sorted(lives.ended.values(), key=lambda life: -life.latency):
            part, seconds = max(life.parts.items(), key=lambda item: item[1])
            print(f"{life.request_id}  {1e3 * life.latency:9.1f} ms, most of it {part} ({1e3 * seconds:.1f} ms)")
        return

    def find(argument: str, begin: str) -> Life:
        plain = REPLY.sub("", begin).replace("-", "")
        chosen = [life for name, life in lives.ended.items() if name.replace("-", "").startswith(plain)]
        if len(chosen) != 1:
            raise RequestError(argument, begin, f"the beginning of one id of the {len(lives.ended):,} that ended")
        return chosen[0]

    def name_of(life: Life | None) -> str:
        return "a request before the recording" if life is None else life.request_id

    life = find("ID", request_id)
    explanation = words.explain(life, lives, name_of)
    ttft = "" if explanation.ttft is None else f", the first token after {1e3 * explanation.ttft:.1f} ms"
    print(f"{explanation.id}: {1e3 * explanation.latency:.3f} ms{ttft}, {explanation.finish_reason}")
    for each in explanation.parts:
        print(f"  {1e3 * each.seconds:10.3f} ms  {each.name}{f' (estimated by {explanation.split})' * each.estimated}")
    for verdict in explanation.prefix_cache:
        print(f"prefix cache: {verdict.num_cached_tokens} of {verdict.num_prompt_tokens} tokens; {verdict.sentence}")
    if explanation.num_draft_tokens:
        print(f"drafts: {explanation.num_accepted_tokens} of {explanation.num_draft_tokens} tokens were kept")
    if explanation.memory is not None:
        share = explanation.memory
        rate, limit = share.bytes_per_second / 1e9, share.limit / 1e9
        print(f"decoding read {rate:.2f} GB/s, {share.share:.0%} of the {limit:.2f} GB/s of the fastest step")
    for sentence in explanation.sentences:
        print(sentence)
    if without is not None:
        other = find("--without", without)
        simulation = simulate(open_recording(log), life.request_id, other.request_id)
        print(f"{'':28}{'TTFT':>12}{'latency':>15}")
        for name, run in zip(("recorded", "simulated", "simulated without it"), simulation, strict=True):
            print(f"{name:<28}{1e3 * (run.first_token - run.arrival.times[0]):9.1f} ms{1e3 * run.latency:12.1f} ms")
        print("simulated: the scheduler's decisions are exact, the times of its steps estimated")
