"""AMX's products of bfloat16 tiles in numpy, operation by operation: what kernels of tiles must give, to the bit.

Each lane of a total has two sums, which begin at zero: of the products of even inputs and of those of odd inputs. Each
product is added with one rounding, in the order of the inputs. Then both sums are added, and that sum to the total. All
roundings are to nearest even, and a denormal number counts as zero, as an operand and as a result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]  # of bfloat16
_MIN = 2.0**-126  # of float32's normal numbers
_LIFT = 2.0**64
STEP = 32


def widened(bits: Bits) -> Floats:
    """The numbers that bfloat16 bits stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _without_denormals(x: Floats) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    return np.where(np.abs(wide) < _MIN, np.copysign(0.0, wide), wide)


def _rounded(exact: NDArray[np.float64]) -> Floats:
    """To float32; what is below its normal numbers even if it is rounded with all 24 bits becomes zero.

    53 bits hold a sum of two float32 numbers closely enough that a second rounding gives what one would.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = exact.astype(np.float32)
        lifted = (exact * _LIFT).astype(np.float32)
    of_small = np.where(np.abs(lifted) >= _MIN * _LIFT, _MIN, 0.0)
    return np.where(np.abs(exact) < _MIN, np.copysign(of_small, exact), narrow).astype(np.float32)


def _fma(a: Floats, b: Floats, total: Floats) -> Floats:
    a_, b_, total_ = map(_without_denormals, (a, b, total))
    with np.errstate(invalid="ignore"):
        return _rounded(a_ * b_ + total_)


def _add(a: Floats, b: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        return _rounded(_without_denormals(a) + _without_denormals(b))


def add_products(total: Floats, x: Bits, weight: Bits) -> Floats:
    """``total`` [rows, outputs] after one instruction with x [rows, 32] and weight [outputs, 32]."""
    sums = [np.zeros_like(total), np.zeros_like(total)]
    for place in range(STEP):
        factors = widened(x[:, place])[:, None], widened(weight[:, place])[None]
        sums[place % 2] = _fma(*factors, sums[place % 2])
    return _add(total, _add(*sums))


def product(x: Bits, weight: Bits) -> Floats:
    """Sums [rows, outputs] of x [rows, inputs] and weight [outputs, inputs], with zeros up to a multiple of 32."""
    more = (0, 0), (0, -x.shape[1] % STEP)
    x, weight = np.pad(x, more), np.pad(weight, more)
    total = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, x.shape[1], STEP):
        total = add_products(total, x[:, first : first + STEP], weight[:, first : first + STEP])
    return total


def rounded_bits(x: Floats) -> Bits:
    """Bfloat16 bits of float32 numbers that are not NaN, to nearest even; denormal numbers are not asked for."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def hostile_bits(random: np.random.Generator, shape: tuple[int, ...]) -> Bits:
    """Numbers of one of several kinds, all of which sums can go wrong with."""
    plain = random.standard_normal(shape)
    kinds = {
        "usual": plain,
        "of all sizes": plain * 2.0 ** random.integers(-120, 120, shape),
        "whose products are about the least normal number": plain * 2.0 ** random.integers(-70, -56, shape),
        "that cancel out": random.choice([1, -1, 256, -256, 257, 2.0**-63, -(2.0**-63)], shape),
    }
    numbers = [(x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in kinds.values()]
    denormal = numbers[0] & np.uint16(0x80FF)  # and the least normal numbers
    any_bits = random.integers(0, 1 << 16, shape).astype(np.uint16)
    few_ends = np.where(
        random.random(shape) < 0.02, random.choice([0x7F80, 0xFF80, 0x7FC1, 0x7F7F, 1], shape), numbers[0]
    )
    choices = [*numbers, denormal, any_bits, few_ends.astype(np.uint16)]
    return choices[random.integers(len(choices))]
