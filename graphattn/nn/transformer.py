"""Transformers whose attention runs on a graph: the encoder layer, a whole model, and PyG's GPS layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Dropout, LayerNorm, Linear, ModuleList
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg
from torch_geometric.nn.inits import reset
from torch_geometric.utils import to_dense_batch

from graphattn.graph import INTEGERS, CompleteGraph, check_count, check_word
from graphattn.nn.attention import (
    GraphMultiheadAttention,
    check_features,
    check_heads,
    graph_between,
)
from graphattn.nn.conv import check_probability
from graphattn.nn.linear import mapped

_ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


class GraphTransformerLayer(torch.nn.Module):
    r"""A transformer encoder layer: attention on a graph, then a feed-forward network, each with a residual.

    $$h = \mathrm{LN}(x + \mathrm{Attention}(x)), \qquad x' = \mathrm{LN}(h + W_2\,\mathrm{act}(W_1 h))$$

    With `norm_first` the norms come before attention and network instead: $h = x + \mathrm{Attention}(\mathrm{LN}
    (x))$, $x' = h + W_2\,\mathrm{act}(W_1 \mathrm{LN}(h))$. The parameters, their names, order and initial values
    are those of `torch.nn.TransformerEncoderLayer`, so `state_dict`s go from one to the other, and on a complete
    graph the results are the same. A batch of graphs of different sizes is packed along the nodes
    (`CompleteGraph.from_ptr`), with nothing computed for padding. O(N·d_model·(d_model + dim_feedforward) +
    E·d_model) time.

    Args:
        d_model: channels of a node.
        nhead: number of heads.
        dim_feedforward: hidden channels of the feed-forward network.
        dropout: probability in [0, 1], of attention weights, hidden channels and both branches.
        activation: "relu", "gelu", or a function on tensors.
        layer_norm_eps: added to variances in the norms.
        norm_first: normalise before attention and network (pre-norm), not after them.
        bias: give linear maps and norms a bias.

    Raises:
        ValueError: `d_model` is not a multiple of `nhead`, `dim_feedforward` is below 1, `dropout` lies outside
            [0, 1], `layer_norm_eps` is not a number of at least 0, or `activation` neither of the names nor a
            function.
        TypeError: a number of channels or heads is not an int, or `dropout` no number.

    Example:
        >>> from graphattn import CompleteGraph
        >>> layer = GraphTransformerLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> two_graphs = CompleteGraph.from_ptr(torch.tensor([0, 3, 7]))
        >>> layer(torch.randn(7, 8), two_graphs).shape
        torch.Size([7, 8])

    Vaswani et al., Attention Is All You Need, NeurIPS 2017; pre-norm: Xiong et al., On Layer Normalization in
    the Transformer Architecture, ICML 2020.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        activation = _ACTIVATIONS.get(activation, activation) if isinstance(activation, str) else activation
        if not callable(activation):
            raise ValueError(f'`activation` must be "relu", "gelu" or a function, got {activation!r}.')
        check_heads("d_model", d_model, "nhead", nhead)
        check_count("`dim_feedforward`", dim_feedforward, 1)
        check_probability("dropout", dropout)
        if not isinstance(layer_norm_eps, Real) or not 0.0 <= float(layer_norm_eps) < math.inf:
            raise ValueError(f"`layer_norm_eps` must be a number of at least 0, got {layer_norm_eps!r}.")
        self.self_attn = GraphMultiheadAttention(d_model, nhead, dropout=dropout, bias=bias)
        self.linear1 = Linear(d_model, dim_feedforward, bias=bias)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias=bias)
        self.norm_first = norm_first
        self.norm1 = LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.norm2 = LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.dropout1 = Dropout(dropout)
        self.dropout2 = Dropout(dropout)
        self.activation: Any = activation

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for module in (self.self_attn, self.linear1, self.linear2, self.norm1, self.norm2):
            module.reset_parameters()

    def forward(
        self, x: Tensor, graph: Any, *, bias: Tensor | None = None, return_attention_weights: bool = False
    ) -> Any:
        """Node features in, node features out.

        Args:
            x: `[..., nodes, d_model]`.
            graph: a `Graph`, or what `as_graph` takes.
            bias: added to the scores, in the graph's edge layout: `[*edge_shape, nhead]`, any of them 1.
            return_attention_weights: truthy to get the weights as well.

        Returns:
            `[..., nodes, d_model]`. With `return_attention_weights`: `(x, weights)`, weights
            `[..., *edge_shape, nhead]`, before dropout.

        Raises:
            ValueError: a shape does not fit the layer or the graph.
            TypeError: `x` is not a dense floating point tensor of the layer's dtype, or `graph` nothing that
                stands for a graph.
            IndexError: a node id of an `edge_index` is out of range.
        """
        check_features("x", x, self.self_attn.embed_dim, self.linear1)
        normed = self.norm1(x) if self.norm_first else x
        attended = self.self_attn(normed, graph, bias=bias, return_attention_weights=return_attention_weights)
        attended, weights = attended if return_attention_weights else (attended, None)
        x = x + self.dropout1(attended)
        if self.norm_first:
            x = x + self._feed_forward(self.norm2(x))
        else:
            x = self.norm1(x)
            x = self.norm2(x + self._feed_forward(x))
        return (x, weights) if return_attention_weights else x

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout2(mapped(self.linear2, self.dropout(self.activation(mapped(self.linear1, x)))))


class GraphTransformer(torch.nn.Module):
    r"""A transformer for nodes: linear map in, pre-norm encoder layers on one graph, linear map out.

    $$x^0 = W_{in}\,x + W_{enc}\,e, \qquad x^{l+1} = \mathrm{Layer}_l(x^l), \qquad
    \mathrm{out} = W_{out}\,\mathrm{LN}(x^L)$$

    Layers are `GraphTransformerLayer`s with GELU and 4·hidden_channels in the feed-forward network. Attention
    does not know where a node is: positions come in as node features e, such as those of
    `graphattn.encodings`, one row for each node and the same for every leading index.
    O(num_layers · (N·hidden_channels² + E·hidden_channels)) time.

    Args:
        in_channels: features of a node.
        hidden_channels: channels of a node between the layers.
        out_channels: outputs of a node.
        num_layers: number of layers L.
        heads: number of heads in every layer; divides hidden_channels.
        dropout: probability in [0, 1], as in `GraphTransformerLayer`.
        encoding_channels: features of a node's positional encoding; 0 for none.
        checkpointing: keep only what goes in and out of each layer for the backward pass, and compute the rest
            again: memory of one layer instead of L, for one more forward pass. Results do not change, those of
            dropout neither.

    Raises:
        ValueError: `hidden_channels` is not a multiple of `heads`, a number is below 1 (`num_layers` and
            `encoding_channels`: below 0), or `dropout` lies outside [0, 1].
        TypeError: a number is not an int, or `dropout` no number.

    Example:
        >>> model = GraphTransformer(in_channels=3, hidden_channels=8, out_channels=2, num_layers=2, heads=2)
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> out, weights = model(torch.randn(3, 3), edge_index, return_attention_weights=True)
        >>> out.shape, [alpha.shape for alpha in weights]
        (torch.Size([3, 2]), [torch.Size([3, 2]), torch.Size([3, 2])])

    Dwivedi and Bresson, A Generalization of Transformer Networks to Graphs, 2020.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        heads: int,
        *,
        dropout: float = 0.0,
        encoding_channels: int = 0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_heads("hidden_channels", hidden_channels, "heads", heads)
        counts = {"in_channels": (in_channels, 1), "out_channels": (out_channels, 1)}
        counts |= {"num_layers": (num_layers, 0), "encoding_channels": (encoding_channels, 0)}
        for name, (n, least) in counts.items():
            check_count(f"`{name}`", n, least)
        check_probability("dropout", dropout)
        self.in_channels, self.encoding_channels = in_channels, encoding_channels
        self.checkpointing = checkpointing
        self.lin_in = Linear(in_channels, hidden_channels)
        # Added, not concatenated, so that one encoding serves a whole batch of feature sets.
        self.lin_encoding = (
            Linear(encoding_channels, hidden_channels, bias=False) if encoding_channels else None
        )
        self.layers = ModuleList(
            GraphTransformerLayer(
                hidden_channels, heads, 4 * hidden_channels, dropout, activation="gelu", norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm = LayerNorm(hidden_channels)
        self.lin_out = Linear(hidden_channels, out_channels)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for module in self.children():
            reset(module)

    def forward(
        self,
        x: Tensor,
        graph: Any,
        encoding: Tensor | None = None,
        *,
        return_attention_weights: bool = False,
    ) -> Any:
        """Node features in, node outputs out.

        Args:
            x: `[..., nodes, in_channels]`.
            graph: a `Graph`, or what `as_graph` takes.
            encoding: `[..., nodes, encoding_channels]`, leading dimensions broadcast; None for a model without.
            return_attention_weights: truthy to get the weights as well.

        Returns:
            `[..., nodes, out_channels]`. With `return_attention_weights`: `(out, [weights])`, for each layer
            `[..., *edge_shape, heads]`, before dropout.

        Raises:
            ValueError: a shape does not fit the model or the graph, or `encoding` is missing or not expected.
            TypeError: `x` or `encoding` is not a dense floating point tensor of the model's dtype, or `graph`
                nothing that stands for a graph.
            IndexError: a node id of an `edge_index` is out of range.
        """
        check_features("x", x, self.in_channels, self.lin_in)
        nodes = x.size(-2)
        graph = graph_between(graph, nodes, nodes, x.device)
        x = mapped(self.lin_in, x)
        if (encoding is None) != (self.lin_encoding is None):
            got = "None" if encoding is None else "a tensor"
            raise ValueError(
                f"`encoding` must {'not be given' if self.lin_encoding is None else 'be given'} for a model with"
                f" `encoding_channels={self.encoding_channels}`, got {got}."
            )
        if encoding is not None and self.lin_encoding is not None:
            check_features("encoding", encoding, self.encoding_channels, self.lin_encoding)
            leading = list(x.shape[:-2])  # each of which the encoding may have, have 1 of or lack
            own = [1] * (x.dim() - encoding.dim()) + list(encoding.shape[:-2])
            fits = len(own) == len(leading) and all(n in (1, size) for n, size in zip(own, leading))
            if encoding.size(-2) != nodes or not fits:
                raise ValueError(
                    f"`encoding` must have shape [..., {nodes}, {self.encoding_channels}] for `x` of {nodes} nodes,"
                    f" the leading dimensions none or such as broadcast to {leading}, got {list(encoding.shape)}."
                )
            x = x + mapped(self.lin_encoding, encoding)
        weights = []
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(
                    layer, x, graph, return_attention_weights=return_attention_weights, use_reentrant=False
                )
            else:
                x = layer(x, graph, return_attention_weights=return_attention_weights)
            if return_attention_weights:
                x, alpha = x
                weights.append(alpha)
        x = mapped(self.lin_out, self.norm(x))
        return (x, weights) if return_attention_weights else x


class GPSConv(pyg.GPSConv):
    r"""PyG's GPS layer, its global attention computed without padding.

    $$h = \mathrm{LN}(x + \mathrm{conv}(x)) + \mathrm{LN}(x + \mathrm{Attention}(x)), \qquad
    x' = \mathrm{LN}(h + \mathrm{MLP}(h))$$

    where every node attends to all nodes of its own graph. The parameters, their names, order and initial values
    and the results are those of `torch_geometric.nn.GPSConv`. It pads all graphs of a batch to the largest; here a
    graph of n nodes costs n² edges, and a batch O(N + Σ n²·channels) time and O(N·channels) memory. The labels
    in `batch` need not be sorted.

    The global attention, `attn`, is a `GraphMultiheadAttention` on the edges of `CompleteGraph.from_batch(batch)`.
    Explainers look only at the edges of `conv`, as in PyG; to explain the global edges, set `attn.explain = None`
    and work with those that `return_attention_weights` gives.

    Args:
        channels: channels of a node, in and out.
        conv: the local message passing layer, or None.
        heads: number of heads of the global attention.
        dropout: probability in [0, 1], after `conv`, after the attention and in the MLP.
        act, act_kwargs: activation of the MLP, as PyG resolves it.
        norm, norm_kwargs: the three norms, as PyG resolves them; None for none.
        attn_type: "multihead", or "performer", PyG's linear attention, which pads.
        attn_kwargs: further arguments of the attention, such as `dropout` and `bias`.

    Raises:
        ValueError: `channels` is not a multiple of `heads`, `dropout` lies outside [0, 1], `attn_type` is another
            word, PyG knows no such `act` or `norm`, or `attn_kwargs` has other channels for keys or values than
            nodes have.
        TypeError: `channels` or `heads` is not an int, `conv` no module, `norm` neither a str nor a module, or
            `attn_kwargs` has an argument that the attention does not take.
        NotImplementedError: `attn_kwargs` asks for keys beside those of the nodes (`add_bias_kv`,
            `add_zero_attn`).

    Example:
        >>> from graphattn.nn import TransformerConv
        >>> conv = GPSConv(8, TransformerConv(8, 4, heads=2), heads=2)
        >>> edge_index, batch = torch.tensor([[0, 1, 4], [1, 0, 3]]), torch.tensor([0, 0, 1, 1, 1])
        >>> conv(torch.randn(5, 8), edge_index, batch).shape
        torch.Size([5, 8])

    Rampášek et al., Recipe for a General, Powerful, Scalable Graph Transformer, NeurIPS 2022.
    """

    def __init__(
        self,
        channels: int,
        conv: pyg.MessagePassing | None,
        heads: int = 1,
        dropout: float = 0.0,
        act: Any = "relu",
        act_kwargs: dict[str, Any] | None = None,
        norm: Any = "batch_norm",
        norm_kwargs: dict[str, Any] | None = None,
        attn_type: str = "multihead",
        attn_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if conv is not None and not isinstance(conv, torch.nn.Module):
            raise TypeError(f"`conv` must be a message passing layer or None, got {conv!r}.")
        check_word("`attn_type`", attn_type, ("multihead", "performer"))
        check_heads("channels", channels, "heads", heads)
        check_probability("dropout", dropout)
        if attn_type == "multihead":
            _check_attention_arguments(attn_kwargs, channels)
        if norm is not None and not isinstance(norm, (str, torch.nn.Module)):
            raise TypeError(f"`norm` must be a str, a module or None, got {type(norm).__name__}.")
        any_norm: Any = norm  # PyG takes modules too
        super().__init__(
            channels, conv, heads, dropout, act, act_kwargs, any_norm, norm_kwargs, attn_type, attn_kwargs
        )
        if isinstance(self.attn, torch.nn.MultiheadAttention):
            self.attn = _on_graphs(self.attn)
            self.attn.explain = False  # its edges are not those that explainers know

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        batch: Tensor | None = None,
        *,
        return_attention_weights: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Node features in, node features out.

        Args:
            x: `[nodes, channels]`.
            edge_index: the edges of `conv`, in any form that it takes.
            batch: integer `[nodes]`, which graph a node is in, any label in any order; None for one graph.
            return_attention_weights: truthy to get the weights of the global attention as well.
            **kwargs: further arguments of `conv`.

        Returns:
            `[nodes, channels]`. With `return_attention_weights`: `(out, (edges, alpha))`, edges int64 `[2, E]`
            all pairs of nodes of one graph, alpha `[E, heads]`, before dropout.

        Raises:
            ValueError: `x` or `batch` has a wrong shape, `conv` gives other channels than it takes, or weights
                are asked of a "performer", which has none.
            TypeError: `batch` is not an integer tensor, or `x` not a dense one of the layer's dtype.
        """
        check_features("x", x, self.channels, next(self.mlp.children(), self.mlp))
        if x.dim() != 2:
            raise ValueError(f"`x` must have shape [nodes, {self.channels}], got {list(x.shape)}.")
        if batch is not None:
            _check_batch(batch, x)
        parts = []
        if self.conv is not None:
            h = self.conv(x, edge_index, **kwargs)
            if not isinstance(h, Tensor) or h.shape != x.shape:  # which might broadcast
                got = list(h.shape) if isinstance(h, Tensor) else type(h).__name__
                raise ValueError(
                    f"`conv` must give features of shape {list(x.shape)}, as it takes them, got {got}."
                )
            h = F.dropout(h, p=self.dropout, training=self.training)
            parts.append(self._normalised(self.norm1, h + x, batch))
        attended, weights = self._attended(x, batch, return_attention_weights)
        attended = F.dropout(attended, p=self.dropout, training=self.training)
        parts.append(self._normalised(self.norm2, attended + x, batch))
        out: Any = sum(parts)
        out = self._normalised(self.norm3, out + mapped(self.mlp, out), batch)
        return (out, weights) if return_attention_weights else out

    def _normalised(self, norm: Any, h: Tensor, batch: Tensor | None) -> Tensor:
        if norm is None:
            return h
        return norm(h, batch=batch) if self.norm_with_batch else norm(h)

    def _attended(
        self, x: Tensor, batch: Tensor | None, return_attention_weights: bool
    ) -> tuple[Tensor, Any]:
        if isinstance(self.attn, GraphMultiheadAttention):
            if batch is None:
                graph = CompleteGraph(x.size(0)).to(x.device)
            else:
                graph = CompleteGraph.from_batch(batch)
            if not return_attention_weights:
                return self.attn(x, graph), None
            out, alpha = self.attn(x, graph, return_attention_weights=True)
            return out, (graph.to_edge_index(), alpha.reshape(-1, self.heads))
        if return_attention_weights:
            raise ValueError(
                '`return_attention_weights` must be falsy with attn_type="performer", which has no weights.'
                ' Use attn_type="multihead".'
            )
        if batch is None:
            dense, mask = to_dense_batch(x)
            return self.attn(dense, mask=mask)[mask], None
        labels, order = batch.unique(return_inverse=True)[1].sort(stable=True)
        dense, mask = to_dense_batch(x[order], labels)
        return self.attn(dense, mask=mask)[mask][order.argsort()], None


def _check_attention_arguments(arguments: Any, channels: int) -> None:
    if arguments is None:
        return
    known = ("dropout", "bias", "add_bias_kv", "add_zero_attn", "kdim", "vdim", "device", "dtype")
    if not isinstance(arguments, dict) or not set(arguments) <= set(known):
        got = sorted(set(arguments) - set(known)) if isinstance(arguments, dict) else type(arguments).__name__
        raise TypeError(f"`attn_kwargs` must be None or a dict of {', '.join(known)}, got {got}.")
    check_probability("attn_kwargs['dropout']", arguments.get("dropout", 0.0))
    for name in ("kdim", "vdim"):
        if arguments.get(name) not in (None, channels):
            raise ValueError(
                f"`attn_kwargs` must have {name}={channels}, the channels of a node, or none, got"
                f" {arguments[name]!r}."
            )


def _check_batch(batch: Any, x: Tensor) -> None:
    if not isinstance(batch, Tensor) or batch.dtype not in INTEGERS:
        got = batch.dtype if isinstance(batch, Tensor) else type(batch).__name__
        raise TypeError(f"`batch` must be a tensor of integers, got {got}.")
    if batch.layout is not torch.strided:
        raise TypeError(f"`batch` must be dense, got {batch.layout}.")
    if batch.shape != x.shape[:1]:
        raise ValueError(
            f"`batch` must have shape [{x.size(0)}], one label for each node of `x`, got {list(batch.shape)}."
        )
    if batch.device != x.device:
        raise ValueError(f"`batch` must be on the device of `x`, {x.device}, got {batch.device}.")


def _on_graphs(attention: torch.nn.MultiheadAttention) -> GraphMultiheadAttention:
    """The same attention, with the same parameters, on graphs."""
    if attention.bias_k is not None or attention.add_zero_attn:
        raise NotImplementedError(
            "GPSConv: `attn_kwargs` must not ask for `add_bias_kv` or `add_zero_attn`, keys that are no nodes."
            " Use torch_geometric.nn.GPSConv."
        )
    with torch.device("meta"):  # draws no random numbers
        on_graphs = GraphMultiheadAttention(
            attention.embed_dim,
            attention.num_heads,
            dropout=attention.dropout,
            bias=attention.in_proj_bias is not None,
            kdim=attention.kdim,
            vdim=attention.vdim,
        )
    on_graphs.load_state_dict(attention.state_dict(keep_vars=True), assign=True)
    return on_graphs
