"""How compiled kernels share their items, and the loop that repeats recorded launches."""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu.compiled.simd import call, call_with, fetch_add, jit, pointer
from batchgen.kernels.cpu.layout import COUNTER, NUM_ITEMS, NUM_RANGES, NUM_WORKERS, NUMBERING, RANGES


@jit
def next_item(words, worker):
    """Take the next work item, from the worker's own range while there are any; ``NUM_ITEMS`` when none is left."""
    num_items, num_ranges = words[NUM_ITEMS], words[NUM_RANGES]
    taken = pointer(words[RANGES], np.int64)
    for other in range(num_ranges):
        place = (worker * num_ranges // words[NUM_WORKERS] + other) % num_ranges
        first, end = place * num_items // num_ranges, (place + 1) * num_items // num_ranges
        if first + taken[place] < end:
            item = first + fetch_add(taken, place, 1)
            if item < end:
                return item
    return num_items


@jit
def worker_number(words):
    """The calling worker's number, from 0: the key to its own scratch memory and its range."""
    return call(words[NUMBERING]) if words[NUMBERING] else fetch_add(words, COUNTER, 1)


@jit
def run_all(words):
    """Compiled: arguments are the address of ``GOMP_parallel``, a count, and as many (function, words, workers)."""
    for i in range(words[1]):
        call_with(words[0], words[2 + 3 * i], words[3 + 3 * i], words[4 + 3 * i])
