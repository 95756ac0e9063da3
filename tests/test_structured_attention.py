"""The contract of the operator on complete, window and grid graphs: own kernel = listed edges = oracle."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.export import Dim

from graphattn import (
    CompleteGraph,
    Graph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    attention_weights,
    graph_attention,
)
from tests import oracle

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROOT = Path(__file__).parent.parent
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def ragged(sizes) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def labels(num_nodes: int, num_labels: int) -> Tensor:
    return torch.randint(num_labels, (num_nodes,), generator=torch.Generator().manual_seed(0))


SIZES = (0, 3, 1, 0, 40, 8, 33, 0)
GRAPHS: dict[str, Graph] = {
    "no nodes": WindowGraph(0, 2),
    "one node": WindowGraph(1, 2),
    "no keys": CompleteGraph(3, num_keys=0),
    "no queries": WindowGraph(0, 1, num_keys=4),
    "no edges": WindowGraph(5, 1, num_keys=5, offset=40),
    "complete": CompleteGraph(33),
    "rectangle": CompleteGraph(7, num_keys=50),
    "causal": CompleteGraph(40, causal=True),
    "causal, aligned at the end": CompleteGraph(20, num_keys=45, causal=True, offset=25),
    "causal, first queries empty": CompleteGraph(20, num_keys=9, causal=True, offset=-6),
    "cliques": CompleteGraph.from_ptr(ragged(SIZES)),
    "cliques of labels": CompleteGraph.from_batch(labels(70, 9)),
    "causal cliques of labels": CompleteGraph.from_batch(labels(70, 9), causal=True),
    "one long row": CompleteGraph(2, num_keys=4500),
    "window": WindowGraph(100, 4),
    "window larger than the sequence": WindowGraph(9, 30),
    "window of 32": WindowGraph(70, (16, 15)),
    "window of 33": WindowGraph(70, 16),
    "window ahead": WindowGraph(50, (0, 3)),
    "dilated": WindowGraph(60, 3, dilation=4),
    "offset": WindowGraph(30, (2, 1), num_keys=50, offset=12),
    "negative offset": WindowGraph(30, 3, num_keys=21, offset=-9, dilation=2),
    "unbounded": WindowGraph(40, (None, 2)),
    "unbounded, dilated": WindowGraph(40, (1, None), dilation=3, num_keys=50, offset=5),
    "ragged windows": WindowGraph.from_ptr(ragged(SIZES), 2),
    "ragged windows, unbounded": WindowGraph.from_ptr(ragged(SIZES), (None, 1), dilation=2),
    "line": GridGraph((50,), 3, border="shift"),
    "grid": GridGraph((9, 11), 1),
    "grid, shifted": GridGraph((9, 11), 2, border="shift"),
    "grid, window larger than it": GridGraph((3, 20), 4, border="shift"),
    "even kernel": GridGraph((8, 8), (2, 1)),
    "even kernel, shifted": GridGraph((8, 8), ((2, 1), (1, 0)), border="shift"),
    "whole axis": GridGraph((6, 7), (None, 1)),
    "causal axis": GridGraph((6, 7), ((None, 0), 1)),
    "three axes": GridGraph((4, 5, 6), (1, (2, 0), None), border="shift", dilation=2),
    "four axes": GridGraph((3, 2, 3, 4), 1),
}
AWKWARD = [1, 3, 4, 5, 127, 128, 129, 1025]  # around the radius, blocks, and several blocks
KINDS = {
    "complete": lambda n: CompleteGraph(min(n, 150)),
    "window": lambda n: WindowGraph(n, 4),
    "dilated": lambda n: WindowGraph(n, (4, 1), dilation=5),
    "wide window": lambda n: WindowGraph(n, 40),
    "cliques": lambda n: CompleteGraph.from_ptr(ragged([n // 3, 0, n - n // 3])) if n < 200 else None,
    "grid": lambda n: GridGraph((n, 3), (2, 1)),
    "grid, shifted": lambda n: GridGraph((2, n), (1, 2), border="shift"),
}
EVERYTHING = {"heads": 4, "kv_heads": 2, "leading": (2,), "scale": 0.4, "softcap": 3.0, "removed": 0.2}


def draw(graph: Graph, *, bias: str | None = None, removed: float = 0.0, **options) -> oracle.Case:
    """A case on a graph. `bias` says which dimensions of the edge layout and heads are full, e.g. "1SH"."""
    case = oracle.draw_case((graph.to_edge_index(), graph.num_keys, graph.num_queries), **options)
    if bias is None:
        return case
    layout = (*graph.edge_shape, case.operands["query"].shape[-2])
    bias = bias[-len(layout) :]
    shape = [1 if letter == "1" else size for letter, size in zip(bias, layout, strict=True)]
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator).to(case.dtype)
    values.masked_fill_(torch.rand(shape, generator=generator) < removed, -math.inf)
    if "1" not in bias[:-1]:  # a slot without an edge may hold anything
        unused = torch.ones(math.prod(graph.edge_shape), dtype=torch.bool)
        unused[graph.slots()] = False
        values.view(len(unused), shape[-1])[unused] = math.nan
    return replace(case, operands={**case.operands, "bias": values})


def on_edges(graph: Graph, x: Tensor, heads: int) -> Tensor:
    """The entries of the edges in a tensor of the edge layout, in `to_edge_index()` order."""
    return x.expand(*graph.edge_shape, heads).reshape(-1, heads)[graph.slots()]


def own(graph: Graph):
    def operator(case, operands):
        return graph_attention(**operands, graph=graph, **case.settings, return_lse=True)

    return operator


def with_listed_bias(graph: Graph, operator):
    def wrapped(case, operands):
        if "bias" in operands:
            heads = operands["query"].shape[-2]
            operands = {**operands, "bias": on_edges(graph, operands["bias"], heads)}
        return operator(case, operands)

    return wrapped


def assert_agrees(
    graph: Graph, case: oracle.Case, keep: Tensor | None = None, also_listed: bool = True, operators=None
):
    """The graph's own kernel and that of listed edges, or other operators, give the oracle's values and gradients."""
    exactly = with_listed_bias(graph, oracle.oracle(keep=keep))
    plainly = with_listed_bias(graph, oracle.oracle(torch.float32, keep))
    exact = oracle.results(exactly, case.to(torch.float64))
    plain = oracle.results(plainly, case.to(torch.float32) if case.dtype == torch.float64 else case)
    if operators is None:
        operators = [own(graph)]
        if also_listed:
            operators.append(with_listed_bias(graph, own(graph.to_sparse())))
    for operator in operators:
        for name, tensor in oracle.results(operator, case).items():
            dtype = oracle.statistics_dtype(case.dtype) if name == "lse" else case.dtype
            oracle.assert_close_to_oracle(tensor, exact[name], plain[name], dtype, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"bias": "QSH", **EVERYTHING}], ids=["plain", "everything"])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_graphs(graph, options, dtype):
    assert_agrees(graph, draw(graph, dtype=dtype, **options))


@pytest.mark.parametrize(
    "options", [{}, {"bias": "1SH", "softcap": 2.0, "kv_heads": 1}], ids=["plain", "bias"]
)
@pytest.mark.parametrize("size", AWKWARD)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_sizes(kind, size, options):
    graph = kind(size)
    if graph is not None:
        assert_agrees(graph, draw(graph, dtype=torch.float32, seed=1, **options), also_listed=size < 200)


BIASES = ["QSH", "QS1", "Q1H", "Q11", "1SH", "1S1", "11H", "111"]


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize(
    "name",
    ["causal", "window", "offset", "ragged windows", "cliques of labels", "grid, shifted", "whole axis"],
)
def test_bias_broadcasts(name, bias):
    """Its gradient comes back in its own shape."""
    graph = GRAPHS[name]
    assert_agrees(graph, draw(graph, bias=bias, removed=0.1, leading=(2,)), also_listed=False)


@pytest.mark.parametrize("bias", ["QSH", "Q1H", "1SH", "111"])
def test_bias_of_long_rows(bias):
    """Rows of several pieces, some with fewer edges, and more queries than go together."""
    graph = CompleteGraph(40, num_keys=4200, causal=True, offset=4165)
    case = draw(graph, dtype=torch.float32, bias=bias, removed=0.1, heads=1)
    assert_agrees(graph, case, also_listed=False)


OPTIONS = {
    "scale": {"scale": 1.7},
    "negative scale": {"scale": -0.5},
    "softcap": {"softcap": 1.5},
    "softcap, bias": {"softcap": 0.5, "bias": "1SH"},
    "all edges removed": {"bias": "QSH", "removed": 1.0},
    "slots removed": {"bias": "1SH", "removed": 0.6},
    "one key head": {"heads": 8, "kv_heads": 1},
    "dims": {"dim": 3, "value_dim": 11},
    "two leading": {"leading": (2, 3), "bias": "1SH"},
    "empty leading": {"leading": (0,), "bias": "1SH"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["cliques of labels", "window", "grid, shifted"])
def test_options(name, options):
    assert_agrees(GRAPHS[name], draw(GRAPHS[name], dtype=torch.float32, **options), also_listed=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal cliques of labels", "unbounded, dilated", "three axes"])
def test_dtypes(name, dtype):
    case = draw(GRAPHS[name], dtype=dtype, bias="QSH", **EVERYTHING)
    assert_agrees(GRAPHS[name], case, also_listed=False)


@pytest.mark.parametrize("bias", ["QSH", "1S1"])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_weights_in_the_edge_layout(graph, bias):
    """Values and gradients; where no edge is the weight is 0, and what flows in there counts for nothing."""
    case = draw(graph, bias=bias, heads=2, removed=0.1)
    operands = {name: x.requires_grad_() for name, x in case.operands.items() if name != "value"}
    weights = attention_weights(**operands, graph=graph)
    assert weights.shape == (*graph.edge_shape, 2) and weights.dtype == torch.float64
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


@pytest.mark.parametrize(
    "name", ["causal cliques of labels", "window", "offset", "grid, shifted", "three axes"]
)
def test_dropout(name):
    """Which weights it drops shows where values are one-hot; with those, every gradient is the oracle's."""
    graph, dropout_p = GRAPHS[name], 0.3
    case = draw(graph, bias="1SH", heads=2, leading=(2,))
    operands = {
        **case.operands,
        "value": torch.eye(graph.num_keys, dtype=torch.float64)[:, None].expand(2, -1, 2, -1),
    }
    torch.manual_seed(5)
    dropped = graph_attention(**operands, graph=graph, dropout_p=dropout_p)
    source, target = case.edge_index
    keep = dropped[:, target, :, source].transpose(0, 1) / graph_attention(**operands, graph=graph)[
        :, target, :, source
    ].transpose(0, 1)
    kept = keep > 0
    torch.testing.assert_close(keep, kept.double() / (1 - dropout_p))
    assert abs(kept.double().mean() - (1 - dropout_p)) < 4 * math.sqrt(0.21 / kept.numel())
    assert not kept[0].equal(kept[1]) and not kept[..., 0].equal(kept[..., 1])

    def both(operands, exact):
        if exact:
            listed = {**operands, "bias": on_edges(graph, operands["bias"], 2)}
            return oracle.attention(**listed, edge_index=case.edge_index, keep=keep)[0]
        torch.manual_seed(5)
        return graph_attention(**operands, graph=graph, dropout_p=dropout_p)

    found = []
    for exact in (False, True):
        operands = {name: x.detach().clone().requires_grad_() for name, x in case.operands.items()}
        out = both(operands, exact)
        first = torch.autograd.grad(out, tuple(operands.values()), case.grad_out, create_graph=True)
        second = torch.autograd.grad(sum((x * x).sum() for x in first), tuple(operands.values()))
        found.append((out, *first, *second))
    for actual, expected in zip(*found):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "graph",
    [
        CompleteGraph.from_batch(torch.tensor([2, 0, 2, 1, 0])),
        WindowGraph(4, 1, num_keys=5, offset=1, dilation=2),
        GridGraph((2, 3), 1, border="shift"),
    ],
)
def test_second_derivatives(graph):
    case = draw(graph, bias="1SH", heads=2, dim=2)
    operands = tuple(x.requires_grad_() for x in case.operands.values())

    def function(query, key, value, bias):
        out, lse = graph_attention(query, key, value, graph, bias=bias, softcap=2.0, return_lse=True)
        weights = attention_weights(query, key, graph, bias=bias)
        return out, lse.masked_fill(lse == -math.inf, 0.0), weights

    assert gradgradcheck(function, operands, fast_mode=True)


@pytest.mark.parametrize(
    "graph",
    [
        WindowGraph(8, 1, num_keys=20, offset=3),
        WindowGraph(12, 1, num_keys=6),
        CompleteGraph(5, num_keys=9, causal=True),
    ],
)
def test_nodes_without_edges_may_hold_anything(graph):
    source, target = graph.to_edge_index()
    case = draw(graph, heads=2)
    expected = oracle.results(own(graph), case)
    operands = {name: x.clone() for name, x in case.operands.items()}
    idle_keys, idle_queries = torch.ones(graph.num_keys).bool(), torch.ones(graph.num_queries).bool()
    idle_keys[source], idle_queries[target] = False, False
    assert idle_keys.any() or idle_queries.any()
    operands["key"][idle_keys], operands["value"][idle_keys] = math.nan, math.inf
    operands["query"][idle_queries] = math.nan
    actual = oracle.results(own(graph), replace(case, operands=operands))
    for name, x in actual.items():
        assert x.equal(expected[name]), name


def test_sequences_do_not_see_each_other():
    graph = WindowGraph.from_ptr(ragged((5, 0, 7, 40)), 3)
    x = torch.randn(52, 2, 8)
    clean = graph_attention(x, x, x, graph)
    x[5:12] = math.nan
    out = graph_attention(x, x, x, graph)
    assert out[:5].equal(clean[:5]) and out[12:].equal(clean[12:]) and out[5:12].isnan().all()


@pytest.mark.parametrize("bias", ["QSH", "Q1H", "1SH", "111"])
@pytest.mark.parametrize(
    "graph", [WindowGraph(3000, 8), GridGraph((40, 50), 2), CompleteGraph(40, num_keys=5000)]
)
def test_same_bits_for_any_number_of_threads(graph, bias):
    case, threads = draw(graph, dtype=torch.float32, bias=bias, heads=4), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            found.append(oracle.results(own(graph), case))
    finally:
        torch.set_num_threads(threads)
    for results in found[1:]:
        for name, x in results.items():
            assert x.nan_to_num().equal(found[0][name].nan_to_num()), name


def test_edges_are_not_listed(monkeypatch):
    def refuse(*_):
        raise AssertionError("the edges were listed")

    for kind in (CompleteGraph, WindowGraph, GridGraph):
        monkeypatch.setattr(kind, "to_edge_index", refuse)
    monkeypatch.setattr(SparseGraph, "from_edge_index", refuse)
    for graph in (
        WindowGraph(30, 2),
        GridGraph((5, 6), 1),
        CompleteGraph.from_ptr(ragged((4, 9))),
        CompleteGraph(9),
    ):
        x = torch.randn(graph.num_queries, 2, 8, requires_grad=True)
        graph_attention(x, x, x, graph).sum().backward()
        attention_weights(x, x, graph).sum().backward()


def step(operands: dict[str, Tensor], graph: Graph):
    out, lse = graph_attention(**operands, graph=graph, softcap=5.0, return_lse=True)
    without_value = {name: x for name, x in operands.items() if name != "value"}
    return out, lse, attention_weights(**without_value, graph=graph, softcap=5.0)


def drawn_operands(graph: Graph) -> dict[str, Tensor]:
    operands = {name: torch.randn(graph.num_queries, 2, 8) for name in ("query", "key", "value")}
    operands["bias"] = torch.randn(*(1 for _ in graph.edge_shape[1:]), graph.edge_shape[-1], 2)
    return {name: x.requires_grad_() for name, x in operands.items()}


TWO_SIZES = {
    "complete": (CompleteGraph(20), CompleteGraph(31)),
    "cliques": (CompleteGraph.from_ptr(ragged((4, 9))), CompleteGraph.from_ptr(ragged((4, 3, 11)))),
    "cliques of labels": (CompleteGraph.from_batch(labels(20, 4)), CompleteGraph.from_batch(labels(31, 5))),
    "window": (WindowGraph(20, 2), WindowGraph(31, 2)),
    "unbounded": (WindowGraph(20, (None, 0)), WindowGraph(31, (None, 0))),
    "ragged windows": (WindowGraph.from_ptr(ragged((4, 9)), 2), WindowGraph.from_ptr(ragged((4, 3, 11)), 2)),
    "grid": (GridGraph((5, 6), 1, border="shift"),),
}


@pytest.mark.parametrize("graphs", TWO_SIZES.values(), ids=TWO_SIZES)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compile(graphs):
    """No graph break, no recompilation for another size, the same numbers and gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for graph in graphs:
        operands, found = drawn_operands(graph), []
        for function in (compiled, step):
            outputs = function(operands, graph)
            loss = sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in outputs)
            found.append((*outputs, *torch.autograd.grad(loss, tuple(operands.values()))))
        for actual, expected in zip(*found):
            torch.testing.assert_close(actual, expected)


class Module(torch.nn.Module):
    def forward(self, query, key, value, bias, graph):
        return graph_attention(query, key, value, graph, bias=bias)


@pytest.mark.parametrize(
    "graph",
    [CompleteGraph.from_batch(labels(20, 4)), WindowGraph(20, 2), GridGraph((4, 5), 1, border="shift")],
)
def test_export(graph):
    operands = {name: x.detach() for name, x in drawn_operands(graph).items()}
    program = torch.export.export(Module(), (*operands.values(), graph))
    torch.testing.assert_close(
        program.module()(*operands.values(), graph), graph_attention(**operands, graph=graph)
    )


def test_export_with_dynamic_heads_and_leading():
    graph, leading = WindowGraph(20, 2), Dim("leading", min=2, max=64)
    x = torch.randn(3, 20, 2, 8)
    module = _OnGraph(graph)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: leading},))
    for number in (2, 5):
        x = torch.randn(number, 20, 2, 8)
        torch.testing.assert_close(program.module()(x), module(x))


class _OnGraph(torch.nn.Module):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def forward(self, x):
        return graph_attention(x, x, x, self.graph)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of opcheck itself
def test_opcheck():
    from graphattn.attention import _intervals

    graph = GridGraph((4, 5), 1)
    x = torch.randn(2, 20, 2, 8, requires_grad=True)
    bias = torch.randn(1, 9, 2, requires_grad=True)
    arguments = (x, x, x, *_intervals(graph), None, bias, None, None, None, 0.3, 0.0, 0.0, False)
    torch.library.opcheck(torch.ops.graphattn.interval_attention.default, arguments)


def test_vmap_and_autocast():
    graph = WindowGraph(20, 2)
    x = torch.randn(3, 20, 2, 8)
    mapped = torch.vmap(lambda x: graph_attention(x, x, x, graph))(x)
    torch.testing.assert_close(mapped, graph_attention(x, x, x, graph))
    with pytest.raises(NotImplementedError, match="query, key and value alone"):
        torch.vmap(lambda bias: graph_attention(x, x, x, graph, bias=bias))(torch.randn(3, 20, 5, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = graph_attention(x, x, x, graph)
    half = x.bfloat16()
    assert out.dtype == torch.bfloat16 and out.equal(graph_attention(half, half, half, graph))


def test_no_forward_mode():
    graph, x = WindowGraph(5, 1), torch.randn(5, 1, 4)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda x: graph_attention(x, x, x, graph), (x,), (x,))


PEAK = """
import sys, torch
from graphattn import CompleteGraph, GridGraph, WindowGraph, graph_attention

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

def step(graph, slots):
    x = [torch.randn(graph.num_queries, 4, 16, requires_grad=True) for _ in range(3)]
    bias = torch.randn(1, slots, 4, requires_grad=True)
    flowing = torch.randn(graph.num_queries, 4, 16)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    out = graph_attention(*x, graph, bias=bias)
    torch.autograd.grad(out, (*x, bias), flowing)
    return status("VmHWM") - before

step(WindowGraph(1000, 64), 129)  # compiles the kernels
print(step(eval(sys.argv[1]), int(sys.argv[2])))
"""


@pytest.mark.field_report("B04")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    "graph, slots", [("WindowGraph(60_000, 64)", 129), ("GridGraph((250, 250), 5)", 121)]
)
def test_peak_of_forward_and_backward(graph, slots):
    """Outputs, gradients and what grows with nodes; not even an integer for each edge."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, graph, str(slots)], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    nodes = 60_000 if slots == 129 else 62_500
    allowed = nodes * (1.2 * 4 * 4 * 64 + 3 * 4 * 8 + 20 * 8) + 6 * 2**20
    assert int(done.stdout) <= allowed, f"{int(done.stdout) / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f}"


@pytest.mark.parametrize(
    "graph, shape, layout",
    [
        (WindowGraph(6, 1), (6, 4, 2), r"\[6, 3, 2\]"),
        (WindowGraph(6, 1), (3, 2), r"\[6, 3, 2\]"),
        (GridGraph((2, 3), 1), (2, 9, 2), r"\[6, 9, 2\]"),
        (CompleteGraph(6), (6, 6, 3), r"\[6, 6, 2\]"),
        (CompleteGraph.from_ptr(ragged((2, 4))), (6, 6, 2), r"\[20, 2\]"),
    ],
)
def test_bias_that_does_not_fit_the_layout(graph, shape, layout):
    x = torch.randn(6, 2, 8)
    with pytest.raises(ValueError, match=rf"`bias` must have shape {layout}.*edge layout"):
        graph_attention(x, x, x, graph, bias=torch.randn(shape))


def test_edge_features_need_listed_edges():
    graph, x = WindowGraph(6, 1), torch.randn(6, 2, 8)
    features = {"edge_attr": torch.randn(graph.num_edges, 3), "edge_projection": torch.randn(2, 3, 8)}
    with pytest.raises(ValueError, match=r"graph\.to_sparse\(\)"):
        graph_attention(x, x, x, graph, **features)
    assert graph_attention(x, x, x, graph.to_sparse(), **features).shape == (6, 2, 8)


@pytest.mark.parametrize("lengths", [[0, 3, 10, 30], [0, 100, 300]], ids=["rows", "blocks"])
def test_a_graph_built_in_inference_mode_serves_training(lengths):
    with torch.inference_mode():
        ptr = torch.tensor(lengths)
        labels = torch.arange(lengths[-1]) % 3
        graphs = [
            CompleteGraph.from_ptr(ptr),
            CompleteGraph.from_batch(labels),
            WindowGraph.from_ptr(ptr, 70),
            SparseGraph.from_edge_index(torch.stack([labels, labels]), lengths[-1]),
        ]
    x = torch.randn(lengths[-1], 1, 4, requires_grad=True)
    for graph in graphs:
        out = graph_attention(x, x, x, graph)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert torch.isfinite(grad).all() and grad.any()
