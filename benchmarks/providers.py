"""Who is measured: the same operator and the same layer, each written as its library's users write it."""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.utils import scatter, softmax

import graphattn.nn
from graphattn import SparseGraph, graph_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Provider:
    """One contender; everything that depends on the graph alone is built before the clock starts.

    Args:
        operator: from (edge_index, num_nodes) to attention on (query, key, value), each [nodes, heads, dim];
            ImportError with the reason where its library is not installed.
        layer: a class with the constructor and state_dict of PyG's `TransformerConv`, or None.
        backward: whether the operator can be differentiated.
        edge_tensors: float32 tensors of edges · heads · dim it holds at its peak, to leave out what cannot
            fit in memory.
    """

    operator: Callable[[Tensor, int], Attention]
    layer: Callable[..., torch.nn.Module] | None = None
    backward: bool = True
    edge_tensors: int = 0


def _graphattn(edge_index: Tensor, num_nodes: int) -> Attention:
    graph = SparseGraph.from_edge_index(edge_index, num_nodes)
    return lambda query, key, value: graph_attention(query, key, value, graph)


def _message_passing(query: Tensor, key: Tensor, value: Tensor, edge_index: Tensor) -> Tensor:
    """The gathers, softmax and sum that PyG's `TransformerConv` runs between its linear maps."""
    source, target = edge_index[0], edge_index[1]
    query_i, key_j = query.index_select(0, target), key.index_select(0, source)
    alpha = (query_i * key_j).sum(dim=-1) / math.sqrt(query.size(-1))
    alpha = softmax(alpha, target, num_nodes=query.size(0))
    message = value.index_select(0, source) * alpha.unsqueeze(-1)
    return scatter(message, target, dim=0, dim_size=query.size(0), reduce="sum")


def _pyg(edge_index: Tensor, num_nodes: int) -> Attention:
    return lambda query, key, value: _message_passing(query, key, value, edge_index)


def _compiled(options: dict[str, int]) -> Provider:
    """PyG under `torch.compile`, which sees the sizes as constants, its best case."""

    def operator(edge_index: Tensor, num_nodes: int) -> Attention:
        compiled = torch.compile(_message_passing, dynamic=False, options=options)
        return lambda query, key, value: compiled(query, key, value, edge_index)

    def layer(*args, **kwargs) -> torch.nn.Module:
        module = torch_geometric.nn.TransformerConv(*args, **kwargs)
        module.compile(dynamic=False, options=options)
        return module

    return Provider(operator, layer, edge_tensors=4)


def _torch_sparse(edge_index: Tensor, num_nodes: int) -> Attention:
    """Sampled product, softmax over rows, matrix product: one head after the other in 32-bit CSR."""
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


def _dgl(edge_index: Tensor, num_nodes: int) -> Attention:
    # 1.1.3 is the last version whose wheel imports beside any torch; later ones bring a library per version.
    try:
        dgl = importlib.import_module("dgl")
    except Exception as error:  # a wheel that does not match torch fails in ways of its own
        raise ImportError(f"dgl does not import: {type(error).__name__}: {error}") from error
    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=num_nodes)
    graph.create_formats_()

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = dgl.ops.u_dot_v(graph, key * query.size(-1) ** -0.5, query)
        return dgl.ops.u_mul_e_sum(graph, value, dgl.ops.edge_softmax(graph, logits))

    return attention


# The first is the one that the others are compared with.
PROVIDERS: dict[str, Provider] = {
    "graphattn": Provider(_graphattn, graphattn.nn.TransformerConv),
    "pyg": Provider(_pyg, torch_geometric.nn.TransformerConv, edge_tensors=8),
    # Inductor's scatter uses atomics as soon as its loops have more than one thread. Generated for one, the
    # same code is two to five times faster on two cores: the stronger opponent of the two.
    "pyg_compiled": _compiled({}),
    "pyg_compiled_1t": _compiled({"cpp.threads": 1}),
    "torch_sparse": Provider(_torch_sparse, backward=False),
    "dgl": Provider(_dgl),
}
