"""8-bit weights in a tile, read as numbers or multiplied as integers; emitted as LLVM IR.

``layout.GROUP`` numbers or ``layout.DOT_GROUP`` integers share a scale; a group's integer products add up exactly.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from batchgen.kernels.cpu.compiled import emit
from batchgen.kernels.cpu.layout import DOT_GROUP, DOT_GROUP_BYTES, GROUP, GROUP_BYTES, LANES, STEP_INPUTS
from batchgen.kernels.processor import cpu_features, has_matrix_unit

_BYTE = ir.IntType(8)
# A strip of numbers has, per group of 32 inputs, 16 float16 scales and bytes [16 pairs, 16 outputs, 2]; a number is
# rounded to the type of the product. A strip of integers has, per group of 128 rotated inputs, 16 float32 scales and
# bytes [16, 4] per four inputs, shifted to be positive if the machine multiplies unsigned by signed bytes; or [16, 2]
# per two inputs if it cannot multiply bytes exactly and widens them to 16 bits.
_SCALE_BYTES = 2 * LANES
_PAIR_BYTES = 2 * LANES  # of a pair of inputs
_ADDING = frozenset({"avx512vnni", "avxvnni", "dotprod"})


def _at(builder, base, offset, kind):
    return builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())


def emit_scales(builder, strip, group):
    """The scales of 16 outputs in a group of a strip of numbers, as float32."""
    halves = ir.VectorType(ir.HalfType(), LANES)
    at = _at(builder, strip, builder.mul(group, emit.number(GROUP_BYTES)), halves)
    return builder.fpext(builder.load(at, align=_SCALE_BYTES), emit.VECTOR)


def emit_numbers(builder, strip, group, pair, scales, x):
    """Weights of a pair of inputs for 16 outputs: a vector of pairs of bfloat16, or two of float32.

    ``x`` points to the inputs; weights are rounded to its element type.
    """
    start = builder.add(builder.mul(group, emit.number(GROUP_BYTES)), emit.number(_SCALE_BYTES))
    at = builder.add(start, builder.mul(pair, emit.number(_PAIR_BYTES)))
    if emit.is_bf16(x) and emit.HAS_BF16:
        sides = []
        for side in range(2):
            lanes = ir.Constant(
                emit.INT_VECTOR, [ir.Constant(emit.INT, side * LANES // 2 + i // 2) for i in range(LANES)]
            )
            both = builder.shuffle_vector(scales, ir.Constant(emit.VECTOR, ir.Undefined), lanes)
            half = _at(builder, strip, builder.add(at, emit.number(side * LANES)), ir.VectorType(_BYTE, LANES))
            integers = builder.sext(builder.load(half, align=LANES), emit.INT_VECTOR)
            sides.append(builder.fmul(builder.sitofp(integers, emit.VECTOR), both))
        return [emit.pair_of(builder, *sides)]
    pairs = builder.load(_at(builder, strip, at, ir.VectorType(ir.IntType(16), LANES)), align=_PAIR_BYTES)
    wide = builder.sext(pairs, emit.INT_VECTOR)
    low = builder.ashr(builder.shl(wide, emit.int_splat(24)), emit.int_splat(24))
    integers = [low, builder.ashr(wide, emit.int_splat(8))]
    return [emit.round_like(builder, x, builder.fmul(builder.sitofp(i, emit.VECTOR), scales)) for i in integers]


def emit_unpack(builder, out, strip, groups, x):
    """Write the numbers of ``groups`` groups of a strip to ``out``: bfloat16 [pairs, 16, 2] or [inputs, 16]."""
    with cgutils.for_range(builder, groups) as outer:
        scales = emit_scales(builder, strip, outer.index)
        with cgutils.for_range(builder, emit.number(GROUP // 2)) as inner:
            vectors = emit_numbers(builder, strip, outer.index, inner.index, scales, x)
            if emit.is_bf16(out) and len(vectors) == 2:
                vectors = [_pair_up(builder, *vectors)]
            pair = builder.add(builder.mul(outer.index, emit.number(GROUP // 2)), inner.index)
            for i, vector in enumerate(vectors):
                at = builder.gep(out, [builder.add(builder.mul(pair, emit.number(2 * LANES)), emit.number(i * LANES))])
                builder.store(vector, builder.bitcast(at, vector.type.as_pointer()), align=64)


def _pair_up(builder, first, second):
    """``first`` and ``second``, rounded to bfloat16 and interleaved as 16 pairs."""
    lanes = [ir.Constant(emit.INT, lane) for i in range(LANES) for lane in (i, LANES + i)]
    mask = ir.Constant(ir.VectorType(emit.INT, 2 * LANES), lanes)
    return builder.shuffle_vector(emit.narrow(builder, first), emit.narrow(builder, second), mask)


def adds_up():
    """True if one instruction multiplies bytes and adds the products to a total, or tiles in memory emulate it."""
    return has_matrix_unit("int8") or not _ADDING.isdisjoint(cpu_features())


def integer_type():
    """The integer type in which inputs are multiplied; a lane adds the products of 32 bits of inputs."""
    return _BYTE if adds_up() else ir.IntType(16)


def _in_a_lane():
    return 32 // integer_type().width


def emit_dot(builder, weights, inputs, total):
    """``total`` plus, in each of 16 lanes, the sum of the lane's products of integers of ``integer_type``.

    Both factors are vectors of 64 bytes; if ``weights`` are unsigned, ``inputs`` are signed.
    """
    features = cpu_features()
    if not adds_up():
        kind = ir.VectorType(ir.IntType(16), 2 * LANES)
        factors = [builder.bitcast(v, kind) for v in (weights, inputs)]
        if "avx512bw" in features:
            sums = emit.call(builder, "llvm.x86.avx512.pmaddw.d.512", factors, emit.INT_VECTOR)
        else:
            sums = _in_parts(builder, 2, "llvm.x86.avx2.pmadd.wd", factors)
        return builder.add(total, sums)
    if "avx512vnni" in features:
        words = [total, *(builder.bitcast(v, emit.INT_VECTOR) for v in (weights, inputs))]
        return emit.call(builder, "llvm.x86.avx512.vpdpbusd.512", words, emit.INT_VECTOR)
    if "avxvnni" in features:
        words = [total, *(builder.bitcast(v, emit.INT_VECTOR) for v in (weights, inputs))]
        return _in_parts(builder, 2, "llvm.x86.avx512.vpdpbusd.256", words)
    if has_matrix_unit("int8"):
        factors = [builder.bitcast(v, emit.INT_VECTOR) for v in (weights, inputs)]
        return emit_byte_products(builder, factors[0], factors[1], total)
    quads = [builder.bitcast(v, ir.VectorType(_BYTE, 4 * LANES)) for v in (weights, inputs)]
    return _in_parts(builder, 4, "llvm.aarch64.neon.sdot.v4i32.v16i8", [total, *quads])


def emit_byte_products(builder, weights, inputs, total):
    """``emit_dot`` of unsigned weights and signed inputs, four bytes per int32 lane, without a special instruction."""
    for place in range(0, 32, 8):
        of_weight = builder.and_(builder.lshr(weights, emit.int_splat(place)), emit.int_splat(0xFF))
        of_input = builder.ashr(builder.shl(inputs, emit.int_splat(24 - place)), emit.int_splat(24))
        total = builder.add(total, builder.mul(of_weight, of_input))
    return total


def _in_parts(builder, parts, name, vectors):
    """Call an instruction for smaller registers on each part of ``vectors``; returns the int32 results, joined."""
    sums = []
    for part in range(parts):
        taken = []
        for vector in vectors:
            count = vector.type.count // parts
            lanes = [ir.Constant(emit.INT, part * count + lane) for lane in range(count)]
            mask = ir.Constant(ir.VectorType(emit.INT, count), lanes)
            taken.append(builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask))
        sums.append(emit.call(builder, name, taken, ir.VectorType(emit.INT, LANES // parts)))
    while len(sums) > 1:
        sums = [_joined(builder, a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _joined(builder, a, b):
    lanes = 2 * a.type.count
    mask = ir.Constant(ir.VectorType(emit.INT, lanes), [ir.Constant(emit.INT, lane) for lane in range(lanes)])
    return builder.shuffle_vector(a, b, mask)


def _emit_weights(builder, strip, at):
    """The weights of 16 outputs, one lane each, in ``integer_type``."""
    count = _in_a_lane() * LANES
    weights = builder.load(_at(builder, strip, at, ir.VectorType(_BYTE, count)), align=count)
    return weights if adds_up() else builder.sext(weights, ir.VectorType(integer_type(), count))


def _emit_group_sums(builder, sums, values, start, strip, base, steps, done, prefetch):
    """Add a group's products to ``sums`` {(row, strip): int32 vector}, in ``steps`` steps of 8 inputs.

    ``start`` are the indices of the rows' integers in ``values``; ``base`` is the offset of the group's weights in a
    strip, after their scales. ``done`` steps of earlier groups come first.
    """
    together = _in_a_lane()

    def add_products(place):
        at = builder.add(base, builder.mul(place, emit.number(LANES)))
        weights = [_emit_weights(builder, s, at) for s in strip]
        for r, row in enumerate(start):
            pointer = builder.gep(builder.bitcast(values, integer_type().as_pointer()), [builder.add(row, place)])
            x = emit.splat(builder, builder.load(builder.bitcast(pointer, emit.INT.as_pointer()), align=4))
            for v, w in enumerate(weights):
                builder.store(emit_dot(builder, w, x, builder.load(sums[r, v])), sums[r, v])

    # A loop count that LLVM cannot see. If the loop were unrolled, LLVM would compute all products before it adds them
    # up, and AVX2 has too few registers for that.
    number = ir.FunctionType(steps.type, [steps.type])
    parts = builder.asm(number, "", "=r,0", [emit.number(STEP_INPUTS // together)], side_effect=False)
    with cgutils.for_range(builder, steps) as loop:
        prefetch(builder.add(done, loop.index))
        first = builder.mul(loop.index, emit.number(STEP_INPUTS))
        if adds_up():
            for part in range(0, STEP_INPUTS, together):
                add_products(builder.add(first, emit.number(part)))
            return
        with cgutils.for_range(builder, parts) as part:
            add_products(builder.add(first, builder.mul(part.index, emit.number(together))))


def emit_integer_sums(builder, totals, x, first_row, strip, groups, num_steps, prefetch):
    """Add the products of rows with strips to ``totals`` {(row, strip): vector}, group by group in float32.

    ``x`` is (integers [rows, groups * 128], float32 scales [rows, groups], int32 [rows, groups] that cancel the shift
    of weights). Each of ``num_steps`` steps of 8 inputs calls ``prefetch`` with its number; padding is left out.
    """
    values, scales, shifts = x
    rows = 1 + max(r for r, _ in totals)
    place = [builder.mul(builder.add(first_row, emit.number(r)), groups) for r in range(rows)]
    steps = emit.number(DOT_GROUP // STEP_INPUTS)
    with cgutils.for_range(builder, groups) as outer:
        at = [builder.add(start, outer.index) for start in place]
        sums = {place: cgutils.alloca_once(builder, emit.INT_VECTOR) for place in totals}
        for r in range(rows):
            shift = emit.splat(builder, builder.load(builder.gep(shifts, [at[r]])))
            for v in range(len(strip)):
                builder.store(shift, sums[r, v])
        base, done = builder.mul(outer.index, emit.number(DOT_GROUP_BYTES)), builder.mul(outer.index, steps)
        left = builder.sub(num_steps, done)
        count = builder.select(builder.icmp_signed(">=", left, steps), steps, left)
        start = [builder.mul(row, emit.number(DOT_GROUP)) for row in at]
        bytes_at = builder.add(base, emit.number(4 * LANES))
        _emit_group_sums(builder, sums, values, start, strip, bytes_at, count, done, prefetch)
        of_weights = [
            emit.load(builder, builder.bitcast(builder.gep(s, [base]), emit.FLOAT.as_pointer()), emit.number(0))
            for s in strip
        ]
        for r in range(rows):
            of_row = emit.splat(builder, builder.load(builder.gep(scales, [at[r]])))
            for v, scale in enumerate(of_weights):
                by = builder.fmul(of_row, scale)
                term = builder.fmul(by, builder.sitofp(builder.load(sums[r, v]), emit.VECTOR))
                builder.store(builder.fadd(builder.load(totals[r, v]), term), totals[r, v])
