"""Attention on edges, listed or following from a rule, on the CPU: Numba kernels, spread over threads.

A kernel walks rows of edges: all edges of one query (forward, and the backward pass that gives the gradients of the
queries), or all edges of one key (the pass that gives those of keys and values). It works on a block of edges at a
time, small enough to stay in the first-level cache: several whole rows, or a part of one long row.

1. ``scores[e, h] = q_i·k_j``, the far rows of the edges some places ahead asked for before;
2. scale, soft cap, bias;
3. weights ``p = exp(s - peak)`` under a running maximum (forward) or ``p = exp(s - lse)`` (backward);
4. ``Σ_e weight[e, h] · row_e``, added to the sum of each row.

Backward, with δ_i = dO_i·O_i - dlse_i and dropout factors z:

    dV_j = Σ_i z p dO_i,    dS = p (z dO_i·v_j - δ_i),    dQ_i = scale Σ_j dS k_j,    dK_j = scale Σ_i dS q_i

Weights are not kept for it but computed again from lse (Dao et al. 2022, FlashAttention), of which a second number
holds the digits that the first has no room for: a score of 1e6 leaves it few behind the point. Every sum belongs to one
row and has one order: no two threads write one place, and results do not depend on the number of threads.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (an intrinsic of graphattn.kernels.vector takes the typing context first, its callers do not pass it)
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from graphattn.compiled import compiled
from graphattn.kernels import product_cpu, vector
from graphattn.kernels.product_cpu import product
from graphattn.kernels.threads import address, c_function_of, in_parallel
from graphattn.kernels.vector import (
    after,
    exp,
    lanes,
    load,
    log,
    maximum,
    per_line,
    pointer,
    prefetch,
    record,
    splat,
    store,
    take,
    total,
    totals,
    width,
    zeros,
)

BLOCK = 32  # edges worked on together
PIECE = 2048  # longer rows are cut into pieces of so many edges: for balance, and for sums of bounded length
_AHEAD = 8  # edges between asking for a row and reading it
_SERIAL_WORK = 250_000  # multiply-adds below which more threads cost more than they save
_AXIS = 8  # numbers that describe an axis
_PARTS = 6  # parts of the work for each thread, so that rows of different cost even out
_FIXED_DIMS = (8, 16, 32, 64, 128)  # a kernel with the dim compiled in is up to a third faster

# What a kernel is told, as one record: numbers, addresses of arrays, and the factors in the type it computes in. An
# address is 0 where an option is not used.
_NUMBERS = (
    "heads", "dim", "value_dim", "features", "key_row", "value_row", "grouped", "num_rows", "num_pieces",
    "num_far", "num_edges", "bias_edge_step", "bias_query_step", "bias_head_step", "grad_bias_by_edge",
    "grad_bias_query_step", "grad_bias_job_step", "pair_step", "axes", "by_query", "numbered", "query_slots",
    "num_jobs", "reals_size", "integers_size",
)  # fmt: skip
_ADDRESSES = (
    "row_pointer", "other", "edge_id", "axis_table", "pieces", "head_starts", "query", "key", "value", "bias",
    "edge_attr", "projection", "transposed", "out", "peak", "norm", "aggregate", "logits", "lse", "lse_low", "grad_out",
    "grad_lse", "grad_weights", "stats", "pairs", "grad_query", "grad_sums", "grad_bias", "grad_key", "grad_value",
    "jobs", "counters", "reals", "integers",
)  # fmt: skip
_RANDOM = ("seed", "drop_below")  # draws of 53 bits below drop_below drop a weight
_FACTORS = ("scale", "softcap", "kept", "one")  # kept: factor of the weights that dropout keeps


@functools.cache
def _record(number: type, edge_number: type) -> np.dtype:
    return np.dtype(
        [
            *((name, np.int64) for name in (*_NUMBERS, *_ADDRESSES)),
            *((name, np.uint64) for name in _RANDOM),
            *((name, number) for name in _FACTORS),
            ("edge_number", edge_number),  # any number of the type that edges are numbered in
        ]
    )


class Rows(NamedTuple):
    """Edges grouped into rows: row i has the edges ``pointer[i]`` to ``pointer[i + 1]``.

    Segment s of the work is row s, or piece s - num_rows: ``pieces[n] = (row, first edge, end)`` cut from a long row.
    Edges are listed, or follow from axes: the far nodes of a row are then all combinations of one arithmetic
    progression on each axis (see `_progressions`), and nothing is stored for an edge.
    """

    pointer: Tensor
    num_edges: int
    pieces: np.ndarray
    layout: tuple[int, int]  # shape of per-edge tensors
    other: Tensor | None = None  # the node at the far end of each edge
    edge_id: Tensor | None = None  # the number of each edge in per-edge tensors
    axes: np.ndarray | None = None  # the numbers of each axis, see `_progressions`
    by_query: bool = True
    numbered: bool = True  # whether edge numbers are asked for
    query_slots: int = 0  # by how much edge numbers grow from one query to the next
    kept: tuple = ()  # what the addresses among the axes point to


_function = njit(error_model="numpy")
_inlined = njit(error_model="numpy", forceinline=True)
_part = njit(error_model="numpy", inline="always")  # of a kernel: compiled with it, not before it


_kernel = functools.partial(
    compiled, error_model="numpy", sources=[str(vector.__file__), str(product_cpu.__file__)]
)


@_function
def _block(c, s, done, stop, own, starts):
    """Choose the edges to work on next: several short rows, or a part of a long one, from its edge ``done`` on.

    Row r of the block is segment s + r and has the block's edges ``starts[r]`` to ``starts[r + 1]``; ``own[e]`` is the
    row of edge e. Returns the number of rows, the first edge, the number of edges, whether the last row is complete.
    """
    row_pointer, pieces = pointer(c.row_pointer, np.int64(0)), pointer(c.pieces, np.int64(0))
    starts[0] = 0
    if s < c.num_rows:
        first, end = row_pointer[s], row_pointer[s + 1]
        if end - first > PIECE:  # its pieces have the edges
            starts[1] = 0
            return 1, first, 0, True
    else:
        first, end = pieces[3 * (s - c.num_rows) + 1], pieces[3 * (s - c.num_rows) + 2]
    if s >= c.num_rows or end - first > BLOCK:
        count = min(BLOCK, end - first - done)
        for e in range(count):
            own[e] = 0
        starts[1] = count
        return 1, first + done, count, first + done + count == end
    last = min(stop, c.num_rows, s + BLOCK)
    count, row = 0, s
    while row < last and row_pointer[row + 1] - first <= BLOCK:
        degree = row_pointer[row + 1] - row_pointer[row]
        for e in range(count, count + degree):
            own[e] = row - s
        count += degree
        row += 1
        starts[row - s] = count
    return row - s, first, count, True


@_function
def _progressions(c, row, first, rows, starts, nodes, edges, odometer):
    """List the edges of a block whose rows are products of arithmetic progressions, one on each axis.

    Row x on an axis has the nodes ``first[x] + step t``, t = 0..count[x] - 1, the last axis running fastest. The edge
    between query x and key y has the slot ``origin[x] + slot_step (y // step)`` on the axis. An axis is the numbers
    (rows, step, step of the node, slot_step, step of the number) and the addresses of (first, count, origin).
    """
    table, last = pointer(c.axis_table, np.int64(0)), (c.axes - 1) * _AXIS
    rank = first - pointer(c.row_pointer, np.int64(0))[row]  # of the first edge in its row
    for r in range(rows):
        e, end = starts[r], starts[r + 1]
        if e == end:
            continue
        rest = row + r
        for a in range(c.axes - 1, -1, -1):  # where the row is, and its edge, on each axis
            axis = after(table, a * _AXIS)
            x, t = rest, rank
            if a > 0:
                rest //= axis[0]
                x -= rest * axis[0]
                rank //= pointer(axis[6], np.int64(0))[x]
                t -= rank * pointer(axis[6], np.int64(0))[x]
            odometer[2 * a], odometer[2 * a + 1] = x, t
        rank = 0
        while e < end:
            node = number = far = np.int64(0)
            for a in range(c.axes):
                axis = after(table, a * _AXIS)
                x, t = np.int64(odometer[2 * a]), np.int64(odometer[2 * a + 1])
                far = pointer(axis[5], np.int64(0))[x] + axis[1] * t
                node += far * axis[2]
                if c.numbered != 0:
                    query, key = (x, far) if c.by_query != 0 else (far, x)
                    number += (pointer(axis[7], np.int64(0))[query] + axis[3] * (key // axis[1])) * axis[4]
            axis = after(table, last)
            step, slot_step = axis[1], axis[3]
            count = pointer(axis[6], np.int64(0))[odometer[2 * (c.axes - 1)]] - odometer[2 * (c.axes - 1) + 1]
            count = min(count, end - e)
            for k in range(count):
                nodes[e + k] = node + k * step
            if c.numbered != 0 and c.by_query != 0:
                number += (row + r) * c.query_slots
                for k in range(count):
                    edges[e + k] = number + k * slot_step
            elif c.numbered != 0:
                origin = after(pointer(axis[7], np.int64(0)), far)
                for k in range(count):
                    edges[e + k] = number + origin[k * step] - origin[0] + (node + k * step) * c.query_slots
            e += count
            a = c.axes - 1
            odometer[2 * a + 1] += count
            count = pointer(axis[6], np.int64(0))[odometer[2 * a]]
            while a > 0 and odometer[2 * a + 1] >= count:
                odometer[2 * a + 1] = 0
                a -= 1
                odometer[2 * a + 1] += 1
                count = pointer(table[a * _AXIS + 6], np.int64(0))[odometer[2 * a]]


@_part
def _room(c):
    """Where this thread keeps what it works on: reals, and the address of integers."""
    thread = take(after(pointer(c.counters, np.int64(0)), 1))
    return after(pointer(c.reals, c.one), thread * c.reals_size), c.integers + 4 * thread * c.integers_size


@_part
def _walk(work, c, L, D, Dv):
    """Take job after job and work through its rows, block after block.

    ``row`` is the first row of the block, ``place`` and ``at`` are where it stands, with those of other leading
    indices, among rows and among rows and pieces of rows. Edge e of the block comes from or goes to node ``nodes[e]``
    and has the number ``edges[e]`` in per-edge tensors; ``known`` edges are listed from here on.
    """
    reals, integers = _room(c)
    numbers = pointer(integers, c.edge_number)
    own = after(pointer(integers, np.int32(0)), 2 * BLOCK)
    starts = after(own, BLOCK)
    alone = after(starts, BLOCK + 1)  # row r is number r
    far = after(alone, BLOCK)
    odometer = after(far, BLOCK)
    for i in range(BLOCK):
        alone[i] = i
    pieces = pointer(c.pieces, np.int64(0))
    jobs, counter = pointer(c.jobs, np.int64(0)), pointer(c.counters, np.int64(0))
    job = take(counter)
    while job < c.num_jobs:
        for b in range(jobs[4 * job], jobs[4 * job + 1]):
            s, done, stop = jobs[4 * job + 2], np.int64(0), jobs[4 * job + 3]
            while s < stop:
                rows, first, count, complete = _block(c, s, done, stop, own, starts)
                whole = s < c.num_rows
                row = s if whole else pieces[3 * (s - c.num_rows)]
                place = b * c.num_rows + row
                at = b * (c.num_rows + c.num_pieces) + s
                if per_line(numbers) == 8:  # known when it is compiled: progressions number edges in 64 bits
                    _progressions(c, row, first, rows, starts, far, numbers, odometer)
                    nodes, edges, known = far, numbers, np.int64(0)
                else:
                    nodes = after(pointer(c.other, np.int32(0)), first)
                    edges = after(pointer(c.edge_id, c.edge_number), first)
                    known = c.num_edges - first
                work(
                    c, L, D, Dv, reals, own, starts, alone, nodes, edges, known, b, row, place, at,
                    job, rows, count, done == 0, complete, whole,
                )  # fmt: skip
                s, done = (s + rows, np.int64(0)) if complete else (s, done + count)
        job = take(counter)


@_inlined
def _ask(rows, size, row):
    """Ask for a row that will be read soon."""
    at = after(rows, row * size)
    for k in range(0, size, per_line(rows)):
        prefetch(at, k)


@_function
def _dots(
    scores, own, own_size, own_rows, own_heads, far, far_size, far_rows, far_heads, step, count, heads, dim, L,
    known, also, also_size,
):  # fmt: skip
    """scores[e, h] = own[own_rows[e], h] · far[far_rows[e], h] for a block of edges.

    Head h starts at own_heads[h] and far_heads[h] in its row; if step >= 0, these are h * dim and h * step. On the way
    it asks for the far rows of the edges some places ahead, of which ``known`` are listed, in ``far`` and in ``also``.
    """
    padded, even = (heads + 7) // 8 * 8, dim - dim % width(L)
    by_eight = (
        step >= 0 and heads % 8 == 0 and (dim == width(L) or (dim % 8 == 0 and dim > 0 and width(L) == 8))
    )
    for e in range(count):
        if e + _AHEAD < known:
            _ask(far, far_size, far_rows[e + _AHEAD])
            _ask(also, also_size, far_rows[e + _AHEAD])
        a_row, b_row = after(own, own_rows[e] * own_size), after(far, far_rows[e] * far_size)
        to = after(scores, e * padded)
        if by_eight:
            for h in range(0, heads, 8):
                a, b = after(a_row, h * dim), after(b_row, h * step)
                s0 = load(a, 0, L) * load(b, 0, L)
                s1 = load(a, dim, L) * load(b, step, L)
                s2 = load(a, 2 * dim, L) * load(b, 2 * step, L)
                s3 = load(a, 3 * dim, L) * load(b, 3 * step, L)
                s4 = load(a, 4 * dim, L) * load(b, 4 * step, L)
                s5 = load(a, 5 * dim, L) * load(b, 5 * step, L)
                s6 = load(a, 6 * dim, L) * load(b, 6 * step, L)
                s7 = load(a, 7 * dim, L) * load(b, 7 * step, L)
                for k in range(width(L), dim, width(L)):
                    s0 = s0 + load(a, k, L) * load(b, k, L)
                    s1 = s1 + load(a, dim + k, L) * load(b, step + k, L)
                    s2 = s2 + load(a, 2 * dim + k, L) * load(b, 2 * step + k, L)
                    s3 = s3 + load(a, 3 * dim + k, L) * load(b, 3 * step + k, L)
                    s4 = s4 + load(a, 4 * dim + k, L) * load(b, 4 * step + k, L)
                    s5 = s5 + load(a, 5 * dim + k, L) * load(b, 5 * step + k, L)
                    s6 = s6 + load(a, 6 * dim + k, L) * load(b, 6 * step + k, L)
                    s7 = s7 + load(a, 7 * dim + k, L) * load(b, 7 * step + k, L)
                store(to, h, totals(s0, s1, s2, s3, s4, s5, s6, s7))
        else:
            for h in range(heads):
                a, b = after(a_row, own_heads[h]), after(b_row, far_heads[h])
                products = zeros(own, L)
                for k in range(0, even, width(L)):
                    products = products + load(a, k, L) * load(b, k, L)
                to[h] = total(products)
                for k in range(even, dim):
                    to[h] += a[k] * b[k]


@_function
def _sums(
    sums, size, heads_at, weights, far, far_size, far_rows, far_heads, starts, num, fresh, heads, dim, L
):
    """sums[r, h] = Σ_e weights[e, h] · far[far_rows[e], h] over the edges of each row r of a block; += if not fresh."""
    padded = (heads + 7) // 8 * 8
    even = dim - dim % width(L)
    four = heads - heads % 4 if width(L) <= 16 else 0  # go four at a time, as their sums fit the registers
    for r in range(num):
        begin, end = starts[r], starts[r + 1]
        to = after(sums, r * size)
        for k in range(0, even, width(L)):
            for h in range(0, four, 4):
                s0 = s1 = s2 = s3 = zeros(sums, L)
                h0, h1, h2, h3 = far_heads[h], far_heads[h + 1], far_heads[h + 2], far_heads[h + 3]
                head = after(far, k)
                for e in range(begin, end):
                    row = after(head, far_rows[e] * far_size)
                    weight = after(weights, e * padded + h)
                    s0 = s0 + splat(weight[0], L) * load(row, h0, L)
                    s1 = s1 + splat(weight[1], L) * load(row, h1, L)
                    s2 = s2 + splat(weight[2], L) * load(row, h2, L)
                    s3 = s3 + splat(weight[3], L) * load(row, h3, L)
                _put(to, heads_at[h] + k, s0, fresh, L)
                _put(to, heads_at[h + 1] + k, s1, fresh, L)
                _put(to, heads_at[h + 2] + k, s2, fresh, L)
                _put(to, heads_at[h + 3] + k, s3, fresh, L)
            for h in range(four, heads):
                sum = zeros(sums, L)
                head = after(far, far_heads[h] + k)
                for e in range(begin, end):
                    sum = sum + splat(weights[e * padded + h], L) * load(head, far_rows[e] * far_size, L)
                _put(to, heads_at[h] + k, sum, fresh, L)
        for k in range(even, dim):
            for h in range(heads):
                tail = total(zeros(sums, L))
                head = after(far, far_heads[h] + k)
                for e in range(begin, end):
                    tail += weights[e * padded + h] * head[far_rows[e] * far_size]
                if fresh:
                    to[heads_at[h] + k] = tail
                else:
                    to[heads_at[h] + k] += tail


@_inlined
def _put(sums, at, sum, fresh, L):
    if fresh:
        store(sums, at, sum)
    else:
        store(sums, at, load(sums, at, L) + sum)


@_function
def _modify(scores, slopes, edges, queries, row, count, c):
    """Scale, cap and bias the scores of a block; slopes are those of the cap. Edge e has query row + queries[e]."""
    padded = (c.heads + 7) // 8 * 8
    bias = pointer(c.bias, c.one)
    for e in range(count):
        at = edges[e] * c.bias_edge_step + (row + queries[e]) * c.bias_query_step
        for h in range(c.heads):
            score = scores[e * padded + h] * c.scale
            if c.softcap > 0:
                bent = math.tanh(score / c.softcap)
                slopes[e * padded + h] = c.one - bent * bent
                score = c.softcap * bent
            if c.bias != 0:
                score += bias[at + h * c.bias_head_step]
            scores[e * padded + h] = score


@_function
def _drop(weights, edges, base, count, c):
    """Multiply the weights by their dropout factors (SplitMix64, as `reference.dropout_factors`)."""
    padded = (c.heads + 7) // 8 * 8
    for e in range(count):
        number = (base + edges[e]) * c.heads
        for h in range(c.heads):
            x = c.seed + np.uint64(number + h + 1) * np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = (x ^ (x >> np.uint64(31))) >> np.uint64(11)
            weights[e * padded + h] *= c.kept * (x >= c.drop_below)


@_function
def _add_features(scores, extra, own, own_rows, edges, count, known, c):
    """scores[e, h] += own[own_rows[e], h] · edge_attr[e]."""
    padded, L = (c.heads + 7) // 8 * 8, lanes(8)
    head_starts = pointer(c.head_starts, np.int64(0))
    feature_heads, shared = after(head_starts, 4 * c.heads), after(head_starts, 5 * c.heads)
    edge_attr, F = pointer(c.edge_attr, c.one), c.features
    _dots(
        extra, own, c.heads * F, own_rows, feature_heads, edge_attr, F, edges, shared, np.int64(0),
        count, c.heads, F, L, known, edge_attr, np.int64(0),
    )  # fmt: skip
    for f in range(0, count * padded, 8):
        store(scores, f, load(scores, f, L) + load(extra, f, L))


@_function
def _map(to, x, matrices, rows, heads, inner, outer, add):
    """to[r, h] = x[r, h] @ matrices[h] for the rows of a block, with matrices [heads, inner, outer]; += if add."""
    even, x_row, row = outer - outer % 8, heads * inner, heads * outer
    for h in range(heads):
        y, z, matrix = after(x, h * inner), after(to, h * outer), after(matrices, h * inner * outer)
        product(z, row, y, x_row, 1, matrix, outer, rows, even, inner, add, lanes(32), lanes(16), lanes(8))
        for k in range(even, outer):
            for r in range(rows):
                at = r * row + k
                sum = z[at] if add else total(zeros(to, lanes(8)))
                for i in range(inner):
                    sum += y[r * x_row + i] * matrix[i * outer + k]
                z[at] = sum


@_function
def _scale_row(row, heads, dim, factors):
    for h in range(heads):
        for k in range(dim):
            row[h * dim + k] *= factors[h]


@_function
def _clear(row, size):
    for k in range(size):
        row[k] = 0


@_part
def _softmax(c, scores, state, extra, starts, at, place, rows, factor, fresh, complete, last):
    """From the scores of a block to its weights, row by row, under the peak of the row so far.

    ``state`` carries the peak and norm of a row that has more blocks, and the factor that its sums shrink by. A row
    that the block has all edges of gets its final weights. The last block of a row stores lse.
    """
    heads, padded, L = c.heads, (c.heads + 7) // 8 * 8, lanes(8)
    peak, norm, change = state, after(state, padded), after(state, 2 * padded)
    lse, lse_low = pointer(c.lse, c.one), pointer(c.lse_low, c.one)
    one, lowest, tiny = splat(c.one, L), splat(np.finfo(c.one).min, L), splat(np.finfo(c.one).tiny, L)
    for r in range(rows):
        begin, end = starts[r], starts[r + 1]
        for h in range(0, padded, 8):
            old = lowest if fresh else load(peak, h, L)
            top = old
            for e in range(begin, end):
                top = maximum(top, load(scores, e * padded + h, L) * factor)
            sum = zeros(scores, L)
            for e in range(begin, end):
                p = exp(load(scores, e * padded + h, L) * factor - top)
                store(scores, e * padded + h, p)
                sum = sum + p
            if not fresh:
                rescale = exp(old - top)
                store(change, h, rescale)
                sum = load(norm, h, L) * rescale + sum
            if last and fresh:
                inverse = one / maximum(tiny, sum)
                for e in range(begin, end):
                    store(scores, e * padded + h, load(scores, e * padded + h, L) * inverse)
            store(peak, h, top)
            store(norm, h, sum)
            if complete and c.peak != 0:
                store(pointer(c.peak, c.one), (at + r) * padded + h, top)
                store(pointer(c.norm, c.one), (at + r) * padded + h, sum)
            if last:
                logarithm = log(sum)
                store(extra, h, top + logarithm)
                store(extra, padded + h, (top - (top + logarithm)) + logarithm)
                for k in range(h, min(h + 8, heads)):
                    low = extra[padded + k]
                    lse[(place + r) * heads + k] = extra[k]
                    lse_low[(place + r) * heads + k] = low if norm[k] > 0 else norm[k]


@_part
def _forward_block(
    c, L, D, Dv, reals, own, starts, alone, nodes, edges, known, b, row, place, at, job, rows, count, fresh,
    complete, whole,
):  # fmt: skip
    """The output, lse and aggregate of the rows of a block."""
    heads, F, L8 = c.heads, c.features, lanes(8)
    padded = (heads + 7) // 8 * 8
    scores = reals
    extra = after(scores, BLOCK * padded)
    slopes = after(extra, BLOCK * padded)
    state = after(slopes, BLOCK * padded)
    change = after(state, 2 * padded)
    edge_query = after(reals, 7 * BLOCK * padded)
    head_starts = pointer(c.head_starts, np.int64(0))
    key_heads, out_heads = after(head_starts, heads), after(head_starts, 2 * heads)
    value_heads, feature_heads = after(head_starts, 3 * heads), after(head_starts, 4 * heads)
    shared = after(head_starts, 5 * heads)
    last = complete and whole
    query = after(pointer(c.query, c.one), place * heads * D)
    key = after(pointer(c.key, c.one), b * c.num_far * c.key_row)
    value = after(pointer(c.value, c.one), b * c.num_far * c.value_row)
    edge_attr, logits = pointer(c.edge_attr, c.one), pointer(c.logits, c.one)
    out = after(pointer(c.out, c.one), at * heads * Dv)
    aggregate = after(pointer(c.aggregate, c.one), at * heads * F)
    key_step = np.int64(-1 if c.grouped != 0 else D)
    _dots(
        scores, query, heads * D, own, head_starts, key, c.key_row, nodes, key_heads, key_step,
        count, heads, D, L, known, value, c.value_row,
    )  # fmt: skip
    if F > 0:
        if fresh:
            _map(edge_query, query, pointer(c.transposed, c.one), rows, heads, D, F, False)
        _add_features(scores, extra, edge_query, own, edges, count, known, c)
    factor = c.scale
    if c.bias != 0 or c.softcap > 0:
        _modify(scores, slopes, edges, own, row, count, c)
        factor = c.one
    if c.logits != 0:
        for e in range(count):
            to = after(logits, (b * c.num_edges + edges[e]) * heads)
            for h in range(heads):
                to[h] = scores[e * padded + h] * factor
    _softmax(c, scores, state, extra, starts, at, place, rows, splat(factor, L8), fresh, complete, last)
    if not fresh:
        _scale_row(out, heads, Dv, change)
        _scale_row(aggregate, heads, F, change)
    if c.drop_below > 0:
        _drop(scores, edges, b * c.num_edges, count, c)
    _sums(
        out, heads * Dv, out_heads, scores, value, c.value_row, nodes, value_heads, starts, rows,
        fresh, heads, Dv, L,
    )  # fmt: skip
    if F > 0:
        _sums(
            aggregate, heads * F, feature_heads, scores, edge_attr, F, edges, shared, starts, rows,
            fresh, heads, F, L8,
        )  # fmt: skip
    if last and not fresh:
        tiny = splat(np.finfo(c.one).tiny, L8)
        for h in range(0, padded, 8):
            store(change, h, splat(c.one, L8) / maximum(tiny, load(state, padded + h, L8)))
        _scale_row(out, heads, Dv, change)
        _scale_row(aggregate, heads, F, change)
    if last and F > 0:
        _map(out, aggregate, pointer(c.projection, c.one), rows, heads, F, Dv, True)


@_function
def _grads(scores, grads, slopes, stats, stat_rows, edges, row, b, count, c):
    """From the products q·k and dO·v of a block to the weights p and the gradients of the modified scores.

    Without bias and soft cap, times scale: the gradients of q·k.
    """
    padded, L = (c.heads + 7) // 8 * 8, lanes(8)
    factor = rest = splat(c.scale, L)
    if c.bias != 0 or c.softcap > 0:
        _modify(scores, slopes, edges, stat_rows, row, count, c)
        factor = rest = splat(c.one, L)
    if c.drop_below > 0:
        _drop(grads, edges, b * c.num_edges, count, c)
    if c.grad_weights != 0:
        for e in range(count):
            for h in range(c.heads):
                grad = pointer(c.grad_weights, c.one)[(b * c.num_edges + edges[e]) * c.heads + h]
                grads[e * padded + h] += grad
    for e in range(count):
        at = stat_rows[e] * 3 * padded
        for h in range(0, padded, 8):
            f = e * padded + h
            p = exp(load(scores, f, L) * factor - load(stats, at + h, L) - load(stats, at + padded + h, L))
            store(scores, f, p)
            store(grads, f, p * (load(grads, f, L) - load(stats, at + 2 * padded + h, L)) * rest)


@_inlined
def _chain(grads, slopes, count, c):
    """From the gradients of modified scores to those of q·k."""
    L = lanes(8)
    for k in range(0, count * ((c.heads + 7) // 8 * 8), 8):
        store(grads, k, load(grads, k, L) * load(slopes, k, L) * splat(c.scale, L))


@_part
def _statistics(c, L, Dv, stat, deltas, alone, grad_out, place, rows):
    """What the weights and gradients of each row need beside its edges: lse, its low digits, δ."""
    heads, padded = c.heads, (c.heads + 7) // 8 * 8
    out_heads = after(pointer(c.head_starts, np.int64(0)), 2 * heads)
    lse, lse_low = pointer(c.lse, c.one), pointer(c.lse_low, c.one)
    out = after(pointer(c.out, c.one), place * heads * Dv)
    _dots(
        deltas, out, heads * Dv, alone, out_heads, grad_out, heads * Dv, alone, out_heads,
        np.int64(Dv), rows, heads, Dv, L, np.int64(0), out, np.int64(0),
    )  # fmt: skip
    for r in range(rows):
        row = after(stat, r * 3 * padded)
        for h in range(heads):
            delta, n = deltas[r * padded + h], (place + r) * heads + h
            if c.grad_lse != 0:
                delta -= pointer(c.grad_lse, c.one)[n]
            row[h], row[padded + h], row[2 * padded + h] = lse[n], lse_low[n], delta
            if row[h] == -np.inf:  # no edge, or none that counts: weights and gradients 0
                row[h] = np.inf
                row[2 * padded + h] = 0


@_part
def _query_block(
    c, L, D, Dv, reals, own, starts, alone, nodes, edges, known, b, row, place, at, job, rows, count, fresh,
    complete, whole,
):  # fmt: skip
    """The gradients of the queries of a block and of a bias, and the statistics of its rows."""
    heads, F, L8 = c.heads, c.features, lanes(8)
    padded = (heads + 7) // 8 * 8
    scores = reals
    grads = after(scores, BLOCK * padded)
    slopes = after(grads, BLOCK * padded)
    extra = after(slopes, BLOCK * padded)
    stat = after(extra, BLOCK * padded)
    edge_query = after(reals, 7 * BLOCK * padded)
    edge_grad = after(edge_query, BLOCK * heads * F)
    head_starts = pointer(c.head_starts, np.int64(0))
    key_heads, out_heads = after(head_starts, heads), after(head_starts, 2 * heads)
    value_heads, feature_heads = after(head_starts, 3 * heads), after(head_starts, 4 * heads)
    shared = after(head_starts, 5 * heads)
    query = after(pointer(c.query, c.one), place * heads * D)
    key = after(pointer(c.key, c.one), b * c.num_far * c.key_row)
    value = after(pointer(c.value, c.one), b * c.num_far * c.value_row)
    edge_attr, pairs = pointer(c.edge_attr, c.one), pointer(c.pairs, c.one)
    stats, grad_bias = pointer(c.stats, c.one), pointer(c.grad_bias, c.one)
    grad_out = after(pointer(c.grad_out, c.one), place * heads * Dv)
    grad_query = after(pointer(c.grad_query, c.one), at * heads * D)
    grad_sums = after(pointer(c.grad_sums, c.one), at * heads * F)
    key_step, value_step = np.int64(-1 if c.grouped != 0 else D), np.int64(-1 if c.grouped != 0 else Dv)
    if fresh:
        _statistics(c, L, Dv, stat, scores, alone, grad_out, place, rows)
        if whole:
            for k in range(0, rows * 3 * padded, 8):
                store(stats, place * 3 * padded + k, load(stat, k, L8))
    _dots(
        scores, query, heads * D, own, head_starts, key, c.key_row, nodes, key_heads, key_step,
        count, heads, D, L, known, value, np.int64(0),
    )  # fmt: skip
    _dots(
        grads, grad_out, heads * Dv, own, out_heads, value, c.value_row, nodes, value_heads, value_step,
        count, heads, Dv, L, known, value, np.int64(0),
    )  # fmt: skip
    if F > 0:
        if fresh:
            _map(edge_query, query, pointer(c.transposed, c.one), rows, heads, D, F, False)
            _map(edge_grad, grad_out, pointer(c.transposed, c.one), rows, heads, Dv, F, False)
        _add_features(scores, extra, edge_query, own, edges, count, known, c)
        _add_features(grads, extra, edge_grad, own, edges, count, known, c)
    _grads(scores, grads, slopes, stat, own, edges, row, b, count, c)
    if c.grad_bias != 0:
        for e in range(count):
            entry = at + own[e]
            if c.grad_bias_by_edge != 0:
                entry = edges[e] + (row + own[e]) * c.grad_bias_query_step + job * c.grad_bias_job_step
            to = after(grad_bias, entry * heads)
            for h in range(heads):
                to[h] += grads[e * padded + h]
    if c.bias != 0 or c.softcap > 0:
        _chain(grads, slopes, count, c)
    if c.pairs != 0:
        if c.drop_below > 0:
            _drop(scores, edges, b * c.num_edges, count, c)
        for e in range(count):
            pair = after(pairs, edges[e] * c.pair_step)
            for h in range(heads):
                pair[h] = scores[e * padded + h]
                pair[heads + h] = grads[e * padded + h]
    _sums(
        grad_query, heads * D, head_starts, grads, key, c.key_row, nodes, key_heads, starts, rows,
        fresh, heads, D, L,
    )  # fmt: skip
    if F > 0:
        _sums(
            grad_sums, heads * F, feature_heads, grads, edge_attr, F, edges, shared, starts, rows,
            fresh, heads, F, L8,
        )  # fmt: skip
        if complete and whole:
            _map(grad_query, grad_sums, pointer(c.projection, c.one), rows, heads, F, D, True)


@_part
def _key_block(
    c, L, D, Dv, reals, own, starts, alone, nodes, edges, known, b, row, place, at, job, rows, count, fresh,
    complete, whole,
):  # fmt: skip
    """The gradients of the keys and values of a block."""
    heads, padded = c.heads, (c.heads + 7) // 8 * 8
    scores = reals
    grads = after(scores, BLOCK * padded)
    slopes = after(grads, BLOCK * padded)
    head_starts = pointer(c.head_starts, np.int64(0))
    key_heads, out_heads = after(head_starts, heads), after(head_starts, 2 * heads)
    value_heads = after(head_starts, 3 * heads)
    query = after(pointer(c.query, c.one), b * c.num_far * heads * D)
    key = after(pointer(c.key, c.one), place * c.key_row)
    value = after(pointer(c.value, c.one), place * c.value_row)
    grad_out = after(pointer(c.grad_out, c.one), b * c.num_far * heads * Dv)
    stats = after(pointer(c.stats, c.one), b * c.num_far * 3 * padded)
    grad_key = after(pointer(c.grad_key, c.one), at * c.key_row)
    grad_value = after(pointer(c.grad_value, c.one), at * c.value_row)
    pairs = pointer(c.pairs, c.one)
    key_step, value_step = np.int64(-1 if c.grouped != 0 else D), np.int64(-1 if c.grouped != 0 else Dv)
    if c.pairs != 0:
        for e in range(count):
            if e + _AHEAD < known:
                _ask(pairs, c.pair_step, edges[e + _AHEAD])
                _ask(query, heads * D, nodes[e + _AHEAD])
                _ask(grad_out, heads * Dv, nodes[e + _AHEAD])
            pair = after(pairs, edges[e] * c.pair_step)
            for h in range(heads):
                scores[e * padded + h] = pair[h]
                grads[e * padded + h] = pair[heads + h]
    else:
        _dots(
            scores, key, c.key_row, own, key_heads, query, heads * D, nodes, head_starts, key_step,
            count, heads, D, L, known, stats, 3 * padded,
        )  # fmt: skip
        _dots(
            grads, value, c.value_row, own, value_heads, grad_out, heads * Dv, nodes, out_heads, value_step,
            count, heads, Dv, L, known, stats, np.int64(0),
        )  # fmt: skip
        _grads(scores, grads, slopes, stats, nodes, edges, np.int64(0), b, count, c)
        if c.bias != 0 or c.softcap > 0:
            _chain(grads, slopes, count, c)
        if c.drop_below > 0:
            _drop(scores, edges, b * c.num_edges, count, c)
    if fresh and c.grouped != 0:  # several query heads add to one place
        _clear(grad_key, rows * c.key_row)
        _clear(grad_value, rows * c.value_row)
    fresh = fresh and c.grouped == 0
    _sums(
        grad_value, c.value_row, value_heads, scores, grad_out, heads * Dv, nodes, out_heads, starts, rows,
        fresh, heads, Dv, L,
    )  # fmt: skip
    _sums(
        grad_key, c.key_row, key_heads, grads, query, heads * D, nodes, head_starts, starts, rows,
        fresh, heads, D, L,
    )  # fmt: skip


@functools.cache
def _kernels(dim: int, vector: int) -> tuple[Callable, Callable, Callable]:
    """Forward, backward by query, backward by key: for dim numbers a head, or for any number (dim 0)."""

    @_kernel
    def forward(call):
        c = record(call)
        D, Dv = (dim, dim) if dim > 0 else (c.dim, c.value_dim)
        _walk(_forward_block, c, lanes(vector), D, Dv)

    @_kernel
    def backward_query(call):
        c = record(call)
        D, Dv = (dim, dim) if dim > 0 else (c.dim, c.value_dim)
        _walk(_query_block, c, lanes(vector), D, Dv)

    @_kernel
    def backward_key(call):
        c = record(call)
        D, Dv = (dim, dim) if dim > 0 else (c.dim, c.value_dim)
        _walk(_key_block, c, lanes(vector), D, Dv)

    return forward, backward_query, backward_key


@_kernel
def _edge_kernel(call):
    """The gradients of edge features, from the pairs (z p, dS) of each edge and head, over which they are written.

    d edge_attr[e] = Σ_h dS[e, h] (W_h q_i) + z p[e, h] (W_h dO_i)
    """
    c, L = record(call), lanes(8)
    heads, F, D, Dv = c.heads, c.features, c.dim, c.value_dim
    even = F - F % 8
    row_pointer, edge_id = pointer(c.row_pointer, np.int64(0)), pointer(c.edge_id, np.int32(0))
    pairs, transposed = pointer(c.pairs, c.one), pointer(c.transposed, c.one)
    pair, _ = _room(c)
    edge_query = after(pair, 7 * BLOCK * ((heads + 7) // 8 * 8))
    edge_grad = after(edge_query, BLOCK * heads * F)
    jobs, counter = pointer(c.jobs, np.int64(0)), pointer(c.counters, np.int64(0))
    job = take(counter)
    while job < c.num_jobs:
        for b in range(jobs[4 * job], jobs[4 * job + 1]):
            stop = min(jobs[4 * job + 3], c.num_rows)
            for s in range(jobs[4 * job + 2], stop, BLOCK):
                place, rows = b * c.num_rows + s, min(BLOCK, stop - s)
                query = after(pointer(c.query, c.one), place * heads * D)
                grad_out = after(pointer(c.grad_out, c.one), place * heads * Dv)
                _map(edge_query, query, transposed, rows, heads, D, F, False)
                _map(edge_grad, grad_out, transposed, rows, heads, Dv, F, False)
                for r in range(rows):
                    for e in range(row_pointer[s + r], row_pointer[s + r + 1]):
                        to = after(pairs, edge_id[e] * c.pair_step)
                        for h in range(2 * heads):
                            pair[h] = to[h]
                        for k in range(0, even, 8):
                            sum = zeros(to, L)
                            for h in range(heads):
                                at = (r * heads + h) * F + k
                                sum = sum + splat(pair[heads + h], L) * load(edge_query, at, L)
                                sum = sum + splat(pair[h], L) * load(edge_grad, at, L)
                            store(to, k, sum)
                        for k in range(even, F):
                            to[k] = 0
                            for h in range(heads):
                                at = (r * heads + h) * F + k
                                to[k] += pair[heads + h] * edge_query[at] + pair[h] * edge_grad[at]
        job = take(counter)


def _run(kernel: Callable, call: np.ndarray, jobs: np.ndarray) -> None:
    """Call the kernel on as many threads as PyTorch uses, this one among them; each takes job after job."""
    threads = max(1, min(torch.get_num_threads(), len(jobs)))
    heads, features = int(call["heads"][0]), int(call["features"][0])
    size = BLOCK * (7 * (-(-heads // 8) * 8) + 2 * heads * features)
    # Not allocated in the kernel: Numba frees an array that only its address is used of.
    reals = np.ones((threads, size), call.dtype["scale"])
    integers = np.empty((threads, 6 * BLOCK + (1 + 2 * int(call["axes"][0]) + 31) // 32 * 32), np.int32)
    counters = np.zeros(2, np.int64)  # of the jobs and of the threads that have begun
    jobs = np.ascontiguousarray(jobs, np.int64)
    for name, x in {"jobs": jobs, "counters": counters, "reals": reals, "integers": integers}.items():
        call[name] = x.ctypes.data
    call["num_jobs"], call["reals_size"], call["integers_size"] = len(jobs), size, integers.shape[1]
    function = c_function_of(kernel, call.dtype)
    if threads == 1:
        function(call.ctypes.data)
    else:
        in_parallel(function, call.ctypes.data, threads)


def _jobs(rows: Rows, batch: int, work_per_edge: int) -> np.ndarray:
    """Cut the work into ranges (leading index from, to; segment from, to) of about equal numbers of edges and rows."""
    num_rows, num_edges, num_pieces = rows.pointer.numel() - 1, rows.num_edges, rows.pieces.shape[0]
    parts = _PARTS * torch.get_num_threads()
    if batch * (num_edges + num_rows) * work_per_edge < _SERIAL_WORK or parts == _PARTS:
        return np.array([[0, batch, 0, num_rows + num_pieces]])
    if batch >= parts:
        cuts = [batch * n // parts for n in range(parts + 1)]
        return np.array([(b, c, 0, num_rows + num_pieces) for b, c in itertools.pairwise(cuts)])
    parts = -(-parts // batch)
    by_edges = np.searchsorted(rows.pointer.numpy(), [num_edges * n // parts for n in range(1, parts)])
    by_rows = [num_rows * n // parts for n in range(parts + 1)]
    cuts = sorted({*by_edges.tolist(), *by_rows})
    ranges = [*((s, s + 1) for s in range(num_rows, num_rows + num_pieces)), *itertools.pairwise(cuts)]
    return np.array([(b, b + 1, start, stop) for b in range(batch) for start, stop in ranges])


def _fixed_jobs(rows: Rows) -> np.ndarray:
    """Jobs that do not depend on the number of threads, no two of which have edges of one row or piece.

    Few enough that a number per job and slot takes no more room than 16 rows of all slots, or one per query.
    """
    num_rows, slots = rows.pointer.numel() - 1, max(rows.layout[1], 1)
    parts = max(16, min(num_rows // 256, 16 * num_rows // slots))
    cuts = sorted({num_rows * n // parts for n in range(parts + 1)})
    by_piece = num_rows + np.searchsorted(rows.pieces[:, 0], cuts)
    cuts = [*itertools.pairwise(cuts), *itertools.pairwise(by_piece.tolist())]
    return np.array([(0, 1, start, stop) for start, stop in cuts if start < stop], np.int64).reshape(-1, 4)


def listed(rowptr: Tensor, other: Tensor, edge_id: Tensor) -> Rows:
    """Rows of listed edges."""
    num_edges = other.numel()
    pieces = _pieces(rowptr.numpy(), num_edges)
    return Rows(
        rowptr.contiguous(), num_edges, pieces, (1, num_edges), other.contiguous(), edge_id.contiguous()
    )


def progressions(
    by_query: Tensor,
    by_key: Tensor,
    axes: Sequence[int],
    layout: Sequence[int],
    of_queries: bool,
    numbered: bool,
) -> Rows:
    """Rows of edges that follow from a rule, described as for `intervals.interval_attention`."""
    kept = by_query, by_key = by_query.contiguous(), by_key.contiguous()
    first, _, slot = by_query.numpy()
    # The slot of a query's key y is origin + slot_step (y // step).
    origin = slot.copy() if numbered else slot
    rows, degree = [], np.ones(1, np.int64)
    query = key = 0
    for queries, keys, step, slot_step, slots in zip(*(axes[n::5] for n in range(5))):
        if numbered:
            origin[query : query + queries] -= slot_step * (first[query : query + queries] // step)
        at, own, far = (query, queries, keys) if of_queries else (key, keys, queries)
        starts, counts = by_query[:2, at : at + own] if of_queries else by_key[:, at : at + own]
        degree = np.multiply.outer(degree, counts.numpy()).ravel()
        addresses = starts.data_ptr(), counts.data_ptr(), origin[query:].ctypes.data
        rows.append([own, step, far, slot_step, slots, *addresses])
        query, key = query + queries, key + keys
    table = np.array(rows, np.int64).reshape(-1, _AXIS)
    # Sizes become distances in row-major order.
    for column in (2, 4):
        table[:, column] = np.append(table[:0:-1, column].cumprod()[::-1], 1)
    pointer = np.zeros(degree.size + 1, np.int64)
    np.cumsum(degree, out=pointer[1:])
    num_edges, layout = int(pointer[-1]), (1 if len(layout) == 1 else layout[0], layout[-1])
    return Rows(
        torch.from_numpy(pointer), num_edges, _pieces(pointer, num_edges), layout, axes=table, by_query=of_queries,
        numbered=numbered, query_slots=math.prod(axes[4::5]), kept=(*kept, origin),
    )  # fmt: skip


def _pieces(pointer: np.ndarray, num_edges: int) -> np.ndarray:
    """Cut the long rows: (row, first edge, end)."""
    long = np.flatnonzero(pointer[1:] - pointer[:-1] > PIECE) if num_edges > PIECE else pointer[:0]
    if long.size == 0:
        return np.empty((0, 3), np.int64)
    counts = -(-(pointer[long + 1] - pointer[long]) // PIECE)
    rank = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    row = np.repeat(long, counts)
    first = pointer[row] + rank * PIECE
    return np.stack([row, first, np.minimum(first + PIECE, pointer[row + 1])], axis=1)


@np.errstate(all="ignore")  # an infinite score makes NaN, as in any softmax
def _merge_weighted(
    rows: Rows,
    peak: np.ndarray,
    norm: np.ndarray,
    lse: np.ndarray,
    lse_low: np.ndarray,
    sums: Sequence[np.ndarray],
) -> None:
    """Put the pieces of each long row together, in their order, in float64, and store the row.

    Arrays are [batch, rows and pieces, heads, ...]. Every piece has its sums of weights under a peak of its own: they
    are brought under the common peak and divided by the common norm.
    """
    long, starts, counts = np.unique(rows.pieces[:, 0], return_index=True, return_counts=True)
    first = rows.pointer.numel() - 1
    peaks = peak[:, first:].astype(np.float64)
    top = np.maximum.reduceat(peaks, starts, axis=1)
    factor = np.exp(peaks - np.repeat(top, counts, axis=1))
    common = np.add.reduceat(norm[:, first:] * factor, starts, axis=1)
    exact = top + np.log(common)
    lse[:, long] = exact
    lse_low[:, long] = np.where(common > 0, exact - lse[:, long], common)
    for x in sums:
        merged = np.add.reduceat(x[:, first:] * factor[..., None], starts, axis=1)
        x[:, long] = merged / np.where(common == 0, 1, common)[..., None]


def _merge(rows: Rows, sums: Sequence[np.ndarray]) -> None:
    """The same for plain sums."""
    if rows.pieces.shape[0] == 0:
        return
    long, starts = np.unique(rows.pieces[:, 0], return_index=True)
    for x in sums:
        x[:, long] = np.add.reduceat(x[:, rows.pointer.numel() - 1 :].astype(np.float64), starts, axis=1)


@functools.cache
def _starts(heads: int, kv_heads: int, dim: int, value_dim: int, features: int) -> np.ndarray:
    """Where each head starts in a row: of query, key, out, value, the features by head, the features shared by all."""
    head = np.arange(heads)
    kv_head = head // (heads // kv_heads)
    return np.stack(
        [head * dim, kv_head * dim, head * value_dim, kv_head * value_dim, head * features, head * 0]
    )


class _Call:
    """The arguments of an operator call as the kernels take them."""

    def __init__(
        self, layout, query, key, value,
        bias, edge_attr, edge_projection, seed, scale, softcap, dropout_p, return_weights,
    ):  # fmt: skip
        self.wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.batch, self.num_queries, self.heads, self.dim = query.shape
        self.num_keys, self.kv_heads, self.value_dim = value.shape[1:]
        self.num_edges = math.prod(layout)
        self.features = 0 if edge_attr is None else edge_attr.size(1)
        self.padded = -(-self.heads // 8) * 8
        fixed = self.dim if self.dim == self.value_dim and self.dim in _FIXED_DIMS else 0
        self.kernels = _kernels(fixed, min(fixed, 64) if fixed else 8)
        self.work_per_edge = self.heads * (self.dim + self.value_dim + self.features)
        self.projection = None if edge_projection is None else edge_projection.detach().to(self.wide)
        # How the entry of a bias follows from the number of an edge and its query, and whether edges have entries of
        # their own (1), those of a slot share one (2), or those of a query or all (0).
        self.bias_kind = edge_step = query_step = bias_width = 0
        if bias is not None:
            queries, slots, bias_width = bias.shape if bias.dim() == 3 else (1, *bias.shape)
            if slots == layout[1]:
                self.bias_kind = 1 if queries == layout[0] else 2
                edge_step, query_step = 1, 0 if queries == layout[0] else -slots
            elif queries > 1:
                query_step = 1
        starts = _starts(self.heads, self.kv_heads, self.dim, self.value_dim, self.features)
        self.values: dict = {}
        self.kept: list = [starts]  # what addresses point to
        self.fill(
            heads=self.heads,
            dim=self.dim,
            value_dim=self.value_dim,
            features=self.features,
            key_row=self.kv_heads * self.dim,
            value_row=self.kv_heads * self.value_dim,
            grouped=self.heads != self.kv_heads,
            num_edges=self.num_edges,
            bias_edge_step=edge_step * bias_width,
            bias_query_step=query_step * bias_width,
            bias_head_step=int(bias_width > 1),
            head_starts=starts.ctypes.data,
            query=query,
            key=key,
            value=value,
            bias=bias,
            edge_attr=edge_attr,
            projection=edge_projection,
            transposed=None if edge_projection is None else edge_projection.transpose(1, 2),
            seed=0 if seed is None else seed.item(),
            drop_below=int(dropout_p * 2**53),
            scale=scale,
            softcap=softcap,
            kept=1 / (1 - dropout_p) if dropout_p < 1 else 0,
            one=1,
            edge_number=1,
        )

    def fill(self, **arguments) -> None:
        """Enter numbers, and tensors in the dtype of the kernel by the address of their first number, 0 if none."""
        for name, x in arguments.items():
            if isinstance(x, Tensor):
                if x.dtype != self.wide or not x.is_contiguous():
                    x = x.to(self.wide).contiguous()
                self.kept.append(x)
                x = address(x)
            self.values[name] = 0 if x is None else x

    def over(self, rows: Rows, num_far: int) -> np.ndarray:
        """The record for a kernel over these rows."""
        self.kept.append(rows)
        values = self.values | {
            "num_rows": rows.pointer.numel() - 1,
            "num_pieces": rows.pieces.shape[0],
            "num_far": num_far,
            "row_pointer": rows.pointer.data_ptr(),
            "pieces": rows.pieces.ctypes.data,
        }
        if rows.other is not None and rows.edge_id is not None:
            values |= {"other": rows.other.data_ptr(), "edge_id": rows.edge_id.data_ptr()}
        if rows.axes is not None:
            values |= {
                "axes": len(rows.axes),
                "axis_table": rows.axes.ctypes.data,
                "by_query": rows.by_query,
                "numbered": rows.numbered,
                "query_slots": rows.query_slots,
            }
        number = np.float64 if self.wide == torch.float64 else np.float32
        record = _record(number, np.int32 if rows.axes is None else np.int64)
        return np.array([tuple([values.get(name, 0) for name in record.names or ()])], record)

    def rows_of(self, rows: Rows, *shape: int) -> Tensor:
        """Room for the rows and the pieces of long rows: [batch, rows and pieces, ...]."""
        return torch.empty(
            self.batch, rows.pointer.numel() - 1 + rows.pieces.shape[0], *shape, dtype=self.wide
        )

    def add_projected(self, to: Tensor, sums: Tensor, rows: Rows) -> None:
        """Long rows: what is summed over their features as the projection takes it to the node."""
        if self.projection is not None and rows.pieces.shape[0] and to.size(-1):
            long = np.unique(rows.pieces[:, 0])
            to.numpy()[:, long] += (sums.numpy()[:, long, :, None] @ self.projection.numpy()).squeeze(-2)

    def whole(self, rows: Rows, room: Tensor) -> Tensor:
        """The rows without the pieces."""
        return room[:, : rows.pointer.numel() - 1].contiguous() if rows.pieces.shape[0] else room


def forward(rows: Rows, *inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The body of an attention operator: its inputs but for those that describe the graph."""
    call, return_weights = _Call(rows.layout, *inputs), inputs[-1]
    H = call.heads
    out, aggregate = call.rows_of(rows, H, call.value_dim), call.rows_of(rows, H, call.features)
    lse = torch.empty(call.batch, call.num_queries, H, dtype=call.wide)
    lse_low = torch.empty_like(lse)
    # A place that no edge has keeps the weight exp(-inf) = 0.
    shape = (call.batch, call.num_edges, H) if return_weights else (0,)
    weights = torch.empty(shape, dtype=call.wide)
    if rows.axes is not None:
        weights.fill_(-torch.inf)
    call.fill(out=out, aggregate=aggregate, lse=lse, lse_low=lse_low, logits=weights)
    states = [call.rows_of(rows, call.padded) for _ in range(2)] if rows.pieces.shape[0] else []
    call.fill(**dict(zip(("peak", "norm"), states)))
    if call.batch:
        jobs = _jobs(rows, call.batch, call.work_per_edge)
        _run(call.kernels[0], call.over(rows, call.num_keys), jobs)
        if states:
            peak, norm, *sums = (x.numpy() for x in (*(x[..., :H] for x in states), out, aggregate))
            _merge_weighted(rows, peak, norm, lse.numpy(), lse_low.numpy(), sums)
            call.add_projected(out, aggregate, rows)
    if return_weights:
        base = lse.clamp_min(torch.finfo(call.wide).min)  # all scores -inf: not NaN but 0
        if rows.query_slots:
            of_query = weights.view(call.batch, *rows.layout, H)
            of_query.sub_(base.unsqueeze(2)).sub_(lse_low.unsqueeze(2)).exp_()
        else:
            query = _query_of_edges(rows)
            weights.sub_(base[:, query]).sub_(lse_low[:, query]).exp_()
    return call.whole(rows, out), lse, lse_low, call.whole(rows, aggregate), weights


def _query_of_edges(rows: Rows) -> Tensor:
    """The query of each edge number, where every number is an edge: of listed rows, or of a ragged graph."""
    degree = rows.pointer.diff()
    if rows.edge_id is not None:
        number = rows.edge_id.long()
        query = torch.empty_like(number)
        query[number] = torch.repeat_interleave(degree)
        return query
    by_first = rows.kept[0][2].argsort()  # the queries by the number of their first edge
    return by_first.repeat_interleave(degree[by_first])


def backward(
    rows: Rows, columns: Rows,
    grad_out, grad_lse, grad_weights, out, lse, lse_low, aggregate, weights, *inputs_and_choice,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The body of the backward pass of an attention operator: inputs as in `forward`, and `with_edge_attr`."""
    *inputs, with_edge_attr = inputs_and_choice
    call = _Call(rows.layout, *inputs)
    bias, edge_attr, edge_projection = inputs[3:6]
    H, F = call.heads, call.features
    # An empty gradient is one that is not there.
    grad_out = grad_out if grad_out.numel() == out.numel() else torch.zeros_like(out)
    if grad_weights.numel():
        # Through the weights, δ_i gains Σ_j p_ij dP_ij.
        through = (weights * grad_weights).double()
        if rows.query_slots:
            through = through.view(call.batch, *rows.layout, H)
            # What flows into a place without an edge counts for nothing, not even if it is NaN.
            through = through.where(weights.view_as(through) > 0, 0).sum(2)
        else:
            query, empty = _query_of_edges(rows), through.new_zeros(call.batch, call.num_queries, H)
            through = empty.index_add_(1, query, through)
        grad_lse = (grad_lse if grad_lse.numel() else 0.0) - through.to(call.wide)
    grad_query, grad_sums = call.rows_of(rows, H, call.dim), call.rows_of(rows, H, F)
    grad_key = call.rows_of(columns, call.kv_heads, call.dim)
    grad_value = call.rows_of(columns, call.kv_heads, call.value_dim)
    grad_bias = torch.empty(0, dtype=call.wide)
    # What is summed or kept per edge belongs to one leading index at a time.
    together = bias is None and F == 0
    query_jobs, key_jobs = (
        _jobs(x, call.batch if together else 1, call.work_per_edge) for x in (rows, columns)
    )
    if call.bias_kind == 2:
        query_jobs = _fixed_jobs(rows)
    if bias is not None:
        shape = (grad_query.shape[:2], (call.num_edges,), (len(query_jobs), rows.layout[1]))[call.bias_kind]
        grad_bias = torch.zeros(*shape, H, dtype=call.wide)
    # The pairs of an edge become the gradient of its features.
    pairs = torch.empty(call.num_edges if F else 0, max(F, 2 * H), dtype=call.wide)
    stats = torch.empty(call.batch * call.num_queries * 3 * call.padded, dtype=call.wide)
    call.fill(
        out=out,
        lse=lse,
        lse_low=lse_low,
        grad_out=grad_out,
        grad_lse=grad_lse,
        grad_weights=grad_weights,
        stats=stats,
        pairs=pairs,
        pair_step=pairs.size(1),
        grad_query=grad_query,
        grad_sums=grad_sums,
        grad_bias=grad_bias,
        grad_bias_by_edge=call.bias_kind != 0,
        grad_bias_query_step=-rows.layout[1] if call.bias_kind == 2 else 0,
        grad_bias_job_step=rows.layout[1] if call.bias_kind == 2 else 0,
        grad_key=grad_key,
        grad_value=grad_value,
    )
    by_row, by_column = call.over(rows, call.num_keys), call.over(columns, call.num_queries)
    grad_edge_attr = None
    if with_edge_attr:
        grad_edge_attr = pairs[:, :F] if call.batch == 1 else torch.zeros(pairs.size(0), F, dtype=call.wide)
    for b in range(1 if together else call.batch):
        at = np.array([b, b, 0, 0])
        _run(call.kernels[1], by_row, query_jobs + at)
        _run(call.kernels[2], by_column, key_jobs + at)
        if F and grad_edge_attr is not None:
            _run(_edge_kernel, by_row, _jobs(rows, 1, H * F) + at)
            if call.batch > 1:
                grad_edge_attr += pairs[:, :F]
    _merge(rows, (grad_query.numpy(), grad_sums.numpy()))
    call.add_projected(grad_query, grad_sums, rows)
    if bias is not None and bias.dim() == 3:  # in the shape of the layout
        if call.bias_kind == 0:
            _merge(rows, (grad_bias.numpy(),))
            grad_bias = call.whole(rows, grad_bias).sum(0).unsqueeze(1)
        elif call.bias_kind == 1:
            grad_bias = grad_bias.view(*rows.layout, H)
    else:
        grad_bias = grad_bias.view(-1, H)
    _merge(columns, (grad_key.numpy(), grad_value.numpy()))

    grad_projection = None
    if edge_projection is not None:
        # d W_h = Σ_i (Σ_j dS e) q_i + (Σ_j z p e) dO_i; a query without an edge may hold NaN, which 0 would not cancel.
        idle = (rows.pointer.diff() == 0).view(-1, 1, 1)
        products = [(call.whole(rows, grad_sums), inputs[0])]
        products += [(aggregate, grad_out)] if call.value_dim else []
        grad_projection = torch.zeros(edge_projection.shape, dtype=call.wide)
        with torch.autocast("cpu", enabled=False):
            for sums, x in products:
                x = x.masked_fill(idle, 0) if idle.any() else x
                grad_projection += torch.einsum("bnhf,bnhd->hfd", sums, x.to(call.wide))

    def like(grad: Tensor | None, x: Tensor | None) -> Tensor:
        if grad is None or x is None:
            return inputs[0].new_empty(0)
        return grad.sum_to_size(x.shape).to(x.dtype).contiguous()

    return (
        call.whole(rows, grad_query).to(inputs[0].dtype),
        call.whole(columns, grad_key).to(inputs[1].dtype),
        call.whole(columns, grad_value).to(inputs[2].dtype),
        like(grad_bias, bias),
        like(grad_edge_attr, edge_attr),
        like(grad_projection, edge_projection),
    )
