"""Multi-head attention on a graph, with the parameters of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn import MessagePassing

from graphattn.attention import attention_weights, graph_attention
from graphattn.graph import INTEGERS, Graph, as_graph, check_count, check_one_device
from graphattn.nn.conv import (
    check_dense,
    check_edge_mask,
    check_probability,
    has_message_watchers,
)
from graphattn.nn.linear import linear, mapped


class GraphMultiheadAttention(MessagePassing):
    r"""Multi-head attention in which every query attends to the keys it has an edge from.

    $$\mathrm{out} = \mathrm{concat}_h\big(\mathrm{softmax}(Q_h K_h^\top / \sqrt{D})\,V_h\big)\,W_o + b_o,
    \qquad Q = x_q W_q + b_q,\; K = x_k W_k + b_k,\; V = x_v W_v + b_v$$

    with the softmax over the edges of `graph`. The parameters, their names, order and initial values are those
    of `torch.nn.MultiheadAttention`, so `state_dict`s and optimiser states go from one to the other, and on a
    complete graph the results are the same. Graphs say True where torch's masks say "ignore":
    `SparseGraph.from_mask(~attn_mask)`. A query without an edge gets `b_o`, where torch gives NaN.

    Cost and memory are those of `graph_attention` and of four linear maps: O(N·embed_dim² + E·embed_dim) time,
    O(N·embed_dim + E) memory. It is a PyG `MessagePassing`, so that explainers, message hooks and `summary`
    find it; edge-wise messages are built only for an explainer or a hook.

    Args:
        embed_dim: channels of queries and of the output.
        num_heads: number of heads; each has D = embed_dim / num_heads.
        dropout: probability in [0, 1] that a weight is dropped in training.
        bias: give all four linear maps a bias.
        kdim: channels of keys, `embed_dim` by default.
        vdim: channels of values, `embed_dim` by default.

    Raises:
        ValueError: `embed_dim` is not a multiple of `num_heads`, a width is below 1, or `dropout` lies outside
            [0, 1].
        TypeError: a width or `num_heads` is not an int, or `dropout` no number.

    Example:
        >>> from graphattn import WindowGraph
        >>> attention = GraphMultiheadAttention(embed_dim=8, num_heads=2)
        >>> attention(torch.randn(4, 100, 8), WindowGraph(100, radius=5)).shape
        torch.Size([4, 100, 8])

    Vaswani et al., Attention Is All You Need, NeurIPS 2017.
    """

    in_proj_weight: Parameter | None
    in_proj_bias: Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
    ) -> None:
        kdim = embed_dim if kdim is None else kdim
        vdim = embed_dim if vdim is None else vdim
        check_heads("embed_dim", embed_dim, "num_heads", num_heads)
        check_count("`kdim`", kdim, 1)
        check_count("`vdim`", vdim, 1)
        check_probability("dropout", dropout)
        super().__init__(aggr="add", node_dim=-3)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim, self.vdim = kdim, vdim
        packed = kdim == vdim == embed_dim
        shapes = {
            "in_proj_weight": (3 * embed_dim, embed_dim) if packed else None,
            "q_proj_weight": None if packed else (embed_dim, embed_dim),
            "k_proj_weight": None if packed else (embed_dim, kdim),
            "v_proj_weight": None if packed else (embed_dim, vdim),
            "in_proj_bias": (3 * embed_dim,) if bias else None,
        }
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else Parameter(torch.empty(shape)))
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, bias=bias)
        self._draw_projections()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self.out_proj.reset_parameters()
        self._draw_projections()

    # PyG's GPSConv resets its attention by the name that torch's layer gives to this.
    _reset_parameters = reset_parameters

    def _draw_projections(self) -> None:
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = getattr(self, name)
            if weight is not None:
                torch.nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            torch.nn.init.zeros_(self.in_proj_bias)
            torch.nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor | tuple[Tensor, Tensor],
        graph: Any,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        return_attention_weights: bool = False,
    ) -> Any:
        """Node features in, node features out.

        Args:
            query: `[..., num_queries, embed_dim]`. Also PyG's pair `(x_src, x_dst)`, keys before queries.
            graph: a `Graph`, or what `as_graph` takes: `edge_index`, a sparse adjacency, `Data`. Its edges go
                from keys to queries.
            key: `[..., num_keys, kdim]`, the queries by default.
            value: `[..., num_keys, vdim]`, the keys by default.
            bias: added to the scores, in the graph's edge layout: `[*edge_shape, num_heads]`, any of them 1.
            return_attention_weights: truthy to get the weights as well.

        Returns:
            `[..., num_queries, embed_dim]`. With `return_attention_weights`: `(out, weights)`, weights
            `[..., *edge_shape, num_heads]` in the graph's edge layout, before dropout.

        Raises:
            ValueError: a shape does not fit the layer or the graph, or devices differ; and as `graph_attention`.
            TypeError: an operand is not a dense floating point tensor of the layer's dtype, or `graph` nothing
                that stands for a graph.
            IndexError: a node id of an `edge_index` is out of range.
        """
        query, key, value = self._operands(query, key, value)
        size = (key.size(-2), query.size(-2))
        graph = graph_between(graph, *size, query.device)
        if self.in_proj_weight is None:
            matrices: Any = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        else:
            matrices = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        query, key, value = (
            linear(x, matrix, bias_).unflatten(-1, (self.num_heads, -1))
            for x, matrix, bias_ in zip((query, key, value), matrices, biases)
        )
        dropout_p = self.dropout if self.training else 0.0
        weights = None
        if has_message_watchers(self):
            weights = attention_weights(query, key, graph, bias=bias)
            alpha = weights.flatten(-1 - len(graph.edge_shape), -2).index_select(-2, graph.slots())
            out: Any = self.propagate(
                graph.to_edge_index(), size=size, value=(value, None), alpha=alpha, dropout_p=dropout_p
            )
        else:
            out = graph_attention(query, key, value, graph, bias=bias, dropout_p=dropout_p)
            if return_attention_weights:
                weights = attention_weights(query, key, graph, bias=bias)
        out = mapped(self.out_proj, out.flatten(-2))
        return (out, weights) if return_attention_weights else out

    def message(self, value_j: Tensor, alpha: Tensor, dropout_p: float) -> Tensor:
        alpha = F.dropout(alpha.to(value_j.dtype), dropout_p)
        return value_j * alpha.unsqueeze(-1)

    def explain_message(self, inputs: Tensor, dim_size: int | None) -> Tensor:
        check_edge_mask(self, inputs.size(self.node_dim))
        return super().explain_message(inputs, dim_size)

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            "GraphMultiheadAttention: the fused operator has no TorchScript; use torch.compile or torch.export."
        )

    def _operands(self, query, key, value) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value with their defaults, checked."""
        if isinstance(query, (tuple, list)):
            if len(query) != 2 or key is not None or value is not None:
                raise ValueError(
                    "`query` must be a tensor, or a pair (x_src, x_dst) without `key` and `value`, got a"
                    f" {type(query).__name__} of {len(query)}"
                    f"{' together with them' if key is not None or value is not None else ''}."
                )
            key, query = query
            if key is None or query is None:
                raise TypeError(
                    "`query` must hold the features of both ends, (x_src, x_dst), got None for the"
                    f" {'sources' if key is None else 'targets'}."
                )
        key = query if key is None else key
        value = key if value is None else value
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), x in zip(widths.items(), (query, key, value)):
            check_features(name, x, width, self.out_proj)
        if key.shape[:-2] != query.shape[:-2] or value.shape[:-1] != key.shape[:-1]:
            raise ValueError(
                "`query`, `key` and `value` must have the same leading dimensions, and `key` and `value` as"
                f" many nodes, got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}."
            )
        return query, key, value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.embed_dim}, heads={self.num_heads})"


def check_features(name: str, x: Tensor, width: int, layer: torch.nn.Module) -> None:
    """That a tensor holds features of nodes, `[..., nodes, width]`, that fit the weight of `layer`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}.")
    if not x.is_floating_point():
        raise TypeError(f"`{name}` must be floating point, got {x.dtype}. Convert it with `.float()`.")
    check_dense(name, x, layer)
    if x.dim() < 2 or x.size(-1) != width:
        raise ValueError(f"`{name}` must have shape [..., nodes, {width}], got {list(x.shape)}.")


def check_heads(name: str, channels: int, heads_name: str, heads: int) -> None:
    """Check that channels can be shared out among heads; the names are those of the caller's arguments."""
    check_count(f"`{name}`", channels, 1)
    check_count(f"`{heads_name}`", heads, 1)
    if channels % heads != 0:
        raise ValueError(
            f"`{name}` must be a positive multiple of `{heads_name}`, got {name}={channels} and"
            f" {heads_name}={heads}. Every head takes {name} / {heads_name} channels."
        )


def graph_between(graph: Any, num_keys: int, num_queries: int, device: torch.device) -> Graph:
    """The graph that `graph` stands for, checked to join as many nodes as there are features of, where they are.

    Raises:
        ValueError: it joins more or fewer nodes, or is on another device; and as `as_graph`.
        TypeError, IndexError: as `as_graph`.
    """
    if isinstance(graph, Tensor) and graph.layout is torch.strided and graph.dtype not in INTEGERS:
        raise ValueError(
            f"`graph` must be a Graph or an integer `edge_index`, got a tensor of {graph.dtype}. It comes second,"
            " before `key` and `value`; SparseGraph.from_mask makes one of a mask."
        )
    if not isinstance(graph, Graph):
        graph = as_graph(graph, size=(num_keys, num_queries))
    check_one_device("`graph`", graph.device, "the features", device)
    if (graph.num_keys, graph.num_queries) != (num_keys, num_queries):
        raise ValueError(
            f"`graph` must join the {num_keys} keys and {num_queries} queries that features are given for, got"
            f" {graph}."
        )
    return graph
