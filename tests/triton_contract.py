"""The contract of the sparse operator for its Triton kernels: run in the interpreter by `tests.test_triton`.

``python -m pytest -p tests.triton_interpreter tests/triton_contract.py``. The graphs are small, as every program takes
some milliseconds, but their hubs have more edges than a piece of a row.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from graphattn import SparseGraph, attention_weights, graph_attention
from graphattn.kernels import reference, sparse_cpu, sparse_triton
from tests import oracle
from tests.test_attention import (  # noqa: F401
    EVERYTHING,
    OPTIONS,
    drawn,
    edges,
    operator,
    sparse_graph,
    test_a_head_that_is_removed_leaves_the_others,
    test_gradients_of_large_scores,
    test_large_scores,
    test_nan_in_a_used_node_reaches_its_queries_and_no_other,
    transposed,
)

LISTED, ON_THE_CPU = sparse_cpu.listed, sparse_cpu.forward  # before the plugin's fixture replaces them
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:All-NaN slice"),  # the interpreter's maximum
]


def hubs() -> tuple[Tensor, int, int]:
    """Queries with 700, 257, 256 and 255 edges among short ones, shuffled."""
    degrees = torch.tensor([700, 0, 257, 256, 255, 3, 1, 0, 2])
    target = torch.repeat_interleave(torch.arange(9), degrees)
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(12, target.shape, generator=generator)
    return torch.stack((source, target))[:, torch.randperm(len(target), generator=generator)], 12, 9


SMALL = drawn(17, 23, 90)
GRAPHS = {
    "no nodes": (edges(), 0, 0),
    "no edges": (edges(), 5, 5),
    "no keys": (edges(), 0, 3),
    "no queries": (edges(), 3, 0),
    "one edge": (edges((2, 0)), 4, 3),
    "parallel edges": (edges(*[(1, 0)] * 40, *[(0, 1), (2, 1)] * 3), 3, 3),
    "small": SMALL,
    "hub queries": hubs(),
    "hub keys": transposed(hubs()),
}


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_graphs(graph, options):
    oracle.assert_agrees(operator, oracle.draw_case(graph, dtype=torch.float32, **options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options):
    oracle.assert_agrees(operator, oracle.draw_case(SMALL, dtype=torch.float32, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    oracle.assert_agrees(operator, oracle.draw_case(SMALL, dtype=dtype, **EVERYTHING))


@pytest.mark.parametrize("warps", [1, 4])
def test_small_programs(warps, monkeypatch):
    monkeypatch.setattr(sparse_triton, "_WARPS", warps)
    oracle.assert_agrees(
        operator, oracle.draw_case(SMALL, dtype=torch.float32, heads=3, dim=16, bias=("1", "H"))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize(
    "heads, kv_heads, dim, value_dim",
    [
        (1, 1, 1, 1),
        (3, 3, 3, 3),
        (9, 9, 16, 16),
        (1, 1, 130, 130),
        (3, 3, 8, 20),
        (2, 1, 300, 7),
        (33, 11, 16, 16),
    ],
)
def test_heads_and_dims(heads, kv_heads, dim, value_dim, dtype):
    case = oracle.draw_case(SMALL, dtype=dtype, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim)
    oracle.assert_agrees(operator, case)


def test_features_of_several_groups_of_heads():
    case = oracle.draw_case(SMALL, dtype=torch.float32, heads=17, dim=20, edge_dim=5)
    oracle.assert_agrees(operator, case)


@pytest.mark.parametrize("side", ["query", "key"])
def test_a_row_of_6000_equal_edges(side):
    """Sums over a hub are blocked: one by one in float32 they are wrong by 1e-5 here."""
    hub, others = torch.zeros(6_000, dtype=torch.int64), torch.arange(6_000)
    edge_index, size = (
        (torch.stack((others, hub)), (6_000, 1))
        if side == "query"
        else (torch.stack((hub, others)), (1, 6_000))
    )
    query, key = torch.ones(size[1], 1, 4), torch.full((size[0], 1, 4), 0.3)
    value = torch.full((size[0], 1, 4), 0.1, requires_grad=True)
    out, lse = graph_attention(
        query, key, value, SparseGraph.from_edge_index(edge_index, size=size), return_lse=True
    )
    torch.testing.assert_close(out, torch.full_like(out, 0.1), rtol=1e-6, atol=0)
    score = 0.6 + math.log(6_000 if side == "query" else 1)
    torch.testing.assert_close(lse, torch.full_like(lse, score), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(out, value, torch.full_like(out, 0.1))
    torch.testing.assert_close(
        gradient, torch.full_like(gradient, 0.1 * size[1] / size[0]), rtol=1e-6, atol=0
    )


def arguments(case: oracle.Case, dropout_p: float, return_weights: bool) -> list:
    """The operator's arguments for a case."""
    graph = sparse_graph(case)
    x = {
        name: case.operands.get(name)
        for name in ("query", "key", "value", "bias", "edge_attr", "edge_projection")
    }
    query, key, value = (x[name].reshape(-1, *x[name].shape[-3:]) for name in ("query", "key", "value"))
    return [
        query, key, value, graph.rowptr, graph.col, graph.edge_id, graph.colptr, graph.row, graph.edge_id_t,
        x["bias"], x["edge_attr"], x["edge_projection"], torch.tensor([2**62 + 12345]),
        case.settings.get("scale", 0.3), case.settings.get("softcap", 0.0), dropout_p, return_weights,
    ]  # fmt: skip


@pytest.mark.parametrize("dropout_p", [1e-9, 0.3, 1.0])
@pytest.mark.parametrize("options", [{"heads": 4}, {**EVERYTHING, "heads": 6}], ids=["plain", "everything"])
def test_dropout_draws_as_on_the_cpu(options, dropout_p):
    """With one-hot values the output is the weights: where they are 0 they were dropped."""
    pairs = torch.cartesian_prod(torch.arange(9), torch.arange(11)).t()
    case = oracle.draw_case((pairs, 9, 11), dim=9, **{**options, "removed": 0.0})
    case.operands["value"][...] = torch.eye(9).unsqueeze(1)
    if "edge_projection" in case.operands:
        case.operands["edge_projection"][...] = 0
    inputs = arguments(case, dropout_p, False)
    mine = sparse_triton.forward(*inputs)[0]
    batch, _, heads, _ = mine.shape
    kept = reference.dropout_factors(inputs[12], torch.arange(99), batch, heads, dropout_p) > 0
    kept = kept.view(batch, 9, 11, heads).permute(0, 2, 3, 1)
    assert torch.equal(mine != 0, kept)
    expected = ON_THE_CPU(LISTED(*inputs[3:6]), *inputs[:3], *inputs[9:])[0]
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_dropout_and_its_gradients(options):
    case = oracle.draw_case(SMALL, dtype=torch.float32, **{**options, "heads": 4, "leading": (2,)})

    def run(case, operands):
        torch.manual_seed(5)
        return graph_attention(
            **operands, graph=sparse_graph(case), **case.settings, dropout_p=0.4, return_lse=True
        )

    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, (1,))
    keep = reference.dropout_factors(seed, torch.arange(90), 2, 4, 0.4)
    oracle.assert_agrees(run, case, keep)


@pytest.mark.parametrize(
    "name, options, dtype",
    [
        ("small", EVERYTHING, torch.float32),
        ("small", {}, torch.float16),
        ("hub queries", {}, torch.float64),
        ("no edges", {}, torch.float32),
    ],
)
def test_weights_and_their_gradients(name, options, dtype):
    case = oracle.draw_case(GRAPHS[name], dtype=dtype, **options)
    generator = torch.Generator().manual_seed(1)
    results = []
    for precision in (None, torch.float64, torch.float32):
        operands = {n: x.clone() for n, x in case.operands.items() if n != "value"}
        if precision == torch.float64:
            operands = {n: x.double() for n, x in operands.items()}
        operands = {n: x.requires_grad_() for n, x in operands.items()}
        if precision is None:
            weights = attention_weights(**operands, graph=sparse_graph(case), **case.settings)
            flowing = torch.randn(weights.shape, generator=generator).to(weights.dtype)
        else:
            value = torch.zeros_like(operands["key"])
            weights = oracle.attention(
                **operands, value=value, edge_index=case.edge_index, **case.settings, precision=precision
            )[2]
        gradients = torch.autograd.grad(weights, tuple(operands.values()), flowing.to(weights.dtype))
        results.append([weights.detach(), *gradients])
    for place, (actual, exact, plain) in enumerate(zip(*results)):
        oracle.assert_close_to_oracle(actual, exact, plain, actual.dtype, str(place))


def test_everything_removed_and_nan_where_no_edge_is():
    """Also in the sums over nodes that the projection's gradient is made of."""
    edge_index = drawn(10, 12, 60)[0]
    clean = oracle.draw_case((edge_index, 15, 16), dtype=torch.float32, **EVERYTHING)
    clean.operands["bias"][edge_index[1] == 7] = -math.inf
    dirty = oracle.draw_case((edge_index, 15, 16), dtype=torch.float32, **EVERYTHING)
    dirty.operands["bias"][edge_index[1] == 7] = -math.inf
    dirty.operands["key"][..., 10:, :, :] = math.nan
    dirty.operands["value"][..., 10:, :, :] = math.nan
    dirty.operands["query"][..., 12:, :, :] = math.nan
    expected, actual = (oracle.results(operator, case) for case in (clean, dirty))
    assert (actual["out"][:, 7] == 0).all() and (actual["lse"][:, 7] == -math.inf).all()
    assert (actual["gradient of query"][:, 7] == 0).all()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    oracle.assert_agrees(operator, clean)


def test_second_derivatives():
    case = oracle.draw_case((edges((0, 0), (1, 0), (1, 0)), 2, 1), heads=1, dim=1, bias=("E", "H"))
    operands = [x.requires_grad_() for x in case.operands.values()]
    graph = sparse_graph(case)
    assert gradgradcheck(
        lambda query, key, value, bias: graph_attention(query, key, value, graph, bias=bias), operands
    )


def test_operands_of_any_strides():
    case = oracle.draw_case(SMALL, heads=3, dim=5, bias=("E", "H"), edge_dim=4, leading=(2,))

    def strided(case, operands):
        turned = {name: x.transpose(-1, -2).contiguous().transpose(-1, -2) for name, x in operands.items()}
        return operator(case, turned)

    oracle.assert_agrees(strided, case)


def test_a_plan_is_made_once_for_each_side_of_a_graph(monkeypatch):
    made = []
    make = sparse_triton._make_plan
    monkeypatch.setattr(
        sparse_triton, "_make_plan", lambda pointer, edges: made.append(len(pointer)) or make(pointer, edges)
    )
    case = oracle.draw_case(SMALL)
    graph = sparse_graph(case)
    for _ in range(2):
        operands = [x.clone().requires_grad_() for x in case.operands.values()]
        graph_attention(*operands, graph).sum().backward()
    assert made == [24, 18]
    before = len(sparse_triton._plans)
    del graph
    assert len(sparse_triton._plans) == before - 2


class NothingWaits(TorchDispatchMode):
    """No operation reads a number back from the device, or has an output whose size depends on numbers there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        waits = name in ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "_unique2")
        if name == "repeat_interleave":
            waits = (kwargs or {}).get("output_size") is None
        assert not waits, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_the_host_never_waits_for_the_device(dropout_p):
    """The plan included: what a CUDA graph captures may read nothing back."""
    case = oracle.draw_case(SMALL, dtype=torch.float32, **EVERYTHING)
    inputs = arguments(case, dropout_p, True)
    with NothingWaits():
        outputs = sparse_triton.forward(*inputs)
        grads = (torch.ones_like(outputs[i]) for i in (0, 1, 4))
        sparse_triton.backward(*grads, *outputs, *inputs)
    with pytest.raises(AssertionError, match="waits"), NothingWaits():
        outputs[0].sum().item()
