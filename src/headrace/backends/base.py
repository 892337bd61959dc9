"""The protocols of a backend: memory, and the operators that models are written in.

`Ops` has all operators that a model file may use; `Backend` owns the ops and makes programs with their KV cache. Both
are protocols: a backend is a folder in this file's folder, found by its name, and need not inherit anything. Values
between operators are of the backend's type `Array`: torch_ref computes torch tensors at once, cpu records the operators
and computes later. Knows shapes; must not know requests, the scheduler or the names of models. Called by `models` (ops)
and by `runner` (memory).

Every operator keeps the determinism law: a row's bits depend on that row's problem only, never on the other rows, their
number, the row's place among them, or the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec

from headrace.backends.choosing import Chooser
from headrace.backends.states import RecurrentOps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.backends.adapters import Adapters
    from headrace.backends.step import Chunks, Draw, Logits
    from headrace.protocol.kinds import CacheKind
    from headrace.quant.base import MatrixSource
    from headrace.quant.schemes import Scheme

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid", "relu2", "identity", "clamped_swiglu"]
"""The last is for `Ops.gated` and `Ops.experts` alone: min(g, 7) * sigmoid(1.702 * min(g, 7)) * (u + 1), u within 7."""

Array: TypeAlias = Any
"""A backend's rows of numbers: a torch.Tensor, or a value that is still to be computed. Models may add two, no more."""

Cache: TypeAlias = Any
"""One layer's keys and values; of a layer with a state, a tuple of arrays (`states.State`)."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


class Heads(NamedTuple):
    """How a row of queries, keys and values is cut: num_heads + num_kv_heads pieces of head_dim numbers, then
    num_kv_heads pieces of value_dim (0: head_dim), which are not there where the cache's values are part of its keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int = 0

    @property
    def value_size(self) -> int:
        return self.value_dim or self.head_dim


class HeadNorm(NamedTuple):
    """An RMS norm over each head: weight [head_dim]."""

    weight: Array
    eps: float
    offset: float


class Axes(NamedTuple):
    """Rows that have a position on each of several axes: pair i turns by that on axis of_pairs[i]. Rows of the table
    from `spare` on are each step's own (`backends.places`)."""

    of_pairs: Any
    spare: int


class RopeTable(NamedTuple):
    """Rotary embedding: cos and sin [max_model_len, P] of every position; numbers first ... first + 2 * P - 1 of a head
    turn."""

    cos: Array
    sin: Array
    first: int = 0
    axes: Axes | None = None


class HeadForm(NamedTuple):
    """The changes to queries and keys before keys are stored: they are normed, then rotated in pairs (first + i,
    first + i + P) of the table."""

    rope_table: RopeTable | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None


class Scoring(NamedTuple):
    """How attention scores the positions of a sequence: by products of queries and keys, times `scale`.

    window: the number of visible positions, the row's own included; None for all. chunked: positions are cut into
    chunks of `window`, counted from position 0, and a row sees its own chunk up to its own position. softcap c > 0
    replaces scores s by c * tanh(s / c). sinks [num_heads]: for each head the score of one more key, which all rows see
    and whose value is 0. ahead: the number of visible positions after the row's own, as far as its chunk has them;
    where it is not 0, a text must be one chunk (`models.Model.both_ways`), of which all rows are read. bias
    [num_heads, 2 * P - 1] is added to the scores, capped ones, by the key's position less the row's, which is P - 1 in
    the middle; positions are below P.
    """

    scale: float
    window: int | None = None
    chunked: bool = False
    softcap: float = 0.0
    sinks: Array | None = None
    ahead: int = 0
    bias: Array | None = None

    @property
    def reach(self) -> int:
        """The window as kernels have it: 0 for all positions, negative for chunks."""
        window = self.window or 0
        return -window if self.chunked else window


class Routing(NamedTuple):
    """How each row chooses its experts out of the router's logits.

    score: softmax over all experts, or sigmoid of each. bias [E] is added to the scores for the choice alone. groups
    (number, chosen, top): the experts lie in `number` groups of equal size; experts are chosen only from the `chosen`
    groups whose `top` (1 or 2) best experts have the greatest sum. Of equal ones the lower id is chosen. renormalise:
    the weights of the chosen are divided by their sum. scale multiplies all weights; factors [E] multiply the weights
    of each expert. scale_input: the weight multiplies the input of the expert, and not its output.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    bias: Array | None = None
    groups: tuple[int, int, int] | None = None
    renormalise: bool = True
    scale: float = 1.0
    scale_input: bool = False
    factors: Array | None = None


class Matrix(Protocol):
    """A linear layer's weights in the backend's form, bias included. Opaque to models."""

    @property
    def num_in(self) -> int: ...

    @property
    def num_out(self) -> int: ...


class ExpertLayer(NamedTuple):
    """The experts of a layer: their matrices, their router and its rules, and the activation between two matrices."""

    router: Matrix
    routing: Routing
    gate_up: Sequence[Matrix]
    down: Sequence[Matrix]
    kind: Activation

    @property
    def has_gate(self) -> bool:
        """Whether the first matrix of an expert has a gate: else its outputs are as many as the second one's inputs."""
        return self.gate_up[0].num_out != self.down[0].num_in


class Rows(Protocol):
    """A step's rows as the operators see them. `torch_ref.batch.ForwardBatch` is one.

    token_ids, positions [R]. Chunk c is the rows of one sequence at positions starts[c] ... starts[c] + lens[c] - 1;
    chunks follow each other.
    """

    token_ids: Array
    positions: Array
    features: Array
    """[R, F], for models with further inputs than the token ids (`models.Model.feature_size`)."""


class Ops(RecurrentOps, Protocol):
    """Operators. R rows, H hidden size, D head size; sums are kept in float32."""

    weight_bytes: int
    """Of all matrices."""
    adapters: Any
    """The places of adapters (`backends.adapters.Adapters`); None where no matrix takes one."""

    @property
    def matrices(self) -> Sequence[Matrix]:
        """All matrices, in the order in which they were made; for tools."""
        ...

    def matrix(self, source: MatrixSource, bias: Array | None = None) -> Matrix:
        """Return one linear layer; its weights are read from `source` some rows at a time."""
        ...

    def linear(self, x: Array, matrix: Matrix) -> Array:
        """x [R, in] -> [R, out]."""
        ...

    def by_head(self, x: Array, matrices: Sequence[Matrix], tail: int = 0) -> Array:
        """x [R, heads * (in + tail)] -> [R, heads * (out + tail)], by a matrix [out, in] for each head: of a head's
        numbers the first `in` are multiplied, and the last `tail` follow the product as they are. Inputs are never
        quantised. Raises `CheckpointError` where the backend has no kernels for it."""
        ...

    def embedding(self, ids: Array, table: Array, scale: float = 1.0) -> Array:
        """ids [R] and table [V, H] -> [R, H], times `scale` rounded to the model's dtype."""
        ...

    def select(self, x: Array, rows: Array) -> Array:
        """Rows [S] of x [R, H] -> [S, H]."""
        ...

    def rms_norm(self, x: Array, weight: Array | None, eps: float, offset: float = 0.0, heads: int = 1) -> Array:
        """x [R, H] / sqrt(mean(x^2) + eps) * (offset + weight [H]) (Zhang, Sennrich 2019); without a weight * 1.

        `heads` pieces of a row are normed each by itself; their weight is [H], or [H / heads] for all of them.
        """
        ...

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float, offset: float = 0.0) -> Array:
        """(x [R, H] - mean) / sqrt(variance + eps) * (offset + weight) + bias (Ba et al. 2016)."""
        ...

    def norm_columns(self, x: Array, first: int, num: int, norm: HeadNorm) -> Array:
        """x [R, W] with `num` pieces of its columns from `first` on, as wide as the norm's weight, each normed as by
        `rms_norm`. The value passed as x must not be used again."""
        ...

    def rope(self, x: Array, num_heads: int, head_dim: int, rows: Rows, rope_table: RopeTable) -> Array:
        """x [R, W] with its first `num_heads` heads rotated as by `rope_store`; nothing is stored. The value passed as
        x must not be used again."""
        ...

    def rope_store(self, qkv: Array, heads: Heads, rows: Rows, cache: Cache, form: HeadForm = HeadForm()) -> Array:
        """qkv [R, heads] -> queries [R, num_heads * D]; keys and values go to the rows' slots of the cache.

        There may be no queries: then the returned value must not be used.
        """
        ...

    def attention(self, query: Array, heads: Heads, rows: Rows, cache: Cache, scoring: Scoring) -> Array:
        """Attention of queries over the cached positions of each row's sequence -> [R, num_heads * value size].

        Blocks that the first row of `rows`' chunk does not see are not read.
        """
        ...

    def activation(self, x: Array, kind: Activation) -> Array:
        """Elementwise."""
        ...

    def xielu(self, x: Array, positive: float, negative: float, beta: float) -> Array:
        """beta * x + positive * x^2 where x > 0, else beta * x + negative * (exp(x) - 1 - x) (Huang et al. 2024,
        "Deriving activation functions via integration")."""
        ...

    def gated(self, x: Array, kind: Activation) -> Array:
        """x [R, 2 * I] -> act(x[:, :I]) * x[:, I:] (Shazeer 2020)."""
        ...

    def multiply(self, x: Array, gate: Array, kind: Activation) -> Array:
        """x [R, W] * act(gate [R, W] or [R, 1])."""
        ...

    def scale(self, x: Array, factor: float) -> Array:
        """x [R, W] * factor."""
        ...

    def columns(self, x: Array, first: int, width: int) -> Array:
        """Columns first ... first + width - 1 of x [R, W]."""
        ...

    def softcap(self, x: Array, cap: float) -> Array:
        """cap * tanh(x / cap), in float32."""
        ...

    def experts(self, x: Array, layer: ExpertLayer, seen: Array | None = None) -> Array:
        """Sum over a row's best experts e, in ascending id, of weight * down[e](gated(gate_up[e](x))) -> [R, H], or of
        weight * down[e](act(gate_up[e](x))) where experts have no gate. `seen`: the router's input, where it is not x.

        Raises `CheckpointError` for a routing or a form of the matrices that the backend has no kernels for.
        """
        ...


class LayerShape(NamedTuple):
    """The contents of the cache for one layer: of each position `num_kv_heads` keys of `head_dim` numbers, and values.

    kind: index of the layer's kind in `Model.kinds`. value_dim: numbers of a value (0: head_dim). shares_key: the
    values are the first value_dim numbers of the keys, and are not kept again. source: the layer whose cache is read;
    nothing is kept for this one. states: of a layer with a state, the shapes of its arrays in a slot; it keeps no
    position.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int = 0
    kind: int = 0
    shares_key: bool = False
    source: int | None = None
    states: tuple[tuple[int, ...], ...] = ()

    @property
    def value_size(self) -> int:
        return self.value_dim or self.head_dim


class SetUp(msgspec.Struct, frozen=True, tag="set_up"):
    """The settings of a program. It is also sent to each rank, as the message to make one.

    pool_sizes: blocks of each of the model's kinds. num_threads 0: the number that suits the model.
    """

    pool_sizes: tuple[int, ...]
    block_size: int
    kv_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks_per_seq: int
    num_threads: int = 0


class SampleText(NamedTuple):
    """A text on which a backend judges its choices. mark: returns a name that differs for other tokens. read: returns
    the token ids."""

    mark: Callable[[], str]
    read: Callable[[], list[int]]


class Program(Protocol):
    """A model over its KV cache, ready to run. Positions are computed in any pieces; the bits stay the same."""

    model: Any
    """A `models.Model`."""
    vocab_size: int
    block_size: int
    kinds: tuple[CacheKind, ...]
    pool_sizes: tuple[int, ...]
    """Blocks of each kind."""
    num_blocks: int
    """Of kind 0."""
    max_rows: int
    """Rows that one `forward` takes at most."""
    max_logits: int
    """Rows of logits that one call gives at most."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: int = 0) -> None:
        """Copy whole blocks (source, target) of a kind, one pair after the other."""
        ...

    def forward(
        self, chunks: Chunks, rows: list[int], features: NDArray[np.float32] | None = None
    ) -> tuple[list[bool], Logits]:
        """Compute the chunks; return for each chunk whether all is finite that it leaves behind: the hidden states of
        the rows that are read (`reads.ReadRows`), and what the other rows keep. And return the logits of `rows`.

        `features` [R, F]: the further input of a model with a `feature_size` F; it is copied.
        """
        ...

    def logits(self, rows: list[int]) -> Logits:
        """Return the logits of other rows of the last `forward`. Raises ValueError for a row that its chunks did not
        announce (`Chunks.later`)."""
        ...

    def hidden_states(self, rows: list[int]) -> NDArray[np.float32]:
        """Return the hidden states [S, H] of at most `max_logits` rows of the last `forward` after the final norm,
        valid until the next call. Raises ValueError as `logits` does."""
        ...

    def features(self, rows: list[int]) -> NDArray[np.float32]:
        """Return a copy of the features (`feature_layers`) [S, F] of rows of the last `forward`. Raises ValueError for
        a row of which there are none, since it was not announced (`Chunks.observed`)."""
        ...

    def close(self) -> None:
        """Free the memory. May be called twice."""
        ...


class DrawnRows(NamedTuple):
    """The tokens that a step drew on the device. `sound`: for each chunk, whether its hidden states are finite. For
    each row of logits: whether they are finite, the token, and whether it is surely the sampler's token. `logits`
    [n, V] are the rows whose tokens the host draws; the token given for such a row is its likeliest."""

    sound: list[bool]
    finite: list[bool]
    token_ids: list[int]
    is_sure: list[bool]
    logits: NDArray[np.float32]


@runtime_checkable
class DrawingProgram(Program, Protocol):
    """A program that draws tokens on its device. A step may start before the last one is finished; steps are computed
    and finished in the order of their starts."""

    def start(self, chunks: Chunks, rows: list[int], draws: list[Draw | None], carried: dict[int, int]) -> Any:
        """Start to compute the chunks, and to draw a token from the logits of each of `rows`, or where its draw is None
        to bring them to the host. Row r of the chunks takes the token that the last start drew at place carried[r] of
        its `rows`."""
        ...

    def finish(self, ticket: Any) -> DrawnRows:
        """Wait for the step for which `start` returned `ticket`. Must come before any other call but `start`."""
        ...


class Backend(Protocol):
    """Memory and operators of one kind of device."""

    name: str
    device: str
    dtype: str
    """float32, bfloat16 or float16: of weights that are not quantised, and of a cache whose dtype is auto."""
    kv_dtypes: tuple[str, ...]
    """Values of `kv_cache_dtype` other than auto."""
    block_tables: tuple[str, ...]
    """GGUF block types in which an embedding table is used as stored (`quant.arrays.blocks_of`)."""
    schemes: frozenset[Scheme]
    """Schemes with kernels, in addition to plain floats. Weights of any other form reach the backend dequantised."""
    mixes: bool
    """Whether one matrix may have parts of different forms (`checkpoint.packing.MixingOps`), and inputs in another
    order than the layer's (act-order). Where it may not, such weights reach the backend dequantised."""
    sees_wholes: bool
    """Whether attention lets rows see later ones where `Chunks.wholes` says so."""
    ops: Ops

    def constant(self, values: Array, is_weight: bool = False) -> Array:
        """Return a small array as the operators take it: a rope table, or a norm or bias of the checkpoint
        (`is_weight`), which may be rounded to `dtype`."""
        ...

    def table(self, values: Array) -> Array:
        """Return an embedding table [V, H] as `Ops.embedding` takes it."""
        ...

    def layouts(self) -> dict[str, str]:
        """Return the name of the layout of each kind of matrix.

        A backend with layouts also has the methods of `checkpoint.packing.PackedBackend`, by which matrices are kept in
        a file and mapped; the others return an empty dict.
        """
        ...

    def choose_activations(
        self, model: Any, mode: str, num_threads: int, stated: str = "", text: SampleText | None = None
    ) -> str:
        """Choose the type of the activations of each quantised matrix of `model`: "int8", "16bit", "fp8", or by the
        model itself ("auto"); once, before its first program. stated: the type that the checkpoint's quantisation
        multiplies with (`quant.base.stated_activations`). text: the model is judged on it, where the choice depends on
        its numbers; None: on fixed tokens. Return the choice: int8, 16bit, fp8, mixed, or "" where
        nothing is quantised. Raises `RequestError` for a `mode` without kernels."""
        ...

    def chooser(self, width: int, num_threads: int) -> Chooser | None:
        """An operator that picks candidates for sampling from rows of `width` logits; None where numpy has to."""
        ...

    def block_bytes(self, model: Any, kind: int, block_size: int, kv_dtype: str) -> int:
        """Return the bytes of a block of a kind, over all its layers."""
        ...

    def program(self, model: Any, set_up: SetUp, feature_layers: Sequence[int] = ()) -> Program:
        """Return `model` (see `models.Model`) over a zeroed cache.

        `features` returns the residual streams before the layers `feature_layers` (their number: after the last), side
        by side; without any, the hidden states after the final norm.
        """
        ...

    def take_adapters(self, num_slots: int, max_rank: int) -> Adapters | None:
        """Have the matrices that are made from now on take adapters (`backends.adapters`), and return their places;
        None where the backend has no kernels for them. Must come before any matrix."""
        ...

    def available_memory(self) -> int:
        """Return the bytes that could be allocated on the device now."""
        ...

    def kv_budget(
        self, model: Any, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, utilization: float
    ) -> int:
        """Return the bytes that the KV cache of `model`, whose weights are loaded, may take where no size is set. The
        other numbers describe the program to come, which needs memory too. `utilization`: the share of a GPU's memory
        that weights, program and cache may take together."""
        ...


def part_of_memory(available: int) -> int:
    """Return the bytes of a KV cache on a machine that other programs use too: a quarter of the free memory, at most
    4 GiB."""
    return min(available // 4, 4 * 2**30)
