"""Short vectors for Numba kernels: what the compiler will not find by itself in a loop over arrays.

A ``Vector`` is a value of a fixed number of float32 or float64 lanes. LLVM maps it to the registers the
machine has, so a vector of 64 lanes is eight AVX registers, or sixteen NEON ones. The functions work inside
``numba.njit`` code. Where one says ``lanes`` it takes what the function `lanes` makes of a constant: a value whose
type holds the number, so that functions handed it are compiled for that number.
"""

import functools
import math
import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model


class Vector(types.Type):
    def __init__(self, dtype: types.Float, lanes: int):
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(ir.FloatType() if self.dtype == types.float32 else ir.DoubleType(), self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm)


class Lanes(types.Type):
    def __init__(self, number: int):
        self.number = number
        super().__init__(name=f"Lanes({number})")


register_model(Lanes)(models.OpaqueModel)


@intrinsic(prefer_literal=True)
def lanes(typingctx, number):
    """A number of lanes, from a constant."""
    if not isinstance(number, types.IntegerLiteral):
        raise RequireLiteralValue("the number of lanes must be a constant")
    return Lanes(number.literal_value)(number), lambda context, builder, sig, args: context.get_dummy_value()


@intrinsic
def width(typingctx, lanes):
    """The number of lanes as an integer."""
    return types.intp(lanes), lambda context, builder, sig, args: context.get_constant(
        types.intp, lanes.number
    )


def _address(builder, pointer, index, pointee):
    return builder.bitcast(builder.gep(pointer, [index]), pointee.as_pointer())


@intrinsic
def pointer(typingctx, address, like):
    """The numbers of the type of ``like`` that begin at an address."""
    result = types.CPointer(types.unliteral(like))

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.intp, like), codegen


@intrinsic
def record(typingctx, pointer):
    """The record behind the pointer: no copy."""
    return pointer.dtype(pointer), lambda context, builder, sig, args: args[0]


@intrinsic
def take(typingctx, counter):
    """The number behind the pointer, which becomes one more: no two threads are given the same."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def after(typingctx, pointer, index):
    """The address ``index`` numbers further on."""
    return pointer(pointer, types.intp), lambda context, builder, sig, args: builder.gep(args[0], [args[1]])


@intrinsic
def load(typingctx, pointer, index, lanes):
    """The numbers ``index`` to ``index + lanes`` behind the pointer."""
    vector = Vector(pointer.dtype, lanes.number)

    def codegen(context, builder, sig, args):
        loaded = builder.load(_address(builder, args[0], args[1], vector.llvm))
        loaded.align = vector.dtype.bitwidth // 8
        return loaded

    return vector(pointer, types.intp, lanes), codegen


@intrinsic
def zeros(typingctx, pointer, lanes):
    """A vector of zeros of the type of the numbers behind the pointer."""
    vector = Vector(pointer.dtype, lanes.number)
    return vector(pointer, lanes), lambda context, builder, sig, args: ir.Constant(vector.llvm, None)


@intrinsic
def store(typingctx, pointer, index, vector):
    """Write the vector to the numbers from ``index`` on."""

    def codegen(context, builder, sig, args):
        stored = builder.store(args[2], _address(builder, args[0], args[1], vector.llvm))
        stored.align = vector.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.none(pointer, types.intp, vector), codegen


@intrinsic
def prefetch(typingctx, pointer, index):
    """Ask for the cache line of the number at ``index``, which will be read soon."""

    def codegen(context, builder, sig, args):
        address = _address(builder, args[0], args[1], ir.IntType(8))
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, i32(0), i32(3), i32(1)])  # for reading, into all levels, data
        return context.get_dummy_value()

    return types.none(pointer, types.intp), codegen


@intrinsic
def per_line(typingctx, pointer):
    """How many of the numbers behind the pointer a cache line of 64 bytes holds."""
    number = 512 // pointer.dtype.bitwidth
    return types.intp(pointer), lambda context, builder, sig, args: context.get_constant(types.intp, number)


@intrinsic
def splat(typingctx, value, lanes):
    """A vector whose lanes all hold ``value``."""
    vector = Vector(value, lanes.number)

    def codegen(context, builder, sig, args):
        undefined = ir.Constant(vector.llvm, ir.Undefined)
        first = builder.insert_element(undefined, args[0], ir.IntType(32)(0))
        return _shuffle(builder, first, undefined, [0] * vector.lanes)

    return vector(value, lanes), codegen


def _shuffle(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _define_operator(function, instruction, flags=()):
    @infer_global(function)  # pyright: ignore[reportOptionalCall]
    class _Template(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(function, Vector, Vector)
    def _lower(context, builder, sig, args):
        return getattr(builder, instruction)(*args, flags=flags)


# A product and a sum may become one fused multiply-add. A difference is of rounded numbers: x·y - x·y is exactly 0.
_define_operator(operator.add, "fadd", ("contract",))
_define_operator(operator.mul, "fmul", ("contract",))
_define_operator(operator.sub, "fsub")
_define_operator(operator.truediv, "fdiv")


@intrinsic
def maximum(typingctx, a, b):
    """The larger lane of each pair; b where either is NaN."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, b), codegen


def _fold(builder, vector, lanes):
    """Add the halves until ``lanes`` are left."""
    while vector.type.count > lanes:
        half = vector.type.count // 2
        low = _shuffle(builder, vector, vector, list(range(half)))
        high = _shuffle(builder, vector, vector, list(range(half, 2 * half)))
        vector = builder.fadd(low, high, flags=("contract",))
    return vector


@intrinsic
def total(typingctx, vector):
    """The sum of the lanes, a power of two of them."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(_fold(builder, args[0], 1), ir.IntType(32)(0))

    return vector.dtype(vector), codegen


@intrinsic
def totals(typingctx, a, b, c, d, e, f, g, h):
    """The eight sums of eight vectors as one vector: a third of the instructions of eight `total`."""

    def codegen(context, builder, sig, args):
        def pairs(x, y):  # sums of neighbours, as the horizontal add instruction of AVX orders them
            even = _shuffle(builder, x, y, [0, 2, 8, 10, 4, 6, 12, 14])
            return builder.fadd(even, _shuffle(builder, x, y, [1, 3, 9, 11, 5, 7, 13, 15]))

        folded = [_fold(builder, vector, 8) for vector in args]
        two = [pairs(*folded[i : i + 2]) for i in (0, 2, 4, 6)]
        x, y = pairs(two[0], two[1]), pairs(two[2], two[3])
        low = _shuffle(builder, x, y, [0, 1, 2, 3, 12, 13, 14, 15])
        return builder.fadd(low, _shuffle(builder, x, y, [4, 5, 6, 7, 8, 9, 10, 11]))

    return Vector(a.dtype, 8)(a, b, c, d, e, f, g, h), codegen


# Of a floating type: 1.5 · 2^mantissa bits, ln 2 in a short and a small part, terms of the series of exp and of log,
# lowest argument of exp, mantissa bits, exponent bias.
_FLOAT = {
    types.float32: (12582912.0, 0.693359375, -2.12194440e-4, 7, 5, -87.0, 23, 127),
    types.float64: (6755399441055744.0, 0.693145751953125, 1.42860682030941723e-6, 13, 11, -708.0, 52, 1023),
}


def _constant(kind, value):
    return ir.Constant(kind, [value] * kind.count)


def _fused(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _integers(kind) -> ir.VectorType:
    return ir.VectorType(ir.IntType(32 if kind.element == ir.FloatType() else 64), kind.count)


def _exp(builder, x, dtype):
    """2^k, r and (e^r - 1) / r for e^x = 2^k e^r, k = round(x / ln 2): |r| <= ln 2 / 2, for a short Taylor series.

    Adding 1.5 · 2^23 (float32) leaves k in the low bits of the sum, from where it moves to the exponent.
    """
    magic, ln2_high, ln2_low, terms, _, _, mantissa, exponent_bias = _FLOAT[dtype]
    kind, integers = x.type, _integers(x.type)
    constant, fused = functools.partial(_constant, kind), functools.partial(_fused, builder)
    shifted = fused(x, constant(1 / math.log(2)), constant(magic))
    k = builder.fsub(shifted, constant(magic))
    r = fused(k, constant(-ln2_high), x)
    r = fused(k, constant(-ln2_low), r)
    series = constant(1 / math.factorial(terms))
    for n in range(terms - 1, 0, -1):
        series = fused(series, r, constant(1 / math.factorial(n)))
    exponent = builder.add(builder.bitcast(shifted, integers), _constant(integers, exponent_bias))
    return builder.bitcast(builder.shl(exponent, _constant(integers, mantissa)), kind), r, series


@intrinsic
def exp(typingctx, x):
    """e^x for x up to 80, to one unit in the last place; 0 below the normal numbers, NaN for NaN."""
    lowest = _FLOAT[x.dtype][5]

    def codegen(context, builder, sig, args):
        kind = args[0].type
        power, r, series = _exp(builder, args[0], x.dtype)
        tiny = builder.fcmp_ordered("<", args[0], _constant(kind, lowest))
        result = builder.fmul(_fused(builder, series, r, _constant(kind, 1.0)), power)
        return builder.select(tiny, _constant(kind, 0.0), result)

    return x(x), codegen


@intrinsic
def tanh(typingctx, x):
    """Hyperbolic tangent, to four units in the last place: e / (e + 2) with e = exp(2x) - 1."""
    largest = 10.0 if x.dtype == types.float32 else 20.0

    def codegen(context, builder, sig, args):
        kind = args[0].type
        constant = functools.partial(_constant, kind)
        bounded = builder.select(
            builder.fcmp_ordered(">", args[0], constant(largest)), constant(largest), args[0]
        )
        bounded = builder.select(
            builder.fcmp_ordered("<", bounded, constant(-largest)), constant(-largest), bounded
        )
        power, r, series = _exp(builder, builder.fadd(bounded, bounded), x.dtype)
        e = _fused(builder, builder.fmul(series, r), power, builder.fsub(power, constant(1.0)))
        return builder.fdiv(e, builder.fadd(e, constant(2.0)))

    return x(x), codegen


@intrinsic
def log(typingctx, x):
    """Natural logarithm of finite normal numbers, to three units in the last place; -inf for 0, NaN for NaN.

    x = 2^k m with m between √½ and √2, and ln m = 2 artanh t = 2 (t + t^3 / 3 + ...) with t = (m - 1) / (m + 1).
    """
    _, ln2_high, ln2_low, _, terms, _, mantissa, exponent_bias = _FLOAT[x.dtype]

    def codegen(context, builder, sig, args):
        kind, integers = args[0].type, _integers(args[0].type)
        constant, fused = functools.partial(_constant, kind), functools.partial(_fused, builder)
        # From the bits of √½ on, the exponent field of the difference counts the powers of 2.
        root_half = (exponent_bias - 1) * 2**mantissa + int((math.sqrt(2) - 1) * 2**mantissa)
        bits = builder.bitcast(args[0], integers)
        power = _constant(integers, mantissa)
        k = builder.ashr(builder.sub(bits, _constant(integers, root_half)), power)
        m = builder.bitcast(builder.sub(bits, builder.shl(k, power)), kind)
        k = builder.sitofp(k, kind)
        t = builder.fdiv(builder.fsub(m, constant(1.0)), builder.fadd(m, constant(1.0)))
        square = builder.fmul(t, t)
        series = constant(1 / (2 * terms - 1))
        for n in range(terms - 2, -1, -1):
            series = fused(series, square, constant(1 / (2 * n + 1)))
        small = fused(builder.fadd(t, t), series, builder.fmul(k, constant(ln2_low)))
        result = fused(k, constant(ln2_high), small)
        result = builder.select(builder.fcmp_ordered(">", args[0], constant(0.0)), result, args[0])
        zero = builder.fcmp_ordered("==", args[0], constant(0.0))
        return builder.select(zero, constant(-math.inf), result)

    return x(x), codegen
