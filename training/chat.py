"""Makes conversations: about the stories, and small talk from tables. A conversation is a list of (role, text).

A pure function of its inputs and the random generator given. It knows nothing of tokens or of the chat template.
"""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path

Conversation = list[tuple[str, str]]

TABLES = tomllib.loads(Path(__file__).with_name("chat.toml").read_text("utf-8"))
REQUESTS, LISTS, CAPITALS = TABLES["requests"], TABLES["lists"], TABLES["capitals"]
FACTS = list(TABLES["facts"].items())
TALK = [(talk["questions"], talk["answers"]) for talk in TABLES["talk"]]
THANKS = next((talk["questions"], talk["answers"]) for talk in TABLES["talk"] if talk.get("thanks"))
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NOT_NOUNS = set(LISTS["not_nouns"])
NOUN = re.compile(
    r"\b(?:[Aa]|[Aa]n|[Tt]he|[Hh]is|[Hh]er|[Tt]heir) ([a-z]{3,})\b"
    r"(?= ?(?:[.,!?]|was|is|and|in|on|to|with|had|for|that|said))"
)


def nouns_of(story: str) -> list[str]:
    """The things a story tells of, most frequent first: words that follow an article more than once."""
    counts: dict[str, int] = {}
    for word in NOUN.findall(story):
        if word not in NOT_NOUNS:
            counts[word] = counts.get(word, 0) + 1
    return sorted((w for w, n in counts.items() if n > 1), key=lambda w: -counts[w])


def hero_of(story: str) -> tuple[str, str] | None:
    """("little girl", "Lily") of "a little girl named Lily"."""
    match = re.search(r"\ban? ((?:[a-z]+ ){0,2}[a-z]+),? (?:named|called|whose name was) ([A-Z][a-z]+)", story)
    return (match[1], match[2]) if match and len(match[1]) < 30 else None


def hero_names(stories: list[str]) -> dict[str, list[str]]:
    """Names that stories give to girls, and to boys."""
    result = {}
    for kind in ("girl", "boy"):
        names = re.findall(rf"\b{kind},? (?:named|called|whose name was) ([A-Z][a-z]+)\b(?!-)", "\n".join(stories))
        result[kind] = sorted(set(names))
    return result


def renamed(story: str, names: dict[str, list[str]], rng: random.Random) -> str:
    """The story with its girl or boy called by another name."""
    hero = hero_of(story)
    if not hero or not (kind := next((k for k in names if hero[0].endswith(k)), None)):
        return story
    name = rng.choice(names[kind])
    return story if name in story else re.sub(rf"\b{hero[1]}\b", name, story)


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def question_for(story: str, rng: random.Random) -> str:
    """A request that this story answers."""
    hero, nouns = hero_of(story), nouns_of(story)
    options: list[str] = []
    if hero:
        kind, name = hero
        short = kind.split()[-1]
        options += [
            rng.choice(REQUESTS["story_about"]).format(t)
            for t in (f"{article(kind)} named {name}", f"{article(short)} called {name}", article(short), name)
        ]
        options.append(rng.choice(REQUESTS["story_about"]).format(f"{article(short)} named {name}"))
        if nouns and nouns[0] != short:
            options += [
                rng.choice(REQUESTS["story_about"]).format(f"{t} and {article(nouns[0])}")
                for t in (name, article(short))
            ]
    if nouns:
        options += [rng.choice(REQUESTS["story_about"]).format(article(n)) for n in nouns[:2]]
    if len(nouns) > 1:
        options.append(rng.choice(REQUESTS["story_about"]).format(f"{article(nouns[0])} and {article(nouns[1])}"))
        options.append(rng.choice(REQUESTS["story_with_words"]).format(", ".join(nouns[: rng.randint(2, 3)])))
    return rng.choice(options) if options and rng.random() < 0.88 else rng.choice(REQUESTS["any_story"])


def continuation(story: str, rng: random.Random) -> Conversation | None:
    sentences = re.split(r"(?<=[.!?\"])\s+(?=[A-Z\"])", story)
    if len(sentences) < 5:
        return None
    cut = len(" ".join(sentences[: rng.randint(1, 3)]))
    head, tail = story[:cut].strip(), story[cut:].strip()
    if rng.random() < 0.3:  # cut in mid-sentence
        words = head.split(" ")
        keep = rng.randint(min(4, len(words)), len(words))
        beginning = " ".join(words[:keep])
        tail, head = story[len(beginning) :].strip(), beginning
    return [
        ("user", head if rng.random() < 0.4 else rng.choice(REQUESTS["continue_story"]).format(head)),
        ("assistant", tail),
    ]


def small_talk(rng: random.Random) -> Conversation:
    kind = rng.random()
    if kind < 0.55:
        questions, answers = rng.choice(TALK)
        question, answer = rng.choice(questions), rng.choice(answers)
    elif kind < 0.70:
        question, answer = rng.choice(FACTS)
    elif kind < 0.80:
        country = rng.choice(sorted(CAPITALS))
        forms = [
            "What is the capital of {}?",
            "what is the capital of {}?",
            "Name the capital of {}.",
            "Tell me the capital of {}.",
            "The capital of {}?",
        ]
        question, answer = rng.choice(forms).format(country), f"The capital of {country} is {CAPITALS[country]}."
    elif kind < 0.90:
        a, b = rng.randint(0, 5), rng.randint(0, 5)
        if rng.random() < 0.5:
            question, answer = (
                rng.choice(["What is {} + {}?", "{} + {} = ?", "{}+{}", "How much is {} + {}?"]).format(a, b),
                f"{a} + {b} is {a + b}.",
            )
        else:
            question = rng.choice(["What is {} plus {}?", "How much is {} and {}?"]).format(NUMBERS[a], NUMBERS[b])
            answer = f"{NUMBERS[a].capitalize()} and {NUMBERS[b]} is {NUMBERS[a + b]}."
    else:
        question, answer = (
            rng.choice(REQUESTS["unknown"]).format(rng.choice(LISTS["things"])),
            rng.choice(LISTS["do_not_know"]),
        )
    if rng.random() < 0.15:
        question = question.lower()
    if rng.random() < 0.1:
        question = question.rstrip(".!?")
    return [("user", question), ("assistant", answer)]


def with_system(conversation: Conversation, rng: random.Random) -> Conversation:
    return [("system", rng.choice(LISTS["systems"])), *conversation] if rng.random() < 0.25 else conversation


def story_chat(story: str, rng: random.Random) -> Conversation:
    kind = rng.random()
    if kind < 0.2 and (conversation := continuation(story, rng)):
        return with_system(conversation, rng)
    conversation = [("user", question_for(story, rng)), ("assistant", story)]
    if kind < 0.35:
        conversation = small_talk(rng) + conversation
    if kind > 0.85 and (hero := hero_of(story)):
        short = hero[0].split()[-1]
        ask = rng.choice([f"What was the {short}'s name?", f"What was the name of the {short}?", f"Who was {hero[1]}?"])
        answer = f"{hero[1]} was {article(hero[0])}." if ask.startswith("Who") else f"The {short}'s name was {hero[1]}."
        conversation += [("user", ask), ("assistant", answer)]
    elif kind > 0.75:
        conversation += [("user", rng.choice(THANKS[0])), ("assistant", rng.choice(THANKS[1]))]
    return with_system(conversation, rng)


def talk_chat(rng: random.Random) -> Conversation:
    """A few turns of small talk."""
    conversation: Conversation = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        conversation += small_talk(rng)
    return with_system(conversation, rng)


def play_chat(passage: str, rng: random.Random) -> Conversation:
    speeches = passage.split("\n\n")[: rng.randint(2, 4)]
    return with_system([("user", rng.choice(REQUESTS["play"])), ("assistant", "\n\n".join(speeches))], rng)


def conversations(stories: list[str], plays: list[str], seed: int, rounds: int) -> list[Conversation]:
    """`rounds` conversations about every story (each with other questions), plays, and small talk besides."""
    rng = random.Random(seed)
    names = hero_names(stories)
    result: list[Conversation] = []
    for _ in range(rounds):
        result += [story_chat(renamed(s, names, rng), rng) for s in stories]
        result += [play_chat(p, rng) for p in plays]
        result += [talk_chat(rng) for _ in range(len(stories) // 2)]
    return result
