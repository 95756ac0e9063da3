"""Attention on edges that follow from a rule, on the GPU: matrix products of tiles, whose edges the kernels work out.

A plan cuts the rows of a pass (queries; keys for the gradients of keys and values) into blocks that lie side by side on
every axis, within one sequence and one residue of the dilation. The far ends of a block are then a box as well, and a
program goes through it tile by tile, [queries, keys] of one head, as in FlashAttention (Dao et al. 2022):

    s = softcap(scale q·k) + bias, -inf where there is no edge,    m' = max(m, s),
    l' = l exp(m - m') + Σ exp(s - m'),    o' = o exp(m - m') + Σ z exp(s - m') v

and backward with the formulas of `graphattn.kernels.sparse_triton`. Few blocks with many far ends are split, and the
parts put together in their order: every sum has one order, fixed by shapes, and there are no atomics.

The forward pass of complete graphs in half precision goes through the flash attention of PyTorch, where that is the
same; the backward pass is the one here.

Half precision is multiplied on tensor cores, for which weights and score gradients are rounded to it once more, those
of float16 scaled into its range before: weights by a power of two, gradients by the largest of their row in a tile.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
# (a kernel is read by Triton, whose types are not Python's)
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.utils.weak import WeakIdKeyDictionary

from graphattn.kernels.sparse_triton import _bits, _factors, _number, _tanh

_flash = torch.ops.aten._scaled_dot_product_flash_attention.default

_MOST = 512  # numbers of one head and node
_PROGRAMS = 512  # that keep a GPU busy
# Rows, far ends and warps of a program by bytes of a number and numbers of a head: as many as registers have room for.
_TILES = {
    2: {64: (64, 64, 4), 128: (64, 32, 8), 256: (32, 32, 8), 512: (16, 16, 8)},
    4: {16: (64, 32, 4), 64: (64, 16, 8), 128: (32, 16, 8), 512: (16, 16, 8)},
    8: {64: (32, 16, 8), 512: (16, 16, 8)},
}
_SUMMED = 8192  # far ends that one program adds up in float32
_FOR_BIAS = 2**24  # numbers held at a time for the gradient of a bias that queries share

# What changes from graph to graph is not compiled in.
_SIZES = (
    "blocks", "parts", "num_queries", "num_keys", "num_edges", "total_queries", "slots", "first_batch", "first_block",
    "bias_query", "bias_slot", "bias_head", "drop_below", "scale", "softcap", "kept",
)  # fmt: skip
_kernel = triton.jit(do_not_specialize=_SIZES)

_NO_DOT_OF_FLOAT64 = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6))
_META = tl.constexpr(11)  # numbers of an axis in `_Pass.meta`


@triton.jit
def _axis(meta, table, block, A: tl.constexpr):
    """Of a block along an axis: first row, rows, first far end, far ends; and the step of both."""
    at = meta + A * _META
    number = tl.load(at) + (block // tl.load(at + 1)) % tl.load(at + 2)
    entry = table + number * 4
    step = tl.load(at + 5).to(tl.int32)
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), step


@triton.jit
def _place(meta, m, A: tl.constexpr):
    """Of the rows m of a block, numbered row-major, the places along an axis."""
    at = meta + A * _META
    i = m // tl.load(at + 3).to(tl.int32)
    if A > 0:
        i = i % tl.load(at + 4).to(tl.int32)
    return i


@triton.jit
def _rows(meta, table, block, AXES: tl.constexpr, ROWS: tl.constexpr):
    """The nodes [ROWS] of a block, whether there are so many, and the number of its far ends."""
    m = tl.arange(0, ROWS)
    node, own, count = tl.zeros([ROWS], tl.int32), m >= 0, 1
    for a in tl.static_range(AXES):
        x, rows, _, far, step = _axis(meta, table, block, a)
        i = _place(meta, m, a)
        own = own & (i < rows)
        node += (x + i * step) * tl.load(meta + (a * _META + 6)).to(tl.int32)
        count = count * far
    return node.to(tl.int64), own, count


@triton.jit
def _edges(
    meta, table, block, by_query, total_queries, c, end, AXES: tl.constexpr, ROWS: tl.constexpr, FAR: tl.constexpr,
    BY_KEY: tl.constexpr, NUMBERED: tl.constexpr,
):  # fmt: skip
    """Of the far ends c < end of a block: their nodes, and [queries, keys] where there is an edge and its slot."""
    m, there = tl.arange(0, ROWS), c < end
    node, inner = tl.zeros([FAR], tl.int32), 1
    if BY_KEY:
        real, slot = there[:, None] & (m >= 0)[None, :], tl.zeros([FAR, ROWS], tl.int64)
    else:
        real, slot = (m >= 0)[:, None] & there[None, :], tl.zeros([ROWS, FAR], tl.int64)
    for turn in tl.static_range(AXES):
        a = AXES - 1 - turn
        x, rows, y, far, step = _axis(meta, table, block, a)
        i, j = _place(meta, m, a), c
        if AXES > 1:
            j = (c // tl.maximum(inner, 1)) % tl.maximum(far, 1)
        row, column, own = x + i * step, y + j * step, i < rows
        at = meta + a * _META
        node += column * tl.load(at + 7).to(tl.int32)
        from_query = by_query + tl.load(at + 8)
        if BY_KEY:
            from_query, has, key = from_query + column, there, row[None, :]
            real = real & own[None, :]
        else:
            from_query, has, key = from_query + row, own, column[None, :]
        first = tl.load(from_query, has, 0).to(tl.int32)
        count = tl.load(from_query + total_queries, has, 0).to(tl.int32)
        past = key - first[:, None]
        real = real & (past >= 0) & (past <= ((count - 1) * step)[:, None])
        if NUMBERED:
            start = tl.load(from_query + 2 * total_queries, has, 0) * tl.load(at + 9)
            slot += start[:, None] + (past // step) * tl.load(at + 10)
        inner = inner * far
    return node.to(tl.int64), real, slot


@triton.jit
def _load(x, at, real, h, H: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """x[at, h] for x [.., H, D], as [rows, PAD], 0 where not real."""
    d = tl.arange(0, PAD)[None, :]
    mask = real[:, None]
    if D < PAD:
        mask = mask & (d < D)
    return tl.load(x + ((at * H + h) * D)[:, None] + d, mask, 0.0)


@triton.jit
def _store(x, at, real, h, H: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, value):
    d = tl.arange(0, PAD)[None, :]
    tl.store(x + ((at * H + h) * D)[:, None] + d, value, real[:, None] & (d < D))


@triton.jit
def _product(x, y, W: tl.constexpr):
    if x.dtype == tl.float64 and _NO_DOT_OF_FLOAT64:
        sums = tl.sum(x[:, :, None] * y[None, :, :], 1)
    else:
        sums = tl.dot(x, y, input_precision="ieee", out_dtype=W)
    return sums


@triton.jit
def _gradient_product(ds, y, TURN: tl.constexpr, W: tl.constexpr):
    """ds y, or dsᵀ y where TURN, with ds rounded to the type of y."""
    if TURN:
        ds = tl.trans(ds)
    if y.dtype == tl.float16:
        largest = tl.max(tl.abs(ds), 1)
        size = tl.where((largest > 1e-30) & (largest < 1e30), largest, 1.0)[:, None]
        product = _product((ds / size).to(y.dtype), y, W) * size
    else:
        product = _product(ds.to(y.dtype), y, W)
    return product


@triton.jit
def _modified(
    score, bias, query, slot, real, h, bias_query, bias_slot, bias_head, scale, softcap, CAP: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """The scores after scale, soft cap and bias, -inf where there is no edge, and their derivative by q·k."""
    score = score * scale
    slope = scale
    if CAP:
        bent = _tanh(score / softcap)
        slope = scale * (1.0 - bent * bent)
        score = softcap * bent
    if bias is not None:
        at = (query * bias_query)[:, None] + slot * bias_slot + h * bias_head
        score += tl.load(bias + at, real, 0.0).to(W)
    return tl.where(real, score, -float("inf")), slope


@triton.jit
def _kept(
    seed, edge, h, b, num_edges, drop_below, H: tl.constexpr, SHAPE_0: tl.constexpr, SHAPE_1: tl.constexpr
):
    """1 for the edges that dropout keeps, else 0."""
    h = h + tl.arange(0, 1)
    return tl.reshape(_factors(seed, edge, h, b, num_edges, 1.0, drop_below, H), [SHAPE_0, SHAPE_1])


@triton.jit
def _program(blocks, parts, first_batch, first_block):
    """Leading index, part and block of a program."""
    number = tl.program_id(0)
    block = first_block + number % blocks
    part = number // blocks % parts
    return (first_batch + number // blocks // parts).to(tl.int64), part, block


@triton.jit
def _share(count, part, parts, FAR: tl.constexpr):
    """First and end of the far ends of a part."""
    each = tl.cdiv(tl.cdiv(count, FAR), parts) * FAR
    return part * each, tl.minimum((part + 1) * each, count)


@_kernel
def _forward_kernel(
    meta, table, by_query, query, key, value, bias, seed, out, lse, lse_low,
    blocks, parts, num_queries, num_keys, num_edges, total_queries, slots, first_batch, first_block, bias_query,
    bias_slot, bias_head, scale, softcap, kept, drop_below,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    AXES: tl.constexpr, ROWS: tl.constexpr, FAR: tl.constexpr, NUMBERED: tl.constexpr, CAP: tl.constexpr,
    BOOST: tl.constexpr, W: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """The output and lse of the queries of a block, of one head, from a part of their keys."""
    b, part, block = _program(blocks, parts, first_batch, first_block)
    h, g = tl.program_id(1), tl.program_id(1) // (H // KV)
    scale, softcap, kept = _number(scale, W), _number(softcap, W), _number(kept, W)
    node, own, count = _rows(meta, table, block, AXES, ROWS)
    q = _load(query, b * num_queries + node, own, h, H, D, DP)
    peak = tl.full([ROWS], LOWEST, W)
    norm = tl.zeros([ROWS], W)
    sums = tl.zeros([ROWS, DVP], W)
    begin, end = _share(count, part, parts, FAR)
    for start in range(begin, end, FAR):
        c = start + tl.arange(0, FAR)
        far, real, slot = _edges(
            meta, table, block, by_query, total_queries, c, end, AXES, ROWS, FAR, False, NUMBERED
        )
        far = b * num_keys + far
        k = _load(key, far, c < end, g, KV, D, DP)
        s = _product(q, tl.trans(k), W)
        s, _slope = _modified(
            s, bias, node, slot, real, h, bias_query, bias_slot, bias_head, scale, softcap, CAP, W
        )
        higher = tl.maximum(peak, tl.max(s, 1))
        shrink, p = tl.exp(peak - higher), tl.exp(s - higher[:, None])
        peak, norm = higher, norm * shrink + tl.sum(p, 1)
        if DV > 0:
            if seed is not None:
                edge = (node * slots)[:, None] + slot
                p = p * _kept(seed, edge, h, b, num_edges, drop_below, H, ROWS, FAR)
            v = _load(value, far, c < end, g, KV, DV, DVP)
            sums = sums * shrink[:, None] + _product((p * BOOST).to(v.dtype), v, W)
    empty = norm == 0
    logarithm = tl.log(tl.where(empty, 1.0, norm))
    full = peak + logarithm
    low = tl.where(empty, 0.0, (peak - full) + logarithm)
    at = (part * (tl.num_programs(0) // blocks // parts).to(tl.int64) + b) * num_queries + node
    tl.store(lse + (at * H + h), tl.where(empty, -float("inf"), full), own)
    tl.store(lse_low + (at * H + h), low, own)
    if DV > 0:
        sums = sums * (kept / (tl.where(empty, 1.0, norm) * BOOST))[:, None]
        _store(out, at, own, h, H, DV, DVP, sums)


@triton.jit
def _statistics(lse, lse_low, delta, at, real):
    """lse, its low digits and δ of queries; without an edge that counts such that weights and dS are 0."""
    base = tl.load(lse + at, real, 0.0)
    low = tl.load(lse_low + at, real, 0.0)
    d = tl.load(delta + at, real, 0.0)
    none = base == -float("inf")
    return tl.where(none, float("inf"), base), low, tl.where(none, 0.0, d)


@_kernel
def _weights_kernel(
    meta, table, by_query, query, key, bias, lse, lse_low, weights,
    blocks, parts, num_queries, num_keys, num_edges, total_queries, slots, first_batch, first_block, bias_query,
    bias_slot, bias_head, scale, softcap, kept, drop_below,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, AXES: tl.constexpr, ROWS: tl.constexpr,
    FAR: tl.constexpr, CAP: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The weights of edges, from lse."""
    b, part, block = _program(blocks, parts, first_batch, first_block)
    h, g = tl.program_id(1), tl.program_id(1) // (H // KV)
    scale, softcap = _number(scale, W), _number(softcap, W)
    node, own, count = _rows(meta, table, block, AXES, ROWS)
    place = b * num_queries + node
    q = _load(query, place, own, h, H, D, DP)
    base, low, _delta = _statistics(lse, lse_low, lse_low, place * H + h, own)
    begin, end = _share(count, part, parts, FAR)
    for start in range(begin, end, FAR):
        c = start + tl.arange(0, FAR)
        far, real, slot = _edges(
            meta, table, block, by_query, total_queries, c, end, AXES, ROWS, FAR, False, True
        )
        k = _load(key, b * num_keys + far, c < end, g, KV, D, DP)
        s = _product(q, tl.trans(k), W)
        s, _slope = _modified(
            s, bias, node, slot, real, h, bias_query, bias_slot, bias_head, scale, softcap, CAP, W
        )
        p = tl.exp((s - base[:, None]) - low[:, None])
        edge = b * num_edges + ((node * slots)[:, None] + slot)
        tl.store(weights + (edge * H + h), p, real)


@_kernel
def _delta_kernel(
    meta, table, by_query, out, grad_out, grad_lse, weights, grad_weights, delta,
    blocks, parts, num_queries, num_keys, num_edges, total_queries, slots, first_batch, first_block, bias_query,
    bias_slot, bias_head, scale, softcap, kept, drop_below,
    H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, AXES: tl.constexpr, ROWS: tl.constexpr, FAR: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """δ_i = dO_i·O_i - dlse_i + Σ_j p_ij dP_ij."""
    b, _, block = _program(blocks, parts, first_batch, first_block)
    h = tl.program_id(1)
    node, own, count = _rows(meta, table, block, AXES, ROWS)
    place = b * num_queries + node
    d = tl.zeros([ROWS], W)
    if DV > 0:
        o, do = _load(out, place, own, h, H, DV, DVP), _load(grad_out, place, own, h, H, DV, DVP)
        if (
            do.dtype == o.dtype
        ):  # summed like dO·v, from which it is subtracted: the two cancel where a row has one edge
            i = tl.arange(0, ROWS)
            d += tl.sum(tl.where(i[:, None] == i[None, :], _product(do, tl.trans(o), W), 0.0), 1)
        else:
            d += tl.sum(o * do.to(W), 1)
    if grad_lse is not None:
        d -= tl.load(grad_lse + (place * H + h), own, 0.0)
    if grad_weights is not None:
        sums = tl.zeros([ROWS, FAR], tl.float64)  # of a row in one piece, however long
        for start in range(0, count, FAR):
            c = start + tl.arange(0, FAR)
            _far, real, slot = _edges(
                meta, table, block, by_query, total_queries, c, count, AXES, ROWS, FAR, False, True
            )
            edge = (b * num_edges + ((node * slots)[:, None] + slot)) * H + h
            p = tl.load(weights + edge, real, 0.0).to(tl.float64)
            sums += p * tl.load(grad_weights + edge, real, 0.0).to(tl.float64)
        d += tl.sum(sums, 1).to(W)
    tl.store(delta + (place * H + h), d, own)


@triton.jit
def _grads(
    s, dp, base, low, d, bias, grad_weights, seed, query, slot, real, h, b, num_edges, slots, bias_query, bias_slot,
    bias_head, scale, softcap, kept, drop_below, H: tl.constexpr, CAP: tl.constexpr, SHAPE_0: tl.constexpr,
    SHAPE_1: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """From q·k and dO·v to p, 0 where it is dropped, and to the gradients of the modified scores and of q·k."""
    s, slope = _modified(
        s, bias, query, slot, real, h, bias_query, bias_slot, bias_head, scale, softcap, CAP, W
    )
    p = tl.exp((s - base[:, None]) - low[:, None])
    zp = p
    edge = (query * slots)[:, None] + slot
    if seed is not None:
        z = _kept(seed, edge, h, b, num_edges, drop_below, H, SHAPE_0, SHAPE_1)
        zp, dp = p * z, dp * (z * kept)
    if grad_weights is not None:
        dp += tl.load(grad_weights + ((b * num_edges + edge) * H + h), real, 0.0)
    ds = tl.where(real, p * (dp - d[:, None]), 0.0)
    return zp, ds, tl.where(real, ds * slope, 0.0)


@_kernel
def _query_kernel(
    meta, table, by_query, query, key, value, bias, seed, grad_out, grad_weights, lse, lse_low, delta, grad_query,
    grad_bias,
    blocks, parts, num_queries, num_keys, num_edges, total_queries, slots, first_batch, first_block, bias_query,
    bias_slot, bias_head, scale, softcap, kept, drop_below,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    AXES: tl.constexpr, ROWS: tl.constexpr, FAR: tl.constexpr, NUMBERED: tl.constexpr, CAP: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradients of the queries of a block, of one head, from a part of their keys; and of the bias.

    For the bias, ``BIAS`` says, grad_bias has: a row for each edge ("edge"), for each query of the launch and each of
    its slots ("slot"), or the sum of each query and part ("query"). To the first two ``ADD`` adds.
    """
    b, part, block = _program(blocks, parts, first_batch, first_block)
    h, g = tl.program_id(1), tl.program_id(1) // (H // KV)
    scale, softcap, kept = _number(scale, W), _number(softcap, W), _number(kept, W)
    node, own, count = _rows(meta, table, block, AXES, ROWS)
    place = b * num_queries + node
    q = _load(query, place, own, h, H, D, DP)
    if DV > 0:
        do = _load(grad_out, place, own, h, H, DV, DVP)
    base, low, d = _statistics(lse, lse_low, delta, place * H + h, own)
    dq = tl.zeros([ROWS, DP], W)
    db = tl.zeros([ROWS], W)
    begin, end = _share(count, part, parts, FAR)
    for start in range(begin, end, FAR):
        c = start + tl.arange(0, FAR)
        far, real, slot = _edges(
            meta, table, block, by_query, total_queries, c, end, AXES, ROWS, FAR, False, NUMBERED
        )
        far = b * num_keys + far
        k = _load(key, far, c < end, g, KV, D, DP)
        s, dp = _product(q, tl.trans(k), W), tl.zeros([ROWS, FAR], W)
        if DV > 0:
            v = _load(value, far, c < end, g, KV, DV, DVP)
            dp = _product(do, tl.trans(v), W)
        _zp, ds, dqk = _grads(
            s, dp, base, low, d, bias, grad_weights, seed, node, slot, real, h, b, num_edges, slots, bias_query,
            bias_slot, bias_head, scale, softcap, kept, drop_below, H, CAP, ROWS, FAR, W,
        )  # fmt: skip
        if BIAS == "query":
            db += tl.sum(ds, 1)
        elif BIAS != "":
            row = node
            if BIAS == "slot":
                row = ((block - first_block) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            at = grad_bias + (((row * slots)[:, None] + slot) * H + h)
            if ADD:
                ds += tl.load(at, real, 0.0)
            tl.store(at, ds, real)
        dq += _gradient_product(dqk, k, False, W)
    at = (part * (tl.num_programs(0) // blocks // parts).to(tl.int64) + b) * num_queries + node
    _store(grad_query, at, own, h, H, D, DP, dq)
    if BIAS == "query":
        tl.store(grad_bias + (at * H + h), db, own)


@_kernel
def _key_kernel(
    meta, table, by_query, query, key, value, bias, seed, grad_out, grad_weights, lse, lse_low, delta, grad_key,
    grad_value,
    blocks, parts, num_queries, num_keys, num_edges, total_queries, slots, first_batch, first_block, bias_query,
    bias_slot, bias_head, scale, softcap, kept, drop_below,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    AXES: tl.constexpr, ROWS: tl.constexpr, FAR: tl.constexpr, NUMBERED: tl.constexpr, CAP: tl.constexpr,
    BOOST: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradients of the keys and values of a block, of one head that these have, from a part of their queries."""
    b, part, block = _program(blocks, parts, first_batch, first_block)
    g = tl.program_id(1)
    scale, softcap, kept = _number(scale, W), _number(softcap, W), _number(kept, W)
    node, own, count = _rows(meta, table, block, AXES, ROWS)
    k = _load(key, b * num_keys + node, own, g, KV, D, DP)
    if DV > 0:
        v = _load(value, b * num_keys + node, own, g, KV, DV, DVP)
    dk = tl.zeros([ROWS, DP], W)
    dv = tl.zeros([ROWS, DVP], W)
    begin, end = _share(count, part, parts, FAR)
    for start in range(begin, end, FAR):
        c = start + tl.arange(0, FAR)
        far, real, slot = _edges(
            meta, table, block, by_query, total_queries, c, end, AXES, ROWS, FAR, True, NUMBERED
        )
        place = b * num_queries + far
        for member in range(H // KV):  # the query heads that share a key head
            h = g * (H // KV) + member
            q = _load(query, place, c < end, h, H, D, DP)
            base, low, d = _statistics(lse, lse_low, delta, place * H + h, c < end)
            s, dp = _product(q, tl.trans(k), W), tl.zeros([FAR, ROWS], W)
            if DV > 0:
                do = _load(grad_out, place, c < end, h, H, DV, DVP)
                dp = _product(do, tl.trans(v), W)
            zp, _ds, dqk = _grads(
                s, dp, base, low, d, bias, grad_weights, seed, far, slot, real, h, b, num_edges, slots, bias_query,
                bias_slot, bias_head, scale, softcap, kept, drop_below, H, CAP, FAR, ROWS, W,
            )  # fmt: skip
            if DV > 0:
                dv += _product(tl.trans((zp * BOOST).to(do.dtype)), do, W)
            dk += _gradient_product(dqk, q, True, W)
    at = (part * (tl.num_programs(0) // blocks // parts).to(tl.int64) + b) * num_keys + node
    _store(grad_key, at, own, g, KV, D, DP, dk)
    if DV > 0:
        _store(grad_value, at, own, g, KV, DV, DVP, dv * (kept / BOOST))


class _Axis(NamedTuple):
    """An axis of a pass; ``width`` is the number of far ends of a row, about."""

    rows: int
    far: int
    step: int
    slot_step: int
    slots: int
    width: int


class _Pass(NamedTuple):
    """The blocks of a pass.

    table: int32 [blocks of all axes, 4]: first row, rows, first far end, far ends. No rows stand for none, because
    there is room for as many blocks as there can be: nothing waits for the device to count.
    meta: for each axis where its blocks start, their stride and number; stride and width of rows within a block; step;
    strides of nodes, of far nodes; where its queries start in by_query; strides of slots at the start and of a step.
    """

    meta: Tensor
    table: Tensor
    blocks: int
    rows: int  # of a block
    far: int  # ends of a block, about


# By the tensor by_query: its version when they were made, and the passes by what they depend on.
_passes = WeakIdKeyDictionary()


def _pass(by_query, by_key, ptr, axes: Sequence[int], of_queries: bool, most: int) -> _Pass:
    """The blocks of at most so many rows, kept as long as their graph.

    A CUDA graph may be replayed with other numbers in the same place: there, the plan is part of the graph.
    """
    if by_query.is_inference() or (by_query.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _make_pass(by_query, by_key, ptr, axes, of_queries, most)
    entry = _passes.get(by_query)
    made = {} if entry is None or entry[0] != by_query._version else entry[1]
    _passes[by_query] = by_query._version, made
    if (of_queries, most) not in made:
        made[of_queries, most] = _make_pass(by_query, by_key, ptr, axes, of_queries, most)
    return made[of_queries, most]


def _make_pass(by_query, by_key, ptr, axes: Sequence[int], of_queries: bool, most: int) -> _Pass:
    lines = []
    for queries, keys, step, slot_step, slots in zip(*(axes[n::5] for n in range(5))):
        rows, far = (queries, keys) if of_queries else (keys, queries)
        width = far if slots in (0, keys) else min(slots, far)  # as many slots as keys: perhaps unbounded
        if ptr is not None:
            width = min(width, -(-far // max(ptr.numel() - 1, 1)))
        lines.append(_Axis(rows, far, step, slot_step, slots, max(width, 1)))
    sizes = _block_shape(lines, 1 if ptr is None else max(ptr.numel() - 1, 1), most)
    numbers, tables, start, first_query = [], [], 0, 0
    by_row = by_query if of_queries else by_key
    first_row = 0
    for line, size in zip(lines, sizes):
        of_axis = by_row[:2, first_row : first_row + line.rows]
        tables.append(_axis_blocks(of_axis[0], of_axis[1], ptr, line.step, size))
        numbers.append([start, 0, len(tables[-1]), 0, size, line.step, 0, 0, first_query, 0, 0])
        start += len(tables[-1])
        first_row += line.rows
        first_query += line.rows if of_queries else line.far
    strides = [1, 1, 1, 1, 1]  # of blocks, rows of a block, nodes, far nodes, slots
    for line, size, number in zip(reversed(lines), reversed(sizes), reversed(numbers)):
        number[1], number[3], number[6], number[7], number[9] = strides
        number[10] = line.slot_step * strides[4]
        along = (number[2], size, line.rows, line.far, line.slots)
        strides = [max(stride * n, 1) for stride, n in zip(strides, along)]
    meta = torch.empty(len(lines), len(numbers[0]), dtype=torch.int64, device=by_query.device)
    for line, number in zip(meta, numbers):
        for place, n in zip(line, number):
            place.fill_(n)  # no copy from the host, which a CUDA graph could not hold
    far = math.prod(min(-(-line.far // line.step), size + line.width - 1) for line, size in zip(lines, sizes))
    return _Pass(meta, torch.cat(tables), math.prod(map(len, tables)), max(math.prod(sizes), 16), far)


def _block_shape(axes: Sequence[_Axis], sequences: int, most: int) -> list[int]:
    """Rows of a block along each axis, powers of two: doubled where this adds the fewest far ends."""
    sizes = [1] * len(axes)
    while math.prod(sizes) < most:
        growth = {}
        for a, (axis, size) in enumerate(zip(axes, sizes)):
            if size < -(-axis.rows // (axis.step * sequences)):
                cells = -(-axis.far // axis.step)
                box, larger = (min(cells, n + axis.width - 1) for n in (size, 2 * size))
                growth[a] = larger / max(box, 1)
        if not growth:
            break
        sizes[min(growth, key=lambda a: (growth[a], -a))] *= 2
    return sizes


def _axis_blocks(first: Tensor, count: Tensor, ptr: Tensor | None, step: int, size: int) -> Tensor:
    """Blocks of rows with one sequence and residue, in order, those with the most far ends first."""
    n, device = first.numel(), first.device
    x = torch.arange(n, device=device)
    if ptr is None:
        sequences, group = 1, x % step
    else:
        sequences = ptr.numel() - 1
        sequence = torch.searchsorted(ptr, x, right=True) - 1
        group = (x - ptr[sequence]) % step + sequence * step
    order = x
    if step > 1:
        group, order = group.sort(stable=True)
    place = torch.searchsorted(group, group)  # of the first of the group
    starts = ((x - place) % size == 0).cumsum(0)
    blocks = min(n, n // size + min(n, sequences * step))  # the most that there can be
    at = torch.searchsorted(starts, torch.arange(1, blocks + 1, device=device))
    beyond = at == n
    at.clamp_(max=n - 1)
    rows = (torch.searchsorted(group, group[at], right=True) - at).clamp_(max=size).masked_fill_(beyond, 0)
    number = torch.arange(size, device=device)
    member = order[(at[:, None] + number).clamp_(max=n - 1)]
    first, count = first[member], count[member]
    used = (number < rows[:, None]) & (count > 0)
    low = first.masked_fill(~used, 2**31 - 1).amin(1)
    high = (first + step * (count - 1)).masked_fill_(~used, -1).amax(1)
    far = torch.where(high >= 0, (high - low) // step + 1, 0)
    table = torch.stack([order[at], rows, low.masked_fill_(high < 0, 0), far], 1)
    return table[far.sort(descending=True, stable=True).indices].int()


class _Call:
    """The arguments of an operator call as the kernels take them, and the launches."""

    def __init__(
        self, query, key, value, by_query, by_key, ptr, axes, layout, causal, bias, edge_attr, edge_projection, seed,
        scale, softcap, dropout_p, return_weights,
    ):  # fmt: skip
        self.wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.batch, self.num_queries, self.heads, self.dim = query.shape
        self.num_keys, self.kv_heads, self.value_dim = value.shape[1:]
        self.device, self.dtype = query.device, query.dtype
        if max(self.dim, self.value_dim) > _MOST:
            raise NotImplementedError(
                f"graph_attention's CUDA kernel for structured graphs takes heads of up to {_MOST} numbers, got"
                f" {max(self.dim, self.value_dim)}. Split them over more heads, or use graph.to_sparse()."
            )
        self.by_query = by_query.contiguous()
        self.graph = (by_query, by_key, ptr, axes)
        self.queries, self.keys, self.values = (x.contiguous() for x in (query, key, value))
        self.num_edges, self.slots = math.prod(layout), layout[1] if len(layout) > 1 else 0
        self.seed, self.bias = seed, None if bias is None else bias.contiguous()
        steps = [0, 0, 0]  # of the bias, for a query, slot and head
        if bias is not None:
            *nodes, heads = bias.shape
            steps[2] = int(heads > 1)
            steps[1] = heads if nodes[-1] > 1 else 0
            steps[0] = nodes[-1] * heads if len(nodes) > 1 and nodes[0] > 1 else 0
        self.numbered = seed is not None or steps[1] > 0
        self.scalars = {
            "num_queries": self.num_queries,
            "num_keys": self.num_keys,
            "num_edges": self.num_edges,
            "total_queries": by_query.size(1),
            "slots": self.slots,
            "bias_query": steps[0],
            "bias_slot": steps[1],
            "bias_head": steps[2],
            "scale": _bits(scale),
            "softcap": _bits(softcap),
            "kept": _bits(1.0 if seed is None else 1 / (1 - dropout_p) if dropout_p < 1 else 0.0),
            "drop_below": int(dropout_p * 2**53),
            "AXES": len(axes) // 5,
            "W": tl.float64 if self.wide == torch.float64 else tl.float32,
            "num_stages": 2,
            "enable_fp_fusion": True,
        }
        padded = [max(16, triton.next_power_of_2(n)) for n in (self.dim, self.value_dim)]
        self.keys_of = {"KV": self.kv_heads, "D": self.dim, "DP": padded[0]}
        self.values_of = {"DV": self.value_dim, "DVP": padded[1]}
        self.boost = {"BOOST": 2.0**15 if query.dtype == torch.float16 else 1.0}
        self.cap = {"CAP": softcap > 0}
        sizes = _TILES[query.element_size()]
        self.rows, self.far, warps = sizes[min(n for n in sizes if n >= max(padded))]
        if self.numbered:  # numbers of edges take room as well
            self.rows, self.far = max(16, self.rows // 2), max(16, self.far // 2)
        self.scalars["num_warps"] = warps

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.wide, device=self.device)

    def plan(self, of_queries: bool) -> tuple[_Pass, int]:
        """The blocks of a pass, and in how many parts to go through their far ends."""
        plan = _pass(*self.graph, of_queries, self.rows)
        programs = plan.blocks * self.batch * (self.heads if of_queries else self.kv_heads)
        parts = max(1, min(_PROGRAMS // max(programs, 1), plan.far // (8 * self.far)))
        if self.dtype == torch.float32:
            parts = max(parts, -(-plan.far // _SUMMED))
        return plan, parts

    def launch(
        self, kernel, plan: _Pass, parts: int, heads: int, *arguments,
        batches: range | None = None, blocks: range | None = None, **named,
    ) -> None:  # fmt: skip
        """Over leading indices, parts, blocks and heads."""
        batches, blocks = batches or range(self.batch), blocks or range(plan.blocks)
        if len(batches) and len(blocks):
            far = min(self.far, max(16, triton.next_power_of_2(plan.far)))
            kernel[(len(batches) * parts * len(blocks), heads)](
                plan.meta, plan.table, self.by_query, *arguments,
                blocks=len(blocks), parts=parts, first_batch=batches[0], first_block=blocks[0],
                H=self.heads, ROWS=plan.rows, FAR=far, **named, **self.scalars,
            )  # fmt: skip


def forward(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The body of ``graphattn::interval_attention``."""
    with torch.cuda.device_of(inputs[0]):
        return _forward(*inputs)


def backward(*arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The body of ``graphattn::interval_attention_backward``."""
    with torch.cuda.device_of(arguments[8]):
        return _backward(*arguments)


def _forward(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call, return_weights = _Call(*inputs), inputs[-1]
    rows = (call.batch, call.num_queries, call.heads)
    if _takes_flash(call, *inputs[8:]):
        return *_by_flash(call, *inputs[8:]), call.new(*rows, 0), call.new(0)
    plan, parts = call.plan(True)
    out = call.new(parts, *rows, call.value_dim)
    lse, lse_low = call.new(parts, *rows), call.new(parts, *rows)
    call.launch(
        _forward_kernel, plan, parts, call.heads, call.queries, call.keys, call.values, call.bias, call.seed, out, lse,
        lse_low, NUMBERED=call.numbered, LOWEST=torch.finfo(call.wide).min, **call.keys_of, **call.values_of,
        **call.boost, **call.cap,
    )  # fmt: skip
    out, lse, lse_low = _together(out, lse, lse_low) if parts > 1 else (out[0], lse[0], lse_low[0])
    weights = call.new(0)
    if return_weights:
        weights = torch.zeros(call.batch, call.num_edges, call.heads, dtype=call.wide, device=call.device)
        call.launch(
            _weights_kernel, plan, parts, call.heads, call.queries, call.keys, call.bias, lse, lse_low, weights,
            **call.keys_of, **call.cap,
        )  # fmt: skip
    return out, lse, lse_low, call.new(*rows, 0), weights


def _takes_flash(
    call: _Call, causal, bias, edge_attr, edge_projection, seed, scale, softcap, dropout_p, return_weights
) -> bool:
    """Whether `scaled_dot_product_attention` would do all that is asked for by its flash kernel.

    Half precision alone: its kernels for float32 do not say how exact their products and long sums are. And it looks
    for the largest product before it multiplies by the scale, which must not turn them around.
    """
    options = bias is not None or seed is not None or softcap or return_weights
    if causal is None or options or scale <= 0.0 or call.dim != call.value_dim or call.dim % 8:
        return False
    if call.num_keys == 0 or call.num_queries == 0 or not 0 < call.batch < 2**16:  # blocks of a launch
        return False
    of_torch = SDPAParams(*_heads_first(call, causal), None, 0.0, causal, call.heads != call.kv_heads)
    return call.dtype in (torch.float16, torch.bfloat16) and can_use_flash_attention(of_torch)


def _heads_first(call: _Call, causal: bool) -> list[Tensor]:
    """Queries, keys and values as flash attention takes them, without the keys that no query sees."""
    keys = min(call.num_keys, call.num_queries) if causal else call.num_keys
    return [
        x.transpose(1, 2)
        for x in (call.queries, call.keys.narrow(1, 0, keys), call.values.narrow(1, 0, keys))
    ]


def _by_flash(call: _Call, causal, *options) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and its low digits, which flash attention does not give: no more than half precision has are needed.

    The forward pass alone, as PyTorch's flash backward pass adds the gradients of a query in the order in which they
    come, and has no derivative of its own.
    """
    scale = options[4]
    out, lse, *_ = _flash(*_heads_first(call, causal), 0.0, causal, False, scale=scale)
    lse = lse.transpose(1, 2).contiguous()
    return out.transpose(1, 2).float().contiguous(), lse, torch.zeros_like(lse)


def _together(out: Tensor, lse: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows, from their parts."""
    top = lse.amax(0)
    empty = top == -math.inf
    share = ((lse - top.masked_fill(empty, 0.0)) + low).exp_()
    total = share.sum(0).masked_fill_(empty, 1.0)
    out = (out * share.unsqueeze(-1)).sum(0).div_(total.unsqueeze(-1))
    logarithm = total.log()
    lse = top + logarithm
    return out, lse, ((top - lse) + logarithm).masked_fill_(empty, 0.0)


def _backward(
    grad_out, grad_lse, grad_weights, out, lse, lse_low, aggregate, weights, *inputs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call, layout, bias = _Call(*inputs), inputs[7], inputs[9]
    batch, num_queries, num_keys, H = call.batch, call.num_queries, call.num_keys, call.heads
    # An empty gradient is one that is not there. The others have digits of the inputs' dtype, as the output had.
    if grad_out.numel() == out.numel():
        grad_out = grad_out.to(call.dtype).contiguous()
    else:
        grad_out = torch.zeros_like(out, dtype=call.dtype)
    grad_lse = grad_lse.contiguous() if grad_lse.numel() else None
    grad_weights = grad_weights.contiguous() if grad_weights.numel() else None
    out, lse, lse_low = (x.contiguous() for x in (out, lse, lse_low))
    rows, parts = call.plan(True)
    columns, key_parts = call.plan(False)

    delta = call.new(batch, num_queries, H)
    call.launch(
        _delta_kernel, rows, 1, H, out, grad_out, grad_lse, weights.contiguous(), grad_weights, delta, **call.values_of,
    )  # fmt: skip
    options = {**call.keys_of, **call.values_of, **call.cap}

    def gradient(number: int, *shape: int) -> Tensor:
        """Of one part, or in the wide dtype for each."""
        return call.new(number, *shape, dtype=call.dtype if number == 1 else None)

    grad_query = gradient(parts, batch, num_queries, H, call.dim)
    grad_bias, kind, held, chunk = None, "", None, max(rows.blocks, 1)
    if bias is not None:
        grad_bias = torch.zeros(bias.shape, dtype=call.wide, device=call.device)
        kind = "query" if bias.size(-2) == 1 else "edge" if len(layout) == 1 or bias.size(0) > 1 else "slot"
        if kind == "query":
            held = torch.zeros(parts, batch, num_queries, H, dtype=call.wide, device=call.device)
        elif kind == "edge":
            held = torch.zeros(call.num_edges, H, dtype=call.wide, device=call.device)
        else:
            chunk = max(1, min(chunk, _FOR_BIAS // max(rows.rows * call.slots * H, 1)))
            held = torch.zeros(chunk * rows.rows, call.slots, H, dtype=call.wide, device=call.device)
    numbered = call.numbered or grad_weights is not None or kind in ("edge", "slot")
    # What is summed per edge belongs to one leading index at a time.
    turns = batch if kind in ("edge", "slot") else 1
    for first in range(0, rows.blocks, chunk):
        for b in range(turns):
            call.launch(
                _query_kernel, rows, parts, H, call.queries, call.keys, call.values, call.bias, call.seed, grad_out,
                grad_weights, lse, lse_low, delta, grad_query, held,
                batches=range(b, b + 1) if turns > 1 else None,
                blocks=range(first, min(first + chunk, rows.blocks)), NUMBERED=numbered, BIAS=kind, ADD=b > 0,
                **options,
            )  # fmt: skip
        if kind == "slot":
            grad_bias += held.sum(0, keepdim=True).sum_to_size(grad_bias.shape)
            held.zero_()
    if kind == "query":
        grad_bias = held.sum((0, 1)).view(num_queries, *[1] * (len(layout) - 1), H).sum_to_size(bias.shape)
    elif kind == "edge":
        grad_bias = held.view(*layout, H).sum_to_size(bias.shape)

    grad_key = gradient(key_parts, batch, num_keys, call.kv_heads, call.dim)
    grad_value = gradient(key_parts, batch, num_keys, call.kv_heads, call.value_dim)
    call.launch(
        _key_kernel, columns, key_parts, call.kv_heads, call.queries, call.keys, call.values, call.bias, call.seed,
        grad_out, grad_weights, lse, lse_low, delta, grad_key, grad_value,
        NUMBERED=call.numbered or grad_weights is not None, **options, **call.boost,
    )  # fmt: skip
    none = [inputs[0].new_empty(0) for _ in range(3)]
    return (
        _summed(grad_query, call.dtype),
        _summed(grad_key, call.dtype),
        _summed(grad_value, call.dtype),
        none[0] if grad_bias is None else grad_bias.to(bias.dtype).contiguous(),
        none[1],
        none[2],
    )


def _summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0).to(dtype)
