"""Attention restricted to the edges of a graph: one entry, one match, one kernel."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_gradtrackingtensor
from torch.utils.weak import WeakIdKeyDictionary

from graphattn.graph import (
    CompleteGraph,
    Graph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    axis_intervals,
    check_one_device,
)
from graphattn.kernels.blocks import block_attention
from graphattn.kernels.intervals import interval_attention
from graphattn.kernels.sparse import sparse_attention

if TYPE_CHECKING:
    from jaxtyping import Float


def graph_attention(
    query: Float[Tensor, "*batch queries heads dim"],
    key: Float[Tensor, "*batch keys kv_heads dim"],
    value: Float[Tensor, "*batch keys kv_heads value_dim"],
    graph: Graph,
    *,
    bias: Float[Tensor, "*edges heads"] | None = None,
    edge_attr: Float[Tensor, "edges features"] | None = None,
    edge_projection: Float[Tensor, "heads features dim"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Float[Tensor, "*batch queries heads value_dim"] | tuple[Tensor, Tensor]:
    """Let every query attend to the keys it has an edge from.

    .. math::
        out_i = \\sum_{j \\to i} \\mathrm{softmax}_j(s_{ij}) \\, v_j, \\qquad
        s_{ij} = \\mathrm{softcap}(scale \\cdot q_i \\cdot k_j) + bias_{ij}

    On a complete graph this is full self-attention, on a chain truncated attention, on a citation graph a GNN
    layer. Parallel edges count with their multiplicity; no edge is added or removed. A query with no edge, or
    whose every score is -inf, gets exactly 0 with zero gradients. Scores and sums are float32 (float64 for
    float64 inputs), the same bits on every call and for any number of threads. Takes O(E · heads · dim) time
    and O(N · heads · dim + E) memory. Nothing per edge and head is kept for the backward pass; while it runs, one
    number per edge and head is held for the gradient of a bias of one row per edge, two with edge features, in the
    place of their gradient where it has room. Under autocast all
    floating operands but float64 are cast to its dtype.

    With ``edge_attr`` e and ``edge_projection`` W the edge from j to i, head h, has key ``k_j + e_ij W_h``
    and value ``v_j + e_ij W_h``, the edge term of PyG's ``TransformerConv``. The products are regrouped,
    :math:`q \\cdot (k + eW) = q \\cdot k + (Wq) \\cdot e` and
    :math:`\\sum α (v + eW) = \\sum α v + (\\sum α e) W`, so that no projected edge is ever stored.

    Args:
        query: ``[..., num_queries, heads, dim]``. Leading dimensions are a batch of feature sets on the same
            graph.
        key: ``[..., num_keys, kv_heads, dim]``; kv_heads divides heads, consecutive query heads share one.
        value: ``[..., num_keys, kv_heads, value_dim]``.
        graph: which query may attend to which key.
        bias: added to the scores, in the graph's edge layout: ``[*edge_shape, heads]``, any of them 1. -inf
            removes an edge.
        edge_attr: ``[num_edges, features]``, on a ``SparseGraph``, together with edge_projection.
        edge_projection: ``[heads, features, dim]``; needs value_dim == dim.
        scale: factor of the scores, ``dim ** -0.5`` by default.
        softcap: c > 0 bounds the scaled scores by ``c · tanh(s / c)``, before the bias.
        dropout_p: probability with which a weight is dropped, the others being divided by 1 - dropout_p.
            Drawn from PyTorch's generator, one draw per edge, head and leading index.
        return_lse: also return :math:`\\log \\sum_j \\exp s_{ij}`, ``[..., num_queries, heads]``, -inf where
            a query has no edge, untouched by dropout, float32 (float64 for float64).

    Returns:
        ``[..., num_queries, heads, value_dim]`` in the dtype of query; with ``return_lse`` also lse.

    Raises:
        ValueError: a shape does not fit the graph or the other operands, or a number is out of its range.
        TypeError: an argument is of another kind, or the floating operands do not share one dtype.
        NotImplementedError: forward-mode or ``torch.func.grad`` derivatives are asked for, or the tensors
            live on a device that has no kernel.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 1, 0]])  # 0 → 1, 1 → 1, 2 → 0
        >>> graph = SparseGraph.from_edge_index(edge_index, num_nodes=3)
        >>> value = torch.tensor([2.0, 4.0, 6.0]).view(3, 1, 1)
        >>> graph_attention(torch.zeros(3, 1, 1), torch.zeros(3, 1, 1), value, graph).flatten()
        tensor([6., 3., 0.])

    Vaswani et al., `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017; the edge term: Shi
    et al., `Masked Label Prediction <https://arxiv.org/abs/2009.03509>`_, 2021.
    """
    out, lse, _ = _attend(
        query, key, value, graph, bias, edge_attr, edge_projection, scale, softcap, dropout_p, return_lse, False
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_weights(
    query: Float[Tensor, "*batch queries heads dim"],
    key: Float[Tensor, "*batch keys kv_heads dim"],
    graph: Graph,
    *,
    bias: Float[Tensor, "*edges heads"] | None = None,
    edge_attr: Float[Tensor, "edges features"] | None = None,
    edge_projection: Float[Tensor, "heads features dim"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "*batch *edges heads"]:
    """The weights with which `graph_attention` sums values, in the graph's edge layout.

    .. math:: α_{ij} = \\exp(s_{ij} - lse_i)

    They are in [0, 1] and sum to 1 over the edges of a query (to 0 where it has none), before dropout, and
    differentiable. Takes O(E · heads · dim) time and O(E · heads) memory.

    Args:
        query, key, graph, bias, edge_attr, edge_projection, scale, softcap: as for `graph_attention`.

    Returns:
        ``[..., *edge_shape, heads]``, float32, or float64 for float64 inputs.

    Raises:
        ValueError, TypeError, NotImplementedError: as `graph_attention`.

    Example:
        >>> graph = SparseGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 1, 0]]), num_nodes=3)
        >>> attention_weights(torch.zeros(3, 1, 1), torch.zeros(3, 1, 1), graph).flatten()
        tensor([0.5000, 0.5000, 1.0000])
    """
    # Without values the kernel only scores. The edge term needs value_dim == dim, so its values are not
    # formed either.
    sliceable = isinstance(key, Tensor) and key.layout is torch.strided and key.dim() > 0
    value = key[..., :0] if sliceable else key
    _, _, weights = _attend(
        query, key, value, graph, bias, edge_attr, edge_projection, scale, softcap, 0.0, False, True
    )
    return weights


def _attend(
    query, key, value, graph, bias, edge_attr, edge_projection, scale, softcap, dropout_p, return_lse,
    return_weights,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Check once, fill defaults, call one kernel: (out, lse, weights), the last empty unless asked for."""
    if not isinstance(graph, Graph):
        raise TypeError(
            f"`graph` must be a Graph, got {type(graph).__name__}. Build one with graphattn.as_graph, of a mask with"
            " SparseGraph.from_mask."
        )
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "edge_attr": edge_attr,
        "edge_projection": edge_projection,
    }
    operands = _one_dtype(
        {name: x for name, x in operands.items() if x is not None or name in ("query", "key", "value")}, graph
    )
    query, key, value = operands["query"], operands["key"], operands["value"]
    bias, edge_attr, edge_projection = (
        operands.get(name) for name in ("bias", "edge_attr", "edge_projection")
    )
    _check_shapes(query, key, value, graph, bias, edge_attr, edge_projection, return_weights)
    if not isinstance(return_lse, bool):
        raise TypeError(f"`return_lse` must be a bool, got {type(return_lse).__name__}.")
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = query.size(-1) ** -0.5 if scale is None else _number("scale", scale, wide)
    tiny = torch.finfo(wide).tiny
    softcap = 0.0 if softcap is None else max(_number("softcap", softcap, wide, above=0.0), tiny)
    dropout_p = _number("dropout_p", dropout_p, torch.float64)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"`dropout_p` must be in [0, 1], got {dropout_p}.")
    _refuse_functional_grad(operands.values())

    leading = query.shape[:-3]
    batch = math.prod(leading)
    query, key, value = (x.reshape(batch, *x.shape[-3:]) for x in (query, key, value))
    seed = torch.randint(2**63 - 1, (1,), device=query.device) if dropout_p > 0.0 else None
    if isinstance(graph, SparseGraph):  # Dynamo of PyTorch 2.8 does not trace `match`
        out, lse, weights = sparse_attention(
            query, key, value,
            graph.rowptr, graph.col, graph.edge_id, graph.colptr, graph.row, graph.edge_id_t,
            bias, edge_attr, edge_projection, seed, scale, softcap, dropout_p, return_weights,
        )  # fmt: skip
    elif isinstance(graph, (CompleteGraph, WindowGraph, GridGraph)) and query.device.type in (
        "cpu",
        "cuda",
        "meta",
    ):
        if graph.order is not None:  # the kernels see the nodes of a clique side by side
            query, key, value = (x.index_select(1, graph.order) for x in (query, key, value))
        if not isinstance(graph, GridGraph) and _in_blocks(graph, bias, return_weights):
            out, lse, weights = block_attention(
                query, key, value, bias, graph.ptr, seed, graph.offset, *_radius(graph), scale, softcap, dropout_p,
                return_weights,
            )  # fmt: skip
            if return_weights:
                weights = weights.permute(0, 2, 3, 1)
        else:
            out, lse, weights = interval_attention(
                query, key, value, *_intervals(graph), None if return_lse else _causal(graph), bias, None, None,
                seed, scale, softcap, dropout_p, return_weights,
            )  # fmt: skip
            if return_weights:
                weights = weights.view(batch, *graph.edge_shape, query.size(2))
        if graph.order is not None:
            out, lse = (torch.empty_like(x).index_copy(1, graph.order, x) for x in (out, lse))
    else:
        raise NotImplementedError(
            f"graph_attention has no kernel for {type(graph).__name__} on {graph.device.type}."
            " Use graph.to_sparse()."
        )
    out = out.to(query.dtype).view(*leading, *out.shape[1:])
    lse = lse.view(*leading, *lse.shape[1:])
    if return_weights:
        weights = weights.reshape(*leading, *weights.shape[1:])
    return out, lse, weights


_Intervals = tuple[Tensor, Tensor, "Tensor | None", list[int], list[int]]

# Of graphs on CUDA devices: the versions of their tensors then, and what `_intervals` made of them.
_kept = WeakIdKeyDictionary()


def _intervals(graph: CompleteGraph | WindowGraph | GridGraph) -> _Intervals:
    """The edges of a structured graph as `graphattn.kernels.intervals` takes them.

    On a CUDA device kept with the graph, as dozens of small operations take longer to launch than some kernel to run.
    A CUDA graph may be replayed with other numbers in the same place: there, they are part of the graph.
    """
    if (
        graph.device.type != "cuda"
        or torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
    ):
        return _listed_intervals(graph)
    versions = [None if x is None or x.is_inference() else x._version for x in (graph.ptr, graph.order)]
    entry = _kept.get(graph)
    if entry is not None and entry[0] == versions:
        return entry[1]
    with torch.inference_mode(False):  # what an evaluation made must serve the training after it
        made = _listed_intervals(graph)
    if type(made[0]) is Tensor:  # not a tracer's stand-in
        _kept[graph] = versions, made
    return made


def _listed_intervals(graph: CompleteGraph | WindowGraph | GridGraph) -> _Intervals:
    axes = axis_intervals(graph)
    by_query = torch.stack(
        [torch.cat(x) for x in zip(*((axis.first, axis.count, axis.slot) for axis in axes))]
    )
    by_key = torch.stack(
        [torch.cat(x) for x in zip(*((axis.first_query, axis.query_count) for axis in axes))]
    )
    numbers = [
        number
        for axis in axes
        for number in (
            axis.first.size(0), axis.first_query.size(0), axis.step, axis.slot_step, axis.slots,
        )
    ]  # fmt: skip
    return by_query, by_key, graph.ptr, numbers, list(graph.edge_shape)


def _causal(graph: CompleteGraph | WindowGraph | GridGraph) -> bool | None:
    """Whether a graph is causal from the top left corner (True) or complete (False), or neither (None)."""
    if not isinstance(graph, CompleteGraph) or graph.ptr is not None:
        return None
    if not graph.causal or graph.offset >= graph.num_keys - 1:
        return False
    return True if graph.offset == 0 and graph.num_keys >= graph.num_queries else None


def _radius(graph: CompleteGraph | WindowGraph) -> tuple[int | None, int | None]:
    if isinstance(graph, WindowGraph):
        return graph.radius
    return None, 0 if graph.causal else None


def _in_blocks(graph: CompleteGraph | WindowGraph, bias: Tensor | None, return_weights: bool) -> bool:
    """Whether blocks of consecutive queries and keys serve the graph better than one row of edges at a time.

    They score all keys that any query of a block may see, so the band must be wide, and take a bias and give weights
    only where these are matrices of all queries and keys.
    """
    if graph.device.type == "cuda":  # where the other kernel works on blocks too
        return False
    before, after = _radius(graph)
    bounded = before is not None and after is not None
    if (bias is not None or return_weights) and (bounded or graph.ptr is not None):
        return False
    if isinstance(graph, WindowGraph) and graph.dilation != 1:
        return False
    if before is not None and after is not None and before + after < 48:
        return False
    # A sequence of its own takes about as long as 24² edges of the row kernel.
    return graph.ptr is None or graph.num_edges >= 24**2 * (graph.ptr.numel() - 1)


# Asked for once: Dynamo of PyTorch 2.8 does not trace the question.
_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "mps", "xpu", "hpu", "mtia") if torch.amp.is_autocast_available(kind)
)


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast takes numbers other than float64 to on a kind of device; None where it is off."""
    return torch.get_autocast_dtype(kind) if kind in _AUTOCAST and torch.is_autocast_enabled(kind) else None


def _one_dtype(operands: dict, graph: Graph) -> dict:
    for name, x in operands.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}.")
        if x.layout is not torch.strided:
            raise TypeError(f"`{name}` must be dense, got {x.layout}. Convert it with `.to_dense()`.")
        if name == "bias" and x.dtype == torch.bool:
            raise TypeError(
                "`bias` is added to the scores, got a bool mask. Fill a floating point bias with -inf where"
                " an edge is masked, or build the graph with SparseGraph.from_mask."
            )
        if not x.is_floating_point():
            raise TypeError(f"`{name}` must be floating point, got {x.dtype}. Convert it with `.float()`.")
        check_one_device(f"`{name}`", x.device, "`graph`", graph.device)
    dtype = autocast_dtype(graph.device.type)
    if dtype is not None:
        operands = {name: x if x.dtype == torch.float64 else x.to(dtype) for name, x in operands.items()}
    dtype = operands["query"].dtype
    for name, x in operands.items():
        if x.dtype != dtype:
            raise TypeError(
                f"`query` and `{name}` must have one dtype, got {dtype} and {x.dtype}."
                f" Convert one with `.to`."
            )
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"`query` must be float16, bfloat16, float32 or float64, got {dtype}.")
    return operands


def _check_shapes(query, key, value, graph, bias, edge_attr, edge_projection, return_weights) -> None:
    def wrong(name: str, expected: str, x: Tensor) -> NoReturn:
        raise ValueError(f"`{name}` must have shape {expected}, got {list(x.shape)}.")

    if query.dim() < 3 or query.size(-3) != graph.num_queries:
        wrong("query", f"[..., {graph.num_queries}, heads, dim], nodes before heads, for {graph}", query)
    leading, heads, dim = query.shape[:-3], query.size(-2), query.size(-1)
    if dim == 0 or heads == 0:
        wrong("query", "[..., queries, heads, dim] with at least one head and one dim", query)
    prefix = "".join(f"{n}, " for n in leading)
    if (
        key.dim() != query.dim()
        or key.shape[:-3] != leading
        or key.size(-3) != graph.num_keys
        or key.size(-1) != dim
    ):
        wrong(
            "key",
            f"[{prefix}{graph.num_keys}, heads, {dim}] for {graph} and a query of shape {list(query.shape)}",
            key,
        )
    kv_heads = key.size(-2)
    if kv_heads == 0 or heads % kv_heads != 0:
        wrong(
            "key", f"[..., keys, heads, dim] with a number of heads that divides the {heads} of `query`", key
        )
    if value.dim() != query.dim() or value.shape[:-1] != key.shape[:-1]:
        wrong("value", f"[{prefix}{graph.num_keys}, {kv_heads}, dim], as `key`", value)
    layout = (*graph.edge_shape, heads)
    if bias is not None and (
        bias.dim() != len(layout) or any(n != 1 and n != full for n, full in zip(bias.shape, layout))
    ):
        wrong(
            "bias",
            f"{list(layout)} or 1 in place of any of these (the edge layout of {graph}, then heads)",
            bias,
        )
    if edge_attr is None and edge_projection is None:
        return
    if not isinstance(graph, SparseGraph):
        raise ValueError(f"`edge_attr` needs a SparseGraph, got {graph}. Use graph.to_sparse().")
    if edge_attr is None or edge_projection is None:
        given, missing = (
            ("edge_projection", "edge_attr") if edge_attr is None else ("edge_attr", "edge_projection")
        )
        raise ValueError(
            f"`edge_attr` and `edge_projection` must be given together, got `{given}` without `{missing}`."
        )
    if edge_attr.dim() != 2 or edge_attr.size(0) != graph.num_edges:
        wrong("edge_attr", f"[{graph.num_edges}, features] for {graph}", edge_attr)
    if edge_projection.shape != (heads, edge_attr.size(1), dim):
        wrong(
            "edge_projection",
            f"[{heads}, {edge_attr.size(1)}, {dim}] (heads, features, dim)",
            edge_projection,
        )
    if not return_weights and value.size(-1) != dim:
        wrong(
            "value",
            f"[..., keys, heads, {dim}] with edge_projection (the projected features are added to it)",
            value,
        )


def _number(name: str, x: float, dtype: torch.dtype, above: float = -math.inf) -> float:
    """A finite number of the dtype that scores have."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"`{name}` must be a number, got {type(x).__name__}.")
    most = torch.finfo(dtype).max
    try:
        x = float(x)
    except OverflowError:  # of an int or a Fraction
        x = math.inf if x > 0 else -math.inf
    if not (above < x and abs(x) <= most):
        least = f"above {above:g} and " if above > -math.inf else ""
        raise ValueError(f"`{name}` must be {least}at most {most:g} in size, finite in {dtype}, got {x}.")
    return x


def _refuse_functional_grad(operands) -> None:
    if torch.compiler.is_compiling():
        return
    if any(is_gradtrackingtensor(x) for x in operands):
        raise NotImplementedError(
            "graph_attention's kernels have no rule for torch.func.grad and forward mode."
            " Use torch.autograd.grad or backward()."
        )
