"""Kernels for NVIDIA GPUs, in Triton: only the sequence and the model's shape decide in which order they sum.

Bits depend on the sequence alone, as long as matrix instructions of one family round alike for all tiles.
"""
