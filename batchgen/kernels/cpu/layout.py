"""Sizes and places shared by the compiled kernels and the Python that launches them. Imports nothing.

A kernel is a C function of one pointer to int64 words; the first words mean the same for all kernels.
"""

from __future__ import annotations

ENTRY = "kernel"  # the symbol of a kernel's function in its object
LANES = 16  # float32 in a vector

# Words before a kernel's own arguments: the address of the function that returns a worker's number, its argument, the
# numbers of items, workers and ranges, and the address of the ranges' counters.
NUMBERING, KEY, NUM_ITEMS, NUM_WORKERS, NUM_RANGES, RANGES = range(6)
ARGS = 6  # index of a kernel's first own argument

# Words of a pool of threads, in three cache lines; threads write to the first two. See ``compiled.thread_pool``.
PROGRESS, END, SELF = range(0, 24, 8)
NUM_SLEEPERS, EVENT = 1, 2  # after ``PROGRESS``, and after ``END``
BASE, TABLE, FUTEX, SLEEP, WAKE = range(SELF + 1, SELF + 6)
POOL_WORDS = 24
WORKER_BITS = 16  # low bits of ``PROGRESS`` and ``END`` for a number of workers; the others number a launch
# Words of a program: the pool, the number of launches, the most workers, the address of its table (a kernel and its
# words for each launch), whether it is growing, and whether a growing program has begun.
POOL, NUM_LAUNCHES, MAX_WORKERS, LAUNCHES, IS_GROWING, IS_BEGUN = range(6)
PROGRAM_WORDS = 6

ROWS_PER_ITEM = 8  # of kernels over rows: few enough to balance the threads, enough to hide the atomic addition

# Linears: a tile is up to MAX_ROWS rows by STRIPS vectors of outputs; it reads a stream of weights for each vector.
STRIPS = 4
MAX_ROWS = 6  # 24 accumulators, 4 vectors of weights and one of inputs: 29 of 32 registers
TILE_COLUMNS = STRIPS * LANES
GATED_BY_SILU, GATED_BY_GELU = 1, 2  # how a product of gates and ups ends
SEGMENT_WORDS = 3  # int64 words about the rows of one expert; see ``linear.Experts``

# Linears on the tiles of a matrix unit: up to 16 rows of 64 bytes each.
TILE_ROWS, TILE_ROW_BYTES = 16, 64
TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES
TILE_STEP = 32  # inputs of bfloat16 that one instruction multiplies
BLOCK_ROWS = 8 * TILE_ROWS  # rows that are multiplied by a panel at once; scratch memory holds their sums
# Float32 words of scratch a worker needs: sums; ends of rows and of strips; tiles in memory and their numbers of rows.
TILE_STATE = (8 * TILE_BYTES + 8 * 8) // 4
TILE_SCRATCH = BLOCK_ROWS * (TILE_COLUMNS + TILE_ROW_BYTES // 4) + STRIPS * TILE_BYTES // 4 + TILE_STATE
UNPACKED_STEPS = 10  # steps of a panel whose weights are unpacked at once
UNPACKED_TILE_FLOATS = UNPACKED_STEPS * STRIPS * TILE_BYTES // 4

# 8-bit weights: inputs that share a scale, and bytes of such a group for 16 outputs, with their scales.
GROUP, DOT_GROUP = 32, 128  # if activations are floating-point numbers, and if they are integers
GROUP_BYTES = LANES * (GROUP + 2)
DOT_GROUP_BYTES = LANES * (DOT_GROUP + 4)
MIN_QUANTIZED = 2.0**-119  # a group with a smaller maximum counts as zeros: 127 / maximum may overflow float32
STEP_INPUTS = 8  # inputs that a tile multiplies as integers before it prefetches again
WEIGHT_DIVISOR = 8  # rotated weights are divided by it, about the root of a group's length: scales must fit float16
UNPACKED_BYTES = 128 << 10  # of unpacked weights, which many rows use before the next are unpacked
UNPACKED_TILES = 21  # most tiles of rows at once, so that the nearer caches hold their sums

# Attention.
MAX_QUERIES = 8  # query rows that read the same keys at once
MAX_HEADS = 8  # most KV heads, of few query rows each, that one item walks side by side
SCORE_ROWS = 32  # rows of all these heads together, so that the nearer caches hold their scores of a tile
CHUNK = 2 * LANES  # neighbouring positions that are scored side by side
NUM_STREAMS = 4  # places in memory that are read at once: one alone does not fill a core's share of the bandwidth
TILE = 256  # positions whose scores are held at once; a multiple of CHUNK * NUM_STREAMS
SCORE_STRIDE = TILE + 2 * LANES  # a block's last vectors may reach past the tile
QUERY_BLOCK_FIELDS = 6  # of a row of ``ModelInput.query_blocks``
ITEMS_PER_WORKER = 4  # as many stay, at least, if sequences join to share keys: workers wait for the last items

MAX_WAITING = 16 * MAX_HEADS  # most keys of an item in scratch memory: ``QUERY_BLOCK`` sequences, ``MAX_HEADS`` heads
ROPE_TOKENS = 16  # tokens whose keys of one head are written together, since they share cache lines

SEGMENT = 32  # tokens convolved at once: their inputs stay in the cache
BINS = 4096  # of the histograms that find a sampling threshold


def rotated_length(count: int) -> int:
    """The number of rotated inputs for ``count`` inputs of a group: a power of two, in complete vectors."""
    return max(LANES, 1 << (count - 1).bit_length())


def num_multiplied(inputs: int) -> int:
    """The integers per row that a product multiplies for ``inputs`` inputs; the last group's padding is left out."""
    whole = inputs // DOT_GROUP * DOT_GROUP
    return whole + (rotated_length(inputs - whole) if inputs > whole else 0)


def attention_rows(num_rows: int) -> int:
    """Rows in the scratch memory of an attention worker for ``num_rows`` query rows of several blocks.

    Padding may almost double the rows of a block. If there are few rows, the memory has room for several heads, two
    tiles each.
    """
    heads = SCORE_ROWS // MAX_QUERIES
    return max(-(-2 * num_rows // MAX_QUERIES) * MAX_QUERIES + MAX_QUERIES, 2 * MAX_QUERIES * heads)


def attention_scratch_floats(width: int, most_rows: int) -> int:
    """Float32 words an attention worker needs for heads padded to ``width`` and ``attention_rows`` of query rows."""
    scores, copies, scales = SCORE_ROWS * SCORE_STRIDE, NUM_STREAMS * CHUNK * width, MAX_HEADS * 2 * TILE
    return 2 * most_rows * (width + 1) + 2 * scores + copies + scales + TILE_STATE


def heads_scratch_floats(width: int, num_keys: int) -> int:
    """Float32 words one worker needs for a head, ``num_keys`` keys, and a key spread over ``LANES`` positions."""
    return (1 + num_keys + LANES) * width


def conv_scratch_floats(taps: int, width: int) -> int:
    """Float32 words one worker of ``short_conv`` needs; a multiple of 16."""
    return ((SEGMENT + taps - 1) * width + LANES - 1) // LANES * LANES


def routing_scratch_floats(num_experts: int) -> int:
    """Float32 words one worker of ``route`` needs: sums of a tile, scores and ranks of a row."""
    return -(-num_experts // TILE_COLUMNS) * TILE_COLUMNS * (MAX_ROWS + 2)


def sampling_scratch_bytes(width: int) -> int:
    """Bytes one worker of ``sample`` needs for rows of ``width`` logits; a multiple of 8."""
    return 8 * BINS + 4 * (width + 2 * LANES) // 8 * 8
