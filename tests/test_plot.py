"""Pictures of attention show the numbers they are given."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from torch.nn.functional import scaled_dot_product_attention

from graphattn import (
    CompleteGraph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    attention_weights,
    expander_graph,
    union,
)
from graphattn.plot import (
    attention_matrix,
    draw_attention_matrix,
    draw_graph_attention,
    draw_image_attention,
)

GRAPHS = {
    "sparse": SparseGraph.from_edge_index(torch.tensor([[0, 1, 2, 2, 4, 0], [1, 2, 0, 2, 2, 4]]), 6),
    "bipartite": SparseGraph.from_edge_index(torch.tensor([[0, 6, 2, 2], [1, 2, 0, 2]]), size=(7, 3)),
    "complete": CompleteGraph(5, num_keys=7),
    "causal": CompleteGraph(5, causal=True),
    "cliques": CompleteGraph.from_batch(torch.tensor([1, 0, 1, 0, 0])),
    "window": WindowGraph(9, (2, 1), dilation=2),
    "ragged window": WindowGraph.from_ptr(torch.tensor([0, 3, 3, 7]), 1),
    "unbounded window": WindowGraph.from_ptr(torch.tensor([0, 3, 7]), (None, 0)),
    "grid": GridGraph((3, 4), 1),
    "shifted grid": GridGraph((3, 4), 1, border="shift"),
    "union": union(WindowGraph(8, 1), expander_graph(8, 2, seed=0)),
}


@pytest.fixture
def ax():
    return Figure().add_subplot()


def features(graph, heads=2, dim=4):
    return torch.randn(graph.num_queries, heads, dim), torch.randn(graph.num_keys, heads, dim)


def dense_weights(query, key, mask):
    """The weights of masked dense attention, by letting the values be the unit vectors."""
    unit = torch.eye(key.size(0)).expand(query.size(1), -1, -1)
    out = scaled_dot_product_attention(query.transpose(0, 1), key.transpose(0, 1), unit, mask)
    return out.nan_to_num(0.0).permute(1, 2, 0)  # PyTorch gives NaN to a query that may see nothing


@pytest.mark.parametrize("name", GRAPHS)
def test_the_matrix_is_a_dense_softmax_masked_where_there_is_no_edge(name, ax):
    graph = GRAPHS[name]
    query, key = features(graph)
    weights = attention_weights(query, key, graph)
    expected = dense_weights(query, key, graph.to_mask())
    matrix = attention_matrix(graph, weights)
    torch.testing.assert_close(matrix.nan_to_num(0.0), expected)
    assert torch.equal(matrix.isnan().any(-1), ~graph.to_mask())
    torch.testing.assert_close(
        attention_matrix(graph, weights[..., 1]), matrix[..., 1], equal_nan=True
    )  # the layout without heads

    shown = draw_attention_matrix(graph, weights, ax=ax).images[0]
    assert np.array_equal(shown.get_array().mask, ~graph.to_mask().numpy())
    np.testing.assert_allclose(shown.get_array().filled(0.0), expected.mean(-1).numpy(), atol=1e-6)
    assert shown.norm.vmin == 0.0 and shown.norm.vmax == pytest.approx(expected.mean(-1).max().item())


def test_parallel_edges_are_summed(ax):
    graph = SparseGraph.from_edge_index(torch.tensor([[0, 1, 0], [1, 1, 1]]), 2)
    weights = torch.tensor([[0.25, 0.0], [0.25, 1.0], [0.5, 0.0]])
    assert attention_matrix(graph, weights)[1].tolist() == [[0.75, 0.0], [0.25, 1.0]]
    assert draw_attention_matrix(graph, weights, ax=ax).images[0].get_array()[1].tolist() == [0.375, 0.625]
    loop, arrow = sorted(
        draw_graph_attention(graph, weights, head=0, ax=ax).patches, key=lambda patch: patch.get_linewidth()
    )
    assert loop.get_linewidth() == pytest.approx(arrow.get_linewidth() / 3)


def test_the_matrix_is_differentiable():
    graph = GRAPHS["window"]
    weights = torch.rand(*graph.edge_shape, 2, requires_grad=True)
    factors = torch.rand(9, 9, 2)
    (attention_matrix(graph, weights).nan_to_num(0.0) * factors).sum().backward()
    source, target = graph.to_edge_index()
    expected = torch.zeros(9 * 4, 2)
    expected[graph.slots()] = factors[target, source]
    assert torch.equal(weights.grad, expected.view(9, 4, 2))


@pytest.mark.parametrize("head", [None, 0, 1])
def test_widths_and_colours_of_edges_are_proportional_to_their_weights(head, ax):
    graph = GRAPHS["sparse"]
    weights = attention_weights(*features(graph), graph)
    chosen = weights.mean(-1) if head is None else weights[:, head]
    draw_graph_attention(graph, weights, head=head, ax=ax)
    # networkx draws edges in the order of their sources: here that of a stable sort by source.
    order = graph.to_edge_index()[0].sort(stable=True).indices
    expected = (chosen / chosen.max())[order]
    widths = torch.tensor([arrow.get_linewidth() for arrow in ax.patches])
    torch.testing.assert_close(widths / widths.max(), expected)
    weakest, strongest = (ax.patches[n].get_edgecolor() for n in (expected.argmin(), expected.argmax()))
    assert sum(strongest[:3]) < sum(weakest[:3])  # darker
    assert strongest == pytest.approx(to_rgba("#800026"))  # the last colour of YlOrRd


@pytest.mark.parametrize("name", GRAPHS)
def test_every_edge_and_node_of_every_kind_is_drawn(name, ax):
    graph = GRAPHS[name]
    draw_graph_attention(graph, attention_weights(*features(graph), graph), ax=ax)
    assert len(ax.patches) == graph.num_edges  # none of these has parallel edges
    nodes = graph.num_queries + (graph.num_keys if graph.num_keys != graph.num_queries else 0)
    assert len(ax.collections[0].get_offsets()) == len(ax.texts) == nodes


def test_nodes_stand_where_they_are_told(ax):
    graph = GRAPHS["sparse"]
    weights = torch.ones(graph.num_edges)
    pos = torch.randn(6, 2)
    for given in (pos, pos.numpy(), {n: tuple(xy) for n, xy in enumerate(pos.tolist())}):
        ax = draw_graph_attention(graph, weights, given, ax=Figure().add_subplot())
        np.testing.assert_allclose(ax.collections[0].get_offsets(), pos.numpy(), rtol=1e-6)
    grid = draw_graph_attention(GRAPHS["grid"], torch.ones(12, 9), ax=Figure().add_subplot())
    assert grid.collections[0].get_offsets()[6].tolist() == [2, -1]  # row 1, column 2
    first, second = (draw_graph_attention(graph, weights, ax=Figure().add_subplot()) for _ in range(2))
    np.testing.assert_array_equal(*(x.collections[0].get_offsets() for x in (first, second)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_patches_lie_over_the_pixels_they_are_made_of(channels_last, ax):
    image = torch.rand(3, 24, 48)
    graph = GridGraph((3, 4), 1)
    query, key = features(graph)
    weights = attention_weights(query, key, graph)
    shown = image.permute(1, 2, 0).numpy()
    draw_image_attention(shown if channels_last else image, weights, (1, 3), graph, ax=ax)
    picture, overlay = ax.images
    np.testing.assert_allclose(picture.get_array(), shown)
    assert list(picture.get_extent()) == list(overlay.get_extent()) == [-0.5, 47.5, 23.5, -0.5]
    expected = dense_weights(query, key, graph.to_mask())[7].mean(-1).view(3, 4)
    np.testing.assert_allclose(overlay.get_array().filled(0.0), expected, atol=1e-6)
    assert overlay.get_array().mask.tolist() == [[True, True, False, False]] * 3
    (frame,) = ax.patches  # patch (1, 3) covers the rows 8 to 15 and the columns 36 to 47
    assert frame.get_bbox().extents.tolist() == [35.5, 7.5, 47.5, 15.5]


def test_the_tokens_before_the_patches_are_only_in_the_title(ax):
    weights = torch.rand(8, 8, 2)
    weights = weights / weights.sum(1, keepdim=True)
    draw_image_attention(torch.zeros(2, 3), weights, 0, (2, 3), ax=ax)
    np.testing.assert_allclose(ax.images[1].get_array(), weights[0, 2:].mean(-1).view(2, 3), rtol=1e-6)
    assert not ax.patches
    assert ax.get_title().startswith(f"{weights[0, :2].mean(-1).sum():.2f} of the weight")
    ax = draw_image_attention(torch.zeros(2, 3), weights, (1, 0), (2, 3), ax=Figure().add_subplot())
    np.testing.assert_allclose(ax.images[1].get_array(), weights[5, 2:].mean(-1).view(2, 3), rtol=1e-6)
    assert ax.patches[0].get_bbox().extents.tolist() == [-0.5, 0.5, 0.5, 1.5]


def test_queries_that_are_not_the_keys_have_no_patch(ax):
    draw_image_attention(torch.zeros(2, 3), torch.rand(4, 6), 3, (2, 3), ax=ax)
    assert not ax.patches
    with pytest.raises(ValueError, match="`query` must be a number"):
        draw_image_attention(torch.zeros(2, 3), torch.rand(4, 6), (0, 0), (2, 3), ax=ax)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (torch.tensor([[0, 51], [102, 255]], dtype=torch.uint8), [[0.0, 0.2], [0.4, 1.0]]),
        (torch.tensor([[0.25, 0.5], [0.5, 1.0]]).bfloat16(), [[0.25, 0.5], [0.5, 1.0]]),
        (torch.tensor([[-1.0, 0.0], [1.0, 3.0]]), [[0.0, 0.25], [0.5, 1.0]]),
        (np.array([[[0], [8]], [[8], [16]]]), [[0.0, 0.5], [0.5, 1.0]]),
        (torch.full((2, 2), 7.0), [[0.0, 0.0], [0.0, 0.0]]),
    ],
)
def test_pixels_of_any_type(image, expected, ax):
    draw_image_attention(image, torch.ones(4, 4), 0, (2, 2), ax=ax)
    np.testing.assert_allclose(ax.images[0].get_array(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_type_that_require_grad(dtype, ax):
    graph = GRAPHS["grid"]
    weights = torch.rand(12, 9, 3).to(dtype).requires_grad_()
    exact = attention_matrix(graph, weights.detach().double()).mean(-1)
    shown = draw_attention_matrix(graph, weights, ax=ax).images[0].get_array()
    np.testing.assert_allclose(
        shown.filled(np.nan), exact, rtol=1e-12
    )  # the mean is not taken in half precision
    draw_graph_attention(graph, weights, ax=Figure().add_subplot())
    ax = draw_image_attention(torch.rand(3, 4), weights, 5, graph, ax=Figure().add_subplot())
    np.testing.assert_allclose(ax.images[1].get_array().filled(np.nan).flatten(), exact[5], rtol=1e-12)


def test_slots_without_an_edge_are_not_looked_at(ax):
    graph = WindowGraph(3, 1)
    weights = torch.full((3, 3), torch.nan)
    weights.view(-1)[graph.slots()] = 0.5
    assert draw_attention_matrix(graph, weights, ax=ax).images[0].get_array().count() == 7
    assert len(draw_graph_attention(graph, weights, ax=Figure().add_subplot()).patches) == 7


@pytest.mark.parametrize(
    "graph",
    [
        CompleteGraph(0),
        CompleteGraph(0, num_keys=3),
        WindowGraph(0, 1),
        SparseGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 0),
        SparseGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 3),
        SparseGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), size=(2, 3)),
    ],
    ids=repr,
)
def test_graphs_without_edges_draw(graph):
    for weights in (torch.ones(graph.edge_shape), torch.ones(*graph.edge_shape, 2)):
        figure = Figure()
        above, below = figure.subplots(2)
        draw_graph_attention(graph, weights, ax=above)
        draw_attention_matrix(graph, weights, ax=below)
        figure.canvas.draw()
        assert not above.patches


def test_weights_of_zero_draw(ax):
    draw_graph_attention(CompleteGraph(3), torch.zeros(3, 3), ax=ax)
    assert {arrow.get_linewidth() for arrow in ax.patches} == {0.0}
    ax = draw_image_attention(torch.zeros(2, 2), torch.zeros(4, 4), 0, (2, 2), ax=Figure().add_subplot())
    ax.figure.canvas.draw()


def test_pyplot_knows_only_the_pictures_that_nobody_gave_a_place(ax):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = pyplot.get_fignums()
    weights = torch.ones(4, 4)
    draw_graph_attention(CompleteGraph(4), weights, ax=ax)
    draw_attention_matrix(CompleteGraph(4), weights, ax=ax)
    draw_image_attention(torch.zeros(2, 2), weights, 0, (2, 2), ax=ax)
    assert pyplot.get_fignums() == before
    for draw in (
        lambda: draw_graph_attention(CompleteGraph(4), weights),
        lambda: draw_attention_matrix(CompleteGraph(4), weights),
        lambda: draw_image_attention(torch.zeros(2, 2), weights, 0, (2, 2)),
    ):
        own = draw()
        assert len(own.figure.axes) == 2  # with a colour bar
        assert len(pyplot.get_fignums()) == len(before) + 1
        own.figure.canvas.draw()
        pyplot.close(own.figure)


GRAPH = GRAPHS["grid"]
GOOD = torch.ones(12, 9)
IMAGE = torch.zeros(6, 8)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: draw_graph_attention("graph", GOOD), TypeError, "`graph` must be a Graph, got str"),
        (lambda: draw_graph_attention(GRAPH, GOOD.tolist()), TypeError, "`weights` .* got list"),
        (lambda: draw_graph_attention(GRAPH, GOOD.int()), TypeError, "`weights` .* torch.int32"),
        (lambda: draw_graph_attention(GRAPH, GOOD.to("meta")), ValueError, "`weights` .* meta"),
        (lambda: draw_graph_attention(GRAPH, GOOD.T), ValueError, r"`weights` .* \[12, 9, heads\] .* \[9, 12\]"),
        (lambda: draw_attention_matrix(GRAPH, GOOD.view(1, 12, 9, 1)), ValueError, r"`weights` .* weights\[0\]"),
        (lambda: draw_attention_matrix(GRAPH, torch.ones(12, 9, 0)), ValueError, "`weights` must have shape"),
        (lambda: draw_attention_matrix(GRAPH, -GOOD), ValueError, "`weights` must be finite and not neg.* -1"),
        (lambda: draw_attention_matrix(GRAPH, GOOD / 0), ValueError, "`weights` must be finite .* inf"),
        (lambda: draw_graph_attention(GRAPH, GOOD * torch.nan), ValueError, "`weights` must be finite .* nan"),
        (lambda: draw_graph_attention(GRAPH, GOOD, head=0), ValueError, "`head` must be None"),
        (lambda: draw_graph_attention(GRAPH, GOOD[..., None], head=1), IndexError, r"`head` .* \[0, 1\), got 1"),
        (lambda: draw_graph_attention(GRAPH, GOOD[..., None], head=-1), IndexError, r"`head` .* got -1"),
        (lambda: draw_graph_attention(GRAPH, GOOD[..., None], head=True), TypeError, "`head` must be an int"),
        (lambda: draw_graph_attention(GRAPH, GOOD, {0: (0, 0)}), ValueError, "`pos` .* got none for 1"),
        (lambda: draw_graph_attention(GRAPH, GOOD, torch.zeros(12, 3)), ValueError, r"`pos` .* \[12, 2\], got"),
        (lambda: draw_graph_attention(GRAPH, GOOD, torch.ones(12, 2) / 0), ValueError, "`pos` must be finite"),
        (lambda: draw_image_attention([[0.0]], GOOD, 0, GRAPH), TypeError, "`image` must be a tensor"),
        (lambda: draw_image_attention(torch.zeros(2, 6, 8), GOOD, 0, GRAPH), ValueError, "`image` .* 1 or 3"),
        (lambda: draw_image_attention(IMAGE[:0], GOOD, 0, GRAPH), ValueError, "`image` must have shape"),
        (lambda: draw_image_attention(IMAGE / 0, GOOD, 0, GRAPH), ValueError, "`image` must be finite"),
        (lambda: draw_image_attention(IMAGE + 0j, GOOD, 0, GRAPH), TypeError, "`image` must hold real"),
        (lambda: draw_image_attention(IMAGE, GOOD, 12, GRAPH), IndexError, r"`query` .* \[0, 12\), got 12"),
        (lambda: draw_image_attention(IMAGE, GOOD, (3, 0), GRAPH), IndexError, "`query` .* 3 rows and 4 columns"),
        (lambda: draw_image_attention(IMAGE, GOOD, 1.0, GRAPH), TypeError, "`query` must be an int or"),
        (lambda: draw_image_attention(IMAGE, GOOD, (), GRAPH), TypeError, "`query` must be an int or"),
        (lambda: draw_image_attention(IMAGE, GOOD, 0, (3, 4)), ValueError, "`weights` .* attention_matrix"),
        (lambda: draw_image_attention(IMAGE, GOOD, 0, 3), TypeError, "`grid` must be a GridGraph or"),
        (lambda: draw_image_attention(IMAGE, GOOD, 0, (3, 4, 1)), ValueError, "`grid` must have two axes"),
        (lambda: draw_image_attention(IMAGE, GOOD, 0, GridGraph((12,), 4)), ValueError, "`grid` must have two"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, error, match):
    with pytest.raises(error, match=match):
        call()
