"""The kernels of the cuda backend, one operator's in each file: a Triton function, its twin in torch, its configs."""
