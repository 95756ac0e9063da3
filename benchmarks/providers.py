"""Who is measured: the same operator and the same layer, each written as its library's users write it."""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch_geometric.utils import scatter, softmax, to_dense_batch

import graphattn.nn
from benchmarks.cases import EdgeList
from graphattn import CompleteGraph, Graph, GridGraph, SparseGraph, WindowGraph, graph_attention

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Provider:
    """One contender; everything that depends on the graph alone is built before the clock starts.

    Args:
        operator: from a graph to attention on (query, key, value), each [nodes, heads, dim]; ImportError with
            the reason where its library is not installed.
        takes: whether it can compute attention on that graph at all.
        layer: a class with the constructor and state_dict of PyG's `TransformerConv`, or None.
        backward: whether the operator can be differentiated.
        memory: bytes that it holds at its peak for a graph, heads and dim, beside tensors of the nodes, to
            leave out what cannot fit in memory.
    """

    operator: Callable[[Any], Attention]
    takes: Callable[[EdgeList | Graph], bool]
    layer: Callable[..., torch.nn.Module] | None = None
    backward: bool = True
    memory: Callable[[EdgeList | Graph, int, int], float] = lambda graph, heads, dim: 0.0


def _graphattn(graph: EdgeList | Graph) -> Attention:
    if isinstance(graph, EdgeList):
        graph = SparseGraph.from_edge_index(graph.edge_index, graph.num_nodes)
    return lambda query, key, value: graph_attention(query, key, value, graph)


# ---------------------------------------------------------------------------------------------- listed edges


def _is_listed(graph: EdgeList | Graph) -> bool:
    return isinstance(graph, EdgeList)


def _edge_tensors(count: int) -> Callable[[EdgeList | Graph, int, int], float]:
    """So many float32 tensors of edges · heads · dim."""
    return lambda graph, heads, dim: count * 4 * graph.num_edges * heads * dim


def _message_passing(query: Tensor, key: Tensor, value: Tensor, edge_index: Tensor) -> Tensor:
    """The gathers, softmax and sum that PyG's `TransformerConv` runs between its linear maps."""
    source, target = edge_index[0], edge_index[1]
    query_i, key_j = query.index_select(0, target), key.index_select(0, source)
    alpha = (query_i * key_j).sum(dim=-1) / math.sqrt(query.size(-1))
    alpha = softmax(alpha, target, num_nodes=query.size(0))
    message = value.index_select(0, source) * alpha.unsqueeze(-1)
    return scatter(message, target, dim=0, dim_size=query.size(0), reduce="sum")


def _pyg(graph: EdgeList) -> Attention:
    return lambda query, key, value: _message_passing(query, key, value, graph.edge_index)


def _compiled(options: dict[str, int]) -> Provider:
    """PyG under `torch.compile`, which sees the sizes as constants, its best case."""

    def operator(graph: EdgeList) -> Attention:
        compiled = torch.compile(_message_passing, dynamic=False, options=options)
        return lambda query, key, value: compiled(query, key, value, graph.edge_index)

    def layer(*args, **kwargs) -> torch.nn.Module:
        module = torch_geometric.nn.TransformerConv(*args, **kwargs)
        module.compile(dynamic=False, options=options)
        return module

    return Provider(operator, _is_listed, layer, memory=_edge_tensors(4))


def _torch_sparse(graph: EdgeList) -> Attention:
    """Sampled product, softmax over rows, matrix product: one head after the other in 32-bit CSR."""
    edge_index, num_nodes = graph
    target, order = edge_index[1].sort(stable=True)
    rowptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    rowptr[1:] = torch.bincount(target, minlength=num_nodes).cumsum(0)
    crow, col = rowptr.int(), edge_index[0, order].int()

    def matrix(values: Tensor) -> Tensor:
        size = (num_nodes, num_nodes)
        return torch.sparse_csr_tensor(crow, col, values, size, check_invariants=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse CSR says once that it is in beta
        pattern = matrix(torch.zeros(col.numel()))

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(value)
        for h in range(query.size(1)):
            q, k, v = (x[:, h].contiguous() for x in (query, key, value))
            logits = torch.sparse.sampled_addmm(pattern, q, k.t(), beta=0.0, alpha=q.size(-1) ** -0.5)
            out[:, h] = matrix(softmax(logits.values(), ptr=rowptr)) @ v
        return out

    return attention


def _dgl(edges: EdgeList) -> Attention:
    # 1.1.3 is the last version whose wheel imports beside any torch; later ones bring a library per version.
    try:
        dgl = importlib.import_module("dgl")
    except Exception as error:  # a wheel that does not match torch fails in ways of its own
        raise ImportError(f"dgl does not import: {type(error).__name__}: {error}") from error
    graph = dgl.graph((edges.edge_index[0], edges.edge_index[1]), num_nodes=edges.num_nodes)
    graph.create_formats_()

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = dgl.ops.u_dot_v(graph, key * query.size(-1) ** -0.5, query)
        return dgl.ops.u_mul_e_sum(graph, value, dgl.ops.edge_softmax(graph, logits))

    return attention


# ---------------------------------------------------------------------------------------- structured graphs


def _heads_first(attention: Attention) -> Attention:
    """Attention on [batch, heads, nodes, dim], PyTorch's layout, as one on [..., nodes, heads, dim]; moves no data."""

    def nodes_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        one = query.dim() == 3
        query, key, value = ((x.unsqueeze(0) if one else x).transpose(1, 2) for x in (query, key, value))
        out = attention(query, key, value).transpose(1, 2)
        return out.squeeze(0) if one else out

    return nodes_first


def _is_full(graph: EdgeList | Graph) -> bool:
    return isinstance(graph, CompleteGraph) and graph.num_edges == graph.num_queries * graph.num_keys


def _is_band(graph: EdgeList | Graph) -> bool:
    """One sequence under a plain window that reaches as far back as ahead, by one node at least."""
    return (
        isinstance(graph, WindowGraph)
        and graph.ptr is None
        and (graph.num_keys, graph.offset, graph.dilation) == (graph.num_queries, 0, 1)
        and graph.radius[0] == graph.radius[1]
        and bool(graph.radius[0])
    )


def _is_image(graph: EdgeList | Graph) -> bool:
    """A two-dimensional clipped grid whose windows are bounded and symmetric."""
    return (
        isinstance(graph, GridGraph)
        and len(graph.shape) == 2
        and graph.border == "clip"
        and graph.dilation == 1
        and all(before is not None and before == after for before, after in graph.radius)
    )


def _is_ragged(graph: EdgeList | Graph) -> bool:
    return (
        isinstance(graph, CompleteGraph)
        and graph.ptr is not None
        and graph.order is None
        and not graph.causal
    )


def _is_maskable(graph: EdgeList | Graph) -> bool:
    """Where users would write a mask of all pairs: not for a complete graph or a batch of them."""
    return isinstance(graph, (WindowGraph, GridGraph))


def _pairs(graph: EdgeList | Graph) -> int:
    return graph.num_queries * graph.num_keys


def _sdpa(graph: CompleteGraph) -> Attention:
    return _heads_first(F.scaled_dot_product_attention)


def _multihead(graph: CompleteGraph) -> Attention:
    """What `nn.MultiheadAttention` runs between its linear maps, unless it is told not to return weights."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(-3, -2) for x in (query, key, value))
        weights = (query * query.size(-1) ** -0.5 @ key.transpose(-2, -1)).softmax(dim=-1)
        return (weights @ value).transpose(-3, -2)

    return attention


def _masked(graph: Graph) -> Attention:
    """A mask of all pairs; in floating point, to which SDPA would convert a bool one in every call."""
    mask = torch.zeros(graph.num_queries, graph.num_keys).masked_fill_(~graph.to_mask(), -math.inf)
    return _heads_first(
        lambda query, key, value: F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    )


def _flex(graph: WindowGraph | GridGraph) -> Attention:
    """Compiled `flex_attention`, which has no backward on CPU."""
    if isinstance(graph, WindowGraph):
        before, after = graph.radius

        def rule(batch, head, query, key):
            return (key >= query - before) & (key <= query + after)
    else:
        width = graph.shape[1]
        (up, _), (left, _) = graph.radius  # the same on both sides

        def rule(batch, head, query, key):
            rows, columns = query // width - key // width, query % width - key % width
            return (rows.abs() <= up) & (columns.abs() <= left)

    mask = _block_mask(graph, rule)
    compiled = torch.compile(flex_attention, dynamic=False)
    return _heads_first(lambda query, key, value: compiled(query, key, value, block_mask=mask))


def _block_mask(graph: Graph, rule: Callable, block: int = 128) -> BlockMask:
    """As `create_block_mask`, which for this would first write down all pairs."""
    source, target = graph.to_edge_index() // block
    blocks = -(-graph.num_queries // block)
    edges = torch.bincount(target * blocks + source, minlength=blocks**2).view(1, 1, blocks, blocks)
    full = edges == block**2
    lists = []
    for which in ((edges > 0) & ~full, full):
        order = which.int().argsort(dim=-1, descending=True, stable=True)
        lists += [which.sum(-1, dtype=torch.int32), order.int()]
    size = graph.num_queries, graph.num_keys
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=rule, seq_lengths=size)


def _chunked(factor: float) -> Provider:
    """SDPA on chunks of the queries, each with the keys of all its windows; autograd does the backward.

    A chunk is `factor` times as long as the window reaches, or as 32 nodes, below which chunks do not pay.
    """

    def sizes(graph: WindowGraph) -> tuple[int, int, int, int]:
        """Radius, queries of a chunk, keys of a chunk, chunks."""
        radius = int(graph.radius[0] or 0)
        chunk = int(factor * max(radius, 32))
        return radius, chunk, chunk + 2 * radius, -(-graph.num_queries // chunk)

    def operator(graph: WindowGraph) -> Attention:
        radius, chunk, slab, chunks = sizes(graph)
        num_nodes = graph.num_queries
        rest = chunks * chunk - num_nodes
        query_at = torch.arange(chunks * chunk).view(chunks, chunk, 1)
        key_at = query_at[:, :1] - radius + torch.arange(slab)
        allowed = ((key_at - query_at).abs() <= radius) & (key_at >= 0) & (key_at < num_nodes)
        mask = torch.zeros(allowed.shape).masked_fill_(~allowed, -math.inf).unsqueeze(1)

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query = F.pad(query, (0, 0, 0, 0, 0, rest)).unflatten(0, (chunks, chunk)).transpose(1, 2)
            key, value = (
                F.pad(x, (0, 0, 0, 0, radius, radius + rest)).unfold(0, slab, chunk).transpose(-2, -1)
                for x in (key, value)
            )
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            return out.transpose(1, 2).flatten(0, 1)[:num_nodes]

        return attention

    def memory(graph: Any, heads: int, dim: int) -> float:
        """The mask, and in the backward the gradients of every chunk's keys and values."""
        _, chunk, slab, chunks = sizes(graph)
        return chunks * slab * (5 * chunk + 16 * heads * dim)

    return Provider(operator, _is_band, memory=memory)


def _local_attention(graph: WindowGraph) -> Attention:
    """The library's buckets are as long as its windows reach; `exact_windowsize` masks what is further."""
    try:
        library = importlib.import_module("local_attention")
    except ImportError as error:
        raise ImportError(f"local_attention does not import: {error}") from error
    local = library.LocalAttention(
        graph.radius[0], look_backward=1, look_forward=1, exact_windowsize=True, use_rotary_pos_emb=False
    )
    return _heads_first(local)


def _local_attention_memory(graph: Any, heads: int, dim: int) -> float:
    """Scores, masked, and weights, with their gradients; keys and values of three buckets for each bucket."""
    return 3 * graph.num_queries * heads * (20 * graph.radius[0] + 16 * dim)


def _unfold(graph: GridGraph) -> Attention:
    """Every cell's window of keys and values written out by `unfold`, as for a convolution."""
    (up, _), (left, _) = graph.radius
    kernel, padding = (2 * up + 1, 2 * left + 1), (up, left)
    inside = F.unfold(torch.ones(1, 1, *graph.shape), kernel, padding=padding)[0].t() > 0  # [cells, slots]
    mask = torch.zeros(inside.shape).masked_fill_(~inside, -math.inf).view(graph.num_queries, 1, 1, -1)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, dim = query.shape[1:]

        def windows(x: Tensor) -> Tensor:
            image = x.flatten(1).t().unflatten(-1, graph.shape).unsqueeze(0)
            columns = F.unfold(image, kernel, padding=padding)[0]
            return columns.view(heads, dim, -1, x.size(0)).permute(3, 0, 1, 2)

        scores = query.unsqueeze(2) @ windows(key) * dim**-0.5 + mask
        return (scores.softmax(-1) @ windows(value).transpose(2, 3)).squeeze(2)

    return attention


def _dense_batch(graph: CompleteGraph) -> Attention:
    """PyG's way: pad all graphs to the largest and mask the padding."""
    sizes = graph.ptr.diff()
    batch, most = torch.arange(len(sizes)).repeat_interleave(sizes), int(sizes.max())
    options = {"batch_size": len(sizes), "max_num_nodes": most}

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        (query, mask), (key, _), (value, _) = (
            to_dense_batch(x, batch, **options) for x in (query, key, value)
        )
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
        return out.transpose(1, 2)[mask]

    return attention


def _per_size(graph: CompleteGraph) -> Attention:
    """One call of SDPA for all graphs of a size; nothing is padded."""
    sizes, starts = graph.ptr.diff(), graph.ptr[:-1]
    distinct = sizes[sizes > 0].unique().tolist()
    nodes = [
        (starts[sizes == n].view(-1, 1) + torch.arange(n)) for n in distinct
    ]  # [graphs, n] for each size
    order = torch.cat([x.flatten() for x in nodes])
    back, lengths = order.argsort(), [x.numel() for x in nodes]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = (x[order].split(lengths) for x in (query, key, value))
        out = []
        for n, *one_size in zip(distinct, *parts):
            one_size = (x.unflatten(0, (-1, n)).transpose(1, 2) for x in one_size)
            out.append(F.scaled_dot_product_attention(*one_size).transpose(1, 2).flatten(0, 1))
        return torch.cat(out)[back]

    return attention


def _jagged(graph: CompleteGraph) -> Attention:
    """Nested tensors of the jagged layout, PyTorch's own ragged batches."""
    sizes = graph.ptr.diff()
    limits = {"min_seqlen": int(sizes.min()), "max_seqlen": int(sizes.max())}

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (
            torch.nested.nested_tensor_from_jagged(x, graph.ptr, **limits).transpose(1, 2)
            for x in (query, key, value)
        )
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).values()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors say once that they are a prototype
        attention(*torch.zeros(3, graph.num_queries, 1, 1))
    return attention


# The first is the one that the others are compared with.
PROVIDERS: dict[str, Provider] = {
    "graphattn": Provider(_graphattn, lambda graph: True, graphattn.nn.TransformerConv),
    "pyg": Provider(_pyg, _is_listed, torch_geometric.nn.TransformerConv, memory=_edge_tensors(8)),
    # Inductor's scatter uses atomics as soon as its loops have more than one thread. Generated for one, the
    # same code is two to five times faster on two cores: the stronger opponent of the two.
    "pyg_compiled": _compiled({}),
    "pyg_compiled_1t": _compiled({"cpp.threads": 1}),
    "torch_sparse": Provider(_torch_sparse, _is_listed, backward=False),
    "dgl": Provider(_dgl, _is_listed),
    "sdpa": Provider(_sdpa, _is_full),
    "multihead": Provider(_multihead, _is_full, memory=lambda graph, heads, dim: 12 * heads * _pairs(graph)),
    "masked_sdpa": Provider(
        _masked, _is_maskable, memory=lambda graph, heads, dim: 6 * _pairs(graph) + 32 * graph.num_edges
    ),
    "flex": Provider(_flex, lambda graph: _is_band(graph) or _is_image(graph), backward=False),
    "chunked_half": _chunked(0.5),
    "chunked": _chunked(1),
    "chunked_double": _chunked(2),
    "local_attention": Provider(
        _local_attention,
        # what its own padding would bring in is not masked
        lambda graph: _is_band(graph) and graph.num_queries % graph.radius[0] == 0,
        memory=_local_attention_memory,
    ),
    "unfold": Provider(_unfold, _is_image, memory=_edge_tensors(6)),
    "per_size": Provider(_per_size, _is_ragged),
    "dense_batch": Provider(_dense_batch, _is_ragged),
    # On CPU it has no fused kernel: about twenty tensors of one number per edge and head.
    "jagged": Provider(_jagged, _is_ragged, memory=lambda graph, heads, dim: 80 * heads * graph.num_edges),
}
