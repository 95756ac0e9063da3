"""The definition of attention on the edges of a graph, in pure PyTorch.

For an edge from key j to query i, head h:

    s_ij = softcap(scale · q_i·(k_j + e_ij W)) + b_ij        softcap_c(s) = c · tanh(s / c)
    p_ij = exp(s_ij) / Σ_j exp(s_ij),   lse_i = log Σ_j exp(s_ij)
    out_i = Σ_j z_ij p_ij (v_j + e_ij W)

with the edge features e_ij and their projection W, and the dropout factor z_ij, 0 or 1 / (1 - dropout_p). It
lists every edge and is as slow as that sounds: it is the oracle of the tests and, because PyTorch can
differentiate it any number of times, the formula behind second derivatives.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def dropout_factors(
    seed: Tensor, edge_id: Tensor, batch: int, heads: int, dropout_p: float, num_edges: int | None = None
) -> Tensor:
    """Draw the factors ``[batch, E, heads]``: 0 with probability dropout_p, else 1 / (1 - dropout_p).

    Every (leading index, edge, head) hashes its own number and the seed with SplitMix64 (Steele et al. 2014),
    so the same draw can be made again, in any order, on any device. PyTorch has no unsigned 64-bit
    arithmetic: int64 products wrap the same way, and a mask makes the arithmetic right shift a logical one.
    Edge numbers are below num_edges, as many as there are edges by default.
    """

    def shift(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    leading = torch.arange(batch, device=seed.device).view(-1, 1, 1)
    head = torch.arange(heads, device=seed.device)
    num_edges = edge_id.numel() if num_edges is None else num_edges
    x = (leading * num_edges + edge_id.long().view(-1, 1)) * heads + head + 1
    x = seed + x * -0x61C8864680B583EB
    x = (x ^ shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ shift(x, 27)) * -0x6B2FB644ECCEEE15
    keep = shift(x ^ shift(x, 31), 11) >= int(dropout_p * 2**53)
    return keep.double() * (1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rowptr: Tensor,
    col: Tensor,
    edge_id: Tensor,
    bias: Tensor | None,
    edge_attr: Tensor | None,
    edge_projection: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    dropout_p: float,
    layout: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend over the listed edges.

    Args:
        query, key, value: ``[B, Nq, H, D]``, ``[B, Nk, Hkv, D]``, ``[B, Nk, Hkv, Dv]`` with H a multiple of
            Hkv.
        rowptr, col, edge_id: the graph by query: edge ``rowptr[i] <= t < rowptr[i + 1]`` of query i comes
            from key ``col[t]`` and has the number ``edge_id[t]`` in every per-edge tensor.
        bias: ``[E or 1, H or 1]``; with a layout ``[*layout, H]``, any of these 1.
        edge_attr, edge_projection: ``[E, F]`` and ``[H, F, D]``; not added to values of no dim.
        seed: int64 ``[1]``, read where dropout_p > 0.
        softcap: 0 for none.
        layout: shape of per-edge tensors, in which edges have their row-major numbers, ``(E,)`` by default.

    Returns:
        out ``[B, Nq, H, Dv]``, lse ``[B, Nq, H]`` and weights ``[B, E, H]`` before dropout, in the order of
        the edge numbers (with a layout, of all places of it, 0 where no edge is); all float32, or float64 for
        float64 inputs.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    batch, num_queries, heads, _ = query.shape
    group = heads // key.size(2) if heads else 1
    row = torch.arange(num_queries, device=col.device)
    row = row.repeat_interleave(rowptr.diff(), output_size=col.numel())
    col, edge_id = col.long(), edge_id.long()
    layout = (edge_id.numel(),) if layout is None else layout
    num_edges = math.prod(layout)
    key_j = key[:, col].repeat_interleave(group, dim=2)
    value_j = value[:, col].repeat_interleave(group, dim=2)

    if edge_attr is not None and edge_projection is not None:
        term = torch.einsum("ef,hfd->ehd", edge_attr.to(wide)[edge_id], edge_projection.to(wide))
        key_j = key_j + term
        value_j = value_j + term if value.size(-1) else value_j

    score = (query[:, row] * key_j).sum(-1) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias.to(wide).expand(*layout, heads)[torch.unravel_index(edge_id, tuple(layout))]

    # The largest score only keeps exp in range: it cancels out and needs no gradient.
    index = row.view(1, -1, 1).expand_as(score)
    peak = score.new_full((batch, num_queries, heads), -torch.inf)
    peak = peak.scatter_reduce(1, index, score.detach(), "amax")
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight = torch.exp(score - peak[:, row])
    total = torch.zeros_like(peak).index_add(1, row, weight)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    weight = weight / total[:, row]
    lse = torch.where(empty, -torch.inf, peak + torch.log(total))

    kept = weight
    if dropout_p > 0.0 and seed is not None:
        kept = weight * dropout_factors(seed, edge_id, batch, heads, dropout_p, num_edges).to(wide)
    out = value.new_zeros(batch, num_queries, heads, value.size(-1))
    out = out.index_add(1, row, kept.unsqueeze(-1) * value_j)
    weights = weight.new_zeros(batch, num_edges, heads).index_copy(1, edge_id, weight)
    return out, lse, weights
