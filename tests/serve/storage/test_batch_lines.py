"""Lines that fail for reasons which nobody foresaw fail alone, after some tries, and do not fill the log."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from tests.support.server import logged

from headrace.serve.storage import batch_lines
from headrace.serve.storage.batch_lines import MAX_TRIES, Answerer, answers, has_failed, read_line

URL = "/v1/completions"


class PanicException(BaseException):
    """As pyo3's: no Exception."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "RETRY_S", 0.0)


def line(number: int, prompt: str) -> batch_lines.Line:
    result = {"custom_id": f"q{number}", "method": "POST", "url": URL, "body": {"prompt": prompt}}
    return read_line(json.dumps(result).encode(), number, (URL,))


class Model:
    """Raises an error for the prompt "poison", always or some times."""

    def __init__(self, error: type[BaseException], num_failures: int = 10**9) -> None:
        self.error, self.num_failures, self.num_tries = error, num_failures, 0

    async def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"] == "poison":
            self.num_tries += 1
            if self.num_tries <= self.num_failures:
                raise self.error("from native code: " + "x" * 50)
        return {"text": body["prompt"]}

    def outputs(self, prompts: list[str]) -> list[dict[str, Any]]:
        async def main() -> list[dict[str, Any]]:
            lines = (line(number, prompt) for number, prompt in enumerate(prompts, 1))
            groups = answers(lines, Answerer({URL: self.reply}).answer, 2)
            result = [output async for group in groups for output in group]
            return sorted(result, key=lambda output: int(output["custom_id"][1:]))

        return asyncio.run(main())


@pytest.mark.parametrize("error", [PanicException, BaseException, MemoryError, RecursionError, ValueError])
def test_R_17_a_poison_line_fails_alone_after_three_tries(error: type[BaseException]) -> None:
    model = Model(error)
    outputs = model.outputs(["a", "poison", "b", "c"])
    assert [has_failed(output) for output in outputs] == [False, True, False, False]
    assert model.num_tries == MAX_TRIES == 3
    response = msgspec.to_builtins(outputs[1]["response"])
    assert response["status_code"] == 500
    assert set(response["body"]["error"]) == {"message", "type", "param", "code"}
    assert (response["body"]["error"]["code"], outputs[1]["custom_id"]) == ("internal_error", "q2")
    assert "native" not in json.dumps(response)


def test_a_line_that_fails_twice_is_answered() -> None:
    outputs = Model(MemoryError, 2).outputs(["poison"])
    assert not has_failed(outputs[0])


def test_R_17_the_log_does_not_grow_with_the_lines() -> None:
    with logged("text") as text:
        Model(PanicException).outputs(["poison"] * 3)
        few = text.getvalue().count("\n")
    with logged("text") as text:
        Model(PanicException).outputs(["poison"] * 100)
        many = text.getvalue().count("\n")
    assert 0 < few == many < 40


def test_R_17_control_errors_that_are_passed_on_end_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to the lines if a panic leaves `Answerer.answer`: none of the later ones is answered."""

    async def answer(requests: batch_lines.Line) -> dict[str, Any]:
        raise PanicException("out")

    async def main() -> list[Any]:
        return [group async for group in answers([line(1, "a"), line(2, "b")], answer, 1)]

    with pytest.raises(PanicException):
        asyncio.run(main())
