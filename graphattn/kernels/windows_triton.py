"""Attention on listed edges on the GPU where neighbouring rows share their far ends: matrix products of tiles.

`graphattn.kernels.sparse_triton` reads a far end once for every edge. Here 64 rows are a window, and the far ends of
all of them its columns, each listed once with a mask of the rows that it is joined to:

    rows     i0  i1  i2  i3          columns  j2    j5    j5    j9
    edges    j2  j5  j2  j5          masks    1010  1101  0100  0011        bit r: an edge with row r
             j5  j5  j9  j9                                                 parallel edges: columns of their own

A program goes through the columns of a window for one head, some at a time, reads their rows of K and V once and works
on the tile [rows, columns] of scores, as FlashAttention does (Dao et al. 2022), -inf where the mask has no bit:

    S = Q Kᵀ,   m' = max(m, S),   l' = l exp(m - m') + Σ exp(S - m'),   O' = O exp(m - m') + exp(S - m') V

That is 64 products and exponentials for a column instead of one for an edge, but a read for a column instead of one for
an edge. It pays where a window has enough edges for each column. Windows are formed of rows with about as many edges,
hubs with hubs, in the order of the graph otherwise; those with too few edges for a column are left to the other
kernels, row by row (Li and Chandramowlishwaran 2025, Fused3S, compact the columns of windows of 16 rows).

Backward by the formulas of `graphattn.kernels.sparse_triton`: a pass over the windows of queries for dQ, one over those
of keys, in the transposed graph, for dK and dV. Long windows are cut into pieces, put together in their order.

In a product with 0 weights, an infinite or NaN number in a row of V would reach queries without an edge from it. A
program whose sums are not finite leaves a mark, and the kernel runs again where a mark is: with 0 in place of such
numbers in the products, then adding them, column by column, to the rows that are joined to them.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalOperand=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
# (a kernel is read by Triton, whose types are not Python's)
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from graphattn.kernels import sparse_triton
from graphattn.kernels.intervals_triton import (
    _gradient_product,
    _load,
    _modified,
    _product,
    _statistics,
    _store,
)
from graphattn.kernels.sparse_triton import _number, _Plan

_ROWS = tl.constexpr(64)  # of a window: bits of a mask
# Edges for a column from which a window pays. By counts of bytes, products and exponentials, not measured: in float32
# without tf32 products have no tensor cores.
_LEAST = {torch.float16: 1.5, torch.bfloat16: 1.5, torch.float32: 8.0}
_DEGREE = 16  # edges of a row from which windows are looked for: finding them takes a sort of all edges
# Columns and warps of a program by bytes of a number and numbers of a head: as many as registers have room for.
_TILES = {
    2: {64: (32, 4), 128: (32, 8)},
    4: {16: (32, 8), 64: (16, 8)},
}

# What changes from graph to graph is not compiled in.
_kernel = triton.jit(
    do_not_specialize=("num_tasks", "num_slots", "num_queries", "num_keys", "scale", "softcap")
)


@triton.jit
def _task(segments, rows, marks, num_tasks, heads, CAREFUL: tl.constexpr):
    """Leading index and head of a program; nodes [64] of its window (-1: none), first column, columns and slot.

    Nothing to do when the kernel runs again and there is no mark.
    """
    number = tl.program_id(0)
    at = segments + (number // heads % num_tasks).to(tl.int64) * 4
    node = tl.load(rows + (tl.load(at).to(tl.int64) * _ROWS + tl.arange(0, _ROWS))).to(tl.int64)
    b = (number // heads // num_tasks).to(tl.int64)
    first, count = tl.load(at + 1).to(tl.int64), tl.load(at + 2)
    # for each row, as the interpreter of Triton 3.9 makes int64 of the conjunction of bools of one shape and another
    slot = tl.load(at + 3).to(tl.int64) + tl.zeros([_ROWS], tl.int64)
    if CAREFUL:
        marked = tl.load(marks + number) != 0
        node, count = tl.where(marked, node, -1), tl.where(marked, count, 0)
    return b, number % heads, node, first, count, slot


@triton.jit
def _joined(masks, at, there, BY_KEY: tl.constexpr):
    """Where rows and columns have an edge: [rows, columns], or [columns, rows] where rows are keys."""
    mask, r = tl.load(masks + at, there, 0), tl.arange(0, _ROWS)
    low, high = mask.to(tl.int32), (mask >> 32).to(tl.int32)
    if BY_KEY:
        word = tl.where((r < 32)[None, :], low[:, None], high[:, None]) >> (r % 32)[None, :]
    else:
        word = tl.where((r < 32)[:, None], low[None, :], high[None, :]) >> (r % 32)[:, None]
    return (word & 1) != 0


@triton.jit
def _finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _others(
    masks,
    columns,
    first,
    count,
    x,
    base,
    h,
    H: tl.constexpr,
    D: tl.constexpr,
    PAD: tl.constexpr,
    W: tl.constexpr,
):
    """Sums [64, PAD] of the numbers in x[far end, h] that are not finite, column by column, over the rows joined."""
    r, d = tl.arange(0, _ROWS), tl.arange(0, PAD)
    sums = tl.zeros([_ROWS, PAD], W)
    for c in range(count):
        far = base + tl.load(columns + first + c)
        row = tl.load(x + ((far * H + h) * D + d), d < D, 0.0).to(W)
        joined = (tl.load(masks + first + c) >> r) & 1
        lost = (joined != 0)[:, None] & ((tl.abs(row) < float("inf")) == 0)[None, :]
        sums += tl.where(lost, row[None, :], 0.0)
    return sums


@triton.jit
def _mark(marks, sums):
    """Whether some sum is not finite."""
    tl.store(marks + tl.program_id(0), tl.max(tl.where(tl.abs(sums) < float("inf"), 0, 1)))


@triton.jit
def _put(
    x, work, place, slot, b, own, num_slots, h, H: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, value
):
    """Store the rows of a window, or of a piece of one in the workspace, where the pieces of a row lie together."""
    _store(x, place, own & (slot < 0), h, H, D, PAD, value)
    if work is not None:
        at = (b * _ROWS + tl.arange(0, _ROWS)) * num_slots + slot
        _store(work, at, own & (slot >= 0), h, H, D, PAD, value)


@_kernel
def _window_forward_kernel(
    segments, rows, columns, masks, marks, query, key, value, out, lse, lse_low, work_peak, work_norm, work_out,
    num_tasks, num_slots, num_queries, num_keys, scale, softcap,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    COLUMNS: tl.constexpr, CAP: tl.constexpr, BOOST: tl.constexpr, CAREFUL: tl.constexpr, W: tl.constexpr,
    LOWEST: tl.constexpr,
):  # fmt: skip
    """The output and lse of the queries of a window, or of a piece of one, of one head."""
    b, h, node, first, count, slot = _task(segments, rows, marks, num_tasks, H, CAREFUL)
    g, own, place = h // (H // KV), node >= 0, b * num_queries + node
    scale, softcap = _number(scale, W), _number(softcap, W)
    q = _load(query, place, own, h, H, D, DP)
    peak = tl.full([_ROWS], LOWEST, W)
    norm = tl.zeros([_ROWS], W)
    sums = tl.zeros([_ROWS, DVP], W)
    for start in range(0, count, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        at, there = first + c, c < count
        far = b * num_keys + tl.load(columns + at, there, 0)
        k, v = _load(key, far, there, g, KV, D, DP), _load(value, far, there, g, KV, DV, DVP)
        real = _joined(masks, at, there, False)
        s = _product(q, tl.trans(k), W)
        s, _slope = _modified(s, None, 0, 0, real, h, 0, 0, 0, scale, softcap, CAP, W)
        higher = tl.maximum(peak, tl.max(s, 1))
        shrink, p = tl.exp(peak - higher), tl.exp(s - higher[:, None])
        peak, norm = higher, norm * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None]
        if CAREFUL:
            v = _finite(v)
        sums += _product((p * BOOST).to(v.dtype), v, W)
    if CAREFUL:
        sums += _others(masks, columns, first, count, value, b * num_keys, g, KV, DV, DVP, W)
    else:
        _mark(marks, sums)
    empty, whole = norm == 0, own & (slot < 0)
    logarithm = tl.log(tl.where(empty, 1.0, norm))
    full = peak + logarithm
    low = tl.where(empty, 0.0, (peak - full) + logarithm)
    tl.store(lse + (place * H + h), tl.where(empty, -float("inf"), full), whole)
    tl.store(lse_low + (place * H + h), low, whole)
    if work_peak is not None:
        at, piece = (b * _ROWS + tl.arange(0, _ROWS)) * num_slots + slot, own & (slot >= 0)
        tl.store(work_peak + (at * H + h), peak, piece)
        tl.store(work_norm + (at * H + h), norm, piece)
    sums = sums / (tl.where(empty | (slot >= 0), 1.0, norm) * BOOST)[:, None]
    _put(out, work_out, place, slot, b, own, num_slots, h, H, DV, DVP, sums)


@triton.jit
def _grads(s, dp, base, low, d, real, h, scale, softcap, CAP: tl.constexpr, W: tl.constexpr):
    """From q·k and dO·v to the weights and the gradients of q·k, 0 without an edge, though lse may be NaN."""
    s, slope = _modified(s, None, 0, 0, real, h, 0, 0, 0, scale, softcap, CAP, W)
    p = tl.exp((s - base[:, None]) - low[:, None])
    return tl.where(real, p, 0.0), tl.where(real, p * (dp - d[:, None]) * slope, 0.0)


@_kernel
def _window_query_kernel(
    segments, rows, columns, masks, marks, query, key, value, grad_out, lse, lse_low, delta, grad_query, work_query,
    num_tasks, num_slots, num_queries, num_keys, scale, softcap,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    COLUMNS: tl.constexpr, CAP: tl.constexpr, BOOST: tl.constexpr, CAREFUL: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradients of the queries of a window, or of a piece of one, of one head."""
    b, h, node, first, count, slot = _task(segments, rows, marks, num_tasks, H, CAREFUL)
    g, own, place = h // (H // KV), node >= 0, b * num_queries + node
    scale, softcap = _number(scale, W), _number(softcap, W)
    q, do = _load(query, place, own, h, H, D, DP), _load(grad_out, place, own, h, H, DV, DVP)
    base, low, d = _statistics(lse, lse_low, delta, place * H + h, own)
    dq = tl.zeros([_ROWS, DP], W)
    for start in range(0, count, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        at, there = first + c, c < count
        far = b * num_keys + tl.load(columns + at, there, 0)
        k, v = _load(key, far, there, g, KV, D, DP), _load(value, far, there, g, KV, DV, DVP)
        real = _joined(masks, at, there, False)
        s, dp = _product(q, tl.trans(k), W), _product(do, tl.trans(v), W)
        _p, ds = _grads(s, dp, base, low, d, real, h, scale, softcap, CAP, W)
        if CAREFUL:
            k = _finite(k)
        dq += _gradient_product(ds, k, False, W)
    if CAREFUL:
        dq += _others(masks, columns, first, count, key, b * num_keys, g, KV, D, DP, W)
    else:
        _mark(marks, dq)
    _put(grad_query, work_query, place, slot, b, own, num_slots, h, H, D, DP, dq)


@_kernel
def _window_key_kernel(
    segments, rows, columns, masks, marks, query, key, value, grad_out, lse, lse_low, delta, grad_key, grad_value,
    work_key, work_value, num_tasks, num_slots, num_queries, num_keys, scale, softcap,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    COLUMNS: tl.constexpr, CAP: tl.constexpr, BOOST: tl.constexpr, CAREFUL: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradients of the keys and values of a window, or of a piece of one, of one head that these have."""
    b, g, node, first, count, slot = _task(segments, rows, marks, num_tasks, KV, CAREFUL)
    own, place = node >= 0, b * num_keys + node
    scale, softcap = _number(scale, W), _number(softcap, W)
    k, v = _load(key, place, own, g, KV, D, DP), _load(value, place, own, g, KV, DV, DVP)
    dk = tl.zeros([_ROWS, DP], W)
    dv = tl.zeros([_ROWS, DVP], W)
    for start in range(0, count, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        at, there = first + c, c < count
        far = b * num_queries + tl.load(columns + at, there, 0)
        real = _joined(masks, at, there, True)
        for member in range(H // KV):  # the query heads that share a key head
            h = g * (H // KV) + member
            q, do = _load(query, far, there, h, H, D, DP), _load(grad_out, far, there, h, H, DV, DVP)
            base, low, d = _statistics(lse, lse_low, delta, far * H + h, there)
            s, dp = _product(q, tl.trans(k), W), _product(do, tl.trans(v), W)
            p, ds = _grads(s, dp, base, low, d, real, h, scale, softcap, CAP, W)
            if CAREFUL:
                q, do = _finite(q), _finite(do)
            dv += _product(tl.trans((p * BOOST).to(do.dtype)), do, W)
            dk += _gradient_product(ds, q, True, W)
    if CAREFUL:
        for member in range(H // KV):
            h = g * (H // KV) + member
            dk += _others(masks, columns, first, count, query, b * num_queries, h, H, D, DP, W)
            dv += _others(masks, columns, first, count, grad_out, b * num_queries, h, H, DV, DVP, W)
    else:
        _mark(marks, tl.sum(dk, 1)[:, None] + dv)
    _put(grad_key, work_key, place, slot, b, own, num_slots, g, KV, D, DP, dk)
    _put(grad_value, work_value, place, slot, b, own, num_slots, g, KV, DV, DVP, dv / BOOST)


class _Windows(NamedTuple):
    """The windows of a pass that pay, and what is left.

    rows: int32 [windows, 64], -1 for none; columns: int32, their far ends, and masks: int64, window after window. plan:
    as of rows with edges, segments are those of windows with columns, and long rows those of windows in pieces. rest:
    the plan of the rows in no window.
    """

    rows: Tensor
    columns: Tensor
    masks: Tensor
    plan: _Plan
    rest: _Plan


# By the tensor of row pointers: versions of both tensors when they were found, and the windows by the least of edges
# for a column.
_kept = WeakIdKeyDictionary()


def _windows(pointer: Tensor, far: Tensor, num_far: int, least: float) -> _Windows | None:
    """The windows of these rows if there are any, kept as long as their pointers are.

    The host waits for the device to count them, once for a graph. What a CUDA graph captures can not, and may be
    replayed with other edges in the same place: there, and where nothing can be kept, none are looked for.
    """
    if far.numel() < max(1, _DEGREE * (pointer.numel() - 1)) or pointer.is_inference() or far.is_inference():
        return None
    if pointer.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    versions = pointer._version, far._version
    entry = _kept.get(pointer)
    found = {} if entry is None or entry[0] != versions else entry[1]
    _kept[pointer] = versions, found
    if least not in found:
        found[least] = _make_windows(pointer, far, num_far, least)
    return found[least]


def _piece(num_columns: int) -> int:
    """The most columns of a segment: segments enough for the device, sums not too long."""
    return max(512, min(8192, triton.next_power_of_2(num_columns // 1024)))


def _make_windows(pointer: Tensor, far: Tensor, num_far: int, least: float) -> _Windows | None:
    num_rows, num_edges, device = pointer.numel() - 1, far.numel(), pointer.device
    width = _ROWS.value
    degree = pointer.diff()
    windows = -(-num_rows // width)
    order = torch.frexp(degree.double()).exponent.sort(descending=True, stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(num_rows, device=device)

    # Every edge by window, far end and row: parallel edges are neighbours, and the first, second, ... of each take part
    # in another column.
    x = place.repeat_interleave(degree, output_size=num_edges)
    x = (((x // width) * num_far + far) * width + x % width).sort().values
    new = torch.ones(num_edges, dtype=torch.bool, device=device)
    torch.ne(x[1:], x[:-1], out=new[1:])
    number = torch.arange(num_edges, device=device)
    turn = number - torch.where(new, number, 0).cummax(0).values
    if turn.any():
        turn, by_turn = turn.sort(stable=True)
        x = x[by_turn]
        by_cell = (x // width).sort(stable=True).indices
        x, turn = x[by_cell], turn[by_cell]
    cell, bit = x // width, torch.ones_like(x) << (x % width)
    new[1:] = (cell[1:] != cell[:-1]) | (turn[1:] != turn[:-1])
    cell = cell[new]
    masks = torch.zeros_like(cell).index_add_(0, new.cumsum(0) - 1, bit)

    window = cell // num_far
    count = torch.bincount(window, minlength=windows)
    padded = order.new_full((windows * width,), -1)
    padded[:num_rows] = order
    rows = padded.view(windows, width)
    edges = torch.where(rows < 0, 0, degree[rows]).sum(1)
    pays = (edges >= least * count) & (count > 0)
    if not pays.any():
        return None
    used = pays[window]
    count, rows = count[pays], rows[pays]
    ends = torch.cat([count.new_zeros(1), count.cumsum(0)])
    num_columns = int(used.sum())
    in_window = torch.zeros(num_rows, dtype=torch.bool, device=device)
    in_window[rows[rows >= 0]] = True
    rows = rows.int()
    return _Windows(
        rows,
        (cell % num_far)[used].int(),
        masks[used],
        _of_rows(sparse_triton._make_plan(ends, num_columns, _piece(num_columns)), rows),
        _without(sparse_triton._make_plan(pointer, num_edges), in_window),
    )


def _of_rows(plan: _Plan, rows: Tensor) -> _Plan:
    """A plan of windows whose long rows are rows: their pieces lie in the workspace row by row of a window."""
    segments, long = (x[x[:, 0] >= 0] for x in (plan.segments, plan.long))
    slots = int(long[:, 2].sum())
    nodes = rows[long[:, 0]]
    first = torch.arange(rows.size(1), dtype=torch.int32, device=rows.device) * slots + long[:, 1:2]
    pieces = long[:, 2:3].masked_fill(nodes < 0, 0)
    long = torch.stack([nodes, first, pieces, torch.full_like(nodes, -1)], 2).view(-1, 4)
    return _Plan(segments, long, rows.size(1) * slots)


def _without(plan: _Plan, rows: Tensor) -> _Plan:
    """What a plan has of other rows."""
    segments, long = (x[(x[:, 0] >= 0) & ~rows[x[:, 0]]] for x in (plan.segments, plan.long))
    return _Plan(segments, long, plan.slots if len(long) else 0)


def _chosen(inputs, of_queries: bool) -> _Windows | None:
    """The windows of a pass, if the call has no option that only the other kernels have."""
    query, key, value, rowptr, col, _, colptr, row, _, bias, edge_attr, _, seed, *_, return_weights = inputs
    least = _LEAST.get(query.dtype)
    widest = max(query.size(-1), value.size(-1))
    options = bias is not None or edge_attr is not None or seed is not None or return_weights
    if options or least is None or widest > max(_TILES[query.element_size()]):
        return None
    if value.size(-1) == 0 or query.size(0) == 0:
        return None
    if of_queries:
        return _windows(rowptr, col, key.size(1), least)
    return _windows(colptr, row, query.size(1), least)


class _Call(sparse_triton._Call):
    """The arguments of an operator call as the kernels take them, and the launches."""

    def __init__(self, *inputs) -> None:
        super().__init__(*inputs)
        padded = [max(16, triton.next_power_of_2(n)) for n in (self.dim, self.value_dim)]
        sizes = _TILES[self.dtype.itemsize]
        columns, warps = sizes[min(n for n in sizes if n >= max(padded))]
        self.tiles = {
            "num_queries": self.num_queries, "num_keys": self.num_keys, "scale": self.scalars["scale"],
            "softcap": self.scalars["softcap"], "H": self.heads, "KV": self.kv_heads, "D": self.dim, "DP": padded[0],
            "DV": self.value_dim, "DVP": padded[1], "COLUMNS": columns, "CAP": inputs[14] > 0,
            "BOOST": 2.0**15 if self.dtype == torch.float16 else 1.0, **self.compiled, "num_warps": warps,
            "num_stages": 1 if self.dtype == torch.float32 else 2,  # its products leave no registers for loads ahead
        }  # fmt: skip

    def over(self, kernel, windows: _Windows, heads: int, *arguments, **named) -> None:
        """Launch over leading indices, segments and heads; and again where some number was not finite."""
        tasks = len(windows.plan.segments)
        programs = self.batch * tasks * heads
        marks = self.new(programs, dtype=torch.int32)
        for careful in (False, True):
            kernel[(programs,)](
                windows.plan.segments, windows.rows, windows.columns, windows.masks, marks, self.queries, self.keys,
                self.values, *arguments, num_tasks=tasks, num_slots=windows.plan.slots // _ROWS.value, CAREFUL=careful,
                **named, **self.tiles,
            )  # fmt: skip


def forward(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The body of ``graphattn::sparse_attention``."""
    with torch.cuda.device_of(inputs[0]):
        windows = _chosen(inputs, True)
        if windows is None:
            return sparse_triton.forward(*inputs)
        results = sparse_triton._forward(*inputs, plan=windows.rest)
        call, (out, lse, lse_low, _, _) = _Call(*inputs), results
        work = [call.work(windows.plan, call.heads, *more) for more in ((), (), (call.value_dim,))]
        call.over(_window_forward_kernel, windows, call.heads, out, lse, lse_low, *work, **call.lowest)
        tile = call.tile(32, call.heads, call.num_queries)
        call.merge_softmax(windows.plan, tile, out, lse, lse_low, None, *work, None)
        return results


def backward(*arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The body of ``graphattn::sparse_attention_backward``."""
    with torch.cuda.device_of(arguments[8]):
        inputs = arguments[8:]
        rows, columns = _chosen(inputs, True), _chosen(inputs, False)
        if rows is None and columns is None:
            return sparse_triton.backward(*arguments)
        rests = (None if windows is None else windows.rest for windows in (rows, columns))
        grads = sparse_triton._backward(*arguments, **dict(zip(("rows", "columns"), rests)))
        grad_out, grad_lse, _, out, lse, lse_low = arguments[:6]
        call = _Call(*inputs)
        grad_out = call.flowing(grad_out, out)
        grad_lse = grad_lse.contiguous() if grad_lse.numel() else None
        out, lse, lse_low = (x.contiguous() for x in (out, lse, lse_low))
        delta = call.delta(call.rowptr, None, out, grad_out, grad_lse, None, None)
        given = (grad_out, lse, lse_low, delta)
        if rows is not None:
            work = call.work(rows.plan, call.heads, call.dim)
            call.over(_window_query_kernel, rows, call.heads, *given, grads[0], work)
            call.merge(rows.plan, grads[0], work)
        if columns is not None:
            work = [call.work(columns.plan, call.kv_heads, n) for n in (call.dim, call.value_dim)]
            call.over(_window_key_kernel, columns, call.kv_heads, *given, grads[1], grads[2], *work)
            for grad, of_pieces in zip(grads[1:], work):
                call.merge(columns.plan, grad, of_pieces)
        return grads
