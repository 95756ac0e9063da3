"""PyG's `TransformerConv` without its edge-wise tensors, and the switch that puts it into a whole model."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric import nn as pyg
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import SparseTensor  # pyright: ignore[reportAttributeAccessIssue]
from torch_geometric.utils import is_sparse

from graphattn.attention import attention_weights, autocast_dtype, graph_attention
from graphattn.graph import Graph, as_graph, check_count, check_one_device
from graphattn.nn.linear import mapped

_Model = TypeVar("_Model", bound=torch.nn.Module)
_STAGES = ("propagate", "message", "aggregate")
_MESSAGE_HOOKS = [f"_{stage}_forward_{kind}" for stage in _STAGES for kind in ("pre_hooks", "hooks")]
_MESSAGE_METHODS = {name: getattr(pyg.TransformerConv, name) for name in ("message", "aggregate", "update")}


class TransformerConv(pyg.TransformerConv):
    r"""PyG's graph transformer layer: same parameters, same results, computed by one fused operator.

    $$x'_i = W_1 x_i + \sum_{j \to i} \alpha_{ij} (W_2 x_j + W_6 e_{ij}), \qquad
    \alpha_{ij} = \mathrm{softmax}_j \frac{(W_3 x_i)^\top (W_4 x_j + W_6 e_{ij})}{\sqrt{C}}$$

    It is a `torch_geometric.nn.TransformerConv`, so `state_dict`, `repr`, `to_hetero`, `summary` and
    explainers are PyG's own. A call reads one key and one value row per edge and holds O(N·heads·C + E)
    numbers, where PyG holds about six tensors of E·heads·C. Messages run from `edge_index[0]` to
    `edge_index[1]`, parallel edges count with their multiplicity, a node without an edge keeps `W_1 x_i`.
    No self-loop is added (`torch_geometric.utils.add_remaining_self_loops` does that).

    Edge-wise messages are built, at PyG's cost, only where they are asked for: by an explainer, by a
    propagate, message or aggregate hook, by an `aggr` other than the sum, or by a subclass that overrides
    `message`, `aggregate` or `update`. `decomposed_layers` has nothing to save here and is ignored.
    `torch.compile` and `torch.export` take the layer, TorchScript does not.

    Args:
        in_channels: features of a node, or (source, target); -1 to read it off the first call.
        out_channels: features C of a head.
        heads: number of heads.
        concat: concatenate the heads (`heads * C` outputs) or average them (`C` outputs).
        beta: gate the skip connection, as in the paper. Needs `root_weight`.
        dropout: probability in [0, 1] that an edge's weight is dropped in training.
        edge_dim: features F of an edge; None for a graph without edge features.
        bias: give the node projections a bias.
        root_weight: add the skip connection `W_1 x_i`.
        **kwargs: those of `torch_geometric.nn.MessagePassing`, such as `flow` and `aggr`.

    Raises:
        ValueError: a number of channels or heads is too small, `dropout` lies outside [0, 1], or `flow` is
            another word than PyG's.
        TypeError: a number of channels or heads is not an int, `dropout` no number, or an argument unknown.

    Example:
        >>> conv = TransformerConv(in_channels=8, out_channels=4, heads=2)
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> conv(torch.randn(3, 8), edge_index).shape
        torch.Size([3, 8])

    Shi et al., Masked Label Prediction: Unified Message Passing Model for Semi-Supervised
    Classification, IJCAI 2021.
    """

    # When a class is first instantiated PyG puts a generated `propagate` on it and keeps the one it found for
    # explainers: that must be the generic one, which applies masks, not the one generated for PyG's class.
    propagate = pyg.MessagePassing.propagate
    # PyG looks this up in class sources that it stores by class name, so this class hides its parent's:
    # propagate_type: (query: Tensor, key: Tensor, value: Tensor, edge_attr: OptTensor)

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        **kwargs: Any,
    ) -> None:
        pair = (in_channels, in_channels) if isinstance(in_channels, Integral) else in_channels
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"`in_channels` must be an int or a pair (source, target), got {in_channels!r}.")
        for n in pair:
            check_count("`in_channels`", n, -1)
        check_count("`out_channels`", out_channels, 1)
        check_count("`heads`", heads, 1)
        if edge_dim is not None:
            check_count("`edge_dim`", edge_dim, -1)
        check_probability("dropout", dropout)
        super().__init__(
            in_channels, out_channels, heads, concat, beta, dropout, edge_dim, bias, root_weight, **kwargs
        )

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Tensor | SparseTensor | Graph,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Node features in, node features out.

        Args:
            x: `[N, in_channels]`, or the pair (sources `[N_src, in]`, targets `[N_dst, in]`).
            edge_index: integer `[2, E]`, sources in row 0 and targets in row 1 (a `[2, 2]` tensor too),
                `EdgeIndex`, a sparse adjacency whose rows are targets (`torch.sparse` coo, csr, csc, or
                `SparseTensor`), or a `Graph`. The graph built for an `edge_index` tensor is reused while
                that same tensor comes back unmodified.
            edge_attr: `[E, edge_dim]` in the order of the edges; also `[E]` for `edge_dim=1`. The features
                of a sparse adjacency are the values it stores.
            return_attention_weights: truthy to get the weights as well.

        Returns:
            `[N_dst, heads * C]`, or `[N_dst, C]` without `concat`. With `return_attention_weights`:
            `(out, (edge_index, alpha))` with alpha `[E, heads]` before dropout and one row per edge of the
            returned `edge_index`, which is the object passed in (for a `torch.sparse` adjacency alpha is in
            the order of its values) and `graph.to_edge_index()` for a `Graph`. As in PyG, a `SparseTensor`
            gives `(out, adj_t)` with alpha as its values.

        Raises:
            ValueError: sizes or devices that disagree; edge features without `edge_dim` or missing with it; an
                adjacency together with `edge_attr` or with `flow="target_to_source"`; an `edge_index` that is not
                an integer one of shape `[2, E]`.
            TypeError: features that are not dense floating tensors of the layer's dtype, or `edge_index` nothing
                that stands for a graph.
            IndexError: a node id outside `[0, N)`.
        """
        x_src, x_dst = self._endpoints(x)
        graph = as_graph(edge_index, size=(x_src.size(0), x_dst.size(0)), flow=self.flow)
        edge_attr = self._edge_features(edge_index, edge_attr, graph.num_edges)
        check_one_device("`edge_index`", graph.device, "`x`", x_src.device)
        if edge_attr is not None:
            check_one_device("`edge_attr`", edge_attr.device, "`x`", x_src.device)

        if self._builds_messages():
            # int64: PyG's softmax has wrong gradients for int32 ids. A listing: PyG's layer refuses csc.
            if isinstance(edge_index, Tensor) and edge_index.layout is torch.strided:
                listing = edge_index.long()
            else:
                listing = graph.to_edge_index()
            out, (_, alpha) = super().forward((x_src, x_dst), listing, edge_attr, True)
        else:
            H, C = self.heads, self.out_channels
            query = mapped(self.lin_query, x_dst).view(-1, H, C)
            key = mapped(self.lin_key, x_src).view(-1, H, C)
            value = mapped(self.lin_value, x_src).view(-1, H, C)
            edges: dict[str, Any] = {}
            if self.lin_edge is not None and edge_attr is not None:
                if self.lin_edge._forward_pre_hooks:  # they initialise a lazy weight, or prune one
                    self.lin_edge(edge_attr[:0])
                projection = self.lin_edge.weight.view(H, C, -1).transpose(1, 2)
                edges = {"edge_attr": edge_attr, "edge_projection": projection}
            dropout_p = self.dropout if self.training else 0.0
            out: Any = graph_attention(query, key, value, graph, dropout_p=dropout_p, **edges)
            out = self._with_skip(out.view(-1, H * C) if self.concat else out.mean(dim=1), x_dst)
            if return_attention_weights:
                alpha = attention_weights(query, key, graph, **edges)
                if alpha.dim() > 2:  # by slots of a structured graph, of which some have no edge
                    alpha = alpha.flatten(0, 1)[graph.slots()]

        if not return_attention_weights:
            return out
        if isinstance(edge_index, SparseTensor):
            return out, edge_index.set_value(alpha, layout="coo")  # pyright: ignore[reportAttributeAccessIssue]
        return out, (graph.to_edge_index() if isinstance(edge_index, Graph) else edge_index, alpha)

    def _with_skip(self, out: Tensor, x_dst: Tensor) -> Tensor:
        """`out` plus the skip connection, gated where `beta` is set."""
        if not self.root_weight:
            return out
        skip = mapped(self.lin_skip, x_dst)
        if self.lin_beta is None:
            return out + skip
        gate = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
        return torch.lerp(out, skip, gate)

    def _endpoints(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The features of sources and targets, checked."""
        if not isinstance(x, Tensor) and not (isinstance(x, (tuple, list)) and len(x) == 2):
            raise TypeError(f"`x` must be a tensor or a pair (x_src, x_dst), got {type(x).__name__}.")
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        in_channels = self.in_channels
        widths = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        for end, name, width in zip((x_src, x_dst), ("source", "target"), widths):
            if end is None:
                raise TypeError(
                    f"`x` must hold the features of both ends, (x_src, x_dst): a target attends with a query "
                    f"of its own. Got None for the {name} nodes; in a stack of HeteroConv a node type is "
                    f"lost where no edge type of the layer before ends in it."
                )
            if not isinstance(end, Tensor):
                raise TypeError(f"`x` must hold tensors, got {type(end).__name__} for the {name} nodes.")
            if not end.is_floating_point():
                raise TypeError(f"`x` must be floating point, got {end.dtype} for the {name} nodes.")
            linear = self.lin_key if name == "source" else self.lin_query
            check_dense("x", end, linear)
            if end.dim() != 2 or (width >= 0 and end.size(1) != width):
                raise ValueError(
                    f"`x` must have shape [nodes, {'channels' if width < 0 else width}] for the {name} nodes "
                    f"with `in_channels={in_channels}`, got {list(end.shape)}."
                )
        return x_src, x_dst

    def _edge_features(self, edge_index: Any, edge_attr: Tensor | None, num_edges: int) -> Tensor | None:
        """The features `[E, edge_dim]` of the edges, from where they are stored, checked."""
        if is_sparse(edge_index):
            if edge_attr is not None:
                raise ValueError(
                    "A sparse adjacency must store the edge features as its values, got a separate "
                    "`edge_attr` of unknown order. Build the adjacency with it, or pass an `edge_index`."
                )
            # one number an edge is a weight, which this layer has no use for, unless edge_dim asks for it
            if self.edge_dim is not None or edge_index.dim() > 2:
                is_tensor = isinstance(edge_index, Tensor)
                edge_attr = edge_index.values() if is_tensor else edge_index.storage.value()
        if edge_attr is None:
            if self.edge_dim is None:
                return None
            raise ValueError(
                f"`edge_attr` of shape [{num_edges}, {self.edge_dim}] must be given for this layer "
                f"(`edge_dim={self.edge_dim}`), got None."
            )
        if not isinstance(edge_attr, Tensor):
            raise TypeError(f"`edge_attr` must be a tensor, got {type(edge_attr).__name__}.")
        if edge_attr.layout is not torch.strided:
            raise TypeError(
                f"`edge_attr` must be dense, got {edge_attr.layout}. Convert it with `.to_dense()`."
            )
        if self.edge_dim is None:
            raise ValueError(
                f"`edge_attr` must be None for a layer without edge features, got {list(edge_attr.shape)}. "
                f"Build the layer with `edge_dim={edge_attr.size(-1) if edge_attr.dim() > 1 else 1}`."
            )
        if edge_attr.dim() == 1 and self.edge_dim == 1:
            edge_attr = edge_attr.unsqueeze(-1)
        width = edge_attr.size(-1) if self.edge_dim < 0 else self.edge_dim
        if edge_attr.dim() != 2 or edge_attr.size(1) != width or edge_attr.size(0) != num_edges:
            raise ValueError(
                f"`edge_attr` must have shape [{num_edges}, {width}] for these edges and "
                f"`edge_dim={self.edge_dim}`, got {list(edge_attr.shape)}."
            )
        return edge_attr

    def _builds_messages(self) -> bool:
        """Whether somebody wants to see, change or aggregate otherwise the message of every edge."""
        return bool(
            has_message_watchers(self)
            or type(self.aggr_module) is not SumAggregation
            or any(getattr(type(self), name) is not method for name, method in _MESSAGE_METHODS.items())
        )

    def explain_message(self, inputs: Tensor, dim_size: int | None) -> Tensor:
        check_edge_mask(self, inputs.size(self.node_dim))
        return super().explain_message(inputs, dim_size)

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            "TransformerConv: the fused operator has no TorchScript; use torch.compile or "
            "torch.export, or torch_geometric.nn.TransformerConv with the same state_dict."
        )


def has_message_watchers(layer: pyg.MessagePassing) -> bool:
    """Whether an explainer or a hook wants the edge-wise messages of `layer`."""
    return bool(layer.explain or any(getattr(layer, hooks) for hooks in _MESSAGE_HOOKS))


def check_edge_mask(layer: pyg.MessagePassing, num_edges: int) -> None:
    """That the edges of an explainer are as many as those that `layer` sends messages along."""
    mask = layer._edge_mask
    if mask is not None and mask.size(0) != num_edges:
        raise ValueError(
            f"{type(layer).__name__}: an explainer's edges must be those of the layer's graph, got a mask of"
            f" {mask.size(0)} for {num_edges} edges. Explain `graph.to_edge_index()`, or set `explain = False` on"
            " layers with a graph of their own."
        )


def check_dense(name: str, x: Tensor, layer: torch.nn.Module) -> None:
    """That features are dense, and of the dtype and device of the weight of the layer that they meet first."""
    if x.is_nested:
        raise TypeError(
            f"`{name}` must be one dense tensor, got a nested one. Concatenate the graphs along the nodes, and"
            " join them by CompleteGraph.from_ptr or the like."
        )
    if x.layout is not torch.strided:
        raise TypeError(f"`{name}` must be dense, got {x.layout}. Convert it with `.to_dense()`.")
    weight = layer._parameters.get("weight")  # not `layer.weight`: a weight that is computed may change by it
    if weight is not None and not weight.is_meta:  # hooks may bring weights in when they are needed
        check_one_device(f"`{name}`", x.device, "the layer's weights", weight.device)
    if weight is None or not weight.is_floating_point() or x.dtype == weight.dtype:
        return
    casts = autocast_dtype(x.device.type) is not None
    if casts and torch.float64 not in (x.dtype, weight.dtype):  # which autocast leaves as it is
        return
    raise TypeError(
        f"`{name}` must have the dtype of the layer's weights, {weight.dtype}, got {x.dtype}. Convert the features"
        " or the layer with `.to(dtype)`."
    )


def check_probability(name: str, p: Any) -> None:
    if isinstance(p, bool) or not isinstance(p, Real):
        raise TypeError(f"`{name}` must be a number in [0, 1], got {type(p).__name__}.")
    number: Any = p  # not as a float: fractions may be too large for one
    if not 0 <= number <= 1:
        raise ValueError(f"`{name}` must be a probability in [0, 1], got {p}.")


def accelerate(model: _Model) -> _Model:
    """Switches every PyG `TransformerConv` in `model` to the fused layer, in place.

    Only layers of exactly that class change, also inside containers, `HeteroConv` and `to_hetero` models; parameters,
    `state_dict` keys, hooks and results stay. Users' subclasses are left as they are. Nothing is copied.
    TorchScript no longer takes the model: `torch.compile` and `torch.export` do.

    Args:
        model: any module, a layer itself included.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a module.

    Example:
        >>> from torch_geometric.nn import TransformerConv
        >>> type(accelerate(TransformerConv(8, 4))).__module__
        'graphattn.nn.conv'
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {model!r}.")
    for module in model.modules():
        if type(module) is pyg.TransformerConv:
            module.__class__ = TransformerConv
    return model
