"""The product of two matrices of a few hundred columns on the CPU, as a Numba kernel.

    C = A B + bias

Six rows of A times 64 columns of B at a time, the sums in as many registers as there are and the numbers of B where
they lie. Attention on blocks is made of it (`graphattn.kernels.blocks_cpu`), and so are the linear maps around
attention where PyTorch's own are slow (`graphattn.nn.linear`).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (an intrinsic of graphattn.kernels.vector takes the typing context first, its callers do not pass it)
import functools
from collections.abc import Callable

import llvmlite.binding
import numpy as np
import torch
from numba import njit
from torch import Tensor

from graphattn.compiled import compiled
from graphattn.kernels import vector
from graphattn.kernels.threads import c_function_of, in_parallel
from graphattn.kernels.vector import after, lanes, load, pointer, record, splat, store, take, width, zeros

# A job is some rows of C and all of its columns, if there are not too many, so that A is read from memory once. Where
# C is small and its sums are long, it is some terms of more rows, so that B is too.
_ROWS, _COLUMNS = 48, 512
_ROWS_OF_TERMS, _TERMS, _MOST_PARTS, _SMALL = 192, 1024, 16, 2**18
_DEPTH = 256  # terms that are added up in registers: so many rows of B stay in a near cache

# A product adds up 6 rows of so many lanes at a time: as many registers as the machine has.
_AVX512 = llvmlite.binding.get_host_cpu_features().get("avx512f", False)
LANES = {
    torch.float32: (64, 32, 16) if _AVX512 else (16, 16, 16),
    torch.float64: (32, 16, 8) if _AVX512 else (8, 8, 8),
}

# MKL takes AMD's processors for ones without AVX-512, and computes at half of their speed.
FASTER = (
    torch.backends.mkl.is_available() and _AVX512 and llvmlite.binding.get_host_cpu_name().startswith("znver")
)

_NUMBERS = (
    "rows", "columns", "depth", "job_rows", "job_columns", "job_depth", "a_row", "a_step", "b_row", "a", "b", "bias",
    "c", "num_jobs", "counters", "reals",
)  # fmt: skip

_function = njit(error_model="numpy")
_inlined = njit(error_model="numpy", forceinline=True)


@_inlined
def _put(to, at, sum, add, L):
    store(to, at, load(to, at, L) + sum if add else sum)


@_inlined
def _tile(c, c_row, a, a_row, a_step, b, b_row, rows, depth, add, L):
    """Up to 6 rows of a product; those that are not there repeat the last."""
    last = rows - 1
    a1, a2 = after(a, min(1, last) * a_row), after(a, min(2, last) * a_row)
    a3, a4 = after(a, min(3, last) * a_row), after(a, min(4, last) * a_row)
    a5 = after(a, min(5, last) * a_row)
    s0, s1, s2, s3, s4, s5 = zeros(c, L), zeros(c, L), zeros(c, L), zeros(c, L), zeros(c, L), zeros(c, L)
    for k in range(depth):
        x, i = load(b, k * b_row, L), k * a_step
        s0 = s0 + splat(a[i], L) * x
        s1 = s1 + splat(a1[i], L) * x
        s2 = s2 + splat(a2[i], L) * x
        s3 = s3 + splat(a3[i], L) * x
        s4 = s4 + splat(a4[i], L) * x
        s5 = s5 + splat(a5[i], L) * x
    _put(c, 0, s0, add, L)
    if rows > 1:
        _put(c, c_row, s1, add, L)
    if rows > 2:
        _put(c, 2 * c_row, s2, add, L)
    if rows > 3:
        _put(c, 3 * c_row, s3, add, L)
    if rows > 4:
        _put(c, 4 * c_row, s4, add, L)
    if rows > 5:
        _put(c, 5 * c_row, s5, add, L)


@_function
def product(c, c_row, a, a_row, a_step, b, b_row, rows, columns, depth, add, L, M, N):
    """``c[i, j] (+)= Σ_k a[i * a_row + k * a_step] b[k, j]``, columns being a multiple of the fewest lanes."""
    j = 0
    while j < columns:
        lanes = width(L) if columns - j >= width(L) else width(M) if columns - j >= width(M) else width(N)
        for i in range(0, rows, 6):
            to, x, y = after(c, i * c_row + j), after(a, i * a_row), after(b, j)
            if lanes == width(L):
                _tile(to, c_row, x, a_row, a_step, y, b_row, rows - i, depth, add, L)
            elif lanes == width(M):
                _tile(to, c_row, x, a_row, a_step, y, b_row, rows - i, depth, add, M)
            else:
                _tile(to, c_row, x, a_row, a_step, y, b_row, rows - i, depth, add, N)
        j += lanes


@functools.cache
def _record(number: type) -> np.dtype:
    return np.dtype([*((name, np.int64) for name in _NUMBERS), ("one", number)])


@_function
def _gather(to, rows, row, count, size):
    """Rows that lie far apart, side by side."""
    for i in range(count):
        x, y = after(to, i * size), after(rows, i * row)
        for k in range(size):
            x[k] = y[k]


@functools.cache
def _kernel(wide: int, middle: int, narrow: int) -> Callable:
    @functools.partial(compiled, error_model="numpy", sources=[str(vector.__file__)])
    def multiply(call):
        c, L, M, N = record(call), lanes(wide), lanes(middle), lanes(narrow)
        a, b = pointer(c.a, c.one), pointer(c.b, c.one)
        bias, result = pointer(c.bias, c.one), pointer(c.c, c.one)
        row_size, a_row, a_step, b_row, with_bias = c.columns, c.a_row, c.a_step, c.b_row, c.bias != 0
        down, across = -(-c.rows // c.job_rows), -(-row_size // c.job_columns)
        counter = pointer(c.counters, np.int64(0))
        near = after(pointer(c.reals, c.one), take(after(counter, 1)) * (_DEPTH + width(N)) * c.job_rows)
        last = after(near, _DEPTH * c.job_rows)
        job = take(counter)
        while job < c.num_jobs:
            part, place = job // (down * across), job % (down * across)
            row, column = place // across * c.job_rows, place % across * c.job_columns
            rows, columns = min(c.job_rows, c.rows - row), min(c.job_columns, row_size - column)
            to = after(result, (part * c.rows + row) * row_size + column)
            whole = columns - columns % width(N)
            if with_bias:
                for i in range(rows):
                    for j in range(0, whole, width(N)):
                        store(to, i * row_size + j, load(bias, column + j, N))
                    if whole < columns:
                        store(last, i * width(N), load(bias, column + whole, N))
            first, end = part * c.job_depth, min((part + 1) * c.job_depth, c.depth)
            for start in range(first, end, _DEPTH):
                depth, add = min(_DEPTH, end - start), with_bias or start > first
                x, x_row, x_step = after(a, row * a_row + start * a_step), a_row, a_step
                if a_row == 1 and rows < c.rows:
                    _gather(near, x, x_step, depth, rows)
                    x, x_step = near, rows
                y = after(b, start * b_row + column)
                product(to, row_size, x, x_row, x_step, y, b_row, rows, whole, depth, add, L, M, N)
                if whole < columns:
                    y = after(y, whole)
                    product(last, width(N), x, x_row, x_step, y, b_row, rows, width(N), depth, add, L, M, N)
            if whole < columns:
                for i in range(rows):
                    for j in range(whole, columns):
                        to[i * row_size + j] = last[i * width(N) + j - whole]
            job = take(counter)

    return multiply


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias`` for matrices of float32 or float64, none of them empty.

    A is read where it lies, and so is B if its rows are contiguous and a multiple of 16 numbers; else B is copied: the
    larger of the two should be A. The sums do not depend on the number of threads.
    """
    (rows, depth), columns = a.shape, b.size(1)
    missing = -columns % LANES[a.dtype][-1]
    if missing:
        b = torch.nn.functional.pad(b, (0, missing))
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, missing))
    b = b if b.stride(1) == 1 else b.contiguous()
    bias = None if bias is None else bias.contiguous()
    parts = 1
    if bias is None and rows * columns <= _SMALL:
        parts = max(1, min(_MOST_PARTS, depth // _TERMS))
    job_rows, job_depth = _ROWS if parts == 1 else _ROWS_OF_TERMS, -(-depth // parts)
    parts = -(-depth // job_depth)
    c = a.new_empty((rows, columns) if parts == 1 else (parts, rows, columns))
    num_jobs = parts * -(-rows // job_rows) * -(-columns // _COLUMNS)
    threads = min(torch.get_num_threads(), num_jobs)
    kind = _record(np.float64 if a.dtype == torch.float64 else np.float32)
    reals = np.empty((threads, job_rows * (_DEPTH + LANES[a.dtype][-1])), kind["one"])
    counters = np.zeros(2, np.int64)  # of the jobs and of the threads that have begun
    values = (
        rows, columns, depth, job_rows, _COLUMNS, job_depth, *a.stride(), b.stride(0), a.data_ptr(), b.data_ptr(),
        0 if bias is None else bias.data_ptr(), c.data_ptr(), num_jobs, counters.ctypes.data, reals.ctypes.data, 1,
    )  # fmt: skip
    call, function = np.array([values], kind), c_function_of(_kernel(*LANES[a.dtype]), kind)
    if threads == 1:
        function(call.ctypes.data)
    else:
        in_parallel(function, call.ctypes.data, threads)
    return c if parts == 1 else torch.from_numpy(c.numpy().sum(0))
