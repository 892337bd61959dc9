"""Two texts that a cross-encoder reads at once: joined and cut as the library of tokenizers does it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.support import fake
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import ContextLengthError, RequestError
from headrace.protocol.step import Classes, EngineInfo
from headrace.text.pairs import pair_ids
from headrace.text.tokenizer import Tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>", "</s>", *(f"w{i}" for i in range(60)), "a"]
IDS = {word: i for i, word in enumerate(WORDS)}
PROCESSORS: dict[str, Any] = {
    "bert": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "roberta": processors.RobertaProcessing(("</s>", 5), ("<s>", 4)),
    "xlm-roberta": processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 4), ("</s>", 5)]
    ),
    "none": None,
}


def info_of(second_type: int = 0, length: int = 40) -> EngineInfo:
    facts: dict[str, Any] = {
        "max_model_len": length,
        "generates": False,
        "classes": Classes(("a",), second_type=second_type),
    }
    return EngineInfo(**{name: getattr(BASE, name) for name in BASE.__struct_fields__} | facts)


BASE = fake.build(EngineConfig(model="fake")).info


def tokenizers_of(kind: str, directory: Path) -> tuple[Library, Tokenizer]:
    library = Library(models.WordLevel(IDS, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    if PROCESSORS[kind] is not None:
        library.post_processor = PROCESSORS[kind]
    library.save(str(directory / "tokenizer.json"))
    return library, Tokenizer.load(directory)


def text_of(num: int, rng: random.Random) -> str:
    return " ".join(f"w{rng.randrange(60)}" for _ in range(num))


@pytest.mark.parametrize("kind", PROCESSORS)
def test_pairs_are_joined_and_cut_as_the_library_does_it(kind: str, tmp_path: Path) -> None:
    library, tokenizer = tokenizers_of(kind, tmp_path)
    rng = random.Random(0)
    library.enable_truncation(40, strategy="longest_first")
    lengths = [(1, 1), (10, 20), (18, 19), (60, 5), (5, 60), (60, 60), (17, 50), (50, 18), (18, 18), (1, 90), (37, 37)]
    lengths += [(rng.randrange(1, 60), rng.randrange(1, 60)) for _ in range(300)]
    for first, second in lengths:
        texts = text_of(first, rng), text_of(second, rng)
        right = library.encode(*texts)
        assert pair_ids(*texts, tokenizer, info_of(), -1) == right.ids
        # Ids are raised where the library sets the second type.
        raised = [token + 1000 * side for token, side in zip(right.ids, right.type_ids, strict=True)]
        if kind == "none":  # the library's second text has the type 1 there, too
            assert {*right.type_ids} == {0, 1}
        assert pair_ids(*texts, tokenizer, info_of(1000), -1) == raised


def test_a_pair_that_does_not_fit_is_refused_unless_it_may_be_cut(tmp_path: Path) -> None:
    _, tokenizer = tokenizers_of("bert", tmp_path)
    rng = random.Random(0)
    texts = text_of(20, rng), text_of(17, rng)
    assert len(pair_ids(*texts, tokenizer, info_of())) == 40
    with pytest.raises(ContextLengthError, match="at most 39 tokens long"):
        pair_ids(*texts, tokenizer, info_of(length=39))
    assert len(pair_ids(*texts, tokenizer, info_of(), 12)) == 12
    with pytest.raises(RequestError, match="at least 5"):
        pair_ids(*texts, tokenizer, info_of(), 4)
    with pytest.raises(RequestError, match="joins two texts"):
        pair_ids(*texts, None, info_of())


def test_a_tokenizer_without_a_word_for_the_trial_has_no_form(tmp_path: Path) -> None:
    library = Library(models.WordLevel({"w": 0}, unk_token="?"))
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.pair_form is None
    with pytest.raises(RequestError, match="joins two texts"):
        pair_ids("w", "w", tokenizer, info_of())
