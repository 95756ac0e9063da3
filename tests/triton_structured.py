"""The contract of complete, window and grid graphs for their Triton kernels: run by `tests.test_triton`.

``python -m pytest -p tests.triton_interpreter tests/triton_structured.py``. The graphs are small, as every program
takes some milliseconds; where rows are long, they are in several parts.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.autograd import gradgradcheck

from graphattn import CompleteGraph, GridGraph, WindowGraph, attention_weights, graph_attention
from graphattn.attention import _intervals
from graphattn.kernels import intervals_triton, reference
from graphattn.kernels.intervals import interval_attention
from tests import oracle
from tests.test_structured_attention import assert_agrees, draw, labels, on_edges, own, ragged
from tests.triton_contract import NothingWaits

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:All-NaN slice"),  # the interpreter's maximum
]

GRAPHS = {
    "no nodes": WindowGraph(0, 2),
    "one node": WindowGraph(1, 2),
    "no keys": CompleteGraph(3, num_keys=0),
    "no queries": WindowGraph(0, 1, num_keys=4),
    "no edges": WindowGraph(5, 1, num_keys=5, offset=40),
    "complete": CompleteGraph(70, num_keys=33),
    "causal, first queries empty": CompleteGraph(20, num_keys=9, causal=True, offset=-6),
    "causal cliques of labels": CompleteGraph.from_batch(labels(24, 2), causal=True),
    "window": WindowGraph(100, 4),
    "window of another number of keys": WindowGraph(30, 3, num_keys=21, offset=-9, dilation=2),
    "unbounded, dilated": WindowGraph(40, (1, None), dilation=3, num_keys=50, offset=5),
    "ragged windows": WindowGraph.from_ptr(ragged((0, 3, 20, 0)), (2, 1), dilation=2),
    "ragged windows, unbounded": WindowGraph.from_ptr(ragged((3, 0, 20)), (None, 1)),
    "grid": GridGraph((6, 7), ((None, 0), 1)),
    "grid, shifted": GridGraph((5, 7), (1, (2, 1)), border="shift"),
    "three axes": GridGraph((3, 2, 4), (1, (1, 0), None), border="shift", dilation=2),
}
EVERYTHING = {"heads": 2, "kv_heads": 1, "scale": 0.4, "softcap": 3.0, "removed": 0.2}


def agrees(name: str, **options):
    options = {"dtype": torch.float32, **options}
    assert_agrees(GRAPHS[name], draw(GRAPHS[name], **options), also_listed=False)


PLAIN = ("complete", "ragged windows", "grid, shifted", "three axes")


@pytest.mark.parametrize("name", PLAIN)
def test_graphs(name):
    agrees(name, heads=1)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_with_everything(name):
    agrees(name, bias="1SH", leading=(2,) if name in ("window", "grid") else (), **EVERYTHING)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["window of another number of keys", "grid, shifted"])
def test_dtypes(name, dtype):
    agrees(name, dtype=dtype, bias="QSH", **EVERYTHING)


@pytest.mark.parametrize("bias", ["QSH", "QS1", "Q1H", "1S1", "11H"])
def test_bias_broadcasts(bias):
    agrees("window of another number of keys", bias=bias, leading=(2,), dtype=torch.float64)


@pytest.mark.parametrize("bias", ["QSH", "11H"])
def test_bias_of_cliques(bias):
    agrees("causal cliques of labels", bias=bias, dtype=torch.float64)


def test_bias_that_all_queries_share_is_summed_in_turns(monkeypatch):
    monkeypatch.setattr(intervals_triton, "_FOR_BIAS", 1)
    agrees("window", bias="1SH", leading=(2,))


@pytest.mark.parametrize(
    "heads, kv_heads, dim, value_dim, dtype",
    [
        (1, 1, 1, 1, torch.float64),
        (3, 1, 3, 11, torch.float32),
        (2, 2, 130, 5, torch.float16),
        (1, 1, 20, 300, torch.float32),
        (2, 1, 200, 200, torch.float64),
    ],
)
def test_heads_and_dims(heads, kv_heads, dim, value_dim, dtype):
    options = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "value_dim": value_dim, "dtype": dtype}
    agrees("window of another number of keys", **options)


def test_heads_too_wide_for_a_tile():
    x = torch.randn(4, 1, 513)
    with pytest.raises(NotImplementedError, match=r"up to 512 numbers, got 513.*to_sparse"):
        graph_attention(x, x, x, WindowGraph(4, 1))


@pytest.mark.parametrize("options", [{}, {"bias": "1SH", "removed": 0.1}], ids=["plain", "bias"])
@pytest.mark.parametrize("transposed", [False, True])
def test_long_rows_in_parts(transposed, options):
    graph = (
        CompleteGraph(800, num_keys=2)
        if transposed
        else CompleteGraph(2, num_keys=800, causal=True, offset=798)
    )
    call = intervals_triton._Call(
        *(torch.empty(1, n, 1, 8) for n in (graph.num_queries, graph.num_keys, graph.num_keys)), *_intervals(graph),
        None, None, None, None, None, 1.0, 0.0, 0.0, False,
    )  # fmt: skip
    assert call.plan(not transposed)[1] > 2
    assert_agrees(graph, draw(graph, dtype=torch.float32, heads=1, **options), also_listed=False)


def test_a_row_of_10000_equal_edges():
    graph, value = CompleteGraph(1, num_keys=10_000), torch.full((10_000, 1, 4), 0.1, requires_grad=True)
    out, lse = graph_attention(
        torch.ones(1, 1, 4), torch.full((10_000, 1, 4), 0.3), value, graph, return_lse=True
    )
    torch.testing.assert_close(out, torch.full_like(out, 0.1), rtol=5e-6, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, 0.6 + math.log(10_000)), rtol=1e-6, atol=0)


def test_score_gradients_below_the_range_of_float16():
    """dS is 1e-6 and less here, of which float16 would keep one digit; the gradients are far above."""
    case = draw(GRAPHS["complete"], dtype=torch.float16)
    operands = {"query": case.operands["query"] / 1000, "key": case.operands["key"] * 1000}
    case = replace(case, operands={**case.operands, **operands}, grad_out=case.grad_out / 10_000)
    assert_agrees(GRAPHS["complete"], replace(case, grad_lse=case.grad_lse * 0), also_listed=False)


@pytest.mark.parametrize("name", ["ragged windows", "causal cliques of labels"])
def test_weights_in_the_edge_layout(name):
    """Values and gradients; where no edge is the weight is 0, and what flows in there counts for nothing."""
    graph = GRAPHS[name]
    case = draw(graph, bias="1SH", heads=2, removed=0.1)
    operands = {name: x.requires_grad_() for name, x in case.operands.items() if name != "value"}
    weights = attention_weights(**operands, graph=graph)
    assert weights.shape == (*graph.edge_shape, 2)
    listed = {**operands, "bias": on_edges(graph, operands["bias"], 2)}
    _, _, expected = oracle.attention(**listed, value=operands["key"], edge_index=case.edge_index)
    torch.testing.assert_close(on_edges(graph, weights, 2), expected)
    elsewhere = torch.ones(math.prod(graph.edge_shape), dtype=torch.bool)
    elsewhere[graph.slots()] = False
    assert not weights.view(len(elsewhere), 2)[elsewhere].any()
    flowing = torch.randn(expected.shape, dtype=torch.float64)
    flowing_in = torch.full((len(elsewhere), 2), math.nan, dtype=torch.float64)
    flowing_in[graph.slots()] = flowing
    actual = torch.autograd.grad(weights, tuple(operands.values()), flowing_in.view_as(weights))
    for x, y in zip(actual, torch.autograd.grad(expected, tuple(operands.values()), flowing)):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
@pytest.mark.parametrize(
    "name, dtype", [("grid, shifted", torch.float32), ("ragged windows, unbounded", torch.float16)]
)
def test_dropout_draws_as_on_the_cpu(name, dtype, dropout_p):
    graph = GRAPHS[name]
    case = draw(graph, dtype=dtype, leading=(2,))

    def run(case, operands):
        torch.manual_seed(5)
        return graph_attention(**operands, graph=graph, dropout_p=dropout_p, return_lse=True)

    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, (1,))
    places = math.prod(graph.edge_shape)
    keep = reference.dropout_factors(seed, torch.arange(places), 2, 2, dropout_p)[:, graph.slots()]
    oracle.assert_agrees(run, case, keep)


FLASH = {
    "complete": (CompleteGraph(70, num_keys=33), False),
    "causal": (CompleteGraph(40, causal=True), True),
    "causal, an unused tail of keys": (CompleteGraph(20, num_keys=30, causal=True), True),
    "causal, all keys before the first query": (CompleteGraph(9, num_keys=20, causal=True, offset=19), False),
}


@pytest.fixture
def flash(monkeypatch):
    """Of a GPU that has flash attention: the calls of it, worked out by the one for the CPU."""
    calls = []

    def on_the_cpu(query, key, value, dropout_p, causal, debug, *, scale):
        calls.append((query.shape, key.shape, causal))
        assert dropout_p == 0.0 and not debug
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
        of_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return *of_cpu(query, key, value, 0.0, causal, scale=scale), None, None

    monkeypatch.setattr(intervals_triton, "can_use_flash_attention", lambda _: True)
    monkeypatch.setattr(intervals_triton, "_flash", on_the_cpu)
    return calls


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FLASH)
def test_complete_graphs_go_through_flash_attention(name, dtype, flash):
    """Values, lse and every gradient; grouped heads, leading indices and a scale among them."""
    graph, causal = FLASH[name]
    case = draw(graph, dtype=dtype, heads=4, kv_heads=2, dim=16, value_dim=16, leading=(2,), scale=0.4)
    case = replace(case, grad_lse=torch.zeros_like(case.grad_lse))
    oracle.assert_agrees(own(graph), case)
    assert not flash  # as lse was asked for, which has to be exact

    def without_lse(case, operands):
        out = graph_attention(**operands, graph=graph, **case.settings)
        return out, graph_attention(**operands, graph=graph, **case.settings, return_lse=True)[1]

    oracle.assert_agrees(without_lse, case)
    keys = graph.num_queries if causal else graph.num_keys
    assert flash == [((2, 4, graph.num_queries, 16), (2, 2, keys, 16), causal)]


ELSEWHERE = {
    "float32": (CompleteGraph(20), {"dtype": torch.float32}),
    "a bias": (CompleteGraph(20), {"bias": "QSH"}),
    "a soft cap": (CompleteGraph(20), {"softcap": 2.0}),
    "a scale below 0": (CompleteGraph(20), {"scale": -0.5}),
    "values of another dim": (CompleteGraph(20), {"value_dim": 24}),
    "a dim that is no multiple of 8": (CompleteGraph(20), {"dim": 20, "value_dim": 20}),
    "no keys": (CompleteGraph(3, num_keys=0), {}),
    "no leading index": (CompleteGraph(20), {"leading": (0,)}),
    "causal from the bottom right": (CompleteGraph(12, num_keys=20, causal=True, offset=8), {}),
    "causal, fewer keys": (CompleteGraph(20, num_keys=12, causal=True), {}),
    "cliques": (CompleteGraph.from_ptr(ragged((5, 9))), {}),
    "a window": (WindowGraph(20, 3), {}),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_flash_attention_does_not_do_goes_another_way(name, flash):
    graph, options = ELSEWHERE[name]
    case = draw(graph, **{"dtype": torch.float16, "heads": 2, "dim": 16, "value_dim": 16, **options})
    graph_attention(**case.operands, graph=graph, **case.settings)
    assert not flash


def test_dropout_and_weights_do_not_go_through_flash_attention(flash):
    graph, x = CompleteGraph(20), torch.randn(20, 2, 16).half()
    graph_attention(x, x, x, graph, dropout_p=0.5)
    attention_weights(x, x, graph)
    assert not flash
    graph_attention(x, x, x, graph)
    assert len(flash) == 1


def test_second_derivatives():
    graph = WindowGraph(2, 1, num_keys=3, offset=1)
    case = draw(graph, bias="1SH", heads=1, dim=1)
    operands = tuple(x.requires_grad_() for x in case.operands.values())
    assert gradgradcheck(
        lambda query, key, value, bias: graph_attention(query, key, value, graph, bias=bias, softcap=2.0),
        operands,
        fast_mode=True,
    )


def test_sequences_do_not_see_each_other():
    graph = WindowGraph.from_ptr(ragged((5, 0, 7, 40)), 3)
    x = torch.randn(52, 1, 8)

    def run(x):
        x = x.clone().requires_grad_()
        out = graph_attention(x, x, x, graph)
        return out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))

    clean = run(x)
    x[5:12] = math.nan
    for found, expected in zip(run(x), clean):
        assert found[:5].equal(expected[:5]) and found[12:].equal(expected[12:]) and found[5:12].isnan().all()


@pytest.mark.parametrize(
    "graph",
    [
        WindowGraph(8, 1, num_keys=20, offset=3),
        WindowGraph(12, 1, num_keys=6),
        CompleteGraph(5, num_keys=9, causal=True),
        WindowGraph(2, 1, num_keys=9, offset=4, dilation=3),
    ],
)
def test_nodes_without_edges_may_hold_anything(graph):
    source, target = graph.to_edge_index()
    case = draw(graph, dtype=torch.float32)
    expected = oracle.results(own(graph), case)
    operands = {name: x.clone() for name, x in case.operands.items()}
    idle_keys, idle_queries = torch.ones(graph.num_keys).bool(), torch.ones(graph.num_queries).bool()
    idle_keys[source], idle_queries[target] = False, False
    assert idle_keys.any() or idle_queries.any()
    operands["key"][idle_keys], operands["value"][idle_keys] = math.nan, math.inf
    operands["query"][idle_queries] = math.nan
    for name, x in oracle.results(own(graph), replace(case, operands=operands)).items():
        assert x.equal(expected[name]), name


@pytest.mark.parametrize("name", ["causal cliques of labels", "grid, shifted"])
def test_the_host_never_waits_for_the_device(name):
    """The plan included: what a CUDA graph captures may read nothing back."""
    graph = GRAPHS[name]
    case = draw(graph, bias="1SH", heads=1)
    query, key, value, bias = (x if n == "bias" else x[None] for n, x in case.operands.items())
    inputs = (
        query,
        key,
        value,
        *_intervals(graph),
        None,
        bias,
        None,
        None,
        torch.tensor([1]),
        0.3,
        0.0,
        0.5,
        True,
    )
    with NothingWaits():
        outputs = intervals_triton.forward(*inputs)
        grads = (torch.ones_like(outputs[i]) for i in (0, 1, 4))
        intervals_triton.backward(*grads, *outputs, *inputs)


def test_a_plan_is_made_once_for_each_side_of_a_graph(monkeypatch):
    made, make = [], intervals_triton._make_pass
    monkeypatch.setattr(intervals_triton, "_make_pass", lambda *x: made.append(x[-2:]) or make(*x))
    x, edges = torch.randn(1, 20, 1, 4, requires_grad=True), _intervals(WindowGraph(20, 1))

    def run():
        return interval_attention(x, x, x, *edges, None, None, None, None, None, 0.5, 0.0, 0.0, False)[0]

    for _ in range(2):
        run().sum().backward()
    assert made == [(True, 64), (False, 64)]
    edges[0].add_(0)  # written to: the plan may be another one
    run()
    assert made == [(True, 64), (False, 64), (True, 64)]
