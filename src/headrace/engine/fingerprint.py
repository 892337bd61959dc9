"""`fingerprint_of`: one digest of all that decides the bits of an engine's answers. Never a path or a name.

Two engines with the same fingerprint give the same request the same bits, so that one can go on where the other
stopped. Called in the engine's process, by an order of a fleet.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from headrace import hub
from headrace.protocol.config import EngineConfig
from headrace.protocol.step import EngineInfo

LAW = 1
"""The version of the law by which kernels and sampler compute. A change that changes any bit raises it."""


def fingerprint_of(config: EngineConfig, info: EngineInfo) -> str:
    """Return the digest of weights, tokenizer, number formats and the kernels' law. Reads all weights, a second for
    each gigabyte. Raises `CheckpointError`."""
    path = hub.resolve(config.model, config.revision)
    spec = config.speculative_config
    facts = {
        "law": LAW,
        "weights": hub.digest(path),
        # It decides which tokens a grammar allows.
        "tokenizer": _tokenizer_digest(config, path),
        "formats": (info.dtype, info.quantization, info.activations, info.kv_cache_dtype, info.backend),
        "eos_token_ids": info.eos_token_ids,
        # By rejection the guesses decide which tokens are drawn; in the coupled mode they do not.
        "drafts": None if spec is None or spec.mode != "rejection" else spec,
    }
    if (projector := hub.projector_of(path, config.mmproj)) is not None:
        facts["projector"] = hub.digest(projector)
    if not config.verify_packed:
        # It imports numpy, which the server's process does without.
        from headrace.checkpoint.packed import damage_of

        # Loads that compare them take no other bytes than were written.
        facts["damage"] = damage_of(path)
    if config.hf_overrides:
        facts["overrides"] = msgspec.json.encode(config.hf_overrides, order="deterministic").decode()
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest()


def _tokenizer_digest(config: EngineConfig, weights: Path) -> str:
    """Return the digest of the tokenizer's files, "" where there are none apart from the weights' files."""
    if config.skip_tokenizer_init:
        return ""
    path = hub.resolve_tokenizer(config.model, config.tokenizer, config.revision)
    return "" if path == weights and path.is_file() else hub.digest(path, hub.TEXT_FILES)
