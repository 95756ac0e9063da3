"""Extreme scores, degrees, numbers and sizes, and a thousand steps that must leave nothing behind."""

import gc
import math
import threading
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from graphattn import (
    CompleteGraph,
    Graph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    as_graph,
    attention_weights,
    graph_attention,
)
from graphattn import graph as graph_module
from graphattn.kernels import sparse_cpu
from graphattn.nn import TransformerConv
from tests import oracle
from tests.test_fuzz import LONG, assert_agrees
from tests.test_structured_attention import draw, own

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
KINDS: dict[str, Graph] = {
    "sparse": SparseGraph.from_edge_index(
        torch.randint(40, (2, 300), generator=torch.Generator().manual_seed(0)), 40
    ),
    "complete": CompleteGraph(70, num_keys=40, causal=True, offset=-3),
    "cliques": CompleteGraph.from_batch(torch.arange(60) % 7),
    "window": WindowGraph(40, (3, 2), dilation=2),
    "wide window": WindowGraph(150, 70),
    "grid": GridGraph((5, 6), (1, None), border="shift"),
}
of_any_kind = pytest.mark.parametrize("graph", KINDS.values(), ids=KINDS)


# Numbers.


@of_any_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_ten_thousand(graph, dtype):
    case = draw(graph, dtype=dtype, scale=1e4 / 3)
    assert (case.operands["query"].abs().amax() * 1e4 / 3) > 5e3
    assert_agrees(graph, case, own(graph))


@of_any_kind
@pytest.mark.parametrize("softcap", [1e-300, 1e-45, 1e-30, 1e-3, 1e30, 3e38])
def test_extreme_soft_caps(graph, softcap):
    """At its lower end every score is 0; at its upper end there is no cap."""
    for dtype in (torch.float32, torch.float64):
        case = draw(graph, dtype=dtype, softcap=max(softcap, torch.finfo(dtype).tiny))
        capped = own(graph)
        assert_agrees(graph, case, capped)


@of_any_kind
def test_denormal_operands(graph):
    case = draw(graph, dtype=torch.float32)
    info = torch.finfo(torch.float32)
    for name in ("query", "value"):
        tiny = case.operands[name] * 1e-40
        assert 0 < tiny.abs().max() < info.smallest_normal
        operands = {**case.operands, name: tiny}
        assert_agrees(graph, replace(case, operands=operands), own(graph))
    out = graph_attention(**operands, graph=graph)
    exact = oracle.attention(
        **{name: x.double() for name, x in operands.items()}, edge_index=case.edge_index
    )[0]
    # Each product of a weight and a value is rounded to a multiple of the smallest number.
    assert exact.abs().max() > 1e4 * info.smallest_normal * info.eps
    assert (out.double() - exact).abs().max() <= 75 * info.smallest_normal * info.eps


@of_any_kind
def test_float16_sums_do_not_overflow(graph):
    """Products of 5e5 and sums of values of 6e4 are far outside float16; the output is not."""
    case = draw(graph, dtype=torch.float16, bias=None)
    operands = {name: x.sign() * 250 for name, x in case.operands.items()}
    operands["value"] = torch.full_like(operands["value"], 60000.0)
    out, lse = graph_attention(**operands, graph=graph, return_lse=True)
    reached = lse > -math.inf
    assert reached.any() and (out[reached] == 60000).all() and (out[~reached] == 0).all()
    assert lse[reached].max() > 1e5 and lse[reached].isfinite().all()


@pytest.mark.parametrize("length", [1, 7, 8, 31, 32, 33, 64, 2047, 2049, 4100])
def test_patterns_of_removed_edges(length):
    """Rows whose first, last, odd, all or all but one edges have a bias of -inf, at the lengths of blocks."""
    edge = torch.arange(length)
    patterns = [edge == 0, edge == length - 1, edge % 2 == 1, edge >= 0, edge != length // 2, edge < 32]
    target = torch.arange(len(patterns)).repeat_interleave(length)
    graph = SparseGraph.from_edge_index(
        torch.stack([edge.repeat(len(patterns)), target]), size=(length, len(patterns))
    )
    case = draw(graph, dtype=torch.float32, bias="EH", dim=3)
    bias = case.operands["bias"].masked_fill(torch.cat(patterns).view(-1, 1), -math.inf)
    assert_agrees(graph, replace(case, operands={**case.operands, "bias": bias}), own(graph))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["sparse", "complete", "window"])
def test_a_row_of_a_million_edges(kind, dtype):
    degree = 10**6
    graph = {
        "sparse": lambda: SparseGraph.from_edge_index(
            torch.stack([torch.arange(degree).flip(0), torch.zeros(degree, dtype=torch.int64)]),
            size=(degree, 1),
        ),
        "complete": lambda: CompleteGraph(1, num_keys=degree),
        "window": lambda: WindowGraph(1, (0, degree), num_keys=degree),
    }[kind]()
    query, key, value = torch.randn(1, 1, 8), torch.randn(degree, 1, 8), torch.rand(degree, 1, 8)
    operands = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    flowing = torch.randn(1, 1, 8).to(dtype)
    out, lse = graph_attention(*operands, graph, return_lse=True)
    grads = torch.autograd.grad(out, operands, flowing)

    q, k, v = (x.detach().double()[:, 0] for x in operands)
    score = k @ q[0] * 8**-0.5
    weights = torch.softmax(score, 0)
    exact = weights @ v
    through = weights * ((v - exact) @ flowing.double()[0, 0])
    wanted = [through @ k * 8**-0.5, torch.outer(through, q[0]) * 8**-0.5]
    wanted.append(torch.outer(weights, flowing.double()[0, 0]))
    eps = 5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert abs(lse.item() - torch.logsumexp(score, 0).item()) < 5e-6 * abs(lse.item())
    assert (out.double()[0, 0] - exact).abs().max() < eps * exact.abs().max()
    # A gradient of float16 that is below its smallest number is lost, the sums are not. That of the query is a small
    # difference of large sums.
    lost = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    terms = (through.abs() @ k.abs()).max() * 8**-0.5
    for ours, x, sums in zip(grads, wanted, (terms, through.abs().max(), 0.0)):
        assert (ours.double().view_as(x) - x).abs().max() < eps * x.abs().max() + lost + 5e-6 * sums


def test_a_key_of_a_million_queries():
    degree = 10**6
    graph = SparseGraph.from_edge_index(
        torch.stack([torch.zeros(degree, dtype=torch.int64), torch.arange(degree)]), size=(1, degree)
    )
    operands = [torch.randn(n, 1, 8, requires_grad=True) for n in (degree, 1, 1)]
    flowing = torch.rand(degree, 1, 8)
    _, _, grad_value = torch.autograd.grad(graph_attention(*operands, graph), operands, flowing)
    exact = flowing.double().sum(0)
    assert ((grad_value[0].double() - exact) / exact).abs().max() < 5e-6


# Derivatives, by differences, over all options.

SMALL: dict[str, Graph] = {
    "sparse": SparseGraph.from_edge_index(torch.tensor([[0, 1, 2, 2, 2], [1, 1, 0, 0, 1]]), 3),
    "complete": CompleteGraph(3, causal=True),
    "cliques": CompleteGraph.from_batch(torch.tensor([0, 1, 0])),
    "window": WindowGraph(3, (1, 0)),
    "dilated": WindowGraph(4, (None, 1), dilation=2),
    "grid": GridGraph((2, 2), (1, 0), border="shift"),
}


@pytest.mark.parametrize(
    "softcap, dropout_p", [(None, 0.0), (0.8, 0.4), *([(None, 0.4), (0.8, 0.0)] if LONG else [])]
)
@pytest.mark.parametrize("extra", [None, "bias", "broadcast bias", "edge features"])
@pytest.mark.parametrize("graph", SMALL.values(), ids=SMALL)
def test_derivatives_by_differences(graph, extra, softcap, dropout_p):
    if extra == "edge features" and not isinstance(graph, SparseGraph):
        pytest.skip("structured graphs have no edge features")

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    operands = {"query": normal(graph.num_queries, 2, 2)}
    operands |= {name: normal(graph.num_keys, 1, 2) for name in ("key", "value")}
    if extra in ("bias", "broadcast bias"):
        layout = (
            graph.edge_shape
            if extra == "bias"
            else (*[1] * (len(graph.edge_shape) - 1), graph.edge_shape[-1])
        )
        operands["bias"] = normal(*layout, 2)
    if extra == "edge features":
        operands |= {"edge_attr": normal(graph.num_edges, 2), "edge_projection": normal(2, 2, 2)}
    reached = torch.zeros(graph.num_queries, dtype=torch.bool).index_fill(0, graph.to_edge_index()[1], True)

    def function(*inputs):
        torch.manual_seed(1)
        named = dict(zip(operands, inputs))
        out, lse = graph_attention(
            **named, graph=graph, softcap=softcap, dropout_p=dropout_p, scale=0.9, return_lse=True
        )
        del named["value"]
        weights = attention_weights(**named, graph=graph, softcap=softcap, scale=0.9)
        return out, lse[reached], weights

    inputs = tuple(operands.values())
    assert gradcheck(function, inputs, fast_mode=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


# Sizes. Nothing here takes the memory that its numbers suggest.


def test_sizes_up_to_the_largest():
    n = 2**31 - 1
    assert CompleteGraph(n).num_edges == n * n
    assert CompleteGraph(n, causal=True).num_edges == n * (n + 1) // 2
    assert CompleteGraph(n, causal=True, offset=-n).num_edges == 0
    assert CompleteGraph(n, causal=True, offset=1 - n).num_edges == 1
    assert CompleteGraph(n, causal=True, offset=n).num_edges == n * n
    assert WindowGraph(n, 1).num_edges == 3 * n - 2
    assert WindowGraph(n, n).num_edges == n * n
    assert WindowGraph(n, (None, 0)).num_edges == n * (n + 1) // 2
    assert WindowGraph(n, n, dilation=n).num_edges == n
    assert WindowGraph(n, n - 1, dilation=n - 1).num_edges == n + 2
    assert GridGraph((46340, 46341), 1).num_edges == (3 * 46340 - 2) * (3 * 46341 - 2)
    assert GridGraph((n,), 1, border="shift").num_edges == 3 * n
    for graph in (CompleteGraph(n), WindowGraph(n, n), GridGraph((n,), n)):
        assert f"{n} keys -> {n} queries" in repr(graph)
        with pytest.raises(ValueError, match=r"number of edges.*below 2\*\*31"):
            graph.to_sparse()


@pytest.mark.parametrize("build", [lambda: CompleteGraph(2**31 - 1), lambda: WindowGraph(2**31 - 1, 200)])
def test_shapes_of_the_largest_graphs(build):
    graph = build().to("meta")
    x = torch.empty(graph.num_queries, 2, 4, device="meta")
    out, lse = graph_attention(x, x, x, graph, return_lse=True)
    assert out.shape == x.shape and lse.shape == x.shape[:-1]


def test_too_many_nodes_or_edges_are_refused_before_they_are_copied():
    one = torch.zeros(1, dtype=torch.int64)
    for build in (
        lambda: SparseGraph.from_csr(torch.tensor([0, 2**31]), one.expand(2**31)),
        lambda: CompleteGraph.from_ptr(torch.tensor([0, 2**31])),
        lambda: SparseGraph.from_edge_index(one.expand(2, 2**31)),
        lambda: SparseGraph.from_edge_index(torch.empty(2, 2**31, dtype=torch.int64, device="meta")),
        lambda: as_graph(
            torch.sparse_coo_tensor(one.expand(2, 2**31), torch.ones(1).expand(2**31), check_invariants=False)
        ),
    ):
        with pytest.raises(ValueError, match=r"2\*\*31"):
            build()


@pytest.mark.parametrize("kind", ["sparse", "window"])
def test_entries_past_two_to_the_31(kind):
    """Keys of 1024 numbers each, with more than 2**31 in all, of which only the last are read."""
    dim, num_keys = 1024, 2**21 + 10
    # Not torch.zeros, which writes: these pages are not there before they are touched.
    key = torch.from_numpy(np.zeros((num_keys, 1, dim), np.float32))
    key[-4:] = torch.randn(4, 1, dim)
    if kind == "sparse":
        last = torch.arange(num_keys - 4, num_keys)
        graph = SparseGraph.from_edge_index(torch.stack([last, last - last[0]]), size=(num_keys, 4))
        rows = [[-4], [-3], [-2], [-1]]
    else:
        graph = WindowGraph(4, 1, num_keys=num_keys, offset=num_keys - 4)
        rows = [[-5, -4, -3], [-4, -3, -2], [-3, -2, -1], [-2, -1]]
    query = torch.randn(4, 1, dim)
    with torch.no_grad():
        out = graph_attention(query, key, key, graph)
    for q, ours, row in zip(query, out, rows):
        seen = key[row, 0].double()
        exact = torch.softmax(seen @ q[0].double() * dim**-0.5, 0) @ seen
        torch.testing.assert_close(ours[0].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("listed", [False, True])
def test_fifty_thousand_tiny_graphs(listed):
    sizes = torch.randint(0, 7, (50_000,))
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    graph = CompleteGraph.from_ptr(ptr)
    assert graph.num_edges == int((sizes**2).sum())
    graph = graph.to_sparse() if listed else graph
    operands = [torch.randn(int(ptr[-1]), 2, 8, requires_grad=True) for _ in range(3)]
    flowing = torch.randn(int(ptr[-1]), 2, 8)
    out = graph_attention(*operands, graph)
    grads = torch.autograd.grad(out, operands, flowing)
    for n in [0, 1, 2, 3, 4, 5, 25_000, *range(49_990, 50_000)]:
        nodes = slice(int(ptr[n]), int(ptr[n + 1]))
        alone = [x[nodes].detach().double().transpose(0, 1).requires_grad_() for x in operands]
        exact = torch.nn.functional.scaled_dot_product_attention(*alone)
        torch.testing.assert_close(out[nodes].double(), exact.transpose(0, 1), rtol=1e-5, atol=1e-5)
        wanted = torch.autograd.grad(exact, alone, flowing[nodes].double().transpose(0, 1))
        for ours, theirs in zip(grads, wanted):
            torch.testing.assert_close(ours[nodes].double(), theirs.transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not LONG, reason="takes 6 GB and minutes: GRAPHATTN_FUZZ")
def test_a_hundred_million_edges():
    num_nodes, num_edges = 2_000_000, 100_000_000
    edge_index = torch.randint(num_nodes, (2, num_edges))
    graph = SparseGraph.from_edge_index(edge_index, num_nodes)
    operands = [torch.randn(num_nodes, 1, 8, requires_grad=True) for _ in range(3)]
    flowing = torch.randn(num_nodes, 1, 8)
    out = graph_attention(*operands, graph)
    grads = torch.autograd.grad(out, operands, flowing)
    query, key, value = (x.detach().double()[:, 0] for x in operands)
    for i in (0, 12345, num_nodes - 1):
        source = edge_index[0, edge_index[1] == i]
        weights = torch.softmax(key[source] @ query[i] * 8**-0.5, 0)
        exact = weights @ value[source]
        torch.testing.assert_close(out[i, 0].double(), exact, rtol=1e-5, atol=1e-5)
        through = weights * ((value[source] - exact) @ flowing[i, 0].double())
        wanted = through @ key[source] * 8**-0.5
        torch.testing.assert_close(grads[0][i, 0].double(), wanted, rtol=1e-4, atol=1e-5)


# A thousand steps.


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def test_a_thousand_steps_on_changing_graphs_leave_nothing():
    """No tensor, no memory, no thread, no built graph and no compiled variant is left over."""
    conv = TransformerConv(8, 8, heads=2, edge_dim=3, dropout=0.1)
    optimizer = torch.optim.SGD(conv.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)

    def steps(number: int) -> None:
        for n in range(number):
            num_nodes, num_edges = torch.randint(20, 200, (2,), generator=generator).tolist()
            edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
            h = conv(torch.randn(num_nodes, 8), edge_index, torch.randn(num_edges, 3)).view(-1, 2, 8)
            graph = (
                WindowGraph(num_nodes, 3),
                CompleteGraph.from_batch(torch.arange(num_nodes) // 13),
                CompleteGraph(num_nodes),
                GridGraph((num_nodes,), 2, border="shift"),
            )[n % 4]
            optimizer.zero_grad(set_to_none=False)
            graph_attention(h, h, h, graph).square().mean().backward()
            optimizer.step()

    def state() -> tuple:
        kernels = [*sparse_cpu._kernels(0, 8), *sparse_cpu._kernels(8, 8), sparse_cpu._edge_kernel]
        variants = [len(kernel.signatures) for kernel in [*kernels, graph_module._counting_sort]]
        return live_tensors(), len(graph_module._built), threading.active_count(), variants

    gc.collect()
    kept = len(graph_module._built)  # by other tests
    steps(200)
    before, resident = state(), psutil.Process().memory_info().rss
    steps(800)
    assert state() == before
    assert before[1] <= kept
    assert psutil.Process().memory_info().rss - resident < 16 * 2**20
