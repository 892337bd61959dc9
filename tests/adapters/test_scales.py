"""Adapters by llama-server's door: their numbers, their scales, and the bits of a scaled one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.support.adapters import merged, write_adapter
from tests.support.checkpoints import llama_tensors, write_llama
from tests.support.serving import Served, serve

from headrace import LLM, LoRARequest, SamplingParams
from headrace.protocol.adapters import LoadAdapter, LoadedAdapter, UnloadAdapter, base_of, scale_of, scaled
from headrace.protocol.errors import RequestError
from headrace.serve.call.adapters import AdapterScale, ServedAdapters
from headrace.text.inputs import RequestOptions, make_requests
from headrace.text.outputs import deltas_of

HTTP = httpx.Client(timeout=240)
WEIGHTS = llama_tensors()
PROMPT = [5, 9, 17, 33, 41, 8, 2, 2, 30] * 3
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=4)
SHAPES = {"self_attn.q_proj": (256, 256), "self_attn.v_proj": (64, 256), "mlp.down_proj": (256, 512)}
BUILTIN = {f"model.layers.{i}.{name}.weight": torch.empty(shape) for i in range(14) for name, shape in SHAPES.items()}
Answer = tuple[list[int], list[float]]


def engine(directory: Path, backend: str, **options: Any) -> LLM:
    settings: dict[str, Any] = {"backend": backend, "dtype": "float32", "skip_tokenizer_init": True, "num_threads": 1}
    return LLM(str(directory), **(settings | options))


def answers(llm: LLM, names: Sequence[str]) -> list[Answer]:
    """The tokens and log-probabilities of a prompt by each adapter, computed together."""
    order = []
    for name in names:
        [request] = make_requests(PROMPT, GREEDY, llm.core.info, RequestOptions(adapter=name))
        llm.core.add(request)
        order.append(request.request_id)
    by_id: dict[str, Answer] = {request_id: ([], []) for request_id in order}
    while llm.core.has_work():
        for request_id, delta in deltas_of(llm.core.step()):
            by_id[request_id][0].extend(delta.token_ids)
            by_id[request_id][1].extend(entry.logprob for entry in delta.logprobs)
    return [by_id[request_id] for request_id in order]


def load(llm: LLM, path: Path) -> LoadedAdapter:
    adapter = llm.core.change_adapters(LoadAdapter(str(path))).adapter
    assert adapter is not None
    return adapter


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
def test_a_scale_gives_what_merged_weights_give(backend: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "whole", WEIGHTS, alpha=8)
    llm = engine(write_llama(tmp_path / "base"), backend, enable_lora=True)
    adapter = load(llm, path)
    names = ["", *(scaled(adapter.digest, scale) for scale in (1.0, 0.5, -0.75))]
    got = answers(llm, names)
    assert len({tuple(numbers) for _, numbers in got}) == 4
    for scale, (ids, numbers) in zip((0.0, 2.0, 1.0, -1.5), got, strict=True):
        weights = engine(write_llama(tmp_path / str(scale), merged(WEIGHTS, path, scale)), backend)
        [(expected_ids, expected)] = answers(weights, [""])
        assert ids == expected_ids
        np.testing.assert_allclose(numbers, expected, atol=1e-4)
    # The same bits as an adapter that has half of its alpha.
    assert got[2] == answers(llm, [load(llm, write_adapter(tmp_path / "half", WEIGHTS, alpha=4)).digest])[0]


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
def test_a_scale_is_of_the_whole_change_that_magnitudes_make(backend: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "whole", WEIGHTS, alpha=8, use_dora=True)
    llm = engine(write_llama(tmp_path / "base"), backend, enable_lora=True)
    digest = load(llm, path).digest
    got = answers(llm, [scaled(digest, 0.5), digest, "", scaled(digest, -0.75)])
    whole = merged(WEIGHTS, path, 2.0)
    for scale, (ids, numbers) in zip((0.5, 1.0, 0.0, -0.75), got, strict=True):
        mean = {name: torch.lerp(WEIGHTS[name].float(), whole[name].float(), scale) for name in WEIGHTS}
        [(expected_ids, expected)] = answers(engine(write_llama(tmp_path / str(scale), mean), backend), [""])
        assert ids == expected_ids
        np.testing.assert_allclose(numbers, expected, atol=1e-4)
    assert len({tuple(numbers) for _, numbers in got}) == 4


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_scale_is_peft_s(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    with peft.helpers.rescale_adapter_scale(adapted, 0.3):
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    llm = engine(tmp_path / "base", "cpu", enable_lora=True)
    [got, whole] = answers(llm, [scaled(load(llm, tmp_path / "adapter").digest, scale) for scale in (0.3, 1.0)])
    [expected] = answers(engine(tmp_path / "merged", "cpu"), [""])
    assert got[0] == expected[0]
    np.testing.assert_allclose(got[1], expected[1], atol=1e-4)
    assert np.abs(np.array(whole[1]) - expected[1]).max() > 1e-2  # control: the scale shows


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
def test_no_request_sees_the_scales_of_others(backend: str, tmp_path: Path) -> None:
    """More scales than there are slots for them, and room for all of them in one step's turn."""
    llm = engine(write_llama(tmp_path / "base"), backend, enable_lora=True, max_num_seqs=3, max_loras=2)
    paths = [write_adapter(tmp_path / str(seed), WEIGHTS, seed=seed) for seed in range(2)]
    digests = [load(llm, path).digest for path in paths]
    names = ["", *(scaled(digests[i % 2], 1 + i / 8) for i in range(9))]
    together = answers(llm, names)
    assert len({tuple(numbers) for _, numbers in together}) == 10
    llm.reset_prefix_cache()
    assert [answers(llm, [name])[0] for name in names] == together
    assert [answers(llm, [name])[0] for name in reversed(names)] == together[::-1]  # from prefixes of their own
    assert llm.core.change_adapters(UnloadAdapter(digests[1])).refused is None
    with pytest.raises(RequestError, match="an adapter that is loaded"):
        answers(llm, [names[2]])
    assert answers(llm, names[:2]) == together[:2]
    # Another adapter in the slot that is free now.
    other = load(llm, write_adapter(tmp_path / "other", WEIGHTS, seed=7)).digest
    assert answers(llm, [scaled(other, 1.125)])[0] not in together


def test_an_adapter_is_in_use_with_any_scale(tmp_path: Path) -> None:
    llm = engine(write_llama(tmp_path / "base"), "cpu", enable_lora=True)
    digest = load(llm, write_adapter(tmp_path / "a", WEIGHTS)).digest
    [request] = make_requests(PROMPT, GREEDY, llm.core.info, RequestOptions(adapter=scaled(digest, 0.5)))
    llm.core.add(request)
    llm.core.step()
    refused = llm.core.change_adapters(UnloadAdapter(digest)).refused
    assert refused is not None
    assert refused[2].startswith("one that no request uses")
    llm.core.abort(request.request_id)
    assert llm.core.change_adapters(UnloadAdapter(digest)).refused is None


def test_the_name_of_a_scaled_adapter_is_one_alone() -> None:
    for scale in (0.5, -1.25, 1e-30, 1.0):
        assert (base_of(scaled("ab", scale)), scale_of(scaled("ab", scale))) == ("ab", scale)
    for name in ("ab@", "ab@1", "ab@0.5", "ab@inf", "ab@nan", "ab@" + (1.0).hex(), "ab@x", "ab@0x1p99999"):
        assert scale_of(name) is None, name


def test_numbers_are_kept_and_not_given_twice() -> None:
    adapters = ServedAdapters({"b": 0.5})
    for name in "ab":
        adapters[name] = LoadedAdapter(name * 3, 4, 2, path=f"/{name}")
    assert [(card.id, card.path, card.scale) for card in adapters.cards()] == [(0, "/a", 0.0), (1, "/b", 0.5)]
    assert adapters.of(None) == adapters.of("model") == scaled("bbb", 0.5)
    assert adapters.of("a") == "aaa"
    assert adapters.of(None, []) == ""
    del adapters["a"]
    adapters["c"] = LoadedAdapter("ccc", 4, 2)
    assert [card.id for card in adapters.cards()] == [1, 2]
    assert adapters.of(None, [AdapterScale(2, 1.0)]) == "ccc"
    del adapters["b"]
    assert adapters.of(None) == ""
    with pytest.raises(RequestError, match=r"lora\[0\].id: 1 .* one of 2"):
        adapters.of(None, [AdapterScale(1, 1.0)])
    # An engine that has not loaded the adapter of all requests does not serve them without it.
    with pytest.raises(RequestError, match="lora_modules: 'b' .* loaded"):
        ServedAdapters({"b": 0.5}).take({"a": LoadedAdapter("aaa", 4, 2)})


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / name, BUILTIN, seed=i, spread=0.2) for i, name in enumerate("ab")]


@pytest.fixture(scope="module")
def server(paths: list[Path]) -> Iterator[Served]:
    with serve("builtin", "--lora", str(paths[0]), "--lora-scaled", str(paths[1]), "0") as served:
        yield served


def text(server: Served, path: str = "/completion", **more: Any) -> str:
    talk = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "Once upon a time"}
    reply = HTTP.post(f"{server.url}{path}", json=talk | {"max_tokens": 12, "temperature": 0} | more)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    if "content" in body:
        return str(body["content"])
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "chat" in path else choice["text"])


def scales(server: Served) -> list[tuple[int, str, float]]:
    cards = HTTP.get(f"{server.url}/lora-adapters").json()
    return [(card["id"], card["path"], card["scale"]) for card in cards]


def set_scales(server: Served, *entries: dict[str, Any]) -> httpx.Response:
    return HTTP.post(f"{server.url}/lora-adapters", json=list(entries))


def test_flags_set_the_scales_of_the_start(server: Served, paths: list[Path]) -> None:
    assert scales(server) == [(0, str(paths[0]), 1.0), (1, str(paths[1]), 0.0)]
    with_a, with_b, plain = (text(server, lora=[{"id": i, "scale": s}]) for i, s in ((0, 1), (1, 1), (1, 0)))
    assert len({with_a, with_b, plain}) == 3
    assert text(server) == with_a  # --lora holds for all that name the model itself
    assert text(server, model="b") == with_b  # an adapter is a model too
    assert text(server, lora=[]) == plain


def test_the_scales_of_all_are_changed_for_later_requests(server: Served, paths: list[Path]) -> None:
    plain, with_b = text(server, lora=[]), text(server, lora=[{"id": 1, "scale": 0.5}])
    assert plain != with_b
    try:
        reply = set_scales(server, {"id": 1, "scale": 0.5})
        assert (reply.status_code, reply.json()) == (200, {"success": True})
        assert scales(server) == [(0, str(paths[0]), 0.0), (1, str(paths[1]), 0.5)]  # one left out is 0
        assert text(server) == with_b
        assert text(server, "/v1/completions") == with_b  # by every door
        assert text(server, lora=[]) == plain
        server.engine().kill()
        assert text(server) == with_b  # the next engine too
        assert set_scales(server).status_code == 200
        assert text(server) == plain
    finally:
        set_scales(server, {"id": 0, "scale": 1})


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_a_request_has_its_own_scale(server: Served, path: str) -> None:
    replies = [text(server, path, lora=[{"id": 0, "scale": scale}]) for scale in (0, 1, 0.5, 2)]
    assert len(set(replies)) == 4
    assert replies[1] == text(server, path)
    assert text(server, path, lora=[{"id": 0, "scale": 0.5}, {"id": 1}]) == replies[2]


def test_wrong_scales_are_refused_and_change_nothing(server: Served) -> None:
    before = scales(server)
    wrong: list[tuple[Any, str]] = [
        ([{"id": 7, "scale": 1}], "[0].id: 7 is not allowed; it must be one of 0, 1"),
        ([{"id": 0, "scale": 1}, {"id": 1, "scale": 0.5}], "at most one with a scale other than 0"),
        ([{"id": 0, "scale": 1e9}], "[0].scale"),
        ([{"id": "x"}], ""),
        ([{"scale": 1}], ""),
        ({"id": 0}, ""),
        ([3], ""),
    ]
    for entries, words in wrong:
        for reply in (
            HTTP.post(f"{server.url}/lora-adapters", json=entries),
            HTTP.post(f"{server.url}/completion", json={"prompt": "x", "n_predict": 1, "lora": entries}),
        ):
            assert reply.status_code == 400, (entries, reply.text)
            assert words in reply.json()["error"]["message"], (entries, reply.text)
    reply = HTTP.post(f"{server.url}/completion", json={"prompt": "x", "model": "b", "lora": []})
    assert "left out where model names an adapter, here 'b'" in reply.json()["error"]["message"]
    assert scales(server) == before


def test_a_batch_without_a_server_has_the_scales_too(paths: list[Path], tmp_path: Path) -> None:
    """The scale of the start, one of a request, and an adapter as the model."""
    bodies: list[dict[str, Any]] = [{}, {"lora": [{"id": 1, "scale": 0.5}]}, {"lora": []}, {"model": "b"}]
    common = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions"} for i in range(len(bodies))]
    texts = [json.dumps(line | {"body": common | body}) for line, body in zip(lines, bodies, strict=True)]
    (tmp_path / "in.jsonl").write_text("\n".join(texts) + "\n")
    module = json.dumps({"name": "a", "path": str(paths[0]), "scale": 1})
    flags = ["--enable-lora", "--lora-modules", module, "--lora-modules", f"b={paths[1]}"]
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    command = [str(Path(sys.executable).parent / "headrace"), "run-batch", *files, "--model", "builtin", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    replies = {}
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        entry = json.loads(line)
        replies[int(entry["custom_id"])] = entry["response"]["body"]["choices"][0]["text"]
    llm = LLM("builtin", enable_lora=True, num_gpu_blocks_override=64)
    params = SamplingParams(max_tokens=12, temperature=0)
    chosen = [LoRARequest(path.name, 1, str(path)) for path in paths]
    with_a, plain, with_b = (
        llm.generate("Once upon a time", params, lora_request=each) for each in (chosen[0], None, chosen[1])
    )
    expected = [each[0].outputs[0].text for each in (with_a, plain, with_b)]
    assert [replies[0], replies[2], replies[3]] == expected
    assert replies[1] not in expected
