"""Linear layers whose weights are codes of 4 or 8 bits with a scale for each group of inputs.

Few rows: codes become numbers of the model's 16-bit dtype in registers, as the first operand of the tensor cores (the
unpacking follows Kim et al. 2022, "Who says elephants can't run", and Frantar et al. 2024, Marlin). Many rows: a
launch writes the same numbers to scratch, and `linear` reads them. Sums have the same order, so both give the same
bits. Not for float32 models, and not for the schemes of which `packs` is false: their weights are widened when loaded.

Layout of codes of 4 bits: a block has 4 H inputs, H = min(group, 64); word j (int16) of a row's block has the codes of
inputs j, H + j, 2 H + j, 3 H + j, the first in the lowest bits: the words loaded for one operand of H inputs have the
codes of four operands, in the right lanes. Scales and minima: words (int32) [words, N] of two numbers of the model's
dtype, the earlier group in the low half. Codes of 8 bits: rows as they are; scales float32 [groups, N]. Inputs are
padded to whole blocks with scale 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.base import Activation
from headrace.backends.cuda.kernels import linear as dense
from headrace.backends.cuda.kernels.early import await_inputs
from headrace.backends.cuda.kernels.linear import Scratch, arguments, finish, finished, in_order, num_tiles, place
from headrace.backends.cuda.kernels.rows import opaque
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.quant.base import QWeight
from headrace.quant.schemes import BOOKS, Scheme

WIDEST = 64
"""Inputs of a step of the tensor cores at most, H."""

MOST_ROWS = 64
"""Rows up to which codes are unpacked in registers; for more, the weights are widened once, in memory."""

BLOCK_8 = 128
"""Inputs of a step with codes of 8 bits at most."""


MAGIC = {
    # A number whose low bits can hold a code, less itself and the middle, less itself, and 1. 128 and 1024.
    "bf16": ("0x43004300", "0xC308C308", "0xC300C300", "0x3F803F80"),
    "f16": ("0x64006400", "0xE408E408", "0xE400E400", "0x3C003C00"),
}


def assembly(dtype: torch.dtype, each: int, has_min: bool) -> str:
    """PTX for four pairs of weights out of the codes of a pair of words.

    Code i of both becomes the low bits of a number. The number's value for code 0 and the middle are subtracted from
    it, exactly; a second fma multiplies by the scale and adds the minimum, with one rounding.
    """
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    magic, less_middle, less, one = MAGIC[name]
    lines = [".reg .b32 t, u, s, m, one, less;", "mov.b32 m, 0x80008000;", f"mov.b32 one, {one};"]
    lines.append(f"mov.b32 less, {less if has_min else less_middle};")
    for i in range(4):
        number = i // each
        word, half = 5 + number // 2 * 2, ("0x1010", "0x3232")[number % 2]
        if i:
            lines.append(f"shr.u32 u, $4, {4 * i};")
        lines.append(f"lop3.b32 t, {'u' if i else '$4'}, 0x000f000f, {magic}, 0xEA;")
        lines.append(f"fma.rn.{name}x2 t, t, one, less;")
        lines.append(f"prmt.b32 s, ${word}, ${word}, {half};")
        if has_min:
            lines.append(f"prmt.b32 m, ${word + 4}, ${word + 4}, {half};")
        lines.append(f"fma.rn.{name}x2 ${i}, t, s, m;")
    return "{ " + " ".join(lines) + " }"


def book_assembly(dtype: torch.dtype, each: int, book: str) -> str:
    """The same for codes that are indices into a table of 16 numbers, whose bytes `prmt` looks up.

    The four codes of a word are the selectors of one `prmt`, by which bit 3 of a code chooses between two of them.
    """
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    numbers = torch.tensor(BOOKS[book]).to(dtype).view(torch.int16)
    lines = [".reg .b32 one, other, mask, q, t, u, s, m, low0, low1, high0, high1;", "mov.b32 m, 0x80008000;"]
    for part in ("low", "high"):
        table = [int(number) >> (0 if part == "low" else 8) & 255 for number in numbers]
        words = [sum(byte << 8 * i for i, byte in enumerate(table[first : first + 4])) for first in (0, 4, 8, 12)]
        lines.append(f".reg .b32 {', '.join(f'{part}_{i}' for i in range(4))};")
        lines += [f"mov.b32 {part}_{i}, {word:#010x};" for i, word in enumerate(words)]
    for lane in range(2):
        lines.append("mov.b32 q, $4;" if lane == 0 else "shr.u32 q, $4, 16;")
        # Selector 9 gives the sign of byte 1 of 0x8000 in all bits, selector 0 its byte 0.
        lines += ["and.b32 t, q, 0x8888;", "shr.u32 u, t, 3;", "or.b32 t, t, u;", "mov.b32 u, 0x8000;"]
        lines += ["prmt.b32 mask, u, u, t;", "and.b32 q, q, 0x7777;"]
        for part in ("low", "high"):
            lines.append(f"prmt.b32 one, {part}_0, {part}_1, q;")
            lines.append(f"prmt.b32 other, {part}_2, {part}_3, q;")
            lines.append(f"lop3.b32 {part}{lane}, mask, other, one, 0xCA;")
    for half, bytes_of in enumerate(("0x5140", "0x7362")):
        lines += [f"prmt.b32 t, low0, high0, {bytes_of};", f"prmt.b32 u, low1, high1, {bytes_of};"]
        for i in (2 * half, 2 * half + 1):
            number = i // each
            lines.append(f"prmt.b32 one, t, u, {('0x5410', '0x7632')[i % 2]};")
            word = 5 + number // 2 * 2
            lines.append(f"prmt.b32 s, ${word}, ${word}, {('0x1010', '0x3232')[number % 2]};")
            lines.append(f"fma.rn.{name}x2 ${i}, one, s, m;")
    return "{ " + " ".join(lines) + " }"


@triton.jit
def _number(word, HALF: tl.constexpr, TO: tl.constexpr):
    """One of the two numbers in a word, as float32."""
    if tl.bfloat16 == TO:
        return ((word << 16) if HALF == 0 else (word & -65536)).to(tl.float32, bitcast=True)
    else:
        return (word >> (16 * HALF)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _plain(q, s, m, PLACE: tl.constexpr, HALF: tl.constexpr, TO: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Weights of the code at PLACE of each word q [N, H]; s and m are words [N, 1]. LOW, HIGH: a book's 16 bytes."""
    code = (q.to(tl.int32) >> (4 * PLACE)) & 15
    scale = _number(s, HALF, TO)
    if LOW is not None:
        eight = tl.where(code < 8, tl.full([], LOW, tl.int64), tl.full([], HIGH, tl.int64))
        number = (eight >> ((code & 7) * 8).to(tl.int64)).to(tl.int8).to(tl.float32)
        return (number * scale).to(TO)
    elif m is not None:
        return (code.to(tl.float32) * scale + _number(m, HALF, TO)).to(TO)
    else:
        return ((code - 8).to(tl.float32) * scale).to(TO)


@triton.jit
def unpacked(q, scales, mins, at, N, EACH: tl.constexpr, TO: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
             UNPACK: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """The four weights of each word q [N, H] of a block. `scales` + at, `mins` + at [N, 1]: the block's first words."""
    s0 = tl.load(scales + at)
    s1 = s0 if EACH == 2 else tl.load(scales + N + at)
    m0 = s0
    m1 = s1
    if mins is not None:
        m0 = tl.load(mins + at)
        m1 = m0 if EACH == 2 else tl.load(mins + N + at)
    if ASM:
        a, b, c, d = (tl.broadcast_to(s0, q.shape), tl.broadcast_to(s1, q.shape),
                      tl.broadcast_to(m0, q.shape), tl.broadcast_to(m1, q.shape))  # fmt: skip
        return tl.inline_asm_elementwise(UNPACK, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [q, a, b, c, d],
                                         dtype=(TO.value,) * 4, is_pure=True, pack=2)  # fmt: skip
    else:
        n0 = m0 if mins is not None else None
        n1 = m1 if mins is not None else None
        return (
            _plain(q, s0, n0, 0, 0, TO, LOW, HIGH),
            _plain(q, s0, n0, 1, 1 // EACH, TO, LOW, HIGH),
            _plain(q, s1, n1, 2, 2 // EACH % 2, TO, LOW, HIGH),
            _plain(q, s1, n1, 3, 3 // EACH % 2, TO, LOW, HIGH),
        )


@triton.jit
def _eight(codes, scales, at, TO: tl.constexpr):
    """Weights of codes of 8 bits [N, H]; `scales` + at [N, 1]."""
    return (codes.to(tl.float32) * tl.load(scales + at)).to(TO)


@triton.jit
def _sum(x, x_at, k, codes, q_at, scales, mins, s_at, first, last, acc, K, ALL, H: tl.constexpr, EACH: tl.constexpr,
         GROUPS: tl.constexpr, EIGHT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, UNPACK: tl.constexpr,
         WHOLE: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Add the products of inputs first ... last - 1, in ascending order. x_at [BR, H] and q_at, s_at [N, H or 1]."""
    TO: tl.constexpr = x.dtype.element_ty
    if EIGHT:
        for at in tl.range(first, last, H):
            if WHOLE:
                a = tl.load(x + at + x_at)
            else:
                a = tl.load(x + at + x_at, mask=at + k < K, other=0.0)
            w = _eight(opaque(tl.load(codes + at + q_at)), scales, s_at + (at // H if GROUPS else 0) * ALL, TO)
            acc = tl.dot(w, tl.trans(a), acc)
    else:
        for at in tl.range(first, last, 4 * H):
            block = at // (4 * H)
            q = tl.load(codes + block * H + q_at)
            w = unpacked(q, scales, mins, block * (2 // EACH) * ALL + s_at, ALL, EACH, TO, LOW, HIGH, UNPACK, ASM)
            for i in tl.static_range(4):
                if WHOLE:
                    a = tl.load(x + at + i * H + x_at)
                else:
                    a = tl.load(x + at + i * H + x_at, mask=at + i * H + k < K, other=0.0)
                acc = tl.dot(w[i], tl.trans(a), acc)
    return acc


@triton.jit(do_not_specialize=["most_rows"])
def _linear_codes(
    x, ld_x, codes, ld_codes, scales, mins, bias, residual, ld_residual, out, ld_out, sizes, most_rows, partial,
    arrived, K, N, ALL, SPAN, DIM: tl.constexpr, SPANS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    H: tl.constexpr, EACH: tl.constexpr, GROUPS: tl.constexpr, EIGHT: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, UNPACK: tl.constexpr, WHOLE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    ASM: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    await_inputs(EARLY)
    COLS: tl.constexpr = BN // 2 if GATED else BN
    rows = tl.minimum(tl.load(sizes + DIM), most_rows)
    row_tiles = tl.cdiv(rows, BR)
    col_tiles = tl.cdiv(N, COLS)
    program = tl.program_id(0)
    k = tl.arange(0, H)[None, :]
    for turn in range(0, row_tiles * col_tiles * SPANS - program, tl.num_programs(0)):
        item = program + turn
        row_tile, col_tile = place(item // SPANS, row_tiles, col_tiles, 1)
        row = row_tile * BR + tl.arange(0, BR)
        col = col_tile * COLS + tl.arange(0, COLS)
        x_at = tl.minimum(row, rows - 1)[:, None] * ld_x + k
        # Columns beyond the end repeat the last one.
        within = tl.minimum(tl.arange(0, COLS), N - 1 - col_tile * COLS)[:, None]
        q_at = within * ld_codes + k
        first = col_tile.to(tl.int64) * COLS
        begin = (item % SPANS) * SPAN
        end = tl.minimum(begin + SPAN, K)
        acc = tl.zeros([COLS, BR], tl.float32)
        acc_up = acc
        lower = mins
        upper = mins
        if mins is not None:
            lower = mins + first
            upper = mins + first + N
        acc = _sum(x, x_at, k, codes + first * ld_codes, q_at, scales + first, lower, within, begin, end, acc, K, ALL,
                   H, EACH, GROUPS, EIGHT, LOW, HIGH, UNPACK, WHOLE, ASM)  # fmt: skip
        if GATED:
            acc_up = _sum(x, x_at, k, codes + (first + N) * ld_codes, q_at, scales + first + N, upper, within, begin,
                          end, acc_up, K, ALL, H, EACH, GROUPS, EIGHT, LOW, HIGH, UNPACK, WHOLE, ASM)  # fmt: skip
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
        inside = (row < rows)[:, None] & (col < N)[None, :]
        if SPANS > 1:
            acc, acc_up, last = in_order(acc, acc_up, partial, arrived, item, SPANS, GATED, BR, COLS)
            inside &= last
        finish(acc, acc_up, row, col, inside, N, bias, residual, ld_residual, out, ld_out, ACT, GATED)


@triton.jit
def _widen(
    codes, ld_codes, scales, mins, out, ld_out, K, ALL, H: tl.constexpr, EACH: tl.constexpr, GROUPS: tl.constexpr,
    EIGHT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, UNPACK: tl.constexpr, COLS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    TO: tl.constexpr = out.dtype.element_ty
    block = tl.program_id(1)
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)[:, None]
    k = tl.arange(0, H)[None, :]
    row = tl.minimum(n, ALL - 1)
    q = tl.load(codes + row.to(tl.int64) * ld_codes + block * H + k)
    to = out + n.to(tl.int64) * ld_out + k
    if EIGHT:
        w = _eight(q, scales, row + (block if GROUPS else 0) * ALL, TO)
        tl.store(to + block * H, w, mask=(n < ALL) & (block * H + k < K))
    else:
        w = unpacked(q, scales, mins, block * (2 // EACH) * ALL + row, ALL, EACH, TO, LOW, HIGH, UNPACK, ASM)
        for i in tl.static_range(4):
            first = (block * 4 + i) * H
            tl.store(to + first, w[i], mask=(n < ALL) & (first + k < K))


@dataclass(frozen=True, slots=True, eq=False)
class PackedCodes:
    """A matrix [num_out, num_in] in the kernel's layout. step: H. each: operands of H inputs that share a scale."""

    codes: Tensor
    scales: Tensor
    mins: Tensor | None
    num_in: int
    group: int
    book: str
    dtype: torch.dtype

    @property
    def num_out(self) -> int:
        return self.codes.shape[0]

    @property
    def eight(self) -> bool:
        return self.codes.dtype == torch.int8

    @property
    def step(self) -> int:
        return min(self.group or BLOCK_8, BLOCK_8 if self.eight else WIDEST)

    @property
    def each(self) -> int:
        return 1 if self.eight else max(self.group // WIDEST, 1)

    @property
    def layout(self) -> tuple[object, ...]:
        """What must be equal of matrices whose rows are joined."""
        return self.num_in, self.group, self.book, self.dtype, self.codes.dtype, self.mins is None

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.mins is None else self.mins.nbytes)

    def dense(self) -> Tensor:
        """The weights [num_out, num_in] in the model's dtype: the numbers that the kernel computes with."""
        if self.eight:
            scales = self.scales.repeat_interleave(self.group or self.num_in, 0)[: self.num_in].t()
            return (self.codes[:, : self.num_in].float() * scales).to(self.dtype)
        codes = torch.stack([self.codes.int() >> (4 * i) & 15 for i in range(4)], 1)  # [N, 4, blocks * H]
        codes = codes.unflatten(2, (-1, self.step)).transpose(1, 2).flatten(1)
        numbers = torch.tensor(BOOKS[self.book], device=codes.device).float()[codes] if self.book else codes.float()
        numbers = numbers if self.book or self.mins is not None else numbers - 8
        wide = numbers * self._wide(self.scales)
        if self.mins is not None:
            wide = wide + self._wide(self.mins)
        return wide[:, : self.num_in].to(self.dtype)

    def _wide(self, words: Tensor) -> Tensor:
        """Words [words, N] of two numbers as float32 [N, inputs]."""
        halves = words.view(self.dtype).view(*words.shape, 2)
        return halves.permute(1, 0, 2).flatten(1).float().repeat_interleave(self.group, 1)

    def _assembly(self) -> str:
        form = self.dtype, self.each
        return book_assembly(*form, self.book) if self.book else assembly(*form, self.mins is not None)

    def arguments(self) -> dict[str, Argument]:
        book = BOOKS[self.book] if self.book else None
        low, high = (None, None) if book is None else (_bytes(book[:8]), _bytes(book[8:]))
        unpack = "" if self.eight else self._assembly()
        return {
            "codes": self.codes, "ld_codes": self.codes.stride(0), "scales": self.scales, "mins": self.mins,
            "K": self.num_in, "ALL": self.num_out, "H": self.step, "EACH": self.each, "GROUPS": self.group > 0,
            "EIGHT": self.eight, "LOW": low, "HIGH": high, "UNPACK": unpack,
        }  # fmt: skip


def _bytes(numbers: tuple[int, ...]) -> int:
    return int.from_bytes(bytes(number & 255 for number in numbers), "little", signed=True)


def packs(scheme: Scheme) -> bool:
    """Whether the kernel has a layout for a scheme; weights of others are widened when they are loaded."""
    if scheme.kind == "i8" and scheme.has_min:
        return False
    return scheme.kind in ("i4", "i8") and scheme.book != "fp4" and (scheme.group >= 16 or scheme == Scheme("i8"))


def pack(weight: QWeight, scheme: Scheme, dtype: torch.dtype) -> PackedCodes:
    """Codes in the kernel's layout, on the weight's device. `weight` is of `scheme`, of which `packs` holds; rows of a
    matrix may be packed apart and joined: codes along dimension 0, scales and minima along 1.

    Scales and minima of codes of 4 bits are rounded to `dtype`, bfloat16 or float16.
    """
    if weight.scales is None:
        raise ValueError("plain weights have no codes")
    num_out, num_in = weight.shape
    if scheme.kind == "i8":
        packed = PackedCodes(
            weight.codes.to(torch.int8), weight.scales.float().t().contiguous(), None, num_in, scheme.group, "", dtype
        )
        codes = F.pad(packed.codes, (0, -num_in % packed.step))
        return PackedCodes(codes, packed.scales, None, num_in, scheme.group, "", dtype)
    step = min(scheme.group, WIDEST)
    block = 4 * step
    codes = F.pad(weight.codes.int() & 15, (0, -num_in % block)).view(num_out, -1, 4, step)
    shifts = torch.arange(0, 16, 4, device=codes.device, dtype=torch.int32)[:, None]
    words = (codes << shifts).sum(2, dtype=torch.int32).flatten(1).to(torch.int16)
    groups = codes.shape[1] * block // scheme.group
    unit = max(BOOKS[scheme.book]) / float(weight.codebook.max()) if weight.codebook is not None else 1.0
    scales = _words(weight.scales / unit, groups, dtype)
    mins = None if weight.mins is None else _words(weight.mins, groups, dtype)
    return PackedCodes(words, scales, mins, num_in, scheme.group, scheme.book, dtype)


def _words(numbers: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Numbers [N, groups] of `dtype`, two to a word: int32 [words, N]."""
    wide = F.pad(numbers.to(dtype), (0, groups - numbers.shape[1])).view(numbers.shape[0], -1, 2)
    return wide.transpose(0, 1).contiguous().view(torch.int32).squeeze(2)


def _twin(a: Arguments) -> None:
    rows = min(int(a.sizes[a.DIM]), a.most_rows)
    weight = _dense(a, a.x.dtype).float()
    spans = [(first, min(first + a.SPAN, a.K)) for first in range(0, a.K, a.SPAN)]
    v = dense.sum_of_spans([(a.x[:rows, first:last].float(), weight[:, first:last]) for first, last in spans])
    a.out[:rows, : a.N] = finished(v, a.bias, a.residual, a.N, a.ACT, a.GATED)


def _widen_twin(a: Arguments) -> None:
    a.out[: a.ALL, : a.K] = _dense(a, a.out.dtype)


def _dense(a: Arguments, dtype: torch.dtype) -> Tensor:
    bounds = a.LOW, a.HIGH
    book = next((name for name, book in BOOKS.items() if (_bytes(book[:8]), _bytes(book[8:])) == bounds), "")
    return PackedCodes(a.codes, a.scales, a.mins, a.K, a.H * a.EACH if a.GROUPS else 0, book, dtype).dense()


def _config(rows: int, columns: int, warps: int, stages: int, *capabilities: int) -> Config:
    return Config({"BR": rows, "BN": columns, "ASM": 1}, warps, stages, capabilities)


KERNEL = Kernel(
    _linear_codes,
    _twin,
    (
        _config(16, 64, 4, 4),
        _config(16, 128, 4, 4),
        _config(32, 64, 4, 3),
        _config(32, 128, 4, 3),
        _config(64, 128, 4, 2, 90, 100),
        _config(64, 64, 4, 2),
        _config(64, 128, 8, 2),
        _config(64, 64, 4, 3, 80, 90, 100),
    ),
    fuse=False,
)

WIDEN = Kernel(_widen, _widen_twin, (Config({"COLS": 32, "ASM": 1}, 4, 1),), fuse=False)


def suits(config: Config, weight: PackedCodes, gated: bool) -> bool:
    """Whether a tile, or each half of a gated one, has the 64 outputs of an instruction of sm_90, and no register
    spills on sm_100 or sm_120, which is known from compiling all with Triton 3.6 (3.7 spills fewer)."""
    rows, columns = config.tiles["BR"], config.tiles["BN"]
    if (rows, columns, config.num_warps) == (64, 128, 4):
        return gated and weight.book != "e2m1"  # its halves are done in turn; one tile of 128 columns spills
    if weight.eight:
        spills = columns == 128 and rows in ((32,) if gated else (16, 64))
    elif weight.book and weight.step == WIDEST:
        spills = not gated and rows < 64 and columns == 128
    else:
        spills = weight.mins is not None and weight.each == 1 and (rows, columns) == (16, 64)
    return columns >= 64 * (1 + gated) and not spills


def default(weight: PackedCodes, num_rows: int, gated: bool) -> Config:
    """The configuration where none was measured."""
    rows = next((rows for rows in (16, 32) if num_rows <= rows), 64)
    columns = 128 if rows < 64 else 64
    suited = [c for c in KERNEL.configs if c.tiles["BR"] >= rows and not c.capabilities and suits(c, weight, gated)]
    return min(suited, key=lambda config: (config.tiles["BR"], config.tiles["BN"] != columns))


def scratch_numbers(weight: PackedCodes, num_rows: int, config: Config, num_whole: int = 0) -> tuple[int, int]:
    """Return how many numbers `Scratch.partial` and `Scratch.arrived` must hold for a launch."""
    tiles, spans = (
        num_tiles(weight.num_out, num_rows, config),
        dense.num_spans(num_whole or weight.num_out, weight.num_in),
    )
    return (tiles * spans * config.tiles["BR"] * config.tiles["BN"], tiles) if spans > 1 else (0, 0)


def linear_codes(
    x: Tensor,
    weight: PackedCodes,
    out: Tensor,
    sizes: Tensor,
    dim: int,
    num_rows: int,
    *,
    num_programs: int,
    scratch: Scratch | None = None,
    wide: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    gated: bool = False,
    num_whole: int = 0,
    config: Config | None = None,
    product: Callable[..., Launch] = dense.linear,
) -> list[Launch]:
    """`linear.linear` with a weight of codes.

    wide: scratch for N * K numbers of x's dtype. If given, the weights are first written there and multiplied by
    `product`, whose `config` it is: for many rows. The bits are the same.
    """
    num_out, num_in = weight.num_out, weight.num_in
    if wide is not None:
        plain = wide.view(-1)[: num_out * num_in].view(num_out, num_in)
        blocks = -(-num_in // (weight.step * (1 if weight.eight else 4)))
        values = weight.arguments() | {"out": plain, "ld_out": num_in}
        widen = Launch(WIDEN, (-(-num_out // WIDEN.configs[0].tiles["COLS"]), blocks), values, WIDEN.configs[0])
        return [
            widen,
            product(
                x, plain, out, sizes, dim, num_rows, num_programs=num_programs, scratch=scratch, bias=bias,
                residual=residual, activation=activation, gated=gated, num_whole=num_whole, config=config,
            ),
        ]  # fmt: skip
    config = config or default(weight, num_rows, gated)
    needed = scratch_numbers(weight, num_rows, config, num_whole)
    items = num_tiles(num_out, num_rows, config) * dense.num_spans(num_whole or num_out, num_in)
    values = arguments(
        x, num_out, out, sizes, dim, num_rows, needed, scratch, bias, residual, activation, gated, num_whole
    )
    values |= weight.arguments() | {"WHOLE": num_in % (weight.step * (1 if weight.eight else 4)) == 0}
    return [Launch(KERNEL, (min(items, num_programs * (16 // config.num_warps)),), values, config)]
