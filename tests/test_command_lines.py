"""Command lines as model cards, recipes and scripts have them, tried whole: each starts, or says why not.

Names of models are MODEL. `pytest -s` prints the counts.
"""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Any

import pytest
import typer.main

from headrace.cli.main import app
from headrace.cli.options import build
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError

STARTS, WARNS = "starts", "warns"

# A line begins with = where it starts, and with ~ where it starts and the log says what has no effect; ! stands before
# the words of a refusal, and the line follows. Further lines of a command are indented.
LLAMA_SERVER = r"""
= -m model.gguf
= -m model.gguf --port 8080 --ctx-size 4096
= --model model.gguf --host 127.0.0.1 --port 8080 --ctx-size 2048
= -hf ggml-org/gemma-3-4b-it-GGUF --host 0.0.0.0 --port 8080
= -hf bartowski/Qwen_Qwen3-4B-Instruct-2507-GGUF:Q4_K_M
~ -m model.gguf -c 8192 -ngl 99 --jinja --temp 0.6 --top-k 20 --top-p 0.95 --min-p 0 --reasoning-format deepseek
  --chat-template chatml
= -m model.gguf -c 2048 --chat-template chatml -t 12
~ -m model.gguf --host 0.0.0.0 -ngl 99 -c 32768 --parallel 2 --reasoning-format none --chat-template chatml
~ --model model.gguf --n-gpu-layers 999 --ctx-size 81920 --parallel 4 -cb --chat-template chatml
~ -m model.gguf -c 1024 --port 8040 --log-disable --chat-template chatml
~ --jinja -fa on -hf bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M
~ --jinja -fa -hf bartowski/Mistral-Nemo-Instruct-2407-GGUF:Q4_K_M
~ --jinja -fa on -hf MODEL --chat-template-file models/templates/llama-cpp-deepseek-r1.jinja
~ -hf ggml-org/gpt-oss-20b-GGUF --ctx-size 0 --n-cpu-moe 16 -b 2048 -ub 2048 --numa distribute --parallel 1 --jinja
~ -hf ggml-org/gpt-oss-120b-GGUF -c 0 -fa --jinja --reasoning-format none
~ -hf ggml-org/gpt-oss-20b-GGUF --jinja -ub 2048 -b 2048 -ngl 99 -fa --chat-template-kwargs '{"reasoning_effort":
  "high"}' --top-k 0 --min-p 0.01 --temp 1.0
~ -hf ggml-org/Qwen2.5-Coder-3B-Q8_0-GGUF --port 8012 -ngl 99 -fa -ub 1024 -b 1024 -dt 0.1 --ctx-size 0
  --cache-reuse 256
~ --no-webui --api-key KEY --jinja --reasoning-format auto -m model.gguf --alias gpt-oss-20b --gpu-layers 100
  --batch-size 2048 --ubatch-size 512 --no-context-shift --no-mmap --ctx-size 65536 --flash-attn --log-verbose
~ -hf unsloth/Devstral-Small-2505-GGUF:Q4_K_M --port 11434 --threads -1 --ctx-size 131072 --cache-type-k q8_0
  --cache-type-v q8_0 --flash-attn --n-gpu-layers 41 --seed 3407 --prio 2 --temp 0.15 --repeat-penalty 1.0 --min-p
  0.01 --top-k 64 --top-p 0.95 --jinja
~ -m model.gguf --temp 1.0 --top-p 0.95 --top-k 64 --jinja -fa -c 0 --no-warmup
~ -m model.gguf --temp 0.7 --top-p 0.8 --top-k 20 --min-p 0 --jinja -fa -c 0 --no-warmup
~ -m model.gguf -c 10000 --port 8000 --jinja --temp 0.3 --top-p 0.8 --top-k 20 --repeat-penalty 1.1
~ -m model.gguf -c 10000 --jinja --device none --temp 0.3 --top-p 0.8 --top-k 20 --repeat-penalty 1.1
~ --port 9001 -m model.gguf --flash-attn on --cache-type-k q8_0 --cache-type-v q8_0 --ctx-size 262144 --jinja
  --temp 0.6 --top-p 0.95 --top-k 20 --no-webui
~ -m model.gguf --port 8096 -c 135000 --flash-attn on --mlock -t 8 --poll 0 -ngl 99 --parallel 1 --spec-type
  draft-mtp --spec-draft-n-max 3 -b 4096 -ub 32 -ctk q4_0 -ctv q4_0 --jinja --temp 0.6 --seed 3407
~ -m model.gguf --spec-type draft-mtp --spec-draft-n-max 3 --n-gpu-layers all --threads 6 --fit off --load-mode
  none --no-warmup --flash-attn on --ctx-size 45056 --parallel 1 --jinja --temp 1 --top-p 0.95 --top-k 20
  --reasoning auto --reasoning-preserve --reasoning-effort medium -lv 4
~ -m model.gguf --mmproj mmproj.gguf -c 262144 -ctk q8_0 -ctv q8_0 -b 2048 -ub 1024 -ngl 99 -fa on --n-cpu-moe 35
  -np 1 --threads 4 --threads-http 4 --alias qwen --jinja --temp 0.6 --top-p 0.95 --top-k 20 --min-p 0
  --presence-penalty 0 --repeat-penalty 1 --reasoning-format deepseek --reasoning-budget 4096 --no-context-shift
  --reasoning on --no-webui
~ -m model.gguf -md draft.gguf --spec-type draft-mtp -ngl 99 --n-cpu-moe 99 -t 6 -fa on -ctk q8_0 -ctv q8_0 -c
  16384 -np 1
~ -m model.gguf -md draft.gguf --spec-draft-n-max 4 -ngld 999 -np 1 -ngl 99 -fa on -c 8192 --temp 0.7 --top-p 0.95
  --top-k 20 --min-p 0 --jinja
~ -m model.gguf -md draft.gguf --draft-max 16 --draft-min 5 --draft-p-min 0.9 -ngl 99 -ngld 99 -fa
= --reasoning off --reasoning-format none --reasoning-budget 0 -m model.gguf
~ -m model.gguf -ngl 999 -c 49152 -np 1 --reasoning-budget 0 --api-key KEY --host 0.0.0.0
~ -hf superwhisper/s1-mini-GGUF:Q4_K_M --jinja --chat-template-kwargs '{"enable_thinking":false}' --temp 0
~ -m model.gguf -ngl 99 --split-mode layer -c 16384 -np 1 -fa on -ctk q8_0 -ctv q8_0 -b 512 -ub 512 --jinja
  --cache-ram 0
~ -t 6 -fa on -ctk q8_0 -ctv q8_0 --mlock -c 4096 --cache-reuse 256 -m model.gguf
~ -m model.gguf -c 327680 -np 128 -ctk q8_0 -ctv q8_0 -fa on -ub 512 -b 2048 -lm none --no-kv-unified
  --cont-batching
~ -m model.gguf -ngl 99 --tensor-split 1,1 --jinja --threads 24 --ctx-size 32768
~ --model model.gguf --n-gpu-layers 999 --fit off --override-tensor '.*=CUDA0' --jinja --reasoning off
  --no-reasoning-preserve --log-verbosity 4
~ -m model.gguf --n-gpu-layers 99 -ot exps=CPU --no-repack
~ --model model.gguf --threads -1 --ctx-size 16384 --n-gpu-layers 99 -ot '.ffn_.*_exps.=CPU' --prio 3 --temp 0.6
  --min-p 0.01 --top-p 0.95
~ -m model.gguf -ngl 99 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768 -c 131072
! No such option: --color
  -m model.gguf -c 40960 -n 32768 --no-context-shift --jinja --color -ngl 99 -fa -sm row --temp 0.6
~ -m model.gguf --jinja --reasoning-format deepseek -ngl 99 -fa -sm row --temp 0.6 --top-k 20 --top-p 0.95 --min-p
  0 -c 40960 -n 32768 --no-context-shift
~ -m model.gguf --jinja -c 32768 --temp 0.7 --top-p 0.8 --top-k 20 --repeat-penalty 1.05 --presence-penalty 1.5
~ --model model.gguf --jinja --port 8080 -n 200
= -m model.gguf --port 8080 --ctx-size 4096 -t 4 --parallel 1 --metrics
~ -m model.gguf --embedding --pooling last -ub 8192 --verbose-prompt
~ -m model.gguf --embeddings --pooling mean -c 8192
~ -m model.gguf --rerank --port 8080
= -m model.gguf --samplers 'top_k;top_p;min_p;temperature' --xtc-probability 0.5 --xtc-threshold 0.1
  --dry-multiplier 0.8
= -m model.gguf --mirostat 2 --mirostat-ent 5.0 --mirostat-lr 0.1
= -m model.gguf --grammar 'root ::= "yes" | "no"'
= -m model.gguf -j '{"type":"object","properties":{"a":{"type":"string"}}}'
= -m model.gguf --override-kv qwen3moe.expert_used_count=int:16
! --override-kv: not supported here; tokenizer.ggml.pre
  -m model.gguf --override-kv tokenizer.ggml.pre=str:llama3
~ -m model.gguf --slots --slot-save-path /tmp/slots --props --cors-origins '*' --tags a,b
= -m model.gguf --lora adapter.gguf
= -m model.gguf --lora-scaled a.gguf 0.5 --port 8080
= -m model.gguf --lora-scaled a.gguf:0.5,b.gguf:0
= -m model.gguf --lora a.gguf --lora b.gguf,c --lora-init-without-apply
! lora_modules: ['a', 'b'] is not allowed; it must be at most one with a scale other than 0
  -m model.gguf --lora a.gguf --lora b.gguf
! --lora-scaled: 'a.gguf' is not allowed; it must be PATH:SCALE
  -m model.gguf --lora-scaled a.gguf
! -mu: not supported here; fetch the file
  -mu https://example.com/model.gguf
! --hf-file: not supported here; give the repository
  -hf unsloth/Qwen3.8-27B-GGUF:Q8_0 --hf-file model.gguf
= -m model.gguf --ssl-key-file k.pem --ssl-cert-file c.pem --api-prefix /llm
~ --models-dir models --models-max 2 --no-models-autoload
~ -m model.gguf --sleep-idle-seconds 300 --kv-unified --cache-ram 2048 --ctx-checkpoints 8 --swa-full
~ -m model.gguf --skip-chat-parsing --no-prefill-assistant --no-jinja
~ -m model.gguf --host 127.0.0.1,::1 --prefill-assistant --timeout 600
! --gpt-oss-20b-default: not supported here; name the model
  --gpt-oss-20b-default
"""

VLLM = r"""
= MODEL
= MODEL --dtype auto --api-key token-abc123
= --model MODEL --port 8000 --host 0.0.0.0
~ MODEL --trust-remote-code --max-model-len 32k
~ MODEL --max-model-len auto --gpu-memory-utilization 0.95 --enforce-eager
~ MODEL -tp 1 --kv-cache-dtype fp8 --moe-backend marlin --max-num-seqs 8 --enable-chunked-prefill
  --async-scheduling --speculative-config '{"method":"mtp","num_speculative_tokens":3,"moe_backend":"triton"}'
  --load-format fastsafetensors --reasoning-parser qwen3 --tool-call-parser qwen3_coder
= MODEL --seed 1024 --served-model-name mimo --data-parallel-size 2 --tensor-parallel-size 4
  --enable-expert-parallel --generation-config vllm
~ MODEL -dp 8 --enable-expert-parallel --language-model-only --enable-prefix-caching
~ MODEL --tensor-parallel-size=8 --attention-backend ROCM_AITER_UNIFIED_ATTN -cc.pass_config.fuse_rope_kvcache=True
  -cc.use_inductor_graph_partition=True --block-size=64
! --logits-processors: not supported here; SamplingParams
  MODEL --logits_processors a.b:C --no-enable-prefix-caching
~ MODEL --pipeline-parallel-size 1 --dtype bfloat16 --limit-mm-per-prompt '{"image":10}' --mm-processor-kwargs
  '{"max_pixels":1003520}' --guided-decoding-backend xgrammar --disable-chunked-mm-input
~ MODEL --hf-overrides '{"architectures": ["X"]}' --mm-encoder-tp-mode data --allowed-local-media-path /
  --media-io-kwargs '{"video": {"num_frames": -1}}'
= MODEL --hf-overrides '{"rope_parameters":{"rope_type":"yarn","factor":4.0}}' --max-model-len 131072
= MODEL --rope-scaling '{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768}' --max-model-len
  131072
= MODEL --hf-overrides.rope_parameters.rope_theta 1000000
~ MODEL --tokenizer_mode mistral --config_format mistral --load_format mistral --enable-auto-tool-choice
= MODEL --speculative-config.method mtp --speculative-config.num_speculative_tokens 1
~ MODEL --compilation_config '{"cudagraph_mode": "PIECEWISE"}' -O3
~ MODEL -tp 4 --disable-log-requests --swap-space 32 --distributed-executor-backend mp
~ MODEL --tensor-parallel-size 8 --quantization fp8 --cpu-offload-gb 50
~ MODEL --quantization bitsandbytes --load-format bitsandbytes
= MODEL --quantization awq_marlin
! quantization: 'ascend' is not allowed; it must be one of int4
  MODEL --quantization ascend
~ MODEL --attention-config '{"a":true}' --max-cudagraph-capture-size 2048 --speculative-config
  '{"method":"eagle3","model":"DRAFT","num_speculative_tokens":4}'
= MODEL --speculative-config '{"model":"DRAFT","method":"eagle","max_model_len":"65536"}'
! speculative_config.method: 'dflash' is not allowed; it must be one of ngram
  MODEL --speculative-config '{"method":"dflash","model":"DRAFT"}'
~ MODEL --optimization-level 3 --performance-mode throughput
~ MODEL --tool-server demo
= MODEL --tensor-parallel 4
! --config: 'recipe.yaml' is not allowed; it must be a YAML file
  MODEL --config recipe.yaml
~ MODEL --kv-cache-dtype fp8 --enable-flashinfer-autotune --mamba-backend triton --mamba-ssm-cache-dtype float32
~ MODEL --limit-mm-per-prompt.video 0 --mm-processor-cache-type shm
~ MODEL --runner pooling --hf-overrides '{"jina_task": "retrieval"}'
= MODEL --chat-template examples/tool_chat_template_gemma4.jinja --enable-auto-tool-choice
~ MODEL --tool-parser-plugin parser.py --enable-auto-tool-choice
~ MODEL --enable-expert-parallel -tp 8 --attention_config.use_fp4_indexer_cache False --tokenizer-mode deepseek_v4
  --reasoning-config '{"reasoning_start_str":""}'
= MODEL --no-enable-chunked-prefill --max-num-batched-tokens 65536 --no-enforce-eager
~ MODEL --tensor-parallel-size 8 --decode-context-parallel-size 8
~ MODEL --kernel-config.enable_flashinfer_autotune=False --linear-backend aiter
= MODEL --default-chat-template-kwargs '{"enable_thinking": true}' --served-model-name a b
= MODEL --override-generation-config '{"temperature": 0.6, "max_new_tokens": 4096}'
~ MODEL --additional-config '{"enable_cpu_binding":true}' --video-pruning-rate 0.5
! --nnodes: '2' is not allowed; it must be 1: ranks of other
  MODEL --nnodes 2 --node-rank 0 --master-addr 10.0.0.1
! --headless: not supported here
  MODEL --headless --data-parallel-size-local 4
! --data-parallel-size-local: not supported here; engines
  MODEL --data-parallel-size 16 --data-parallel-size-local 8
! --kv-transfer-config: not supported here; one
  MODEL --kv-transfer-config '{"kv_connector":"NixlConnector"}'
= MODEL --enable-lora --lora-modules a=b c=d --max-lora-rank 32
~ MODEL --enable-lora --max-cpu-loras 4 --fully-sharded-loras
! --omni: not supported here; pictures are read as the model's own files say
  MODEL --omni
~ MODEL --task embed --enable-sleep-mode --root-path /llm
~ MODEL --api-server-count 4 --stream-interval 10 --max-num-partial-prefills 4
! --uds: not supported here; put a proxy in front
  MODEL --uds /tmp/vllm.sock
= MODEL --num-gpu-blocks-override 512 --kv-cache-memory-bytes 10G --long-prefill-token-threshold 2048
= MODEL --speculative-model '[ngram]' --num-speculative-tokens 5 --ngram-prompt-lookup-max 4
~ MODEL --cudagraph-capture-sizes 1 2 4 8 --max-logprobs -1
= MODEL --tokenizer OTHER --revision main --scheduling-policy priority
~ MODEL --trust-request-chat-template --response-role assistant --enable-prompt-tokens-details
"""


def lines_of(table: str) -> dict[str, str]:
    """Return the command lines of a table, with what becomes of each."""
    lines: dict[str, str] = {}
    line = refusal = ""
    for row in table.strip().splitlines():
        mark, text = row[0], row[2:]
        if mark == "!":
            line, refusal = "", text
        elif mark == " " and line:
            lines[f"{line} {text}"] = lines.pop(line)
            line = f"{line} {text}"
        else:
            line = text
            lines[line] = {"=": STARTS, "~": WARNS}.get(mark, refusal)
    return lines


ENGINES = {"llama-server": lines_of(LLAMA_SERVER), "vLLM": lines_of(VLLM)}


@pytest.fixture(scope="module")
def serve() -> Any:
    return typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]


def outcome(serve: Any, line: str) -> str:
    """Return what becomes of a command line until the model's files are read."""
    try:
        context = serve.make_context("serve", shlex.split(line))
        values = {name: value for name, value in context.params.items() if name != "rendezvous"}
        build(EngineConfig, values | {"model": values["model"] or "builtin"})
        build(ServerConfig, values)
    except RequestError as error:
        return str(error)
    except Exception as error:
        return str(getattr(error, "message", error))
    return WARNS if context.meta["notes"] else STARTS


@pytest.mark.parametrize(("engine", "line"), [(name, line) for name, lines in ENGINES.items() for line in lines])
def test_a_command_line_starts_or_says_why_not(serve: Any, engine: str, line: str) -> None:
    result = outcome(serve, line)
    assert result.startswith(ENGINES[engine][line])
    if ": not supported here; " in result:
        assert len(result.partition("not supported here; ")[2]) > 10, "it names a better way"


def test_counts(serve: Any) -> None:
    for engine, lines in ENGINES.items():
        counts = Counter(word if word in (STARTS, WARNS) else "refused" for word in lines.values())
        print(f"\n{engine}: {len(lines)} command lines, " + ", ".join(f"{num} {word}" for word, num in counts.items()))
        assert counts[STARTS] + counts[WARNS] > 4 * counts["refused"]


def test_a_flag_that_is_of_no_engine_does_not_start(serve: Any) -> None:
    assert outcome(serve, "MODEL --no-such-flag 1").startswith("No such option")
