"""The start of a kernel that may begin before the one ahead of it has ended.

Programmatic dependent launch (CUDA programming guide, from capability 9.0 on): while the last programs of a kernel run,
those of the next are placed, and wait here until all that was written before is there. Kernels of a few microseconds,
of which a step of one row has hundreds, then follow each other without a gap.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Let the next kernel begin, and wait for the end of the one ahead. Comes before anything is read."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
