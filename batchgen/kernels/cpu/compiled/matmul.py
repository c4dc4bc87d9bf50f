"""Linears over panels of weights: products of tiles of rows with four strips, and outputs from their sums."""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu import layout
from batchgen.kernels.cpu.compiled import matmul_tiles as tiles
from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.entry import DTYPE, STORED, Group, Own, kernel
from batchgen.kernels.cpu.compiled.simd import BYTES, F32

SUMS = layout.MAX_ROWS * layout.TILE_COLUMNS  # float32 words of scratch a worker needs
HALF = layout.TILE_COLUMNS // 2
# Pointers (bias, residual, scales, shifts and segments may be 0) and sizes. ``sums`` is a worker's own memory. With
# ``segments`` (see ``linear.Experts``), ``weights`` points to the addresses of the experts' weights.
PRODUCT = Group(
    "Product",
    "x bias residual out weights sums rows inputs width is_gated groups num_panels stride strip_size panel_bytes steps"
    " number_bytes scales shifts segments",
    **{"x": DTYPE, "bias": DTYPE, "residual": DTYPE, "out": DTYPE, "weights": STORED, "sums": Own(F32)},
    **{"scales": F32, "shifts": np.int32, "segments": np.int64},
)


@simd.jit
def _finish_gated(product, sums, rows, first, column):
    """Write ``silu(gate) * up`` (or gelu) of a panel's 32 gates and ups to ``out[first + r, column : column + 32]``."""
    out, width = product.out, product.width
    for r in range(rows):
        at = (first + r) * width + column
        for i in range(0, min(HALF, width - column), layout.LANES):
            gate = simd.load(sums, r * layout.TILE_COLUMNS + i)
            up = simd.load(sums, r * layout.TILE_COLUMNS + HALF + i)
            if product.is_gated == layout.GATED_BY_GELU:
                simd.store_some(out, at + i, simd.gelu_mul(out, gate, up), width - column - i)
            else:
                simd.store_some(out, at + i, simd.silu_mul(out, gate, up), width - column - i)


@simd.jit
def _finish(product, sums, rows, first, column):
    """Write sums plus bias and residual, rounded once, to ``out[first + r, column : column + 64]``."""
    bias, residual, out, width = product.bias, product.residual, product.out, product.width
    for r in range(rows):
        at = (first + r) * width + column
        for i in range(0, min(layout.TILE_COLUMNS, width - column), layout.LANES):
            count = width - column - i
            total = simd.load(sums, r * layout.TILE_COLUMNS + i)
            if simd.address(bias):
                total = simd.add(total, simd.load_some(bias, column + i, count))
            if simd.address(residual):
                total = simd.add(total, simd.load_some(residual, at + i, count))
            simd.store_some(out, at + i, total, count)


@simd.inline
def finish_tile(product, sums, rows, first, column):
    """Write the outputs of rows, in the panel that begins at ``column``, from their sums."""
    if product.is_gated:
        _finish_gated(product, sums, rows, first, column)
    else:
        _finish(product, sums, rows, first, column)


@simd.jit
def _fetching(turn, num_fetching, here, following, panel_bytes, steps):
    """(address, bytes per step) of the prefetches in a tile's ``steps`` steps.

    The last ``num_fetching`` tiles (this is number ``turn``) prefetch the panel that this thread most likely multiplies
    next: late, so that it is still cached then. The others prefetch lines that the cache holds, which costs nothing.
    """
    if turn < 0 or num_fetching == 0:
        return here, 0
    step = panel_bytes // steps // num_fetching
    return following + turn * step * steps, step


@simd.inline
def group_of(product, number):
    """(first row, end, address of the weights) of a group: a share of all rows, or the rows of one expert.

    If rows use fewer experts than there are groups, the other groups are empty.
    """
    num_rows, segments = product.rows, product.segments
    weights = simd.address(product.weights)
    if simd.address(segments):
        if number >= segments[0]:
            return 0, 0, weights
        at = 1 + layout.SEGMENT_WORDS * number
        return segments[at + 1], segments[at + 2], simd.pointer(weights, np.int64)[segments[at]]
    num_tiles = -(-num_rows // layout.MAX_ROWS)
    first, end = number * num_tiles // product.groups, (number + 1) * num_tiles // product.groups
    return first * num_rows // num_tiles, end * num_rows // num_tiles, weights


@simd.inline
def following_panel(product, item):
    """The address of the panel that this worker most likely multiplies next."""
    last = item // product.num_panels + 1  # each share has its own workers
    if simd.address(product.segments):
        last = product.segments[0]
    item = min(item + product.stride, last * product.num_panels - 1)
    _, _, weight = group_of(product, item // product.num_panels)
    return weight + item % product.num_panels * product.panel_bytes


@simd.jit
def _multiply_panel(item, product, x):
    first_row, end_row, weight = group_of(product, item // product.num_panels)
    panel, num_rows, width = item % product.num_panels, end_row - first_row, product.width
    columns = HALF if product.is_gated else layout.TILE_COLUMNS
    here, column = weight + panel * product.panel_bytes, panel * columns
    following, num_tiles = following_panel(product, item), -(-num_rows // layout.MAX_ROWS)
    num_fetching = min(num_tiles, layout.STRIPS) if num_tiles > 1 else 0
    finish = tiles.GATE if product.is_gated else (tiles.ADD if simd.address(product.residual) else tiles.STORE)
    if width - column < columns or simd.address(product.bias) or not tiles.ALL_STRIPS:
        finish = tiles.TO_SUMS
    if product.is_gated == layout.GATED_BY_GELU:  # tiles only compute silu
        finish = tiles.TO_SUMS
    how, w = (finish, product.sums, product.residual), simd.pointer(here, product.weights)
    for tile in range(num_tiles):
        first, end = first_row + tile * num_rows // num_tiles, first_row + (tile + 1) * num_rows // num_tiles
        turn, at = tile - num_tiles + num_fetching, first * width + column
        ahead, step = _fetching(turn, num_fetching, here, following, product.panel_bytes, product.steps)
        where = x, first * product.inputs, product.inputs, w, product.strip_size, product.steps
        tiles.multiply(end - first, *where, product.out, at, width, how, ahead, step)
        if finish == tiles.TO_SUMS:
            finish_tile(product, product.sums, end - first, first, column)


@kernel(product=PRODUCT)
def matmul(item, product):
    """The product with weights of type ``STORED``, read as numbers; if they are bytes, for one or two rows only."""
    _multiply_panel(item, product, product.x)


@simd.jit
def multiply_integers(item, product):
    """Multiply a group of rows of integers by one panel; x as in ``emit_integer_sums``."""
    values = simd.pointer(simd.address(product.x), BYTES)
    _multiply_panel(item, product, (values, product.scales, product.shifts))


@kernel(product=PRODUCT)
def matmul_integers(item, product):
    """The product of integers by vector instructions."""
    multiply_integers(item, product)


@kernel(product=PRODUCT)
def matmul_unpacked(item, product):
    """The product of more than two rows with 8-bit weights, which are first unpacked to numbers of type ``STORED``.

    Unpacking costs as much as multiplying a few rows, so it is done once for many rows, a part of a panel at a time.
    """
    x, inputs, mine = product.x, product.inputs, simd.address(product.sums)
    numbers = simd.pointer(mine + 4 * SUMS * layout.UNPACKED_TILES, product.weights)
    groups, columns = inputs // layout.GROUP, HALF if product.is_gated else layout.TILE_COLUMNS
    most_groups = layout.UNPACKED_BYTES // (layout.TILE_COLUMNS * layout.GROUP * product.number_bytes)
    first_row, end_row, weight = group_of(product, item // product.num_panels)
    panel, num_rows = item % product.num_panels, end_row - first_row
    here, num_tiles = weight + panel * product.panel_bytes, -(-num_rows // layout.MAX_ROWS)
    following = following_panel(product, item)
    for first_tile in range(0, num_tiles, layout.UNPACKED_TILES):
        end_tile = min(first_tile + layout.UNPACKED_TILES, num_tiles)
        for group in range(0, groups, most_groups):
            count = min(most_groups, groups - group)
            tiles.unpack(numbers, simd.pointer(here, BYTES), product.strip_size, group, count, x)
            size, steps = count * layout.GROUP * layout.LANES, count * layout.GROUP // 2
            is_last = end_tile == num_tiles and group + count == groups
            num_fetching = min(end_tile - first_tile, layout.STRIPS) if is_last else 0
            for tile in range(first_tile, end_tile):
                first = first_row + tile * num_rows // num_tiles
                end = first_row + (tile + 1) * num_rows // num_tiles
                sums = simd.shifted(product.sums, (tile - first_tile) * SUMS)
                how = (tiles.MORE_SUMS if group else tiles.TO_SUMS, sums, product.residual)
                turn = tile - end_tile + num_fetching
                ahead, step = _fetching(turn, num_fetching, mine, following, product.panel_bytes, steps)
                where = x, first * inputs + group * layout.GROUP, inputs, numbers, size, steps
                tiles.multiply(end - first, *where, product.out, 0, product.width, how, ahead, step)
        for tile in range(first_tile, end_tile):
            first = first_row + tile * num_rows // num_tiles
            end = first_row + (tile + 1) * num_rows // num_tiles
            sums = simd.shifted(product.sums, (tile - first_tile) * SUMS)
            finish_tile(product, sums, end - first, first, panel * columns)
