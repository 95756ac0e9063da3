"""The vector functions of the CPU kernels against NumPy's extended precision."""

import math

import numpy as np
import pytest
from numba import njit

from graphattn.kernels import vector
from graphattn.kernels.vector import lanes, load, pointer, store, take, total, totals


def over_blocks(function):
    """The function applied to an array, eight numbers at a time."""

    @njit
    def loop(like, x, y, size):
        for i in range(0, size, 8):
            store(pointer(y, like), i, function(load(pointer(x, like), i, lanes(8))))

    def apply(x):
        y = np.empty_like(x)
        loop(x.dtype.type(1), x.ctypes.data, y.ctypes.data, x.size)
        return y

    return apply


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name, units", [("exp", 1), ("log", 3), ("tanh", 4)])
def test_elementary_functions(name, units, dtype):
    """As exact as their docstrings say, over all arguments and closely around 1."""
    if name == "exp":
        x = np.concatenate([np.linspace(-86, 80, 40_000), np.linspace(-0.1, 0.1, 8_000)])
    elif name == "tanh":
        x = np.concatenate(
            [np.linspace(-25, 25, 40_000), np.logspace(-30, 0, 8_000), -np.logspace(-9, 0, 8_000)]
        )
    else:
        x = np.concatenate([np.logspace(-37, 38, 40_000), np.linspace(0.4, 2.2, 8_000)])
    x = x.astype(dtype)
    exact = getattr(np, name)(x.astype(np.longdouble))
    error = np.abs(over_blocks(getattr(vector, name))(x) - exact) / np.spacing(np.abs(exact).astype(dtype))
    assert error.max() <= units


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ends_of_elementary_functions(dtype):
    x = np.array([-math.inf, -1000, math.nan, 0, 0, 0, 0, 0], dtype)
    np.testing.assert_array_equal(over_blocks(vector.exp)(x)[:4], [0, 0, math.nan, 1])
    x = np.array([-math.inf, math.inf, math.nan, 0, 1000, 0, 0, 0], dtype)
    np.testing.assert_array_equal(over_blocks(vector.tanh)(x)[:5], [-1, 1, math.nan, 0, 1])
    x = np.array([0, 1, math.nan, 0, 0, 0, 0, 0], dtype)
    np.testing.assert_array_equal(over_blocks(vector.log)(x)[:3], [-math.inf, 0, math.nan])


def test_sums_of_lanes():
    @njit
    def sums(x, y, like):
        rows, L = pointer(x, like), lanes(16)
        v = (
            load(rows, 0, L), load(rows, 16, L), load(rows, 32, L), load(rows, 48, L),
            load(rows, 64, L), load(rows, 80, L), load(rows, 96, L), load(rows, 112, L),
        )  # fmt: skip
        store(pointer(y, like), 0, totals(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]))
        return total(v[3])

    x, y = np.arange(128, dtype=np.float32) ** 2, np.empty(8, np.float32)
    assert sums(x.ctypes.data, y.ctypes.data, np.float32(1)) == x[48:64].sum()
    np.testing.assert_array_equal(y, x.reshape(8, 16).sum(1))


def test_numbers_are_taken_once():
    @njit
    def take_two(counter):
        return take(pointer(counter, np.int64(0))), take(pointer(counter, np.int64(0)))

    counter = np.array([5])
    assert take_two(counter.ctypes.data) == (5, 6)
    assert counter[0] == 7
