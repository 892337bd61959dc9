"""llama-server's /infill: a prompt with the model's own marks around a gap, and the text that fills the gap.

Models are trained with marks of the text before the gap and of the text after it (Bavarian et al., arXiv:2207.14255).
`marks_of` finds them in the vocabulary by their names. Called by `paths`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.protocol.errors import RequestError, UnsupportedError
from headrace.serve.apis.llama_server.reply import LlamaAnswer
from headrace.serve.apis.llama_server.request import IGNORED, InfillRequest
from headrace.serve.apis.llama_server.service import LlamaServer
from headrace.serve.call.parsing import convert
from headrace.text.tokenizer import Tokenizer

NAMES = (
    # Qwen2.5-Coder, CodeGemma.
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite.
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder.
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # CodeLlama.
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    # DeepSeek-Coder: the hole is where the suffix begins.
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # GLM.
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Codestral, which has no mark of the middle: the suffix comes first.
    ("[PREFIX]", "[SUFFIX]", ""),
)
"""The marks of the prefix, the suffix and the middle, by their names in the vocabularies of model families."""
REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<reponame>")
FILES = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
ENDS = ("▁<EOT>", "<EOT>", "<|fim_pad|>", "<fim_pad>", "<|cursor|>")
"""Further tokens that end the text in a gap."""
MAX_EXTRA = 64
SNIPPET = "\n\n--- snippet ---\n\n"
"""Stands before each file of the context where a model has no mark for it."""
PROJECT, FILE = "myproject\n", "filename\n"
"""llama-server's names for the repository and the file of the gap, so that prompts are the same."""


class Marks(NamedTuple):
    """Token ids. `middle` None: the suffix comes before the prefix, and the answer after that. `repository` and `file`
    stand before the name of a repository and of a file, None where the model has none. `ends` end the text in a gap."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None
    ends: tuple[int, ...]


def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """Return the marks that a vocabulary has; None if it has none."""

    def first(names: tuple[str, ...]) -> int | None:
        return next((i for i in map(tokenizer.token_to_id, names) if i is not None), None)

    for names in NAMES:
        prefix, suffix, middle = (tokenizer.token_to_id(name) if name else None for name in names)
        if prefix is None or suffix is None or (middle is None and names[2]):
            continue
        repository, file = first(REPOSITORIES), first(FILES)
        ends = (prefix, suffix, middle, repository, file, *map(tokenizer.token_to_id, ENDS))
        return Marks(prefix, suffix, middle, repository, file, tuple(i for i in ends if i is not None))
    return None


class Infill:
    """The route without HTTP."""

    def __init__(self, llama: LlamaServer) -> None:
        self._llama, self._model = llama, llama.model
        tokenizer = self._model.front.tokenizer
        self.marks = None if tokenizer is None else marks_of(tokenizer)

    async def create(self, body: dict[str, Any]) -> LlamaAnswer:
        """The text that belongs between a prefix and a suffix."""
        request = convert(InfillRequest, body, IGNORED)
        if self.marks is None:
            instead = "the model's vocabulary has no marks for a gap; send /completion a plain prompt"
            raise UnsupportedError("input_prefix", request.input_prefix, instead)
        prompt = await self._prompt(request, self.marks)
        return await self._llama.answer(request, [prompt], stop_token_ids=self.marks.ends)

    async def _prompt(self, request: InfillRequest, marks: Marks) -> list[int]:
        """Return the token ids of the prompt: the files of the context, then the text around the gap. Files that do not
        fit are left out, the first ones first."""
        extra = await self._extra(request, marks)
        before = await self._ids(request.input_prefix, "input_prefix") + await self._ids(request.prompt, "prompt")
        after = await self._ids(request.input_suffix, "input_suffix")
        head = await self._model.encode("", True)
        gap = [marks.prefix, *before], [marks.suffix, *after]
        ends = [*gap[0], *gap[1], marks.middle] if marks.middle is not None else [*gap[1], *gap[0]]
        room = self._model.max_context - len(head) - len(ends) - max(request.n_predict or request.max_tokens or 1, 1)
        num_left_out = 0
        while extra and sum(map(len, extra)) > room:
            extra = extra[1:]
            num_left_out += 1
        if num_left_out:
            request.warn("input_extra", f"the first {num_left_out} parts do not fit the context, and are left out")
        return [*head, *(i for part in extra for i in part), *ends]

    async def _extra(self, request: InfillRequest, marks: Marks) -> list[list[int]]:
        """Return the token ids of each file of the context."""
        files = request.input_extra or []
        if len(files) > MAX_EXTRA:
            raise RequestError("input_extra", len(files), f"at most {MAX_EXTRA} files")
        parts: list[list[int]] = []
        for index, file in enumerate(files):
            name, text = file.get("filename", "tmp"), file.get("text")
            for field, value in (("filename", name), ("text", text)):
                if not isinstance(value, str):
                    raise RequestError(f"input_extra[{index}].{field}", value, "a string")
            begin = SNIPPET if marks.file is None else f"{name}\n"
            ids = await self._ids(begin, f"input_extra[{index}].filename")
            ids += await self._ids(str(text), f"input_extra[{index}].text")
            parts.append(ids if marks.file is None else [marks.file, *ids])
        if marks.repository is not None:
            parts = [[marks.repository, *await self._ids(PROJECT, "input_extra")], *parts]
        if marks.file is not None:
            parts.append([marks.file, *await self._ids(FILE, "input_extra")])
        return parts

    async def _ids(self, text: str, field: str) -> list[int]:
        return await self._model.encode(text, False, field) if text else []
