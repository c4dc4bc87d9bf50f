"""Sizes and places that the compiled kernels and the Python that launches them agree on. Imports nothing.

A kernel is a C function of one pointer to int64 words; the first of them are the same for all kernels.
"""

from __future__ import annotations

ENTRY = "kernel"  # the symbol of a kernel's function in its object
LANES = 16  # float32 in a vector

# Words before a kernel's own arguments: a counter of workers, the address of the runtime's function that numbers them
# (0 without one: then they count), the number of items, of workers and of ranges, the address of the ranges' counters.
COUNTER, NUMBERING, NUM_ITEMS, NUM_WORKERS, NUM_RANGES, RANGES = range(6)
ARGS = 6  # index of a kernel's first own argument

ROWS_PER_ITEM = 8  # of kernels that treat rows: few enough to balance the threads, enough to hide the atomic

# Linears: a tile is up to MAX_ROWS rows by STRIPS vectors of outputs, as many streams of weights side by side.
STRIPS = 4
MAX_ROWS = 6  # 24 accumulators, 4 vectors of weights and one of inputs: 29 of 32 registers
TILE_COLUMNS = STRIPS * LANES
SEGMENT_WORDS = 3  # int64 words about the rows that meet one expert; see ``linear.Experts``

# Weights of 8 bits: bytes of 16 outputs and a group of inputs that share a scale, scales included.
GROUP, DOT_GROUP = 32, 128  # where activations are floating-point numbers, and where they are integers too
GROUP_BYTES = LANES * (GROUP + 2)
DOT_GROUP_BYTES = LANES * (DOT_GROUP + 4)
LEAST_QUANTIZED = 2.0**-119  # inputs whose largest is below count as zeros: 127 over it would not be a float32 number
UNPACKED_BYTES = 128 << 10  # of a panel's numbers that are multiplied with many rows before the next are unpacked
UNPACKED_TILES = 21  # at most these rows: their sums wait in the first caches meanwhile

# Attention.
MAX_QUERIES = 8  # query rows that read the same keys at once
CHUNK = 2 * LANES  # neighbouring positions that are scored side by side
NUM_STREAMS = 4  # places in memory that are read at once: one alone does not fill a core's share of the bandwidth
TILE = 256  # positions whose scores are held at once; a multiple of CHUNK * NUM_STREAMS
SCORE_STRIDE = TILE + 2 * LANES  # a block's last vectors may hang over

PEAK_VECTORS = 16  # of memory for each worker of the loops that only multiply

SEGMENT = 32  # tokens convolved at once: their inputs stay in the cache
BINS = 4096  # of the histograms that find a sampling threshold


def attention_scratch_floats(width: int, most_rows: int) -> int:
    """Float32 words one worker of attention needs: head_dim padded to ``width``, rows of a block to a multiple of 8."""
    return 2 * most_rows * (width + 1) + 2 * MAX_QUERIES * SCORE_STRIDE + NUM_STREAMS * CHUNK * width + 2 * TILE


def conv_scratch_floats(taps: int, width: int) -> int:
    """Float32 words one worker of ``short_conv`` needs; a multiple of 16."""
    return ((SEGMENT + taps - 1) * width + LANES - 1) // LANES * LANES


def routing_scratch_floats(num_experts: int) -> int:
    """Float32 words one worker of ``route`` needs: sums of a tile, scores and ranks of a row."""
    return -(-num_experts // TILE_COLUMNS) * TILE_COLUMNS * (MAX_ROWS + 2)


def sampling_scratch_bytes(width: int) -> int:
    """Bytes one worker of ``sample`` needs for rows of ``width`` logits; a multiple of 8."""
    return 8 * BINS + 4 * (width + 2 * LANES) // 8 * 8
