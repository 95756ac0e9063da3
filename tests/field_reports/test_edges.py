"""Reports about edges: their direction, duplicates, loops, features, weights, and where there are none."""

import math

import networkx
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.utils import (
    add_remaining_self_loops,
    coalesce,
    to_torch_coo_tensor,
    to_torch_csr_tensor,
)

from graphattn import (
    CompleteGraph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    as_graph,
    attention_weights,
    graph_attention,
)
from graphattn.encodings import laplacian_eigenvectors, random_walk
from graphattn.nn import GPSConv, GraphMultiheadAttention, GraphTransformer, TransformerConv
from graphattn.transforms import AddRandomWalkPE
from tests import oracle

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


def edges(*pairs):
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t().contiguous()


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64).view(-1, 1, 1).requires_grad_()


def attend(x, value, size=None, query=None, key=None):
    """What one head of width 1 makes of values on edges in any form."""
    graph = as_graph(x) if size is None else as_graph(x, num_nodes=size)
    zero = torch.zeros(graph.num_queries, 1, 1, dtype=torch.float64)
    query, key = (zero if x is None else x for x in (query, key))
    return graph_attention(query, key, value, graph).flatten()


# --- direction ------------------------------------------------------------------------------------------


@pytest.mark.field_report("B23")
def test_an_adjacency_that_is_not_transposed_is_the_reverse_graph():
    edge_index, value = edges((0, 1)), column(5, 7)
    adj_t = to_torch_coo_tensor(edge_index.flip(0), size=2)  # rows are targets
    assert attend(edge_index, value, 2).tolist() == [0, 5]
    for form in (adj_t, adj_t.to_sparse_csr(), adj_t.to_sparse_csc(), Data(adj_t=adj_t)):
        assert attend(form, value).tolist() == [0, 5]
    for form in (adj_t.t(), adj_t.t().to_sparse_csr()):
        assert attend(form, value).tolist() == [7, 0]
    layer = TransformerConv(1, 1, root_weight=False).double()
    with torch.no_grad():
        layer.lin_value.weight.fill_(1.0)
        layer.lin_value.bias.zero_()
        for form in (edge_index, adj_t.double(), adj_t.double().to_sparse_csr()):
            assert layer(value.view(2, 1), form).flatten().tolist() == [0, 5]
        assert layer(value.view(2, 1), adj_t.t().double()).flatten().tolist() == [7, 0]


@pytest.mark.field_report("B24")
def test_edges_go_from_the_past_to_the_present():
    assert attend(edges((1, 0), (2, 0), (3, 0)), column(0, 1, 2, 3)).tolist() == [2, 0, 0, 0]
    for graph in (CompleteGraph(5, causal=True), WindowGraph(5, (None, 0)), WindowGraph(5, (2, 0))):
        source, target = graph.to_edge_index()
        assert (source <= target).all()
        out = attend(graph, column(1, 2, 3, 4, 5))
        assert out[:2].tolist() == [1, 1.5]
        assert "5 keys -> 5 queries" in repr(graph)
        for u, v in graph.to_networkx().edges():
            assert u <= v


@pytest.mark.field_report("B26")
def test_every_preparation_gives_one_answer_for_one_graph():
    """Layers and encodings, from a listing, its reverse with the other flow, a matrix, an EdgeIndex."""
    edge_index = edges((0, 1), (0, 2), (2, 1), (3, 0), (1, 3))
    adj_t = to_torch_coo_tensor(edge_index.flip(0), size=5)
    forms = [
        edge_index,
        EdgeIndex(edge_index, sparse_size=(5, 5)),
        EdgeIndex(edge_index, sparse_size=(5, 5)).sort_by("col")[0],
        adj_t,
        adj_t.to_sparse_csr(),
        adj_t.to_sparse_csc(),
    ]
    layer, x = TransformerConv(3, 2, heads=2).double(), torch.randn(5, 3).double()
    backwards = TransformerConv(3, 2, heads=2, flow="target_to_source").double()
    backwards.load_state_dict(layer.state_dict())
    expected, walks = layer(x, edge_index), random_walk(as_graph(edge_index, num_nodes=5), 4)
    vectors = laplacian_eigenvectors(as_graph(edge_index, num_nodes=5), 3)
    torch.testing.assert_close(backwards(x, edge_index.flip(0)), expected)
    for form in forms:
        torch.testing.assert_close(layer(x, form), expected)
        graph = as_graph(form, num_nodes=5)
        torch.testing.assert_close(random_walk(graph, 4), walks)
        torch.testing.assert_close(laplacian_eigenvectors(graph, 3), vectors)
        if form.layout is not torch.strided:
            torch.testing.assert_close(AddRandomWalkPE(4)(Data(adj_t=form)).random_walk_pe, walks)
            with pytest.raises(ValueError, match="target_to_source"):
                backwards(x, form)
            with pytest.raises(ValueError, match="target_to_source"):
                as_graph(form, flow="target_to_source")


@pytest.mark.field_report("B28")
def test_one_way_edges_of_an_undirected_graph():
    """Never a triangular Laplacian: it is made symmetric, or refused on demand."""
    one_way = SparseGraph.from_edge_index(edges((0, 1), (1, 2), (2, 3)), 4)
    both_ways = SparseGraph.from_edge_index(edges((0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)), 4)
    vectors = laplacian_eigenvectors(one_way, 3)
    torch.testing.assert_close(vectors, laplacian_eigenvectors(both_ways, 3))
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(3), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="symmetric"):
        laplacian_eigenvectors(one_way, 3, directed="raise")


# --- duplicates and invalid ids -------------------------------------------------------------------------


@pytest.mark.field_report("B29")
def test_parallel_edges_count_until_they_are_coalesced():
    edge_index = edges((0, 1), (0, 1), (2, 1))
    operands = {"query": column(0, 1, 0), "key": column(math.log(2), 0, 0)}
    value = column(10, 0, 0)
    coo = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(3), (3, 3), check_invariants=True)
    csr = torch.sparse_csr_tensor([0, 0, 3, 3], [0, 0, 2], torch.ones(3), (3, 3))
    csc = torch.sparse_csc_tensor([0, 2, 2, 3], [1, 1, 1], torch.ones(3), (3, 3))
    for form in (edge_index, EdgeIndex(edge_index, sparse_size=(3, 3)), coo, csr, csc):
        out = attend(form, value, **operands)
        torch.testing.assert_close(out, torch.tensor([0.0, 8.0, 0.0]).double())
        weights = attention_weights(*operands.values(), as_graph(form))
        torch.testing.assert_close(weights.flatten(), torch.tensor([0.4, 0.4, 0.2]).double())
    for form in (coalesce(edge_index), coo.coalesce()):
        out = attend(form, value, **operands)
        torch.testing.assert_close(out, torch.tensor([0.0, 20 / 3, 0.0]).double())
        weights = attention_weights(*operands.values(), as_graph(form))
        torch.testing.assert_close(weights.flatten(), torch.tensor([2 / 3, 1 / 3]).double())


@pytest.mark.field_report("B31")
def test_repeated_edges_of_a_sampled_batch():
    """Each with its own features; `coalesce` of PyG keeps them aligned, by the rule it is told."""
    edge_index, e = edges((1, 0), (2, 0), (1, 0), (1, 0)), torch.tensor([[1.0], [2.0], [3.0], [5.0]])
    ours, theirs = TransformerConv(3, 2, edge_dim=1), pyg.TransformerConv(3, 2, edge_dim=1)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 3)
    out, (index, alpha) = ours(x, edge_index, e, return_attention_weights=True)
    expected, (_, weights) = theirs(x, edge_index, e, return_attention_weights=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(alpha, weights)
    assert index is edge_index
    merged, sums = coalesce(edge_index, e, reduce="sum")
    assert merged.tolist() == [[1, 2], [0, 0]] and sums.flatten().tolist() == [9, 2]
    torch.testing.assert_close(ours(x, merged, sums), theirs(x, merged, sums))


@pytest.mark.field_report("B32")
@pytest.mark.parametrize("bad", [9, -1, 4])
def test_a_node_id_out_of_range_is_named_at_the_call(bad):
    """Row pointers of CSR are in test_wrong_input of tests/test_graph.py."""
    interval = rf"\[0, 4\), got {bad}"
    x = torch.randn(4, 4)
    for row in (0, 1):
        edge_index = edges((0, 1), (1, 2), (3, 0))
        edge_index[row, 1] = bad
        calls = [
            lambda edge_index=edge_index: SparseGraph.from_edge_index(edge_index, 4),
            lambda edge_index=edge_index: as_graph(edge_index, num_nodes=4),
            lambda edge_index=edge_index: as_graph(Data(edge_index=edge_index, num_nodes=4)),
            lambda edge_index=edge_index: TransformerConv(4, 2)(x, edge_index),
            lambda edge_index=edge_index: TransformerConv(4, 2, aggr="max")(x, edge_index),
            lambda edge_index=edge_index: GraphMultiheadAttention(4, 2)(x, edge_index),
            lambda edge_index=edge_index: GraphTransformer(4, 4, 2, 1, 2)(x, edge_index),
            lambda edge_index=edge_index: GPSConv(4, TransformerConv(4, 4))(x, edge_index),
        ]
        for call in calls:
            with pytest.raises(IndexError, match=interval):
                call()
    with pytest.raises(IndexError, match=interval):
        SparseGraph.from_csr(torch.tensor([0, 1, 1, 1, 2]), torch.tensor([0, bad]))
    if bad < 0:  # without a size the highest id is one: none may be negative
        with pytest.raises(IndexError, match=r"\[0, 2\), got -1"):
            SparseGraph.from_edge_index(edges((0, 1), (-1, 0)))


@pytest.mark.field_report("B33")
def test_the_last_isolated_node():
    """A size that is given is kept; one that is read off the ids cannot know of it, which the layer then says."""
    edge_index, x = edges((0, 1), (1, 2), (3, 0)), torch.randn(5, 3, requires_grad=True)
    layer = TransformerConv(3, 2)
    expected = pyg.TransformerConv(3, 2)
    expected.load_state_dict(layer.state_dict())
    rowptr, col = torch.tensor([0, 1, 2, 3, 3, 3]), torch.tensor([3, 0, 1])
    forms = [
        edge_index,
        SparseGraph.from_edge_index(edge_index, 5),
        SparseGraph.from_csr(rowptr, col),
        to_torch_csr_tensor(edge_index.flip(0), size=(5, 5)),
    ]
    for form in forms:
        out = layer(x, form)
        torch.testing.assert_close(out, expected(x, edge_index))
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.shape == (5, 3)
    too_small = [
        SparseGraph.from_edge_index(edge_index),
        SparseGraph.from_csr(rowptr[:-1], col),
        to_torch_csr_tensor(edge_index.flip(0), size=(4, 4)),
        EdgeIndex(edge_index, sparse_size=(4, 4)),
    ]
    for form in too_small:
        with pytest.raises(ValueError, match=r"4.*5"):
            layer(x, form)
    with pytest.raises(ValueError, match=r"`query` must have shape \[..., 4, heads, dim\]"):
        graph_attention(*3 * [torch.randn(5, 1, 2)], SparseGraph.from_edge_index(edge_index))


# --- weights --------------------------------------------------------------------------------------------


@pytest.mark.field_report("B35")
def test_every_weight_belongs_to_its_edge():
    """Weight e is that of column e of the edge_index that comes with it, whatever order a matrix has."""
    edge_index = edges((4, 2), (0, 1), (3, 2), (1, 0), (2, 2), (0, 2), (4, 1))
    x = torch.randn(5, 3).double()
    layer = TransformerConv(3, 4, heads=2).double()
    query, key = (lin(x).view(5, 2, 4) for lin in (layer.lin_query, layer.lin_key))
    _, _, exact = oracle.attention(query, key, key, edge_index)
    by_pair = {pair: exact[e] for e, pair in enumerate(map(tuple, edge_index.t().tolist()))}
    assert len({round(w[0].item(), 6) for w in by_pair.values()}) == 7
    adj_t = to_torch_coo_tensor(edge_index.flip(0), size=5).double()
    sorted_index = EdgeIndex(edge_index, sparse_size=(5, 5)).sort_by("col")[0]
    for form in (
        edge_index,
        sorted_index,
        SparseGraph.from_edge_index(edge_index, 5),
        adj_t.to_sparse_csr(),
        adj_t,
    ):
        _, (returned, alpha) = layer(x, form, return_attention_weights=True)
        if form is edge_index:
            assert returned is edge_index
        pairs = as_graph(returned).to_edge_index().t().tolist()  # of a matrix, in the order of its values
        assert alpha.shape == (7, 2) and len(pairs) == 7
        for pair, w in zip(pairs, alpha):
            torch.testing.assert_close(w, by_pair[tuple(pair)])


@pytest.mark.field_report("B36", "B42")
def test_no_loop_is_added():
    """Two loops stay two; with those that PyG adds there are one for every node, and the returned edges say so."""
    edge_index = edges((0, 0), (0, 1), (1, 2), (2, 2), (2, 1))
    layer, x = TransformerConv(3, 2), torch.randn(4, 3)
    _, (returned, alpha) = layer(x, edge_index, return_attention_weights=True)
    assert returned is edge_index and alpha.shape == (5, 1)
    with_loops, _ = add_remaining_self_loops(edge_index, num_nodes=4)
    _, (returned, alpha) = layer(x, with_loops, return_attention_weights=True)
    assert returned is with_loops and alpha.shape == (3 + 4, 1)
    assert as_graph(edge_index, num_nodes=4).num_edges == 5


@pytest.mark.field_report("B37")
@pytest.mark.parametrize("asked", [None, False, True, 0, 1])
def test_only_what_is_true_asks_for_weights(asked):
    x, edge_index = torch.randn(3, 4), edges((0, 1), (1, 2))
    layers = [
        (TransformerConv(4, 2), (edge_index,)),
        (GraphMultiheadAttention(4, 2), (edge_index,)),
        (GraphTransformer(4, 4, 2, 1, 2), (edge_index,)),
        (GPSConv(4, None), (edge_index,)),
    ]
    for layer, inputs in layers:
        out = layer(x, *inputs, return_attention_weights=asked)
        assert isinstance(out, tuple) == bool(asked)


# --- loops ----------------------------------------------------------------------------------------------


@pytest.mark.field_report("B40")
def test_loops_that_are_there_keep_their_features():
    """As PyG adds the remaining ones: an existing loop keeps its feature, the edges that are none come first."""
    edge_index, e = edges((0, 0), (0, 1), (2, 1)), torch.tensor([[9.0], [1.0], [2.0]])
    index, attr = add_remaining_self_loops(edge_index, e, fill_value=0.5, num_nodes=3)
    assert index.tolist() == [[0, 2, 0, 1, 2], [1, 1, 0, 1, 2]]
    assert attr.flatten().tolist() == [1, 2, 9, 0.5, 0.5]
    x, layer = torch.randn(3, 3).double(), TransformerConv(3, 2, edge_dim=1).double()
    out = layer(x, index, attr.double())
    query, key, value = (lin(x).view(3, 1, 2) for lin in (layer.lin_query, layer.lin_key, layer.lin_value))
    projection = layer.lin_edge.weight.view(1, 2, 1).transpose(1, 2)
    exact, _, _ = oracle.attention(
        query, key, value, index, edge_attr=attr.double(), edge_projection=projection
    )
    torch.testing.assert_close(out, exact.view(3, 2) + layer.lin_skip(x))


@pytest.mark.field_report("B41")
@pytest.mark.parametrize(
    "fill, expected",
    [("mean", [0, 3, 0]), ("add", [0, 6, 0]), (0.5, [0.5, 0.5, 0.5]), (torch.tensor([7.0]), [7, 7, 7])],
    ids=["mean", "add", "number", "tensor"],
)
def test_features_of_added_loops(fill, expected):
    """Of the edges that come in; of none they are 0, and finite."""
    edge_index, e = edges((0, 1), (2, 1)), torch.tensor([[2.0], [4.0]])
    index, attr = add_remaining_self_loops(edge_index, e, fill_value=fill, num_nodes=3)
    assert index[:, 2:].tolist() == [[0, 1, 2]] * 2 and attr[2:].flatten().tolist() == expected
    layer, reference = TransformerConv(3, 2, edge_dim=1), pyg.TransformerConv(3, 2, edge_dim=1)
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(3, 3)
    out = layer(x, index, attr)
    assert out.isfinite().all()
    torch.testing.assert_close(out, reference(x, index, attr))


@pytest.mark.field_report("B42")
def test_a_node_sees_itself_by_a_loop_alone():
    value = column(3, 5)
    without, (with_loops, _) = edges((1, 0)), add_remaining_self_loops(edges((1, 0)), num_nodes=2)
    assert attend(without, value, 2).tolist() == [5, 0]
    assert attend(with_loops, value, 2).tolist() == [4, 5]
    assert (
        "self-loops" in TransformerConv.__doc__.lower() or "node without an edge" in TransformerConv.__doc__
    )


# --- features -------------------------------------------------------------------------------------------


@pytest.mark.field_report("B44")
def test_features_that_do_not_fit_the_layer():
    """Also of a number of edges that would broadcast with the heads, which PyG adds to the values."""
    x, edge_index, e = torch.randn(5, 3), torch.randint(5, (2, 4)), torch.randn(4, 11)
    calls = [
        (None, e, r"must be None for a layer without edge features.*edge_dim=11"),
        (5, e, r"\[4, 5\].*\[4, 11\]"),
        (11, None, r"\[4, 11\].*None"),
        (11, e[:3], r"\[4, 11\].*\[3, 11\]"),
        (None, torch.randn(4), "edge_dim=1"),
    ]
    for edge_dim, features, message in calls:
        with pytest.raises(ValueError, match=message):
            TransformerConv(3, 2, heads=4, edge_dim=edge_dim)(x, edge_index, features)
    layer = TransformerConv(3, 2, heads=4, edge_dim=11)
    layer(x, edge_index, e).sum().backward()
    assert layer.lin_edge.weight.grad.abs().sum() > 0


@pytest.mark.field_report("B45")
def test_one_number_for_each_edge():
    """As a feature `[E]` is `[E, 1]`; a bias says whether it is for all heads or for each."""
    x, edge_index, e = torch.randn(5, 3), torch.randint(5, (2, 7)), torch.randn(7)
    layer = TransformerConv(3, 2, heads=2, edge_dim=1)
    assert torch.equal(layer(x, edge_index, e), layer(x, edge_index, e.unsqueeze(1)))
    graph, query = SparseGraph.from_edge_index(edge_index, 5), torch.randn(5, 2, 4).double()
    for bias in (torch.randn(7, 1).double(), torch.randn(7, 2).double()):
        out = graph_attention(query, query, query, graph, bias=bias)
        exact, _, _ = oracle.attention(query, query, query, edge_index, bias=bias.expand(7, 2))
        torch.testing.assert_close(out, exact)
    for shape in ((7,), (2,), (7, 3), (5, 2), (7, 1, 2), (6, 1)):
        with pytest.raises(ValueError, match=r"`bias`.*\[7, 2\].*" + str(list(shape)).replace("[", r"\[")):
            graph_attention(query, query, query, graph, bias=torch.zeros(shape).double())


# --- nothing --------------------------------------------------------------------------------------------


@pytest.mark.field_report("B99")
def test_nodes_without_edges_are_accepted():
    """Homogeneous and bipartite: they keep their skip connection, or 0."""
    x = torch.randn(4, 3)
    for root_weight in (True, False):
        layer = TransformerConv(3, 2, heads=2, root_weight=root_weight)
        out = layer(x, edges((0, 1), (1, 1)))
        expected = layer.lin_skip(x) if root_weight else torch.zeros(4, 4)
        assert torch.equal(out[[0, 2, 3]], expected[[0, 2, 3]]) and not torch.equal(out[1], expected[1])
        out = layer((x, x[:3]), edges((0, 1), (3, 1)))
        assert torch.equal(out[[0, 2]], expected[[0, 2]]) and not torch.equal(out[1], expected[1])


@pytest.mark.field_report("B100")
@pytest.mark.parametrize("n", [0, 4])
def test_a_graph_without_edges(n):
    none = torch.empty(2, 0, dtype=torch.int64)
    zeros = torch.zeros(n, n)
    forms = [
        none,
        none.int(),
        EdgeIndex(none, sparse_size=(n, n)),
        zeros.to_sparse_coo(),
        zeros.to_sparse_csr(),
        zeros.to_sparse_csc(),
        SparseGraph.from_mask(zeros.bool()),
        SparseGraph.from_csr(torch.zeros(n + 1, dtype=torch.int64), none[0]),
        SparseGraph.from_networkx(networkx.empty_graph(n)),
        SparseGraph.from_networkx(networkx.MultiDiGraph(networkx.empty_graph(n))),
        CompleteGraph(n, causal=True, offset=-n),
        WindowGraph(n, 1, offset=2 * n + 5),
    ]
    layer = TransformerConv(3, 2, heads=2)
    for form in forms:
        x = torch.randn(n, 3, requires_grad=True)
        out = layer(x, form)
        assert out.shape == (n, 4)
        grads = torch.autograd.grad(out.sum(), [x, layer.lin_value.weight, layer.lin_query.weight])
        assert grads[0].shape == (n, 3) and not grads[1].any() and not grads[2].any()
    for call in (lambda x: layer(torch.randn(n, 3), x), as_graph, SparseGraph.from_edge_index):
        with pytest.raises(
            ValueError, match=r"Expected 'edge_index' to be of integer type \(got 'torch.float32'\)"
        ):
            call(torch.empty(2, 0))
    assert GridGraph((1,), 0).num_edges == 1
