"""The contract of `graph_attention` and `attention_weights` on listed edges, against the float64 oracle."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck

from graphattn import SparseGraph, attention_weights, graph_attention
from tests import oracle

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PRECISE = [torch.float32, torch.float64]


def sparse_graph(case: oracle.Case) -> SparseGraph:
    return SparseGraph.from_edge_index(case.edge_index, size=(case.num_keys, case.num_queries))


def operator(case: oracle.Case, operands: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What is tested."""
    return graph_attention(**operands, graph=sparse_graph(case), **case.settings, return_lse=True)


def edges(*pairs: tuple[int, int]) -> Tensor:
    """An edge_index from (key, query) pairs."""
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t().contiguous()


def drawn(num_keys: int, num_queries: int, num_edges: int) -> tuple[Tensor, int, int]:
    """Edges drawn with replacement: parallel edges, self-loops and unused nodes come with them."""
    generator = torch.Generator().manual_seed(num_edges)
    source = torch.randint(num_keys, (num_edges,), generator=generator)
    target = torch.randint(num_queries, (num_edges,), generator=generator)
    return torch.stack((source, target)), num_keys, num_queries


def transposed(graph: tuple[Tensor, int, int]) -> tuple[Tensor, int, int]:
    edge_index, num_keys, num_queries = graph
    return edge_index.flip(0), num_queries, num_keys


def staircase() -> tuple[Tensor, int, int]:
    """Query i has i edges, i = 0..70, so that every remainder of every block length occurs; shuffled."""
    target = torch.repeat_interleave(torch.arange(71), torch.arange(71))
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(71, target.shape, generator=generator)
    return torch.stack((source, target))[:, torch.randperm(len(target), generator=generator)], 71, 71


def hubs() -> tuple[Tensor, int, int]:
    """Queries with 9001, 2049 and 2048 edges among short ones, shuffled."""
    target = torch.cat((torch.repeat_interleave(torch.tensor([9001, 2049, 2048])), torch.arange(300) % 97))
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(400, target.shape, generator=generator)
    return torch.stack((source, target))[:, torch.randperm(len(target), generator=generator)], 400, 100


def disjoint() -> tuple[Tensor, int, int]:
    """Cliques of 5, 0, 1, 12 and 3 nodes, one after the other, and two nodes without edges."""
    pairs, start = [], 0
    for size in (5, 0, 1, 12, 3):
        pairs += [(start + j, start + i) for i in range(size) for j in range(size)]
        start += size
    return edges(*pairs), start + 2, start + 2


NONE = edges()
GRAPHS = {
    "no nodes": (NONE, 0, 0),
    "no edges": (NONE, 5, 5),
    "no keys": (NONE, 0, 3),
    "no queries": (NONE, 3, 0),
    "one node": (edges((0, 0)), 1, 1),
    "one edge": (edges((2, 0)), 4, 3),
    "self-loops": (torch.arange(6).expand(2, 6), 6, 6),
    "parallel edges": (edges(*[(1, 0)] * 40, *[(0, 1), (2, 1)] * 3), 3, 3),
    "63 nodes": drawn(63, 63, 190),
    "100 nodes": drawn(100, 100, 700),
    "many keys": drawn(200, 7, 301),
    "many queries": drawn(7, 200, 301),
    "disjoint": disjoint(),
    "complete": (torch.cartesian_prod(torch.arange(33), torch.arange(33)).t(), 33, 33),
    "query degrees 0 to 70": staircase(),
    "key degrees 0 to 70": transposed(staircase()),
    "hub queries": hubs(),
    "hub keys": transposed(hubs()),
}
EVERYTHING = {
    "heads": 4,
    "kv_heads": 2,
    "leading": (2,),
    "edge_dim": 3,
    "scale": 0.4,
    "softcap": 3.0,
    "bias": ("E", "H"),
    "removed": 0.2,
}
OPTIONS = {
    "bias": {"bias": ("E", "H")},
    "bias per head": {"bias": ("1", "H")},
    "bias per edge": {"bias": ("E", "1")},
    "one bias": {"bias": ("1", "1")},
    "some edges removed": {"bias": ("E", "H"), "removed": 0.5},
    "some edges removed for all heads": {"bias": ("E", "1"), "removed": 0.7},
    "all edges removed": {"bias": ("E", "H"), "removed": 1.0},
    "some heads removed": {"bias": ("1", "H"), "removed": 0.5, "heads": 8},
    "edge features": {"edge_dim": 16},
    "one edge feature": {"edge_dim": 1},
    "edge features of width 5, bias": {"edge_dim": 5, "bias": ("E", "H"), "dim": 20},
    "scale": {"scale": 1.7},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.5},
    "softcap": {"softcap": 1.5},
    "softcap, bias": {"softcap": 0.5, "bias": ("E", "H"), "removed": 0.1},
    "grouped heads": {"heads": 6, "kv_heads": 2},
    "one key head": {"heads": 8, "kv_heads": 1},
    "grouped heads, edge features": {"heads": 6, "kv_heads": 3, "edge_dim": 4},
    "leading": {"leading": (2,)},
    "two leading": {"leading": (2, 3), "bias": ("E", "H"), "edge_dim": 2},
    "empty leading": {"leading": (0,), "bias": ("E", "H")},
    "everything": EVERYTHING,
}
DIMS = [
    *[(1, 1), (3, 3), (8, 8), (16, 16), (20, 20), (32, 32), (64, 64), (128, 128), (130, 130)],
    *[(8, 20), (64, 16), (16, 130), (1, 7), (32, 8)],
]


@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_graphs(graph, options, dtype):
    oracle.assert_agrees(operator, oracle.draw_case(graph, dtype=dtype, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, dtype):
    oracle.assert_agrees(operator, oracle.draw_case(GRAPHS["100 nodes"], dtype=dtype, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, value_dim", DIMS)
def test_dims(dim, value_dim, dtype):
    heads = 1 if dim > 64 else 3
    case = oracle.draw_case(GRAPHS["63 nodes"], dtype=dtype, heads=heads, dim=dim, value_dim=value_dim)
    oracle.assert_agrees(operator, case)


@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("heads, kv_heads", [(7, 7), (8, 8), (9, 9), (16, 16), (16, 8), (24, 2)])
@pytest.mark.parametrize("dim, edge_dim", [(4, None), (8, None), (8, 8), (12, 5), (16, None), (24, 16)])
def test_heads(heads, kv_heads, dim, edge_dim, dtype):
    """Kernels may take heads and dims in eights: here are numbers on both sides of that."""
    case = oracle.draw_case(
        GRAPHS["63 nodes"], dtype=dtype, heads=heads, kv_heads=kv_heads, dim=dim, edge_dim=edge_dim
    )
    oracle.assert_agrees(operator, case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["hub queries", "hub keys"])
def test_hubs_of_wide_heads(name, dtype):
    """Enough work to be divided among threads, with hubs that have to be divided too."""
    oracle.assert_agrees(
        operator, oracle.draw_case(GRAPHS[name], dtype=dtype, heads=4, dim=32, edge_dim=8, bias=("E", "H"))
    )


def test_without_lse_the_output_is_the_same():
    case = oracle.draw_case(GRAPHS["100 nodes"], dtype=torch.float32)
    out = graph_attention(**case.operands, graph=sparse_graph(case))
    assert torch.equal(out, operator(case, case.operands)[0])


def test_operands_may_have_any_strides():
    case = oracle.draw_case(GRAPHS["100 nodes"], heads=3, dim=5, bias=("E", "H"), edge_dim=4, leading=(2,))

    def strided(case, operands):
        turned = {name: x.transpose(-1, -2).contiguous().transpose(-1, -2) for name, x in operands.items()}
        return operator(case, turned)

    def expanded(case, operands):
        twice = {name: torch.stack((x, x), -1)[..., 0] for name, x in operands.items()}
        return operator(case, twice)

    oracle.assert_agrees(strided, case)
    oracle.assert_agrees(expanded, case)


def test_operands_may_be_one_tensor():
    x = torch.randn(100, 2, 8, dtype=torch.float64, requires_grad=True)
    edge_index = GRAPHS["100 nodes"][0]
    (actual,) = torch.autograd.grad(
        graph_attention(x, x, x, SparseGraph.from_edge_index(edge_index, 100)).square().sum(), x
    )
    (exact,) = torch.autograd.grad(oracle.attention(x, x, x, edge_index)[0].square().sum(), x)
    torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


def test_only_the_gradients_that_are_asked_for():
    case = oracle.draw_case(GRAPHS["100 nodes"], bias=("E", "H"), edge_dim=3)
    exact = oracle.results(oracle.oracle(), case)
    for name in case.operands:
        operands = {n: x.clone().requires_grad_(n == name) for n, x in case.operands.items()}
        out, lse = operator(case, operands)
        loss = (out * case.grad_out).sum() + (lse * case.grad_lse).sum()
        (gradient,) = torch.autograd.grad(loss, operands[name])
        torch.testing.assert_close(gradient, exact[f"gradient of {name}"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", [0, 1], ids=["out", "lse"])
def test_gradient_through_one_of_the_two_outputs(which):
    case = oracle.draw_case(GRAPHS["100 nodes"])
    gradients = []
    for run in (operator, oracle.oracle()):
        operands = {name: x.clone().requires_grad_() for name, x in case.operands.items()}
        output, flowing = run(case, operands)[which], (case.grad_out, case.grad_lse)[which]
        gradients.append(
            torch.autograd.grad(output, operands.values(), flowing, allow_unused=True, materialize_grads=True)
        )
    for actual, exact in zip(*gradients):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


# Worked examples.


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).view(-1, 1, 1).requires_grad_()


@pytest.mark.field_report("B29")
def test_parallel_edges_count_with_their_multiplicity():
    edge_index = edges((0, 1), (0, 1), (2, 1))
    query, key, value = column(0, 1, 0), column(math.log(2), 0, 0), column(10, 0, 0)
    graph = SparseGraph.from_edge_index(edge_index, 3)
    out = graph_attention(query, key, value, graph)
    weights = attention_weights(query, key, graph)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([0.0, 8.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(weights[:, 0], torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64))


@pytest.mark.field_report("B23")
def test_an_edge_goes_from_key_to_query():
    value = column(5, 7)
    out = graph_attention(value, value, value, SparseGraph.from_edge_index(edges((0, 1)), 2))
    assert out.flatten().tolist() == [0, 5]


@pytest.mark.field_report("B07")
@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize(
    "keys, expected",
    [((1000, 0), (1, 0)), ((-1000, -1000), (0.5, 0.5)), ((-1e4, 1e4), (0, 1)), ((-1e4,), (1,))],
)
def test_large_scores(keys, expected, dtype):
    """No overflow, and no filler for the maximum of a row that could be larger than its scores."""
    graph = SparseGraph.from_edge_index(edges(*[(j, 0) for j in range(len(keys))]), size=(len(keys), 2))
    query = torch.ones(2, 1, 1, dtype=dtype, requires_grad=True)
    key, value = (
        torch.tensor(x, dtype=dtype).view(-1, 1, 1).requires_grad_() for x in (keys, range(1, len(keys) + 1))
    )
    out, lse = graph_attention(query, key, value, graph, return_lse=True)
    weights = attention_weights(query, key, graph)
    eps = torch.finfo(dtype).eps
    expected = torch.tensor(expected, dtype=dtype)
    torch.testing.assert_close(weights.flatten(), expected, rtol=2 * eps, atol=0)
    assert out[0].item() == sum(w * (j + 1) for j, w in enumerate(expected))
    assert lse[0].item() == pytest.approx(max(keys) + (math.log(2) if keys[0] == keys[-1] != -1e4 else 0))
    gradients = torch.autograd.grad((out.sum(), lse[0].sum(), weights.square().sum()), (query, key, value))
    for gradient in gradients:
        assert gradient.isfinite().all()
    torch.testing.assert_close(gradients[2].flatten(), expected, rtol=2 * eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_large_scores(dtype):
    """Scores of 8 million that differ by 0, 1, 2, ... are exact in float32, and so are their softmax's inputs."""
    torch.manual_seed(0)
    num_keys, heads = 50, 8
    query = torch.zeros(3, heads, 16)
    key, value = torch.zeros(num_keys, heads, 16), torch.randn(num_keys, heads, 16)
    query[:, :, 0], key[:, :, 0] = 4096.0, 2048.0
    query[:, :, 1], key[:, :, 1] = 1.0, torch.randint(-3, 4, (num_keys, heads)).float()
    edge_index = torch.stack([torch.arange(num_keys), torch.arange(num_keys).clamp(max=40) // 40])
    graph = SparseGraph.from_edge_index(edge_index, size=(num_keys, 3))
    grad, bias = torch.randn(3, heads, 16), torch.zeros(num_keys, heads)

    exact = [x.double().requires_grad_() for x in (query, key, value, bias)]
    scores = (exact[0][edge_index[1]] * exact[1]).sum(-1) + exact[3]
    weights = torch.cat([scores[:40].softmax(0), scores[40:].softmax(0)])
    out = torch.zeros(3, heads, 16, dtype=torch.float64)
    out = out.index_add(0, edge_index[1], weights[..., None] * exact[2])
    exact = torch.autograd.grad(out, exact, grad.double())
    inputs = [x.to(dtype).requires_grad_() for x in (query, key, value, bias)]
    out = graph_attention(*inputs[:3], graph, bias=inputs[3], scale=1.0)
    for name, mine, right in zip(
        ("query", "key", "value", "bias"), torch.autograd.grad(out, inputs, grad.to(dtype)), exact
    ):
        # 40 products of weights and keys of 4096 are summed
        bound = 64 * torch.finfo(dtype).eps * max(1.0, right.abs().max().item())
        bound *= 4096 if name in ("query", "key") else 1
        assert (mine - right).abs().max() <= bound, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("side", ["query", "key"])
def test_a_row_of_200000_equal_edges(side, dtype):
    """Sums over a hub are blocked: adding 0.1 one by one in float32 is wrong by 1e-3 here."""
    num_edges = 200_000
    hub, others = torch.zeros(num_edges, dtype=torch.int64), torch.arange(num_edges)
    if side == "query":
        edge_index, size = torch.stack((others, hub)), (num_edges, 1)
    else:
        edge_index, size = torch.stack((hub, others)), (1, num_edges)
    query, key = torch.ones(size[1], 1, 4, dtype=dtype), torch.full((size[0], 1, 4), 0.3, dtype=dtype)
    value = torch.full((size[0], 1, 4), 0.1, dtype=dtype).requires_grad_()
    graph = SparseGraph.from_edge_index(edge_index, size=size)
    out, lse = graph_attention(query, key, value, graph, return_lse=True)
    tolerance = 5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    exact = torch.full_like(out, value[0, 0, 0].item())
    torch.testing.assert_close(out, exact, rtol=tolerance, atol=0)
    score = 2 * key[0, 0, 0].item()
    degree = num_edges if side == "query" else 1
    torch.testing.assert_close(lse, torch.full_like(lse, score + math.log(degree)), rtol=5e-6, atol=0)
    (gradient,) = torch.autograd.grad(out, value, torch.full_like(out, 0.1))
    total = torch.full_like(out, 0.1)[0, 0, 0].item() * size[1] / size[0]
    torch.testing.assert_close(gradient, torch.full_like(gradient, total), rtol=tolerance, atol=0)


# Infinities and NaN.


def test_a_query_whose_every_score_is_minus_infinity_is_empty():
    case = oracle.draw_case(GRAPHS["100 nodes"], bias=("E", "H"))
    removed = case.edge_index[1] == 7
    case.operands["bias"][removed] = -math.inf
    actual = oracle.results(operator, case)
    assert (actual["out"][7] == 0).all() and (actual["lse"][7] == -math.inf).all()
    assert (actual["gradient of query"][7] == 0).all()
    assert (actual["gradient of bias"][removed] == 0).all()
    oracle.assert_agrees(operator, case)
    weights = attention_weights(
        case.operands["query"], case.operands["key"], sparse_graph(case), bias=case.operands["bias"]
    )
    assert (weights[removed] == 0).all() and weights.isfinite().all()


@pytest.mark.field_report("B13")
def test_a_head_that_is_removed_leaves_the_others():
    case = oracle.draw_case(GRAPHS["100 nodes"], heads=4, bias=("1", "H"))
    case.operands["bias"][0, 2] = -math.inf
    graph = sparse_graph(case)
    out = graph_attention(**case.operands, graph=graph)
    weights = attention_weights(
        case.operands["query"], case.operands["key"], graph, bias=case.operands["bias"]
    )
    assert (out[:, 2] == 0).all() and (weights[:, 2] == 0).all()
    totals = torch.zeros(100, 4, dtype=torch.float64).index_add(0, case.edge_index[1], weights)
    torch.testing.assert_close(totals[:, [0, 1, 3]], torch.ones(100, 3, dtype=torch.float64))
    oracle.assert_agrees(operator, case)


def with_unused_nodes() -> oracle.Case:
    """Keys 50..99 and queries 60..99 have no edge; every option is on."""
    edge_index = drawn(50, 60, 300)[0]
    return oracle.draw_case((edge_index, 100, 100), **EVERYTHING)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_unused_nodes_touches_nobody(dtype):
    clean = with_unused_nodes().to(dtype)
    expected = oracle.results(operator, clean)
    dirty = with_unused_nodes().to(dtype)
    dirty.operands["key"][..., 50:, :, :] = math.nan
    dirty.operands["value"][..., 50:, :, :] = math.nan
    dirty.operands["query"][..., 60:, :, :] = math.nan
    actual = oracle.results(operator, dirty)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_nan_in_unused_nodes_touches_nobody_in_second_derivatives():
    def second(case):
        operands = {name: x.clone().requires_grad_() for name, x in case.operands.items()}
        out, lse = operator(case, operands)
        inputs = tuple(operands.values())
        first = torch.autograd.grad((out, lse), inputs, (case.grad_out, case.grad_lse), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    dirty = with_unused_nodes()
    dirty.operands["key"][..., 50:, :, :] = math.nan
    dirty.operands["value"][..., 50:, :, :] = math.nan
    dirty.operands["query"][..., 60:, :, :] = math.nan
    for actual, expected in zip(second(dirty), second(with_unused_nodes())):
        assert expected.isfinite().all()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nan_in_a_used_node_reaches_its_queries_and_no_other(name):
    case = oracle.draw_case(GRAPHS["63 nodes"], dtype=torch.float32)
    source, target = case.edge_index
    reached = torch.zeros(63, dtype=torch.bool)
    reached[5 if name == "query" else target[source == 5]] = True
    clean, _ = operator(case, case.operands)
    case.operands[name][5] = math.nan
    dirty, _ = operator(case, case.operands)
    assert 0 < reached.sum() < 63
    assert dirty[reached].isnan().all()
    assert torch.equal(dirty[~reached], clean[~reached])


# Dropout.


def dropped(case: oracle.Case, operands: dict[str, Tensor], dropout_p: float, seed: int):
    torch.manual_seed(seed)
    return graph_attention(
        **operands, graph=sparse_graph(case), **case.settings, dropout_p=dropout_p, return_lse=True
    )


def revealing_case(num_keys: int = 12, num_queries: int = 9, **options) -> oracle.Case:
    """A case whose first `num_keys` output columns are the weights: there the values are one-hot per key."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(num_keys, num_queries, generator=generator) < 0.6
    graph = (chosen.nonzero().t(), num_keys, num_queries)
    case = oracle.draw_case(graph, dim=num_keys + 3, **options)
    case.operands["value"][..., :num_keys] = torch.eye(num_keys).unsqueeze(1)
    if "edge_projection" in case.operands:
        case.operands["edge_projection"][..., :num_keys] = 0
    return case


def kept_edges(case: oracle.Case, dropout_p: float, seed: int) -> Tensor:
    """The factor 0 or 1 / (1 - p) that each edge was multiplied with, read off a revealing case's output."""
    source, target = case.edge_index
    out, _ = dropped(case, case.operands, dropout_p, seed)
    by_head = out.double()[..., target, :, :].movedim(-2, 0)
    revealed = by_head[..., torch.arange(len(source)), source].movedim(0, -1)
    exact = case.to(torch.float64)
    weights = oracle.attention(**exact.operands, edge_index=case.edge_index, **case.settings)[2]
    factor = revealed / weights
    keep = (factor.nan_to_num(0) > 0.5).double() / (1 - dropout_p)
    error = (factor - keep)[weights > 0].abs().max().item()
    assert error < 4 * torch.finfo(case.dtype).eps / (1 - dropout_p) + 1e-5, (
        "a weight is neither dropped nor kept"
    )
    return keep


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.25, 0.5, 0.9])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 4, "kv_heads": 2, "leading": (2,)},
        {"edge_dim": 3, "bias": ("E", "H"), "softcap": 2.0},
    ],
    ids=["plain", "grouped, leading", "edge features, bias, softcap"],
)
def test_dropout_gradients_follow_the_draw(options, dropout_p, dtype):
    case = revealing_case(dtype=dtype, **options)
    keep = kept_edges(case, dropout_p, seed=3)
    assert 0 < (keep > 0).double().mean() < 1
    oracle.assert_agrees(lambda case, operands: dropped(case, operands, dropout_p, 3), case, keep)


def test_dropout_draws_are_independent_and_have_the_right_rate():
    """Between edges (in both orders), heads and leading indices; 5 standard deviations are allowed."""
    num_queries, dropout_p = 4000, 0.3
    pairs = torch.cartesian_prod(torch.arange(num_queries), torch.arange(5)).flip(1).t()
    case = oracle.draw_case((pairs, 5, num_queries), heads=4, dim=5, leading=(2,), dtype=torch.float32)
    case.operands["value"][...] = torch.eye(5).unsqueeze(1)
    keep = kept_edges(case, dropout_p, seed=0)
    drawn = (keep > 0).double().movedim(-1, 1).reshape(8, num_queries * 5)
    deviation = math.sqrt(dropout_p * (1 - dropout_p))
    assert (drawn.mean(1) - (1 - dropout_p)).abs().max() < 5 * deviation / math.sqrt(drawn.shape[1])
    centred = (drawn - (1 - dropout_p)) / deviation
    limit = 5 / math.sqrt(drawn.shape[1])
    correlation = centred @ centred.t() / drawn.shape[1]
    assert (correlation - correlation.diag().diag()).abs().max() < limit
    for lag in (1, 2, 4, 5, 8, 10, num_queries):
        assert (centred * centred.roll(lag, 1)).mean(1).abs().max() < limit


def test_parallel_edges_are_dropped_one_by_one():
    num_edges = 4000
    graph = SparseGraph.from_edge_index(torch.zeros(2, num_edges, dtype=torch.int64), 1)
    x = torch.ones(1, 8, 3)
    share = graph_attention(x, x, x, graph, dropout_p=0.5)[0, :, 0]
    assert (share - 1).abs().max() < 5 / math.sqrt(num_edges)
    assert share.unique().numel() > 1


def test_dropout_keeps_the_mean():
    case = oracle.draw_case(GRAPHS["63 nodes"], dtype=torch.float64, bias=("E", "H"), edge_dim=2)
    graph = sparse_graph(case)
    exact = graph_attention(**case.operands, graph=graph)
    outputs = torch.stack([graph_attention(**case.operands, graph=graph, dropout_p=0.5) for _ in range(300)])
    deviation = outputs.std(0) / math.sqrt(300)
    assert ((outputs.mean(0) - exact).abs() <= 6 * deviation + 1e-12).all()


def test_dropout_is_reproducible_by_the_seed():
    case = oracle.draw_case(GRAPHS["100 nodes"], dtype=torch.float32, edge_dim=2)
    first, _ = dropped(case, case.operands, 0.5, seed=1)
    second, _ = graph_attention(**case.operands, graph=sparse_graph(case), dropout_p=0.5, return_lse=True)
    assert not torch.equal(first, second), "the second call must draw anew"
    assert torch.equal(dropped(case, case.operands, 0.5, seed=1)[0], first)
    assert not torch.equal(dropped(case, case.operands, 0.5, seed=2)[0], first)


@pytest.mark.field_report("B103")
def test_dropout_of_nothing_draws_nothing():
    case = oracle.draw_case(GRAPHS["100 nodes"])
    state = torch.get_rng_state()
    for dropout_p in (0, 0.0):
        out = graph_attention(**case.operands, graph=sparse_graph(case), dropout_p=dropout_p)
        assert torch.equal(out, operator(case, case.operands)[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.field_report("B103")
def test_dropout_of_almost_nothing():
    case = oracle.draw_case(GRAPHS["100 nodes"])
    out = graph_attention(**case.operands, graph=sparse_graph(case), dropout_p=1e-9)
    torch.testing.assert_close(out, operator(case, case.operands)[0], rtol=1e-8, atol=1e-8)


@pytest.mark.field_report("B103")
@pytest.mark.parametrize("dtype", PRECISE)
def test_dropout_of_everything(dtype):
    case = oracle.draw_case(GRAPHS["100 nodes"], dtype=dtype, **EVERYTHING)
    keep = torch.zeros(2, case.edge_index.shape[1], 4, dtype=torch.float64)
    oracle.assert_agrees(lambda case, operands: dropped(case, operands, 1.0, 0), case, keep)
    assert (dropped(case, case.operands, 1, 0)[0] == 0).all()


@pytest.mark.field_report("B16")
def test_dropout_is_always_finite():
    case = oracle.draw_case(GRAPHS["63 nodes"], dtype=torch.float32)
    for seed in range(50):
        actual = oracle.results(lambda case, operands: dropped(case, operands, 0.99, seed), case)  # noqa: B023
        del actual["lse"]
        assert all(tensor.isfinite().all() for tensor in actual.values())


def test_dropout_leaves_the_lse_alone():
    case = oracle.draw_case(GRAPHS["100 nodes"], dtype=torch.float32, **EVERYTHING)
    assert torch.equal(dropped(case, case.operands, 0.7, 0)[1], operator(case, case.operands)[1])


# Weights.


def weights_of(case: oracle.Case, operands: dict[str, Tensor]) -> Tensor:
    without_value = {name: x for name, x in operands.items() if name != "value"}
    return attention_weights(**without_value, graph=sparse_graph(case), **case.settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize(
    "name", ["no nodes", "no edges", "parallel edges", "100 nodes", "many queries", "hub queries"]
)
def test_weights(name, options, dtype):
    """In the caller's edge order, before dropout, differentiable."""
    case = oracle.draw_case(GRAPHS[name], dtype=dtype, **options)
    named = {n: x for n, x in case.operands.items() if n != "value"}

    def with_gradients(weights_from, case):
        operands = {n: case.operands[n].clone().requires_grad_() for n in named}
        weights = weights_from(case, operands)
        flowing = torch.linspace(-1, 1, weights.numel()).view_as(weights).to(weights.dtype)
        return [weights.detach(), *torch.autograd.grad(weights, tuple(operands.values()), flowing)]

    def exact(case, operands, precision=torch.float64):
        return oracle.attention(
            **operands,
            value=operands["key"],
            edge_index=case.edge_index,
            **case.settings,
            precision=precision,
        )[2]

    def plain(case, operands):
        return exact(case, operands, torch.float32)

    wanted = with_gradients(exact, case.to(torch.float64))
    rounded = with_gradients(plain, case.to(torch.float32) if dtype == torch.float64 else case)
    actual = with_gradients(weights_of, case)
    for what, a, e, p in zip(["weights", *named], actual, wanted, rounded):
        expected_dtype = oracle.statistics_dtype(dtype) if what == "weights" else dtype
        oracle.assert_close_to_oracle(a, e, p, expected_dtype, what)


@pytest.mark.parametrize("heads", [1, 7, 8, 16])
@pytest.mark.parametrize("dim", [3, 8])
def test_gradients_through_weights_of_many_heads(heads, dim):
    """Weights have values of no width, which a kernel for eight heads at a time must not read."""
    case = oracle.draw_case(GRAPHS["100 nodes"], dtype=torch.float32, heads=heads, dim=dim)
    names = ("query", "key")
    flowing = torch.randn(case.edge_index.shape[1], heads)

    def gradients(case, weights_of):
        operands = {name: case.operands[name].detach().clone().requires_grad_() for name in names}
        return torch.autograd.grad(weights_of(operands), tuple(operands.values()), flowing.to(case.dtype))

    exact = gradients(
        case.to(torch.float64),
        lambda x: oracle.attention(**x, value=x["key"], edge_index=case.edge_index)[2],
    )
    actual = gradients(case, lambda x: attention_weights(**x, graph=sparse_graph(case)))
    for ours, wanted in zip(actual, exact):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-6)
    out = graph_attention(
        *(case.operands[name].requires_grad_() for name in names),
        torch.ones_like(case.operands["key"][..., :0]),
        sparse_graph(case),
    )
    assert out.shape == (case.num_queries, heads, 0)
    for x in torch.autograd.grad(out.sum(), [case.operands[name] for name in names]):
        assert (x == 0).all()


def test_weights_sum_to_one_per_query_and_head():
    case = oracle.draw_case(GRAPHS["query degrees 0 to 70"], dtype=torch.float32, heads=3, leading=(2,))
    weights = weights_of(case, case.operands)
    assert weights.shape == (2, case.edge_index.shape[1], 3)
    totals = torch.zeros(2, 71, 3).index_add(1, case.edge_index[1], weights)
    assert (totals[:, 0] == 0).all()
    torch.testing.assert_close(totals[:, 1:], torch.ones(2, 70, 3))


def test_weights_explain_the_output():
    """Summed over the edges of each query, weight times value is the output: alignment in one line."""
    case = oracle.draw_case(GRAPHS["100 nodes"])
    source, target = case.edge_index
    messages = weights_of(case, case.operands).unsqueeze(-1) * case.operands["value"][source]
    out = torch.zeros(100, 2, 8, dtype=torch.float64).index_add(0, target, messages)
    torch.testing.assert_close(out, operator(case, case.operands)[0], rtol=1e-12, atol=1e-12)


# Second derivatives.

SECOND = {
    "plain": {},
    "bias": {"bias": ("E", "H"), "removed": 0.3},
    "bias per head": {"bias": ("1", "H")},
    "edge features": {"edge_dim": 2},
    "softcap": {"softcap": 0.8},
    "grouped heads, leading": {"heads": 2, "kv_heads": 1, "leading": (2,)},
    "another value dim": {"value_dim": 3},
}
SECOND_GRAPH = (edges((1, 0), (1, 0), (2, 0), (2, 2), (0, 2), (0, 1)), 4, 4)


@pytest.mark.parametrize(
    "name, dropout_p", [*((name, 0.0) for name in SECOND), ("bias", 0.5), ("edge features", 0.5)]
)
def test_second_derivatives(name, dropout_p):
    case = oracle.draw_case(SECOND_GRAPH, dim=2, **SECOND[name])
    names, graph = list(case.operands), sparse_graph(case)
    removed = case.operands.get("bias", torch.zeros(())) == -math.inf

    def differentiable(*tensors):
        operands = dict(zip(names, tensors))
        if "bias" in operands:
            operands["bias"] = operands["bias"].masked_fill(removed, -math.inf)
        torch.manual_seed(5)
        out, lse = graph_attention(
            **operands, graph=graph, **case.settings, dropout_p=dropout_p, return_lse=True
        )
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    inputs = [x.masked_fill(x == -math.inf, 0.0).requires_grad_() for x in case.operands.values()]
    assert gradgradcheck(differentiable, inputs)


@pytest.mark.parametrize(
    "options", [{}, {"bias": ("E", "H"), "edge_dim": 2, "softcap": 0.8}], ids=["plain", "all"]
)
def test_second_derivatives_of_weights(options):
    case = oracle.draw_case(SECOND_GRAPH, dim=2, **options)
    names, graph = [name for name in case.operands if name != "value"], sparse_graph(case)

    def differentiable(*tensors):
        return attention_weights(**dict(zip(names, tensors)), graph=graph, **case.settings)

    assert gradgradcheck(differentiable, [case.operands[name].requires_grad_() for name in names])


def test_third_derivatives():
    """Of a loss that is not linear in the output, against those of the same attention on a dense matrix."""
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    graph = SparseGraph.from_mask(mask)
    x = torch.randn(3, 1, 4, dtype=torch.float64)
    weight = torch.randn(3, 1, 4, dtype=torch.float64)

    def dense(q):
        scores = (q[:, 0] @ x[:, 0].T * 0.5).masked_fill(~mask, -math.inf)
        return (scores.softmax(1) @ x[:, 0].cos()).unsqueeze(1)

    def third(attend):
        q = x.clone().requires_grad_()
        derivative = (attend(q).pow(3) * weight).sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(derivative, q, create_graph=True)
            derivative = (gradient * weight).sum()
        return gradient

    actual = third(lambda q: graph_attention(q, x, x.cos(), graph))
    torch.testing.assert_close(actual, third(dense), rtol=1e-9, atol=1e-9)


def test_second_derivatives_through_a_larger_graph():
    """A gradient penalty equals the oracle's, on a graph with hubs that the first derivative divides."""

    def penalty(run, case):
        operands = {name: x.clone().requires_grad_() for name, x in case.operands.items()}
        out, lse = run(case, operands)
        inputs = tuple(operands.values())
        first = torch.autograd.grad((out, lse), inputs, (case.grad_out, case.grad_lse), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    case = oracle.draw_case(GRAPHS["100 nodes"], bias=("E", "H"), edge_dim=3, softcap=2.0)
    for actual, exact in zip(penalty(operator, case), penalty(oracle.oracle(), case)):
        torch.testing.assert_close(actual, exact, rtol=1e-10, atol=1e-10)


# Bad input: what must hold in the caller's names, and what came.


def bad(**changes):
    """Operands for 4 keys, 3 queries, 5 edges, 2 heads of 8, with some of them changed."""
    operands = {"query": torch.randn(3, 2, 8), "key": torch.randn(4, 2, 8), "value": torch.randn(4, 2, 8)}
    return {**operands, **changes}


FIVE = SparseGraph.from_edge_index(edges((0, 0), (1, 0), (3, 2), (3, 2), (2, 1)), size=(4, 3))
SHAPES = {
    "query of other nodes": (bad(query=torch.randn(4, 2, 8)), "query", r"\[4, 2, 8\]"),
    "query without heads": (bad(query=torch.randn(3, 8)), "query", r"\[3, 8\]"),
    "key of other nodes": (bad(key=torch.randn(3, 2, 8)), "key", r"\[3, 2, 8\]"),
    "key of another dim": (bad(key=torch.randn(4, 2, 7)), "key", r"\[4, 2, 7\]"),
    "key heads do not divide": (bad(key=torch.randn(4, 3, 8), value=torch.randn(4, 3, 8)), "key", "3"),
    "no key heads": (bad(key=torch.randn(4, 0, 8), value=torch.randn(4, 0, 8)), "key", "0"),
    "value of other nodes": (bad(value=torch.randn(3, 2, 8)), "value", r"\[3, 2, 8\]"),
    "value of other heads": (bad(value=torch.randn(4, 1, 8)), "value", r"as `key`, got \[4, 1, 8\]"),
    "other leading dims": (bad(key=torch.randn(2, 4, 2, 8)), "key", r"\[2, 4, 2, 8\]"),
    "bias without heads": (bad(bias=torch.randn(5)), "bias", r"\[5\]"),
    "bias of other edges": (bad(bias=torch.randn(4, 2)), "bias", r"\[4, 2\]"),
    "bias of other heads": (bad(bias=torch.randn(5, 3)), "bias", r"\[5, 3\]"),
    "bias with leading dims": (bad(bias=torch.randn(1, 5, 2)), "bias", r"\[1, 5, 2\]"),
    "edge_attr alone": (bad(edge_attr=torch.randn(5, 3)), "edge_attr", "edge_projection"),
    "edge_projection alone": (bad(edge_projection=torch.randn(2, 3, 8)), "edge_attr", "edge_projection"),
    "edge_attr of other edges": (
        bad(edge_attr=torch.randn(4, 3), edge_projection=torch.randn(2, 3, 8)),
        "edge_attr",
        r"\[4, 3\]",
    ),
    "edge_attr of one dim": (
        bad(edge_attr=torch.randn(5), edge_projection=torch.randn(2, 1, 8)),
        "edge_attr",
        r"\[5\]",
    ),
    "edge_projection of another width": (
        bad(edge_attr=torch.randn(5, 3), edge_projection=torch.randn(2, 4, 8)),
        "edge_projection",
        r"\[2, 4, 8\]",
    ),
    "edge_projection of other heads": (
        bad(edge_attr=torch.randn(5, 3), edge_projection=torch.randn(1, 3, 8)),
        "edge_projection",
        r"\[1, 3, 8\]",
    ),
    "edge features need value dim = key dim": (
        bad(value=torch.randn(4, 2, 6), edge_attr=torch.randn(5, 3), edge_projection=torch.randn(2, 3, 8)),
        "value",
        "6",
    ),
    "softcap 0": (bad(softcap=0.0), "softcap", "0"),
    "softcap below 0": (bad(softcap=-1.0), "softcap", "-1"),
    "softcap that float32 lacks": (bad(softcap=1e300), "softcap", "1e.300"),
    "scale that float32 lacks": (bad(scale=-1e39), "scale", "-1e.39"),
    "dropout below 0": (bad(dropout_p=-0.1), "dropout_p", "-0.1"),
    "dropout above 1": (bad(dropout_p=1.5), "dropout_p", "1.5"),
    "dropout NaN": (bad(dropout_p=math.nan), "dropout_p", "nan"),
}


@pytest.mark.parametrize("arguments, name, came", SHAPES.values(), ids=SHAPES)
def test_wrong_shapes_and_ranges(arguments, name, came):
    with pytest.raises(ValueError, match=f"(?s)(?=.*{name})(?=.*{came})"):
        graph_attention(**arguments, graph=FIVE)
    if name not in ("value", "dropout_p"):
        without = {n: x for n, x in arguments.items() if n not in ("value", "dropout_p")}
        with pytest.raises(ValueError, match=f"(?s)(?=.*{name})(?=.*{came})"):
            attention_weights(**without, graph=FIVE)


FEATURES = {
    "edge_attr": torch.randn(5, 3),
    "edge_projection": torch.randn(2, 3, 8),
    "bias": torch.randn(5, 2),
}


@pytest.mark.field_report("B22")
@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "edge_attr", "edge_projection"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_mixed_dtypes(name, dtype):
    operands = bad(**FEATURES)
    operands[name] = operands[name].to(dtype)
    with pytest.raises(TypeError, match=rf"(?s)(?=.*{name})(?=.*{dtype})(?=.*torch.float32)"):
        graph_attention(**operands, graph=FIVE)
    if name != "value":
        del operands["value"]
        with pytest.raises(TypeError, match=rf"(?s)(?=.*{name})(?=.*{dtype})(?=.*torch.float32)"):
            attention_weights(**operands, graph=FIVE)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_dtypes_that_are_not_floating(dtype):
    operands = {name: x.to(dtype) for name, x in bad().items()}
    with pytest.raises(TypeError, match=rf"(?s)(?=.*query)(?=.*{dtype})"):
        graph_attention(**operands, graph=FIVE)


def test_a_mask_is_not_a_bias():
    with pytest.raises(TypeError, match=r"`bias`.*-inf.*SparseGraph.from_mask"):
        graph_attention(**bad(bias=torch.ones(5, 2, dtype=torch.bool)), graph=FIVE)


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "edge_attr", "edge_projection"])
def test_sparse_operands(name):
    operands = bad(**FEATURES)
    operands[name] = operands[name].to_sparse()
    with pytest.raises(TypeError, match=f"`{name}` must be dense, got torch.sparse_coo"):
        graph_attention(**operands, graph=FIVE)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_numbers_of_any_kind(number):
    operands = bad()
    for option in ("scale", "softcap"):
        assert torch.equal(
            graph_attention(**operands, graph=FIVE, **{option: number}),
            graph_attention(**operands, graph=FIVE, **{option: 0.5}),
        )


@pytest.mark.parametrize("number", [True, "0.5", torch.tensor(0.5), 1j])
@pytest.mark.parametrize("option", ["scale", "softcap", "dropout_p"])
def test_what_is_not_a_number(option, number):
    with pytest.raises(TypeError, match=f"`{option}` must be a number, got {type(number).__name__}"):
        graph_attention(**bad(), graph=FIVE, **{option: number})


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "edge_attr", "edge_projection"])
def test_mixed_devices(name):
    operands = bad(**FEATURES)
    operands[name] = operands[name].to("meta")
    with pytest.raises(ValueError, match=rf"(?s)(?=.*{name})(?=.*meta)(?=.*cpu)"):
        graph_attention(**operands, graph=FIVE)


def test_a_graph_on_another_device():
    with pytest.raises(ValueError, match=r"(?s)(?=.*graph)(?=.*meta)(?=.*cpu)"):
        graph_attention(**bad(), graph=FIVE.to("meta"))


@pytest.mark.parametrize(
    "graph", [FIVE.to_edge_index(), None, [[0], [1]]], ids=["edge_index", "None", "list"]
)
def test_what_is_not_a_graph(graph):
    with pytest.raises(TypeError, match=rf"(?s)(?=.*graph)(?=.*{type(graph).__name__})"):
        graph_attention(**bad(), graph=graph)
    with pytest.raises(TypeError, match=rf"(?s)(?=.*graph)(?=.*{type(graph).__name__})"):
        attention_weights(torch.randn(3, 2, 8), torch.randn(4, 2, 8), graph)


@pytest.mark.parametrize("node", [9, -1, 4])
def test_node_ids_out_of_range_are_found_at_the_call(node):
    with pytest.raises(IndexError, match=rf"(?s)(?=.*\[0, 3\]|.*\[0, 4\))(?=.*{node})"):
        SparseGraph.from_edge_index(edges((0, 1), (node, 2)), 4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_forward_mode_is_refused():
    case = oracle.draw_case(GRAPHS["63 nodes"])
    query, key, value = case.operands.values()
    graph = sparse_graph(case)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(NotImplementedError):
            graph_attention(dual, key, value, graph)
        with pytest.raises(NotImplementedError):
            attention_weights(dual, key, graph)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_functional_gradients_are_refused():
    case = oracle.draw_case(GRAPHS["63 nodes"])
    query, key, value = case.operands.values()
    graph = sparse_graph(case)
    with pytest.raises(NotImplementedError):
        torch.func.grad(lambda query: graph_attention(query, key, value, graph).sum())(query)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda query: graph_attention(query, key, value, graph), (query,), (query,))


@pytest.mark.parametrize("leading", [(), (3,)])
def test_edge_features_without_a_gradient_leave_the_others_as_they_are(leading):
    """The gradient of edge features is formed only where it is asked for: of the first and the second order."""
    graph = SparseGraph.from_edge_index(torch.randint(30, (2, 200)), num_nodes=30)
    nodes = [torch.randn(*leading, 30, 4, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    projection = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    features, flow = (
        torch.randn(200, 5, dtype=torch.float64),
        torch.randn(*leading, 30, 4, 6, dtype=torch.float64),
    )

    def derivatives(features):
        out = graph_attention(*nodes, graph, edge_attr=features, edge_projection=projection)
        wanted = [*nodes, projection]
        first = torch.autograd.grad(out, wanted, flow, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), wanted)
        return first, second

    for without, with_it in zip(derivatives(features), derivatives(features.clone().requires_grad_())):
        for few, all_ in zip(without, with_it):
            torch.testing.assert_close(few, all_, rtol=1e-12, atol=1e-12)
