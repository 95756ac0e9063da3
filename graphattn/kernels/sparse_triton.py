"""Attention on listed edges on the GPU: Triton kernels and the calls that launch them.

The rows of a pass are queries (forward, and the backward pass that gives the gradients of queries) or keys (the pass
that gives those of keys and values). A plan cuts long rows into pieces; a segment is a row or a piece of one. A program
walks ``ROWS`` segments side by side, ``EDGES`` edges of each at a time, for some of the heads: it gathers the far ends
of the edges as a tile [ROWS, EDGES, heads, dims]. Every place [row, edge] of the tile keeps a softmax and sums of its
own, so that threads exchange nothing but parts of q·k until the end, when the places of a row are put together:

    m' = max(m, s),   l' = l exp(m - m') + exp(s - m'),   o' = o exp(m - m') + z exp(s - m') v        for each edge
    M = max m,   out = Σ o exp(m - M) / Σ l exp(m - M),   lse = M + log Σ l exp(m - M)                for each row

Pieces leave (M, Σ l, Σ o) in a workspace and a second kernel puts them together in the same way, in their order.

Backward, with δ_i = dO_i·O_i - dlse_i + Σ_j p_ij dP_ij for a gradient dP of the weights, and dropout factors z:

    dV_j = Σ_i z p dO_i,    dS = p (z dO_i·v_j + dP - δ_i),    dQ_i = scale Σ_j dS k_j,    dK_j = scale Σ_i dS q_i

Weights are computed again from lse (Dao et al. 2022, FlashAttention) and its low digits. Edge features e with their
projection W enter as (W q)·e in the scores, (W dO)·e in dP and (Σ e) W in the sums; the pass by query then leaves the
pair (z p, dS) of each edge and head for the pass by key. Every sum has one order, fixed by shapes: no atomics.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
# (a kernel is read by Triton, whose types are not Python's)
import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_MOST = 8192  # numbers of one head and row in a tile
_WARPS = 4

# What changes from graph to graph is not compiled in.
_SIZES = (
    "num_segments", "num_slots", "num_long", "num_rows", "num_far", "num_edges", "first_batch", "bias_edge_step",
    "bias_head_step", "drop_below", "scale", "softcap", "kept", "count", "chunk", "stride_in", "stride_out", "blocks",
)  # fmt: skip
_kernel = triton.jit(do_not_specialize=_SIZES)


@triton.jit
def _number(bits, W: tl.constexpr):
    """A float64 argument, which comes as its bits: Triton passes Python's numbers as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(W)


@triton.jit
def _segments(segments, num_segments, block, ROWS: tl.constexpr):
    """Row (-1: none), first edge, number of edges and place in the workspace (-1: none) of a program's segments."""
    s = block * ROWS + tl.arange(0, ROWS)
    real = s < num_segments
    at = segments + s.to(tl.int64) * 4
    row, first = tl.load(at, real, -1).to(tl.int64), tl.load(at + 1, real, 0).to(tl.int64)
    return row, first, tl.load(at + 2, real, 0), tl.load(at + 3, real, -1).to(tl.int64)


@triton.jit
def _tile(
    x, at, real, h, few: tl.constexpr, H: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, W: tl.constexpr
):
    """x[at, h] for x [.., few, D], as [ROWS, EDGES, heads, PAD] numbers of type W, 0 where not real or h >= H."""
    d = tl.arange(0, PAD)[None, None, None, :]
    mask = real[:, :, None, None] & (h < H)[None, None, :, None]
    if D < PAD:
        mask = mask & (d < D)
    head = h // (H // few)
    start = x + (at * (few * D))[:, :, None, None]
    return tl.load(start + (head[None, None, :, None] * D + d), mask, 0.0).to(W)


@triton.jit
def _numbers(x, at, real, h, H: tl.constexpr, W: tl.constexpr):
    """x[at, h] for x [.., H], as [ROWS, EDGES, heads] numbers of type W, 0 where not real or h >= H."""
    mask = real[:, :, None] & (h < H)[None, None, :]
    return tl.load(x + (at * H)[:, :, None] + h[None, None, :], mask, 0.0).to(W)


@triton.jit
def _put_numbers(x, at, real, h, H: tl.constexpr, value):
    """x[at, h] = value for x [.., H] and value [ROWS, EDGES, heads], where real."""
    mask = real[:, :, None] & (h < H)[None, None, :]
    tl.store(x + (at * H)[:, :, None] + h[None, None, :], value, mask)


@triton.jit
def _put(x, at, real, h, H: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, value):
    """x[at, h] = value for x [.., H, D] and value [ROWS, heads, PAD], where real."""
    d = tl.arange(0, PAD)[None, None, :]
    mask = real[:, None, None] & (h < H)[None, :, None] & (d < D)
    tl.store(x + (at * (H * D))[:, None, None] + (h[None, :, None] * D + d), value, mask)


@triton.jit
def _tanh(x):
    """Exact to a few units in the last place, also near 0, where 1 - 2 / (exp(2x) + 1) is not (Lambert's fraction)."""
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(size, 64.0)) + 1.0)
    y = tl.minimum(size, 0.5)
    y = y * y
    near = 1.0 + y / (
        3.0 + y / (5.0 + y / (7.0 + y / (9.0 + y / (11.0 + y / (13.0 + y / (15.0 + y / 17.0))))))
    )
    near = x / near
    far = tl.where(x < 0, -far, far)
    return tl.where(size < 0.5, near, tl.where(x == x, far, x))


@triton.jit
def _modified(
    score, bias, edge, real, h, bias_edge_step, bias_head_step, scale, softcap, H: tl.constexpr, CAP: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """The scores after scale, soft cap and bias, and their derivative by q·k."""
    score = score * scale
    slope = scale
    if CAP:
        bent = _tanh(score / softcap)
        slope = scale * (1.0 - bent * bent)
        score = softcap * bent
    if bias is not None:
        at = edge[:, :, None] * bias_edge_step + (h * bias_head_step)[None, None, :]
        score += tl.load(bias + at, real[:, :, None] & (h < H)[None, None, :], 0.0).to(W)
    return score, slope


@triton.jit
def _factors(seed, edge, h, b, num_edges, kept, drop_below, H: tl.constexpr):
    """The dropout factors [ROWS, EDGES, heads] (SplitMix64, as `reference.dropout_factors`)."""
    number = ((b * num_edges + edge) * H)[:, :, None] + (h + 1)[None, None, :]
    x = tl.load(seed).to(tl.uint64, bitcast=True) + number.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = (x ^ (x >> 31)) >> 11
    return tl.where(x.to(tl.int64) >= drop_below, kept, 0.0)


@triton.jit
def _put_softmax(
    peak, norm, sums, features, place, slot, row, h, out, lse, lse_low, aggregate, work_peak, work_norm, work_out,
    work_aggregate, H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr,
):  # fmt: skip
    """Put the places of each row together, and store the row, or the piece of one."""
    whole, piece = (row >= 0) & (slot < 0), slot >= 0
    top = tl.max(peak, 1)
    factor = tl.exp(peak - top[:, None, :])
    total = tl.sum(norm * factor, 1)
    empty = total == 0
    divisor = tl.where(empty | piece[:, None], 1.0, total)
    logarithm = tl.log(tl.where(empty, 1.0, total))
    full = top + logarithm
    low = tl.where(empty, 0.0, (top - full) + logarithm)
    full = tl.where(empty, -float("inf"), full)
    _put_numbers(lse, place[:, None], whole[:, None], h, H, full[:, None, :])
    _put_numbers(lse_low, place[:, None], whole[:, None], h, H, low[:, None, :])
    if work_peak is not None:
        _put_numbers(work_peak, slot[:, None], piece[:, None], h, H, top[:, None, :])
        _put_numbers(work_norm, slot[:, None], piece[:, None], h, H, total[:, None, :])
    if DV > 0:
        rows = tl.sum(sums * factor[:, :, :, None], 1) / divisor[:, :, None]
        _put(out, place, whole, h, H, DV, DVP, rows)
        if work_peak is not None:
            _put(work_out, slot, piece, h, H, DV, DVP, rows)
    if F > 0:
        rows = tl.sum(features * factor[:, :, :, None], 1) / divisor[:, :, None]
        _put(aggregate, place, whole, h, H, F, FP, rows)
        if work_peak is not None:
            _put(work_aggregate, slot, piece, h, H, F, FP, rows)


@_kernel
def _forward_kernel(
    segments, col, edge_id, query, key, value, bias, edge_query, edge_attr, seed, out, lse, lse_low, aggregate, logits,
    work_peak, work_norm, work_out, work_aggregate, num_segments, num_slots, num_rows, num_far, num_edges,
    bias_edge_step, bias_head_step, scale, softcap, kept, drop_below, blocks,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, CAP: tl.constexpr,
    W: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """The output, lse and aggregate of the rows of a program."""
    b = (tl.program_id(0) // blocks).to(tl.int64)
    row, first, count, slot = _segments(segments, num_segments, tl.program_id(0) % blocks, ROWS)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    scale, softcap, kept = _number(scale, W), _number(softcap, W), _number(kept, W)
    place, own = b * num_rows + row, (row >= 0)[:, None]
    q = _tile(query, place[:, None], own, h, H, H, D, DP, W)
    if F > 0:
        eq = _tile(edge_query, place[:, None], own, h, H, H, F, FP, W)
    peak = tl.full([ROWS, EDGES, HEADS], LOWEST, W)
    norm = tl.zeros([ROWS, EDGES, HEADS], W)
    sums = tl.zeros([ROWS, EDGES, HEADS, DVP], W)
    features = tl.zeros([ROWS, EDGES, HEADS, FP], W)
    e = tl.arange(0, EDGES)[None, :]
    real = e < count[:, None]
    node = tl.load(col + (first[:, None] + e), real, 0)
    for start in range(0, tl.max(count, 0), EDGES):
        far, t = b * num_far + node, first[:, None] + (start + e)
        k = _tile(key, far, real, h, KV, H, D, DP, W)
        if DV > 0:
            v = _tile(value, far, real, h, KV, H, DV, DVP, W)
        edge = t
        if edge_id is not None:
            edge = tl.load(edge_id + t, real, 0).to(tl.int64)
        ahead = start + EDGES + e < count[:, None]
        node = tl.load(col + (t + EDGES), ahead, 0)  # of the next turn, whose gather waits for it
        s = tl.sum(q * k, 3)
        if F > 0:
            x = _tile(edge_attr, edge, real, tl.arange(0, 1), 1, 1, F, FP, W)
            s += tl.sum(eq * x, 3)
        s, _ = _modified(s, bias, edge, real, h, bias_edge_step, bias_head_step, scale, softcap, H, CAP, W)
        if logits is not None:
            _put_numbers(logits, b * num_edges + edge, real, h, H, s)
        s = tl.where(real[:, :, None], s, -float("inf"))
        higher = tl.maximum(peak, s)
        shrink, p = tl.exp(peak - higher), tl.exp(s - higher)
        peak, norm = higher, norm * shrink + p
        if seed is not None:
            p = p * _factors(seed, edge, h, b, num_edges, kept, drop_below, H)
        if DV > 0:
            sums = sums * shrink[:, :, :, None] + p[:, :, :, None] * v
        if F > 0:
            features = features * shrink[:, :, :, None] + p[:, :, :, None] * x
        real = ahead
    slot = tl.where(slot >= 0, b * num_slots + slot, -1)
    _put_softmax(
        peak, norm, sums, features, place, slot, row, h, out, lse, lse_low, aggregate, work_peak, work_norm, work_out,
        work_aggregate, H, DV, DVP, F, FP,
    )  # fmt: skip


@_kernel
def _merge_softmax_kernel(
    long, out, lse, lse_low, aggregate, work_peak, work_norm, work_out, work_aggregate, num_slots, num_rows, num_long,
    H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, HEADS: tl.constexpr,
    EDGES: tl.constexpr, W: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """The output, lse and aggregate of one long row, from its pieces."""
    b = (tl.program_id(0) // num_long).to(tl.int64)
    one = tl.arange(0, 1)
    row, first, count, _ = _segments(long, num_long, tl.program_id(0) % num_long, 1)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    peak = tl.full([1, EDGES, HEADS], LOWEST, W)
    norm = tl.zeros([1, EDGES, HEADS], W)
    sums = tl.zeros([1, EDGES, HEADS, DVP], W)
    features = tl.zeros([1, EDGES, HEADS, FP], W)
    e = tl.arange(0, EDGES)[None, :]
    for start in range(0, tl.max(count, 0), EDGES):
        real = start + e < count[:, None]
        at = b * num_slots + first[:, None] + (start + e)
        top = _numbers(work_peak, at, real, h, H, W)
        total = _numbers(work_norm, at, real, h, H, W)
        top = tl.where(real[:, :, None], top, LOWEST)
        higher = tl.maximum(peak, top)
        shrink, p = tl.exp(peak - higher), tl.exp(top - higher)
        peak, norm = higher, norm * shrink + total * p
        if DV > 0:
            v = _tile(work_out, at, real, h, H, H, DV, DVP, W)
            sums = sums * shrink[:, :, :, None] + p[:, :, :, None] * v
        if F > 0:
            x = _tile(work_aggregate, at, real, h, H, H, F, FP, W)
            features = features * shrink[:, :, :, None] + p[:, :, :, None] * x
    _put_softmax(
        peak, norm, sums, features, b * num_rows + row, (one - 1).to(tl.int64), row, h, out, lse, lse_low, aggregate,
        None, None, None, None, H, DV, DVP, F, FP,
    )  # fmt: skip


@_kernel
def _merge_sums_kernel(
    long, to, work, num_slots, num_rows, num_long, SIZE: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """to[row] = Σ work[piece] over the pieces of one long row, for rows of SIZE numbers."""
    b = (tl.program_id(0) // num_long).to(tl.int64)
    row, first, count, _ = _segments(long, num_long, tl.program_id(0) % num_long, 1)
    c = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    piece = tl.arange(0, PIECES)[:, None]
    sums = tl.zeros([PIECES, COLUMNS], W)
    for start in range(0, tl.max(count, 0), PIECES):
        at = b * num_slots + first[:, None] + (start + piece)
        sums += tl.load(work + (at * SIZE + c), (start + piece < count[:, None]) & (c < SIZE), 0.0)
    at = (b * num_rows + row)[:, None] * SIZE + c
    tl.store(to + at, tl.sum(sums, 0)[None, :], (row >= 0)[:, None] & (c < SIZE))


@_kernel
def _delta_kernel(
    rowptr, edge_id, out, grad_out, grad_lse, weights, grad_weights, delta, num_rows, num_edges, blocks,
    H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """δ_i = dO_i·O_i - dlse_i + Σ_j p_ij dP_ij."""
    b = (tl.program_id(0) // blocks).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real, place = row < num_rows, b * num_rows + row
    d = tl.zeros([ROWS, HEADS], W)
    if DV > 0:
        o = _tile(out, place[:, None], real[:, None], h, H, H, DV, DVP, W)
        do = _tile(grad_out, place[:, None], real[:, None], h, H, H, DV, DVP, W)
        d += tl.sum(tl.sum(o * do, 3), 1)
    if grad_lse is not None:
        d -= tl.sum(_numbers(grad_lse, place[:, None], real[:, None], h, H, W), 1)
    if grad_weights is not None:
        first, end = tl.load(rowptr + row, real, 0), tl.load(rowptr + row + 1, real, 0)
        sums = tl.zeros([ROWS, EDGES, HEADS], tl.float64)  # a row in one piece, however long
        for start in range(0, tl.max(end - first, 0), EDGES):
            t = first[:, None] + (start + tl.arange(0, EDGES)[None, :])
            here = t < end[:, None]
            edge = b * num_edges + tl.load(edge_id + t, here, 0).to(tl.int64)
            p = _numbers(weights, edge, here, h, H, tl.float64)
            sums += p * _numbers(grad_weights, edge, here, h, H, tl.float64)
        d += tl.sum(sums, 1).to(W)
    _put_numbers(delta, place[:, None], real[:, None], h, H, d[:, None, :])


@triton.jit
def _statistics(lse, lse_low, delta, at, real, h, H: tl.constexpr, W: tl.constexpr):
    """lse, its low digits and δ [ROWS, EDGES, heads]; without an edge that counts such that weights, dS are 0."""
    base = _numbers(lse, at, real, h, H, W)
    low = _numbers(lse_low, at, real, h, H, W)
    d = _numbers(delta, at, real, h, H, W)
    none = base == -float("inf")
    return tl.where(none, float("inf"), base), low, tl.where(none, 0.0, d)


@triton.jit
def _grads(
    s, dp, base, low, d, bias, grad_weights, seed, edge, real, h, b, num_edges, bias_edge_step, bias_head_step, scale,
    softcap, kept, drop_below, H: tl.constexpr, CAP: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """From q·k and dO·v to z p, and to the gradients of the modified scores and of q·k.

    All are 0 where there is no edge, though the node of the row, which then has none, may hold NaN.
    """
    s, slope = _modified(s, bias, edge, real, h, bias_edge_step, bias_head_step, scale, softcap, H, CAP, W)
    # As in the forward pass, a choice stands between product and difference: fused, they would round another way.
    s = tl.where(real[:, :, None], s, -float("inf"))
    p = tl.exp((s - base) - low)
    zp = p
    if seed is not None:
        z = _factors(seed, edge, h, b, num_edges, kept, drop_below, H)
        zp, dp = p * z, dp * z
    if grad_weights is not None:
        dp += _numbers(grad_weights, b * num_edges + edge, real, h, H, W)
    ds = tl.where(real[:, :, None], p * (dp - d), 0.0)
    return zp, ds, tl.where(real[:, :, None], ds * slope, 0.0)


@_kernel
def _query_kernel(
    segments, col, edge_id, query, key, value, bias, edge_query, edge_grad, edge_attr, seed, grad_out, grad_weights,
    lse, lse_low, delta, grad_query, grad_sums, grad_bias, pairs, grad_edge_attr, work_query, work_sums,
    num_segments, num_slots, num_rows, num_far, num_edges, first_batch, bias_edge_step, bias_head_step, scale, softcap,
    kept, drop_below, blocks,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, CAP: tl.constexpr,
    BY_EDGE: tl.constexpr, ADD: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradients of queries and of what belongs to edges."""
    b = (first_batch + tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    row, first, count, slot = _segments(segments, num_segments, block, ROWS)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    scale, softcap, kept = _number(scale, W), _number(softcap, W), _number(kept, W)
    place, own = b * num_rows + row, (row >= 0)[:, None]
    q = _tile(query, place[:, None], own, h, H, H, D, DP, W)
    if DV > 0:
        do = _tile(grad_out, place[:, None], own, h, H, H, DV, DVP, W)
    if F > 0:
        eq = _tile(edge_query, place[:, None], own, h, H, H, F, FP, W)
        if DV > 0:
            eg = _tile(edge_grad, place[:, None], own, h, H, H, F, FP, W)
    base, low, d = _statistics(lse, lse_low, delta, place[:, None], own, h, H, W)
    dq = tl.zeros([ROWS, EDGES, HEADS, DP], W)
    features = tl.zeros([ROWS, EDGES, HEADS, FP], W)
    db = tl.zeros([ROWS, EDGES, HEADS], W)
    e = tl.arange(0, EDGES)[None, :]
    real = e < count[:, None]
    node = tl.load(col + (first[:, None] + e), real, 0)
    for start in range(0, tl.max(count, 0), EDGES):
        far, t = b * num_far + node, first[:, None] + (start + e)
        k = _tile(key, far, real, h, KV, H, D, DP, W)
        if DV > 0:
            v = _tile(value, far, real, h, KV, H, DV, DVP, W)
        edge = t
        if edge_id is not None:
            edge = tl.load(edge_id + t, real, 0).to(tl.int64)
        ahead = start + EDGES + e < count[:, None]
        node = tl.load(col + (t + EDGES), ahead, 0)
        s = tl.sum(q * k, 3)
        dp = tl.zeros([ROWS, EDGES, HEADS], W)
        if DV > 0:
            dp = tl.sum(do * v, 3)
        if F > 0:
            x = _tile(edge_attr, edge, real, tl.arange(0, 1), 1, 1, F, FP, W)
            s += tl.sum(eq * x, 3)
            if DV > 0:
                dp += tl.sum(eg * x, 3)
        zp, ds, dqk = _grads(
            s, dp, base, low, d, bias, grad_weights, seed, edge, real, h, b, num_edges, bias_edge_step, bias_head_step,
            scale, softcap, kept, drop_below, H, CAP, W,
        )  # fmt: skip
        if grad_bias is not None:
            if BY_EDGE:
                more = ds
                if ADD:
                    more += _numbers(grad_bias, edge, real, h, H, W)
                _put_numbers(grad_bias, edge, real, h, H, more)
            else:
                db += ds
        dq += dqk[:, :, :, None] * k
        if F > 0:
            features += dqk[:, :, :, None] * x
            _put_numbers(pairs, 2 * edge, real, h, H, zp)
            _put_numbers(pairs, 2 * edge + 1, real, h, H, dqk)
            dx = dqk[:, :, :, None] * eq
            if DV > 0:
                dx += zp[:, :, :, None] * eg
            dx = tl.sum(dx, 2)
            f = tl.arange(0, FP)[None, None, :]
            at = ((tl.program_id(1) * num_edges.to(tl.int64) + edge) * F)[:, :, None] + f
            mask = real[:, :, None] & (f < F)
            if ADD:
                dx += tl.load(grad_edge_attr + at, mask, 0.0)
            tl.store(grad_edge_attr + at, dx, mask)
        real = ahead
    whole, piece = (row >= 0) & (slot < 0), slot >= 0
    slot = b * num_slots + slot
    rows = tl.sum(dq, 1)
    _put(grad_query, place, whole, h, H, D, DP, rows)
    if work_query is not None:
        _put(work_query, slot, piece, h, H, D, DP, rows)
    if F > 0:
        rows = tl.sum(features, 1)
        _put(grad_sums, place, whole, h, H, F, FP, rows)
        if work_query is not None:
            _put(work_sums, slot, piece, h, H, F, FP, rows)
    if grad_bias is not None and not BY_EDGE:
        s = block * ROWS + tl.arange(0, ROWS)
        at = (b * num_segments + s)[:, None]
        _put_numbers(grad_bias, at, (s < num_segments)[:, None], h, H, tl.sum(db, 1)[:, None, :])


@_kernel
def _key_kernel(
    segments, row_of, edge_id, query, key, value, bias, seed, grad_out, grad_weights, lse, lse_low, delta, pairs,
    grad_key, grad_value, work_key, work_value,
    num_segments, num_slots, num_rows, num_far, num_edges, first_batch, bias_edge_step, bias_head_step, scale, softcap,
    kept, drop_below, blocks,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, CAP: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values, for some of the heads that these have."""
    b = (first_batch + tl.program_id(0) // blocks).to(tl.int64)
    row, first, count, slot = _segments(segments, num_segments, tl.program_id(0) % blocks, ROWS)
    kv = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    scale, softcap, kept = _number(scale, W), _number(softcap, W), _number(kept, W)
    place, own = b * num_rows + row, (row >= 0)[:, None]
    if pairs is None:
        k = _tile(key, place[:, None], own, kv, KV, KV, D, DP, W)
        if DV > 0:
            v = _tile(value, place[:, None], own, kv, KV, KV, DV, DVP, W)
    dk = tl.zeros([ROWS, EDGES, HEADS, DP], W)
    dv = tl.zeros([ROWS, EDGES, HEADS, DVP], W)
    e = tl.arange(0, EDGES)[None, :]
    real = e < count[:, None]
    node = tl.load(row_of + (first[:, None] + e), real, 0)
    for start in range(0, tl.max(count, 0), EDGES):
        far, t = b * num_far + node, first[:, None] + (start + e)
        edge = t
        if edge_id is not None:
            edge = tl.load(edge_id + t, real, 0).to(tl.int64)
        ahead = start + EDGES + e < count[:, None]
        node = tl.load(row_of + (t + EDGES), ahead, 0)
        for member in range(H // KV):  # the query heads that share a key head
            h = kv * (H // KV) + member
            q = _tile(query, far, real, h, H, H, D, DP, W)
            if DV > 0:
                do = _tile(grad_out, far, real, h, H, H, DV, DVP, W)
            if pairs is None:
                base, low, d = _statistics(lse, lse_low, delta, far, real, h, H, W)
                dp = tl.zeros([ROWS, EDGES, HEADS], W)
                if DV > 0:
                    dp = tl.sum(do * v, 3)
                zp, _, dqk = _grads(
                    tl.sum(q * k, 3), dp, base, low, d, bias, grad_weights, seed, edge, real, h, b, num_edges,
                    bias_edge_step, bias_head_step, scale, softcap, kept, drop_below, H, CAP, W,
                )  # fmt: skip
            else:
                zp = _numbers(pairs, 2 * edge, real, h, H, W)
                dqk = _numbers(pairs, 2 * edge + 1, real, h, H, W)
            dk += dqk[:, :, :, None] * q
            if DV > 0:
                dv += zp[:, :, :, None] * do
        real = ahead
    whole, piece = (row >= 0) & (slot < 0), slot >= 0
    slot = b * num_slots + slot
    rows = tl.sum(dk, 1)
    _put(grad_key, place, whole, kv, KV, D, DP, rows)
    if work_key is not None:
        _put(work_key, slot, piece, kv, KV, D, DP, rows)
    if DV > 0:
        rows = tl.sum(dv, 1)
        _put(grad_value, place, whole, kv, KV, DV, DVP, rows)
        if work_key is not None:
            _put(work_value, slot, piece, kv, KV, DV, DVP, rows)


@_kernel
def _project_kernel(
    x, matrix, to, count, stride_in, stride_out, H: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    OUTP: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """to[n, h] = x[n, h] @ matrix[h] for x [count, H, IN] and to [count, H, OUT]; += if ADD."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h, c, part = tl.program_id(1), tl.arange(0, OUTP), tl.arange(0, 8)
    at = ((n * H + h) * OUT)[:, None] + c[None, :]
    mask = (n < count)[:, None] & (c < OUT)[None, :]
    parts = tl.zeros([ROWS, 8, OUTP], W)  # eight sums, for short ones round less
    for start in range(0, IN, 8):
        i = start + part
        left = tl.load(
            x + (((n * H + h) * IN)[:, None] + i[None, :]), (n < count)[:, None] & (i < IN)[None, :], 0.0
        )
        from_row = (h * IN * OUT + i * stride_in)[:, None]
        right = tl.load(
            matrix + (from_row + (c * stride_out)[None, :]), (i < IN)[:, None] & (c < OUT)[None, :], 0.0
        )
        parts += left.to(W)[:, :, None] * right.to(W)[None, :, :]
    sums = tl.sum(parts, 1)
    if ADD:
        sums += tl.load(to + at, mask, 0.0)
    tl.store(to + at, sums, mask)


@_kernel
def _outer_kernel(
    rowptr, x, y, to, num_rows, count, chunk, H: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """to[part, h] = Σ_n x[n, h] y[n, h]ᵀ over the rows n of a part, [H, F, D]; += if ADD.

    A row without an edge is left out: its query may hold NaN, which the 0 in x would not cancel.
    """
    first, h = tl.program_id(0).to(tl.int64) * chunk, tl.program_id(1)
    f, d = tl.program_id(2) * FB + tl.arange(0, FB), tl.arange(0, DP)
    sums = tl.zeros([ROWS, FB, DP], W)
    for start in range(0, chunk, ROWS):
        n = first + start + tl.arange(0, ROWS)
        real = (n < count) & (start + tl.arange(0, ROWS) < chunk)
        node = n % num_rows
        real = real & (tl.load(rowptr + node, real, 0) < tl.load(rowptr + node + 1, real, 0))
        left = tl.load(
            x + (((n * H + h) * F)[:, None] + f[None, :]), real[:, None] & (f < F)[None, :], 0.0
        ).to(W)
        right = tl.load(
            y + (((n * H + h) * D)[:, None] + d[None, :]), real[:, None] & (d < D)[None, :], 0.0
        ).to(W)
        sums += left[:, :, None] * right[:, None, :]
    at = ((tl.program_id(0).to(tl.int64) * H + h) * F + f)[:, None] * D + d[None, :]
    mask = (f < F)[:, None] & (d < D)[None, :]
    total = tl.sum(sums, 0)
    if ADD:
        total += tl.load(to + at, mask, 0.0)
    tl.store(to + at, total, mask)


class _Plan(NamedTuple):
    """How the rows of a pass are divided: a table of segments, longest first, and one of the rows in pieces.

    Rows of both are (row, first edge or slot, number of edges or slots, slot or -1); row -1 stands for none, because
    there is room for as many as any graph of this size may have: nothing waits for the device to count.
    """

    segments: Tensor
    long: Tensor
    slots: int  # places for the pieces


# By the tensor of row pointers: its version when the plan was made, and the plan.
_plans = WeakIdKeyDictionary()


def _piece(num_rows: int, num_edges: int) -> int:
    """The most edges of a segment: pieces few beside the rows, segments enough for the device, sums not too long."""
    most = min(8 * num_edges // max(num_rows, 1), num_edges // 4096, 2048)
    return max(256, triton.next_power_of_2(most))


def _make_plan(pointer: Tensor, num_edges: int, piece: int | None = None) -> _Plan:
    num_rows, device = pointer.numel() - 1, pointer.device
    piece = _piece(num_rows, num_edges) if piece is None else piece
    if num_rows == 0:
        none = torch.empty(0, 4, dtype=torch.int32, device=device)
        return _Plan(none, none, 0)
    degree = pointer.diff()
    pieces = ((degree + (piece - 1)) // piece).clamp_(min=1)
    is_long = pieces > 1
    ends, long_ends = pieces.cumsum(0), (pieces * is_long).cumsum(0)
    number = torch.arange(num_rows + num_edges // piece, device=device)
    row = torch.searchsorted(ends, number, right=True)
    beyond = row == num_rows
    row.clamp_(max=num_rows - 1)
    rank = number - (ends - pieces)[row]
    cuts = [pointer[row] + degree[row] * k // pieces[row] for k in (rank, rank + 1)]
    count = (cuts[1] - cuts[0]).masked_fill_(beyond, 0)
    slot = torch.where(is_long[row] & ~beyond, (long_ends - pieces)[row] + rank, -1)
    segments = torch.stack([row.masked_fill(beyond, -1), cuts[0], count, slot], 1)
    # Segments of about equal length share a program, in the order of the graph, whose neighbours are often near.
    turns = ((count + 3) // 4 - beyond.int()).int()
    segments = segments[turns.sort(descending=True, stable=True).indices].int()

    most = num_edges // (piece + 1)
    number = torch.arange(1, most + 1, device=device)
    row = torch.searchsorted(is_long.cumsum(0), number)
    beyond = row == num_rows
    row.clamp_(max=num_rows - 1)
    long = [
        row.masked_fill(beyond, -1),
        (long_ends - pieces)[row],
        pieces[row].masked_fill(beyond, 0),
        beyond * -1,
    ]
    return _Plan(segments, torch.stack(long, 1).int(), 2 * num_edges // (piece + 1) if most else 0)


def _plan(pointer: Tensor, num_edges: int) -> _Plan:
    """The plan of these rows, kept as long as their pointers are.

    A CUDA graph may be replayed with other pointers in the same place: there, the plan is part of the graph.
    """
    if pointer.is_inference() or (pointer.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _make_plan(pointer, num_edges)
    kept = _plans.get(pointer)
    if kept is not None and kept[0] == pointer._version:
        return kept[1]
    plan = _make_plan(pointer, num_edges)
    _plans[pointer] = pointer._version, plan
    return plan


def _bits(x: float) -> int:
    return struct.unpack("<q", struct.pack("<d", x))[0]


class _Call:
    """The arguments of an operator call as the kernels take them, and the launches."""

    def __init__(
        self, query, key, value, rowptr, col, edge_id, colptr, row, edge_id_t,
        bias, edge_attr, edge_projection, seed, scale, softcap, dropout_p, return_weights,
    ):  # fmt: skip
        self.wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.batch, self.num_queries, self.heads, self.dim = query.shape
        self.num_keys, self.kv_heads, self.value_dim = value.shape[1:]
        self.num_edges = col.numel()
        self.features = 0 if edge_attr is None else edge_attr.size(1)
        self.device, self.dtype = query.device, query.dtype
        self.rowptr, self.colptr = rowptr.contiguous(), colptr.contiguous()
        widest = max(self.dim, self.value_dim, self.features)
        if widest > _MOST:
            raise NotImplementedError(
                f"graph_attention's CUDA kernel takes heads and edge features of up to {_MOST} numbers, got {widest}."
                " Split them over more heads, or compute on the CPU."
            )
        self.width = triton.next_power_of_2(widest)
        self.queries, self.keys, self.values = (x.contiguous() for x in (query, key, value))
        self.bias = None if bias is None else bias.contiguous()
        has_features = self.features > 0
        self.edge_attr = edge_attr.contiguous() if has_features else None
        self.projection = edge_projection.contiguous() if has_features else None
        self.by_edge = bias is not None and bias.size(0) != 1
        self.seed = seed
        self.scalars = {
            "num_edges": self.num_edges,
            "bias_edge_step": bias.size(1) if self.by_edge else 0,
            "bias_head_step": 0 if bias is None or bias.size(1) == 1 else 1,
            "scale": _bits(scale),
            "softcap": _bits(softcap),
            "kept": _bits(1 / (1 - dropout_p) if dropout_p < 1 else 0.0),
            "drop_below": int(dropout_p * 2**53),
        }
        self.compiled = {
            "W": tl.float64 if self.wide == torch.float64 else tl.float32,
            "num_warps": _WARPS,
            "enable_fp_fusion": True,  # said here, as the default changes with Triton 3.10
        }
        self.lowest = {"LOWEST": torch.finfo(self.wide).min}
        self.values_of = {
            "H": self.heads,
            "DV": self.value_dim,
            "DVP": triton.next_power_of_2(max(self.value_dim, 1)),
        }
        self.features_of = {"F": self.features, "FP": triton.next_power_of_2(max(self.features, 1))}
        self.keys_of = {"KV": self.kv_heads, "D": self.dim, "DP": triton.next_power_of_2(self.dim)}

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.wide, device=self.device)

    def tile(self, each_thread: int, heads: int, num_rows: int) -> dict[str, int]:
        """Heads, rows and edges of a program, for rows of so many edges as the graph has on average.

        ``each_thread`` numbers of the tile are one thread's: enough to keep the memory busy, few enough for registers.
        """
        numbers = 32 * _WARPS * (each_thread // 2 if self.features else each_thread)
        each = min(triton.next_power_of_2(heads), max(1, 256 // self.width))
        places = max(1, numbers // (each * self.width))
        edges = triton.next_power_of_2(max(4, -(-self.num_edges // max(num_rows, 1))))
        edges = min(edges, places, 32)
        return {"HEADS": each, "ROWS": places // edges, "EDGES": edges}

    def launch(
        self, kernel, batch: int, rows: int, tile: dict[str, int], heads: int, *arguments, **named
    ) -> None:
        """Over the leading indices, groups of rows and groups of heads."""
        blocks = -(-rows // tile["ROWS"])
        if batch * blocks:
            grid = (batch * blocks, -(-heads // tile["HEADS"]))
            kernel[grid](*arguments, blocks=blocks, **tile, **named, **self.compiled)

    def project(self, x: Tensor, to: Tensor, add: bool = False, transposed: bool = False) -> None:
        """to[n, h] = x[n, h] @ W[h], or its transpose; += if add."""
        inner, outer = x.size(-1), to.size(-1)
        padded = triton.next_power_of_2(outer)
        rows = max(1, 512 // padded)
        count = self.batch * x.size(1)
        if count:
            _project_kernel[(-(-count // rows), self.heads)](
                x, self.projection, to, count, 1 if transposed else outer, inner if transposed else 1,
                H=self.heads, IN=inner, OUT=outer, OUTP=padded, ROWS=rows, ADD=add, **self.compiled,
            )  # fmt: skip

    def merge(self, plan: _Plan, to: Tensor, work: Tensor | None) -> None:
        """Sum the pieces of long rows."""
        size = to.size(-1) * to.size(-2)
        if work is not None and self.batch and size:
            columns = min(triton.next_power_of_2(size), 128)
            count = len(plan.long)
            _merge_sums_kernel[(self.batch * count, -(-size // columns))](
                plan.long, to, work, plan.slots, to.size(1), count,
                SIZE=size, PIECES=16, COLUMNS=columns, **self.compiled,
            )  # fmt: skip

    def merge_softmax(self, plan: _Plan, tile: dict[str, int], *arguments) -> None:
        """Put the pieces of long rows together: out, lse, lse_low, aggregate and their workspaces."""
        if len(plan.long) and self.batch:
            edges = tile["ROWS"] * tile["EDGES"]
            _merge_softmax_kernel[(self.batch * len(plan.long), -(-self.heads // tile["HEADS"]))](
                plan.long, *arguments, plan.slots, self.num_queries, len(plan.long), HEADS=tile["HEADS"], EDGES=edges,
                **self.values_of, **self.features_of, **self.compiled, **self.lowest,
            )  # fmt: skip

    def delta(self, rowptr, edge_id, out, grad_out, grad_lse, weights, grad_weights) -> Tensor:
        """δ_i = dO_i·O_i - dlse_i + Σ_j p_ij dP_ij."""
        delta = self.new(self.batch, self.num_queries, self.heads)
        self.launch(
            _delta_kernel, self.batch, self.num_queries, self.tile(16, self.heads, self.num_queries), self.heads,
            rowptr, edge_id, out, grad_out, grad_lse, weights, grad_weights, delta, num_rows=self.num_queries,
            num_edges=self.num_edges, **self.values_of,
        )  # fmt: skip
        return delta

    def flowing(self, grad_out: Tensor, out: Tensor) -> Tensor:
        """The gradient of out, with digits of the inputs' dtype, as the output had; an empty one is not there."""
        if grad_out.numel() == out.numel():
            return grad_out.to(self.dtype).contiguous()
        return torch.zeros_like(out, dtype=self.dtype)

    def work(self, plan: _Plan, *shape: int) -> Tensor | None:
        """Room for the pieces of long rows, where there may be any."""
        return self.new(self.batch, plan.slots, *shape) if plan.slots else None


def forward(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The body of ``graphattn::sparse_attention``."""
    with torch.cuda.device_of(inputs[0]):
        return _forward(*inputs)


def backward(*arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The body of ``graphattn::sparse_attention_backward``."""
    with torch.cuda.device_of(arguments[8]):
        return _backward(*arguments)


def _forward(*inputs, plan: _Plan | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward pass; of some of the rows, if a plan of these is given."""
    call, return_weights = _Call(*inputs), inputs[-1]
    col, edge_id = (x.contiguous() for x in inputs[4:6])
    batch, num_queries, H, DV, F = call.batch, call.num_queries, call.heads, call.value_dim, call.features
    plan = _plan(call.rowptr, call.num_edges) if plan is None else plan
    out, aggregate = call.new(batch, num_queries, H, DV), call.new(batch, num_queries, H, F)
    lse, lse_low = call.new(batch, num_queries, H), call.new(batch, num_queries, H)
    weights = call.new(batch, call.num_edges, H) if return_weights else call.new(0)
    work = [call.work(plan, H), call.work(plan, H), call.work(plan, H, DV), call.work(plan, H, F)]
    edge_query = None
    if F:
        edge_query = call.new(batch, num_queries, H, F)
        call.project(call.queries, edge_query, transposed=True)
    by_edge = call.by_edge or F > 0 or return_weights or call.seed is not None
    tile = call.tile(32, H, num_queries)
    call.launch(
        _forward_kernel, batch, len(plan.segments), tile, H,
        plan.segments, col, edge_id if by_edge else None, call.queries, call.keys, call.values, call.bias, edge_query,
        call.edge_attr, call.seed, out, lse, lse_low, aggregate, weights if return_weights else None, *work,
        num_segments=len(plan.segments), num_slots=plan.slots, num_rows=num_queries, num_far=call.num_keys,
        CAP=inputs[14] > 0, **call.scalars, **call.keys_of, **call.values_of, **call.features_of, **call.lowest,
    )  # fmt: skip
    call.merge_softmax(plan, tile, out, lse, lse_low, aggregate, *work)
    if F and DV:
        call.project(aggregate, out, add=True)
    if return_weights:
        number = edge_id.long()
        row = torch.empty_like(number)
        row[number] = torch.repeat_interleave(call.rowptr.diff(), output_size=call.num_edges)
        base = lse.clamp_min(torch.finfo(call.wide).min)  # all scores -inf: not NaN but 0
        weights.sub_(base[:, row]).sub_(lse_low[:, row]).exp_()
    return out, lse, lse_low, aggregate, weights


def _backward(
    grad_out, grad_lse, grad_weights, out, lse, lse_low, aggregate, weights, *inputs,
    rows: _Plan | None = None, columns: _Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward pass; of some of the queries or keys, if plans of these are given."""
    call = _Call(*inputs)
    bias, edge_attr, edge_projection = inputs[9:12]
    col, edge_id, row, edge_id_t = (inputs[i].contiguous() for i in (4, 5, 7, 8))
    batch, num_queries, num_keys, num_edges = call.batch, call.num_queries, call.num_keys, call.num_edges
    H, KV, D, DV, F = call.heads, call.kv_heads, call.dim, call.value_dim, call.features
    rows = _plan(call.rowptr, num_edges) if rows is None else rows
    columns = _plan(call.colptr, num_edges) if columns is None else columns
    grad_out = call.flowing(grad_out, out)
    grad_lse = grad_lse.contiguous() if grad_lse.numel() else None
    grad_weights = grad_weights.contiguous() if grad_weights.numel() else None
    out, lse, lse_low, aggregate = (x.contiguous() for x in (out, lse, lse_low, aggregate))

    delta = call.delta(call.rowptr, edge_id, out, grad_out, grad_lse, weights.contiguous(), grad_weights)
    tile = call.tile(16, H, num_queries)
    edge_query = edge_grad = pairs = grad_edge_attr = grad_bias = None
    if F:
        edge_query = call.new(batch, num_queries, H, F)
        call.project(call.queries, edge_query, transposed=True)
        if DV:
            edge_grad = call.new(batch, num_queries, H, F)
            call.project(grad_out, edge_grad, transposed=True)
        pairs = call.new(num_edges, 2, H)
        grad_edge_attr = call.new(-(-H // tile["HEADS"]), num_edges, F)
    if bias is not None:  # one for all edges is summed by row
        grad_bias = call.new(num_edges, H) if call.by_edge else call.new(batch, len(rows.segments), H)
    # What is summed once more after the merge, over features, waits for that in the wide dtype.
    grad_query = call.new(batch, num_queries, H, D, dtype=call.wide if F else call.dtype)
    grad_sums = call.new(batch, num_queries, H, F)
    grad_key, grad_value = torch.empty_like(call.keys), torch.empty_like(call.values)
    work_query, work_sums = call.work(rows, H, D), call.work(rows, H, F)
    work_key, work_value = call.work(columns, KV, D), call.work(columns, KV, DV)

    by_edge = call.by_edge or call.seed is not None or grad_weights is not None
    # Of narrow heads less: with fewer lse than threads, Triton loads them where they are used, without a barrier.
    key_tile = call.tile(min(16, max(8, call.width // 2)), KV, num_keys)
    options = {"CAP": inputs[14] > 0, **call.scalars, **call.keys_of, **call.values_of}
    # What is summed or kept per edge belongs to one leading index at a time.
    turns = batch if call.by_edge or F else 1
    for b in range(turns):
        call.launch(
            _query_kernel, batch // turns, len(rows.segments), tile, H,
            rows.segments, col, edge_id if by_edge or F else None, call.queries, call.keys, call.values, call.bias,
            edge_query, edge_grad, call.edge_attr, call.seed, grad_out, grad_weights, lse, lse_low, delta, grad_query,
            grad_sums, grad_bias, pairs, grad_edge_attr, work_query, work_sums,
            num_segments=len(rows.segments), num_slots=rows.slots, num_rows=num_queries, num_far=num_keys,
            first_batch=b, BY_EDGE=call.by_edge, ADD=b > 0, **options, **call.features_of,
        )  # fmt: skip
        call.launch(
            _key_kernel, batch // turns, len(columns.segments), key_tile, KV,
            columns.segments, row, edge_id_t if by_edge or F else None, call.queries, call.keys, call.values, call.bias,
            call.seed, grad_out, grad_weights, lse, lse_low, delta, pairs, grad_key, grad_value, work_key, work_value,
            num_segments=len(columns.segments), num_slots=columns.slots, num_rows=num_keys, num_far=num_queries,
            first_batch=b, **options,
        )  # fmt: skip
    call.merge(rows, grad_query, work_query)
    call.merge(rows, grad_sums, work_sums)
    call.merge(columns, grad_key, work_key)
    call.merge(columns, grad_value, work_value)
    if F:
        call.project(grad_sums, grad_query, add=True)

    def like(grad: Tensor | None, x: Tensor | None) -> Tensor:
        if x is None:
            return inputs[0].new_empty(0)
        if grad is None or batch == 0:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        return grad.sum_to_size(x.shape).to(x.dtype).contiguous()

    return (
        grad_query.to(call.dtype),
        grad_key,
        grad_value,
        like(None if grad_bias is None else grad_bias.view(-1, H), bias),
        like(None if grad_edge_attr is None else grad_edge_attr.sum(0), edge_attr),
        like(_projection_grad(call, grad_sums, aggregate, grad_out) if F else None, edge_projection),
    )


def _projection_grad(call: _Call, grad_sums: Tensor, aggregate: Tensor, grad_out: Tensor) -> Tensor:
    """d W_h = Σ_i (Σ_j dS e) q_i + (Σ_j z p e) dO_i, part by part of the rows."""
    H, F, D = call.heads, call.features, call.dim
    count = call.batch * call.num_queries
    parts = max(1, min(512, 2**22 // (H * F * D), -(-count // 64)))
    padded = triton.next_power_of_2(D)
    features = min(triton.next_power_of_2(F), max(1, 2048 // padded))
    grad = call.new(parts, H, F, D)
    for add, (x, y) in enumerate(
        [(grad_sums, call.queries), (aggregate, grad_out)][: 2 if call.value_dim else 1]
    ):
        _outer_kernel[(parts, H, -(-F // features))](
            call.rowptr, x, y, grad, max(call.num_queries, 1), count, -(-count // parts),
            H=H, F=F, FB=features, D=D, DP=padded, ROWS=max(1, 2048 // (features * padded)), ADD=add > 0,
            **call.compiled,
        )  # fmt: skip
    return grad.sum(0)
