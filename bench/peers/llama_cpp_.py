"""llama.cpp through llama-cpp-python's low-level binding: contexts of their own for each number of sequences, batches
of 2,048 tokens in micro-batches of 512, the rest as its defaults have it (mapping, repacking, f16 cache).

The checkpoint is written as GGUF in bf16 without a vocabulary, then quantised by llama.cpp itself, which gives the tied
head Q6_K where the layers are Q4_0.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.peers import protocol
from bench.peers.protocol import Job

BATCH = 2048


class LlamaCpp:
    def __init__(self, job: Job) -> None:
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]
        import numpy

        self._library, self._numpy, self._threads, self._vocab = llama_cpp, numpy, job.threads, job.vocab
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model: Any = llama_cpp.llama_model_load_from_file(job.model.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {job.model}")
        self.instructions = llama_cpp.llama_print_system_info().decode()
        self.weight_bytes: int | None = os.path.getsize(job.model)
        self._context: Any = None
        self._batch: Any = None
        self._room = (0, 0)

    def prepare(self, num_seqs: int, length: int) -> None:
        if num_seqs == self._room[0] and length <= self._room[1]:
            return
        if self._context:
            self._library.llama_free(self._context)
        length = max(length, 256)
        params = self._library.llama_context_default_params()
        params.n_ctx = num_seqs * length
        params.n_seq_max = num_seqs
        params.n_batch = BATCH
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._library.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context of {num_seqs} sequences of {length} tokens")
        if self._batch is None:
            self._batch = self._library.llama_batch_init(BATCH, 0, 1)
        self._room = (num_seqs, length)

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> int:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        rows = [
            (seq, place, token_id, place == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for place, token_id in enumerate(prompt)
        ]
        latest = self._decode(rows)
        num_tokens = len(latest)
        for i in range(num_new - 1):
            latest = self._decode(
                [(seq, len(prompts[seq]) + i, token_id, True) for seq, token_id in sorted(latest.items())]
            )
            num_tokens += len(latest)
        return num_tokens

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run rows of (sequence, position, token id, whether a token is wanted); the wanted tokens by sequence."""
        tokens: dict[int, int] = {}
        batch = self._batch
        for begin in range(0, len(rows), BATCH):
            part = rows[begin : begin + BATCH]
            batch.n_tokens = len(part)
            for i, (seq, place, token_id, has_logits) in enumerate(part):
                batch.token[i] = token_id
                batch.pos[i] = place
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = seq
                batch.logits[i] = has_logits
            status = self._library.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            for i, (seq, _, _, has_logits) in enumerate(part):
                if has_logits:
                    logits = self._library.llama_get_logits_ith(self._context, i)
                    tokens[seq] = int(self._numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())
        return tokens


# Names of llama.cpp by those of the checkpoint, and whether its rotary halves are stored interleaved there.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The name in a GGUF of a tensor of the checkpoint. Raises KeyError for one that has none."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, inner = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[inner.removesuffix('.weight')]}.weight"


def stored(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, bf16 bits as uint16) of every tensor of a safetensors file."""
    import numpy

    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        bits = numpy.frombuffer(data, numpy.uint16, (end - begin) // 2, start + begin)
        yield name, bits.reshape(entry["shape"])


def write_gguf(source: Path, out: Path) -> None:
    import gguf  # type: ignore[import-not-found, unused-ignore]
    import numpy

    config = json.loads((source / "config.json").read_text())
    kind, heads, kv_heads = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, kind)
    trained = (config.get("rope_scaling") or {}).get("original_max_position_embeddings")
    writer.add_context_length(trained or config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    for name, bits in stored(source / "model.safetensors"):
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(numpy.uint32) << 16).view(numpy.float32))
            continue
        turned = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0
        if turned and kind == "llama":  # its rotary pairs are neighbours, the checkpoint's are half a head apart
            shape = bits.shape
            bits = bits.reshape(turned, 2, -1, shape[1]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(
            gguf_name(name), numpy.ascontiguousarray(bits).view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(job: Job) -> None:
    import llama_cpp

    out = Path(job.model)
    wide = out.with_name(f"{job.shape}-bf16.gguf")
    if not wide.exists():
        part = wide.with_name(wide.name + ".part")
        write_gguf(Path(job.source), part)
        part.rename(wide)
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = job.threads
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{job.quant}")
    status = llama_cpp.llama_model_quantize(str(wide).encode(), job.model.encode(), ctypes.byref(params))
    if status:
        raise RuntimeError(f"llama_model_quantize returned {status}")


if __name__ == "__main__":
    protocol.main(LlamaCpp, convert, ["llama-cpp-python", "gguf"])
