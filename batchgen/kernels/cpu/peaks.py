"""What the processor multiplies per second in registers, and reads from memory: work to time, by kernels of our own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchgen.kernels.cpu import kernel_specs
from batchgen.kernels.cpu.layout import LANES, PEAK_VECTORS
from batchgen.kernels.cpu.parallel import Kernel, Kind, address
from batchgen.kernels.processor import cpu_features, has_bfloat16_pairs, has_matrix_unit, integer_products

MULTIPLY, READ = Kernel(kernel_specs.PEAK_PRODUCTS), Kernel(kernel_specs.PEAK_READS)
_ITEMS_PER_THREAD = 16  # so that a thread that was interrupted is helped
OWN_BYTES = 4 * PEAK_VECTORS * LANES  # of a worker's memory
ITEM_FLOATS = 1 << 18  # read at a time: 256 KiB from each of four places

Work = Callable[[], None]


def kinds_of_products() -> dict[str, tuple[Kind, int]]:
    """By the type of the factors, the kind of the loop and the FLOP of one product of vectors.

    A type is absent if no vector instruction multiplies it, or if a matrix unit does, which these loops leave idle.
    """
    kinds: dict[str, tuple[Kind, int]] = {"float32": (torch.float32, 2 * LANES)}
    if has_bfloat16_pairs() and not has_matrix_unit():
        kinds["bfloat16"] = torch.bfloat16, 4 * LANES
    if (found := integer_products()) and "amx-int8" not in cpu_features():
        kinds["int8"] = "int8", 2 * found[0] * LANES
    return kinds


def products(rounds: int = 200_000) -> dict[str, tuple[Work, float]]:
    """By the type of the factors, a loop of products on all threads and its FLOP."""
    threads = torch.get_num_threads()
    memory, items = totals_of(threads), _ITEMS_PER_THREAD * threads

    def work(kind: Kind) -> Work:
        return lambda: MULTIPLY.launch(kind, items, address(memory), OWN_BYTES, rounds)

    kinds = kinds_of_products().items()
    return {name: (work(kind), float(flop * kernel_specs.PEAK_TOTALS * rounds * items)) for name, (kind, flop) in kinds}


def totals_of(threads: int) -> torch.Tensor:
    """Memory of each worker, [threads, PEAK_VECTORS, LANES]: totals and factors, which are one half as float32."""
    return torch.full((threads, PEAK_VECTORS, LANES), 0.5)


def reads(buffer: torch.Tensor) -> tuple[Work, int]:
    """Reading a float32 buffer on all threads, and how many bytes of it are read."""
    items = buffer.numel() // ITEM_FLOATS
    sums = totals_of(torch.get_num_threads())
    num_bytes = items * ITEM_FLOATS * buffer.element_size()
    return lambda: READ.launch("any", items, address(sums), OWN_BYTES, address(buffer), ITEM_FLOATS), num_bytes
