"""Kernels for NVIDIA GPUs, in Triton; other rooms import ``backend`` alone.

Every kernel here sums a token's own numbers in an order that its sequence and the model's shape fix. So a token's bits
depend on nothing but the sequence, as long as the matrix instructions of one family round alike whatever the tile.
``CudaKernels(batch_invariant=False)`` gives two of these up: products are cuBLAS', which chooses a kernel by the number
of rows; and a prompt's tiles are taller than a single token's, which may round differently when a token is computed
once in a prompt and once by itself.
"""
