"""Kernels for NVIDIA GPUs, in Triton; other packages only import ``backend``.

Every kernel here sums a token's own numbers in an order that its sequence and the model's shape fix. So a token's bits
only depend on the sequence, as long as the matrix instructions of one family round alike for all tiles.
``CudaKernels(batch_invariant=False)`` gives up two of these guarantees: products are computed by cuBLAS, which chooses
a kernel by the number of rows; and a prompt's tiles are taller than a single token's, so a token may round differently
in a prompt and by itself.
"""
