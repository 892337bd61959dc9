"""The native backend: kernels of csrc/ on the CPU, recorded on a tape. The default where the library is built.

Values between operators are float32 whatever the model's dtype; weights are kept as the checkpoint has them or as
`quantization` says, the cache as `kv_cache_dtype` says. Needs no torch to run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from headrace import env
from headrace.backends.base import LayerShape, SampleText, SetUp, part_of_memory
from headrace.backends.cpu import cache
from headrace.backends.cpu.adapters import CpuAdapters
from headrace.backends.cpu.choose import MAX_WIDTH, Chooser
from headrace.backends.cpu.losses.activations import choose_activations
from headrace.backends.cpu.losses.saved import SavedLosses
from headrace.backends.cpu.matrix import ACT_GROUP, TYPE_CODES, Table
from headrace.backends.cpu.memory import aligned
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.cpu.program import MAX_ROWS, TapedProgram, TapeOptions
from headrace.backends.cpu.ranks import RankOps
from headrace.backends.key_means import LENGTH, NUM_SEQS, mean_key, probe_tokens
from headrace.backends.native import require_native
from headrace.backends.neighbours import neighbours_of
from headrace.backends.shares import Seat
from headrace.backends.step import Chunks, StepSizes
from headrace.protocol.errors import RequestError
from headrace.quant.arrays import floats, place_of, type_name
from headrace.quant.schemes import F8_SCHEMES, K_BLOCK, K_TYPES, SCHEMES, Scheme, native_flag


class Cpu:
    """Memory and operators of the native backend."""

    name = "cpu"
    kv_dtypes = tuple(cache.TYPE_CODES)
    block_tables = tuple(K_TYPES)
    schemes = SCHEMES | F8_SCHEMES
    mixes = True
    sees_wholes = True

    def __init__(self, device: str, dtype: str) -> None:
        if device != "cpu":
            raise RequestError("device", device, "cpu for backend cpu")
        self.device = device
        self.dtype = dtype
        self.ops: CpuOps | RankOps = CpuOps(dtype)
        self._saved_losses: SavedLosses | None = None

    def take_seat(self, seat: Seat) -> RankOps:
        """Record one rank's part of all models from now on; return its operators. Must come before any matrix."""
        if isinstance(self.ops, RankOps):
            raise ValueError("a backend has one seat")
        self.ops = RankOps(self.ops, seat)
        return self.ops

    def take_stage(self) -> None:
        """Load some layers of all models from now on. Must come before any matrix."""
        if isinstance(self.ops, RankOps):
            raise ValueError("a backend has one seat")
        self.ops.copies = True

    def constant(self, values: NDArray[Any], is_weight: bool = False) -> NDArray[np.float32]:
        """Return `values` as contiguous float32; a copy of a weight, so that no page of its file is held."""
        wide: NDArray[np.float32] = np.ascontiguousarray(floats(values))
        return wide.copy() if is_weight and wide is values else wide

    def table(self, values: NDArray[Any]) -> Table:
        """Return the table as it is stored; of a mapped one, rows are read from the file."""
        if type_name(values) not in TYPE_CODES or not values.flags.c_contiguous:
            values = np.ascontiguousarray(floats(values))
        dtype, (height, width) = type_name(values), values.shape
        if dtype in K_TYPES:
            width *= K_BLOCK
        return Table(values.ctypes.data, *(place_of(values) or (-1, 0)), TYPE_CODES[dtype], height, width, values)

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory that is read fast. Raises MemoryError."""
        return aligned(num_bytes)

    def take_adapters(self, num_slots: int, max_rank: int) -> CpuAdapters:
        if isinstance(self.ops, RankOps):
            raise ValueError("one rank of several takes no adapters")
        self.ops.adapters = CpuAdapters(num_slots, max_rank)
        return self.ops.adapters

    def layouts(self) -> dict[str, str]:
        """Return the name of each format's layout: a packed file with other names does not fit."""
        native = require_native()
        return {kind: native.layout(kind) for kind in ("i2", "i3", "i4", "i5", "i6", "i8", "f8", "k", "f")}

    def packed_bytes(self, scheme: Scheme, num_out: int, num_in: int) -> int:
        group = scheme.group or ACT_GROUP
        return int(require_native().packed_bytes(scheme.kind, num_out, num_in, group, native_flag(scheme)))

    def choose_activations(
        self, model: Any, mode: str, num_threads: int, stated: str = "", text: SampleText | None = None
    ) -> str:
        return choose_activations(self.ops, model, mode, num_threads, stated, self._saved_losses, text)

    def keep_losses(self, path: Path, max_model_len: int, may_write: bool) -> None:
        """Keep the measurements of the weights in the file `path`, in the weights' folder."""
        self._saved_losses = SavedLosses(path, max_model_len, may_write)

    def chooser(self, width: int, num_threads: int) -> Chooser | None:
        return Chooser(width, num_threads) if width <= MAX_WIDTH else None

    def block_bytes(self, model: Any, kind: int, block_size: int, kv_dtype: str) -> int:
        def num_bytes(shapes: Sequence[LayerShape]) -> int:
            return cache.block_bytes(shapes, kind, block_size, kv_dtype)

        # Where several hosts have layers, the fullest of them counts.
        if (by_host := getattr(model, "shapes_by_host", None)) is not None:
            return max(map(num_bytes, by_host))
        return sum(map(num_bytes, self.ops.every_cache(model)))

    def program(self, model: Any, set_up: SetUp, feature_layers: Sequence[int] = ()) -> TapedProgram:
        block_size, num_threads = set_up.block_size, set_up.num_threads
        kv = cache.KVCache(self.ops.cache_shapes(model), set_up.pool_sizes, block_size, set_up.kv_dtype)
        if set_up.kv_dtype == "int4":
            self._measure_keys(model, kv, (set_up.max_blocks_per_seq - 1) * block_size + 1, num_threads)
        # A text of an encoder is computed at once.
        longest = set_up.max_blocks_per_seq * block_size if model.both_ways else 0
        max_rows = min(max(MAX_ROWS, longest), set_up.max_num_batched_tokens)
        max_chunks = min(set_up.max_num_seqs, max_rows)
        sizes = StepSizes(max_rows, max_chunks, max_chunks * set_up.max_blocks_per_seq)
        check = env.debug_level() >= 3
        if check and importlib.util.find_spec("torch") is None:
            raise RequestError("HEADRACE_DEBUG", 3, "less, or install torch: pip install 'headrace[torch]'")
        return TapedProgram(model, self.ops, kv, sizes, TapeOptions(num_threads, check=check), feature_layers)

    def _measure_keys(self, model: Any, kv: cache.KVCache, max_len: int, num_threads: int) -> None:
        """Run the probe over a float32 cache, and set the mean key of each layer of `kv`."""
        length = min(LENGTH, max_len)
        probe_kv = cache.KVCache(self.ops.cache_shapes(model), [NUM_SEQS] * len(model.kinds), length, "float32")
        sizes = StepSizes(NUM_SEQS * length, NUM_SEQS, NUM_SEQS)
        probe = TapedProgram(model, self.ops, probe_kv, sizes, TapeOptions(num_threads))
        tables = [[i] for i in range(NUM_SEQS)]
        neighbours = neighbours_of(model)
        features = None if neighbours is None else neighbours.take(NUM_SEQS * length, model.feature_size)
        tokens = probe_tokens(probe.vocab_size, length)
        chunks = Chunks([0] * NUM_SEQS, tokens, tables, states_in=[-1] * NUM_SEQS)
        _, hidden = probe.hidden_rows(chunks.all_read(), features)
        if neighbours is not None:
            neighbours.give(hidden)
        stores, looks = ([n.fields for n in probe.tape.nodes if n.op == op] for op in ("rope_store", "attention"))
        stores = [store for store in stores if store["k"] is not None]  # without `CpuOps.rope`, which stores nothing
        # Layers of other processes keep nothing here.
        attending = [i for i, shape in enumerate(model.cache_shapes) if shape.num_kv_heads and not shape.states]
        every = zip(attending, looks, strict=True)
        writers = [(kv.layers[i], look) for i, look in every if model.cache_shapes[i].source is None]
        for (layer, look), store in zip(writers, stores, strict=True):
            # Soft caps and sinks depend on the scores themselves, so there no mean may be subtracted.
            if layer.key_mean is not None and not look["softcap"] and look["sinks"] is None:
                keys = cache.numbers(store, "k", np.arange(NUM_SEQS * length))
                rope_table = (store["cos"], store["sin"]) if store["pairs"] else (None, None)
                layer.key_mean[:] = mean_key(keys.reshape(NUM_SEQS, length, *keys.shape[1:]), *rope_table)
        probe.close()

    def available_memory(self) -> int:
        return int(psutil.virtual_memory().available)

    def kv_budget(
        self, model: Any, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, utilization: float
    ) -> int:
        return part_of_memory(self.available_memory())


def make(device: str, dtype: str) -> Cpu:
    """Raises `RequestError` if the native library is missing or the device is no CPU."""
    require_native()
    return Cpu(device, dtype)
