"""How a kernel runs: as its twin in plain torch, or on the GPU.

A `Launch` is a kernel, a grid and fixed arguments: addresses, widths, constants. Values that change from step to step
lie in device memory, so a launch can be captured in a CUDA graph and replayed. Knows no operators and no models. Called
by `tape` and by the checks of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

Argument: TypeAlias = "Tensor | TensorDescriptor | int | float | bool | str | None"


LIKE = {80: 80, 87: 80, 90: 90, 100: 100, 103: 100}
"""Of GPUs by capability: that whose configs suit them. All others have the shared memory of 120 (86, 89, 121)."""


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes and launch options of a kernel: they change its speed, and never a bit of its results.

    tiles: the values of the kernel's tuned constants.
    num_warps, num_stages: warps of a program, and loads in flight in its loops.
    capabilities: the GPUs that it suits, of 80, 90, 100 and 120 for sm_80 and so on; none for all.
    """

    tiles: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1
    capabilities: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """For tables: the tiles, then w(arps) and s(tages)."""
        tiles = " ".join(f"{key}={value}" for key, value in self.tiles.items())
        return f"{tiles} w{self.num_warps} s{self.num_stages}".strip()

    def fits(self, capability: int) -> bool:
        return not self.capabilities or LIKE.get(capability, 120) in self.capabilities


class Arguments(SimpleNamespace):
    """A kernel's arguments by name, as its twin takes them."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A Triton kernel with its twin.

    jit: the function under `triton.jit`. All its arguments are named; those in capitals are constants.
    twin: the same operation in plain torch on the same arguments, the tuned constants left out. It writes where the
        kernel writes, and a row's bits depend on that row alone.
    configs: the choices of tuning, the default first. Each gives the same bits.
    fuse: whether a multiplication and an addition may become one rounding; off where bits must equal the CPU's.
    """

    jit: Any
    twin: Callable[[Arguments], None]
    configs: tuple[Config, ...] = (Config(),)
    fuse: bool = True

    @property
    def name(self) -> str:
        return str(self.jit.__name__)


class Work(Protocol):
    """The work of a step, in order: launches, and the gathers of ranks."""

    def run_twin(self) -> None: ...

    def run_gpu(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One call of a kernel, ready to run. `arguments` has each argument by name but the tuned constants."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    config: Config

    def run_twin(self) -> None:
        self.kernel.twin(Arguments(**self.arguments))

    def early(self) -> Launch:
        """Return the launch as one that begins before the one ahead of it has ended, where its kernel can (`kernels.
        early`). The GPU must have capability 9.0 or more."""
        can_start_early = "EARLY" in self.kernel.jit.arg_names
        return replace(self, arguments={**self.arguments, "EARLY": 1}) if can_start_early else self

    def run_gpu(self) -> None:
        self.kernel.jit[self.grid](**self._call())

    def compile(self) -> None:
        """Compile the kernel for the current GPU, or take it from Triton's cache; nothing runs."""
        self.kernel.jit.warmup(grid=self.grid, **self._call())

    def _call(self) -> dict[str, Any]:
        return {**self.arguments, **self.config.tiles, **self.options}

    @property
    def options(self) -> dict[str, Any]:
        """Triton's options of the launch."""
        options: dict[str, Any] = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        options["enable_fp_fusion"] = self.kernel.fuse
        return options | {"launch_pdl": True} if self.arguments.get("EARLY") else options
