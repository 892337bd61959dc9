"""Reads the corpora and cleans them into documents: plain strings, split into train and validation.

Everything is a pure function of the files and constants here, so the same files give the same documents. It knows
nothing of tokens. `chat.py` makes conversations of these documents, `data.py` packs both into rows.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

MOJIBAKE = (
    ("â€™", "'"),
    ("â€˜", "'"),
    ("â€œ", '"'),
    ("â€“", "--"),
    ("â€”", "--"),
    ("â€¦", "..."),
    ("â€", '"'),
    ("Â", ""),
)
TYPOGRAPHY = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "--", "…": "...", "\ufeff": "", "\xa0": " "}
)
HELD_OUT_NOVEL = "Doyle_Lost_1912"
EASY_NOVELS = (
    "Burnett",
    "Chesterton",
    "Kipling",
    "Doyle",
    "Haggard",
    "Stevenson",
    "Dickens_Expectations",
    "Cbronte_Jane",
)
SAYING = "said|asked|replied|shouted|cried|exclaimed|answered|yelled|laughed|called|whispered|thought|smiled|agreed"


@dataclass(frozen=True)
class Split:
    train: list[str]
    validation: list[str]


def clean(text: str) -> str:
    for bad, good in MOJIBAKE:
        text = text.replace(bad, good)
    text = text.translate(TYPOGRAPHY).replace("\r\n", "\n")
    return re.sub(r"[ \t]+", " ", text).replace(" \n", "\n").strip()


def every(documents: list[str], n: int) -> Split:
    """Holds every n-th document out."""
    train = [d for i, d in enumerate(documents) if i % n]
    return Split(train, documents[::n])


def tinystories_cased(root: Path) -> list[str]:
    text = (root / "tinystories/train_sample_1.5MB.txt").read_text(encoding="utf-8")
    stories = [clean(s) for s in text.split("<|endoftext|>")]
    return [re.sub(r"\n+", "\n\n", s) for s in stories[:-1] if len(s) > 200]  # the last one is cut off by the sample


def names_in(documents: list[str], at_least: int, ratio: int) -> set[str]:
    """Lower-cased: words with a capital in mid-sentence `at_least` times, and `ratio` times as often as without."""
    capital: Counter[str] = Counter()
    small: Counter[str] = Counter()
    for document in documents:
        for word in re.findall(r"(?<=[a-z,] )[A-Za-z]+", document):
            (capital if word[0].isupper() else small)[word.lower()] += 1
    return {w for w, n in capital.items() if n >= at_least and n > ratio * small[w]} - {"i"}


def recase(story: str, names: set[str]) -> str:
    """Puts capitals back into a lower-cased story: sentence starts, speech, "I", and names."""
    heroes = set(re.findall(r"(?:named|called|name (?:was|is)|mr\.|mrs\.|miss) ([a-z]{3,})\b(?!-)", story))
    heroes -= set("the his her out for him them after and over from not very special".split())
    story = re.sub(r"\b[a-z]+\b", lambda m: m[0].capitalize() if m[0] in names or m[0] in heroes else m[0], story)
    story = re.sub(r"(?<![\w'])i(?![\w])", "I", story)
    start = re.compile(
        r"(^|\n|[.!?]['\"]?\s+|(?:^|[\s,:])\")"  # a sentence, or speech, begins
        rf"(?!(?<=[!?]\" )(?:\w+\s){{0,4}}(?:{SAYING})\b)([a-z])"  # but not in: "Look!" the boy said
    )
    return start.sub(lambda m: m[1] + m[2].upper(), story)


def tinystories_recased(root: Path, names: set[str]) -> list[str]:
    text = clean((root / "tinystories/train_lowercase_2MB.txt").read_text(encoding="utf-8", errors="replace"))
    pieces = re.split(r"(?<!\n)\n(?!\n)", text)  # a lone newline parts stories, a blank line parts paragraphs
    stories = [recase(re.sub(r"\n+", "\n\n", p), names) for p in pieces]
    return [s for s in stories if len(s) > 300 and s[-1] in '.!?"' and "\ufffd" not in s]


def passages(text: str, size: int = 3000) -> list[str]:
    """Runs of whole paragraphs of about `size` characters; hard-wrapped lines are joined."""
    result, current = [], ""
    for paragraph in re.split(r"\n\s*\n", clean(text)):
        paragraph = re.sub(r"\s*\n\s*", " ", paragraph).replace("_", "").strip()
        if len(paragraph) < 4 or paragraph.isupper() or re.fullmatch(r"(?i)(chapter|book|part)\b.{0,40}", paragraph):
            continue
        current += ("\n\n" if current else "") + paragraph
        if len(current) > size:
            result.append(current)
            current = ""
    # Letters beyond Latin-1 in these novels are decoding faults.
    return [p for p in [*result, current] if p and max(p) < "\u0100"]


def speeches(text: str, size: int = 1500) -> list[str]:
    """Runs of whole speeches of a play; lines of verse are kept."""
    result, current = [], ""
    for speech in clean(text).split("\n\n"):
        current += ("\n\n" if current else "") + speech
        if len(current) > size:
            result.append(current)
            current = ""
    return result


def python_files(root: Path) -> list[str]:
    """Python source, one document per file; blanks and line ends are kept, files with other letters are left out."""
    text = (root / "python_stdlib_3.11.txt").read_text(encoding="utf-8")
    files = [f.strip("\n") + "\n" for f in text.split("<|endoftext|>\n")]
    return [f for f in files if len(f) > 400 and max(f) < "\u0100"]


def read_corpora(root: Path) -> dict[str, Split]:
    """Documents by source: stories, easy and other novels, war_and_peace, shakespeare."""
    cased = tinystories_cased(root)
    easy, novels, held_out = [], [], []
    for path in sorted((root / "novels").glob("*.txt")):
        texts = passages(path.read_text(encoding="utf-8", errors="replace"))[1:]  # the first holds the title page
        if path.stem == HELD_OUT_NOVEL:
            held_out = texts
        elif path.stem.startswith(EASY_NOVELS):
            easy += texts
        else:
            novels += texts
    names = names_in(cased, at_least=2, ratio=4) | names_in(novels, at_least=20, ratio=20)
    cased_split, recased_split = every(cased, 40), every(tinystories_recased(root, names), 40)
    return {
        "stories": Split(cased_split.train + recased_split.train, cased_split.validation + recased_split.validation),
        "easy_novels": Split(easy, held_out),
        "novels": every(novels, 100),
        "war_and_peace": every(passages((root / "war-and-peace.txt").read_text(encoding="utf-8")), 40),
        "shakespeare": every(speeches((root / "tinyshakespeare.txt").read_text(encoding="utf-8")), 20),
    }
