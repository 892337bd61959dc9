"""Structured output through the whole engine: the law holds for it, and it can not fail in silence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from tests.support.law import assert_same, make_core, run
from tests.support.law import make_requests as make_strangers
from tests.support.serving import serve

from headrace import LLM, hub
from headrace.engine.build import build_engine
from headrace.engine.client import InprocClient
from headrace.engine.generation import TextClient
from headrace.grammar import matchers as grammar_matchers
from headrace.grammar.compile import WHITESPACE
from headrace.protocol.config import EngineConfig
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.defaults import sampling_defaults
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request
from headrace.serve.apis.openai import completions
from headrace.serve.call.call import ModelDefaults
from headrace.serve.call.service import ServedModel
from headrace.text.tokenizer import Tokenizer

PET = {
    "type": "object",
    "properties": {
        "name of the pet": {"type": "string", "maxLength": 12},
        "age in years": {"type": "integer", "minimum": 0, "maximum": 20},
        "kind of animal": {"enum": ["cat", "dog", "a very small grey mouse"]},
        "has an owner": {"type": "boolean"},
    },
    "required": ["name of the pet", "age in years", "kind of animal", "has an owner"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": PET, "minItems": 3, "maxItems": 3}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": PET},
    "compact": {"json": PET, "disable_any_whitespace": True},
    "regex": {"regex": "[A-Z][a-z]{3,8} (is|was) [a-z]{2,9}\\."},
    "choice": {"choice": ["yes, please", "no, thank you", "maybe"]},
    "grammar": {"grammar": 'root ::= "(" ("a" | "b" | root)* ")"'},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(hub.resolve("builtin"))


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[Request]:
    """Every form, greedy and not, with and without log-probabilities."""
    result = []
    for i, (name, form) in enumerate(FORMS.items()):
        for temperature in (0.0, 0.9):
            for logprobs in (None, 2):
                params = SamplingParams(
                    temperature=temperature, seed=50 + i, max_tokens=48, logprobs=logprobs,
                    structured_outputs=StructuredOutputs(**form),
                )  # fmt: skip
                ids = tokenizer.encode("Tom has a pet. " * (1 + 9 * (i % 2)))
                name_of = f"{name}@{temperature}:{logprobs}"
                result.append(Request(request_id=name_of, prompt_token_ids=ids, params=params))
    return result


Bits = tuple[list[int], bytes]


@pytest.fixture(scope="module")
def reference(requests: list[Request]) -> dict[str, Bits]:
    core = make_core(enable_prefix_caching=False)
    result: dict[str, Bits] = {}
    for request in requests:
        result |= run(core, [request])
    core.close()
    return result


def test_forced_tokens_or_not_the_text_is_the_same(requests: list[Request], reference: dict[str, Bits]) -> None:
    """Who asks for log-probabilities gets every token through the model, and the same ones."""
    for request in requests:
        if request.request_id.endswith(":2"):
            other = request.request_id.removesuffix("2") + "None"
            assert reference[request.request_id][0] == reference[other][0]
            assert len(reference[request.request_id][1]) == 3 * 8 * len(reference[other][0])


@pytest.mark.parametrize(
    "options",
    [
        {}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}, {"max_num_seqs": 4},
        {"num_gpu_blocks_override": 40, "max_model_len": 320},
    ],
    ids=["batch", "chunks", "queue", "small pool"],
)  # fmt: skip
def test_I_13_in_company(
    options: dict[str, Any], requests: list[Request], reference: dict[str, Bits], tokenizer: Tokenizer
) -> None:
    strangers = make_strangers()[:: (9 if options else 4)]
    alone = make_core()
    expected = reference | run(alone, strangers)
    alone.close()
    core = make_core(**options)
    mixed = [x for pair in zip(requests, strangers, strict=False) for x in pair]
    mixed += [request for request in (*requests, *strangers) if request not in mixed]
    assert_same(run(core, mixed), expected)
    core.scheduler.check()
    core.close()


def test_I_13_preempted(requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core(enable_prefix_caching=False)
    assert_same(run(core, requests, preempt_every=3), reference)
    assert core.stats().num_preemptions > 5
    core.close()


def test_I_13_resumed_anywhere_in_the_middle_of_a_forced_run_too(
    requests: list[Request], reference: dict[str, Bits]
) -> None:
    core = make_core()
    for request in requests[::3]:
        ids, logprob_bits = reference[request.request_id]
        for done in range(1, len(ids), 3):
            again = Request(
                request_id=f"{request.request_id}+{done}", prompt_token_ids=request.prompt_token_ids,
                params=request.params, resume_token_ids=ids[:done],
            )  # fmt: skip
            rest, rest_bits = run(core, [again])[again.request_id]
            assert rest == ids[done:], (request.request_id, done)
            assert rest_bits == logprob_bits[done * 3 * 8 :]
    core.close()


def test_I_13_with_masks_that_are_always_late(
    requests: list[Request], reference: dict[str, Bits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deferred chunks are computed again, and nobody else waits for them."""
    core = make_core()
    runner: Any = core.executor
    right, waits = runner.matchers.wait, []

    def wait(seq_ids: list[int], others: bool) -> set[int]:
        """Every other time all are late, whatever the machine's speed."""
        waits.append(seq_ids)
        return set(seq_ids) if len(waits) % 2 else right(seq_ids, others)

    monkeypatch.setattr(runner.matchers, "wait", wait)
    strangers = make_strangers()[::12]
    alone = make_core()
    expected = reference | run(alone, strangers)
    alone.close()
    assert_same(run(core, requests[::2] + strangers), expected)
    assert len(waits) > 20
    core.scheduler.check()
    core.close()


def test_control_a_mask_from_another_row_is_noticed(
    requests: list[Request], reference: dict[str, Bits], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    runner: Any = core.executor
    right, last = runner.matchers.mask, []

    def mask(seq_id: int, constraint: StructuredOutputs, tokens: list[int]) -> Any:
        last.append(right(seq_id, constraint, tokens))
        return last[-2] if len(last) > 40 else last[-1]

    monkeypatch.setattr(runner.matchers, "mask", mask)
    with pytest.raises(AssertionError):
        assert_same(run(core, requests), reference)
    core.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    result = LLM(num_threads=1, num_gpu_blocks_override=512, max_num_seqs=32)
    yield result
    result.close()


def test_offline_every_form(llm: LLM) -> None:
    import re

    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=200, structured_outputs=StructuredOutputs(**form))
        for form in FORMS.values()
        for seed in range(4)
    ]
    outputs = llm.generate(["Tom has a pet."] * len(params), params, use_tqdm=False)
    for one, output in zip(params, outputs, strict=True):
        form, answer = one.structured_outputs, output.outputs[0]
        assert form is not None
        if answer.finish_reason != "stop":
            assert answer.finish_reason == "length"
            continue
        if form.json is not None:
            jsonschema.validate(json.loads(answer.text), PET)
        elif form.regex is not None:
            assert re.fullmatch(form.regex, answer.text)
        elif form.choice is not None:
            assert answer.text in form.choice
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) > len(outputs) / 2
    assert llm.core.executor.matchers.num_forced > 20  # type: ignore[attr-defined]


def test_offline_refusals_come_before_any_work(llm: LLM) -> None:
    steps = llm.core.num_steps
    with pytest.raises(RequestError, match="uniqueItems"):
        llm.generate("x", SamplingParams(structured_outputs={"json": {"uniqueItems": True}}))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="ignore_eos"):
        llm.generate("x", SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputs(regex="a")))
    assert llm.core.num_steps == steps


def test_whitespace_can_not_run_away(llm: LLM, tokenizer: Tokenizer) -> None:
    """A model that loves whitespace above all still writes a document."""
    blanks = [i for i in range(tokenizer.vocab_size) if (text := tokenizer.token_bytes(i)) and not text.strip()]
    spaces = [i for i in blanks if not tokenizer.is_special(i)]
    assert spaces
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 9}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["age", "kind"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        max_tokens=700, temperature=0.0, logit_bias=dict.fromkeys(spaces, 100.0),
        structured_outputs=StructuredOutputs(json=schema, whitespace_pattern=WHITESPACE),
    )  # fmt: skip
    [output] = llm.generate("Tom has a pet.", params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), schema)
    assert answer.text.count(" ") + answer.text.count("\n") > 20


def test_a_form_that_min_tokens_forbids_fails_alone_and_says_why(llm: LLM) -> None:
    short = SamplingParams(min_tokens=9, structured_outputs=StructuredOutputs(choice=["a"]))
    fine = SamplingParams(structured_outputs=StructuredOutputs(choice=["a"]))
    bad, good = llm.generate(["x", "x"], [short, fine], use_tqdm=False)
    assert (bad.outputs[0].finish_reason, good.outputs[0].finish_reason) == ("error", "stop")
    assert good.outputs[0].text == "a"


def test_a_constraint_that_becomes_too_much_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    right = grammar_matchers.Matchers._take

    def take(self: Any, follower: Any, tokens: list[int]) -> None:
        if len(follower.tokens) == 3:
            raise grammar_matchers.GrammarError("too much")
        right(self, follower, tokens)

    monkeypatch.setattr(grammar_matchers.Matchers, "_take", take)
    bound = SamplingParams(structured_outputs=StructuredOutputs(regex="[a-z ]{40}"))
    bad, good = llm.generate(["x", "x"], [bound, SamplingParams(max_tokens=6)], use_tqdm=False)
    assert (bad.outputs[0].finish_reason, good.outputs[0].finish_reason) == ("error", "length")


def test_an_engine_without_a_tokenizer_takes_no_constraint() -> None:
    bare = LLM(num_threads=1, num_gpu_blocks_override=64, max_model_len=256, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="without a tokenizer"):
        bare.generate([[5, 6]], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
    # Nor does the engine itself, if somebody asks it past the server.
    request = Request(
        request_id="r", prompt_token_ids=[5, 6],
        params=SamplingParams(seed=1, structured_outputs=StructuredOutputs(regex="a")),
    )  # fmt: skip
    bare.core.add(request)
    assert bare.core.step().finished["r"].reason == "error"
    bare.close()


ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": PET}}}, "json"),
    ("response_format", {"response_format": {"type": "json_object", "schema": PET}}, "json"),
    ("response_format", {"response_format": {"type": "json_object", "value": PET}}, "json"),
    ("response_format", {"response_format": {"type": "json_object"}}, "json"),
    ("response_format", {"response_format": {"type": "text"}}, ""),
    ("structured_outputs", {"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
    ("structured_outputs", {"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ("structured_outputs", {"structured_outputs": {"grammar": 'start: "x" /[ab]{2}/'}}, "x[ab]{2}"),
    ("guided_json", {"guided_json": PET, "guided_whitespace_pattern": "[ ]?"}, "json"),
    ("guided_regex", {"guided_regex": "[0-9]{2}-[0-9]{2}"}, "[0-9]{2}-[0-9]{2}"),
    ("guided_choice", {"guided_choice": ["left", "right"]}, "left|right"),
    ("guided_grammar", {"guided_grammar": 'root ::= "x" [ab] [ab]'}, "x[ab]{2}"),
]  # fmt: skip

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}}, "response_format"),
    ({"guided_json": {"properties": {"a": {"uniqueItems": True}}}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_json": {}, "guided_whitespace_pattern": ".*"}, "whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


def ask_all(bodies: list[dict[str, Any]], **defaults: Any) -> list[dict[str, Any] | HeadraceError]:
    """Completions of all at once, through the API without its HTTP."""

    async def run_all() -> list[dict[str, Any] | HeadraceError]:
        config = EngineConfig(model="builtin", num_threads=1, num_gpu_blocks_override=512)
        client = InprocClient(lambda: build_engine(config))
        await client.start()
        front = TextClient(client, Tokenizer.load(hub.resolve("builtin")))
        model = ServedModel(front, "builtin", defaults=ModelDefaults.of(defaults))

        async def ask(body: dict[str, Any]) -> dict[str, Any] | HeadraceError:
            try:
                answer = await completions.complete(
                    model, {"prompt": "Tom has a pet.", "max_tokens": 90, "seed": 3} | body
                )
                reply: dict[str, Any] = msgspec.to_builtins(await answer.whole())
                return reply
            except HeadraceError as error:
                return error

        try:
            return await asyncio.gather(*map(ask, bodies))
        finally:
            front.grammars.close()
            await client.close()

    return asyncio.run(run_all())


def test_api_every_name_for_a_form() -> None:
    import re

    replies = ask_all([body for _, body, _ in ASKED])
    for (name, _, expected), reply in zip(ASKED, replies, strict=True):
        assert isinstance(reply, dict), (name, reply)
        choice = reply["choices"][0]
        if expected == "json":
            cut = choice["finish_reason"] == "length"
            assert cut == bool(choice.get("warnings")), choice
            assert cut or isinstance(json.loads(choice["text"]), dict)
        elif expected:
            assert choice["finish_reason"] == "stop"
            assert re.fullmatch(expected, choice["text"]), choice["text"]


def test_api_refusals_name_the_field() -> None:
    replies = ask_all([body for body, _ in REFUSED])
    for (body, field), reply in zip(REFUSED, replies, strict=True):
        assert isinstance(reply, RequestError), (body, reply)
        assert reply.field == field


def test_api_a_document_that_is_cut_off_says_so() -> None:
    cut, stopped, whole, note = ask_all(
        [
            {"guided_json": PET, "max_tokens": 12},
            {"guided_json": PET, "stop": ["age"]},
            {"guided_choice": ["left"], "max_tokens": 50},
            {"guided_json": {"type": "string", "format": "path", "maxLength": 3}},
        ]
    )
    assert isinstance(cut, dict)
    assert isinstance(stopped, dict)
    assert isinstance(whole, dict)
    assert isinstance(note, dict)
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["choices"][0]["warnings"] == ["the document is incomplete: max_tokens ended it"]
    assert stopped["choices"][0]["warnings"] == ["the document is incomplete: a stop string ended it"]
    assert "warnings" not in whole["choices"][0]
    assert note["warnings"] == ["guided_json: format 'path' at # is not enforced"]


def test_K11_json_is_as_short_as_the_model_s_makers_advise() -> None:
    body = {"guided_json": {"type": "object", "properties": {"story": {"type": "string"}}, "required": ["story"]}}
    (short,) = ask_all([body], max_string_length=20, disable_additional_properties=True)
    (free,) = ask_all([body])
    assert isinstance(short, dict)
    assert isinstance(free, dict)
    document = json.loads(short["choices"][0]["text"])
    assert list(document) == ["story"]
    assert len(document["story"]) <= 20
    # Control: without the advice the tokens run out first.
    assert free["choices"][0]["finish_reason"] == "length"


def test_a_document_outlives_its_engine() -> None:
    """The engine's process is killed in mid-stream, in the middle of a document: the text goes on the same."""

    async def stream(url: str, kill: Any) -> str:
        body = {
            "messages": [{"role": "user", "content": "Tell me of a pet."}],
            "seed": 4, "max_tokens": 700, "stream": True,
            "structured_outputs": {"json": LONG, "whitespace_pattern": "[ ]?"},
        }  # fmt: skip
        text = ""
        async with (
            httpx.AsyncClient(base_url=url, timeout=240) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as reply,
        ):
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
                if kill is not None and len(text) > 60:
                    kill()
                    kill = None
        assert kill is None
        return text

    with serve("--max-num-seqs", "8", "--num-gpu-blocks-override", "256", "builtin") as served:
        undisturbed = asyncio.run(stream(served.url, None))
        first = served.engine().pid
        disturbed = asyncio.run(stream(served.url, served.engine().kill))
        assert served.engine().pid != first
        # A refusal costs the engine nothing: not even its process hears of it.
        second = served.engine().pid
        bad = {"prompt": "x", "guided_regex": "(a)\\1"}
        reply = httpx.post(f"{served.url}/v1/completions", json=bad, timeout=240)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_constraint")
        assert served.engine().pid == second
    assert disturbed == undisturbed
    jsonschema.validate(json.loads(disturbed), LONG)


def test_a_servers_own_form_holds_for_requests_without_one() -> None:
    form = sampling_defaults({"structured_outputs": {"choice": ["up", "down"]}, "ignore_eos": True})
    plain, request, searched = ask_all([{}, {"guided_choice": ["left"]}, {"use_beam_search": True, "n": 2}], **form)
    assert not any(isinstance(reply, HeadraceError) for reply in (plain, request, searched))
    texts = [reply["choices"][0]["text"] for reply in (plain, request, searched) if isinstance(reply, dict)]
    assert texts[0] in ("up", "down")
    assert texts[1] == "left"
    assert texts[2] not in ("up", "down"), "a search has no default form"
