"""Pictures of attention: on the edges of a graph, as a matrix of queries and keys, over an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import networkx
import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from graphattn.graph import Graph, GridGraph, SparseGraph, check_graph

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes

# From pale to dark, so that edges of little weight fade into the paper, but not from white, so that none is lost.
_COLORS = LinearSegmentedColormap.from_list(
    "attention", matplotlib.colormaps["YlOrRd"](np.linspace(0.12, 1.0, 256))
).with_extremes(bad="#ccd6e2")  # no edge
_MARK = "#1f5fae"
_WIDEST = 4.0  # points, the width of the edge of the largest weight
_NUMBERED = 40  # nodes up to which they are drawn with their numbers


def attention_matrix(graph: Graph, weights: Float[Tensor, "*edges"]) -> Float[Tensor, "queries keys *heads"]:
    """Spread weights that are in the edge layout of a graph over a matrix of its queries and keys.

    .. math:: A_{ij} = \\sum_{e: j \\to i} α_e, \\qquad \\mathrm{NaN} \\text{ where there is no edge}

    Parallel edges are summed. O(num_queries · num_keys · heads) time and memory. Differentiable.

    Args:
        graph: any graph.
        weights: `[*edge_shape]` or `[*edge_shape, heads]`, as `attention_weights` gives them. What slots without an
            edge hold is not looked at.

    Returns:
        `[num_queries, num_keys]` or `[num_queries, num_keys, heads]`, in the dtype of weights.

    Raises:
        ValueError: weights have another shape.
        TypeError: weights are not a floating point tensor, or `graph` is not a Graph.

    Example:
        >>> from graphattn import WindowGraph
        >>> attention_matrix(WindowGraph(3, (1, 0)), torch.tensor([[0.0, 1.0], [0.2, 0.8], [0.5, 0.5]]))
        tensor([[1.0000,    nan,    nan],
                [0.2000, 0.8000,    nan],
                [   nan, 0.5000, 0.5000]])
    """
    weights = _checked_layout(graph, weights)
    source, target = graph.to_edge_index().to(weights.device)
    heads = weights.shape[len(graph.edge_shape) :]
    entries = weights.reshape(-1, *heads)[graph.slots().to(weights.device)]
    matrix = weights.new_zeros(graph.num_queries, graph.num_keys, *heads)
    matrix = matrix.index_put((target, source), entries, accumulate=True)
    missing = torch.ones(graph.num_queries, graph.num_keys, dtype=torch.bool, device=weights.device)
    missing[target, source] = False
    return matrix.masked_fill(missing.view(*missing.shape, *[1] * len(heads)), torch.nan)


def draw_graph_attention(
    graph: Graph,
    weights: Float[Tensor, "*edges"],
    pos: Mapping[int, Sequence[float]] | Tensor | np.ndarray | None = None,
    head: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a graph whose edges are the wider and the darker the more weight they carry.

    Arrows lead from the key to the query that attends to it. Widths are proportional to the weights, colours run from
    0 to the largest one; parallel edges are drawn as one edge of their sum. Nodes carry their numbers where there are
    at most 40. In a bipartite graph the keys stand on the left, nodes `0..num_keys - 1`, and the queries on the right,
    nodes `num_keys..num_keys + num_queries - 1`. Made for graphs of up to some thousand edges: every edge is an arrow
    of its own.

    Args:
        graph: any graph.
        weights: `[*edge_shape]` or `[*edge_shape, heads]`, finite and not negative, as `attention_weights` gives them.
        pos: where to draw the nodes: `[nodes, 2]`, or a mapping of node numbers to (x, y) as networkx layouts are. By
            default the cells of a one- or two-dimensional grid stand on that grid (row 0 on top), the nodes of a
            `SparseGraph` where springs pull them, all others on a circle.
        head: number of the head to draw; None for the mean over the heads.
        ax: Matplotlib axes to draw on. By default a new pyplot figure, with a colour bar.

    Returns:
        The axes.

    Raises:
        ValueError: a shape is wrong, a weight negative or not finite, or `pos` misses a node or is not finite.
        TypeError: weights are not a floating point tensor, `head` is not an int, or `graph` not a Graph.
        IndexError: `head` is outside `[0, heads)`.

    Example:
        >>> from graphattn import attention_weights
        >>> from matplotlib.figure import Figure
        >>> graph = SparseGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 1, 0]]), num_nodes=3)
        >>> weights = attention_weights(torch.zeros(3, 1, 1), torch.zeros(3, 1, 1), graph)
        >>> ax = draw_graph_attention(graph, weights, ax=Figure().add_subplot())
        >>> [arrow.get_linewidth() for arrow in ax.patches]  # 0 → 1, 1 → 1, 2 → 0
        [2.0, 2.0, 4.0]
    """
    weights = _drawn_weights(graph, weights, head)
    bipartite = graph.num_keys != graph.num_queries
    G = networkx.DiGraph()
    G.add_nodes_from(range(graph.num_queries + (graph.num_keys if bipartite else 0)))
    source, target = graph.to_edge_index().tolist()
    for j, i, weight in zip(source, target, weights.flatten()[graph.slots().cpu()].tolist()):
        i = i + graph.num_keys if bipartite else i
        G.add_edge(j, i, weight=weight + G.get_edge_data(j, i, {"weight": 0.0})["weight"])
    places = _places(graph, G) if pos is None else _checked_pos(pos, len(G))

    axes = _axes(ax)
    total = [weight for _, _, weight in G.edges.data("weight")]
    largest = max(total, default=0.0) or 1.0
    size = min(300.0, 12_000.0 / max(len(G), 1))
    networkx.draw_networkx_nodes(
        G, places, ax=axes, node_size=size, node_color="white", edgecolors="#555555", linewidths=1.0
    )
    if total:
        networkx.draw_networkx_edges(
            G, places, ax=axes, node_size=size, width=[_WIDEST * weight / largest for weight in total],
            edge_color=total, edge_cmap=_COLORS, edge_vmin=0.0, edge_vmax=largest, arrowsize=8,
            connectionstyle="arc3,rad=0.12",
        )  # fmt: skip
    if len(G) <= _NUMBERED:
        labels = {n: n - graph.num_keys if bipartite and n >= graph.num_keys else n for n in G}
        networkx.draw_networkx_labels(G, places, labels, ax=axes, font_size=8)
    axes.set_axis_off()
    if ax is None:
        axes.figure.colorbar(
            ScalarMappable(Normalize(0.0, largest), _COLORS), ax=axes, label="weight", shrink=0.8
        )
    return axes


def draw_attention_matrix(graph: Graph, weights: Float[Tensor, "*edges"], ax: Axes | None = None) -> Axes:
    """Draw the weights of a graph as a matrix, a row for each query and a column for each key.

    Cells without an edge are grey; the colours of the others run from 0 to the largest weight. Parallel edges are
    summed. O(num_queries · num_keys · heads) memory.

    Args:
        graph: any graph.
        weights: `[*edge_shape]` or `[*edge_shape, heads]`, finite and not negative, as `attention_weights` gives them.
            Of several heads the mean is drawn; `weights[..., h]` is head h.
        ax: Matplotlib axes to draw on. By default a new pyplot figure, with a colour bar.

    Returns:
        The axes; `ax.images[0]` is the picture, its array masked where there is no edge.

    Raises:
        ValueError: a shape is wrong, or a weight negative or not finite.
        TypeError: weights are not a floating point tensor, or `graph` is not a Graph.

    Example:
        >>> from graphattn import CompleteGraph, attention_weights
        >>> from matplotlib.figure import Figure
        >>> graph = CompleteGraph(2, causal=True)
        >>> weights = attention_weights(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1), graph)
        >>> ax = draw_attention_matrix(graph, weights, ax=Figure().add_subplot())
        >>> print(ax.images[0].get_array())
        [[1.0 --]
         [0.5 0.5]]
    """
    matrix = attention_matrix(graph, _drawn_weights(graph, weights))
    axes = _axes(ax)
    if matrix.numel():
        image = axes.imshow(_picture(matrix), cmap=_COLORS, norm=_scale(matrix), interpolation="nearest")
        if ax is None:
            axes.figure.colorbar(image, ax=axes, label="weight (grey: no edge)")
    axes.set(xlabel="key", ylabel="query")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return axes


def draw_image_attention(
    image: Tensor | np.ndarray,
    weights: Tensor,
    query: int | tuple[int, int],
    grid: GridGraph | tuple[int, int],
    ax: Axes | None = None,
) -> Axes:
    """Draw what one query attends to over the image whose patches are the keys.

    The patches are stretched over the whole image: one covers height / rows by width / columns pixels. The more weight
    a patch has, the darker and the less transparent the colour laid over it; patches without an edge are covered in
    grey. The query, where it is a patch, has a blue frame. Keys before the patches (class token, registers) have no
    place in the image; the title says how much weight goes to them.

    Args:
        image: `[height, width]`, `[channels, height, width]` or `[height, width, channels]`, with 1 or 3 channels.
            uint8, or numbers which, unless they lie in [0, 1], are mapped to it by their least and largest.
        weights: finite and not negative, with a heads dimension at the end or without, the mean of the heads being
            drawn. With a `GridGraph` in its edge layout, `[nodes, slots]` or `[nodes, slots, heads]`. With a tuple a
            matrix, `[queries, keys]` or `[queries, keys, heads]`, whose last `rows · columns` keys are the patches, as
            a complete graph has it; `attention_matrix` makes one from the weights of any graph, NaN meaning no edge.
        query: number of the query among all queries (0 is the class token where there is one), or the (row, column)
            of its patch, where the queries are the keys.
        grid: the graph, or the (rows, columns) of the patches.
        ax: Matplotlib axes to draw on. By default a new pyplot figure, with a colour bar.

    Returns:
        The axes; `ax.images` are the image and the weights laid over it, `[rows, columns]`.

    Raises:
        ValueError: a shape is wrong, a value not finite, a weight negative, or `grid` has not two axes.
        TypeError: an argument is of another kind.
        IndexError: `query` is not one of the queries.

    Example:
        >>> from graphattn import attention_weights
        >>> from matplotlib.figure import Figure
        >>> grid = GridGraph((2, 3), 1)
        >>> weights = attention_weights(torch.zeros(6, 2, 1), torch.zeros(6, 2, 1), grid)
        >>> ax = draw_image_attention(torch.rand(3, 32, 48), weights, (0, 0), grid, ax=Figure().add_subplot())
        >>> print(ax.images[1].get_array())
        [[0.25 0.25 --]
         [0.25 0.25 --]]
    """
    picture = _checked_image(image)
    if isinstance(grid, GridGraph):
        rows, columns = _checked_shape(grid.shape)
        weights = attention_matrix(grid, _drawn_weights(grid, weights))
    else:
        rows, columns = _checked_shape(grid)
        _check_floating(weights)
    patches = rows * columns
    if weights.dim() not in (2, 3) or weights.size(1) < patches:
        raise ValueError(
            f"`weights` must have shape [queries, keys] or [queries, keys, heads] with at least"
            f" {rows} · {columns} keys, got {list(weights.shape)}. For other graphs than grids use attention_matrix."
        )
    query = _checked_query(query, (rows, columns), *weights.shape[:2])
    row = weights[query].detach().to("cpu", torch.float64)
    row = row.mean(-1) if row.dim() == 2 else row
    _check_weights(row[~row.isnan()])
    extra = weights.size(1) - patches
    over = row[extra:].view(rows, columns)

    axes = _axes(ax)
    height, width = picture.shape[:2]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(picture, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest", extent=extent)
    norm = _scale(over)
    shown = _picture(over)
    opacity = np.where(np.ma.getmaskarray(shown), 0.75, 0.1 + 0.65 * np.asarray(norm(shown.filled(0.0))))
    overlay = axes.imshow(
        shown, cmap=_COLORS, norm=norm, alpha=opacity, interpolation="nearest", extent=extent
    )
    if query >= extra and weights.size(0) == weights.size(1):
        y, x = divmod(query - extra, columns)
        corner = (x * width / columns - 0.5, y * height / rows - 0.5)
        axes.add_patch(
            Rectangle(corner, width / columns, height / rows, fill=False, edgecolor=_MARK, linewidth=2.5)
        )
    if extra:
        axes.set_title(f"{float(row[:extra].nansum()):.2f} of the weight on other tokens", fontsize="medium")
    axes.set(xticks=[], yticks=[])
    if ax is None:
        opaque = ScalarMappable(overlay.norm, _COLORS)
        axes.figure.colorbar(opaque, ax=axes, label="weight (grey: no edge)")
    return axes


def _axes(ax: Axes | None) -> Any:
    # Only a picture that nobody gave a place becomes part of pyplot's state.
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


def _picture(matrix: Tensor) -> np.ma.MaskedArray:
    return np.ma.masked_invalid(matrix.numpy())


def _scale(matrix: Tensor) -> Normalize:
    values = matrix[~matrix.isnan()]
    return Normalize(0.0, (float(values.max()) if values.numel() else 0.0) or 1.0)


def _places(graph: Graph, G: networkx.DiGraph) -> dict[int, Any]:
    if graph.num_keys != graph.num_queries:
        columns = (graph.num_keys, graph.num_queries)
        spots = [(side, -(n + 0.5) / size) for side, size in enumerate(columns) for n in range(size)]
        return dict(enumerate(spots))
    match graph:
        case GridGraph(shape=(_,)):
            return {n: (n, 0) for n in G}
        case GridGraph(shape=(_, columns)):
            return {n: (n % columns, -(n // columns)) for n in G}
        case SparseGraph():
            loose = (
                networkx.Graph()
            )  # weights pull no node: two pictures of one graph have it in the same places
            loose.add_nodes_from(G)
            loose.add_edges_from(G.edges)
            return networkx.spring_layout(loose, seed=0)
    return networkx.circular_layout(G)


def _checked_layout(graph: Any, weights: Any) -> Tensor:
    check_graph(graph)
    _check_floating(weights)
    layout = graph.edge_shape
    if weights.shape != layout and (weights.shape[:-1] != layout or weights.size(-1) == 0):
        sizes = "".join(f"{n}, " for n in layout)
        more = " Pick one leading index: weights[0]." if weights.dim() > len(layout) + 1 else ""
        raise ValueError(
            f"`weights` must have shape {list(layout)} or [{sizes}heads] for {graph}, got {list(weights.shape)}.{more}"
        )
    return weights


def _drawn_weights(graph: Any, weights: Any, head: int | None = None) -> Tensor:
    # Of one head or the mean, checked, as float64 on the CPU: half precision would show in a sum.
    weights = _checked_layout(graph, weights).detach().to("cpu", torch.float64)
    heads = weights.shape[len(graph.edge_shape) :]
    if head is not None:
        if not heads:
            raise ValueError(
                f"`head` must be None for `weights` without heads, {list(weights.shape)}, got {head}."
            )
        weights = weights[..., _checked_head(head, heads[0])]
    elif heads:
        weights = weights.mean(-1)
    _check_weights(weights.flatten()[graph.slots().cpu()])
    return weights


def _check_floating(weights: Any) -> None:
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        raise TypeError(f"`weights` must be a floating point tensor, got {_kind(weights)}.")
    if weights.is_meta:
        raise ValueError("`weights` must hold numbers, got a tensor on the meta device.")


def _check_weights(values: Tensor) -> None:
    wrong = values[~((values >= 0) & values.isfinite())]
    if wrong.numel():
        raise ValueError(f"`weights` must be finite and not negative on every edge, got {wrong[0].item()}.")


def _checked_head(head: Any, heads: int) -> int:
    if isinstance(head, bool) or not isinstance(head, (int, np.integer)):
        raise TypeError(f"`head` must be an int or None, got {_kind(head)}.")
    if not 0 <= head < heads:
        raise IndexError(f"`head` must lie in the interval [0, {heads}), got {head}.")
    return int(head)


def _checked_pos(pos: Any, nodes: int) -> dict[int, Any]:
    if isinstance(pos, Mapping):
        missing = next((n for n in range(nodes) if n not in pos), None)
        if missing is not None:
            raise ValueError(
                f"`pos` must have a place for each of the {nodes} nodes, got none for {missing}."
            )
        pos = [pos[n] for n in range(nodes)]
    spots = pos.detach().cpu().numpy() if isinstance(pos, Tensor) else np.asarray(pos)
    spots = spots.reshape(0, 2) if spots.size == 0 and nodes == 0 else spots
    if spots.shape != (nodes, 2):
        raise ValueError(f"`pos` must have shape [{nodes}, 2], got {list(spots.shape)}.")
    spots = spots.astype(float)
    if not np.isfinite(spots).all():
        raise ValueError("`pos` must be finite, got NaN or infinity.")
    return dict(enumerate(spots))


def _checked_shape(shape: Any) -> tuple[int, int]:
    if not isinstance(shape, (tuple, list)) or not all(
        isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in shape
    ):
        raise TypeError(f"`grid` must be a GridGraph or (rows, columns), got {shape!r}.")
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"`grid` must have two axes of at least one patch, got {tuple(shape)}.")
    return int(shape[0]), int(shape[1])


def _checked_query(query: Any, shape: tuple[int, int], num_queries: int, num_keys: int) -> int:
    parts = query if isinstance(query, (tuple, list)) else (query,)
    rows, columns = shape
    if len(parts) not in (1, 2) or not all(
        isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in parts
    ):
        raise TypeError(f"`query` must be an int or (row, column), got {query!r}.")
    if len(parts) == 1:
        if not 0 <= parts[0] < num_queries:
            raise IndexError(f"`query` must lie in the interval [0, {num_queries}), got {query}.")
        return int(parts[0])
    if num_queries != num_keys:
        raise ValueError(
            f"`query` must be a number where the queries are not the keys, got {query} for {num_queries} queries and"
            f" {num_keys} keys."
        )
    if not (0 <= parts[0] < rows and 0 <= parts[1] < columns):
        raise IndexError(f"`query` must lie in a grid of {rows} rows and {columns} columns, got {query}.")
    return num_keys - rows * columns + int(parts[0]) * columns + int(parts[1])


def _checked_image(image: Tensor | np.ndarray) -> np.ndarray:
    if not isinstance(image, (Tensor, np.ndarray)):
        raise TypeError(
            f"`image` must be a tensor or an array, got {_kind(image)}. Convert it with np.asarray."
        )
    pixels = torch.as_tensor(image).detach()
    if pixels.dim() == 3:
        if pixels.size(0) in (1, 3):
            pixels = pixels.permute(1, 2, 0)
        pixels = pixels.squeeze(-1)
    if pixels.numel() == 0 or pixels.dim() not in (2, 3) or (pixels.dim() == 3 and pixels.size(-1) != 3):
        raise ValueError(
            "`image` must have shape [height, width], or that with 1 or 3 channels before or after it, got"
            f" {list(image.shape)}."
        )
    if pixels.is_complex() or pixels.is_meta:
        raise TypeError(f"`image` must hold real numbers, got {_kind(image)}.")
    values = pixels.to("cpu", torch.float64)
    if not values.isfinite().all():
        raise ValueError("`image` must be finite, got NaN or infinity.")
    if pixels.dtype == torch.uint8:
        values = values / 255.0
    low, high = (bound.item() for bound in values.aminmax())
    if low < 0.0 or high > 1.0:
        values = (values - low) / ((high - low) or 1.0)
    return values.clamp(0.0, 1.0).numpy()


def _kind(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of {x.dtype}" + (" on the meta device" if x.is_meta else "")
    return type(x).__name__
