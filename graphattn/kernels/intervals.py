"""Attention on edges that follow from a rule, as a PyTorch operator: nothing is listed for an edge.

Nodes stand on one or several axes, row-major, the last axis running fastest. Along each, the keys of a query are an
arithmetic progression, and so are the queries of a key; the edges of a query are all combinations of its keys on the
axes. This is what complete graphs, windows, grids and ragged batches of them have in common (see
graphattn.graph.axis_intervals).

by_query ``[3, queries of all axes]``, axis after axis: for the query at coordinate x of an axis the first key, how many
keys, the slot of the first. by_key ``[2, keys of all axes]``: for a key the first query, how many. axes: five numbers
for each axis, (queries, keys, distance of neighbouring keys and of neighbouring queries, of their slots, number of
slots). The entry of an edge in per-edge tensors has the number query · (slots of all axes) + slot, row-major in
``layout`` = [queries, slots]; with 0 slots the slot alone, of ``layout`` = [edges]. ptr: where sequences start and end,
if the nodes of the one axis are several sequences. causal: True if query i attends to the keys 0 to i and there are no
fewer keys than queries, False if all attend to all, else None. It tells nothing new, but lets a kernel be chosen whose
lse is good enough for the backward pass alone: None as well where lse is asked for.
"""

import torch
from torch import Tensor

from graphattn.kernels.sparse import define, triton_kernels


def _layout(by_query, by_key, ptr, axes, layout, causal):
    return layout


def _listed(by_query, by_key, ptr, axes, layout, causal) -> tuple[Tensor, Tensor, Tensor]:
    """rowptr, col and edge_id as for `reference.sparse_attention`, edges of a query in the order of their keys."""
    degree, start, parts = by_query.new_ones(1), 0, []
    for size, keys, step, slot_step, slots in zip(*(axes[n::5] for n in range(5))):
        x = torch.arange(start, start + size, device=by_query.device)
        degree = (degree[:, None] * by_query[1, x]).view(-1)
        parts = [(at.repeat_interleave(size), *rest) for at, *rest in parts]
        parts.append((x.repeat(degree.numel() // max(size, 1)), keys, step, slot_step, slots))
        start += size
    query = torch.arange(degree.numel(), device=by_query.device).repeat_interleave(degree)
    rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    rank = torch.arange(query.numel(), device=by_query.device) - rowptr[query]
    col, number, key_stride, slot_stride = torch.zeros_like(query), torch.zeros_like(query), 1, 1
    for at, keys, step, slot_step, slots in reversed(parts):
        first, count, slot = by_query[:, at[query]]
        t = rank % count
        rank = rank // count
        col += (first + step * t) * key_stride
        number += (slot + slot_step * t) * slot_stride
        key_stride, slot_stride = key_stride * keys, slot_stride * slots
    return rowptr, col, number + query * slot_stride


def _forward_cpu(query, key, value, by_query, by_key, ptr, axes, layout, causal, *options):
    from graphattn.kernels import sparse_cpu  # Numba loads where a kernel runs

    rows = sparse_cpu.progressions(by_query, by_key, axes, layout, True, _numbered(options))
    return sparse_cpu.forward(rows, query, key, value, *options)


def _backward_cpu(*arguments):
    from graphattn.kernels import sparse_cpu

    (by_query, by_key, _, axes, layout, _), options = arguments[11:17], arguments[17:-1]
    rows, columns = (
        sparse_cpu.progressions(by_query, by_key, axes, layout, of_queries, _numbered(options))
        for of_queries in (True, False)
    )
    return sparse_cpu.backward(rows, columns, *(arguments[:11] + arguments[17:]))


def _numbered(options) -> bool:
    bias, _, _, seed, *_, return_weights = options
    return bias is not None or seed is not None or return_weights


_interval_attention = define(
    "interval_attention",
    "Tensor by_query, Tensor by_key, Tensor? ptr, SymInt[] axes, SymInt[] layout, bool? causal",
    _layout,
    _listed,
    _forward_cpu,
    _backward_cpu,
    lambda *inputs: triton_kernels("intervals_triton").forward(*inputs),
    lambda *arguments: triton_kernels("intervals_triton").backward(*arguments),
)


def interval_attention(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Attend over the edges of a graph: the description above, the meaning of `reference.sparse_attention`.

    The outputs are float32, or float64 for float64 inputs. Differentiable in reverse mode, twice in eager mode.
    Edges have no features: ``edge_attr`` and ``edge_projection`` must be None.
    """
    out, lse, _, _, weights = _interval_attention(*inputs)
    return out, lse, weights
