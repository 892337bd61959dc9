"""`python -m bench.gpu`: proves, tunes and measures the GPU backend, in three stages of at most nine minutes each.

Needs torch, triton, numpy, msgspec, psutil and rich alone, and runs from a plain source tree (PYTHONPATH=src). Without
a GPU the kernels run as their twins at toy size, which checks the programs of this folder and measures nothing.
"""

import headrace as headrace  # before torch, so that OpenMP's threads do not spin on busy machines
