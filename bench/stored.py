"""`python -m bench.stored`: the bytes of each stored form of the weights in its file and in memory, in one table.

One layer of random weights is stored in every form that `headrace quantize` writes and in some that others write, and
is loaded by the native backend. Its shapes fill the kernels' panels (32 outputs) and blocks (256 inputs), as those of
real models do, so padding does not count. tests/bench/test_stored.py holds the ratio of each form to `MOST_HELD`,
except those that say here why they take more. A new form is a row of `FORMS`.

`--render` puts the table into docs/quantisation.md, between its marks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from bench.quality import PAGE, marked
from headrace import builtin
from headrace.backends.cpu.matrix import parts_of
from headrace.cli.bench.quality import matrices_of, opened, program_of, stored_bytes
from headrace.protocol.config import EngineConfig
from headrace.quant.placements import MOST_HELD
from headrace.quantize.base import Options
from headrace.quantize.driver import quantise_checkpoint
from headrace.quantize.gguf_writer import convert

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
TEXT = [[(7 * i * i + 3 * i + k) % 64 for i in range(32)] for k in range(2)]
SMALL: dict[str, Any] = {"backend": "cpu", "num_gpu_blocks_override": 8, "max_model_len": 64, "dtype": "bfloat16"}


class Form(NamedTuple):
    """A row. options: of `headrace quantize` (`quantize.base.Options`); layout: the format, or "gguf:LEVEL". change:
    what is done to the checkpoint afterwards. cost: why it takes more than `MOST_HELD` times its bytes, or "".
    """

    name: str
    layout: str
    options: Mapping[str, Any] = MappingProxyType({})
    change: Callable[[Path, Path], None] | None = None
    cost: str = ""


class Sizes(NamedTuple):
    """Bytes of the matrices of one form, and the weights in them. parts: how many forms they have in memory."""

    stored: int
    held: int
    num_weights: int
    parts: int

    @property
    def ratio(self) -> float:
        return self.held / self.stored


def with_plain_v(out: Path, source: Path) -> None:
    """Store v_proj as the source has it, and name it under `ignore`."""
    name = "model.layers.0.self_attn.v_proj"

    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.startswith(name)]:
            del tensors[key]
        tensors[f"{name}.weight"] = load_file(source / "model.safetensors")[f"{name}.weight"]
        config["ignore"] = [*config.get("ignore", []), name]

    edit(out, change)


def with_int8_v(out: Path, source: Path) -> None:
    """Store v_proj in 8 bits, in a group of its own in `config_groups`."""
    name = "model.layers.0.self_attn.v_proj"
    weight = load_file(source / "model.safetensors")[f"{name}.weight"].float()

    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.startswith(name)]:
            del tensors[key]
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[f"{name}.weight"] = torch.round(weight / scale).to(torch.int8)
        tensors[f"{name}.weight_scale"] = scale
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        config["config_groups"]["of_v"] = {"targets": [name], "weights": weights, "format": "int-quantized"}

    edit(out, change)


def with_other_order(out: Path, source: Path) -> None:
    """Give k_proj its inputs in another order than q_proj and v_proj, as if it had been calibrated apart."""

    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        name = "model.layers.0.self_attn.k_proj.g_idx"
        tensors[name] = tensors[name].flip(0).contiguous()

    edit(out, change)


def as_nvfp4(out: Path, source: Path) -> None:
    """Make NVFP4 of MXFP4: a scale of E4M3 for each 16 codes, and one of float32 for the matrix. The codes stay."""

    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.endswith(".weight_packed")]:
            name = key.removesuffix("_packed")
            scales = tensors[f"{name}_scale"].float().sub(127).exp2().repeat_interleave(2, 1)
            outer = 256 / scales.max()
            tensors[f"{name}_scale"] = (scales * outer).to(torch.float8_e4m3fn)
            tensors[f"{name}_global_scale"] = outer.reshape(1)
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
        config["format"] = "nvfp4-pack-quantized"
        for group in config["config_groups"].values():
            group |= {"format": config["format"], "weights": weights}

    edit(out, change)


ORDERED = {"method": "gptq", "act_order": "group"}
MXFP4 = {"method": "mxfp4", "group_size": 32}

FORMS: tuple[Form, ...] = (
    Form("GPTQ int4-g128", "gptq"),
    Form("GPTQ int4-g128, asymmetric", "gptq", {"symmetric": False}),
    Form("GPTQ int4-g128, act-order", "gptq", ORDERED),
    Form("GPTQ int4-g128, act-order, asymmetric", "gptq", {"symmetric": False, **ORDERED}),
    Form("GPTQ int4-g128, act-order, k in another order", "gptq", ORDERED, with_other_order),
    Form("GPTQ int8-g128", "gptq", {"bits": 8}),
    Form("GPTQ int8-g128, asymmetric", "gptq", {"bits": 8, "symmetric": False}),
    Form("GPTQ int8-g32, asymmetric", "gptq", {"bits": 8, "group_size": 32, "symmetric": False}),
    Form("GPTQ int8 (a scale for each output), asymmetric", "gptq", {"bits": 8, "group_size": -1, "symmetric": False}),
    Form("GPTQ int8-g128, act-order, asymmetric", "gptq", {"bits": 8, "symmetric": False, **ORDERED}),
    Form("AWQ int4-g128", "awq", {"symmetric": False}),
    Form("AWQ int4-g64", "awq", {"group_size": 64, "symmetric": False}),
    Form("AWQ int4-g32", "awq", {"group_size": 32, "symmetric": False}, None, "zero points are minima of 16 bits"),
    Form("compressed-tensors int8-g128", "compressed-tensors", {"bits": 8}),
    Form("compressed-tensors int8-g128, asymmetric", "compressed-tensors", {"bits": 8, "symmetric": False}),
    Form("compressed-tensors W8A8", "compressed-tensors", {"bits": 8, "group_size": -1}),
    Form("compressed-tensors int4-g128, v ignored", "compressed-tensors", {}, with_plain_v),
    Form("compressed-tensors int4-g128, v in int8", "compressed-tensors", {}, with_int8_v),
    Form("fp8 E4M3", "fp8", {"method": "fp8", "bits": 8, "group_size": -1}),
    Form("fp8 E5M2", "fp8", {"method": "fp8_e5m2", "bits": 8, "group_size": -1}, None, "no kernel: held in 16 bits"),
    Form("NF4 (bitsandbytes)", "bitsandbytes", {"method": "nf4", "group_size": 64}),
    Form("LLM.int8() with outliers", "bitsandbytes", {"method": "llm_int8", "bits": 8, "group_size": -1}),
    Form("MXFP4 (compressed-tensors)", "compressed-tensors", MXFP4, None, "scales of 8 bits are held in 16"),
    Form("NVFP4 (compressed-tensors)", "compressed-tensors", MXFP4, as_nvfp4, "scales of 8 bits are held in 16"),
    Form("compressed-tensors int3-g128", "compressed-tensors", {"bits": 3}),
    Form("GPTQ int3-g128, asymmetric", "gptq", {"bits": 3, "symmetric": False}),
    Form("GPTQ int2-g128, asymmetric", "gptq", {"bits": 2, "symmetric": False}),
    *(Form(f"{level} (GGUF)", f"gguf:{level}") for level in ("Q8_0", "Q6_K", "Q4_K_M", "Q4_1", "Q4_0")),
    *(Form(f"{level} (GGUF)", f"gguf:{level}") for level in ("Q5_K_S", "Q5_0", "Q5_1", "Q3_K_S", "Q2_K")),
)  # fmt: skip


def make_plain(folder: Path) -> Path:
    """Write the model in bfloat16 and return its directory."""
    width = 256
    shapes = {f"self_attn.{name}_proj": (128 if name in "kv" else width, width) for name in "qkvo"}
    shapes |= {f"mlp.{name}_proj": (width, width) for name in ("gate", "up", "down")}
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"model.layers.0.{name}.weight": torch.randn(shape, generator=generator) / 16 for name, shape in shapes.items()
    }
    tensors["model.embed_tokens.weight"] = torch.randn(2048, width, generator=generator)
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(width)
    folder.mkdir()
    for path in builtin.directory().glob("tokenizer*"):
        shutil.copy(path, folder / path.name)
    save_file({name: part.bfloat16() for name, part in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make(form: Form, source: Path, out: Path) -> Path:
    """Write `source` in a form and return the path."""
    layout, _, level = form.layout.partition(":")
    if level:
        convert(source, out.with_suffix(".gguf"), level)
        return out.with_suffix(".gguf")
    quantise_checkpoint(source, out, Options(**form.options), layout, TEXT)
    if form.change is not None:
        form.change(out, source)
    return out


def sizes_of(path: Path) -> Sizes:
    """Load a checkpoint, and return the bytes of the matrices of its layers."""
    with closing(opened(EngineConfig(model=str(path), **SMALL))) as llm:
        matrices = [matrix for matrix in matrices_of(program_of(llm)) if "_proj" in matrix.name]
        parts = [part for matrix in matrices for part in parts_of(matrix)]
    stored = stored_bytes(path, [matrix.name for matrix in matrices])
    if stored is None:
        raise SystemExit(f"{path} lacks tensors of its matrices")
    num_weights = sum(part.num_in * part.num_out for part in parts)
    return Sizes(stored, sum(part.num_bytes for part in parts), num_weights, len({part.scheme for part in parts}))


def rows(forms: Sequence[Form], folder: Path) -> Iterator[tuple[Form, Sizes]]:
    source = make_plain(folder / "plain")
    for index, form in enumerate(forms):
        yield form, sizes_of(make(form, source, folder / f"{index}"))


def line(form: Form, sizes: Sizes) -> str:
    bits = [8 * num_bytes / sizes.num_weights for num_bytes in (sizes.stored, sizes.held)]
    return f"| {form.name} | {bits[0]:.3f} | {bits[1]:.3f} | {sizes.ratio:.3f} | {form.cost} |"


def edit(out: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """Change the tensors of layer 0 and the quantization_config."""
    path = next(path for path in sorted(out.glob("*.safetensors")) if any("q_proj" in key for key in load_file(path)))
    tensors, config = load_file(path), json.loads((out / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, path, {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    index = out / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text())
        others = {name: file for name, file in listed["weight_map"].items() if file != path.name}
        listed["weight_map"] = others | dict.fromkeys(tensors, path.name)
        index.write_text(json.dumps(listed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="put the table into docs/quantisation.md")
    args = parser.parse_args()
    lines = [
        f"`python -m bench.stored`: bits of a weight of one layer, scales and all else included; at most "
        f"{MOST_HELD} times as many in memory, but for the forms that say why.",
        "",
        "| form | stored | held | ratio | why more |",
        "|---|--:|--:|--:|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for form, sizes in rows(FORMS, Path(folder)):
            lines.append(line(form, sizes))
            print(lines[-1], flush=True)
    if args.render:
        PAGE.write_text(marked(PAGE.read_text(), "stored", "\n".join(lines) + "\n"))


if __name__ == "__main__":
    main()
