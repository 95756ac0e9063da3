"""Attention on listed edges on the CPU: three Numba kernels and the calls that spread them over threads.

A kernel walks rows of edges: all edges of one query (forward, and the backward pass that gives the gradients of the
queries), or all edges of one key (the pass that gives those of keys and values). A row is worked on in blocks of
edges, small enough to stay in the first-level cache:

1. ``scores[e, h] = q_i·k_j``, the rows of the edges some places ahead asked for on the way;
2. scale, soft cap, bias;
3. weights ``p = exp(s - peak)`` under a running maximum (forward) or ``p = exp(s - lse)`` (backward);
4. ``Σ_e weight[e, h] · row_e``, added to the sum of the row.

Backward, with δ_i = dO_i·O_i - dlse_i and dropout factors z:

    dV_j = Σ_i z p dO_i,    dS = p (z dO_i·v_j - δ_i),    dQ_i = scale Σ_j dS k_j,    dK_j = scale Σ_i dS q_i

Weights are not kept for it but computed again from lse (Dao et al. 2022, FlashAttention). Every sum belongs to one
row and has one order: no two threads write one place, and results do not depend on the number of threads.
"""

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numba import literally, njit
from torch import Tensor

from graphattn.kernels.vector import exp, load, maximum, prefetch, splat, store, total, totals

BLOCK = 32  # edges worked on together
PIECE = 2048  # longer rows are cut into pieces of so many edges: for balance, and for sums of bounded length
_AHEAD = 8  # edges between asking for a row and reading it
_SERIAL_WORK = 1_000_000  # multiply-adds below which more threads cost more than they save
_PARTS = 6  # parts of the work for each thread, so that rows of different cost even out
_FIXED_DIMS = (8, 16, 32, 64, 128)  # a kernel with the dim compiled in is up to a third faster


class Rows(NamedTuple):
    """Edges grouped into rows: row i has the edges ``pointer[i]`` to ``pointer[i + 1]``.

    Segment s of the work is row s, or piece s - num_rows: ``pieces[n] = (row, first edge, end)`` cut from a long row.
    """

    pointer: np.ndarray
    other: np.ndarray  # the node at the far end of each edge
    edge_id: np.ndarray  # the number of each edge in per-edge tensors
    pieces: np.ndarray


class Heads(NamedTuple):
    """Where in a node's row each head starts; ``step`` apart where that is regular, else -1."""

    start: np.ndarray
    step: int


class Options(NamedTuple):
    """What else makes a score or a weight; arrays are empty where an option is not used."""

    scale: np.floating
    softcap: np.floating
    bias: np.ndarray
    bias_edge_step: int
    bias_head_step: int
    edge_attr: np.ndarray
    features: int
    seed: np.uint64
    drop_below: np.uint64  # draws of 53 bits below this drop a weight
    kept: np.floating  # factor of the other weights
    one: np.floating  # 1 in the dtype of the kernel


@njit(forceinline=True)
def _products(a, at, b, bt, dim, lanes):
    """A vector whose lanes sum to a[at : at + dim] · b[bt : bt + dim], dim a multiple of lanes."""
    products = load(a, at, literally(lanes)) * load(b, bt, lanes)
    for c in range(lanes, dim, lanes):
        products = products + load(a, at + c, lanes) * load(b, bt + c, lanes)
    return products


@njit(forceinline=True)
def _dots(scores, width, own, at, own_heads, rows, offsets, row_heads, count, heads, dim, lanes):
    """scores[e, h] = own[at, h] · rows[offsets[e], h] for a block of edges."""
    x, y = own_heads.step, row_heads.step
    if heads % 8 == 0 and dim % literally(lanes) == 0 and x == dim and y == dim:
        for e in range(count):
            for h in range(0, heads, 8):
                a = at + h * dim
                b = offsets[e] + h * dim
                eight = totals(
                    _products(own, a, rows, b, dim, lanes),
                    _products(own, a + dim, rows, b + dim, dim, lanes),
                    _products(own, a + 2 * dim, rows, b + 2 * dim, dim, lanes),
                    _products(own, a + 3 * dim, rows, b + 3 * dim, dim, lanes),
                    _products(own, a + 4 * dim, rows, b + 4 * dim, dim, lanes),
                    _products(own, a + 5 * dim, rows, b + 5 * dim, dim, lanes),
                    _products(own, a + 6 * dim, rows, b + 6 * dim, dim, lanes),
                    _products(own, a + 7 * dim, rows, b + 7 * dim, dim, lanes),
                )
                store(scores, e * width + h, eight)
    else:
        even = dim - dim % lanes
        for e in range(count):
            for h in range(heads):
                a = at + own_heads.start[h]
                b = offsets[e] + row_heads.start[h]
                score = own.dtype.type(0)
                if even > 0:
                    score = total(_products(own, a, rows, b, even, lanes))
                for c in range(even, dim):
                    score += own[a + c] * rows[b + c]
                scores[e * width + h] = score


@njit(forceinline=True)
def _sums(sums, at, sum_heads, weights, width, rows, offsets, row_heads, count, heads, dim, lanes):
    """sums[at, h] += Σ_e weights[e, h] · rows[offsets[e], h] for a block of edges."""
    even = dim - dim % literally(lanes)
    for h in range(heads):
        a = at + sum_heads.start[h]
        b = row_heads.start[h]
        for c in range(0, even, lanes):
            block = splat(weights[h], lanes) * load(rows, offsets[0] + b + c, lanes)
            for e in range(1, count):
                block = block + splat(weights[e * width + h], lanes) * load(rows, offsets[e] + b + c, lanes)
            store(sums, a + c, load(sums, a + c, lanes) + block)
        for c in range(even, dim):
            tail = weights[h] * rows[offsets[0] + b + c]
            for e in range(1, count):
                tail += weights[e * width + h] * rows[offsets[e] + b + c]
            sums[a + c] += tail


@njit(forceinline=True)
def _offsets(offsets, nodes, first, count, base, row):
    """Where the rows of the block's far nodes start, and those of the _AHEAD edges after it."""
    last = nodes.size - 1
    for e in range(count + _AHEAD):
        offsets[e] = (base + nodes[min(first + e, last)]) * row


@njit(forceinline=True)
def _ask(rows, offsets, count, row):
    """Prefetch the rows of the edges _AHEAD of the block's."""
    for e in range(_AHEAD, count + _AHEAD):
        for c in range(0, row, 64 // rows.itemsize):
            prefetch(rows, offsets[e] + c)


@njit(forceinline=True)
def _modify(scores, slopes, width, edge_id, first, count, heads, options):
    """Scale, cap and bias the scores of a block; slopes are those of the cap."""
    for e in range(count):
        at = edge_id[first + e] * options.bias_edge_step
        for h in range(heads):
            score = scores[e * width + h] * options.scale
            if options.softcap > 0:
                bent = math.tanh(score / options.softcap)
                slopes[e * width + h] = options.one - bent * bent
                score = options.softcap * bent
            if options.bias.size > 0:
                score += options.bias[at + h * options.bias_head_step]
            scores[e * width + h] = score


@njit(forceinline=True)
def _factor(options, number):
    """The dropout factor of the weight with this number (SplitMix64, as `reference.dropout_factors`)."""
    x = options.seed + np.uint64(number + 1) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(11)
    return options.kept if x >= options.drop_below else options.one - options.one


@njit(forceinline=True)
def _add_features(
    scores, width, own, at, own_heads, options, shared, edge_id, first, count, heads, offsets, extra
):
    """scores[e, h] += own[at, h] · edge_attr[e]."""
    for e in range(count):
        offsets[e] = edge_id[first + e] * np.int64(options.features)
    _dots(
        extra,
        width,
        own,
        at,
        own_heads,
        options.edge_attr,
        offsets,
        shared,
        count,
        heads,
        options.features,
        8,
    )
    for f in range(0, count * width, 8):
        store(scores, f, load(scores, f, 8) + load(extra, f, 8))


@functools.cache
def _forward_kernel(dim: int, lanes: int) -> Callable:
    """The kernel for rows of dim numbers a head, or for any number (dim 0)."""

    @njit(nogil=True, cache=True)
    def forward(
        b_start, b_stop, start, stop, rows, heads, own, far, far_value, own_value, shared, own_feature, options,
        query, key, value, edge_query, num_keys, key_row, value_row, key_dim, value_dim,
        out, peaks, norms, aggregate, logits,
    ):  # fmt: skip
        D = dim if dim > 0 else key_dim
        Dv = dim if dim > 0 else value_dim
        dtype = query.dtype
        one = splat(options.one, 8)
        zero = one - one
        lowest = splat(np.finfo(dtype).min, 8)
        tiny = splat(np.finfo(dtype).tiny, 8)
        num_rows = rows.pointer.size - 1
        num_edges = rows.other.size
        width = (heads + 7) // 8 * 8
        scores = np.zeros(BLOCK * width, dtype)
        extra = np.zeros(BLOCK * width, dtype)
        slopes = np.zeros(BLOCK * width, dtype)
        peak = np.zeros(width, dtype)
        norm = np.zeros(width, dtype)
        change = np.zeros(width, dtype)
        key_offsets = np.empty(BLOCK + _AHEAD, np.int64)
        value_offsets = np.empty(BLOCK + _AHEAD, np.int64)
        feature_offsets = np.empty(BLOCK, np.int64)
        modified = options.softcap > 0 or options.bias.size > 0
        F = options.features
        for b in range(b_start, b_stop):
            for s in range(start, stop):
                if s < num_rows:
                    i, begin, end = np.int64(s), rows.pointer[s], rows.pointer[s + 1]
                    if end - begin > PIECE:
                        continue
                else:
                    i, begin, end = rows.pieces[s - num_rows]
                single = end - begin <= BLOCK and s < num_rows
                at = b * (num_rows + rows.pieces.shape[0]) + s
                sums = at * heads * Dv
                for c in range(heads * Dv):
                    out[sums + c] = 0
                for c in range(heads * F):
                    aggregate[at * heads * F + c] = 0
                for h in range(0, width, 8):
                    store(peak, h, lowest)
                    store(norm, h, zero)
                for first in range(begin, end, BLOCK):
                    count = min(BLOCK, end - first)
                    _offsets(key_offsets, rows.other, first, count, b * num_keys, key_row)
                    _offsets(value_offsets, rows.other, first, count, b * num_keys, value_row)
                    _ask(key, key_offsets, count, key_row)
                    _ask(value, value_offsets, count, value_row)
                    place = (b * num_rows + i) * heads
                    _dots(scores, width, query, place * D, own, key, key_offsets, far, count, heads, D, lanes)
                    if F > 0:
                        _add_features(
                            scores, width, edge_query, place * F, own_feature, options, shared, rows.edge_id, first,
                            count, heads, feature_offsets, extra,
                        )  # fmt: skip
                    factor = splat(options.scale, 8)
                    if modified:
                        _modify(scores, slopes, width, rows.edge_id, first, count, heads, options)
                        factor = one
                    for h in range(0, width, 8):
                        old = load(peak, h, 8)
                        new = old
                        for e in range(count):
                            score = load(scores, e * width + h, 8) * factor
                            store(scores, e * width + h, score)
                            new = maximum(new, score)
                        if logits.size > 0:
                            for e in range(count):
                                to = (b * num_edges + rows.edge_id[first + e]) * heads
                                for k in range(h, min(h + 8, heads)):
                                    logits[to + k] = scores[e * width + k]
                        block = zero
                        for e in range(count):
                            p = exp(load(scores, e * width + h, 8) - new)
                            store(scores, e * width + h, p)
                            block = block + p
                        rescale = exp(old - new)
                        block = load(norm, h, 8) * rescale + block
                        store(peak, h, new)
                        store(norm, h, block)
                        store(change, h, rescale)
                        if single:
                            inverse = one / maximum(tiny, block)
                            for e in range(count):
                                store(scores, e * width + h, load(scores, e * width + h, 8) * inverse)
                    if first > begin:
                        for h in range(heads):
                            for c in range(Dv):
                                out[sums + h * Dv + c] *= change[h]
                            for c in range(F):
                                aggregate[(at * heads + h) * F + c] *= change[h]
                    if options.drop_below > 0:
                        for e in range(count):
                            number = (b * num_edges + rows.edge_id[first + e]) * heads
                            for h in range(heads):
                                scores[e * width + h] *= _factor(options, number + h)
                    _sums(
                        out, sums, own_value, scores, width, value, value_offsets, far_value, count, heads, Dv, lanes
                    )  # fmt: skip
                    if F > 0:
                        _sums(
                            aggregate, at * heads * F, own_feature, scores, width, options.edge_attr, feature_offsets,
                            shared, count, heads, F, 8,
                        )  # fmt: skip
                for h in range(heads):
                    peaks[at * heads + h] = peak[h]
                    norms[at * heads + h] = norm[h]
                if s < num_rows and not single:
                    for h in range(0, width, 8):
                        store(change, h, one / maximum(tiny, load(norm, h, 8)))
                    for h in range(heads):
                        for c in range(Dv):
                            out[sums + h * Dv + c] *= change[h]
                        for c in range(F):
                            aggregate[(at * heads + h) * F + c] *= change[h]

    return forward


@functools.cache
def _query_kernel(dim: int, lanes: int) -> Callable:
    @njit(nogil=True, cache=True)
    def backward_query(
        b_start, b_stop, start, stop, rows, heads, own, far, far_value, own_value, shared, own_feature, options,
        query, key, value, edge_query, num_keys, key_row, value_row, key_dim, value_dim,
        out, lse, aggregate, grad_out, grad_lse, grad_aggregate, grad_weights,
        stats, grad_query, grad_edge_query, grad_bias, grad_edge_attr, pairs,
    ):  # fmt: skip
        D = dim if dim > 0 else key_dim
        Dv = dim if dim > 0 else value_dim
        dtype = query.dtype
        one = splat(options.one, 8)
        scale = splat(options.scale, 8)
        num_rows = rows.pointer.size - 1
        num_edges = rows.other.size
        width = (heads + 7) // 8 * 8
        scores = np.zeros(BLOCK * width, dtype)
        slopes = np.ones(BLOCK * width, dtype)
        grads = np.zeros(BLOCK * width, dtype)
        kept = np.zeros(BLOCK * width, dtype)
        extra = np.zeros(BLOCK * width, dtype)
        stat = np.zeros(2 * width, dtype)  # of the row: lse, then δ
        key_offsets = np.empty(BLOCK + _AHEAD, np.int64)
        value_offsets = np.empty(BLOCK + _AHEAD, np.int64)
        feature_offsets = np.empty(BLOCK, np.int64)
        here = np.empty(1, np.int64)
        modified = options.softcap > 0 or options.bias.size > 0
        F = options.features
        for b in range(b_start, b_stop):
            for s in range(start, stop):
                if s < num_rows:
                    i, begin, end = np.int64(s), rows.pointer[s], rows.pointer[s + 1]
                else:
                    i, begin, end = rows.pieces[s - num_rows]
                place = (b * num_rows + i) * heads
                here[0] = place * Dv
                _dots(
                    scores, width, out, place * Dv, own_value, grad_out, here, own_value, 1, heads, Dv, lanes
                )  # fmt: skip
                if F > 0:
                    here[0] = place * F
                    _dots(
                        extra, width, aggregate, place * F, own_feature, grad_aggregate, here, own_feature, 1, heads, F,
                        8,
                    )  # fmt: skip
                for h in range(heads):
                    delta = scores[h] - grad_lse[place + h]
                    if F > 0:
                        delta += extra[h]
                    if lse[place + h] == -np.inf:  # no edge, or none that counts: weights and gradients 0
                        stat[h], stat[width + h] = np.inf, 0
                    else:
                        stat[h], stat[width + h] = lse[place + h], delta
                if s < num_rows:
                    for h in range(0, 2 * width, 8):
                        store(stats, (b * num_rows + i) * 2 * width + h, load(stat, h, 8))
                    if end - begin > PIECE:
                        continue
                at = b * (num_rows + rows.pieces.shape[0]) + s
                for c in range(heads * D):
                    grad_query[at * heads * D + c] = 0
                for c in range(heads * F):
                    grad_edge_query[at * heads * F + c] = 0
                for first in range(begin, end, BLOCK):
                    count = min(BLOCK, end - first)
                    _offsets(key_offsets, rows.other, first, count, b * num_keys, key_row)
                    _offsets(value_offsets, rows.other, first, count, b * num_keys, value_row)
                    _ask(key, key_offsets, count, key_row)
                    _ask(value, value_offsets, count, value_row)
                    _dots(scores, width, query, place * D, own, key, key_offsets, far, count, heads, D, lanes)
                    _dots(
                        grads, width, grad_out, place * Dv, own_value, value, value_offsets, far_value, count, heads,
                        Dv, lanes,
                    )  # fmt: skip
                    if F > 0:
                        _add_features(
                            scores, width, edge_query, place * F, own_feature, options, shared, rows.edge_id, first,
                            count, heads, feature_offsets, extra,
                        )  # fmt: skip
                        _add_features(
                            grads, width, grad_aggregate, place * F, own_feature, options, shared, rows.edge_id, first,
                            count, heads, feature_offsets, extra,
                        )  # fmt: skip
                    factor = scale
                    if modified:
                        _modify(scores, slopes, width, rows.edge_id, first, count, heads, options)
                        factor = one
                    for h in range(0, width, 8):
                        for e in range(count):
                            f = e * width + h
                            store(scores, f, exp(load(scores, f, 8) * factor - load(stat, h, 8)))
                    if options.drop_below > 0:
                        for e in range(count):
                            number = (b * num_edges + rows.edge_id[first + e]) * heads
                            for h in range(heads):
                                z = _factor(options, number + h)
                                kept[e * width + h] = scores[e * width + h] * z
                                grads[e * width + h] *= z
                    if grad_weights.size > 0:
                        for e in range(count):
                            number = (b * num_edges + rows.edge_id[first + e]) * heads
                            for h in range(heads):
                                grads[e * width + h] += grad_weights[number + h]
                    for h in range(0, width, 8):
                        for e in range(count):
                            f = e * width + h
                            store(
                                grads, f, load(scores, f, 8) * (load(grads, f, 8) - load(stat, width + h, 8))
                            )
                    if grad_bias.size > 0:
                        for e in range(count):
                            for h in range(heads):
                                grad_bias[rows.edge_id[first + e] * heads + h] += grads[e * width + h]
                    for f in range(0, count * width, 8):
                        store(grads, f, load(grads, f, 8) * load(slopes, f, 8) * scale)
                    _sums(
                        grad_query, at * heads * D, own, grads, width, key, key_offsets, far, count, heads, D, lanes
                    )  # fmt: skip
                    if F > 0:
                        _sums(
                            grad_edge_query, at * heads * F, own_feature, grads, width, options.edge_attr,
                            feature_offsets, shared, count, heads, F, 8,
                        )  # fmt: skip
                        weights = kept if options.drop_below > 0 else scores
                        for e in range(count):
                            edge = np.int64(rows.edge_id[first + e])
                            for h in range(heads):
                                pairs[edge * 2 * heads + h] = weights[e * width + h]
                                pairs[edge * 2 * heads + heads + h] = grads[e * width + h]
                                for c in range(F):
                                    grad_edge_attr[edge * F + c] += (
                                        grads[e * width + h] * edge_query[(place + h) * F + c]
                                        + weights[e * width + h] * grad_aggregate[(place + h) * F + c]
                                    )

    return backward_query


@functools.cache
def _key_kernel(dim: int, lanes: int) -> Callable:
    @njit(nogil=True, cache=True)
    def backward_key(
        b_start, b_stop, start, stop, rows, heads, own, far, far_value, own_value, options,
        query, key, value, num_queries, key_row, value_row, key_dim, value_dim,
        grad_out, grad_weights, stats, pairs, grad_key, grad_value,
    ):  # fmt: skip
        D = dim if dim > 0 else key_dim
        Dv = dim if dim > 0 else value_dim
        dtype = query.dtype
        one = splat(options.one, 8)
        scale = splat(options.scale, 8)
        num_rows = rows.pointer.size - 1
        num_edges = rows.other.size
        width = (heads + 7) // 8 * 8
        scores = np.zeros(BLOCK * width, dtype)
        slopes = np.ones(BLOCK * width, dtype)
        grads = np.zeros(BLOCK * width, dtype)
        query_offsets = np.empty(BLOCK + _AHEAD, np.int64)
        out_offsets = np.empty(BLOCK + _AHEAD, np.int64)
        stat_offsets = np.empty(BLOCK + _AHEAD, np.int64)
        modified = options.softcap > 0 or options.bias.size > 0
        for b in range(b_start, b_stop):
            for s in range(start, stop):
                if s < num_rows:
                    j, begin, end = np.int64(s), rows.pointer[s], rows.pointer[s + 1]
                    if end - begin > PIECE:
                        continue
                else:
                    j, begin, end = rows.pieces[s - num_rows]
                at = b * (num_rows + rows.pieces.shape[0]) + s
                for c in range(key_row):
                    grad_key[at * key_row + c] = 0
                for c in range(value_row):
                    grad_value[at * value_row + c] = 0
                place = b * num_rows + j
                for first in range(begin, end, BLOCK):
                    count = min(BLOCK, end - first)
                    _offsets(query_offsets, rows.other, first, count, b * num_queries, heads * D)
                    _offsets(out_offsets, rows.other, first, count, b * num_queries, heads * Dv)
                    _ask(query, query_offsets, count, heads * D)
                    _ask(grad_out, out_offsets, count, heads * Dv)
                    if pairs.size > 0:
                        for e in range(count):
                            edge = np.int64(rows.edge_id[first + e])
                            for h in range(heads):
                                scores[e * width + h] = pairs[edge * 2 * heads + h]
                                grads[e * width + h] = pairs[edge * 2 * heads + heads + h]
                    else:
                        _offsets(stat_offsets, rows.other, first, count, b * num_queries, 2 * width)
                        _ask(stats, stat_offsets, count, 2 * width)
                        _dots(
                            scores, width, key, place * key_row, own, query, query_offsets, far, count, heads, D, lanes
                        )  # fmt: skip
                        _dots(
                            grads, width, value, place * value_row, own_value, grad_out, out_offsets, far_value, count,
                            heads, Dv, lanes,
                        )  # fmt: skip
                        factor = scale
                        if modified:
                            _modify(scores, slopes, width, rows.edge_id, first, count, heads, options)
                            factor = one
                        for e in range(count):
                            for h in range(0, width, 8):
                                f = e * width + h
                                lse = load(stats, stat_offsets[e] + h, 8)
                                store(scores, f, exp(load(scores, f, 8) * factor - lse))
                        if options.drop_below > 0 or grad_weights.size > 0:
                            for e in range(count):
                                number = (b * num_edges + rows.edge_id[first + e]) * heads
                                for h in range(heads):
                                    grad = grads[e * width + h]
                                    if options.drop_below > 0:
                                        grad *= _factor(options, number + h)
                                    if grad_weights.size > 0:
                                        grad += grad_weights[number + h]
                                    grads[e * width + h] = grad
                        for e in range(count):
                            for h in range(0, width, 8):
                                f = e * width + h
                                delta = load(stats, stat_offsets[e] + width + h, 8)
                                grad = load(scores, f, 8) * (load(grads, f, 8) - delta)
                                store(grads, f, grad * load(slopes, f, 8) * scale)
                        if options.drop_below > 0:
                            for e in range(count):
                                number = (b * num_edges + rows.edge_id[first + e]) * heads
                                for h in range(heads):
                                    scores[e * width + h] *= _factor(options, number + h)
                    _sums(
                        grad_value, at * value_row, own_value, scores, width, grad_out, out_offsets, far_value,
                        count, heads, Dv, lanes,
                    )  # fmt: skip
                    _sums(
                        grad_key, at * key_row, own, grads, width, query, query_offsets, far, count, heads, D,
                        lanes,
                    )  # fmt: skip

    return backward_key


_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)  # a forked child has none of its parent's threads


def _run(kernel: Callable, jobs: Sequence[tuple[int, int, int, int]], *arguments) -> None:
    """Call the kernel on every job, on as many threads as PyTorch uses, this one among them."""
    global _pool
    kernel(*jobs[0], *arguments)  # compiles where it must, before other threads would wait for it
    remaining = iter(jobs[1:])  # taking the next job from it is one step under the interpreter lock

    def work() -> None:
        for job in remaining:
            kernel(*job, *arguments)

    others = min(torch.get_num_threads(), len(jobs)) - 1
    if others < 1:
        return work()
    if _pool is None or _pool._max_workers < others:
        _pool = ThreadPoolExecutor(others, thread_name_prefix="graphattn")
    helpers = [_pool.submit(work) for _ in range(others)]
    try:
        work()
    finally:
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def _jobs(rows: Rows, batch: int, work_per_edge: int) -> list[tuple[int, int, int, int]]:
    """Cut the work into ranges (leading index from, to; segment from, to) of about equal numbers of edges and rows."""
    num_rows, num_pieces = rows.pointer.size - 1, rows.pieces.shape[0]
    parts = _PARTS * torch.get_num_threads()
    if batch * (rows.other.size + num_rows) * work_per_edge < _SERIAL_WORK or parts == _PARTS:
        return [(0, batch, 0, num_rows + num_pieces)]
    if batch >= parts:
        cuts = np.linspace(0, batch, parts + 1).astype(int).tolist()
        return [(b, c, 0, num_rows + num_pieces) for b, c in itertools.pairwise(cuts)]
    parts = -(-parts // batch)
    by_edges = np.searchsorted(rows.pointer, np.linspace(0, rows.other.size, parts + 1)[1:-1])
    cuts = np.unique([0, *by_edges, *np.linspace(0, num_rows, parts + 1).astype(int)]).tolist()
    ranges = [*((s, s + 1) for s in range(num_rows, num_rows + num_pieces)), *itertools.pairwise(cuts)]
    return [(b, b + 1, start, stop) for b in range(batch) for start, stop in ranges]


def _rows(pointer: Tensor, other: Tensor, edge_id: Tensor) -> Rows:
    pointer, other, edge_id = pointer.numpy(), other.numpy(), edge_id.numpy()
    pieces = np.empty((0, 3), np.int64)
    if other.size > PIECE:
        pieces = [
            (row, first, min(first + PIECE, pointer[row + 1]))
            for row in np.flatnonzero(np.diff(pointer) > PIECE)
            for first in range(pointer[row], pointer[row + 1], PIECE)
        ]
        pieces = np.array(pieces, np.int64).reshape(-1, 3)
    return Rows(pointer, other, edge_id, pieces)


def _merge(rows: Rows, batch: int, sums: Sequence[np.ndarray], peak=None, norm=None) -> None:
    """Put the pieces of each long row together, in float64, in their order, and store the row.

    Arrays are [batch, rows and pieces, heads, ...]. With peak and norm the sums are of weights under a peak of their
    own: they are brought under the common one, and divided by the common norm.
    """
    if rows.pieces.shape[0] == 0:
        return
    num_rows = rows.pointer.size - 1
    long, starts = np.unique(rows.pieces[:, 0], return_index=True)
    if peak is not None:
        piece_peak = peak[:, num_rows:].astype(np.float64)
        top = np.maximum.reduceat(piece_peak, starts, axis=1)
        factor = np.exp(piece_peak - np.repeat(top, np.diff([*starts, rows.pieces.shape[0]]), axis=1))
        common = np.add.reduceat(norm[:, num_rows:] * factor, starts, axis=1)
        peak[:, long], norm[:, long] = top, common
    for x in sums:
        if x.size == 0:
            continue
        parts = x[:, num_rows:].astype(np.float64)
        if peak is None:
            x[:, long] = np.add.reduceat(parts, starts, axis=1)
        else:
            merged = np.add.reduceat(parts * factor[..., None], starts, axis=1)
            x[:, long] = merged / np.where(common == 0, 1, common)[..., None]


class _Call:
    """The arguments of an operator call as the kernels take them."""

    def __init__(
        self, query, key, value, rowptr, col, edge_id, colptr, row, edge_id_t,
        bias, edge_attr, edge_query, seed, scale, softcap, dropout_p, return_weights,
    ):  # fmt: skip
        self.wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        number = np.float64 if self.wide == torch.float64 else np.float32
        self.batch, self.num_queries, self.heads, self.dim = query.shape
        self.num_keys, self.kv_heads, self.value_dim = value.shape[1:]
        self.num_edges = col.numel()
        self.features = 0 if edge_attr is None else edge_attr.size(1)
        self.by_query = _rows(rowptr, col, edge_id)
        self.transposed = colptr, row, edge_id_t
        self.query, self.key, self.value = self.flat(query), self.flat(key), self.flat(value)
        self.edge_query = self.flat(edge_query)
        head = np.arange(self.heads)
        kv_head = head // (self.heads // self.kv_heads)

        def starts(of: np.ndarray, size: int) -> Heads:
            step = size if self.heads == self.kv_heads or of is head else -1
            return Heads(of * size, step)

        self.query_heads, self.key_heads = starts(head, self.dim), starts(kv_head, self.dim)
        self.out_heads, self.value_heads = starts(head, self.value_dim), starts(kv_head, self.value_dim)
        self.feature_heads, self.shared = starts(head, self.features), Heads(head * 0, -1)
        self.options = Options(
            number(scale),
            number(softcap),
            self.flat(bias),
            0 if bias is None or bias.size(0) == 1 else bias.size(1),
            0 if bias is None or bias.size(1) == 1 else 1,
            self.flat(edge_attr),
            self.features,
            np.uint64(0 if seed is None else seed.item()),
            np.uint64(int(dropout_p * 2**53)),
            number(1 / (1 - dropout_p) if dropout_p < 1 else 0),
            number(1),
        )
        fixed = self.dim if self.dim == self.value_dim and self.dim in _FIXED_DIMS else 0
        self.kernel = (fixed, min(fixed, 64) if fixed else 8)
        self.work_per_edge = self.heads * (self.dim + self.value_dim + self.features)

    def flat(self, x: Tensor | None) -> np.ndarray:
        if x is None:
            return np.empty(0, np.float64 if self.wide == torch.float64 else np.float32)
        return x.detach().to(self.wide).contiguous().numpy().reshape(-1)

    def rows_of(self, rows: Rows, *shape: int) -> tuple[Tensor, np.ndarray]:
        """Room for the rows and the pieces of long rows: as [batch, rows and pieces, ...] and flat."""
        room = torch.empty(self.batch, rows.pointer.size - 1 + rows.pieces.shape[0], *shape, dtype=self.wide)
        return room, room.numpy().reshape(-1)

    def whole(self, rows: Rows, room: Tensor) -> Tensor:
        """The rows without the pieces."""
        return room[:, : rows.pointer.size - 1].contiguous() if rows.pieces.shape[0] else room


def forward(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The body of ``graphattn::sparse_attention``."""
    call, return_weights = _Call(*inputs), inputs[-1]
    rows, H = call.by_query, call.heads
    out, flat_out = call.rows_of(rows, H, call.value_dim)
    peak, flat_peak = call.rows_of(rows, H)
    norm, flat_norm = call.rows_of(rows, H)
    aggregate, flat_aggregate = call.rows_of(rows, H, call.features)
    weights = torch.empty((call.batch, call.num_edges, H) if return_weights else 0, dtype=call.wide)
    if call.batch:
        _run(
            _forward_kernel(*call.kernel),
            _jobs(rows, call.batch, call.work_per_edge),
            rows, H, call.query_heads, call.key_heads, call.value_heads, call.out_heads, call.shared,
            call.feature_heads, call.options, call.query, call.key, call.value, call.edge_query,
            call.num_keys, call.kv_heads * call.dim, call.kv_heads * call.value_dim, call.dim, call.value_dim,
            flat_out, flat_peak, flat_norm, flat_aggregate, weights.numpy().reshape(-1),
        )  # fmt: skip
        _merge(rows, call.batch, (out.numpy(), aggregate.numpy()), peak.numpy(), norm.numpy())
    lse = call.whole(rows, norm.log_().add_(peak))
    if return_weights:
        number = torch.from_numpy(rows.edge_id).long()
        row = torch.empty_like(number)
        row[number] = torch.repeat_interleave(torch.from_numpy(np.diff(rows.pointer)))
        lse_of_row = torch.where(lse == -torch.inf, torch.inf, lse)
        weights.sub_(lse_of_row[:, row]).exp_()
    return call.whole(rows, out), lse, call.whole(rows, aggregate), weights


def backward(
    grad_out, grad_lse, grad_aggregate, grad_weights, out, lse, aggregate, weights, *inputs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The body of ``graphattn::sparse_attention_backward``."""
    call, return_weights = _Call(*inputs), inputs[-1]
    bias, edge_attr, edge_query = inputs[9:12]
    rows, columns, H = call.by_query, _rows(*call.transposed), call.heads
    if return_weights:
        # Through the weights, δ_i gains Σ_j p_ij dP_ij.
        row = torch.repeat_interleave(torch.from_numpy(np.diff(rows.pointer)))
        through = (weights * grad_weights).double()[:, torch.from_numpy(rows.edge_id).long()]
        through = through.new_zeros(call.batch, call.num_queries, H).index_add_(1, row, through)
        grad_lse = grad_lse - through.to(call.wide)
    grad_query, flat_grad_query = call.rows_of(rows, H, call.dim)
    grad_edge_query, flat_grad_edge_query = call.rows_of(rows, H, call.features)
    grad_key, flat_grad_key = call.rows_of(columns, call.kv_heads, call.dim)
    grad_value, flat_grad_value = call.rows_of(columns, call.kv_heads, call.value_dim)
    grad_bias = np.zeros(0 if bias is None else call.num_edges * H, call.query.dtype)
    grad_edge_attr = np.zeros(call.num_edges * call.features, call.query.dtype)
    pairs = np.empty(2 * call.num_edges * H if call.features else 0, call.query.dtype)
    stats = np.empty(call.batch * call.num_queries * 2 * (-(-H // 8) * 8), call.query.dtype)
    flat_grad_out, flat_grad_weights = call.flat(grad_out), call.flat(grad_weights)
    by_row = (
        rows, H, call.query_heads, call.key_heads, call.value_heads, call.out_heads, call.shared,
        call.feature_heads, call.options, call.query, call.key, call.value, call.edge_query,
        call.num_keys, call.kv_heads * call.dim, call.kv_heads * call.value_dim, call.dim, call.value_dim,
        call.flat(out), call.flat(lse), call.flat(aggregate), flat_grad_out, call.flat(grad_lse),
        call.flat(grad_aggregate), flat_grad_weights,
        stats, flat_grad_query, flat_grad_edge_query, grad_bias, grad_edge_attr, pairs,
    )  # fmt: skip
    by_column = (
        columns, H, call.key_heads, call.query_heads, call.out_heads, call.value_heads, call.options,
        call.query, call.key, call.value, call.num_queries, call.kv_heads * call.dim,
        call.kv_heads * call.value_dim, call.dim, call.value_dim,
        flat_grad_out, flat_grad_weights, stats, pairs, flat_grad_key, flat_grad_value,
    )  # fmt: skip
    # What is summed or kept per edge belongs to one leading index at a time.
    query_jobs = _jobs(rows, call.batch, call.work_per_edge)
    key_jobs = _jobs(columns, call.batch, call.work_per_edge)
    steps = [(query_jobs, key_jobs)]
    if call.batch > 1 and (bias is not None or call.features):
        query_jobs = _jobs(rows, 1, call.work_per_edge)
        key_jobs = _jobs(columns, 1, call.work_per_edge)
        steps = [
            ([(b, b + 1, *job[2:]) for job in query_jobs], [(b, b + 1, *job[2:]) for job in key_jobs])
            for b in range(call.batch)
        ]
    if call.batch:
        for query_jobs, key_jobs in steps:
            _run(_query_kernel(*call.kernel), query_jobs, *by_row)
            _run(_key_kernel(*call.kernel), key_jobs, *by_column)
        _merge(rows, call.batch, (grad_query.numpy(), grad_edge_query.numpy()))
        _merge(columns, call.batch, (grad_key.numpy(), grad_value.numpy()))

    def like(grad: Tensor, x: Tensor | None) -> Tensor:
        if x is None:
            return inputs[0].new_empty(0)
        return grad.sum_to_size(x.shape).to(x.dtype)

    return (
        call.whole(rows, grad_query).to(inputs[0].dtype),
        call.whole(columns, grad_key).to(inputs[1].dtype),
        call.whole(columns, grad_value).to(inputs[2].dtype),
        like(torch.from_numpy(grad_bias).view(-1, H), bias),
        like(torch.from_numpy(grad_edge_attr).view(-1, call.features), edge_attr)
        if call.features
        else like(torch.zeros(()), edge_attr),
        like(call.whole(rows, grad_edge_query), edge_query),
    )
