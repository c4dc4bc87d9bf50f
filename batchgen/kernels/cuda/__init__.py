"""Kernels for NVIDIA GPUs, in Triton; other rooms import ``backend`` alone.

Every kernel here sums a token's own numbers in an order that its sequence alone fixes. Two things may still differ with
the batch: products of many rows are cuBLAS', which chooses a kernel by their number, and those of few (or, before a
convolution, of one token per sequence) are joined to what stands beside them; and a prompt's tiles are taller than a
single token's, which may round differently when a token is computed once in a prompt and once by itself.
``CudaKernels(batch_invariant=True)`` takes products in a fixed order and tiles of one height: bits then depend on
nothing but the sequence, and prompts take longer.
"""
