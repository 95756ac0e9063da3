import copy
import gc
import io
import pickle
import threading
import weakref

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
import torch_geometric
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data, HeteroData

from graphattn import graph as graph_module
from graphattn.graph import (
    Graph,
    SparseGraph,
    as_graph,
    expander_graph,
    global_graph,
    union,
)

BETA = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
FIELDS = ("rowptr", "col", "edge_id", "colptr", "row", "edge_id_t")


def edges(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous()


def random_edges(num_keys: int, num_queries: int, num_edges: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.randint(0, max(n, 1), (num_edges,), generator=generator) for n in (num_keys, num_queries)]
    return torch.stack(sides)


def assert_holds(graph: SparseGraph, edge_index, num_keys: int, num_queries: int) -> None:
    """Every field of `graph` against Python's own stable sort of the edge list."""
    sources, targets = ([int(node) for node in ids] for ids in edge_index)
    for ids, others, num_nodes, (ptr, grouped, order) in (
        (targets, sources, num_queries, (graph.rowptr, graph.col, graph.edge_id)),
        (sources, targets, num_keys, (graph.colptr, graph.row, graph.edge_id_t)),
    ):
        expected = sorted(range(len(ids)), key=ids.__getitem__)
        assert order.tolist() == expected
        assert grouped.tolist() == [others[e] for e in expected]
        assert ptr.tolist() == [sum(node < n for node in ids) for n in range(num_nodes + 1)]
        assert (ptr.dtype, grouped.dtype, order.dtype) == (torch.int64, torch.int32, torch.int32)
    assert (graph.num_keys, graph.num_queries, graph.num_edges) == (num_keys, num_queries, len(sources))
    assert graph.edge_shape == (len(sources),)
    assert graph.to_edge_index().dtype == torch.int64
    assert graph.to_edge_index().tolist() == [sources, targets]


def assert_same(one: SparseGraph, other: SparseGraph) -> None:
    for name in FIELDS:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist(), name


@st.composite
def edge_lists(draw, square: bool = False):
    num_keys = draw(st.integers(0, 9))
    num_queries = num_keys if square else draw(st.integers(0, 9))
    nodes = st.tuples(st.integers(0, max(num_keys - 1, 0)), st.integers(0, max(num_queries - 1, 0)))
    pairs = draw(st.lists(nodes, max_size=30 if num_keys and num_queries else 0))
    return edges(*pairs), num_keys, num_queries


# ------------------------------------------------------------------------------------------ from_edge_index


@given(edge_lists(), st.sampled_from([torch.int64, torch.int32, torch.uint8]), st.booleans(), st.booleans())
def test_from_edge_index_sorts_both_ways(case, dtype, transposed, ascending):
    edge_index, num_keys, num_queries = case
    if ascending:
        edge_index = edge_index[:, edge_index[0].argsort(stable=True)]
    passed = edge_index.to(dtype)
    passed = passed.t().contiguous().t() if transposed else passed.contiguous()
    graph = SparseGraph.from_edge_index(passed, size=(num_keys, num_queries))
    assert_holds(graph, edge_index.tolist(), num_keys, num_queries)


def test_both_bodies_of_the_sort_agree():
    for num_keys, num_queries, num_edges in ((7, 5, 40), (1, 9, 20), (4, 4, 0), (0, 0, 0), (300, 200, 5000)):
        edge_index = random_edges(num_keys, num_queries, num_edges)
        expected = graph_module._sorted_by_numba(edge_index, num_queries, num_keys)
        for ids in (edge_index, edge_index.int()):
            got = graph_module._sorted_by_torch(ids, num_queries, num_keys)
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    for wrong in ((0, 9), (9, 0), (-1, 0), (0, -1)):
        with pytest.raises(IndexError, match=r"\[0, 3\), got (9|-1)"):
            graph_module._sorted_by_torch(edges((1, 2), wrong), 3, 3)


@pytest.mark.parametrize(
    ("num_keys", "num_queries", "threads"),
    [(3000, 3000, 1), (3000, 3000, 2), (70_000, 1, 1), (257, 20_000_000, 2)],
)
def test_large_graphs_are_sorted_on_one_thread_or_two(num_keys, num_queries, threads):
    edge_index = random_edges(num_keys, num_queries, 300_000)
    edge_index[1, ::3] = num_queries // 2  # a hub
    size = (num_keys, num_queries)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        graph = SparseGraph.from_edge_index(edge_index, size=size)
        with pytest.raises(IndexError, match=rf"sources.*\[0, {num_keys}\), got {num_keys}"):
            SparseGraph.from_edge_index(torch.cat([edge_index, edges((num_keys, 0))], 1), size=size)
        with pytest.raises(IndexError, match=rf"targets.*\[0, {num_queries}\), got -1"):
            SparseGraph.from_edge_index(torch.cat([edge_index, edges((0, -1))], 1), size=size)
    finally:
        torch.set_num_threads(before)
    sources, targets = edge_index.numpy()
    for ids, others, (ptr, grouped, order) in (
        (targets, sources, (graph.rowptr, graph.col, graph.edge_id)),
        (sources, targets, (graph.colptr, graph.row, graph.edge_id_t)),
    ):
        expected = np.argsort(ids, kind="stable")
        np.testing.assert_array_equal(order.numpy(), expected)
        np.testing.assert_array_equal(grouped.numpy(), others[expected])
        np.testing.assert_array_equal(ptr.diff().numpy(), np.bincount(ids, minlength=ptr.numel() - 1))


def test_scipy_builds_the_same_csr_and_transpose():
    A = scipy.sparse.random_array((60, 40), density=0.1, rng=np.random.default_rng(0), format="csr")
    graph = SparseGraph.from_scipy(A)
    A_t = A.T.tocsr()
    for mine, theirs in (
        (graph.rowptr, A.indptr),
        (graph.col, A.indices),
        (graph.colptr, A_t.indptr),
        (graph.row, A_t.indices),
    ):
        np.testing.assert_array_equal(mine.numpy(), theirs)


def test_sizes_default_to_the_highest_id():
    assert (
        repr(SparseGraph.from_edge_index(edges((0, 4), (2, 1))))
        == "SparseGraph(5 keys -> 5 queries, 2 edges)"
    )
    assert SparseGraph.from_edge_index(edges((6, 4))).num_queries == 7
    graph = SparseGraph.from_edge_index(edges((0, 1)), size=(np.int64(3), 2))
    assert (graph.num_keys, graph.num_queries) == (3, 2)


@pytest.mark.field_report("B33")
def test_isolated_nodes_need_a_size():
    edge_index = edges((0, 1), (3, 2))  # node 4 has no edge
    assert SparseGraph.from_edge_index(edge_index).num_queries == 4
    assert SparseGraph.from_edge_index(edge_index, 5).num_queries == 5
    adjacency = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(2), (5, 5), check_invariants=True)
    assert as_graph(adjacency).num_queries == 5
    with pytest.raises(ValueError, match=r"\(5, 5\).*\(4, 4\)"):
        as_graph(adjacency, num_nodes=4)


def test_two_by_two_is_two_edges():
    graph = SparseGraph.from_edge_index(torch.tensor([[0, 1], [2, 3]]))
    assert graph.to_mask().nonzero().tolist() == [[2, 0], [3, 1]]


@pytest.mark.field_report("B100")
@pytest.mark.parametrize("num_nodes", [0, 1, 4])
def test_no_edges(num_nodes):
    empty = torch.empty(2, 0, dtype=torch.int64)
    nx_empty = networkx.empty_graph(num_nodes)
    shape = (num_nodes, num_nodes)
    for graph in (
        SparseGraph.from_edge_index(empty, num_nodes),
        SparseGraph.from_csr(torch.zeros(num_nodes + 1, dtype=torch.int64), empty[0]),
        SparseGraph.from_mask(torch.zeros(shape, dtype=torch.bool)),
        SparseGraph.from_networkx(nx_empty),
        SparseGraph.from_scipy(scipy.sparse.csr_array(shape)) if num_nodes else as_graph(empty),
        as_graph(torch.sparse_coo_tensor(empty, torch.empty(0), shape, check_invariants=True)),
        as_graph(Data(edge_index=empty, num_nodes=num_nodes)),
        global_graph(num_nodes, []),
        expander_graph(num_nodes, 0, seed=0),
    ):
        assert_holds(graph, ([], []), num_nodes, num_nodes)
        assert graph.to_mask().shape == shape
        assert networkx.utils.graphs_equal(graph.to_networkx(), networkx.MultiDiGraph(nx_empty))
    with pytest.raises(
        ValueError, match=r"Expected 'edge_index' to be of integer type \(got 'torch.float32'\)"
    ):
        SparseGraph.from_edge_index(torch.empty(2, 0), num_nodes)


INT = torch.int64


@pytest.mark.field_report("B32")
@pytest.mark.parametrize(
    ("error", "message", "edge_index", "arguments"),
    [
        (ValueError, "integer type (got 'torch.float32')", torch.zeros(2, 3), {}),
        (ValueError, "integer type (got 'torch.bool')", torch.zeros(2, 3, dtype=torch.bool), {}),
        (ValueError, "shape [2, num_edges] (got [3, 2])", torch.zeros(3, 2, dtype=INT), {}),
        (ValueError, "shape [2, num_edges] (got [4])", torch.zeros(4, dtype=INT), {}),
        (ValueError, "shape [2, num_edges] (got [1, 2, 3])", torch.zeros(1, 2, 3, dtype=INT), {}),
        (ValueError, "below 2**31, got 2147483648", torch.zeros(2, 1, dtype=INT).expand(2, 2**31), {}),
        (ValueError, "below 2**31, got 2147483648", edges((0, 2**31 - 1)), {}),
        (ValueError, "below 2**31, got 9223372036854775808", edges((0, 2**63 - 1)), {}),
        (
            ValueError,
            "`num_nodes` must be at least 0 and below 2**31, got 2147483648",
            edges((0, 1)),
            {"num_nodes": 2**31},
        ),
        (ValueError, "`num_nodes` must be at least 0 and below 2**31, got -1", edges(), {"num_nodes": -1}),
        (ValueError, "`size[1]` (num_queries) must be at least 0", edges(), {"size": (1, -1)}),
        (ValueError, "`size` must be (num_keys, num_queries), got (1, 2, 3)", edges(), {"size": (1, 2, 3)}),
        (ValueError, "not both, got 3 and (3, 3)", edges((0, 1)), {"num_nodes": 3, "size": (3, 3)}),
        (TypeError, "`num_nodes` must be an int, got float", edges((0, 1)), {"num_nodes": 2.0}),
        (TypeError, "`num_nodes` must be an int, got Tensor", edges((0, 1)), {"num_nodes": torch.tensor(2)}),
        (TypeError, "`size[0]` (num_keys) must be an int, got bool", edges((0, 1)), {"size": (True, 2)}),
        (TypeError, "`edge_index` must be an integer tensor, got list", [[0], [1]], {}),
        (
            IndexError,
            "(sources, `edge_index[0]`) must lie in the interval [0, 4), got 9",
            edges((0, 1), (9, 1)),
            {"num_nodes": 4},
        ),
        (
            IndexError,
            "(targets, `edge_index[1]`) must lie in the interval [0, 4), got 9",
            edges((0, 1), (1, 9)),
            {"num_nodes": 4},
        ),
        (
            IndexError,
            "(targets, `edge_index[1]`) must lie in the interval [0, 2), got 2",
            edges((2, 2)),
            {"size": (3, 2)},
        ),
        (IndexError, "interval [0, 4), got -1", edges((-1, 1)), {"num_nodes": 4}),
        (IndexError, "interval [0, 4), got -1", edges((1, -1)), {"num_nodes": 4}),
        (IndexError, "interval [0, 4), got -1", edges((1, 3), (2, -1)), {}),
        (IndexError, "interval [0, 0), got -5", edges((-5, -5)), {}),
        (IndexError, "interval [0, 4), got -3000000000", edges((0, -3_000_000_000)), {"num_nodes": 4}),
        (IndexError, "interval [0, 4), got 4294967297", edges((0, 2**32 + 1)), {"num_nodes": 4}),
        (IndexError, "interval [0, 0), got 0", edges((0, 0)), {"num_nodes": 0}),
    ],
)
def test_wrong_edge_index(error, message, edge_index, arguments):
    for build in (SparseGraph.from_edge_index, as_graph):
        if build is as_graph and not isinstance(edge_index, torch.Tensor):
            continue
        with pytest.raises(error) as caught:
            build(edge_index, **arguments)
        assert message in str(caught.value)


def test_later_writes_do_not_change_a_graph():
    edge_index = edges((0, 1), (2, 1), (1, 0))
    rowptr, col = torch.tensor([0, 1, 3], dtype=torch.int64), torch.tensor([0, 1, 0], dtype=torch.int32)
    mask = torch.eye(3, dtype=torch.bool)
    A = scipy.sparse.csr_array(np.eye(3))
    graphs = [
        SparseGraph.from_edge_index(edge_index),
        SparseGraph.from_csr(rowptr, col),
        SparseGraph.from_mask(mask),
        SparseGraph.from_scipy(A),
        as_graph(edge_index),
    ]
    before = [[getattr(graph, name).tolist() for name in FIELDS] for graph in graphs]
    edge_index.zero_(), rowptr.zero_(), col.zero_(), mask.zero_()
    A.indices[:], A.indptr[:] = 0, 0
    assert before == [[getattr(graph, name).tolist() for name in FIELDS] for graph in graphs]


# ------------------------------------------------------------------------------------- the other constructors


@BETA
@given(edge_lists())
def test_every_form_of_a_matrix_is_the_same_graph(case):
    edge_index, num_keys, num_queries = case
    dense = np.zeros((num_queries, num_keys), dtype=bool)
    dense[edge_index[1], edge_index[0]] = True
    row_major = [list(ids) for ids in reversed(dense.nonzero())]
    mask = torch.from_numpy(dense)
    graph = SparseGraph.from_mask(mask)
    assert_holds(graph, row_major, num_keys, num_queries)
    assert torch.equal(graph.to_mask(), mask)
    assert_same(SparseGraph.from_csr(graph.rowptr, graph.col, num_keys), graph)
    assert_same(as_graph(mask.float().to_sparse()), graph)
    assert_same(as_graph(mask.float().to_sparse_csr()), graph)
    by_key = [list(ids) for ids in dense.T.nonzero()]
    assert_holds(as_graph(mask.float().to_sparse_csc()), by_key, num_keys, num_queries)
    if num_keys and num_queries:  # SciPy has no empty shapes in every version
        assert_same(SparseGraph.from_scipy(scipy.sparse.csr_array(dense)), graph)
        assert_holds(SparseGraph.from_scipy(scipy.sparse.csc_array(dense)), by_key, num_keys, num_queries)


@BETA
@given(edge_lists(square=True))
def test_parallel_edges_survive_every_form(case):
    edge_index, num_nodes, _ = case
    shape = (num_nodes, num_nodes)
    values = torch.arange(1.0, edge_index.size(1) + 1)
    graph = SparseGraph.from_edge_index(edge_index, num_nodes)
    coo = torch.sparse_coo_tensor(edge_index.flip(0), values, shape, check_invariants=True)
    assert_same(as_graph(coo), graph)
    csr = torch.sparse_csr_tensor(graph.rowptr, graph.col.long(), values, shape, check_invariants=False)
    assert_same(as_graph(csr), SparseGraph.from_csr(graph.rowptr, graph.col))
    assert as_graph(csr).to_edge_index().tolist() == edge_index[:, graph.edge_id.long()].tolist()
    csc = torch.sparse_csc_tensor(graph.colptr, graph.row.long(), values, shape, check_invariants=False)
    assert as_graph(csc).to_edge_index().tolist() == edge_index[:, graph.edge_id_t.long()].tolist()
    if num_nodes:
        A = scipy.sparse.coo_array((values.numpy(), (edge_index[1].numpy(), edge_index[0].numpy())), shape)
        assert_same(SparseGraph.from_scipy(A), graph)
    G = graph.to_networkx()
    assert [(u, v) for u, v, e in sorted(G.edges(keys=True), key=lambda edge: edge[2])] == list(
        map(tuple, edge_index.t().tolist())
    )
    back = SparseGraph.from_networkx(G)
    assert sorted(back.to_edge_index().t().tolist()) == sorted(edge_index.t().tolist())


def test_from_csr_keeps_csr_order():
    graph = SparseGraph.from_csr(torch.tensor([0, 3, 3, 4]), torch.tensor([2, 0, 2, 4]), num_keys=6)
    assert_holds(graph, ([2, 0, 2, 4], [0, 0, 0, 2]), 6, 3)


def test_stored_zeros_are_edges():
    A = scipy.sparse.csr_array((np.zeros(2), np.array([1, 0]), np.array([0, 1, 2])), shape=(2, 2))
    assert_holds(SparseGraph.from_scipy(A), ([1, 0], [0, 1]), 2, 2)
    adjacency = torch.sparse_coo_tensor(edges((1, 0)), torch.zeros(1), (2, 2), check_invariants=True)
    assert as_graph(adjacency).num_edges == 1


@pytest.mark.parametrize(
    ("error", "message", "build"),
    [
        (
            ValueError,
            "`rowptr` must rise from 0 to len(col) = 2",
            lambda: SparseGraph.from_csr(torch.tensor([0, 1]), torch.tensor([0, 0])),
        ),
        (
            ValueError,
            "`rowptr` must rise from 0",
            lambda: SparseGraph.from_csr(torch.tensor([1, 2]), torch.tensor([0, 0])),
        ),
        (
            ValueError,
            "`rowptr` must rise from 0",
            lambda: SparseGraph.from_csr(torch.tensor([0, 2, 1, 2]), torch.tensor([0, 0])),
        ),
        (
            ValueError,
            "`rowptr` must rise from 0",
            lambda: SparseGraph.from_csr(torch.tensor([0, 200, 2], dtype=torch.uint8), torch.tensor([0, 0])),
        ),
        (
            ValueError,
            "`rowptr` must rise from 0",
            lambda: SparseGraph.from_csr(torch.empty(0, dtype=INT), torch.empty(0, dtype=INT)),
        ),
        (
            ValueError,
            "`col` must be a one-dimensional integer tensor, got torch.float32 [1]",
            lambda: SparseGraph.from_csr(torch.tensor([0, 1]), torch.ones(1)),
        ),
        (
            ValueError,
            "`rowptr` must be a one-dimensional integer tensor, got torch.int64 [2, 1]",
            lambda: SparseGraph.from_csr(edges((0, 1)), torch.ones(1, dtype=INT)),
        ),
        (
            ValueError,
            "`rowptr` must be a one-dimensional integer tensor, got list",
            lambda: SparseGraph.from_csr([0, 1], torch.ones(1, dtype=INT)),
        ),
        (IndexError, "[0, 1), got 1", lambda: SparseGraph.from_csr(torch.tensor([0, 1]), torch.tensor([1]))),
        (
            TypeError,
            "`mask` must be a bool tensor, True where a query may attend to a key, got torch.float32",
            lambda: SparseGraph.from_mask(torch.ones(2, 2)),
        ),
        (TypeError, "got ndarray", lambda: SparseGraph.from_mask(np.ones((2, 2), dtype=bool))),
        (
            ValueError,
            "[num_queries, num_keys], got [2]",
            lambda: SparseGraph.from_mask(torch.ones(2, dtype=torch.bool)),
        ),
        (TypeError, "`G` must be a networkx graph, got list", lambda: SparseGraph.from_networkx([(0, 1)])),
        (
            ValueError,
            "`nodelist` must name every node once",
            lambda: SparseGraph.from_networkx(networkx.path_graph(3), [0, 1, 1]),
        ),
        (
            ValueError,
            "`nodelist` must hold nodes of `G`, got 'x'",
            lambda: SparseGraph.from_networkx(networkx.path_graph(3), [0, "x"]),
        ),
        (
            TypeError,
            "`A` must be a scipy.sparse matrix or array, got ndarray",
            lambda: SparseGraph.from_scipy(np.eye(2)),
        ),
        (
            ValueError,
            "`A` must have shape [num_queries, num_keys], got [3]",
            lambda: SparseGraph.from_scipy(scipy.sparse.coo_array([1, 0, 1])),
        ),
        (
            TypeError,
            "`size` must be (num_keys, num_queries), got int",
            lambda: as_graph(edges((0, 1)), size=2),
        ),
        (
            TypeError,
            "`edge_index` must be a dense tensor, got torch.sparse_coo. as_graph reads adjacencies.",
            lambda: SparseGraph.from_edge_index(torch.ones(2, 2, dtype=INT).to_sparse()),
        ),
        (
            TypeError,
            "`mask` must be a dense tensor, got torch.sparse_coo. as_graph reads adjacencies.",
            lambda: SparseGraph.from_mask(torch.ones(2, 2, dtype=torch.bool).to_sparse()),
        ),
        (
            ValueError,
            "`crow_indices` must have one entry more than the 2 rows, got 2",
            lambda: as_graph(
                torch.sparse_csr_tensor([0, 1], [0], torch.ones(1), (2, 2), check_invariants=False)
            ),
        ),
        (
            ValueError,
            "`ccol_indices` must have one entry more than the 2 columns, got 2",
            lambda: as_graph(
                torch.sparse_csc_tensor([0, 1], [0], torch.ones(1), (2, 2), check_invariants=False)
            ),
        ),
        (ValueError, "`flow` must be", lambda: as_graph(edges((0, 1)), flow="up")),
        (
            ValueError,
            '`flow="target_to_source"` is defined for an `edge_index` only, got a SparseGraph',
            lambda: as_graph(SparseGraph.from_edge_index(edges((0, 1))), flow="target_to_source"),
        ),
        (
            ValueError,
            '`flow="target_to_source"` is defined for an `edge_index` only',
            lambda: as_graph(torch.eye(2).to_sparse(), flow="target_to_source"),
        ),
        (
            ValueError,
            '`flow="target_to_source"` is defined for an `edge_index` only',
            lambda: as_graph(Data(adj_t=torch.eye(2).to_sparse()), flow="target_to_source"),
        ),
        (
            ValueError,
            "(num_keys, num_queries) = (3, 2), but `num_nodes` or `size` says (2, 3)",
            lambda: as_graph(SparseGraph.from_edge_index(edges((2, 1)), size=(3, 2)), size=(2, 3)),
        ),
        (
            ValueError,
            "(num_keys, num_queries) = (2, 2), but `num_nodes` or `size` says (3, 3)",
            lambda: as_graph(torch.eye(2).to_sparse(), num_nodes=3),
        ),
        (
            ValueError,
            "(num_keys, num_queries) = (4, None), but `num_nodes` or `size` says (5, 5)",
            lambda: as_graph(torch_geometric.EdgeIndex(edges((0, 1)), sparse_size=(4, None)), num_nodes=5),
        ),
        (
            ValueError,
            "must be a COO, CSR or CSC matrix [num_queries, num_keys], got torch.sparse_bsr",
            lambda: as_graph(torch.eye(2).to_sparse_bsr((1, 1))),
        ),
        (
            ValueError,
            "got torch.sparse_coo of shape [2, 2, 2]",
            lambda: as_graph(torch.ones(2, 2, 2).to_sparse()),
        ),
        (ValueError, "`Data` must hold `edge_index` or `adj_t`", lambda: as_graph(Data(x=torch.ones(2, 1)))),
        (TypeError, "got HeteroData", lambda: as_graph(HeteroData())),
        (TypeError, "got ndarray", lambda: as_graph(np.zeros((2, 1), dtype=int))),
        (TypeError, "got NoneType", lambda: as_graph(None)),
        (TypeError, "union takes one or more Graphs, got []", lambda: union()),
        (TypeError, "union takes one or more Graphs, got ['Tensor']", lambda: union(edges((0, 1)))),
        (
            ValueError,
            "same (num_keys, num_queries), got [(2, 2), (3, 3)]",
            lambda: union(global_graph(2, [0]), global_graph(3, [0])),
        ),
        (
            ValueError,
            "All graphs of a union must be on one device, got ['cpu', 'meta']",
            lambda: union(global_graph(2, [0]), global_graph(2, [0]).to("meta")),
        ),
        (TypeError, "`seed` must be an int, got float", lambda: expander_graph(9, 2, seed=1.0)),
        (TypeError, "`seed` must be an int, got NoneType", lambda: expander_graph(9, 2, seed=None)),
        (TypeError, "`global_nodes` must be node ids, got NoneType", lambda: global_graph(3, None)),
        (TypeError, "`global_nodes` must be node ids, got str", lambda: global_graph(3, "a")),
        (TypeError, "`global_nodes` must be node ids, got set", lambda: global_graph(3, {0, 1})),
        (TypeError, "device", lambda: global_graph(2, [0]).to(torch.float32)),
        (ValueError, "`degree` must be at least 0", lambda: expander_graph(3, -1, seed=0)),
        (TypeError, "`num_nodes` must be an int, got float", lambda: expander_graph(3.0, 1, seed=0)),
        (
            IndexError,
            "`global_nodes` must lie in the interval [0, 3), got 3",
            lambda: global_graph(3, [0, 3]),
        ),
        (
            IndexError,
            "`global_nodes` must lie in the interval [0, 3), got -1",
            lambda: global_graph(3, [-1, 3]),
        ),
        (
            ValueError,
            "`global_nodes` must be integers of shape [nodes], got [2] of type torch.bool",
            lambda: global_graph(2, torch.tensor([True, False])),
        ),
        (
            ValueError,
            "`global_nodes` must be integers of shape [nodes], got []",
            lambda: global_graph(2, torch.tensor(1)),
        ),
        (
            ValueError,
            "to_networkx() needs keys and queries to be the same nodes, got 3 keys and 2 queries",
            lambda: SparseGraph.from_edge_index(edges((2, 1)), size=(3, 2)).to_networkx(),
        ),
    ],
)
@BETA
def test_wrong_input(error, message, build):
    with pytest.raises(error) as caught:
        build()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "kind", [networkx.Graph, networkx.DiGraph, networkx.MultiGraph, networkx.MultiDiGraph]
)
@pytest.mark.parametrize("attributes", [False, True])
def test_from_networkx(kind, attributes):
    names = ["zoë", ("a", 1), 7, frozenset({1}), "isolated", 0.5]
    weight = {"weight": 2.5, "label": "x"} if attributes else {}
    G = kind()
    G.add_nodes_from((name, {"x": [1.0]} if i == 1 and attributes else {}) for i, name in enumerate(names))
    pairs = [(0, 1), (2, 1), (1, 0), (3, 3), (5, 2), (0, 1), (3, 3)]
    G.add_edges_from((names[i], names[j], weight) for i, j in pairs)
    for nodelist in (None, names, names[::-1], names[1:4]):
        graph = SparseGraph.from_networkx(G, nodelist)
        nodes = names if nodelist is None else nodelist
        A = networkx.to_numpy_array(G, nodes, weight=None, multigraph_weight=sum)  # A[u, v]: edges u -> v
        counts = torch.zeros(len(nodes), len(nodes), dtype=torch.float64)
        sources, targets = graph.to_edge_index()
        counts.index_put_((sources, targets), torch.ones(len(sources), dtype=torch.float64), accumulate=True)
        np.testing.assert_array_equal(counts.numpy(), A)
        inside = [(u, v) for u, v in G.to_directed().edges() if u in nodes and v in nodes]
        assert [(nodes[j], nodes[i]) for j, i in graph.to_edge_index().t().tolist()] == inside


def test_from_networkx_lists_edges_as_pyg_does():
    G = networkx.karate_club_graph()
    theirs = torch_geometric.utils.from_networkx(G).edge_index
    assert SparseGraph.from_networkx(G).to_edge_index().tolist() == theirs.tolist()


# ------------------------------------------------------------------------------------------------- as_graph


@pytest.mark.field_report("B23")
@BETA
def test_direction_of_an_adjacency():
    edge_index = edges((0, 1))
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(1), (2, 2), check_invariants=True)
    for graph in (
        as_graph(edge_index),
        as_graph(adj_t),
        as_graph(adj_t.to_sparse_csr()),
        as_graph(Data(adj_t=adj_t)),
    ):
        assert graph.to_edge_index().tolist() == [[0], [1]]
    assert as_graph(adj_t.t()).to_edge_index().tolist() == [[1], [0]]  # another graph


@pytest.mark.field_report("B24")
def test_targets_are_the_queries():
    graph = SparseGraph.from_edge_index(edges((1, 0), (2, 0), (3, 0)))
    assert graph.rowptr.tolist() == [0, 3, 3, 3, 3]
    assert graph.to_mask()[0].tolist() == [False, True, True, True]
    assert not graph.to_mask()[1:].any()
    assert list(graph.to_networkx().predecessors(0)) == [1, 2, 3]
    assert "4 keys -> 4 queries" in repr(graph)


def test_parallel_edges_count():
    edge_index = edges((0, 1), (0, 1), (2, 1))
    coo = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(3), (3, 3), check_invariants=True)
    for x in (edge_index, coo, torch_geometric.EdgeIndex(edge_index, sparse_size=(3, 3))):
        graph = as_graph(x)
        assert graph.num_edges == 3
        assert graph.col[graph.rowptr[1] : graph.rowptr[2]].tolist() == [0, 0, 2]
    assert as_graph(coo.coalesce()).num_edges == 2


def test_hybrid_adjacency_carries_edge_features():
    coo = torch.sparse_coo_tensor(edges((0, 2), (1, 0)), torch.ones(2, 5), (2, 3, 5), check_invariants=True)
    assert_holds(as_graph(coo), ([2, 0], [0, 1]), 3, 2)


def test_edge_index_of_pyg():
    pairs = edges((0, 1), (3, 2), (0, 0))
    EdgeIndex = torch_geometric.EdgeIndex
    for sparse_size, size in (
        ((5, 4), (5, 4)),
        ((None, None), (4, 4)),
        ((6, None), (6, 3)),
        ((None, 9), (4, 9)),
    ):
        for build in (as_graph, SparseGraph.from_edge_index):
            assert_holds(build(EdgeIndex(pairs, sparse_size=sparse_size)), pairs.tolist(), *size)
    edge_index = EdgeIndex(pairs, sparse_size=(4, None))
    assert_holds(as_graph(edge_index, size=(4, 8)), pairs.tolist(), 4, 8)
    assert_holds(as_graph(edge_index, flow="target_to_source"), pairs.flip(0).tolist(), 3, 4)
    by_row, _ = edge_index.sort_by("row")
    assert_holds(as_graph(by_row, num_nodes=4), by_row.as_tensor().tolist(), 4, 4)
    assert type(as_graph(edge_index).to_edge_index()) is torch.Tensor


def test_data_knows_its_nodes():
    edge_index = edges((0, 1), (2, 1))
    assert as_graph(Data(x=torch.ones(5, 2), edge_index=edge_index)).num_queries == 5
    assert as_graph(Data(edge_index=edge_index, num_nodes=6)).num_keys == 6
    assert as_graph(Data(edge_index=edge_index), num_nodes=7).num_keys == 7
    batch = Batch.from_data_list([Data(edge_index=edge_index, num_nodes=4)] * 2)
    assert_holds(as_graph(batch), ([0, 2, 4, 6], [1, 1, 5, 5]), 8, 8)
    adj_t = torch.sparse_coo_tensor(edges((1, 0)), torch.ones(1), (3, 3), check_invariants=True)
    assert_holds(as_graph(Data(adj_t=adj_t)), ([0], [1]), 3, 3)


def test_sparse_tensor_of_torch_sparse(monkeypatch):
    class SparseTensor:  # the two methods of torch_sparse.SparseTensor that are used
        def coo(self):
            return torch.tensor([0, 0, 2]), torch.tensor([3, 1, 0]), None

        def sparse_sizes(self):
            return 3, 4

    if torch_geometric.typing.WITH_TORCH_SPARSE:
        x = torch_geometric.typing.SparseTensor(
            row=torch.tensor([0, 0, 2]), col=torch.tensor([3, 1, 0]), sparse_sizes=(3, 4), is_sorted=True
        )
    else:
        monkeypatch.setattr(torch_geometric.typing, "SparseTensor", SparseTensor)
        x = SparseTensor()
    assert_holds(as_graph(x), ([3, 1, 0], [0, 0, 2]), 4, 3)
    with pytest.raises(ValueError, match="target_to_source"):
        as_graph(x, flow="target_to_source")


def test_target_to_source_reads_an_edge_index_backwards():
    edge_index = edges((0, 2), (1, 2), (1, 0))
    graph = as_graph(edge_index, flow="target_to_source", size=(3, 2))
    assert_holds(graph, edge_index.flip(0).tolist(), 3, 2)


def test_a_graph_passes_through():
    graph = SparseGraph.from_edge_index(edges((2, 1)), size=(3, 2))
    assert as_graph(graph) is graph
    assert as_graph(graph, size=(3, 2)) is graph
    assert graph.to_sparse() is graph
    assert isinstance(graph, Graph)


# --------------------------------------------------------------------------------------------------- reuse


def test_the_graph_of_an_unmodified_edge_index_is_reused():
    edge_index = edges((0, 1), (1, 2))
    first = as_graph(edge_index, num_nodes=3)
    assert as_graph(edge_index, num_nodes=3) is first
    assert as_graph(edge_index, size=(3, 3)) is first
    backwards = as_graph(edge_index, num_nodes=3, flow="target_to_source")
    assert backwards.to_edge_index().tolist() == [[1, 2], [0, 1]]
    assert as_graph(edge_index, num_nodes=4).num_keys == 4
    assert as_graph(edge_index, num_nodes=3) is first
    assert as_graph(edge_index, num_nodes=3, flow="target_to_source") is backwards
    assert as_graph(edge_index.clone(), num_nodes=3) is not first
    assert as_graph(Data(edge_index=edge_index, num_nodes=3)) is first
    assert SparseGraph.from_edge_index(edge_index, 3) is not first


@pytest.mark.parametrize(
    ("write", "pyg"),
    # An EdgeIndex does not share its version with its base and its views.
    [("whole", False), ("item", False), ("view", False), ("base", False), ("whole", True), ("item", True)],
)
def test_a_write_in_place_is_noticed(write, pyg):
    base = edges((0, 1), (1, 2), (2, 2))
    edge_index = base[:, :2]
    if pyg:
        edge_index = torch_geometric.EdgeIndex(edge_index, sparse_size=(3, 3))
    before = as_graph(edge_index, num_nodes=3)
    if write == "whole":
        edge_index.fill_(2)
    elif write == "item":
        edge_index[0, 1] = 0
    elif write == "view":
        edge_index[1].zero_()
    else:
        base.zero_()
    after = as_graph(edge_index, num_nodes=3)
    plain = edge_index.as_tensor() if pyg else edge_index
    assert after.to_edge_index().tolist() == plain.tolist() != before.to_edge_index().tolist()
    assert before.to_edge_index().tolist() == [[0, 1], [1, 2]]
    assert as_graph(edge_index, num_nodes=3) is after


def test_reuse_keeps_no_tensor_alive():
    edge_index = edges((0, 1), (1, 2))
    graph = as_graph(edge_index)
    tensor, kept = weakref.ref(edge_index), weakref.ref(graph)
    del edge_index, graph
    gc.collect()
    assert tensor() is None and kept() is None


def test_inference_tensors_are_built_each_time():
    with torch.inference_mode():
        edge_index = edges((0, 1), (1, 2)).clone()
        first = as_graph(edge_index)
        edge_index.zero_()
        assert as_graph(edge_index).to_edge_index().tolist() == [[0, 0], [0, 0]]
        assert first.to_edge_index().tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("number_of_edges", [3, 60_000])  # sorted on one thread, on two
def test_graphs_built_in_inference_mode_can_be_trained_on(number_of_edges):
    edge_index = random_edges(9, 9, number_of_edges)
    with torch.inference_mode():
        graphs = [as_graph(edge_index, num_nodes=9), as_graph(edge_index.clone(), num_nodes=9)]
        graphs += [union(*graphs), global_graph(9, [0]), expander_graph(9, 2, seed=0)]
    assert as_graph(edge_index, num_nodes=9) is graphs[0]
    assert not any(getattr(graph, name).is_inference() for graph in graphs for name in FIELDS)


def test_threads_may_share_an_edge_index():
    shared = random_edges(50, 50, 400)
    own = [random_edges(50, 50, 400, seed) for seed in range(4)]
    wrong = []

    def work(mine):
        for _ in range(50):
            fresh = mine.clone()
            for edge_index in (shared, mine, fresh):
                if not torch.equal(as_graph(edge_index, num_nodes=50).to_edge_index(), edge_index):
                    wrong.append(edge_index)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ----------------------------------------------------------------------- union, expander_graph, global_graph


@given(edge_lists(square=True), edge_lists(square=True))
def test_union_is_the_set_union(one, other):
    num_nodes = max(one[1], other[1])
    graphs = [SparseGraph.from_edge_index(edge_index, num_nodes) for edge_index, _, _ in (one, other)]
    pairs = {(i, j) for graph in graphs for j, i in graph.to_edge_index().t().tolist()}
    expected = sorted(pairs)  # by (query, key)
    assert_holds(union(*graphs), ([j for _, j in expected], [i for i, _ in expected]), num_nodes, num_nodes)


def test_union_of_bipartite_graphs():
    one = SparseGraph.from_edge_index(edges((4, 0), (4, 0), (0, 1)), size=(5, 2))
    other = SparseGraph.from_edge_index(edges((2, 1), (0, 1)), size=(5, 2))
    assert_holds(union(one, other), ([4, 0, 2], [0, 1, 1]), 5, 2)
    assert_holds(union(one), ([4, 0], [0, 1]), 5, 2)


@pytest.mark.parametrize("degree", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_nodes", [0, 1, 2, 3, 5, 8, 101])
def test_expander_graph(num_nodes, degree):
    state = torch.get_rng_state()
    graph = expander_graph(num_nodes, degree, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    mask = graph.to_mask()
    assert graph.num_edges == mask.sum() and graph.num_queries == num_nodes  # no parallel edges
    assert torch.equal(mask, mask.t()) and not mask.diagonal().any()
    assert_same(graph, expander_graph(num_nodes, degree, seed=3))
    assert graph.to_edge_index().t().flip(1).tolist() == sorted(graph.to_edge_index().t().flip(1).tolist())
    if num_nodes <= degree + 1:
        assert graph.num_edges == num_nodes * (num_nodes - 1)
        return
    degrees = mask.sum(1)
    assert degrees.max() <= degree
    if degree >= 2:
        assert degrees.min() >= 2
        assert networkx.is_connected(networkx.Graph(graph.to_networkx()))
    if degree in (1, 2):  # nothing can fall together
        assert degrees.sum() == (num_nodes // 2 * 2 if degree == 1 else 2 * num_nodes)


def test_expander_graph_does_not_depend_on_the_default_device():
    for num_nodes in (3, 9):
        graph = expander_graph(num_nodes, 3, seed=0)
        with torch.device("meta"):
            assert_same(expander_graph(num_nodes, 3, seed=0), graph)


def test_expander_graph_expands():
    graph = expander_graph(1000, 6, seed=0)
    degrees = graph.to_mask().sum(1)
    assert degrees.double().mean() > 5.9
    L = networkx.normalized_laplacian_matrix(networkx.Graph(graph.to_networkx())).toarray()
    # A random regular graph has its gap near 1 - 2·sqrt(5) / 6 = 0.25; a ring of this size 0.00001.
    assert np.linalg.eigvalsh(L)[1] > 0.2
    other = expander_graph(1000, 6, seed=1)
    assert (graph.to_mask() & other.to_mask()).sum() < 200


@given(st.integers(0, 8), st.data())
def test_global_graph(num_nodes, data):
    chosen = data.draw(st.lists(st.integers(0, num_nodes - 1), max_size=6)) if num_nodes else []
    mask = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
    for node in chosen:
        mask[node, :] = True
        mask[:, node] = True
    for nodes in (chosen, torch.tensor(chosen, dtype=torch.int32)):
        assert_same(global_graph(num_nodes, nodes), SparseGraph.from_mask(mask))


# ---------------------------------------------------------------------- compile, export, copies, processes


def degrees_of(x: torch.Tensor, graph: SparseGraph) -> torch.Tensor:
    source, target = graph.to_edge_index()
    return torch.zeros(graph.num_queries, x.size(1)).index_add(0, target, x[source])


def degrees_inside(x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
    num_nodes = x.size(0)
    return degrees_of(x, SparseGraph.from_edge_index(edge_index, size=(num_nodes, num_nodes)))


def degrees_reused(x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
    return degrees_of(x, as_graph(edge_index, num_nodes=x.size(0)))


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def neighbour_sums(num_nodes: int, num_edges: int):
    x = torch.arange(3.0 * num_nodes).reshape(num_nodes, 3)
    edge_index = random_edges(num_nodes, num_nodes, num_edges)
    A = torch.zeros(num_nodes, num_nodes)
    A.index_put_((edge_index[1], edge_index[0]), torch.ones(num_edges), accumulate=True)
    return x, edge_index, A @ x


@pytest.mark.parametrize("function", [degrees_of, degrees_inside, degrees_reused])
def test_compiles_once_for_all_sizes(function, fresh_compiler):
    compiles = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=compiles, fullgraph=True, dynamic=True)
    for num_nodes, num_edges in ((5, 7), (9, 30), (100, 400)):
        x, edge_index, expected = neighbour_sums(num_nodes, num_edges)
        inside = function is not degrees_of
        graph = edge_index if inside else SparseGraph.from_edge_index(edge_index, num_nodes)
        torch.testing.assert_close(compiled(x, graph), expected)
        if inside:
            with pytest.raises(IndexError, match=rf"\[0, {num_nodes}\), got {num_nodes}"):
                compiled(x, edge_index.clone().fill_(num_nodes))
            with pytest.raises(IndexError, match=rf"\[0, {num_nodes}\), got -1"):
                compiled(x, edge_index.clone().fill_(-1))
    assert compiles.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", [degrees_of, degrees_inside, degrees_reused])
def test_exports_with_dynamic_sizes(function, strict, fresh_compiler):
    class Model(torch.nn.Module):
        def forward(self, x, graph):
            return function(x, graph)

    inside = function is not degrees_of
    size = torch.export.Dim.AUTO
    x, edge_index, _ = neighbour_sums(9, 30)
    graph = edge_index if inside else SparseGraph.from_edge_index(edge_index, 9)
    shapes = ({0: size}, {1: size} if inside else [{0: size}] * 6)
    program = torch.export.export(Model(), (x, graph), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for model in (program.module(), torch.export.load(file).module()):
        x, edge_index, expected = neighbour_sums(11, 50)
        graph = edge_index if inside else SparseGraph.from_edge_index(edge_index, 11)
        torch.testing.assert_close(model(x, graph), expected)
        if inside:
            with pytest.raises(IndexError, match=r"\[0, 11\), got 11"):
                model(x, edge_index.clone().fill_(11))


def test_the_op_is_well_behaved():
    for num_edges in (0, 1, 6):
        torch.library.opcheck(graph_module._build_csr, (random_edges(4, 3, num_edges), 3, 4))


def saved_and_loaded(graph):
    file = io.BytesIO()
    torch.save(graph, file)
    file.seek(0)
    return torch.load(file)


COPIES = [
    copy.copy,
    copy.deepcopy,
    lambda graph: pickle.loads(pickle.dumps(graph)),
    saved_and_loaded,
    lambda graph: graph.to("cpu"),
    lambda graph: tree_unflatten(*tree_flatten(graph)),
    lambda graph: tree_map_only(torch.Tensor, torch.clone, graph),
]


@pytest.mark.parametrize("copied", COPIES)
def test_copies(copied):
    graph = SparseGraph.from_edge_index(random_edges(6, 5, 20), size=(6, 5))
    assert type(copied(graph)) is SparseGraph
    assert_same(copied(graph), graph)


def test_graphs_are_compared_by_identity_and_do_not_change():
    graph, other = (SparseGraph.from_edge_index(edges((0, 1))) for _ in range(2))
    assert graph == graph and graph != other and len({graph, other}) == 2
    with pytest.raises(AttributeError):
        graph.col = other.col


def test_to_another_device():
    graph = SparseGraph.from_edge_index(random_edges(6, 5, 20), size=(6, 5)).to("meta")
    assert {getattr(graph, name).device.type for name in FIELDS} == {"meta"}
    assert repr(graph) == "SparseGraph(6 keys -> 5 queries, 20 edges, device='meta')"


class BuiltInAWorker(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, seed):
        return as_graph(random_edges(500, 500, 300_000, seed), num_nodes=500)


def test_graphs_come_out_of_a_forked_worker():
    as_graph(random_edges(500, 500, 300_000), num_nodes=500)  # the parent has used threads
    loader = DataLoader(BuiltInAWorker(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    for seed, graph in enumerate(loader):
        assert_same(graph, SparseGraph.from_edge_index(random_edges(500, 500, 300_000, seed), 500))
