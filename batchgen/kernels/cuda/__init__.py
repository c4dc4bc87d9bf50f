"""Kernels for NVIDIA GPUs, in Triton: each sums a token's numbers in an order that sequence and model shape fix.

Bits depend on the sequence alone, as long as matrix instructions of one family round alike for all tiles.
"""
