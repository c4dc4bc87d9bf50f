"""Sizes of the heavy kernels. ``SPAN``, ``TILE``, ``BLOCK_K``, ``NUM_PARTS`` decide the order of sums, and so bits.

Products' sizes were the fastest of ten on an H200 with LFM2-350M's shapes; attention's were not varied there.
"""

from __future__ import annotations

import triton.language as tl

# Attention. The best block of the KV cache is a tile: its number is then one load, and its keys one piece of memory.
SPAN = 512  # positions that one program takes of a single token's context
TILE, TILE_FLOAT32 = 64, 32  # positions in a step of the loop
MIN_ROWS = 16  # of a matrix instruction
PROMPT_ROWS = 128  # of a prompt's tile: enough arithmetic for every key that it reads
PROMPT_ROWS_FLOAT32 = 16  # without matrix instructions, taller tiles would spill registers
ATTENTION_STAGES = 5  # of the pipeline: the first two fetch the block table, the others keys and values
WIDE_DIMS = 128  # of a head; tiles of wider heads take more shared memory than small GPUs have for a block
WIDE_PROMPT_ROWS, WIDE_STAGES = 32, 3
ONE_TOKEN_WARPS = 4
PROMPT_WARPS, TALL_PROMPT_WARPS = 4, 8  # of tiles up to 64 rows, and of taller ones

# Products.
BLOCK_M = tl.constexpr(64)  # the least that a Hopper matrix instruction takes
BLOCK_N = tl.constexpr(64)
FEW_TILE = (BLOCK_M.value, BLOCK_N.value)
TALL_TILE, TALL_OPTIONS = (128, 128), {"num_warps": 8, "num_stages": 3}  # of many rows; its stages fit in 96 KiB
BLOCK_K, BLOCK_K_FLOAT32 = 64, 32
PART_TILE = (64, 32)  # of few rows of a product in parts
NUM_PARTS = 4  # of a sum; for few rows, separate programs add up each part
FEW_ROWS = 256  # most rows for small tiles; for more rows, taller tiles are better
MAX_ROWS_IN_PARTS = 512  # more rows have enough tiles for all of a GPU
GROUP_M = tl.constexpr(8)  # row tiles that read the weight together, so that it comes from the L2 cache
PRODUCT_OPTIONS = {"num_warps": 4, "num_stages": 4}
PRODUCT_OPTIONS_FLOAT32 = {"num_warps": 8, "num_stages": 3}
