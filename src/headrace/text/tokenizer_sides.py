"""Reads the side files of a tokenizer's folder: tokens with a role, added tokens, chat templates.

Called by `tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from headrace.protocol.errors import CheckpointError
from headrace.text import tokenizer_gguf
from headrace.text.tokenizer_bytes import side_file

ROLES = tuple(tokenizer_gguf.ROLES)


def text_of(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def added_token(entry: dict[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(entry["content"], **{key: entry[key] for key in flags if key in entry})


def listed_as_special(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return the tokens that tokenizer_config.json lists as special, by their texts."""
    listed = config.get("extra_special_tokens", config.get("additional_special_tokens"))
    entries = [config.get(role) for role in ROLES] + (listed if isinstance(listed, list) else [])
    texts = [(text, entry) for entry in entries if (text := text_of(entry))]
    return {
        text: added_token(entry | {"special": True}) if isinstance(entry, dict) else AddedToken(text, special=True)
        for text, entry in texts
    }


def named_tokens(config: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the text of the tokens that tokenizer_config.json names itself, such as image_token. transformers makes
    each a variable of templates."""
    named = {name: text_of(value) for name, value in config.items() if name.endswith("_token")}
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(listed := config.get(key), dict):
            named |= {name: text_of(value) for name, value in listed.items()}
    return named


def add_listed(config: dict[str, Any], listed: dict[str, Any]) -> None:
    """Add the tokens of added_tokens.json, ids by text, to the `added_tokens_decoder` of tokenizer_config.json. Tokens
    with a role are special. Raises `CheckpointError` for an invalid id."""
    texts = [config.get(role) for role in ROLES]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(name) or []
        texts += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    special = {text_of(text) for text in texts}
    decoder = dict(config.get("added_tokens_decoder") or {})
    for text, token_id in listed.items():
        if type(token_id) is not int or token_id < 0:
            raise CheckpointError(f"added_tokens.json puts {text!r:.80} at {token_id!r:.80}, expected a token id")
        decoder.setdefault(str(token_id), {"content": text, "special": text in special})
    config["added_tokens_decoder"] = decoder


def chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name, from all places of transformers' history; chat_template.jinja overrides."""
    templates: dict[str, str] = {}
    for source in (config.get("chat_template"), side_file(directory / "chat_template.json").get("chat_template")):
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            templates.update((entry["name"], entry["template"]) for entry in source)
        elif source is not None:
            raise CheckpointError(f"chat_template is {source!r:.80}, expected a text or a list of named texts")
    for name, template in templates.items():
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(f"chat_template {name!r:.80} is {template!r:.80}, expected a text under a name")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    single = directory / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    return templates
