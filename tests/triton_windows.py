"""The contract of the Triton kernels on windows of rows that share their far ends: run by `tests.test_triton`.

``python -m pytest -p tests.triton_interpreter tests/triton_windows.py``. Every window pays here, where a test does not
say which, so that the graphs can be small and awkward.
"""

import math

import pytest
import torch

from graphattn import SparseGraph, graph_attention
from graphattn.kernels import sparse_triton, windows_triton
from tests import oracle
from tests.test_attention import (  # noqa: F401
    disjoint,
    drawn,
    edges,
    operator,
    sparse_graph,
    test_nan_in_a_used_node_reaches_its_queries_and_no_other,
    transposed,
)
from tests.triton_contract import NothingWaits, arguments, hubs

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "every_window"),
    pytest.mark.filterwarnings("ignore:All-NaN slice"),  # the interpreter's maximum
]
HALVES = [torch.float16, torch.bfloat16]
KERNELS = ("_window_forward_kernel", "_window_query_kernel", "_window_key_kernel")


@pytest.fixture
def every_window(monkeypatch):
    monkeypatch.setattr(windows_triton, "_LEAST", dict.fromkeys((*HALVES, torch.float32), 0.0))
    monkeypatch.setattr(windows_triton, "_DEGREE", 0)


@pytest.fixture
def launched(monkeypatch):
    """The kernels on windows, in the order of their launches."""
    names, over = [], windows_triton._Call.over

    def counted(self, kernel, *arguments, **named):
        names.append(kernel)
        return over(self, kernel, *arguments, **named)

    monkeypatch.setattr(windows_triton._Call, "over", counted)
    return names


SMALL = drawn(17, 23, 200)
GRAPHS = {
    "no nodes": (edges(), 0, 0),
    "no edges": (edges(), 5, 5),
    "no keys": (edges(), 0, 3),
    "one edge": (edges((2, 0)), 4, 3),
    "parallel edges": (edges(*[(1, 0)] * 40, *[(0, 1), (2, 1)] * 3), 3, 3),
    "small": SMALL,
    "two windows": drawn(30, 70, 300),
    "disjoint": disjoint(),
    "complete": (torch.cartesian_prod(torch.arange(33), torch.arange(33)).t(), 33, 33),
    "hub queries": hubs(),
    "hub keys": transposed(hubs()),
}
EVERYTHING = {"heads": 4, "kv_heads": 2, "leading": (2,), "scale": 0.4, "softcap": 3.0}


@pytest.mark.parametrize("options", [{"heads": 1}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name, options, launched):
    case = oracle.draw_case(GRAPHS[name], dtype=torch.float32, **options)
    oracle.assert_agrees(operator, case)
    kernels = [getattr(windows_triton, kernel) for kernel in KERNELS]
    assert launched == (kernels if case.edge_index.numel() else [])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["small", "parallel edges"])
def test_dtypes(name, dtype):
    oracle.assert_agrees(operator, oracle.draw_case(GRAPHS[name], dtype=dtype, **EVERYTHING))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "heads, kv_heads, dim, value_dim",
    [(1, 1, 1, 1), (3, 1, 3, 11), (3, 3, 20, 8), (2, 1, 70, 128), (1, 1, 16, 100)],
)
def test_heads_and_dims(heads, kv_heads, dim, value_dim, dtype):
    options = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "value_dim": value_dim}
    oracle.assert_agrees(operator, oracle.draw_case(SMALL, dtype=dtype, **options))


@pytest.mark.parametrize(
    "name, piece, dtype",
    [("hub queries", 64, torch.float16), ("hub keys", 64, torch.float32), ("two windows", 16, torch.float32)],
)
def test_windows_in_pieces(name, piece, dtype, monkeypatch):
    monkeypatch.setattr(windows_triton, "_piece", lambda _: piece)
    case = oracle.draw_case(GRAPHS[name], dtype=dtype, heads=2, kv_heads=1, leading=(2,))
    oracle.assert_agrees(operator, case)
    graph = sparse_graph(case)
    for pointer, far, size in (
        (graph.rowptr, graph.col, case.num_keys),
        (graph.colptr, graph.row, case.num_queries),
    ):
        assert windows_triton._windows(pointer, far, size, 0.0).plan.slots > 64


def dense_and_sparse() -> tuple[torch.Tensor, int, int]:
    """127 queries with the same 40 keys, 70 pairs, and a hub of 600 keys, in whose window no column has many edges."""
    block = torch.cartesian_prod(torch.arange(40), torch.arange(127)).t()
    pairs = torch.stack([torch.arange(40, 110), torch.arange(127, 197)])
    hub = torch.stack([torch.arange(110, 710), torch.full((600,), 197)])
    edge_index = torch.cat([block, pairs, hub], 1)
    order = torch.randperm(edge_index.size(1), generator=torch.Generator().manual_seed(0))
    return edge_index[:, order], 710, 198


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_of_other_windows_are_left_to_the_other_kernels(dtype, monkeypatch):
    """On both sides some, one of them long: every row comes from one kernel or the other."""
    monkeypatch.setattr(windows_triton, "_LEAST", {dtype: 6.0})
    case = oracle.draw_case(dense_and_sparse(), dtype=dtype, heads=1)
    graph = sparse_graph(case)
    by_query = windows_triton._windows(graph.rowptr, graph.col, 710, 6.0)
    by_key = windows_triton._windows(graph.colptr, graph.row, 198, 6.0)
    assert by_query.rows.flatten().tolist() == list(range(63, 127)) and len(by_query.rest.long) == 1
    assert by_key.rows[0].tolist() == list(range(64)) and 0 < (by_key.rows >= 110).sum() < 600
    oracle.assert_agrees(operator, case)


@pytest.mark.parametrize("side", ["query", "key"])
def test_windows_on_one_side_alone(side, launched, monkeypatch):
    """The others have each far end once for every edge, about: 4 rows with the same 80 far ends."""
    monkeypatch.setattr(windows_triton, "_LEAST", {torch.float32: 20.0})
    graph = (torch.cartesian_prod(torch.arange(4), torch.arange(80)).t(), 4, 80)
    oracle.assert_agrees(
        operator, oracle.draw_case(graph if side == "query" else transposed(graph), dtype=torch.float32)
    )
    of_query = [windows_triton._window_forward_kernel, windows_triton._window_query_kernel]
    assert launched == (of_query if side == "query" else [windows_triton._window_key_kernel])


def test_what_windows_do_not_do_goes_another_way(launched):
    """And agrees with the oracle: forward, and backward where the forward pass of another kernel left lse."""
    for options in (
        {"bias": ("E", "H"), "removed": 0.2},
        {"edge_dim": 3},
        {"dtype": torch.float64},
        {"dim": 130},
        {"leading": (0,)},
    ):
        oracle.assert_agrees(operator, oracle.draw_case(SMALL, **{"dtype": torch.float32, **options}))
    inputs = arguments(oracle.draw_case(SMALL, dtype=torch.float32), 0.5, True)
    sparse_triton.backward(*[torch.zeros(0)] * 3, *windows_triton.forward(*inputs), *inputs)
    assert not launched


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_infinite_and_nan_numbers_reach_the_rows_that_are_joined(name, number, dtype):
    """And no others, forward and backward, to the bit: what the products with other rows would make of them."""
    case = oracle.draw_case(drawn(30, 40, 100), dtype=dtype, heads=2, kv_heads=1)

    def both():
        return oracle.results(operator, case), oracle.results(oracle.oracle(), case.to(torch.float64))

    clean, exactly_clean = both()
    case.operands[name][5, :, 2] = number
    if name == "value":
        case.operands[name][7, 0, 3] = -number
    dirty, exact = both()
    for result, right in exact.items():
        found, lost = dirty[result], ~right.isfinite()
        assert not found[lost].isfinite().any(), result
        if name == "value" and result == "out":
            torch.testing.assert_close(found[lost].double(), right[lost], equal_nan=True)
        same = (right == exactly_clean[result]).flatten(1).all(1)
        assert same.any() and (not same.all() or (name == "value" and result in ("lse", "gradient of value")))
        assert found[same].equal(clean[result][same]), result


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_that_flow_in_may_hold_nan(dtype):
    case = oracle.draw_case(drawn(30, 40, 100), dtype=dtype, heads=2)
    clean = oracle.results(operator, case)
    case.grad_out[5] = math.nan
    dirty = oracle.results(operator, case)
    keys = torch.zeros(30, dtype=torch.bool)
    keys[case.edge_index[0, case.edge_index[1] == 5]] = True
    assert 0 < keys.sum() < 30
    for name, own in (("query", torch.arange(40) == 5), ("key", keys), ("value", keys)):
        name = f"gradient of {name}"
        assert dirty[name][own].isnan().all() and dirty[name][~own].equal(clean[name][~own])


def test_nodes_without_edges_may_hold_anything():
    edge_index = drawn(10, 12, 60)[0]
    results = []
    for number in (0.0, math.nan):
        case = oracle.draw_case((edge_index, 15, 16), dtype=torch.float16)
        case.operands["key"][10:], case.operands["value"][10:], case.operands["query"][12:] = (
            number,
            number,
            number,
        )
        results.append(oracle.results(operator, case))
    for name, expected in results[0].items():
        assert results[1][name].equal(expected), name
    assert (results[1]["out"][12:] == 0).all() and (results[1]["lse"][12:] == -math.inf).all()


@pytest.mark.parametrize("side", ["query", "key"])
def test_a_row_of_3000_equal_edges(side):
    hub, others = torch.zeros(3_000, dtype=torch.int64), torch.arange(3_000)
    pair, size = ((others, hub), (3_000, 1)) if side == "query" else ((hub, others), (1, 3_000))
    query, key = torch.ones(size[1], 1, 4), torch.full((size[0], 1, 4), 0.3)
    value = torch.full((size[0], 1, 4), 0.1, requires_grad=True)
    graph = SparseGraph.from_edge_index(torch.stack(pair), size=size)
    out, lse = graph_attention(query, key, value, graph, return_lse=True)
    torch.testing.assert_close(out, torch.full_like(out, 0.1), rtol=1e-6, atol=0)
    score = 0.6 + math.log(3_000 if side == "query" else 1)
    torch.testing.assert_close(lse, torch.full_like(lse, score), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(out, value, torch.full_like(out, 0.1))
    torch.testing.assert_close(
        gradient, torch.full_like(gradient, 0.1 * size[1] / size[0]), rtol=1e-6, atol=0
    )


def test_windows_are_found_once_for_each_side_of_a_graph(monkeypatch):
    """After that, the host does not wait for the device; written to, the graph may have others."""
    made, make = [], windows_triton._make_windows
    monkeypatch.setattr(windows_triton, "_make_windows", lambda *x: made.append(x[2]) or make(*x))
    inputs = arguments(oracle.draw_case(SMALL, dtype=torch.float32), 0.0, False)
    inputs[12] = None

    def run():
        outputs = windows_triton.forward(*inputs)
        grads = (torch.ones_like(outputs[i]) for i in (0, 1, 4))
        return windows_triton.backward(*grads, *outputs, *inputs)

    first = run()
    assert made == [17, 23]
    with NothingWaits():
        second = run()
    assert made == [17, 23] and all(x.equal(y) for x, y in zip(first, second))
    inputs[4].add_(0)
    run()
    assert made == [17, 23, 17]
