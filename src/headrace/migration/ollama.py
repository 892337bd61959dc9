"""The variables of Ollama's server, and the replacement of each here. Read by `cli.reference` for
docs/from-ollama.md."""

from __future__ import annotations

OLLAMA_VARIABLES: tuple[tuple[str, str], ...] = (
    ("OLLAMA_HOST", "`--host` and `--port`; without a key, other names of the machine need `--allowed-hosts`"),
    ("OLLAMA_CONTEXT_LENGTH", "`--max-model-len`"),
    ("OLLAMA_NUM_PARALLEL", "`--max-num-seqs`; requests are batched without splitting the context"),
    ("OLLAMA_MAX_QUEUE", "`--max-num-queued-reqs`"),
    ("OLLAMA_KV_CACHE_TYPE", "`--kv-cache-dtype`; q8_0 is int8, q4_0 is int4"),
    ("OLLAMA_ORIGINS", "`--allowed-origins`"),
    ("OLLAMA_LOAD_TIMEOUT", "not needed: loading has no time limit"),
    ("OLLAMA_KEEP_ALIVE", "`--keep-alive`, for the models of a folder; the model named at the start stays"),
    ("OLLAMA_FLASH_ATTENTION", "not needed: attention never stores its scores"),
    ("OLLAMA_DEBUG", "`--uvicorn-log-level debug`"),
    ("OLLAMA_NOHISTORY", "not needed: `headrace chat` keeps no history"),
    ("OLLAMA_MODELS", "`--models-dir`; see [models](howto-models.md)"),
    ("OLLAMA_MAX_LOADED_MODELS", "`--models-max`, and `--models-memory` for their memory"),
    (
        "OLLAMA_NOPRUNE",
        "not needed: uploads that no model was made of go at the start of the folder's only server",
    ),
    ("OLLAMA_GPU_OVERHEAD", "`--gpu-memory-utilization`"),
    ("OLLAMA_SCHED_SPREAD", "one process computes the model"),
)
