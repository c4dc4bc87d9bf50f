"""Work of a pool's threads, compiled: they share a launch's items, and run programs, which are launches in order.

If another process takes a core, the other threads only wait for the items that its thread has taken.
"""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu import layout
from batchgen.kernels.cpu.compiled.simd import call, fetch, fetch_add, jit, pause, pointer, replace

# Threads spin for as long as gaps between launches usually last; then they sleep, which frees a core for a ready one.
_SPINS = 4000  # about 100 microseconds: Python takes 20 from one launch to the next
_WAIT, _WAKE, _ALL = 128, 129, 1 << 30  # operations of Linux's futex among threads of one process
_FUTEX_BITS, _WORKERS, _NEXT = (1 << 32) - 1, (1 << layout.WORKER_BITS) - 1, 1 << layout.WORKER_BITS


@jit
def next_item(args, worker):
    """Take the next work item, first from the worker's own range; the number of items if all are taken."""
    num_items, num_ranges = args[layout.NUM_ITEMS], args[layout.NUM_RANGES]
    taken = pointer(args[layout.RANGES], np.int64)
    for other in range(num_ranges):
        place = (worker * num_ranges // args[layout.NUM_WORKERS] + other) % num_ranges
        first, end = place * num_items // num_ranges, (place + 1) * num_items // num_ranges
        if first + taken[place] < end:
            item = first + fetch_add(taken, place, 1)
            if item < end:
                return item
    return num_items


@jit
def worker_number(args):
    """The calling worker's number, from 0; it selects the worker's scratch memory and range."""
    return call(args[layout.NUMBERING], args[layout.KEY], 0, 0, 0, 0)


@jit
def wait_while(pool, place, shift, value):
    """Wait while ``pool[place] >> shift`` is ``value``; ``place`` is ``PROGRESS`` or ``END``."""
    for _ in range(_SPINS):
        if fetch(pool, place) >> shift != value:
            return
        pause()
    fetch_add(pool, place + layout.NUM_SLEEPERS, 1)
    while True:
        event = fetch(pool, place + layout.EVENT)  # read first: a later change raises it, so the call returns at once
        if fetch(pool, place) >> shift != value:
            break
        call(
            pool[layout.SLEEP],
            pool[layout.FUTEX],
            pool[layout.SELF] + 8 * (place + layout.EVENT),
            _WAIT,
            event & _FUTEX_BITS,
            0,
        )
    fetch_add(pool, place + layout.NUM_SLEEPERS, -1)


@jit
def wake(pool, place):
    """Wake the threads that wait for a change of ``pool[place]``."""
    if fetch(pool, place + layout.NUM_SLEEPERS):
        fetch_add(pool, place + layout.EVENT, 1)
        call(pool[layout.WAKE], pool[layout.FUTEX], pool[layout.SELF] + 8 * (place + layout.EVENT), _WAKE, _ALL, 0)


@jit
def take_part(pool, number):
    """Take part in each launch until the current program ends; return at once if it is for fewer workers.

    ``PROGRESS`` holds the current launch's number, counted over all programs, and in its low bits how many threads are
    in it. ``END`` holds the number after the last launch and in its low bits the most workers; it rises once ``TABLE``
    has new launches. ``BASE`` and ``TABLE`` cannot change while a thread is in a launch.
    """
    while True:
        progress, end = fetch(pool, layout.PROGRESS), fetch(pool, layout.END)
        launch = progress >> layout.WORKER_BITS
        if launch >= end >> layout.WORKER_BITS or number >= end & _WORKERS:
            return
        if not replace(pool, layout.PROGRESS, progress, progress + 1):
            continue
        table, at = pointer(pool[layout.TABLE], np.int64), 2 * (launch - pool[layout.BASE])
        call(table[at], table[at + 1], 0, 0, 0, 0)
        done = launch << layout.WORKER_BITS
        if fetch_add(pool, layout.PROGRESS, -1) == done + 1 and replace(pool, layout.PROGRESS, done, done + _NEXT):
            wake(pool, layout.PROGRESS)
        wait_while(pool, layout.PROGRESS, layout.WORKER_BITS, launch)


@jit
def run_all(args):
    """Run a program, whose words are as in ``layout``; returns when its last launch is done.

    If the program is still growing, let the other threads begin the added launches, and return at once.
    """
    pool, num_workers = pointer(args[layout.POOL], np.int64), args[layout.MAX_WORKERS]
    if not args[layout.IS_BEGUN]:
        pool[layout.BASE] = fetch(pool, layout.PROGRESS) >> layout.WORKER_BITS
        pool[layout.TABLE] = args[layout.LAUNCHES]
    end = (pool[layout.BASE] + args[layout.NUM_LAUNCHES] << layout.WORKER_BITS) + num_workers
    fetch_add(pool, layout.END, end - fetch(pool, layout.END))
    if num_workers > 1:
        wake(pool, layout.END)
    args[layout.IS_BEGUN] = args[layout.IS_GROWING]
    if not args[layout.IS_GROWING]:
        take_part(pool, 0)


@jit
def serve(args):
    """Body of a pool's thread: take part in all later programs. The words are the pool and the worker's number."""
    pool, number = pointer(args[0], np.int64), args[1]
    while True:
        end = fetch(pool, layout.END)
        take_part(pool, number)
        wait_while(pool, layout.END, 0, end)
