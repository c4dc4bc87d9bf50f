"""How compiled kernels share their items, and how the threads of a pool run programs: launches of kernels in order.

Where another process takes a core, a thread of the pool stands still for milliseconds. The others wait only for the
items that it holds. Whoever has taken the last item of a launch and finds nobody else in it begins the next one, and a
thread that comes late joins whatever launch is current, or none. A thread that waits spins for as long as launches
usually leave it without work, then sleeps: the system moves a thread that was ready to the core that falls free.

``PROGRESS`` holds the number of the current launch, counted over all programs, above the number of threads in it.
``END`` holds the first launch that no program has, above the most workers of the newest program. A thread joins a
launch below it; ``BASE`` and ``TABLE`` were written before, and cannot change while it is in the launch.
"""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu.compiled.simd import call, fetch, fetch_add, jit, pause, pointer, replace
from batchgen.kernels.cpu.layout import (
    BASE,
    END,
    EVENT,
    FUTEX,
    KEY,
    LAUNCHES,
    MOST_WORKERS,
    NUM_ITEMS,
    NUM_LAUNCHES,
    NUM_RANGES,
    NUM_SLEEPERS,
    NUM_WORKERS,
    NUMBERING,
    POOL,
    PROGRESS,
    RANGES,
    SELF,
    SLEEP,
    TABLE,
    WAKE,
    WORKER_BITS,
)

_SPINS = 4000  # some 100 microseconds: Python takes 20 from one launch to the next
_WAIT, _WAKE, _ALL = 128, 129, 1 << 30  # operations of Linux's futex among threads of one process
_FUTEX_BITS, _WORKERS, _NEXT = (1 << 32) - 1, (1 << WORKER_BITS) - 1, 1 << WORKER_BITS


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
    return call(words[NUMBERING], words[KEY], 0, 0, 0, 0)


@jit
def wait_while(pool, place, shift, value):
    """Return when ``pool[place] >> shift`` is another than ``value``; ``place`` is ``PROGRESS`` or ``END``."""
    for _ in range(_SPINS):
        if fetch(pool, place) >> shift != value:
            return
        pause()
    fetch_add(pool, place + NUM_SLEEPERS, 1)
    while True:
        event = fetch(pool, place + EVENT)  # before the look: a change after it makes another event, and none sleeps
        if fetch(pool, place) >> shift != value:
            break
        call(pool[SLEEP], pool[FUTEX], pool[SELF] + 8 * (place + EVENT), _WAIT, event & _FUTEX_BITS, 0)
    fetch_add(pool, place + NUM_SLEEPERS, -1)


@jit
def wake(pool, place):
    """Let those who wait for a change of ``pool[place]`` look again."""
    if fetch(pool, place + NUM_SLEEPERS):
        fetch_add(pool, place + EVENT, 1)
        call(pool[WAKE], pool[FUTEX], pool[SELF] + 8 * (place + EVENT), _WAKE, _ALL, 0)


@jit
def take_part(pool, number):
    """Work in launch after launch until the current program ends, unless that is for fewer workers."""
    while True:
        progress, end = fetch(pool, PROGRESS), fetch(pool, END)
        launch = progress >> WORKER_BITS
        if launch >= end >> WORKER_BITS or number >= end & _WORKERS:
            return
        if not replace(pool, PROGRESS, progress, progress + 1):
            continue
        table, at = pointer(pool[TABLE], np.int64), 2 * (launch - pool[BASE])
        call(table[at], table[at + 1], 0, 0, 0, 0)
        done = launch << WORKER_BITS
        if fetch_add(pool, PROGRESS, -1) == done + 1 and replace(pool, PROGRESS, done, done + _NEXT):
            wake(pool, PROGRESS)
        wait_while(pool, PROGRESS, WORKER_BITS, launch)


@jit
def run_all(words):
    """Compiled: run a program, whose words are as in ``layout``; returns when its last launch is done."""
    pool, num_workers = pointer(words[POOL], np.int64), words[MOST_WORKERS]
    base, table = fetch(pool, PROGRESS) >> WORKER_BITS, words[LAUNCHES]
    pool[BASE], pool[TABLE] = base, table
    end = (base + words[NUM_LAUNCHES] << WORKER_BITS) + num_workers
    fetch_add(pool, END, end - fetch(pool, END))
    if num_workers > 1:
        wake(pool, END)
    take_part(pool, 0)


@jit
def serve(words):
    """Compiled: work in all programs to come, on a thread of its own; arguments are a pool and the worker's number."""
    pool, number = pointer(words[0], np.int64), words[1]
    while True:
        end = fetch(pool, END)
        take_part(pool, number)
        wait_while(pool, END, 0, end)
