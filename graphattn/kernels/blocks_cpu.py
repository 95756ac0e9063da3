"""Attention on blocks of consecutive keys on the CPU: Numba kernels made of one small matrix product.

A block is 64 queries, at most, and the keys that any of them may see. Its scores are kept with the queries side by
side, ``scores[key, query]``, some keys at a time so that they stay in the second-level cache: what a softmax does along
the keys is then the same for all lanes of a register, and of the five products of attention

    S = K Qᵀ,    O += Pᵀ V,    dP = V dOᵀ,    dV += P dO,    dK += dS Q,    dQ += dSᵀ K

each is rows of numbers times rows of registers, where they lie. Forward keeps a running maximum and sum (Milakov and
Gimelshein 2018); backward computes the weights again from lse (Dao et al. 2022, FlashAttention), of which lse_low holds
the digits that it has no room for:

    P = exp(S - lse),    dS = P (z dP - δ),    δ = dO·O - dlse

with dropout factors z. A job is some blocks of some leading indices and key heads. No two jobs that run at a time write
one place, and none depends on the number of threads.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (an intrinsic of graphattn.kernels.vector takes the typing context first, its callers do not pass it)
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from graphattn.compiled import compiled
from graphattn.kernels import blocks, product_cpu, vector
from graphattn.kernels.blocks import BLOCK, blocks_of
from graphattn.kernels.product_cpu import LANES, product
from graphattn.kernels.threads import address, c_function_of, in_parallel
from graphattn.kernels.vector import (
    after,
    exp,
    lanes,
    load,
    log,
    maximum,
    pointer,
    record,
    splat,
    store,
    take,
    tanh,
    total,
    width,
    zeros,
)

_KEYS = 256  # scores worked on together are those of so many keys
_SERIAL_WORK = 500_000  # multiply-adds below which more threads cost more than they save
_JOBS, _MOST_JOBS = 64, 4096  # jobs that keep the threads busy, and so many that more take only room

_NUMBERS = (
    "group", "dim", "value_dim", "heads", "num_queries", "num_keys", "offset", "before", "after", "bias_key_step",
    "bias_query_step", "bias_head_step", "grad_bias_job_step", "num_jobs", "room",
    *(f"{name}_{axis}" for name in ("query", "key", "value", "grad_out") for axis in ("batch", "node", "head")),
)  # fmt: skip
_ADDRESSES = (
    "query", "key", "value", "bias", "out", "lse", "lse_low", "grad_out", "grad_lse", "grad_query", "grad_key",
    "grad_value", "grad_bias", "weights", "grad_weights", "blocks", "jobs", "counters", "reals",
)  # fmt: skip
_RANDOM = ("seed", "drop_below")
_FACTORS = ("scale", "rest", "softcap", "kept", "lowest", "infinity", "one")


@functools.cache
def _record(number: type) -> np.dtype:
    return np.dtype(
        [
            *((name, np.int64) for name in (*_NUMBERS, *_ADDRESSES)),
            *((name, np.uint64) for name in _RANDOM),
            *((name, number) for name in _FACTORS),
        ]
    )


_function = njit(error_model="numpy")
_inlined = njit(error_model="numpy", forceinline=True)
_part = njit(error_model="numpy", inline="always")  # of a kernel: compiled with it, not before it
_kernel = functools.partial(
    compiled,
    error_model="numpy",
    sources=[str(module.__file__) for module in (vector, blocks, product_cpu)],
)


@_function
def _copy(to, padded, rows, row, count, dim, factor):
    """Rows with zeros after them."""
    for i in range(count):
        x, y = after(to, i * padded), after(rows, i * row)
        for k in range(dim):
            x[k] = y[k] * factor
        for k in range(dim, padded):
            x[k] = 0


@_function
def _clear(row, size):
    for k in range(size):
        row[k] = 0


@_function
def _transposed(to, rows, row, count, columns, dim, factor):
    """Rows as columns, of a row of BLOCK numbers, with columns of zeros after them."""
    for k in range(dim):
        x = after(to, k * BLOCK)
        for i in range(count):
            x[i] = rows[i * row + k] * factor
        for i in range(count, columns):
            x[i] = 0


@_function
def _multiply(scores, factor, columns, keys, N):
    for k in range(keys):
        for at in range(k * BLOCK, k * BLOCK + columns, width(N)):
            store(scores, at, load(scores, at, N) * splat(factor, N))


@_function
def _modify(scores, slopes, c, head, query, queries, columns, key, keys, N):
    """Scale, cap and bias the scores of some keys; slopes are those of the cap."""
    if c.rest != c.one:
        _multiply(scores, c.rest, columns, keys, N)
    if c.softcap > 0:
        cap, one = splat(c.softcap, N), splat(c.one, N)
        for k in range(keys):
            for j in range(k * BLOCK, k * BLOCK + columns, width(N)):
                bent = tanh(load(scores, j, N) / cap)
                store(slopes, j, one - bent * bent)
                store(scores, j, bent * cap)
    if c.bias != 0:
        first = head * c.bias_head_step + key * c.bias_key_step + query * c.bias_query_step
        bias = after(pointer(c.bias, c.one), first)
        if c.bias_query_step == 0:
            for k in range(keys):
                more = splat(bias[k * c.bias_key_step], N)
                for at in range(k * BLOCK, k * BLOCK + columns, width(N)):
                    store(scores, at, load(scores, at, N) + more)
            return
        for part in range(0, keys, BLOCK):  # turned around in squares that fit the first-level cache
            for i in range(queries):
                row = after(bias, i * c.bias_query_step)
                for k in range(part, min(part + BLOCK, keys)):
                    scores[k * BLOCK + i] += row[k * c.bias_key_step]


@_inlined
def _queries_of(c, query, queries, key):
    """The first and the end of the queries that a key has an edge to, counted from ``query``."""
    place = key - query - c.offset  # of the query in whose place the key is
    return max(0, place - c.after), min(queries, place + c.before + 1)


@_function
def _mask(scores, missing, c, query, queries, key, keys):
    """Put a number where there is no edge."""
    for k in range(keys):
        first, end = _queries_of(c, query, queries, key + k)
        to = after(scores, k * BLOCK)
        for i in range(min(first, queries)):
            to[i] = missing
        for i in range(max(0, end), queries):
            to[i] = missing


@_function
def _are_finite(rows, row, count, dim, N):
    sums, rest, even = zeros(rows, N), 0, dim - dim % width(N)
    for i in range(count):
        x = after(rows, i * row)
        for k in range(0, even, width(N)):
            sums = sums + load(x, k, N) * zeros(rows, N)
        for k in range(even, dim):
            rest += not math.isfinite(x[k])
    return total(sums) == 0 and rest == 0


@_function
def _along_edges(to, to_query, to_key, a, rows, of_query, of_key, c, query, queries, key, keys, dim):
    """Add ``a[key, query]`` times a row to a row for every edge, where a product would take 0 times NaN for no edge."""
    for k in range(keys):
        first, end = _queries_of(c, query, queries, key + k)
        for i in range(first, end):
            weight, x = a[k * BLOCK + i], after(rows, k * of_key + i * of_query)
            y = after(to, k * to_key + i * to_query)
            for j in range(dim):
                y[j] += weight * x[j]


@_function
def _over_keys(sums, padded, a, rows, row, dim, room, add, full, c, query, queries, key, keys, L, M, N):
    """``sums[query] (+)= Σ_key a[key, query] rows[key]``."""
    if full == 0 and not _are_finite(rows, row, keys, dim, N):
        if not add:
            _clear(sums, BLOCK * padded)
        _along_edges(sums, padded, 0, a, rows, 0, row, c, query, queries, key, keys, dim)
        return
    if padded != dim:
        _copy(room, padded, rows, row, keys, dim, c.one)
        rows, row = room, padded
    product(sums, padded, a, 1, BLOCK, rows, row, queries, padded, keys, add, L, M, N)


@_function
def _drop(weights, c, b, head, query, columns, key, keys):
    """Multiply weights by their dropout factors: SplitMix64, as `reference.dropout_factors`."""
    for k in range(keys):
        to = after(weights, k * BLOCK)
        number = ((b * c.num_queries + query) * c.num_keys + key + k) * c.heads + head + 1
        x0, step = np.uint64(number), np.uint64(c.num_keys * c.heads)
        for i in range(columns):
            x = c.seed + (x0 + np.uint64(i) * step) * np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = (x ^ (x >> np.uint64(31))) >> np.uint64(11)
            to[i] *= c.kept * (x >= c.drop_below)


@_inlined
def _weigh(scores, peak, norm, factor, keys, L):
    """Scores of some more keys to weights under the new maximum; factor is what the weights so far shrink by."""
    old = load(peak, 0, L)
    top = old
    for k in range(keys):
        top = maximum(load(scores, k * BLOCK, L), top)
    shrink = exp(old - top)
    sum = zeros(scores, L)
    for k in range(keys):
        p = exp(load(scores, k * BLOCK, L) - top)
        sum = sum + p
        store(scores, k * BLOCK, p)
    store(peak, 0, top)
    store(factor, 0, shrink)
    store(norm, 0, load(norm, 0, L) * shrink + sum)


@_inlined
def _pairs_of(c, address, b, head, query, key):
    """Where the numbers ``[batch, heads, queries, keys]`` of some pairs begin."""
    return after(pointer(address, c.one), ((b * c.heads + head) * c.num_queries + query) * c.num_keys + key)


@_function
def _weights_block(c, b, kv_head, head, block, scores, slopes, own, lse, lse_low, L, M, N):
    """Store the weights of a block, whose softmax is known by now."""
    query, query_end, key, key_end, full = block[0], block[1], block[2], block[3], block[4]
    count, narrow = query_end - query, width(N)
    columns = -(-count // narrow) * narrow
    for start in range(key, key_end, _KEYS):
        keys = min(_KEYS, key_end - start)
        k = after(pointer(c.key, c.one), b * c.key_batch + start * c.key_node + kv_head * c.key_head)
        product(scores, BLOCK, k, c.key_node, 1, own, BLOCK, keys, columns, c.dim, False, L, M, N)
        _modify(scores, slopes, c, head, query, count, columns, start, keys, N)
        if full == 0:
            _mask(scores, -c.infinity, c, query, count, start, keys)
        _to_weights(scores, scores, lse, lse_low, columns, keys, N)
        to = _pairs_of(c, c.weights, b, head, query, start)
        for part in range(0, keys, BLOCK):
            for i in range(count):
                row = after(to, i * c.num_keys)
                for n in range(part, min(part + BLOCK, keys)):
                    row[n] = scores[n * BLOCK + i]


@_function
def _to_weights(weights, scores, lse, lse_low, columns, keys, N):
    for j in range(0, columns, width(N)):
        high, low = load(lse, j, N), load(lse_low, j, N)
        for at in range(j, j + keys * BLOCK, BLOCK):
            store(weights, at, exp(load(scores, at, N) - high - low))


@_part
def _forward_block(c, b, kv_head, group, block, copy, room, L, M, N):
    query, query_end, key, key_end, full = block[0], block[1], block[2], block[3], block[4]
    count, narrow, head = query_end - query, width(N), kv_head * c.group + group
    columns = -(-count // narrow) * narrow
    padded = -(-c.value_dim // narrow) * narrow
    scores, slopes = room, after(room, _KEYS * BLOCK)
    values = after(slopes, _KEYS * BLOCK)
    state = after(values, _KEYS * padded)
    peak, norm, factor = state, after(state, BLOCK), after(state, 2 * BLOCK)
    sums = after(state, 3 * BLOCK)
    own = after(sums, BLOCK * padded)

    q = after(pointer(c.query, c.one), b * c.query_batch + query * c.query_node + head * c.query_head)
    _transposed(own, q, c.query_node, count, columns, c.dim, c.scale)
    for i in range(columns):
        peak[i], norm[i] = c.lowest, 0
    for start in range(key, key_end, _KEYS):
        keys = min(_KEYS, key_end - start)
        k = after(pointer(c.key, c.one), b * c.key_batch + start * c.key_node + kv_head * c.key_head)
        v = after(pointer(c.value, c.one), b * c.value_batch + start * c.value_node + kv_head * c.value_head)
        product(scores, BLOCK, k, c.key_node, 1, own, BLOCK, keys, columns, c.dim, False, L, M, N)
        _modify(scores, slopes, c, head, query, count, columns, start, keys, N)
        if full == 0:
            _mask(scores, -c.infinity, c, query, count, start, keys)
        if columns == width(L):
            _weigh(scores, peak, norm, factor, keys, L)
        else:
            for j in range(0, columns, narrow):
                _weigh(after(scores, j), after(peak, j), after(norm, j), after(factor, j), keys, N)
        if c.drop_below != 0:
            _drop(scores, c, b, head, query, columns, start, keys)
        if start > key:
            for i in range(count):
                x = after(sums, i * padded)
                if factor[i] != c.one:
                    for j in range(padded):
                        x[j] *= factor[i]
        _over_keys(
            sums, padded, scores, v, c.value_node, c.value_dim, values, start > key, full, c, query, count, start, keys,
            L, M, N,
        )  # fmt: skip

    out = pointer(c.out, c.one)
    lse, lse_low = pointer(c.lse, c.one), pointer(c.lse_low, c.one)
    for j in range(0, columns, narrow):
        store(factor, j, log(load(norm, j, N)))
    for i in range(count):
        at, x = (b * c.num_queries + query + i) * c.heads + head, after(sums, i * padded)
        to = after(out, at * c.value_dim)
        if norm[i] == 0:
            for j in range(c.value_dim):
                to[j] = 0
            lse[at], lse_low[at] = -c.infinity, 0
        else:
            inverse = c.one / norm[i]
            for j in range(c.value_dim):
                to[j] = x[j] * inverse
            high, low = peak[i], factor[i]
            if abs(high) < abs(low):
                high, low = low, high
            lse[at] = high + low
            lse_low[at] = low - (lse[at] - high)  # exact, as the first is the larger
        peak[i], norm[i] = lse[at] if norm[i] != 0 else c.infinity, lse_low[at]
    if c.weights != 0:
        _weights_block(c, b, kv_head, head, block, scores, slopes, own, peak, norm, L, M, N)


@_function
def _over_queries(to, row, a, rows, padded, dim, room, careful, c, query, queries, key, keys, L, M, N):
    """``to[key] += Σ_query a[key, query] rows[query]``."""
    if careful:
        _along_edges(to, 0, row, a, rows, padded, 0, c, query, queries, key, keys, dim)
        return
    if padded == dim:
        product(to, row, a, BLOCK, 1, rows, padded, keys, dim, queries, True, L, M, N)
        return
    product(room, padded, a, BLOCK, 1, rows, padded, keys, padded, queries, False, L, M, N)
    for k in range(keys):
        for j in range(dim):
            to[k * row + j] += room[k * padded + j]


@_function
def _add_bias(c, at, grads, keys, count):
    """Add the gradients of scores to that of a bias; where many are one number, in double precision."""
    if c.bias_key_step != 0 and c.bias_query_step != 0:
        to = after(pointer(c.grad_bias, c.one), at)
        for part in range(0, keys, BLOCK):
            for i in range(count):
                row = after(to, i * c.bias_query_step)
                for k in range(part, min(part + BLOCK, keys)):
                    row[k * c.bias_key_step] += grads[k * BLOCK + i]
        return
    sums = after(pointer(c.grad_bias, np.float64(0)), at)
    if c.bias_query_step != 0:
        for i in range(count):
            of_query = np.float64(0)
            for k in range(keys):
                of_query += grads[k * BLOCK + i]
            sums[i * c.bias_query_step] += of_query
        return
    of_all = np.float64(0)
    for k in range(keys):
        of_key = np.float64(0)
        for i in range(count):
            of_key += grads[k * BLOCK + i]
        of_all += of_key
        if c.bias_key_step != 0:
            sums[k * c.bias_key_step] += of_key
    if c.bias_key_step == 0:
        sums[0] += of_all


@_part
def _backward_block(c, b, kv_head, group, block, copy, room, L, M, N):
    query, query_end, key, key_end, full = block[0], block[1], block[2], block[3], block[4]
    count, narrow, head = query_end - query, width(N), kv_head * c.group + group
    columns = -(-count // narrow) * narrow
    dim, value_dim = -(-c.dim // narrow) * narrow, -(-c.value_dim // narrow) * narrow
    scores, slopes = room, after(room, _KEYS * BLOCK)
    weights = after(slopes, _KEYS * BLOCK)
    grads = after(weights, _KEYS * BLOCK)
    far = after(grads, _KEYS * BLOCK)
    lse = after(far, _KEYS * max(dim, value_dim))
    delta = after(lse, 2 * BLOCK)
    own, own_t = after(delta, BLOCK), after(delta, BLOCK + BLOCK * dim)
    flow, flow_t = after(own_t, BLOCK * dim), after(own_t, BLOCK * (dim + value_dim))
    sums = after(flow_t, BLOCK * value_dim)

    q = after(pointer(c.query, c.one), b * c.query_batch + query * c.query_node + head * c.query_head)
    g = after(
        pointer(c.grad_out, c.one), b * c.grad_out_batch + query * c.grad_out_node + head * c.grad_out_head
    )
    _copy(own, dim, q, c.query_node, count, c.dim, c.scale)
    _transposed(own_t, q, c.query_node, count, columns, c.dim, c.scale)
    _copy(flow, value_dim, g, c.grad_out_node, count, c.value_dim, c.one)
    _transposed(flow_t, g, c.grad_out_node, count, columns, c.value_dim, c.one)
    out, lse_of = pointer(c.out, c.one), pointer(c.lse, c.one)
    at = (b * c.num_queries + query) * c.heads + head
    _transposed(far, after(out, at * c.value_dim), c.heads * c.value_dim, count, columns, c.value_dim, c.one)
    for j in range(0, columns, narrow):
        sum = zeros(far, N)  # in the order of a product: for a single key, dP and δ are the same number
        for n in range(j, j + c.value_dim * BLOCK, BLOCK):
            sum = sum + load(far, n, N) * load(flow_t, n, N)
        store(delta, j, sum)
    for i in range(columns):
        lse[i], lse[BLOCK + i] = c.infinity, 0
        if i < count and lse_of[at + i * c.heads] != -c.infinity:  # else no weight is left
            lse[i] = lse_of[at + i * c.heads]
            lse[BLOCK + i] = pointer(c.lse_low, c.one)[at + i * c.heads]
            if c.grad_lse != 0:
                delta[i] -= pointer(c.grad_lse, c.one)[at + i * c.heads]
    careful = full == 0 and not (
        _are_finite(own, dim, count, c.dim, N) and _are_finite(flow, value_dim, count, c.value_dim, N)
    )
    for start in range(key, key_end, _KEYS):
        keys = min(_KEYS, key_end - start)
        k = after(pointer(c.key, c.one), b * c.key_batch + start * c.key_node + kv_head * c.key_head)
        v = after(pointer(c.value, c.one), b * c.value_batch + start * c.value_node + kv_head * c.value_head)
        product(scores, BLOCK, k, c.key_node, 1, own_t, BLOCK, keys, columns, c.dim, False, L, M, N)
        _modify(scores, slopes, c, head, query, count, columns, start, keys, N)
        product(grads, BLOCK, v, c.value_node, 1, flow_t, BLOCK, keys, columns, c.value_dim, False, L, M, N)
        _to_weights(weights, scores, lse, after(lse, BLOCK), columns, keys, N)
        if c.drop_below != 0:
            for at in range(keys * BLOCK):
                scores[at] = weights[at]
            _drop(weights, c, b, head, query, columns, start, keys)
            _drop(grads, c, b, head, query, columns, start, keys)
        if c.grad_weights != 0:
            of_pairs = _pairs_of(c, c.grad_weights, b, head, query, start)
            for part in range(0, keys, BLOCK):
                for i in range(count):
                    row = after(of_pairs, i * c.num_keys)
                    for n in range(part, min(part + BLOCK, keys)):
                        grads[n * BLOCK + i] += row[n]
        kept = scores if c.drop_below != 0 else weights
        for j in range(0, columns, narrow):
            less = load(delta, j, N)
            for at in range(j, j + keys * BLOCK, BLOCK):
                store(grads, at, load(kept, at, N) * (load(grads, at, N) - less))
        if full == 0:
            _mask(weights, c.one - c.one, c, query, count, start, keys)
            _mask(grads, c.one - c.one, c, query, count, start, keys)
        if c.grad_bias != 0:
            at = head * c.bias_head_step + start * c.bias_key_step + query * c.bias_query_step
            _add_bias(c, copy * c.grad_bias_job_step + at, grads, keys, count)
        if c.softcap > 0:
            for n in range(keys):
                for at in range(n * BLOCK, n * BLOCK + columns, narrow):
                    store(grads, at, load(grads, at, N) * load(slopes, at, N))
            if full == 0:  # the slope may be NaN
                _mask(grads, c.one - c.one, c, query, count, start, keys)
        if c.rest != c.one:
            _multiply(grads, c.rest, columns, keys, N)
        at = (b * c.num_keys + start) * (c.heads // c.group) + kv_head
        to = after(pointer(c.grad_value, c.one), at * c.value_dim)
        row = c.heads // c.group * c.value_dim
        _over_queries(
            to,
            row,
            weights,
            flow,
            value_dim,
            c.value_dim,
            far,
            careful,
            c,
            query,
            count,
            start,
            keys,
            L,
            M,
            N,
        )
        to, row = after(pointer(c.grad_key, c.one), at * c.dim), c.heads // c.group * c.dim
        _over_queries(to, row, grads, own, dim, c.dim, far, careful, c, query, count, start, keys, L, M, N)
        _over_keys(
            sums,
            dim,
            grads,
            k,
            c.key_node,
            c.dim,
            far,
            start > key,
            full,
            c,
            query,
            count,
            start,
            keys,
            L,
            M,
            N,
        )
    grad_query = pointer(c.grad_query, c.one)
    for i in range(count):
        to = after(grad_query, ((b * c.num_queries + query + i) * c.heads + head) * c.dim)
        for j in range(c.dim):
            to[j] = sums[i * dim + j] * c.scale


@_part
def _walk(work, c, L, M, N):
    """Take job after job: (leading index from, to, key head from, to, block from, to, copy of the bias gradient)."""
    room = after(pointer(c.reals, c.one), take(after(pointer(c.counters, np.int64(0)), 1)) * c.room)
    blocks, counter = pointer(c.blocks, np.int64(0)), pointer(c.counters, np.int64(0))
    job = take(counter)
    while job < c.num_jobs:
        now = after(pointer(c.jobs, np.int64(0)), 7 * job)
        for b in range(now[0], now[1]):
            for kv_head in range(now[2], now[3]):
                for n in range(now[4], now[5]):
                    for group in range(c.group):
                        work(c, b, kv_head, group, after(blocks, 5 * n), now[6], room, L, M, N)
        job = take(counter)


@functools.cache
def _kernels(wide: int, middle: int, narrow: int) -> tuple[Callable, Callable]:
    @_kernel
    def forward(call):
        _walk(_forward_block, record(call), lanes(wide), lanes(middle), lanes(narrow))

    @_kernel
    def backward(call):
        _walk(_backward_block, record(call), lanes(wide), lanes(middle), lanes(narrow))

    return forward, backward


class _Call:
    """The arguments of an operator call as the kernels take them."""

    def __init__(self, *inputs) -> None:
        query, key, value, bias, ptr, seed, offset, before, after, scale, softcap, dropout_p, _ = inputs
        self.wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.batch, self.num_queries, self.heads, self.dim = query.shape
        self.num_keys, self.kv_heads, self.value_dim = value.shape[1:]
        band = self.num_queries, self.num_keys, offset, before, after
        self.plan = (_kept_plan if ptr is None else _plan)(self.batch, self.kv_heads, ptr, *band)
        self.kept: list = []  # what addresses point to
        unbounded = 2**40
        self.values: dict = {
            "group": self.heads // self.kv_heads,
            "dim": self.dim,
            "value_dim": self.value_dim,
            "heads": self.heads,
            "num_queries": self.num_queries,
            "num_keys": self.num_keys,
            "offset": offset,
            "before": unbounded if before is None else before,
            "after": unbounded if after is None else after,
            "seed": seed.item() if dropout_p > 0.0 else 0,
            "drop_below": int(dropout_p * 2**53),
            # Queries take a factor of at most 1, with which they stay finite, and scores the rest.
            "scale": scale if abs(scale) <= 1 else math.copysign(1, scale),
            "rest": max(1, abs(scale)),
            "softcap": softcap,
            "kept": 1 / (1 - dropout_p) if dropout_p < 1 else 0,
            "lowest": torch.finfo(self.wide).min,
            "infinity": math.inf,
            "one": 1,
            "blocks": self.plan.blocks.ctypes.data,
        }
        self.rows(query=query, key=key, value=value)
        if bias is not None:
            bias = bias.to(self.wide).permute(2, 0, 1).contiguous()  # heads are worked on one by one
            self.fill(bias=bias)
            steps = (step * (size > 1) for size, step in zip(bias.shape, bias.stride()))
            self.values |= dict(zip(("bias_head_step", "bias_query_step", "bias_key_step"), steps))

    def rows(self, **arguments: Tensor) -> None:
        """Enter tensors ``[B, nodes, heads, dim]`` where they are, if the numbers of a row lie side by side."""
        for name, x in arguments.items():
            x = x.to(self.wide)
            x = x if x.stride(3) == 1 else x.contiguous()
            steps = zip(("batch", "node", "head"), x.stride())
            self.values |= {f"{name}_{axis}": step for axis, step in steps}
            self.fill(**{name: x})

    def fill(self, **arguments: Tensor) -> None:
        """Enter tensors by their address."""
        for name, x in arguments.items():
            self.kept.append(x)
            self.values[name] = address(x)

    def run(self, kernel: Callable, jobs: np.ndarray) -> None:
        """Call the kernel on as many threads as PyTorch uses, this one among them; each takes job after job."""
        if not len(jobs):
            return
        work = self.plan.pairs * self.batch * self.heads * (self.dim + self.value_dim)
        threads = 1 if work < _SERIAL_WORK else min(torch.get_num_threads(), len(jobs))
        most = -(-max(self.dim, self.value_dim) // 16) * 16
        room = 4 * _KEYS * BLOCK + _KEYS * most + 5 * BLOCK * most + 3 * BLOCK  # what the backward pass takes
        record = _record(np.float64 if self.wide == torch.float64 else np.float32)
        reals = np.empty(threads * room, record["one"])
        counters = np.zeros(2, np.int64)  # of the jobs and of the threads that have begun
        jobs = np.ascontiguousarray(jobs, np.int64)
        values = self.values | {
            "jobs": jobs.ctypes.data,
            "num_jobs": len(jobs),
            "counters": counters.ctypes.data,
            "reals": reals.ctypes.data,
            "room": room,
        }
        call = np.array([tuple([values.get(name, 0) for name in record.names or ()])], record)
        function = c_function_of(kernel, record)
        if threads == 1:
            function(call.ctypes.data)
        else:
            in_parallel(function, call.ctypes.data, threads)


class _Plan(NamedTuple):
    """Blocks, and jobs on them: (leading index from, to, key head from, to, block from, to, copy of the bias gradient).

    The jobs of the forward pass may run in any order. Those of the backward pass are given for each parity, no two of
    one parity sharing a key, by ranges of blocks: ``groups``, and every leading index and key head.
    """

    blocks: np.ndarray
    pairs: int  # of queries and keys in all blocks
    covered: bool  # every query is in a block
    forward: np.ndarray
    groups: list[np.ndarray]
    backward: list[np.ndarray]


def _plan(batch: int, kv_heads: int, ptr: Tensor | None, *band: Any) -> _Plan:
    blocks, groups = blocks_of(ptr, *band)
    cost = ((blocks[:, 1] - blocks[:, 0]) * (blocks[:, 3] - blocks[:, 2])).cumsum()
    pairs = int(cost[-1]) if len(cost) else 0
    parts = -(-_JOBS // max(1, batch * kv_heads))
    cuts = np.searchsorted(cost, pairs * np.arange(1, parts) / parts) + 1
    cuts = np.unique(np.concatenate([[0], np.minimum(cuts, len(blocks)), [len(blocks)]]))
    spans = [groups[groups[:, 2] == parity, :2] for parity in (0, 1)]
    return _Plan(
        blocks,
        pairs,
        int((blocks[:, 1] - blocks[:, 0]).sum()) == band[0],
        _jobs(batch, kv_heads, np.stack([cuts[:-1], cuts[1:]], 1)),
        spans,
        [_jobs(batch, kv_heads, span) for span in spans],
    )


_kept_plan = functools.lru_cache(16)(_plan)  # for a small graph it takes longer than the work


def _jobs(batch: int, kv_heads: int, ranges: np.ndarray) -> np.ndarray:
    """Every key head of some leading indices with every range of blocks."""
    together = -(-batch * kv_heads * len(ranges) // _MOST_JOBS) or 1
    n, b, head = (x.ravel() for x in np.mgrid[: len(ranges), :batch:together, :kv_heads])
    return np.stack([b, np.minimum(b + together, batch), head, head + 1, *ranges[n].T, np.zeros_like(b)], 1)


def forward(query, key, value, *rest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _Call(query, key, value, *rest)
    rows = call.batch, call.num_queries, call.heads
    out, lse, lse_low = (torch.empty(*rows, *size, dtype=call.wide) for size in ((call.value_dim,), (), ()))
    if not call.plan.covered:
        lse.fill_(-math.inf)
        for x in (out, lse_low):
            x.zero_()
    call.fill(out=out, lse=lse, lse_low=lse_low)
    weights = torch.empty(0, dtype=call.wide)
    if rest[-1]:
        weights = torch.zeros(call.batch, call.heads, call.num_queries, call.num_keys, dtype=call.wide)
        call.fill(weights=weights)
    call.run(_kernels(*LANES[call.wide])[0], call.plan.forward)
    return out, lse, lse_low, weights


def backward(*arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (
        grad_out,
        grad_lse,
        grad_weights,
        out,
        lse,
        lse_low,
        weights,
        query,
        key,
        value,
        bias,
        *rest,
        with_bias,
    ) = arguments
    call = _Call(query, key, value, bias, *rest)
    plan = call.plan
    grads = [torch.zeros(x.shape, dtype=call.wide) for x in (query, key, value)]
    call.rows(grad_out=grad_out if grad_out.shape == out.shape else torch.zeros_like(out))
    call.fill(out=out.contiguous(), lse=lse.contiguous(), lse_low=lse_low.contiguous())
    call.fill(grad_query=grads[0], grad_key=grads[1], grad_value=grads[2])
    if grad_weights.shape == weights.shape and weights.numel():
        # Through the weights, δ_i gains Σ_j P_ij dP_ij; what flows into a pair without an edge counts for nothing.
        grad_weights = grad_weights.to(call.wide).contiguous()
        through = (weights * grad_weights).masked_fill(weights == 0, 0).sum(-1).mT
        grad_lse = (grad_lse if grad_lse.shape == lse.shape else 0) - through
        call.fill(grad_weights=grad_weights)
    if grad_lse.shape == lse.shape:
        call.fill(grad_lse=grad_lse.to(call.wide).contiguous())
    grad_bias, jobs = query.new_empty(0), plan.backward
    if with_bias:
        # One job adds all that goes into a number: those of a head, or of some heads that share numbers, into a copy
        # that is summed with the others after. There are few copies, as each is of the size of the bias.
        shared = bias.size(2) == 1
        parts = min(call.kv_heads, 4) if shared else call.kv_heads
        many = bias.size(0) == 1 or bias.size(1) == 1  # queries or keys that share a number
        copies, dtype = parts if shared else 1, torch.float64 if many else call.wide
        grad_bias = torch.zeros(copies, *bias.permute(2, 0, 1).shape, dtype=dtype)
        call.fill(grad_bias=grad_bias)
        call.values["grad_bias_job_step"] = bias.numel()
        cuts = [call.kv_heads * n // max(1, parts) for n in range(parts + 1)]
        ranges = [(*cuts[n : n + 2], n % copies) for n in range(parts)]
        jobs = [
            np.array(
                [(0, call.batch, first, end, *span, copy) for first, end, copy in ranges for span in spans]
            )
            for spans in plan.groups
        ]
    for of_parity in jobs:
        call.run(_kernels(*LANES[call.wide])[1], of_parity)
    grads = [grad.to(x.dtype) for grad, x in zip(grads, (query, key, value))]
    if with_bias:
        grad_bias = grad_bias.sum(0).permute(1, 2, 0).to(bias.dtype).contiguous()
    return grads[0], grads[1], grads[2], grad_bias
