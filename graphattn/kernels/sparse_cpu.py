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

# pyright: reportCallIssue=false
# (an intrinsic of graphattn.kernels.vector takes the typing context first, its callers do not pass it)
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from numba.misc.special import literally
from torch import Tensor

from graphattn.kernels.vector import after, exp, load, maximum, pointer, prefetch, splat, store, total, totals

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


class Options(NamedTuple):
    """What else makes a score or a weight; arrays are empty where an option is not used."""

    scale: np.floating
    softcap: np.floating
    bias: np.ndarray
    bias_edge_step: int
    bias_head_step: int
    seed: np.uint64
    drop_below: np.uint64  # draws of 53 bits below this drop a weight
    kept: np.floating  # factor of the other weights
    one: np.floating  # 1 in the dtype of the kernel


_function = njit(error_model="numpy")
_inlined = njit(error_model="numpy", forceinline=True)


def _kernel(function: Callable) -> Callable:
    try:
        return njit(error_model="numpy", nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to cache in: a read-only installation without a home
        return njit(error_model="numpy", nogil=True)(function)


@_inlined
def _products(a, b, dim, lanes):
    """A vector whose lanes sum to the dot product of dim numbers, a multiple of lanes."""
    products = load(a, 0, literally(lanes)) * load(b, 0, lanes)
    for c in range(lanes, dim, lanes):
        products = products + load(a, c, lanes) * load(b, c, lanes)
    return products


@_function
def _dots(scores, width, own, own_heads, rows, offsets, row_heads, regular, count, heads, dim, lanes):
    """scores[e, h] = own[h] · rows[offsets[e], h] for a block of edges.

    Heads start at own_heads[h] and row_heads[h]; regular: both are h * dim.
    """
    if regular and heads % 8 == 0 and dim == literally(lanes):
        for e in range(count):
            for h in range(0, heads, 8):
                a = after(own, h * lanes)
                b = after(rows, offsets[e] + h * lanes)
                eight = totals(
                    load(a, 0, lanes) * load(b, 0, lanes),
                    load(a, lanes, lanes) * load(b, lanes, lanes),
                    load(a, 2 * lanes, lanes) * load(b, 2 * lanes, lanes),
                    load(a, 3 * lanes, lanes) * load(b, 3 * lanes, lanes),
                    load(a, 4 * lanes, lanes) * load(b, 4 * lanes, lanes),
                    load(a, 5 * lanes, lanes) * load(b, 5 * lanes, lanes),
                    load(a, 6 * lanes, lanes) * load(b, 6 * lanes, lanes),
                    load(a, 7 * lanes, lanes) * load(b, 7 * lanes, lanes),
                )
                store(scores, e * width + h, eight)
    else:
        even = dim - dim % lanes
        for e in range(count):
            for h in range(heads):
                a = after(own, own_heads[h])
                b = after(rows, offsets[e] + row_heads[h])
                if even > 0:
                    scores[e * width + h] = total(_products(a, b, even, lanes))
                else:
                    scores[e * width + h] = 0
                for c in range(even, dim):
                    scores[e * width + h] += a[c] * b[c]


@_function
def _sums(sums, sum_heads, weights, width, rows, offsets, row_heads, fresh, count, heads, dim, lanes):
    """sums[h] += Σ_e weights[e, h] · rows[offsets[e], h] for a block of edges; fresh: sums[h] = ..."""
    even = dim - dim % literally(lanes)
    done = 0
    if dim == lanes and lanes <= 16:  # four heads at a time: their sums fit the registers
        for h in range(0, heads - 3, 4):
            at = after(rows, offsets[0])
            a = splat(weights[h], lanes) * load(at, row_heads[h], lanes)
            b = splat(weights[h + 1], lanes) * load(at, row_heads[h + 1], lanes)
            c = splat(weights[h + 2], lanes) * load(at, row_heads[h + 2], lanes)
            d = splat(weights[h + 3], lanes) * load(at, row_heads[h + 3], lanes)
            for e in range(1, count):
                at = after(rows, offsets[e])
                weight = after(weights, e * width + h)
                a = a + splat(weight[0], lanes) * load(at, row_heads[h], lanes)
                b = b + splat(weight[1], lanes) * load(at, row_heads[h + 1], lanes)
                c = c + splat(weight[2], lanes) * load(at, row_heads[h + 2], lanes)
                d = d + splat(weight[3], lanes) * load(at, row_heads[h + 3], lanes)
            _put(sums, sum_heads[h], a, fresh, lanes)
            _put(sums, sum_heads[h + 1], b, fresh, lanes)
            _put(sums, sum_heads[h + 2], c, fresh, lanes)
            _put(sums, sum_heads[h + 3], d, fresh, lanes)
        done = heads - heads % 4
    for h in range(done, heads):
        to = after(sums, sum_heads[h])
        head = after(rows, row_heads[h])
        for c in range(0, even, lanes):
            block = splat(weights[h], lanes) * load(head, offsets[0] + c, lanes)
            for e in range(1, count):
                block = block + splat(weights[e * width + h], lanes) * load(head, offsets[e] + c, lanes)
            _put(to, c, block, fresh, lanes)
        for c in range(even, dim):
            tail = weights[h] * head[offsets[0] + c]
            for e in range(1, count):
                tail += weights[e * width + h] * head[offsets[e] + c]
            if fresh:
                to[c] = tail
            else:
                to[c] += tail


@_inlined
def _put(sums, at, block, fresh, lanes):
    if fresh:
        store(sums, at, block)
    else:
        store(sums, at, load(sums, at, literally(lanes)) + block)


@_inlined
def _find(offsets, nodes, count, base, size):
    """Where the rows of the block's far nodes start."""
    for e in range(count):
        offsets[e] = (base + nodes[e]) * size


@_inlined
def _ask(nodes, first, stop, base, rows, size, lines, line):
    """Ask for the rows, of so many cache lines, of the nodes of some edges ahead."""
    for e in range(first, stop):
        at = after(rows, (base + nodes[e]) * size)
        for c in range(lines):
            prefetch(at, c * line)


@_function
def _modify(
    scores, slopes, width, edge_id, count, heads, scale, softcap, one, bias, biased, edge_step, head_step
):  # fmt: skip
    """Scale, cap and bias the scores of a block; slopes are those of the cap."""
    for e in range(count):
        at = edge_id[e] * edge_step
        for h in range(heads):
            score = scores[e * width + h] * scale
            if softcap > 0:
                bent = math.tanh(score / softcap)
                slopes[e * width + h] = one - bent * bent
                score = softcap * bent
            if biased:
                score += bias[at + h * head_step]
            scores[e * width + h] = score


@_function
def _drop(weights, width, edge_id, base, count, heads, seed, below, kept):
    """Multiply the weights by their dropout factors (SplitMix64, as `reference.dropout_factors`)."""
    for e in range(count):
        number = (base + edge_id[e]) * heads
        for h in range(heads):
            x = seed + np.uint64(number + h + 1) * np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = (x ^ (x >> np.uint64(31))) >> np.uint64(11)
            weights[e * width + h] *= kept * (x >= below)


@_function
def _add_features(
    scores, width, own, own_heads, edge_attr, shared, edge_id, count, heads, dim, offsets, extra
):
    """scores[e, h] += own[h] · edge_attr[e]."""
    for e in range(count):
        offsets[e] = edge_id[e] * dim
    _dots(extra, width, own, own_heads, edge_attr, offsets, shared, False, count, heads, dim, 8)
    for f in range(0, count * width, 8):
        store(scores, f, load(scores, f, 8) + load(extra, f, 8))


@_function
def _scale_row(row, heads, dim, factors):
    for h in range(heads):
        for c in range(dim):
            row[h * dim + c] *= factors[h]


@_function
def _clear(row, size):
    for c in range(size):
        row[c] = 0


@functools.cache
def _forward_kernel(dim: int, lanes: int) -> Callable:
    """The kernel for dim numbers a head, or for any number (dim 0)."""

    @_kernel
    def forward(
        b_start, b_stop, start, stop, scratch, offsets, heads, row_pointer, others, edge_ids, pieces,
        scale, softcap, biases, bias_edge_step, bias_head_step, seed, drop_below, kept_factor, unit,
        starts, regular, num_keys, key_row, value_row, key_dim, value_dim, F,
        query_array, key_array, value_array, edge_attr_array, edge_query_array,
        out_array, peak_array, norm_array, aggregate_array, logits_array,
    ):  # fmt: skip
        D = dim if dim > 0 else key_dim
        Dv = dim if dim > 0 else value_dim
        dtype = query_array.dtype
        line = 64 // query_array.itemsize  # numbers in a cache line
        key_lines, value_lines = (key_row + line - 1) // line, (value_row + line - 1) // line
        one = splat(unit, 8)
        zero = one - one
        lowest = splat(np.finfo(dtype).min, 8)
        tiny = splat(np.finfo(dtype).tiny, 8)
        num_rows, num_pieces, num_edges = row_pointer.size - 1, pieces.shape[0], others.size
        width = (heads + 7) // 8 * 8
        scores = pointer(scratch)
        extra = after(scores, BLOCK * width)
        slopes = after(extra, BLOCK * width)
        peak = after(slopes, BLOCK * width)
        norm = after(peak, width)
        change = after(norm, width)
        key_offsets = pointer(offsets)
        value_offsets = after(key_offsets, BLOCK)
        feature_offsets = after(value_offsets, BLOCK)
        query, key, value = pointer(query_array), pointer(key_array), pointer(value_array)
        edge_attr, edge_query = pointer(edge_attr_array), pointer(edge_query_array)
        out, aggregate = pointer(out_array), pointer(aggregate_array)
        peaks, norms, logits = pointer(peak_array), pointer(norm_array), pointer(logits_array)
        other, edge_id, bias = pointer(others), pointer(edge_ids), pointer(biases)
        query_heads = pointer(starts)
        key_heads = after(query_heads, heads)
        out_heads = after(query_heads, 2 * heads)
        value_heads = after(query_heads, 3 * heads)
        feature_heads = after(query_heads, 4 * heads)
        shared = after(query_heads, 5 * heads)
        biased, keep_logits = biases.size > 0, logits_array.size > 0
        for b in range(b_start, b_stop):
            for s in range(start, stop):
                if s < num_rows:
                    i, begin, end = np.int64(s), row_pointer[s], row_pointer[s + 1]
                    if end - begin > PIECE:
                        continue
                else:
                    i, begin, end = pieces[s - num_rows]
                single = end - begin <= BLOCK and s < num_rows
                place = (b * num_rows + i) * heads
                at = (b * (num_rows + num_pieces) + s) * heads
                if begin == end:
                    _clear(after(out, at * Dv), heads * Dv)
                    _clear(after(aggregate, at * F), heads * F)
                for h in range(0, width, 8):
                    store(peak, h, lowest)
                    store(norm, h, zero)
                for first in range(begin, end, BLOCK):
                    count, fresh = min(BLOCK, end - first), first == begin
                    edges = after(edge_id, first)
                    nodes, base = after(other, first), b * num_keys
                    _find(key_offsets, nodes, count, base, key_row)
                    _find(value_offsets, nodes, count, base, value_row)
                    ask, last = first + _AHEAD, min(first + count + _AHEAD, num_edges)
                    _ask(other, ask, last, base, key, key_row, key_lines, line)
                    _ask(other, ask, last, base, value, value_row, value_lines, line)
                    _dots(
                        scores, width, after(query, place * D), query_heads, key, key_offsets, key_heads, regular,
                        count, heads, D, lanes,
                    )  # fmt: skip
                    if F > 0:
                        _add_features(
                            scores, width, after(edge_query, place * F), feature_heads, edge_attr, shared, edges,
                            count, heads, F, feature_offsets, extra,
                        )  # fmt: skip
                    factor = splat(scale, 8)
                    if biased or softcap > 0:
                        factor = one
                        _modify(
                            scores, slopes, width, edges, count, heads, scale, softcap, unit,
                            bias, biased, bias_edge_step, bias_head_step,
                        )  # fmt: skip
                    for h in range(0, width, 8):
                        old = load(peak, h, 8)
                        new = old
                        for e in range(count):
                            score = load(scores, e * width + h, 8) * factor
                            store(scores, e * width + h, score)
                            new = maximum(new, score)
                        if keep_logits:
                            for e in range(count):
                                to = (b * num_edges + edges[e]) * heads
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
                    if not fresh:
                        _scale_row(after(out, at * Dv), heads, Dv, change)
                        _scale_row(after(aggregate, at * F), heads, F, change)
                    if drop_below > 0:
                        _drop(
                            scores, width, edges, b * num_edges, count, heads, seed, drop_below,
                            kept_factor,
                        )  # fmt: skip
                    _sums(
                        after(out, at * Dv), out_heads, scores, width, value, value_offsets, value_heads, fresh,
                        count, heads, Dv, lanes,
                    )  # fmt: skip
                    if F > 0:
                        _sums(
                            after(aggregate, at * F), feature_heads, scores, width, edge_attr, feature_offsets, shared,
                            fresh, count, heads, F, 8,
                        )  # fmt: skip
                for h in range(heads):
                    peaks[at + h] = peak[h]
                    norms[at + h] = norm[h]
                if s < num_rows and not single:
                    for h in range(0, width, 8):
                        store(change, h, one / maximum(tiny, load(norm, h, 8)))
                    _scale_row(after(out, at * Dv), heads, Dv, change)
                    _scale_row(after(aggregate, at * F), heads, F, change)

    return forward


@functools.cache
def _query_kernel(dim: int, lanes: int) -> Callable:
    """The backward kernel over the edges of each query: its gradients and those of per-edge tensors."""

    @_kernel
    def backward_query(
        b_start, b_stop, start, stop, scratch, offsets, heads, row_pointer, others, edge_ids, pieces,
        scale, softcap, biases, bias_edge_step, bias_head_step, seed, drop_below, kept_factor, unit,
        starts, regular, num_keys, key_row, value_row, key_dim, value_dim, F,
        query_array, key_array, value_array, edge_attr_array, edge_query_array,
        out_array, lse_array, aggregate_array,
        grad_out_array, grad_lse_array, grad_aggregate_array, grad_weights_array,
        stats_array, grad_query_array, grad_edge_query_array, grad_bias_array, grad_edge_attr_array, pairs_array,
    ):  # fmt: skip
        D = dim if dim > 0 else key_dim
        Dv = dim if dim > 0 else value_dim
        line = 64 // query_array.itemsize  # numbers in a cache line
        key_lines, value_lines = (key_row + line - 1) // line, (value_row + line - 1) // line
        one = splat(unit, 8)
        scales = splat(scale, 8)
        num_rows, num_pieces, num_edges = row_pointer.size - 1, pieces.shape[0], others.size
        width = (heads + 7) // 8 * 8
        scores = pointer(scratch)
        grads = after(scores, BLOCK * width)
        slopes = after(grads, BLOCK * width)
        kept = after(slopes, BLOCK * width)
        extra = after(kept, BLOCK * width)
        stat = after(extra, BLOCK * width)  # of the row: lse, then δ
        key_offsets = pointer(offsets)
        value_offsets = after(key_offsets, BLOCK)
        feature_offsets = after(value_offsets, BLOCK)
        here = after(feature_offsets, BLOCK)
        query, key, value = pointer(query_array), pointer(key_array), pointer(value_array)
        edge_attr, edge_query = pointer(edge_attr_array), pointer(edge_query_array)
        out, lse, aggregate = pointer(out_array), pointer(lse_array), pointer(aggregate_array)
        grad_out, grad_lse = pointer(grad_out_array), pointer(grad_lse_array)
        grad_aggregate, grad_weights = pointer(grad_aggregate_array), pointer(grad_weights_array)
        stats, grad_query = pointer(stats_array), pointer(grad_query_array)
        grad_edge_query, grad_bias = pointer(grad_edge_query_array), pointer(grad_bias_array)
        grad_edge_attr, pairs = pointer(grad_edge_attr_array), pointer(pairs_array)
        other, edge_id, bias = pointer(others), pointer(edge_ids), pointer(biases)
        query_heads = pointer(starts)
        key_heads = after(query_heads, heads)
        out_heads = after(query_heads, 2 * heads)
        value_heads = after(query_heads, 3 * heads)
        feature_heads = after(query_heads, 4 * heads)
        shared = after(query_heads, 5 * heads)
        biased, through_weights = biases.size > 0, grad_weights_array.size > 0
        bias_trained, dropping = grad_bias_array.size > 0, drop_below > 0
        for b in range(b_start, b_stop):
            for s in range(start, stop):
                if s < num_rows:
                    i, begin, end = np.int64(s), row_pointer[s], row_pointer[s + 1]
                else:
                    i, begin, end = pieces[s - num_rows]
                place = (b * num_rows + i) * heads
                here[0] = 0
                _dots(
                    scores, width, after(out, place * Dv), out_heads, after(grad_out, place * Dv), here, out_heads,
                    True, 1, heads, Dv, lanes,
                )  # fmt: skip
                if F > 0:
                    _dots(
                        extra, width, after(aggregate, place * F), feature_heads, after(grad_aggregate, place * F),
                        here, feature_heads, False, 1, heads, F, 8,
                    )  # fmt: skip
                for h in range(heads):
                    delta = scores[h] - grad_lse[place + h]
                    if F > 0:
                        delta += extra[h]
                    if lse[place + h] == -np.inf:  # no edge, or none that counts: weights and gradients 0
                        stat[h] = np.inf
                        stat[width + h] = 0
                    else:
                        stat[h] = lse[place + h]
                        stat[width + h] = delta
                if s < num_rows:
                    for h in range(0, 2 * width, 8):
                        store(stats, (b * num_rows + i) * 2 * width + h, load(stat, h, 8))
                    if end - begin > PIECE:
                        continue
                at = (b * (num_rows + num_pieces) + s) * heads
                if begin == end:
                    _clear(after(grad_query, at * D), heads * D)
                    _clear(after(grad_edge_query, at * F), heads * F)
                for first in range(begin, end, BLOCK):
                    count, fresh = min(BLOCK, end - first), first == begin
                    edges = after(edge_id, first)
                    nodes, base = after(other, first), b * num_keys
                    _find(key_offsets, nodes, count, base, key_row)
                    _find(value_offsets, nodes, count, base, value_row)
                    ask, last = first + _AHEAD, min(first + count + _AHEAD, num_edges)
                    _ask(other, ask, last, base, key, key_row, key_lines, line)
                    _ask(other, ask, last, base, value, value_row, value_lines, line)
                    _dots(
                        scores, width, after(query, place * D), query_heads, key, key_offsets, key_heads, regular,
                        count, heads, D, lanes,
                    )  # fmt: skip
                    _dots(
                        grads, width, after(grad_out, place * Dv), out_heads, value, value_offsets, value_heads,
                        regular, count, heads, Dv, lanes,
                    )  # fmt: skip
                    if F > 0:
                        _add_features(
                            scores, width, after(edge_query, place * F), feature_heads, edge_attr, shared, edges,
                            count, heads, F, feature_offsets, extra,
                        )  # fmt: skip
                        _add_features(
                            grads, width, after(grad_aggregate, place * F), feature_heads, edge_attr, shared, edges,
                            count, heads, F, feature_offsets, extra,
                        )  # fmt: skip
                    factor = scales
                    if biased or softcap > 0:
                        factor = one
                        _modify(
                            scores, slopes, width, edges, count, heads, scale, softcap, unit,
                            bias, biased, bias_edge_step, bias_head_step,
                        )  # fmt: skip
                    for h in range(0, width, 8):
                        for e in range(count):
                            p = exp(load(scores, e * width + h, 8) * factor - load(stat, h, 8))
                            store(scores, e * width + h, p)
                            store(kept, e * width + h, p)
                    if dropping:
                        _drop(
                            grads, width, edges, b * num_edges, count, heads, seed, drop_below,
                            kept_factor,
                        )  # fmt: skip
                    if through_weights:
                        for e in range(count):
                            for h in range(heads):
                                grads[e * width + h] += grad_weights[(b * num_edges + edges[e]) * heads + h]
                    for h in range(0, width, 8):
                        for e in range(count):
                            f = e * width + h
                            store(
                                grads, f, load(scores, f, 8) * (load(grads, f, 8) - load(stat, width + h, 8))
                            )
                    if bias_trained:
                        for e in range(count):
                            for h in range(heads):
                                grad_bias[edges[e] * heads + h] += grads[e * width + h]
                    for f in range(0, count * width, 8):
                        store(grads, f, load(grads, f, 8) * load(slopes, f, 8) * scales)
                    _sums(
                        after(grad_query, at * D), query_heads, grads, width, key, key_offsets, key_heads, fresh,
                        count, heads, D, lanes,
                    )  # fmt: skip
                    if F > 0:
                        _sums(
                            after(grad_edge_query, at * F), feature_heads, grads, width, edge_attr, feature_offsets,
                            shared, fresh, count, heads, F, 8,
                        )  # fmt: skip
                        if dropping:
                            _drop(
                                kept, width, edges, b * num_edges, count, heads, seed, drop_below,
                                kept_factor,
                            )  # fmt: skip
                        _feature_grads(
                            grad_edge_attr, pairs, kept, grads, width, edges, count, heads, F,
                            after(edge_query, place * F), after(grad_aggregate, place * F),
                        )  # fmt: skip

    return backward_query


@_function
def _feature_grads(
    grad_edge_attr, pairs, kept, grads, width, edges, count, heads, dim, edge_query, grad_aggregate
):
    """d edge_attr of a block's edges; (z p, dS) of each edge and head are left for the pass by keys.

    Computing those again would gather two more rows of heads · features numbers an edge.
    """
    for e in range(count):
        edge = np.int64(edges[e])
        for h in range(heads):
            p = kept[e * width + h]
            grad = grads[e * width + h]
            pairs[edge * 2 * heads + h] = p
            pairs[edge * 2 * heads + heads + h] = grad
            for c in range(dim):
                grad_edge_attr[edge * dim + c] += (
                    grad * edge_query[h * dim + c] + p * grad_aggregate[h * dim + c]
                )


@functools.cache
def _key_kernel(dim: int, lanes: int) -> Callable:
    """The backward kernel over the edges of each key: the gradients of keys and values."""

    @_kernel
    def backward_key(
        b_start, b_stop, start, stop, scratch, offsets, heads, row_pointer, others, edge_ids, pieces,
        scale, softcap, biases, bias_edge_step, bias_head_step, seed, drop_below, kept_factor, unit,
        starts, regular, num_queries, key_row, value_row,
        key_dim, value_dim, query_array, key_array, value_array, grad_out_array, grad_weights_array,
        stats_array, pairs_array, grad_key_array, grad_value_array,
    ):  # fmt: skip
        D = dim if dim > 0 else key_dim
        Dv = dim if dim > 0 else value_dim
        line = 64 // query_array.itemsize  # numbers in a cache line
        one = splat(unit, 8)
        scales = splat(scale, 8)
        num_rows, num_pieces, num_edges = row_pointer.size - 1, pieces.shape[0], others.size
        width = (heads + 7) // 8 * 8
        query_lines, out_lines = (heads * D + line - 1) // line, (heads * Dv + line - 1) // line
        stat_lines = (2 * width + line - 1) // line
        scores = pointer(scratch)
        grads = after(scores, BLOCK * width)
        slopes = after(grads, BLOCK * width)
        query_offsets = pointer(offsets)
        out_offsets = after(query_offsets, BLOCK)
        stat_offsets = after(out_offsets, BLOCK)
        query, key, value = pointer(query_array), pointer(key_array), pointer(value_array)
        grad_out, grad_weights = pointer(grad_out_array), pointer(grad_weights_array)
        stats, pairs = pointer(stats_array), pointer(pairs_array)
        grad_key, grad_value = pointer(grad_key_array), pointer(grad_value_array)
        other, edge_id, bias = pointer(others), pointer(edge_ids), pointer(biases)
        query_heads = pointer(starts)
        key_heads = after(query_heads, heads)
        out_heads = after(query_heads, 2 * heads)
        value_heads = after(query_heads, 3 * heads)
        biased, through_weights = biases.size > 0, grad_weights_array.size > 0
        stored, dropping = pairs_array.size > 0, drop_below > 0
        for b in range(b_start, b_stop):
            for s in range(start, stop):
                if s < num_rows:
                    j, begin, end = np.int64(s), row_pointer[s], row_pointer[s + 1]
                    if end - begin > PIECE:
                        continue
                else:
                    j, begin, end = pieces[s - num_rows]
                at = b * (num_rows + num_pieces) + s
                place = b * num_rows + j
                if begin == end or not regular:
                    _clear(after(grad_key, at * key_row), key_row)
                    _clear(after(grad_value, at * value_row), value_row)
                for first in range(begin, end, BLOCK):
                    count, fresh = min(BLOCK, end - first), first == begin and regular
                    edges = after(edge_id, first)
                    nodes, base = after(other, first), b * num_queries
                    _find(query_offsets, nodes, count, base, heads * D)
                    _find(out_offsets, nodes, count, base, heads * Dv)
                    ask, last = first + _AHEAD, min(first + count + _AHEAD, num_edges)
                    _ask(other, ask, last, base, query, heads * D, query_lines, line)
                    _ask(other, ask, last, base, grad_out, heads * Dv, out_lines, line)
                    if stored:
                        for e in range(count):
                            pair = after(pairs, edges[e] * 2 * heads)
                            for h in range(heads):
                                scores[e * width + h] = pair[h]
                                grads[e * width + h] = pair[heads + h]
                    else:
                        _find(stat_offsets, nodes, count, base, 2 * width)
                        _ask(other, ask, last, base, stats, 2 * width, stat_lines, line)
                        _dots(
                            scores, width, after(key, place * key_row), key_heads, query, query_offsets, query_heads,
                            regular, count, heads, D, lanes,
                        )  # fmt: skip
                        _dots(
                            grads, width, after(value, place * value_row), value_heads, grad_out, out_offsets,
                            out_heads, regular, count, heads, Dv, lanes,
                        )  # fmt: skip
                        factor = scales
                        if biased or softcap > 0:
                            factor = one
                            _modify(
                                scores, slopes, width, edges, count, heads, scale, softcap,
                                unit, bias, biased, bias_edge_step, bias_head_step,
                            )  # fmt: skip
                        if dropping:
                            _drop(
                                grads, width, edges, b * num_edges, count, heads, seed, drop_below,
                                kept_factor,
                            )  # fmt: skip
                        if through_weights:
                            for e in range(count):
                                for h in range(heads):
                                    grads[e * width + h] += grad_weights[
                                        (b * num_edges + edges[e]) * heads + h
                                    ]
                        for e in range(count):
                            stat = after(stats, stat_offsets[e])
                            for h in range(0, width, 8):
                                f = e * width + h
                                p = exp(load(scores, f, 8) * factor - load(stat, h, 8))
                                grad = p * (load(grads, f, 8) - load(stat, width + h, 8))
                                store(scores, f, p)
                                store(grads, f, grad * load(slopes, f, 8) * scales)
                        if dropping:
                            _drop(
                                scores, width, edges, b * num_edges, count, heads, seed, drop_below,
                                kept_factor,
                            )  # fmt: skip
                    _sums(
                        after(grad_value, at * value_row), value_heads, scores, width, grad_out, out_offsets,
                        out_heads, fresh, count, heads, Dv, lanes,
                    )  # fmt: skip
                    _sums(
                        after(grad_key, at * key_row), key_heads, grads, width, query, query_offsets, query_heads,
                        fresh, count, heads, D, lanes,
                    )  # fmt: skip

    return backward_key


_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)  # a forked child has none of its parent's threads


def _run(
    kernel: Callable,
    jobs: Sequence[tuple[int, int, int, int]],
    rows: Rows,
    options: Options,
    heads: int,
    *arguments,
) -> None:
    """Call the kernel on every job, on as many threads as PyTorch uses, this one among them."""
    global _pool
    remaining = iter(jobs)  # taking the next job from it is one step under the interpreter lock

    def work() -> None:
        # Not allocated in the kernel: Numba frees an array that only its address is used of.
        scratch = np.ones((5 * BLOCK + 3) * (-(-heads // 8) * 8), options.scale.dtype)
        offsets = np.empty(3 * BLOCK + 1, np.int64)
        for job in remaining:
            kernel(*job, scratch, offsets, heads, *rows, *options, *arguments)

    others = min(torch.get_num_threads(), len(jobs)) - 1
    if others < 1:
        work()
        return
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


def _rows(rowptr: Tensor, col: Tensor, edge_id: Tensor) -> Rows:
    pointer, other = rowptr.numpy(), col.numpy()
    long = np.flatnonzero(np.diff(pointer) > PIECE) if other.size > PIECE else ()
    pieces = [
        (row, first, min(first + PIECE, pointer[row + 1]))
        for row in long
        for first in range(pointer[row], pointer[row + 1], PIECE)
    ]
    return Rows(pointer, other, edge_id.numpy(), np.array(pieces, np.int64).reshape(-1, 3))


@np.errstate(all="ignore")  # an infinite score makes NaN, as in any softmax
def _merge_weighted(rows: Rows, peak: np.ndarray, norm: np.ndarray, sums: Sequence[np.ndarray]) -> None:
    """Put the pieces of each long row together, in their order, in float64, and store the row.

    Arrays are [batch, rows and pieces, heads, ...]. Every piece has its sums of weights under a peak of its own: they
    are brought under the common peak and divided by the common norm.
    """
    if rows.pieces.shape[0] == 0:
        return
    long, starts, counts = np.unique(rows.pieces[:, 0], return_index=True, return_counts=True)
    first = rows.pointer.size - 1
    peaks = peak[:, first:].astype(np.float64)
    top = np.maximum.reduceat(peaks, starts, axis=1)
    factor = np.exp(peaks - np.repeat(top, counts, axis=1))
    common = np.add.reduceat(norm[:, first:] * factor, starts, axis=1)
    peak[:, long], norm[:, long] = top, common
    for x in sums:
        merged = np.add.reduceat(x[:, first:] * factor[..., None], starts, axis=1)
        x[:, long] = merged / np.where(common == 0, 1, common)[..., None]


def _merge(rows: Rows, sums: Sequence[np.ndarray]) -> None:
    """The same for plain sums."""
    if rows.pieces.shape[0] == 0:
        return
    long, starts = np.unique(rows.pieces[:, 0], return_index=True)
    for x in sums:
        x[:, long] = np.add.reduceat(x[:, rows.pointer.size - 1 :].astype(np.float64), starts, axis=1)


@functools.cache
def _starts(heads: int, kv_heads: int, dim: int, value_dim: int, features: int) -> np.ndarray:
    """Where each head starts in the row of a node: of query, key, out, value, edge_query, and the shared edge_attr."""
    head = np.arange(heads)
    kv_head = head // (heads // kv_heads)
    return np.stack(
        [head * dim, kv_head * dim, head * value_dim, kv_head * value_dim, head * features, head * 0]
    )


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
        self.edge_attr = self.flat(edge_attr)
        self.options = Options(
            number(scale),
            number(softcap),
            self.flat(bias),
            0 if bias is None or bias.size(0) == 1 else bias.size(1),
            0 if bias is None or bias.size(1) == 1 else 1,
            np.uint64(0 if seed is None else seed.item()),
            np.uint64(int(dropout_p * 2**53)),
            number(1 / (1 - dropout_p) if dropout_p < 1 else 0),
            number(1),
        )
        starts = _starts(self.heads, self.kv_heads, self.dim, self.value_dim, self.features)
        self.shape = (self.options, self.heads, starts, self.heads == self.kv_heads)
        self.rows_sizes = (self.kv_heads * self.dim, self.kv_heads * self.value_dim, self.dim, self.value_dim)
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
            rows, *call.shape, call.num_keys, *call.rows_sizes, call.features,
            call.query, call.key, call.value, call.edge_attr, call.edge_query,
            flat_out, flat_peak, flat_norm, flat_aggregate, weights.numpy().reshape(-1),
        )  # fmt: skip
        _merge_weighted(rows, peak.numpy(), norm.numpy(), (out.numpy(), aggregate.numpy()))
    peak, norm = call.whole(rows, peak), call.whole(rows, norm)
    if return_weights:
        # exp(s - peak) / norm: s - lse would lose the digits that a large lse has no room for.
        number = torch.from_numpy(rows.edge_id).long()
        row = torch.empty_like(number)
        row[number] = torch.repeat_interleave(torch.from_numpy(np.diff(rows.pointer)))
        weights.sub_(peak[:, row]).exp_().div_(norm.clamp_min(torch.finfo(call.wide).tiny)[:, row])
    # NumPy: PyTorch's own threads hang in a child that was forked after they ran.
    with np.errstate(all="ignore"):  # log 0 = -inf: a query without edges
        lse = torch.from_numpy(np.log(norm.numpy()) + peak.numpy())
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
    grad_bias = np.zeros((0 if bias is None else call.num_edges, H), call.query.dtype)
    grad_edge_attr = np.zeros((call.num_edges, call.features), call.query.dtype)
    pairs = np.empty(2 * call.num_edges * H if call.features else 0, call.query.dtype)
    stats = np.empty(call.batch * call.num_queries * 2 * (-(-H // 8) * 8), call.query.dtype)
    flat_grad_out, flat_grad_weights = call.flat(grad_out), call.flat(grad_weights)
    by_row = (
        rows, *call.shape, call.num_keys, *call.rows_sizes, call.features,
        call.query, call.key, call.value, call.edge_attr, call.edge_query,
        call.flat(out), call.flat(lse), call.flat(aggregate), flat_grad_out, call.flat(grad_lse),
        call.flat(grad_aggregate), flat_grad_weights,
        stats, flat_grad_query, flat_grad_edge_query, grad_bias.reshape(-1), grad_edge_attr.reshape(-1), pairs,
    )  # fmt: skip
    by_column = (
        columns, *call.shape, call.num_queries, *call.rows_sizes, call.query, call.key, call.value,
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
        _merge(rows, (grad_query.numpy(), grad_edge_query.numpy()))
        _merge(columns, (grad_key.numpy(), grad_value.numpy()))

    def like(grad: Tensor, x: Tensor | None) -> Tensor:
        if x is None:
            return inputs[0].new_empty(0)
        return grad.sum_to_size(x.shape).to(x.dtype)

    return (
        call.whole(rows, grad_query).to(inputs[0].dtype),
        call.whole(columns, grad_key).to(inputs[1].dtype),
        call.whole(columns, grad_value).to(inputs[2].dtype),
        like(torch.from_numpy(grad_bias), bias),
        like(torch.from_numpy(grad_edge_attr), edge_attr),
        like(call.whole(rows, grad_edge_query), edge_query),
    )
