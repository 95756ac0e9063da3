"""Positional encodings against hand values, dense linear algebra in float64, and loops."""

import functools
import math
import time

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.sparse.linalg import ArpackNoConvergence
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import AddLaplacianEigenvectorPE

import graphattn.encodings
from graphattn import (
    CompleteGraph,
    Graph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    expander_graph,
    graph_attention,
)
from graphattn.encodings import alibi, laplacian_eigenvectors, random_walk, relative_positions, sinusoidal
from graphattn.nn import RotaryEncoding

DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def one_thread():
    """These are small problems, and two threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    """PyTorch's default dtype, in which encodings come."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def undirected(pairs, num_nodes: int) -> SparseGraph:
    pairs = torch.as_tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
    return SparseGraph.from_edge_index(torch.cat([pairs, pairs.flip(0)], dim=1), num_nodes)


def path(n: int) -> SparseGraph:
    return undirected([(i, i + 1) for i in range(n - 1)], n)


class TestSinusoidal:
    def test_formula(self, dtype):
        positions = torch.tensor([0, 1, 7, 1000, -3])
        encoding = sinusoidal(positions, 6)
        assert encoding.dtype == dtype
        for i, p in enumerate(positions.tolist()):
            for c in range(3):
                angle = p / 10000 ** (2 * c / 6)
                assert encoding[i, 2 * c].item() == pytest.approx(math.sin(angle), abs=1e-6)
                assert encoding[i, 2 * c + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)

    def test_axes_are_concatenated_and_the_rest_is_zero(self, dtype):
        positions = GridGraph((3, 4), 1).positions()
        encoding = sinusoidal(positions, 11)
        torch.testing.assert_close(encoding[:, :4], sinusoidal(positions[:, 0], 4))
        torch.testing.assert_close(encoding[:, 4:8], sinusoidal(positions[:, 1], 4))
        assert encoding.shape == (12, 11) and (encoding[:, 8:] == 0).all()

    def test_a_shift_is_a_rotation(self, dtype):
        p, s = torch.arange(50), 13
        here, there = (sinusoidal(x, 8).double().unflatten(1, (4, 2)) for x in (p, p + s))
        for c in range(4):
            angle = s * 10000 ** (-c / 4)
            turn = torch.tensor(
                [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]],
                dtype=torch.float64,
            )
            torch.testing.assert_close(there[:, c], here[:, c] @ turn.T, atol=1e-6, rtol=0)

    def test_large_positions_are_exact(self):
        encoding = sinusoidal(torch.tensor([2**24 + 1]), 2)
        assert encoding[0, 0].item() == pytest.approx(math.sin(2**24 + 1), abs=1e-7)

    @pytest.mark.parametrize("dim", [0, 1, 2, 5])
    @pytest.mark.parametrize("shape", [(0,), (1,), (0, 2), (3, 2), (2, 0)])
    def test_total(self, shape, dim):
        encoding = sinusoidal(torch.zeros(shape), dim)
        assert encoding.shape == (shape[0], dim) and encoding.isfinite().all()

    def test_dtype_and_gradient_of_real_positions(self):
        positions = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda p: sinusoidal(p, 8), positions)
        assert sinusoidal(torch.zeros(2, dtype=torch.float16), 4).dtype == torch.float16

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ((torch.zeros(2, 3, 4), 4), ValueError, "positions.*shape"),
            ((torch.zeros(()), 4), ValueError, "positions.*shape"),
            (([0, 1], 4), TypeError, "positions"),
            ((torch.tensor([True]), 4), TypeError, "positions"),
            ((torch.ones(2).to(torch.float8_e4m3fn), 4), TypeError, "float8_e4m3fn"),
            ((torch.ones(2).to_sparse(), 4), TypeError, "dense tensor, got torch.sparse_coo"),
            ((torch.zeros(2, dtype=torch.complex64), 4), TypeError, "complex64"),
            ((torch.tensor([math.nan]), 4), ValueError, "finite"),
            ((torch.tensor([math.inf]), 4), ValueError, "finite"),
            ((torch.zeros(2), -1), ValueError, "dim"),
            ((torch.zeros(2), 2.0), TypeError, "dim"),
        ],
    )
    def test_bad_input(self, arguments, error, words):
        with pytest.raises(error, match=words):
            sinusoidal(*arguments)

    @pytest.mark.parametrize("base", [0, 5e-324, 1e-310, 0.5, -1.0, math.inf, math.nan, 10**400])
    def test_bad_base(self, base):
        for call in (sinusoidal, lambda *_, base: RotaryEncoding(4, base=base)):
            with pytest.raises(ValueError, match="`base` must be a finite number of at least 1"):
                call(torch.zeros(2), 4, base=base)

    @pytest.mark.parametrize("base", [True, "10", None, torch.tensor(10.0), 1j])
    def test_base_of_another_kind(self, base):
        for call in (sinusoidal, lambda *_, base: RotaryEncoding(4, base=base)):
            with pytest.raises(TypeError, match="`base` must be a number"):
                call(torch.zeros(2), 4, base=base)

    @pytest.mark.parametrize("base", [1, 1.0, 3.5, np.float32(100), 1.7e308])
    def test_any_base_from_one_on(self, base):
        positions = torch.tensor([-1e308, -2.5, 1.0], dtype=torch.float64)
        encoding = sinusoidal(positions, 6, base=base)
        for i, p in enumerate(positions.tolist()):
            for c in range(3):
                angle = p * float(base) ** (-c / 3)
                if abs(angle) < 1e3:
                    assert encoding[i, 2 * c].item() == pytest.approx(math.sin(angle), abs=1e-10)
        assert encoding.isfinite().all() and encoding.abs().max() <= 1


def laplacian(graph: Graph, weight: Tensor | None = None, normalized: bool = True) -> Tensor:
    """The dense Laplacian in float64, from its definition."""
    n = graph.num_queries
    A = torch.zeros(n, n, dtype=torch.float64)
    source, target = graph.to_edge_index()
    weight = torch.ones(len(source)) if weight is None else weight
    A.index_put_((source, target), weight.double(), accumulate=True)
    A = (A + A.t()) / 2
    degree = A.sum(1)
    if not normalized:
        return degree.diag() - A
    root = torch.where(degree > 0, degree.rsqrt(), 0.0)
    return (degree > 0).double().diag() - root.view(-1, 1) * A * root


def num_components(graph: Graph) -> int:
    G = nx.Graph()
    G.add_nodes_from(range(graph.num_queries))
    G.add_edges_from(graph.to_edge_index().t().tolist())
    return nx.number_connected_components(G)


ragged = CompleteGraph.from_ptr(torch.tensor([0, 5, 5, 6, 30, 60]))
GRAPHS = {
    "path": (path(1000), 8),
    "short path, k >= n": (path(101), 120),
    "cycle": (undirected([(i, (i + 1) % 700) for i in range(700)], 700), 8),
    "star": (undirected([(0, i) for i in range(1, 500)], 500), 8),
    "grid": (GridGraph((24, 24), 1), 12),
    "expander": (expander_graph(700, 6, seed=0), 8),
    "complete": (CompleteGraph(400), 5),
    "hypercube": (undirected([(a, a ^ (1 << b)) for a in range(512) for b in range(9)], 512), 8),
    "cliques": (ragged, 70),
    "dumbbell": (
        undirected(
            [(a, b) for a in range(200) for b in range(a)]
            + [(a, b) for a in range(400, 600) for b in range(400, a)]
            + [(i, i + 1) for i in range(199, 400)],
            600,
        ),
        6,
    ),
    "two long paths": (
        undirected([(i, i + 1) for i in range(399)] + [(i, i + 1) for i in range(400, 799)], 800),
        8,
    ),
    "window with self-loops": (WindowGraph(700, 2), 6),
    "directed path": (SparseGraph.from_edge_index(torch.stack([torch.arange(40), torch.arange(1, 41)])), 6),
    "directed triangle": (SparseGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]])), 4),
    "parallel edges": (
        SparseGraph.from_edge_index(torch.tensor([[0, 1, 0, 1, 2, 1], [1, 0, 1, 0, 1, 2]]), 4),
        3,
    ),
}


@functools.cache
def exact_eigenvalues(name: str, normalization: str | None) -> tuple[Tensor, Tensor]:
    graph, k = GRAPHS[name]
    L = laplacian(graph, normalized=normalization == "sym")
    null = num_components(graph)
    return L, torch.linalg.eigvalsh(L)[null : null + k]


class TestLaplacianEigenvectors:
    @pytest.mark.field_report("B92")
    @pytest.mark.parametrize("normalization", ["sym", None])
    @pytest.mark.parametrize("name", GRAPHS)
    def test_eigenvectors(self, name, normalization, dtype):
        """Residual, orthonormality, and that they belong to the smallest eigenvalues but the null ones."""
        graph, k = GRAPHS[name]
        encoding = laplacian_eigenvectors(graph, k, normalization=normalization)
        assert encoding.dtype == dtype and encoding.shape == (graph.num_queries, k)
        L, exact = exact_eigenvalues(name, normalization)
        found = len(exact)
        vectors = encoding[:, :found].double()
        scale, eps = L.diag().max().item() * 2, torch.finfo(dtype).eps
        eye = torch.eye(found, dtype=torch.float64)
        torch.testing.assert_close(vectors.T @ vectors, eye, atol=20 * eps + 1e-13, rtol=0)
        values = (vectors * (L @ vectors)).sum(0)
        torch.testing.assert_close(values, exact, atol=(10 * eps + 1e-13) * scale, rtol=0)
        residual = (L @ vectors - vectors * values).norm(dim=0)
        assert residual.max() <= (1e-8 + 4 * eps) * scale
        assert (encoding[:, found:] == 0).all()
        if dtype == torch.float64:  # the first of the largest entries is positive
            for column in encoding[:, :found].T:
                assert column[(column.abs() >= (1 - 1e-6) * column.abs().max()).nonzero()[0]] > 0
        assert torch.equal(encoding, laplacian_eigenvectors(graph, k, normalization=normalization))

    def test_path_by_formula(self):
        """Of a path without normalisation: cos(π c (i + 1/2) / n)."""
        n = 500
        encoding = laplacian_eigenvectors(path(n), 5, normalization=None).double()
        i = torch.arange(n, dtype=torch.float64)
        for c in range(5):
            exact = torch.cos(math.pi * (c + 1) * (i + 0.5) / n)
            exact *= (exact @ encoding[:, c]).sign() / exact.norm()
            torch.testing.assert_close(encoding[:, c], exact, atol=1e-6, rtol=0)

    @pytest.mark.field_report("B90")
    @pytest.mark.parametrize("k", [0, 1, 8])
    @pytest.mark.parametrize(
        "graph",
        [SparseGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), n) for n in (0, 1, 2, 3, 5, 150)]
        + [
            path(1),
            path(2),
            path(3),
            CompleteGraph(0),
            CompleteGraph(1),
            WindowGraph(2, 0),
            GridGraph((1,), 1),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("normalization", ["sym", None])
    def test_total(self, graph, k, normalization):
        encoding = laplacian_eigenvectors(graph, k, normalization=normalization)
        assert encoding.shape == (graph.num_queries, k) and encoding.isfinite().all()
        expected = min(k, graph.num_queries - num_components(graph))
        assert (encoding.norm(dim=0) > 0).sum() == expected

    @pytest.mark.field_report("B92")
    def test_triangle(self):
        graph, _ = GRAPHS["directed triangle"]
        vectors = laplacian_eigenvectors(graph, 2).double()
        quotient = (vectors * (laplacian(graph) @ vectors)).sum(0)
        assert quotient.tolist() == pytest.approx([1.5, 1.5], abs=1e-6)
        with pytest.raises(ValueError, match="symmetric"):
            laplacian_eigenvectors(graph, 2, directed="raise")
        laplacian_eigenvectors(path(4), 2, directed="raise")

    def test_weights_are_multiplicities(self, dtype):
        doubled = SparseGraph.from_edge_index(torch.tensor([[0, 1, 0, 1, 2, 1], [1, 0, 1, 0, 1, 2]]))
        single = SparseGraph.from_edge_index(torch.tensor([[0, 1, 2, 1], [1, 0, 1, 2]]))
        weight = torch.tensor([2.0, 2.0, 1.0, 1.0])
        torch.testing.assert_close(
            laplacian_eigenvectors(doubled, 2), laplacian_eigenvectors(single, 2, edge_weight=weight)
        )
        # A removed edge leaves a component of its own.
        cut = laplacian_eigenvectors(single, 2, edge_weight=torch.tensor([0.0, 0.0, 1.0, 1.0]))
        assert cut.abs().mul(2**0.5).tolist() == [
            pytest.approx(x, abs=1e-6) for x in ([0, 0], [1, 0], [1, 0])
        ]

    def test_weights_of_any_size(self):
        weight = torch.logspace(-12, 12, 12, dtype=torch.float64)
        graph = SparseGraph.from_edge_index(torch.tensor([[0, 1] * 6, [1, 0] * 6]) + torch.arange(12) // 2)
        for scale in (1e-300, 1.0, 1e290):
            encoding = laplacian_eigenvectors(graph, 6, edge_weight=weight * scale)
            assert encoding.dtype == torch.float64 and encoding.isfinite().all()
            torch.testing.assert_close(encoding.T @ encoding, torch.eye(6).double())

    @pytest.mark.parametrize("normalization", ["sym", None])
    def test_small_components_beside_large_ones(self, normalization):
        """Weights of 1e300 and of 1e-300: the ratios within each component are what counts."""
        graph = undirected([(0, 1), (2, 3), (3, 4)], 5)
        weight = torch.tensor([1e300, 1e-300, 3e-300] * 2, dtype=torch.float64)
        together = laplacian_eigenvectors(graph, 3, edge_weight=weight, normalization=normalization)
        alone = laplacian_eigenvectors(
            undirected([(0, 1), (1, 2)], 3),
            2,
            edge_weight=torch.tensor([1.0, 3.0] * 2, dtype=torch.float64),
            normalization=normalization,
        )
        expected = torch.zeros(5, 3, dtype=torch.float64)
        pair = torch.tensor([1.0, -1.0], dtype=torch.float64) / 2**0.5
        if normalization is None:  # the eigenvalues 2e300 of the pair and about 1e-300 of the others
            expected[2:, :2], expected[:2, 2] = alone, pair
        else:  # eigenvalues 1, 2 of the path, whose order beside the 2 of the pair is open
            expected[2:, 0] = alone[:, 0]
            assert (together[:, 1:].square().sum(1)[:2] - 0.5).abs().max() < 1e-12
            together, expected = together[:, :1], expected[:, :1]
        torch.testing.assert_close(together, expected, atol=1e-12, rtol=0)

    @pytest.mark.parametrize("normalization", ["sym", None])
    def test_weights_beyond_all_ratios_keep_the_component(self, normalization):
        """0 and 1 joined by 1e300, 2 to them by 1e-300: one component, so one null vector and two others."""
        weight = torch.tensor([1e300, 1e-300] * 2, dtype=torch.float64)
        graph = undirected([(0, 1), (1, 2)], 3)
        encoding = laplacian_eigenvectors(graph, 3, edge_weight=weight, normalization=normalization)
        # Of the node alone with eigenvalue 1, or of the node against the pair with an eigenvalue of about 0.
        first = [0.0, 0.0, 1.0] if normalization == "sym" else [-(6**-0.5), -(6**-0.5), 2 * 6**-0.5]
        expected = torch.tensor([first, [0.5**0.5, -(0.5**0.5), 0.0], [0.0] * 3], dtype=torch.float64).T
        torch.testing.assert_close(encoding, expected, atol=1e-12, rtol=0)

    @pytest.mark.parametrize("normalization", ["sym", None])
    @pytest.mark.parametrize("decades", [9, 13, 18, 40])
    @pytest.mark.parametrize("shape", ["path", "star", "tree", "random", "weak link"])
    def test_weights_far_apart(self, shape, decades, normalization):
        """Above the size that is solved densely: residual, orthonormality, and the smallest eigenvalues."""
        n, k = 400, 6
        i = torch.arange(1, n)
        pairs = torch.stack([{"star": 0 * i, "tree": (i - 1) // 2}.get(shape, i - 1), i], 1)
        if shape == "random":
            pairs = torch.cat([pairs, torch.randint(n, (3 * n, 2))])
            pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        weight = 10 ** (torch.rand(len(pairs), dtype=torch.float64) * decades)
        if shape == "weak link":
            weight = torch.ones(n - 1, dtype=torch.float64)
            weight[n // 2] = 10.0**-decades
        weight = weight.repeat(2)
        graph = undirected(pairs, n)
        vectors = laplacian_eigenvectors(graph, k, edge_weight=weight, normalization=normalization)
        L = laplacian(graph, weight, normalization == "sym")
        L = L / L.diag().max()
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(k).double(), atol=1e-12, rtol=0)
        values = (vectors * (L @ vectors)).sum(0)
        assert (L @ vectors - vectors * values).norm(dim=0).max() < 1e-9
        exact = torch.linalg.eigvalsh(L)[1 : k + 1]
        torch.testing.assert_close(values, exact, atol=2e-13, rtol=1e-9)

    def test_it_says_where_it_does_not_converge(self, monkeypatch):
        monkeypatch.setattr(graphattn.encodings, "_FALLBACK", 0)
        monkeypatch.setattr(
            graphattn.encodings, "_largest_eigenpairs", lambda *_: (False, torch.ones(3), torch.ones(300, 2))
        )
        with pytest.raises(RuntimeError, match="300 nodes"):
            laplacian_eigenvectors(path(300), 2)

    def test_more_eigenvectors_than_fit_a_block(self):
        """A block of k + 2, ten of which would be more than all nodes."""
        graph = expander_graph(300, 6, seed=0)
        vectors = laplacian_eigenvectors(graph, 70).double()
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(70).double(), atol=1e-5, rtol=0)
        values = (vectors * (laplacian(graph) @ vectors)).sum(0)
        exact = torch.linalg.eigvalsh(laplacian(graph))[1:71]
        torch.testing.assert_close(values, exact, atol=1e-6, rtol=0)

    @pytest.mark.field_report("B93")
    def test_relabelled_nodes(self):
        """Up to sign, where eigenvalues are simple."""
        graph = undirected([(i, i + 1) for i in range(399)] + [(3, 40), (100, 180)], 400)
        order = torch.randperm(400)
        place = order.argsort()
        relabelled = SparseGraph.from_edge_index(place[graph.to_edge_index()], 400)
        one, two = laplacian_eigenvectors(graph, 4)[order], laplacian_eigenvectors(relabelled, 4)
        torch.testing.assert_close(one.abs(), two.abs(), atol=1e-5, rtol=0)

    @pytest.mark.field_report("B93")
    def test_random_signs(self):
        graph = path(30)
        fixed = laplacian_eigenvectors(graph, 20)
        flips = torch.stack([laplacian_eigenvectors(graph, 20, random_sign=True) for _ in range(5)])
        signs = (flips * fixed).sum(1)
        torch.testing.assert_close(signs.abs(), torch.ones(5, 20))
        assert (signs > 0).any() and (signs < 0).any()
        for _ in range(2):
            torch.manual_seed(3)
            one = laplacian_eigenvectors(graph, 20, random_sign=True)
            torch.manual_seed(3)
            assert torch.equal(one, laplacian_eigenvectors(graph, 20, random_sign=True))

    def test_faster_than_pyg_on_a_long_path(self):
        """PyG's solver is stopped after 3,000 steps, where it has not converged; by default it takes longer."""
        graph = path(3000)
        data = Data(edge_index=graph.to_edge_index(), num_nodes=3000)
        theirs = AddLaplacianEigenvectorPE(8, is_undirected=True, maxiter=3000)
        ours, peers = [], []
        for _ in range(2):
            start = time.perf_counter()
            laplacian_eigenvectors(graph, 8)
            middle = time.perf_counter()
            with pytest.raises(ArpackNoConvergence):
                theirs(data)
            ours.append(middle - start)
            peers.append(time.perf_counter() - middle)
        assert min(ours) < 1.0 and min(ours) < min(peers) / 5, (ours, peers)

    def test_bad_input(self):
        graph = path(4)
        for arguments, options, error, words in [
            ((graph, -1), {}, ValueError, "`k`.*-1"),
            ((graph, 2.0), {}, TypeError, "`k`"),
            ((graph, True), {}, TypeError, "`k`"),
            ((graph.to_edge_index(), 2), {}, TypeError, "as_graph"),
            ((CompleteGraph(3, num_keys=4), 2), {}, ValueError, "4 keys and 3 queries"),
            ((graph, 2), {"normalization": "rw"}, ValueError, "normalization"),
            ((graph, 2), {"directed": "ignore"}, ValueError, "directed"),
            ((graph, 2), {"edge_weight": -torch.ones(6)}, ValueError, "not negative"),
            ((graph, 2), {"edge_weight": torch.full((6,), math.nan)}, ValueError, "finite"),
            ((graph, 2), {"edge_weight": torch.ones(5)}, ValueError, r"shape \[6\]"),
            ((graph, 2), {"edge_weight": torch.ones(6, dtype=torch.int64)}, TypeError, "floating"),
        ]:
            with pytest.raises(error, match=words):
                laplacian_eigenvectors(*arguments, **options)


class TestRandomWalk:
    @pytest.mark.field_report("B96")
    def test_doubled_edge(self, dtype):
        """0 and 1 joined twice, 0 and 2 once."""
        graph = undirected([(0, 1), (0, 1), (0, 2)], 3)
        expected = torch.tensor([[0, 1, 0, 1], [0, 2 / 3, 0, 2 / 3], [0, 1 / 3, 0, 1 / 3]])
        torch.testing.assert_close(random_walk(graph, 4), expected)
        assert random_walk(graph, 4).dtype == dtype

    @pytest.mark.field_report("B96")
    def test_weights(self, dtype):
        graph = SparseGraph.from_edge_index(torch.tensor([[0, 1, 0, 2], [1, 0, 2, 0]]))
        walks = random_walk(graph, 2, edge_weight=torch.tensor([3.0, 3.0, 1.0, 1.0]))
        torch.testing.assert_close(walks[:, 1], torch.tensor([1.0, 0.75, 0.25]))
        pair = SparseGraph.from_edge_index(torch.tensor([[0, 1], [1, 0]]))
        assert random_walk(pair, 2, edge_weight=torch.tensor([0.1, 0.1])).tolist() == [[0, 1], [0, 1]]

    def test_weights_of_any_size(self):
        """Each row by its own largest weight: none vanishes beside another, and no sum overflows."""
        graph = SparseGraph.from_edge_index(torch.tensor([[0, 1, 0, 2, 3, 4], [1, 0, 2, 0, 4, 3]]))
        weight = torch.tensor([1.5e308, 5e-324, 0.5e308, 1e308, 1e-300, 1e-320], dtype=torch.float64)
        expected = torch.tensor([[0.0, 1.0], [0.0, 0.75], [0.0, 0.25], [0.0, 1.0], [0.0, 1.0]])
        walks = random_walk(graph, 2, edge_weight=weight)
        torch.testing.assert_close(walks, expected.double(), atol=1e-12, rtol=0)

    @pytest.mark.field_report("B97")
    def test_isolated_nodes_sinks_and_self_loops(self, dtype):
        isolated = undirected([(0, 1)], 3)
        assert random_walk(isolated, 2).tolist() == [[0, 1], [0, 1], [0, 0]]
        # 0 stays with 1/2 and goes on to the sink 1 with 1/2.
        sink = SparseGraph.from_edge_index(torch.tensor([[0, 0], [0, 1]]))
        torch.testing.assert_close(random_walk(sink, 3), torch.tensor([[0.5, 0.25, 0.125], [0, 0, 0]]))
        # A directed cycle comes back after its length only.
        cycle = SparseGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
        assert random_walk(cycle, 4).tolist() == [[0, 0, 1, 0]] * 3

    @pytest.mark.parametrize("n", [60, 2100])
    def test_matrix_powers(self, n, dtype):
        """Directed, weighted, with parallel edges, self-loops and sinks; the larger one takes several slabs."""
        edge_index = torch.randint(n, (2, 2 * n))
        weight = torch.rand(2 * n) * (torch.rand(2 * n) < 0.9)
        P = torch.zeros(n, n, dtype=torch.float64)
        P.index_put_(tuple(edge_index), weight.double(), accumulate=True)
        total = P.sum(1, keepdim=True)
        P = torch.where(total > 0, P / total, 0.0)
        walks = random_walk(SparseGraph.from_edge_index(edge_index, n), 5, edge_weight=weight).double()
        power = torch.eye(n, dtype=torch.float64)
        for t in range(5):
            power = power @ P
            torch.testing.assert_close(walks[:, t], power.diag(), atol=torch.finfo(dtype).eps, rtol=1e-6)

    def test_structured_graphs(self):
        torch.testing.assert_close(random_walk(CompleteGraph(4), 3), torch.full((4, 3), 0.25))
        grid = GridGraph((5, 6), 1)
        torch.testing.assert_close(random_walk(grid, 5), random_walk(grid.to_sparse(), 5))

    @pytest.mark.parametrize("steps", [0, 1, 5])
    @pytest.mark.parametrize("n", [0, 1, 2, 150])
    def test_total(self, n, steps):
        edgeless = SparseGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), n)
        assert torch.equal(random_walk(edgeless, steps), torch.zeros(n, steps))

    def test_bad_input(self):
        graph = path(4)
        for arguments, options, error, words in [
            ((graph, -1), {}, ValueError, "steps"),
            ((graph, 1.5), {}, TypeError, "steps"),
            ((None, 2), {}, TypeError, "graph"),
            ((CompleteGraph(3, num_keys=4), 2), {}, ValueError, "keys"),
            ((graph, 2), {"edge_weight": -torch.ones(6)}, ValueError, "edge_weight"),
            ((graph, 2), {"edge_weight": torch.ones(2, 6)}, ValueError, "edge_weight"),
            ((graph, 2), {"edge_weight": torch.full((6,), math.inf)}, ValueError, "finite.*inf"),
            ((graph, 2), {"edge_weight": torch.ones(6).to_sparse()}, TypeError, "dense"),
            ((graph, 2), {"edge_weight": torch.ones(6).to(torch.float8_e5m2)}, TypeError, "float8_e5m2"),
            ((graph, 2), {"edge_weight": [1.0] * 6}, TypeError, "edge_weight"),
        ]:
            with pytest.raises(error, match=words):
                random_walk(*arguments, **options)


STRUCTURED: dict[str, Graph] = {
    "complete": CompleteGraph(6),
    "rectangle": CompleteGraph(4, num_keys=7, causal=True, offset=3),
    "cliques": ragged,
    "labels": CompleteGraph.from_batch(torch.tensor([1, 0, 1, 1, 0])),
    "window": WindowGraph(9, (2, 1)),
    "dilated": WindowGraph(12, 2, dilation=3),
    "offset": WindowGraph(5, 1, num_keys=9, offset=-2),
    "unbounded": WindowGraph(6, (None, 1), num_keys=8, offset=2, dilation=2),
    "ragged windows": WindowGraph.from_ptr(torch.tensor([0, 3, 3, 9]), 2),
    "ragged, unbounded": WindowGraph.from_ptr(torch.tensor([0, 3, 3, 9]), (None, 0)),
    "grid": GridGraph((4, 5), 1),
    "grid, shifted": GridGraph((4, 5), (1, (2, 1)), border="shift"),
    "small grid, shifted": GridGraph((2, 7), 2, border="shift", dilation=2),
    "whole axis": GridGraph((3, 4), (None, 1)),
    "three axes": GridGraph((2, 3, 4), (1, (1, 0), 2)),
    "empty": WindowGraph(0, 2),
}


def offsets_of_edges(graph: Graph) -> Tensor:
    """Key position minus query position of every edge, from where the nodes are."""
    source, target = graph.to_edge_index()
    queries = graph.positions()
    if isinstance(graph, GridGraph) or getattr(graph, "ptr", None) is not None:
        return queries[source] - queries[target]
    return source.view(-1, 1) - queries[target]


@pytest.mark.parametrize("name", STRUCTURED)
def test_relative_positions(name):
    graph = STRUCTURED[name]
    offsets = relative_positions(graph)
    axes = offsets.size(-1)
    full = offsets.expand(*graph.edge_shape, axes).reshape(-1, axes)
    assert torch.equal(full[graph.slots()], offsets_of_edges(graph))


@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize("name", STRUCTURED)
def test_alibi(name, heads, dtype):
    graph = STRUCTURED[name]
    bias = alibi(graph, heads)
    slopes = {1: [2**-8], 4: [1 / 4, 1 / 16, 1 / 64, 1 / 256]}
    slopes[6] = [*slopes[4], 1 / 2, 1 / 8]
    distance = offsets_of_edges(graph).double().square().sum(-1).sqrt()
    expected = -distance.view(-1, 1) * torch.tensor(slopes[heads], dtype=torch.float64)
    full = bias.expand(*graph.edge_shape, heads).reshape(-1, heads)[graph.slots()]
    assert bias.dtype == dtype
    torch.testing.assert_close(full, expected.to(dtype))
    # The operator takes it as it is.
    x, y = torch.randn(graph.num_queries, heads, 4), torch.randn(graph.num_keys, heads, 4)
    out = graph_attention(x, y, y, graph, bias=bias)
    listed = graph_attention(x, y, y, graph.to_sparse(), bias=expected.to(dtype))
    torch.testing.assert_close(out, listed)


def test_alibi_of_a_long_window_is_small():
    assert alibi(WindowGraph(10**6, 64), 8).shape == (1, 129, 8)
    assert alibi(GridGraph((1000, 1000), 3), 8).shape == (1, 49, 8)


def test_alibi_bad_input():
    with pytest.raises(ValueError, match="positions"):
        alibi(path(3), 2)
    with pytest.raises(TypeError, match="Graph"):
        alibi(torch.zeros(2, 3), 2)
    with pytest.raises(ValueError, match="heads"):
        alibi(WindowGraph(3, 1), 0)
    with pytest.raises(TypeError, match="heads"):
        alibi(WindowGraph(3, 1), 2.0)


def test_attention_with_an_encoding_sees_order():
    """Without one, permuted nodes give permuted outputs on a complete graph."""
    n = 20
    x, order = torch.randn(n, 1, 8, dtype=torch.float64), torch.randperm(20)
    position = sinusoidal(torch.arange(n, dtype=torch.float64), 8).unsqueeze(1)
    graph = CompleteGraph(n)

    def attend(x):
        return graph_attention(x, x, x, graph)

    np.testing.assert_allclose(attend(x[order]), attend(x)[order], atol=1e-12)
    assert (attend(x[order] + position) - attend(x + position)[order]).abs().max() > 0.05
