"""Sampling defaults that a server is started with: `override_generation_config`, checked like a request's fields.

A request that says nothing of a parameter gets the default; one that names it wins. Knows no files. Called by
`protocol.config`, by `headrace.other_engines` for flags that set one default, and by `serve.loading` and `llm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocol import bounds
from headrace.protocol.constraints import constraint_of
from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import PARAMETERS
from headrace.protocol.params import SamplingParams, field_types

FIELD = "override_generation_config"
SPELLINGS = {"max_new_tokens": "max_tokens", "repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}
"""Names of generation_config.json and of llama-server for parameters that have another name here."""
WITHOUT_EFFECT = frozenset(
    "do_sample num_beams num_beam_groups early_stopping length_penalty use_cache bos_token_id pad_token_id "
    "eos_token_id max_length trust_remote_code transformers_version _from_model_config".split()
)
"""Names of generation_config.json that are no parameters of a request."""
OF_ONE_REQUEST = frozenset(("n", "best_of", "logprobs", "prompt_logprobs", "trace_decode_token_ids", "detokenize"))
"""Parameters that have no default for all requests: they change what a reply holds."""


def check_default(name: str, value: Any, field: str) -> Any:
    """Return the default `value` of one parameter in the type that `SamplingParams` has, checked by its rules.

    Raises `RequestError` that calls it `field`."""
    name = SPELLINGS.get(name, name)
    if name not in PARAMETERS or name in OF_ONE_REQUEST:
        raise RequestError(field, value, "a default of: " + ", ".join(sorted(PARAMETERS.keys() - OF_ONE_REQUEST)))
    row = PARAMETERS[name]
    if row.kind in ("int", "float"):
        bounds.check(name, value, field)
        return value
    try:
        if name == "structured_outputs":
            return constraint_of(value)
        typed = msgspec.convert(value, field_types()[name], str_keys=True)
        SamplingParams(**{name: typed})
    except msgspec.ValidationError as error:
        raise RequestError(field, value, str(error)) from None
    except RequestError as error:
        raise error.renamed(field) from None
    return typed


def sampling_defaults(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `override_generation_config` as fields of `SamplingParams`. Raises `RequestError` naming the value."""
    checked = {}
    for name, value in (values or {}).items():
        if name not in WITHOUT_EFFECT and value is not None:
            checked[SPELLINGS.get(name, name)] = check_default(name, value, f"{FIELD}.{name}")
    return checked
