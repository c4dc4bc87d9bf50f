"""Kernels for NVIDIA GPUs, in Triton. Their order of sums depends only on the sequence and the model's shape.

Bits depend only on the sequence, as long as matrix instructions of one family round alike for all tiles.
"""
