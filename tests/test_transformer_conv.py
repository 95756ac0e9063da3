"""TransformerConv: PyG's own layer with the same weights is the oracle, in values and in every gradient."""

import copy
import importlib.util
import io
import pickle
import sys
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric import nn as pyg
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer, PGExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.testing import assert_module
from torch_geometric.utils import trim_to_layer

import graphattn.nn
import graphattn.nn.conv as conv_module
from graphattn.graph import CompleteGraph, GridGraph, SparseGraph, WindowGraph
from graphattn.nn import TransformerConv
from graphattn.nn.conv import accelerate

# Parallel edges (2 -> 1 and 0 -> 1 twice), a loop at 3, a node without edges (5), a node that only sends (6).
EDGES = torch.tensor([[0, 1, 2, 2, 3, 4, 6, 0, 0, 3, 1], [1, 0, 1, 1, 3, 0, 4, 4, 1, 2, 3]])
NODES = 7
# The same kind of graph without parallel edges, for adjacency matrices, which merge them.
SIMPLE = torch.tensor([[3, 0, 6, 2, 1, 4, 3, 1], [3, 1, 4, 1, 0, 0, 2, 3]])
# Five sources, three targets: target 2 receives nothing.
BIPARTITE = torch.tensor([[4, 0, 1, 4, 3, 3], [0, 1, 0, 0, 1, 0]])


def twins(*args, dtype=torch.float64, **kwargs):
    """The fused layer and PyG's, with the same weights."""
    torch.manual_seed(12)
    fused = TransformerConv(*args, **kwargs).to(dtype)
    plain = pyg.TransformerConv(*args, **kwargs).to(dtype)
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def features(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(module, inputs, call):
    """What `call(module, *inputs)` returns, and the gradients of all inputs and parameters."""
    inputs = [leaf.detach().clone().requires_grad_() for leaf in inputs]
    outs = call(module, *inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    loss = sum((out * features(*out.shape, seed=9, dtype=out.dtype)).sum() for out in outs)
    leaves = {f"input {i}": leaf for i, leaf in enumerate(inputs)} | dict(module.named_parameters())
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return outs, dict(zip(leaves, grads))


def assert_twins_agree(fused, plain, inputs, call, plain_call=None):
    outs, grads = run(fused, inputs, call)
    expected, expected_grads = run(plain, inputs, plain_call or call)
    torch.testing.assert_close(outs, expected, rtol=1e-10, atol=1e-12)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        if grad is None:
            assert grads[name] is None or not grads[name].any(), name
        else:
            torch.testing.assert_close(
                grads[name], grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.fixture
def fused_calls(monkeypatch):
    """One entry for every time the layer took the fused path."""
    calls, operator = [], conv_module.graph_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return operator(*args, **kwargs)

    monkeypatch.setattr(conv_module, "graph_attention", counted)
    return calls


# --- the same numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bipartite", [False, True])
@pytest.mark.parametrize(
    "concat,beta,edge_dim,root_weight,bias",
    list(product((True, False), (True, False), (None, 3), (True, False), (True, False))),
)
def test_options_agree_with_pyg(bipartite, concat, beta, edge_dim, root_weight, bias, fused_calls):
    in_channels = (5, 6) if bipartite else 5
    fused, plain = twins(in_channels, 4, 3, concat, beta, 0.0, edge_dim, bias, root_weight)
    edge_index = BIPARTITE if bipartite else EDGES
    inputs = [features(5, 5), features(3, 6)] if bipartite else [features(NODES, 5)]
    if edge_dim is not None:
        inputs.append(features(edge_index.size(1), edge_dim, seed=3))

    def call(conv, *leaves):
        x = leaves[:2] if bipartite else leaves[0]
        return conv(x, edge_index, leaves[-1] if edge_dim is not None else None)

    assert_twins_agree(fused, plain, inputs, call)
    assert len(fused_calls) == 1
    assert repr(fused) == repr(plain)


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_that_of_pyg(edge_dim, dtype):
    layers = [layer.to(dtype) for layer in twins(16, 8, 4, edge_dim=edge_dim)]
    edge_index = torch.randint(50, (2, 600), generator=torch.Generator().manual_seed(4))
    x = features(50, 16).to(dtype)
    e = None if edge_dim is None else features(600, 3).to(dtype)
    fused, plain = (layer(x, edge_index, e) for layer in layers)
    exact = layers[1].double()(x.double(), edge_index, None if e is None else e.double())
    assert fused.dtype == dtype
    error, plain_error = ((out.double() - exact).abs().max() for out in (fused, plain))
    assert error <= 3 * plain_error + 2 * torch.finfo(dtype).eps * exact.abs().max()


def test_second_derivatives_agree_with_pyg():
    def slope(conv, x, e):
        (grad,) = torch.autograd.grad(conv(x, EDGES, e).square().sum(), x, create_graph=True)
        return grad

    assert_twins_agree(*twins(5, 4, 2, edge_dim=3, beta=True), [features(NODES, 5), features(11, 3)], slope)


@pytest.mark.parametrize("bipartite", [False, True])
def test_target_to_source_agrees_with_pyg(bipartite):
    fused, plain = twins((5, 6) if bipartite else 5, 4, 2, edge_dim=3, flow="target_to_source")
    edge_index = BIPARTITE.flip(0) if bipartite else EDGES
    inputs = ([features(5, 5), features(3, 6)] if bipartite else [features(NODES, 5)]) + [
        features(edge_index.size(1), 3)
    ]

    def call(conv, *leaves):
        out, (edges, alpha) = conv(leaves[:2] if bipartite else leaves[0], edge_index, leaves[-1], True)
        assert edges is edge_index
        return out, alpha

    assert_twins_agree(fused, plain, inputs, call)


def test_edge_feature_vector_is_one_column():
    fused, plain = twins(5, 4, 2, edge_dim=1)
    call = lambda conv, x, e: conv(x, EDGES, e)  # noqa: E731
    column = lambda conv, x, e: conv(x, EDGES, e.unsqueeze(-1))  # noqa: E731
    assert_twins_agree(fused, plain, [features(NODES, 5), features(11)], call, column)
    # the same rule where PyG's path runs
    fused.register_message_forward_hook(lambda *_: None)
    assert_twins_agree(fused, plain, [features(NODES, 5), features(11)], call, column)


# --- every form of adjacency ----------------------------------------------------------------------------


def adjacency(form, edge_index, num_nodes, values=None):
    """(the adjacency, the permutation from the order of `edge_index` to its own)"""
    num_edges = edge_index.size(1)
    order = torch.arange(num_edges)
    if form == "edge_index":
        return edge_index, order
    if form == "edge_index32":
        return edge_index.int(), order
    if form.startswith("EdgeIndex"):
        sort_order = form.partition(" ")[2] or None
        if sort_order:
            order = (edge_index[0] if sort_order == "row" else edge_index[1]).argsort(stable=True)
        columns = edge_index[:, order]
        return EdgeIndex(columns, sparse_size=(num_nodes, num_nodes), sort_order=sort_order), order
    if form == "Graph":
        return SparseGraph.from_edge_index(edge_index, num_nodes), order
    # sparse adjacencies: rows are targets
    source, target = edge_index
    order = (target * num_nodes + source if form != "csc" else source * num_nodes + target).argsort()
    values = torch.ones(num_edges, dtype=torch.float64) if values is None else values
    size = (num_nodes, num_nodes, *values.shape[1:])
    rows, cols, values = target[order], source[order], values[order]
    if form == "coo":
        return torch.sparse_coo_tensor(
            torch.stack([rows, cols]), values, size, is_coalesced=True, check_invariants=True
        ), order
    ptr = torch.zeros(num_nodes + 1, dtype=torch.long)
    if form == "csr":
        ptr[1:] = torch.bincount(rows, minlength=num_nodes).cumsum(0)
        return torch.sparse_csr_tensor(ptr, cols, values, size, check_invariants=True), order
    ptr[1:] = torch.bincount(cols, minlength=num_nodes).cumsum(0)
    return torch.sparse_csc_tensor(ptr, rows, values, size, check_invariants=True), order


TENSOR_FORMS = ["edge_index", "edge_index32", "EdgeIndex", "EdgeIndex row", "EdgeIndex col"]
SPARSE_FORMS = ["coo", "csr", "csc"]


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
@pytest.mark.parametrize("form", [*TENSOR_FORMS, *SPARSE_FORMS, "Graph"])
def test_every_adjacency_gives_the_same_result(form):
    fused, plain = twins(5, 4, 2)
    adj, order = adjacency(form, SIMPLE, NODES)

    def call(conv, x):
        out, (edges, alpha) = conv(x, adj, return_attention_weights=True)
        assert form == "Graph" or edges is adj
        if form == "Graph":
            assert torch.equal(edges, SIMPLE)
        return out, alpha[order.argsort()]

    def plain_call(conv, x):
        out, (_, alpha) = conv(x, SIMPLE, return_attention_weights=True)
        return out, alpha

    assert_twins_agree(fused, plain, [features(NODES, 5)], call, plain_call)
    # PyG's path in our layer gives the same pair
    fused.register_message_forward_hook(lambda *_: None)
    assert_twins_agree(fused, plain, [features(NODES, 5)], call, plain_call)


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("form", SPARSE_FORMS)
def test_adjacency_values_are_edge_features(form, width):
    fused, plain = twins(5, 4, 2, edge_dim=width)
    values = features(SIMPLE.size(1), width, seed=3)
    adj, _ = adjacency(form, SIMPLE, NODES, values[:, 0] if width == 1 else values)
    call = lambda conv, x: conv(x, adj)  # noqa: E731
    plain_call = lambda conv, x: conv(x, SIMPLE, values)  # noqa: E731
    assert_twins_agree(fused, plain, [features(NODES, 5)], call, plain_call)


@pytest.mark.parametrize("form", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
def test_adjacency_values_get_their_gradient(form):
    fused, plain = twins(5, 4, 2, edge_dim=3)
    call = lambda conv, x, values: conv(x, adjacency(form, SIMPLE, NODES, values)[0])  # noqa: E731
    plain_call = lambda conv, x, values: conv(x, SIMPLE, values)  # noqa: E731
    inputs = [features(NODES, 5), features(SIMPLE.size(1), 3)]
    assert_twins_agree(fused, plain, inputs, call, plain_call)


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
def test_plain_adjacency_values_are_not_used():
    fused, _ = twins(5, 4, 2)
    x, weights = features(NODES, 5), features(SIMPLE.size(1))
    assert torch.equal(
        fused(x, adjacency("csr", SIMPLE, NODES, weights)[0]), fused(x, adjacency("csr", SIMPLE, NODES)[0])
    )


def test_uncoalesced_adjacency_has_parallel_edges():
    fused, plain = twins(5, 4, 2)
    indices = EDGES.flip(0)
    adj = torch.sparse_coo_tensor(indices, torch.ones(11), (NODES, NODES), check_invariants=True)
    call = lambda conv, x: conv(x, adj)  # noqa: E731
    assert_twins_agree(fused, plain, [features(NODES, 5)], call, lambda conv, x: conv(x, EDGES))


def test_sparse_tensor_adjacency():
    SparseTensor = pytest.importorskip("torch_sparse").SparseTensor
    fused, plain = twins(5, 4, 2, edge_dim=3)
    x, values = features(NODES, 5), features(SIMPLE.size(1), 3)
    adj = SparseTensor(row=SIMPLE[1], col=SIMPLE[0], value=values, sparse_sizes=(NODES, NODES))
    out, weights = fused(x, adj, return_attention_weights=True)
    expected, expected_weights = plain(x, adj, return_attention_weights=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights.to_dense(), expected_weights.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state", "ignore:.*to CSR format")
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_pyg_module_assertions(edge_dim):
    fused, _ = twins(5, 4, 2, dtype=torch.float32, edge_dim=edge_dim)
    kwargs = (
        {}
        if edge_dim is None
        else {"edge_attr": features(8, 3, dtype=torch.float32), "test_sparse_layouts": []}
    )
    x = features(NODES, 5, dtype=torch.float32)
    with torch.sparse.check_sparse_tensor_invariants():
        assert_module(fused, x, SIMPLE, expected_size=(NODES, 8), atol=1e-6, **kwargs)


# --- attention weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("truthy", [True, 1])
def test_attention_weights_agree_with_pyg_and_have_gradients(truthy):
    fused, plain = twins(5, 4, 2, edge_dim=3, dropout=0.5)

    def call(conv, x, e):
        _, (edges, alpha) = conv(x, EDGES, e, return_attention_weights=truthy if conv is fused else True)
        assert edges is EDGES and alpha.shape == (11, 2)
        return alpha

    assert_twins_agree(fused, plain, [features(NODES, 5), features(11, 3)], call)


@pytest.mark.field_report("B37")
@pytest.mark.parametrize("falsy", [None, False, 0])
@pytest.mark.parametrize("edge_wise", [False, True])
def test_falsy_return_attention_weights_gives_a_tensor(falsy, edge_wise):
    fused, _ = twins(5, 4, 2)
    if edge_wise:
        fused.register_message_forward_hook(lambda *_: None)
    assert isinstance(fused(features(NODES, 5), EDGES, return_attention_weights=falsy), Tensor)


# --- dropout --------------------------------------------------------------------------------------------


def test_dropout_is_reproducible_unbiased_and_off_in_eval():
    fused, plain = twins(5, 4, 2, edge_dim=3, dropout=0.5)
    x, e = features(NODES, 5), features(11, 3)
    expected = plain.eval()(x, EDGES, e)
    torch.testing.assert_close(fused.eval()(x, EDGES, e), expected)
    copies = 3000  # of the graph side by side: every one has its own draws
    offsets = NODES * torch.arange(copies).repeat_interleave(11)
    many = (x.repeat(copies, 1), EDGES.repeat(1, copies) + offsets, e.repeat(copies, 1))
    torch.manual_seed(0)
    out = fused.train()(*many)
    torch.manual_seed(0)
    assert torch.equal(fused(*many), out)
    assert not torch.equal(fused(*many), out)
    draws = out.view(copies, NODES, 8)
    standard_error = draws.std(dim=0) / copies**0.5
    assert ((draws.mean(dim=0) - expected).abs() <= 5 * standard_error + 1e-12).all()
    # node 2 has one edge: each head keeps twice the message or nothing, independently
    kept = (draws - fused.lin_skip(x))[:, 2].view(copies, 2, 4).abs().amax(-1) > 1e-9
    counts = torch.stack(
        [(kept == torch.tensor(pair)).all(-1).sum() for pair in product((False, True), repeat=2)]
    )
    assert ((counts - copies / 4).abs() < 5 * (copies * 3 / 16) ** 0.5).all()


@pytest.mark.field_report("B103")
@pytest.mark.parametrize("p", [0, 1e-9, 1.0])
def test_extreme_dropout(p):
    fused, _ = twins(5, 4, 2, dropout=p)
    x = features(NODES, 5, dtype=torch.float64).requires_grad_()
    expected = fused.lin_skip(x) if p == 1.0 else copy.deepcopy(fused).eval()(x, EDGES)
    out = fused.train()(x, EDGES)
    torch.testing.assert_close(out, expected, rtol=1e-7, atol=1e-9)
    out.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.field_report("B84")
def test_deterministic_mode_repeats_to_the_bit():
    fused, _ = twins(16, 8, 4, dtype=torch.float32, edge_dim=3, dropout=0.5)
    edge_index = torch.randint(50, (2, 900), generator=torch.Generator().manual_seed(4))
    inputs = [features(50, 16, dtype=torch.float32), features(900, 3, dtype=torch.float32)]
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            torch.manual_seed(1)
            outs, grads = run(fused, inputs, lambda conv, x, e: conv(x, edge_index, e))
            runs.append([*outs, *grads.values()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))


@pytest.mark.field_report("B05")
def test_checkpoint_with_dropout_is_exact():
    layers = nn.ModuleList(TransformerConv(8, 4, 2, dropout=0.5, edge_dim=3) for _ in range(8))
    x, e = features(NODES, 8, dtype=torch.float32).requires_grad_(), features(11, 3, dtype=torch.float32)

    def gradients(wrap):
        torch.manual_seed(5)
        h = x
        for layer in layers:
            h = wrap(layer, h)
        return torch.autograd.grad(h.square().sum(), [x, *layers.parameters()])

    plain = gradients(lambda layer, h: layer(h, EDGES, e))
    saved = gradients(lambda layer, h: checkpoint(layer, h, EDGES, e, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, saved))
    assert all(layer._alpha is None for layer in layers)


# --- lazy, empty, small ---------------------------------------------------------------------------------


@pytest.mark.field_report("B89")
@pytest.mark.parametrize("edges", [BIPARTITE, torch.empty(2, 0, dtype=torch.long)], ids=["edges", "no edges"])
@pytest.mark.parametrize("in_channels", [-1, (-1, -1), (5, 6)])
@pytest.mark.parametrize("edge_dim", [-1, 3])
def test_lazy_layers_are_complete_after_one_forward(in_channels, edge_dim, edges):
    conv = TransformerConv(in_channels, 4, heads=2, beta=True, edge_dim=edge_dim)
    x = (features(5, 5, dtype=torch.float32), features(3, 6, dtype=torch.float32))
    out = conv(x, edges, features(edges.size(1), 3, dtype=torch.float32))
    out.sum().backward()
    for name, parameter in conv.named_parameters():
        assert not isinstance(parameter, nn.UninitializedParameter), name
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    plain = pyg.TransformerConv((5, 6), 4, heads=2, beta=True, edge_dim=3)
    plain.load_state_dict(conv.state_dict())
    torch.testing.assert_close(out, plain(x, edges, features(edges.size(1), 3, dtype=torch.float32)))


def test_lazy_layer_takes_the_state_of_pyg():
    plain = pyg.TransformerConv(5, 4, 2, edge_dim=3)
    lazy = TransformerConv(-1, 4, 2, edge_dim=-1)
    lazy.load_state_dict(plain.state_dict())
    x, e = features(NODES, 5, dtype=torch.float32), features(11, 3, dtype=torch.float32)
    torch.testing.assert_close(lazy(x, EDGES, e), plain(x, EDGES, e))


@pytest.mark.parametrize("nodes", [0, 1, 4])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_no_edges_leaves_the_skip_connection(nodes, edge_dim):
    fused, _ = twins(5, 4, 2, edge_dim=edge_dim)
    x = features(nodes, 5).requires_grad_()
    e = None if edge_dim is None else features(0, 3).requires_grad_()
    out, (_, alpha) = fused(x, torch.empty(2, 0, dtype=torch.long), e, return_attention_weights=True)
    torch.testing.assert_close(out, fused.lin_skip(x))
    assert out.shape == (nodes, 8) and alpha.shape == (0, 2)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() for p in fused.parameters())
    assert not fused.lin_value.weight.grad.any()


def test_one_node_attends_to_itself():
    assert_twins_agree(
        *twins(5, 4, 2), [features(1, 5)], lambda conv, x: conv(x, torch.zeros(2, 1, dtype=torch.long))
    )


def test_unused_nodes_may_hold_nan():
    fused, _ = twins(5, 4, 2, root_weight=False)
    x = features(NODES, 5)
    expected = fused(x, EDGES)
    x[5] = torch.nan
    torch.testing.assert_close(fused(x, EDGES), expected)


# --- bad input ------------------------------------------------------------------------------------------

BAD_CALLS = {
    "features without edge_dim": (None, {"edge_attr": features(11, 3)}, ValueError, "edge_dim=3"),
    "features that would broadcast": (None, {"edge_attr": features(11, 1)}, ValueError, "edge_dim=1"),
    "no features": (3, {}, ValueError, r"\[11, 3\]"),
    "features too wide": (3, {"edge_attr": features(11, 4)}, ValueError, r"\[11, 3\].*\[11, 4\]"),
    "features too few": (3, {"edge_attr": features(10, 3)}, ValueError, r"\[11, 3\].*\[10, 3\]"),
    "one row of features": (3, {"edge_attr": features(1, 3)}, ValueError, r"\[11, 3\].*\[1, 3\]"),
    "feature vector for three": (3, {"edge_attr": features(11)}, ValueError, r"\[11, 3\].*\[11\]"),
    "edges transposed": (None, {"edge_index": EDGES.t()}, ValueError, "edge_index"),
    "edges one-dimensional": (None, {"edge_index": EDGES[0]}, ValueError, "edge_index"),
    "edges float": (None, {"edge_index": EDGES.double()}, (TypeError, ValueError), "edge_index"),
    "no edges, float": (None, {"edge_index": torch.empty(2, 0)}, (TypeError, ValueError), "edge_index"),
    "node id too large": (None, {"edge_index": EDGES + 1}, IndexError, r"\[0, 7\)"),
    "node id negative": (None, {"edge_index": EDGES - 1}, IndexError, r"\[0, 7\)"),
    "edges missing": (None, {"edge_index": None}, (TypeError, ValueError), "None"),
    "x too wide": (None, {"x": features(NODES, 6)}, ValueError, r"5.*\[7, 6\]"),
    "x three-dimensional": (None, {"x": features(2, NODES, 5)}, ValueError, r"\[2, 7, 5\]"),
    "x integer": (None, {"x": torch.ones(NODES, 5, dtype=torch.long)}, TypeError, "int64"),
    "x a list": (None, {"x": [[1.0] * 5] * NODES}, TypeError, "`x`.*list"),
    "x an array": (None, {"x": np.ones((NODES, 5))}, TypeError, "`x`.*ndarray"),
    "x missing": (None, {"x": None}, TypeError, "`x`.*NoneType"),
    "x of one end": (None, {"x": (features(NODES, 5),)}, TypeError, "`x`.*tuple"),
    "x of lists": (None, {"x": ([1.0], [1.0])}, TypeError, "`x`.*list"),
    "features a list": (3, {"edge_attr": [[1.0] * 3] * 11}, TypeError, "`edge_attr`.*list"),
    "features an array": (3, {"edge_attr": np.ones((11, 3))}, TypeError, "`edge_attr`.*ndarray"),
    "a list without edge_dim": (None, {"edge_attr": [1.0]}, TypeError, "`edge_attr`.*list"),
    "features sparse": (3, {"edge_attr": features(11, 3).to_sparse()}, TypeError, "`edge_attr`.*sparse_coo"),
    "a number without edge_dim": (None, {"edge_attr": torch.tensor(1.0)}, ValueError, r"got \[\]"),
    "no targets": (None, {"x": (features(NODES, 5), None)}, TypeError, "target"),
    "no sources": (None, {"x": (None, features(NODES, 5))}, TypeError, "source"),
    "graph too small": (
        None,
        {"edge_index": SparseGraph.from_edge_index(SIMPLE[:, :1], 6)},
        ValueError,
        "6|7",
    ),
    "adjacency too small": (None, {"edge_index": adjacency("coo", SIMPLE[:, :2], 5)[0]}, ValueError, "5|7"),
}


@pytest.mark.field_report("B32", "B44")
@pytest.mark.parametrize("edge_wise", [False, True])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named(case, edge_wise):
    edge_dim, arguments, error, message = BAD_CALLS[case]
    fused, _ = twins(5, 4, 2, edge_dim=edge_dim)
    if edge_wise:
        fused.register_message_forward_hook(lambda *_: None)
    with pytest.raises(error, match=message):
        fused(**{"x": features(NODES, 5), "edge_index": EDGES, **arguments})


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"in_channels": "8"}, TypeError, "`in_channels` must be an int or a pair"),
        ({"in_channels": (8, 8, 8)}, TypeError, "`in_channels` must be an int or a pair"),
        ({"in_channels": -2}, ValueError, "`in_channels` must be at least -1 and .*, got -2"),
        ({"out_channels": 0}, ValueError, "`out_channels` must be at least 1 and .*, got 0"),
        ({"heads": 0}, ValueError, "`heads` must be at least 1 and .*, got 0"),
        ({"heads": 1.5}, TypeError, "`heads` must be an int, got float"),
        ({"edge_dim": -2}, ValueError, "`edge_dim` must be at least -1 and .*, got -2"),
        ({"dropout": "0"}, TypeError, "`dropout` must be a number"),
        ({"dropout": -0.1}, ValueError, "`dropout` must be a probability"),
    ],
)
def test_wrong_layers(arguments, error, message):
    with pytest.raises(error, match=message):
        TransformerConv(**{"in_channels": 8, "out_channels": 4, **arguments})


def test_accelerate_takes_a_module():
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module, got 3"):
        accelerate(3)


@pytest.mark.field_report("B18")
def test_mixed_dtypes_are_named():
    fused, _ = twins(5, 4, 2, edge_dim=3, dtype=torch.float32)
    x, e = features(NODES, 5), features(11, 3)
    with pytest.raises(TypeError, match=r"edge_attr.*float32.*float64"):
        fused(x.float(), EDGES, e)
    with pytest.raises(TypeError, match=r"`x` must have the dtype .*float32, got torch.float64"):
        fused(x, EDGES, e.float())


@pytest.mark.field_report("B26")
@pytest.mark.parametrize("form", [*SPARSE_FORMS, "Graph"])
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
def test_adjacency_has_one_direction(form):
    fused, _ = twins(5, 4, 2, flow="target_to_source")
    with pytest.raises(ValueError, match="target_to_source"):
        fused(features(NODES, 5), adjacency(form, SIMPLE, NODES)[0])


@pytest.mark.parametrize("values,edge_dim", [(None, 3), (features(8, 3), None), (features(8, 4), 3)])
def test_adjacency_features_must_fit_the_layer(values, edge_dim):
    fused, _ = twins(5, 4, 2, edge_dim=edge_dim)
    with pytest.raises(ValueError, match="edge_dim"):
        fused(features(NODES, 5), adjacency("coo", SIMPLE, NODES, values)[0])


def test_adjacency_and_separate_features_are_refused():
    fused, _ = twins(5, 4, 2, edge_dim=3)
    with pytest.raises(ValueError, match="adjacency"):
        fused(features(NODES, 5), adjacency("coo", SIMPLE, NODES)[0], features(8, 3))


@pytest.mark.field_report("B103")
@pytest.mark.parametrize("dropout", [-0.1, 1.5, float("nan")])
def test_dropout_must_be_a_probability(dropout):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        TransformerConv(5, 4, dropout=dropout)


@pytest.mark.field_report("B82")
@pytest.mark.parametrize(
    "layer",
    [
        TransformerConv(5, 4),
        graphattn.nn.GraphMultiheadAttention(8, 2),
        graphattn.nn.GraphTransformer(4, 8, 2, num_layers=1, heads=2),
        graphattn.nn.GPSConv(8, None, heads=2),
        graphattn.nn.VisionTransformer(8, 4, 3, dim=8, depth=1, heads=2, mlp_dim=8),
        graphattn.nn.ConvolutionalAttention(3, 4, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_torchscript_is_refused(layer):
    with pytest.raises(NotImplementedError, match="TorchScript"):
        torch.jit.script(layer)


# --- edge-wise messages, where they are asked for -------------------------------------------------------


@pytest.mark.parametrize("stage", ["propagate", "message", "aggregate"])
@pytest.mark.parametrize("kind", ["pre_hook", "hook"])
def test_hooks_see_what_pyg_shows_them(stage, kind, fused_calls):
    fused, plain = twins(5, 4, 2, edge_dim=3)
    x, e = features(NODES, 5), features(11, 3)
    seen = []
    for conv in (fused, plain):
        handle = getattr(conv, f"register_{stage}_forward_{kind}")(lambda module, *args: seen.append(args))
        conv(x, EDGES, e)
        handle.remove()
    assert not fused_calls
    leaves = [torch.utils._pytree.tree_leaves(args) for args in seen]
    assert len(leaves[0]) > 0
    for ours, theirs in zip(*leaves, strict=True):
        torch.testing.assert_close(ours, theirs)
    fused(x, EDGES, e)
    assert len(fused_calls) == 1


@pytest.mark.parametrize(
    "aggr,is_fused",
    [
        ("add", True),
        ("sum", True),
        (pyg.SumAggregation(), True),
        ("mean", False),
        ("max", False),
        (["add", "max"], False),
    ],
)
def test_aggregation_is_that_of_pyg(aggr, is_fused, fused_calls):
    fused, plain = twins(5, 4, 2, aggr=aggr, root_weight=False)
    assert_twins_agree(fused, plain, [features(NODES, 5)], lambda conv, x: conv(x, EDGES))
    assert bool(fused_calls) == is_fused


def test_decomposed_layers_change_nothing():
    fused, plain = twins(5, 4, 2)
    fused.decomposed_layers = 2
    assert_twins_agree(fused, plain, [features(NODES, 5)], lambda conv, x: conv(x, EDGES))


def test_overridden_message_is_used():
    class Doubled(TransformerConv):
        def message(self, query_i, key_j, value_j, edge_attr, index, ptr, size_i):
            return 2 * super().message(query_i, key_j, value_j, edge_attr, index, ptr, size_i)

    torch.manual_seed(0)
    doubled = Doubled(5, 4, 2)
    plain = pyg.TransformerConv(5, 4, 2)
    plain.load_state_dict(doubled.state_dict())
    x = features(NODES, 5, dtype=torch.float32)
    skip = plain.lin_skip(x)
    torch.testing.assert_close(doubled(x, EDGES) - skip, 2 * (plain(x, EDGES) - skip))


def freshly_imported():
    """The layer's class as it is in a process that has built PyG's layer and not yet ours."""
    spec = importlib.util.spec_from_file_location("graphattn_conv_again", conv_module.__file__)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.field_report("B104")
@pytest.mark.parametrize("build", ["imported", "first after PyG's", "accelerated before the first"])
def test_edge_masks_act(build):
    plain = pyg.TransformerConv(5, 4, 2, edge_dim=3)
    if build == "imported":
        conv = TransformerConv(5, 4, 2, edge_dim=3)
    elif build == "first after PyG's":
        conv = freshly_imported().TransformerConv(5, 4, 2, edge_dim=3)
    else:
        conv = freshly_imported().accelerate(pyg.TransformerConv(5, 4, 2, edge_dim=3))
    conv.load_state_dict(plain.state_dict())
    x, e = features(NODES, 5, dtype=torch.float32), features(11, 3, dtype=torch.float32)
    mask = torch.rand(11, generator=torch.Generator().manual_seed(2), requires_grad=True)
    for module in (conv, plain):
        set_masks(module, mask, EDGES, apply_sigmoid=False)
    out, expected = conv(x, EDGES, e), plain(x, EDGES, e)
    torch.testing.assert_close(out, expected)
    (grad,) = torch.autograd.grad(out.square().sum(), mask)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), mask)
    torch.testing.assert_close(grad, expected_grad)
    assert grad.abs().min() > 0
    set_masks(conv, torch.zeros(11), EDGES, apply_sigmoid=False)
    torch.testing.assert_close(conv(x, EDGES, e), conv.lin_skip(x))
    for module in (conv, plain):
        clear_masks(module)
    torch.testing.assert_close(conv(x, EDGES, e), plain(x, EDGES, e))


class TwoLayers(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first = layer(5, 4, heads=2, edge_dim=3)
        self.second = layer(8, 3, heads=1, edge_dim=3)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


def two_models(model=TwoLayers, **kwargs):
    torch.manual_seed(3)
    ours, theirs = model(TransformerConv, **kwargs), model(pyg.TransformerConv, **kwargs)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.field_report("B104")
@pytest.mark.parametrize(
    "algorithm", [AttentionExplainer, lambda: GNNExplainer(epochs=5)], ids=["attention", "gnn"]
)
def test_explanations_are_those_of_pyg(algorithm):
    masks = []
    x, e = features(NODES, 5, dtype=torch.float32), features(11, 3, dtype=torch.float32)
    for model in two_models():
        torch.manual_seed(0)
        explainer = Explainer(
            model,
            algorithm=algorithm(),
            explanation_type="model",
            edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        )
        explanation = explainer(x, EDGES, index=1, edge_attr=e)
        assert explanation.validate()
        masks.append(explanation.edge_mask)
    torch.testing.assert_close(*masks)
    assert masks[0].max() > masks[0].min()


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
def test_pg_explanation_is_that_of_pyg():
    masks = []
    x, e = features(NODES, 5, dtype=torch.float32), features(11, 3, dtype=torch.float32)
    for model in two_models():
        torch.manual_seed(0)
        explainer = Explainer(
            model,
            algorithm=PGExplainer(epochs=2),
            explanation_type="phenomenon",
            edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        )
        target = torch.zeros(NODES, dtype=torch.long)
        for epoch in range(2):
            loss = explainer.algorithm.train(epoch, model, x, EDGES, target=target, index=1, edge_attr=e)
            assert loss > 0
        masks.append(explainer(x, EDGES, target=target, index=1, edge_attr=e).edge_mask)
    torch.testing.assert_close(*masks)


# --- inside other people's models -----------------------------------------------------------------------

METADATA = (
    ["paper", "author"],
    [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "rev", "author")],
)


def hetero_inputs(authors=4, written=5):
    torch.manual_seed(1)
    x = {"paper": torch.randn(6, 5), "author": torch.randn(authors, 5)}
    counts = {"paper": 6, "author": authors}
    sizes = dict(zip(METADATA[1], (9, written, written)))
    edges = {
        kind: torch.stack([torch.randint(max(counts[end], 1), (sizes[kind],)) for end in (kind[0], kind[-1])])
        for kind in METADATA[1]
    }
    return x, edges, {kind: torch.randn(size, 3) for kind, size in sizes.items()}


@pytest.mark.field_report("B88")
@pytest.mark.parametrize("authors,written", [(4, 5), (4, 0), (0, 0)])
def test_to_hetero_agrees_with_pyg(authors, written):
    x, edges, attr = hetero_inputs(authors, written)
    ours, theirs = (pyg.to_hetero(model, METADATA) for model in two_models())
    theirs.load_state_dict(ours.state_dict())
    out, expected = ours(x, edges, attr), theirs(x, edges, attr)
    torch.testing.assert_close(out, expected)
    assert sum(type(module) is TransformerConv for module in ours.modules()) == 6
    sum(value.sum() for value in out.values()).backward()
    assert all(p.grad is not None for name, p in ours.named_parameters() if "second" in name)


@pytest.mark.field_report("B88")
@pytest.mark.parametrize("dropped", [None, METADATA[1][1], METADATA[1][2]])
def test_hetero_conv_agrees_with_pyg(dropped):
    x, edges, attr = hetero_inputs()
    edges.pop(dropped, None)
    attr.pop(dropped, None)
    torch.manual_seed(0)
    models = [
        pyg.HeteroConv({k: layer((-1, -1), 4, 2, edge_dim=3) for k in METADATA[1]})
        for layer in (TransformerConv, pyg.TransformerConv)
    ]
    models[0](*hetero_inputs()[:2], edge_attr_dict=hetero_inputs()[2])
    models[1].load_state_dict(models[0].state_dict())
    out, expected = (model(x, edges, edge_attr_dict=attr) for model in models)
    assert out.keys() == expected.keys()
    torch.testing.assert_close(out, expected)


def test_sequential_and_containers():
    layers = [
        [
            (layer(5, 4, 2, edge_dim=3), "x, edge_index, e -> x"),
            nn.ReLU(),
            (layer(8, 3), "x, edge_index -> x"),
        ]
        for layer in (TransformerConv, pyg.TransformerConv)
    ]
    ours, theirs = (pyg.Sequential("x, edge_index, e", each) for each in layers)
    theirs.load_state_dict(ours.state_dict())
    x, e = features(NODES, 5, dtype=torch.float32), features(11, 3, dtype=torch.float32)
    torch.testing.assert_close(ours(x, EDGES, e), theirs(x, EDGES, e))


@pytest.mark.field_report("B31")
def test_basic_gnn_and_sampled_batches():
    class Model(BasicGNN):
        supports_edge_weight = False
        supports_edge_attr = True
        supports_norm_batch = False

        def __init__(self, layer):
            self.layer = layer
            super().__init__(5, 8, num_layers=2, out_channels=3, norm="layer_norm")

        def init_conv(self, in_channels, out_channels, **kwargs):
            return self.layer(
                in_channels,
                out_channels // 2 if out_channels == 8 else out_channels,
                heads=2,
                concat=out_channels == 8,
                edge_dim=3,
            )

    ours, theirs = two_models(Model)
    # a sampled subgraph: seeds first, edges hop by hop, the same edge drawn twice
    edge_index = torch.tensor([[1, 2, 1, 3, 4, 4, 5], [0, 0, 0, 1, 2, 2, 2]])
    x, e = features(6, 5, dtype=torch.float32), features(7, 3, dtype=torch.float32)
    trimmed = {"num_sampled_nodes_per_hop": [1, 2, 3], "num_sampled_edges_per_hop": [3, 4]}
    full = theirs(x, edge_index, edge_attr=e)
    torch.testing.assert_close(ours(x, edge_index, edge_attr=e), full)
    torch.testing.assert_close(ours(x, edge_index, edge_attr=e, **trimmed)[:1], full[:1])
    h, edges, attr = trim_to_layer(1, *trimmed.values(), x, edge_index, e)
    assert edges.tolist() == [[1, 2, 1], [0, 0, 0]]
    torch.testing.assert_close(ours.convs[0](h, edges, attr), theirs.convs[0](h, edges, attr))


def test_summary_is_that_of_pyg():
    x, e = features(NODES, 5, dtype=torch.float32), features(11, 3, dtype=torch.float32)
    pytest.importorskip("tabulate")
    ours, theirs = (pyg.summary(model, x, EDGES, e) for model in two_models())
    assert ours == theirs and "TransformerConv" in ours


# --- state ----------------------------------------------------------------------------------------------


@pytest.mark.field_report("B82")
@pytest.mark.parametrize("used", [False, True])
def test_copies_and_states_give_the_same_output(used):
    fused, plain = twins(5, 4, 2, edge_dim=3, beta=True)
    x, e = features(NODES, 5), features(11, 3)
    names = set(vars(fused))
    if used:
        fused(x, EDGES, e)
        assert set(vars(fused)) == names and fused._alpha is None
    stream = io.BytesIO()
    torch.save(fused, stream)
    stream.seek(0)
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), torch.load(stream, weights_only=False)]
    assert list(fused.state_dict()) == list(plain.state_dict())
    copies.append(TransformerConv(5, 4, 2, edge_dim=3, beta=True).double())
    copies[-1].load_state_dict(plain.state_dict(), strict=True)
    expected = plain(x, EDGES, e)
    for each in [fused, *copies]:
        assert type(each) is TransformerConv
        torch.testing.assert_close(each(x, EDGES, e), expected)
        assert each._alpha is None


def test_reset_parameters_draws_every_parameter_anew():
    conv = TransformerConv(5, 4, 2, edge_dim=3, beta=True)
    drawn = []
    for _ in range(2):
        for parameter in conv.parameters():
            nn.init.constant_(parameter, torch.nan)
        torch.manual_seed(7)
        conv.reset_parameters()
        drawn.append([parameter.detach().clone() for parameter in conv.parameters()])
    assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(*drawn))


def test_pruned_edge_projection_is_used():
    from torch.nn.utils import prune

    fused, plain = twins(5, 4, 2, edge_dim=3)
    for conv in (fused, plain):
        prune.l1_unstructured(conv.lin_edge, "weight", amount=0.5)
    for conv in (fused, plain):  # the mask holds for the weights as they are now
        with torch.no_grad():
            conv.lin_edge.weight_orig.mul_(2)
    assert_twins_agree(
        fused, plain, [features(NODES, 5), features(11, 3)], lambda conv, x, e: conv(x, EDGES, e)
    )


def test_edge_index_changed_in_place_is_seen():
    fused, plain = twins(5, 4, 2)
    x, edges = features(NODES, 5), EDGES.clone()
    fused(x, edges)
    edges[0, 0] = 4
    torch.testing.assert_close(fused(x, edges), plain(x, edges))


def test_training_after_a_call_in_inference_mode():
    fused, plain = twins(5, 4, 2)
    x, edges = features(NODES, 5), EDGES.clone()
    with torch.inference_mode():
        fused(x, edges)
    assert_twins_agree(fused, plain, [x], lambda conv, x: conv(x, edges))


# --- precision and compilers ----------------------------------------------------------------------------


@pytest.mark.field_report("B18")
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_autocast_gives_bfloat16_and_gradients_of_the_parameters(edge_dim):
    fused, plain = twins(5, 4, 2, dtype=torch.float32, edge_dim=edge_dim, beta=True)
    x, e = (
        features(NODES, 5, dtype=torch.float32),
        None if edge_dim is None else features(11, 3, dtype=torch.float32),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fused(x, EDGES, e)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), plain(x, EDGES, e), rtol=0.05, atol=0.05)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in fused.parameters())


@pytest.mark.field_report("B80")
def test_compiled_once_for_all_batches():
    torch._dynamo.reset()
    fused, plain = twins(5, 4, 2, dtype=torch.float32, edge_dim=3, beta=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused, fullgraph=True, dynamic=True, backend=counter)
    generator = torch.Generator().manual_seed(0)
    compiled(features(9, 5, dtype=torch.float32), SIMPLE, features(8, 3, dtype=torch.float32))
    first = counter.frame_count
    for nodes, num_edges in [(10, 30), (17, 41), (29, 12), (11, 100)]:
        x = torch.randn(nodes, 5, generator=generator)
        edge_index = torch.randint(nodes, (2, num_edges), generator=generator)
        e = torch.randn(num_edges, 3, generator=generator)
        out, expected = compiled(x, edge_index, e), plain(x, edge_index, e)
        torch.testing.assert_close(out, expected)
        grads = [
            torch.autograd.grad(y.square().sum(), list(conv.parameters()))
            for y, conv in ((out, fused), (expected, plain))
        ]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == first
    with pytest.raises(IndexError, match=r"\[0, 4\)"):
        compiled(torch.randn(4, 5), torch.tensor([[0, 9], [1, 2]]), torch.randn(2, 3))


def test_compiled_with_a_graph_or_a_sorted_edge_index():
    fused, plain = twins(5, 4, 2, dtype=torch.float32)
    x = features(NODES, 5, dtype=torch.float32)
    for form in ("Graph", "EdgeIndex col"):
        torch._dynamo.reset()
        adj, _ = adjacency(form, SIMPLE, NODES)
        if form != "Graph":
            adj.fill_cache_()
        out = torch.compile(fused, fullgraph=True, backend="eager")(x, adj)
        torch.testing.assert_close(out, plain(x, SIMPLE))


def test_inductor_agrees():
    torch._dynamo.reset()
    fused, plain = twins(5, 4, 2, dtype=torch.float32)
    x = features(NODES, 5, dtype=torch.float32)
    torch.testing.assert_close(torch.compile(fused, fullgraph=True)(x, EDGES), plain(x, EDGES))


@pytest.mark.field_report("B81")
def test_export_runs_at_other_sizes():
    fused, plain = twins(5, 4, 2, dtype=torch.float32, edge_dim=3)
    nodes, num_edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    x, e = features(NODES, 5, dtype=torch.float32), features(11, 3, dtype=torch.float32)
    program = torch.export.export(
        fused.eval(), (x, EDGES, e), dynamic_shapes=({0: nodes}, {1: num_edges}, {0: num_edges})
    )
    edge_index = torch.randint(20, (2, 50), generator=torch.Generator().manual_seed(0))
    x, e = features(20, 5, dtype=torch.float32), features(50, 3, dtype=torch.float32)
    torch.testing.assert_close(program.module()(x, edge_index, e), plain(x, edge_index, e))


# --- accelerate -----------------------------------------------------------------------------------------


class UsersLayer(pyg.TransformerConv):
    pass


def test_accelerate_switches_exactly_pygs_layers(fused_calls):
    x, e = features(NODES, 5, dtype=torch.float32), features(11, 3, dtype=torch.float32)
    model = nn.ModuleDict(
        {"plain": TwoLayers(pyg.TransformerConv), "users": UsersLayer(5, 4), "other": pyg.GATConv(5, 4)}
    )
    wrapped = nn.DataParallel(model)
    expected, state = model["plain"](x, EDGES, e), {k: v.clone() for k, v in model.state_dict().items()}
    parameters, seen = list(model.parameters()), []
    model["plain"].first.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(2):
        assert accelerate(wrapped) is wrapped
    assert type(model["plain"].first) is type(model["plain"].second) is TransformerConv
    assert type(model["users"]) is UsersLayer and type(model["other"]) is pyg.GATConv
    torch.testing.assert_close(model["plain"](x, EDGES, e), expected)
    assert len(fused_calls) == 2 and len(seen) == 1
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def test_accelerated_layer_keeps_its_hooks_masks_and_copies(fused_calls):
    layer, seen = pyg.TransformerConv(5, 4, 2), []
    x = features(NODES, 5, dtype=torch.float32)
    handle = layer.register_message_forward_hook(lambda *_: seen.append(1))
    expected = layer(x, EDGES)
    assert accelerate(layer) is layer and repr(layer) == "TransformerConv(5, 4, heads=2)"
    torch.testing.assert_close(layer(x, EDGES), expected)
    assert len(seen) == 2 and not fused_calls
    handle.remove()
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(each(x, EDGES), expected)
    assert len(fused_calls) == 3


def test_accelerate_reaches_hetero_models(fused_calls):
    x, edges, attr = hetero_inputs()
    torch.manual_seed(0)
    model = pyg.to_hetero(TwoLayers(pyg.TransformerConv), METADATA)
    expected = model(x, edges, attr)
    torch.testing.assert_close(accelerate(model)(x, edges, attr), expected)
    assert len(fused_calls) == 6
    lazy = pyg.HeteroConv({kind: pyg.TransformerConv((-1, -1), 4, edge_dim=3) for kind in METADATA[1]})
    assert accelerate(lazy)(x, edges, edge_attr_dict=attr)["paper"].shape == (6, 4)
    assert len(fused_calls) == 9


@pytest.mark.parametrize(
    "graph",
    [
        WindowGraph(24, 2),
        WindowGraph(24, (None, 1)),
        CompleteGraph(24, causal=True),
        GridGraph((4, 6), 1),
        CompleteGraph.from_batch(torch.arange(24) % 5),
    ],
    ids=["window", "unbounded", "causal", "grid", "cliques"],
)
def test_weights_on_a_structured_graph_belong_to_its_edges(graph):
    conv, x = TransformerConv(8, 4, heads=3), torch.randn(24, 8)
    out, (edge_index, alpha) = conv(x, graph, return_attention_weights=True)
    theirs = pyg.TransformerConv(8, 4, heads=3)
    theirs.load_state_dict(conv.state_dict())
    expected_out, (_, expected) = theirs(x, edge_index, return_attention_weights=True)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(alpha, expected)
