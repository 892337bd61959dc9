"""`python -m bench.llm_int8 [MODEL]`: LLM.int8() in headrace beside the method itself, with planted outliers.

The method is computed twice: as the paper has it (arXiv 2208.07339, section 3), in torch, and by bitsandbytes, where it
is installed. All have the same weights of 8 bits; the table has the mean KL from the model in float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.outliers import SMALL, store_llm_int8
from headrace import hub
from headrace.cli.bench.divergence import Tally
from headrace.cli.bench.outliers import plant
from headrace.cli.bench.quality import Text, opened, scored, written_text
from headrace.protocol.config import EngineConfig

TRAINING = Path(__file__).parents[1] / "training"
PLANTED = ((0, 1.0), (1, 64.0), (3, 8.0), (3, 64.0), (3, 512.0), (30, 64.0))
MODES = ("auto", "int8")
THRESHOLD = 6.0


class PaperLinear(nn.Module):
    """Columns in which any row of the batch reaches the threshold in 16 bits, the others in int8 by row and output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.abs().amax(1) / 127
        self.codes = torch.round(linear.weight / self.scale[:, None])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).half().float()
        outliers = (rows.abs() >= THRESHOLD).any(0)
        rest = rows.masked_fill(outliers, 0.0)
        scale = rest.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        y = (torch.round(rest / scale) @ self.codes.T) * scale * self.scale
        wide = (self.codes[:, outliers] * self.scale[:, None]).half().float()
        return (y + rows[:, outliers] @ wide.T).half().float().view(*x.shape[:-1], -1)


def library_linear(linear: nn.Linear) -> nn.Module:
    import bitsandbytes  # type: ignore[import-not-found, unused-ignore]

    options: dict[str, Any] = {"bias": False, "has_fp16_weights": False, "threshold": THRESHOLD}
    layer: Any = bitsandbytes.nn.Linear8bitLt(linear.in_features, linear.out_features, **options)
    layer.weight = bitsandbytes.nn.Int8Params(linear.weight.data.clone(), requires_grad=False, has_fp16_weights=False)
    module: nn.Module = layer.to("cpu")
    return module


def loss_of(make: Callable[[nn.Linear], nn.Module], directory: Path, text: Text) -> float:
    """Return the mean KL [nats] of the model with its decoder's linear layers replaced by `make`."""
    sys.path.insert(0, str(TRAINING))
    from model import load_model  # type: ignore[import-not-found, unused-ignore]

    reference, model = load_model(directory), load_model(directory)
    for name, linear in [(n, m) for n, m in model.layers.named_modules() if isinstance(m, nn.Linear)]:
        parent, _, last = name.rpartition(".")
        setattr(model.layers.get_submodule(parent), last, make(linear))
    tally = Tally()
    with torch.no_grad():
        for window in text.windows:
            ids = torch.tensor([window])
            tally.add(window[1:], model(ids)[0, :-1].float().numpy(), reference(ids)[0, :-1].numpy())
    return tally.figures(text.num_bytes)["mean_kl"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin", help="a Llama with tied embeddings")
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()
    methods: dict[str, Callable[[nn.Linear], nn.Module]] = {"the paper": PaperLinear}
    if importlib.util.find_spec("bitsandbytes") is not None:
        methods["bitsandbytes"] = library_linear
    print("| inputs | times | " + " | ".join([*MODES, *methods]) + " |")
    for num_inputs, factor in PLANTED:
        with tempfile.TemporaryDirectory() as folder:
            planted = plant(hub.resolve(args.model), Path(folder) / "planted", num_inputs, factor)
            stored = store_llm_int8(planted, Path(folder) / "stored")
            losses = []
            with closing(opened(EngineConfig(model=str(planted), **SMALL))) as reference:
                text = written_text(reference, 256, args.max_tokens)
                for mode in MODES:
                    with closing(opened(EngineConfig(model=str(stored), activations=mode, **SMALL))) as llm:
                        losses.append(scored(llm, reference, text)["mean_kl"])
            losses += [loss_of(make, planted, text) for make in methods.values()]
        cells = [str(num_inputs), f"{factor:.0f}", *(f"{1e3 * loss:.2f}" for loss in losses)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
