"""Kernels for NVIDIA GPUs, in Triton; other rooms import ``backend`` alone.

Every kernel here sums a token's own numbers in an order that its sequence alone fixes. Two things may still differ with
the batch: cuBLAS chooses a matrix product's kernel, and with few rows a split of its inner dimension, by the number of
rows; and a prompt's tiles are taller than a single token's, which may round differently when a token is computed once
in a prompt and once by itself. ``CudaKernels(batch_invariant=True)`` takes products in a fixed order and tiles of one
height: bits then depend on nothing but the sequence, and prompts take longer.
"""
