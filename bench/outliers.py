"""`python -m bench.outliers [MODEL]`: what outliers in the activations cost each form of the weights, in one table.

Outliers are planted in a copy of MODEL: some inputs that the norms give out are made greater by a factor, and the
columns behind them less by it, so that the function is the same. Every form is loaded with each value of
`--activations`; the table has the mean KL from the planted model in float32, on a text that this writes. A checkpoint
of LLM.int8() is made as bitsandbytes stores it, without a 16-bit part.

`--render` puts the table into docs/quantisation.md, between its marks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.record import commit
from headrace import doctor, hub
from headrace.cli.bench.divergence import Tally, score
from headrace.cli.bench.outliers import plant
from headrace.cli.bench.quality import opened, program_of, written_text
from headrace.protocol.config import EngineConfig

PAGE = Path(__file__).parents[1] / "docs" / "quantisation.md"
PLANTED = [(0, 1.0), *[(num, factor) for num in (1, 3, 30) for factor in (8.0, 64.0, 512.0)]]
FORMS = ("int8", "LLM.int8()", "int4")
MODES = ("int8", "auto", "16bit")
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 1024, "dtype": "float32"}


def store_llm_int8(source: Path, out: Path) -> Path:
    """Write the model as bitsandbytes stores LLM.int8(): codes, and the greatest magnitude of each row."""
    out.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in load_file(source / "model.safetensors").items():
        weight = stored.float()
        if not name.endswith("_proj.weight"):
            tensors[name] = stored
            continue
        largest = weight.abs().amax(1)
        tensors[name] = torch.round(weight * (127 / largest)[:, None]).to(torch.int8)
        tensors[name.replace(".weight", ".SCB")] = largest
        tensors[name.replace(".weight", ".weight_format")] = torch.zeros((), dtype=torch.uint8)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for path in source.glob("*.json"):
        shutil.copy(path, out / path.name)
    stated = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    config = json.loads((out / "config.json").read_text()) | {"quantization_config": stated}
    (out / "config.json").write_text(json.dumps(config))
    return out


def rows(model: str, max_tokens: int) -> Iterator[str]:
    """The rows of the table, as they are measured."""
    with tempfile.TemporaryDirectory() as folder:
        for index, (num_inputs, factor) in enumerate(PLANTED):
            planted = plant(hub.resolve(model), Path(folder) / f"{index}", num_inputs, factor)
            stored = store_llm_int8(planted, Path(folder) / f"{index}-llm-int8")
            with closing(opened(EngineConfig(model=str(planted), **SMALL))) as reference:
                text = written_text(reference, 256, max_tokens)
                cells = [str(num_inputs), f"{factor:.0f}" if num_inputs else "-"]
                for form in FORMS:
                    path, name = (stored, None) if form == "LLM.int8()" else (planted, form)
                    for mode in MODES:
                        config: dict[str, Any] = {"model": str(path), "quantization": name, "activations": mode}
                        with closing(opened(EngineConfig(**config, **SMALL))) as llm:
                            tally = Tally()
                            for _ in score(program_of(llm), program_of(reference), text.windows, tally):
                                pass
                        cells.append(f"{1000 * tally.figures(text.num_bytes)['mean_kl']:.1f}")
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--render", action="store_true", help="put the table into docs/quantisation.md")
    args = parser.parse_args()
    heads = [f"{form}, {mode}" for form in FORMS for mode in MODES]
    lines = [
        f"`python -m bench.outliers {args.model}`: KL [mnats], {args.max_tokens} tokens written by the reference; "
        f"{doctor.cpu()['name']}, commit {commit()}.",
        "",
        f"| inputs | times | {' | '.join(heads)} |",
        f"|--:|--:|{'--:|' * len(heads)}",
    ]
    for row in rows(args.model, args.max_tokens):
        print(row, flush=True)
        lines.append(row)
    if args.render:
        begin, end = "<!-- quality outliers -->", "<!-- end of quality outliers -->"
        before, _, rest = PAGE.read_text().partition(begin)
        _, _, after = rest.partition(end)
        PAGE.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}")


if __name__ == "__main__":
    main()
