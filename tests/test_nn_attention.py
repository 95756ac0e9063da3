"""GraphMultiheadAttention: torch's own layer with the same weights is the oracle, in values and gradients."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradgradcheck
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

import graphattn.nn.attention as attention_module
from graphattn import CompleteGraph, GridGraph, SparseGraph, WindowGraph, as_graph
from graphattn.nn import GraphMultiheadAttention

# Query 3 has no edge, 0 -> 1 is there twice.
EDGES = torch.tensor([[0, 1, 2, 2, 0, 4, 4, 0], [1, 0, 1, 2, 4, 0, 4, 1]])


def twins(*args, dtype=torch.float64, **kwargs):
    """Our layer and torch's, with the same weights and biases that are not 0."""
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(*args, batch_first=True, **kwargs).to(dtype)
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    ours = GraphMultiheadAttention(*args, **kwargs).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def features(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(module, inputs, call):
    """What `call(module, *inputs)` returns, and the gradients of all inputs and parameters."""
    inputs = [leaf.detach().clone().requires_grad_() for leaf in inputs]
    outs = call(module, *inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    loss = sum((out * features(*out.shape, seed=9, dtype=out.dtype)).sum() for out in outs)
    leaves = {f"input {i}": leaf for i, leaf in enumerate(inputs)} | dict(module.named_parameters())
    return outs, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)))


def assert_agree(ours, theirs, inputs, call, their_call, rtol=1e-10, atol=1e-11):
    result, expected = run(ours, inputs, call), run(theirs, inputs, their_call)
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


@pytest.fixture
def fused_calls(monkeypatch):
    """One entry for every call of the fused operator."""
    calls, operator = [], attention_module.graph_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return operator(*args, **kwargs)

    monkeypatch.setattr(attention_module, "graph_attention", counted)
    return calls


# --- the numbers of torch.nn.MultiheadAttention ---------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "dtype, rtol, atol", [(torch.float64, 1e-10, 1e-11), (torch.float32, 1e-5, 1e-5)], ids=["f64", "f32"]
)
def test_complete_graph(dtype, rtol, atol, bias):
    ours, theirs = twins(12, 3, bias=bias, dtype=dtype)
    assert_agree(
        ours,
        theirs,
        [features(2, 7, 12, dtype=dtype)],
        lambda m, x: m(x, CompleteGraph(7), return_attention_weights=True)[0],
        lambda m, x: m(x, x, x, need_weights=False)[0],
        rtol,
        atol,
    )


def test_weights_are_torch_s_not_averaged():
    ours, theirs = twins(12, 3)
    assert_agree(
        ours,
        theirs,
        [features(2, 7, 12)],
        lambda m, x: m(x, CompleteGraph(7), return_attention_weights=True),
        lambda m, x: (lambda out, w: (out, w.movedim(1, -1)))(*m(x, x, x, average_attn_weights=False)),
    )


@pytest.mark.field_report("B58")
@pytest.mark.parametrize("structured", [True, False])
def test_masks(structured):
    graph = WindowGraph(9, (2, 0), dilation=2)
    ours, theirs = twins(8, 2)
    assert_agree(
        ours,
        theirs,
        [features(3, 9, 8)],
        lambda m, x: m(x, graph if structured else SparseGraph.from_mask(graph.to_mask())),
        lambda m, x: m(x, x, x, attn_mask=~graph.to_mask())[0],
    )


def test_cross_attention_with_widths_of_its_own():
    ours, theirs = twins(8, 4, kdim=5, vdim=3)
    assert ours.in_proj_weight is None and ours.q_proj_weight.shape == (8, 8)
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, 0] = True
    assert_agree(
        ours,
        theirs,
        [features(2, 6, 8), features(2, 4, 5, seed=2), features(2, 4, 3, seed=3)],
        lambda m, q, k, v: m(q, SparseGraph.from_mask(mask), k, v),
        lambda m, q, k, v: m(q, k, v, attn_mask=~mask)[0],
    )


def test_value_defaults_to_key_and_key_to_query():
    ours, _ = twins(8, 4)
    x, y = features(6, 8), features(4, 8, seed=2)
    graph = CompleteGraph(6, num_keys=4)
    assert torch.equal(ours(x, graph, y), ours(x, graph, y, y))
    assert torch.equal(
        ours(x, CompleteGraph(6), value=y.repeat(2, 1)[:6]), ours(x, CompleteGraph(6), x, y.repeat(2, 1)[:6])
    )
    assert torch.equal(ours((y, x), graph), ours(x, graph, y))


def test_packed_graphs_equal_padding():
    sizes = [3, 0, 5, 1]
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    ours, theirs = twins(8, 2)
    batch = torch.arange(4).repeat_interleave(torch.tensor(sizes))

    def padded(m, x):
        dense = x.new_zeros(4, 5, 8).index_put((batch, torch.arange(9) - ptr[batch]), x)
        ignored = torch.arange(5) >= torch.tensor(sizes)[:, None]
        ignored[1] = False  # an empty graph: torch would give NaN
        out = m(dense, dense, dense, key_padding_mask=ignored, need_weights=False)[0]
        return out[batch, torch.arange(9) - ptr[batch]]

    order = torch.tensor([4, 0, 8, 2, 1, 6, 5, 7, 3])
    for graph in (CompleteGraph.from_ptr(ptr), CompleteGraph.from_batch(batch)):
        assert_agree(ours, theirs, [features(9, 8)], lambda m, x, g=graph: m(x, g), padded)
    shuffled = CompleteGraph.from_batch(batch[order])
    assert_agree(ours, theirs, [features(9, 8)], lambda m, x: m(x[order], shuffled)[order.argsort()], padded)


def test_bias_is_torch_s_float_mask():
    graph = GridGraph((3, 4), 1)
    ours, theirs = twins(8, 2)
    offsets = features(1, 9, 2, seed=5)  # a relative position bias: one number for each cell of the window

    def dense(m, x, offsets):
        source, target = graph.to_edge_index()
        rows = offsets.expand(12, 9, 2).reshape(-1, 2)[graph.slots()]
        mask = x.new_full((12, 12, 2), -torch.inf).index_put((target, source), rows)
        return m(x, x, x, attn_mask=mask.permute(2, 0, 1), need_weights=False)[0]

    # torch takes a mask for each head of each batch entry: one entry
    assert_agree(
        ours,
        theirs,
        [features(1, 12, 8), offsets],
        lambda m, x, offsets: m(x, graph, bias=offsets),
        dense,
    )


def test_a_query_without_an_edge_gets_the_output_bias():
    ours, _ = twins(8, 2)
    x = features(5, 8).requires_grad_()
    out = ours(x, EDGES)
    assert torch.equal(out[3], ours.out_proj.bias)
    (grad,) = torch.autograd.grad(out[3].square().sum(), x)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_empty():
    ours, _ = twins(8, 2)
    assert ours(features(0, 8), CompleteGraph(0)).shape == (0, 8)
    assert ours(features(2, 0, 8), torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 8)
    assert ours(features(0, 3, 8), CompleteGraph(3)).shape == (0, 3, 8)
    assert torch.equal(ours(features(1, 8), torch.empty(2, 0, dtype=torch.int64))[0], ours.out_proj.bias)


def test_second_derivatives():
    ours, _ = twins(4, 2)
    assert gradgradcheck(lambda x: ours(x, EDGES), [features(5, 4).requires_grad_()])


def test_autocast_and_half_precision():
    ours, theirs = twins(16, 2, dtype=torch.float32)
    x = features(6, 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(x, CompleteGraph(6))
        expected = theirs(x, x, x, need_weights=False)[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    half = copy.deepcopy(ours).half()(x.half(), EDGES)
    assert half.dtype == torch.float16 and half[3].equal(ours.out_proj.bias.half())


# --- parameters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kdim": 5}, {"bias": False}], ids=str)
def test_parameters_are_torch_s(options):
    torch.manual_seed(7)
    ours = GraphMultiheadAttention(8, 2, **options)
    torch.manual_seed(7)
    theirs = nn.MultiheadAttention(8, 2, **options)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    theirs.load_state_dict(ours.state_dict())


def test_an_optimiser_state_goes_over():
    ours, theirs = twins(8, 2)
    x = features(1, 5, 8)
    optimisers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (ours, theirs)]

    def step(m, optimiser, call):
        optimiser.zero_grad()
        call(m).square().sum().backward()
        optimiser.step()

    step(theirs, optimisers[1], lambda m: m(x, x, x)[0])
    ours.load_state_dict(theirs.state_dict())
    optimisers[0].load_state_dict(copy.deepcopy(optimisers[1].state_dict()))
    step(theirs, optimisers[1], lambda m: m(x, x, x)[0])
    step(ours, optimisers[0], lambda m: m(x, CompleteGraph(5)))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-8, atol=1e-9)


def test_reset_parameters_draws_every_parameter():
    for layer in (GraphMultiheadAttention(8, 2), GraphMultiheadAttention(8, 2, kdim=3)):
        for parameter in layer.parameters():
            nn.init.constant_(parameter, 7.0)
        layer.reset_parameters()
        for name, parameter in layer.named_parameters():
            assert not (parameter == 7.0).any(), name
        assert not layer.in_proj_bias.any() and not layer.out_proj.bias.any()


def test_copies():
    layer, x = GraphMultiheadAttention(8, 2), features(5, 8, dtype=torch.float32)
    expected = layer(x, EDGES)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for twin in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(saved, weights_only=False),
    ):
        assert torch.equal(twin(x, EDGES), expected)
    assert repr(layer) == "GraphMultiheadAttention(8, heads=2)"


# --- dropout --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edge_wise", [False, True])
def test_dropout(edge_wise):
    layer = GraphMultiheadAttention(4, 2, dropout=0.25, bias=False).double()
    if edge_wise:
        layer.register_message_forward_hook(lambda *_: None)
    nn.init.eye_(layer.out_proj.weight)
    x, graph = features(400, 4), CompleteGraph(1, num_keys=400)
    with torch.no_grad():
        layer.in_proj_weight[:4] = 0  # equal weights of 1/400
        layer.in_proj_weight[8:] = 0
        layer.in_proj_weight[8:, 0] = 1
    ones = torch.ones_like(x)
    drawn, weights = layer(x[:1], graph, ones, return_attention_weights=True)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 400))  # before dropout
    kept = drawn * 400 * 0.75  # how many edges each head kept: binomial, 300 ± 8.7
    torch.testing.assert_close(kept, kept.round())
    assert (kept - 300).abs().max() < 45 and kept[0, 0] == kept[0, 1] and kept[0, 0] != kept[0, 2]
    torch.manual_seed(5)
    once = layer(x[:1], graph, ones)
    torch.manual_seed(5)
    assert torch.equal(layer(x[:1], graph, ones), once)
    layer.eval()
    torch.testing.assert_close(layer(x[:1], graph, ones), torch.ones(1, 4).double())


# --- graphs and explainers ------------------------------------------------------------------------------


def test_every_form_of_a_graph():
    ours, _ = twins(8, 2)
    x = features(5, 8)
    simple = EDGES[:, :-1]
    expected, weights = ours(x, as_graph(simple, num_nodes=5), return_attention_weights=True)
    coo = torch.sparse_coo_tensor(simple.flip(0), torch.ones(7), (5, 5), check_invariants=True).coalesce()
    for form in (simple, simple.int(), coo, Data(x=x, edge_index=simple)):
        torch.testing.assert_close(ours(x, form), expected)
    out, listed = ours(x, simple, return_attention_weights=True)
    assert torch.equal(out, expected) and torch.equal(listed, weights)
    total = torch.zeros(5, 2).double().index_add(0, simple[1], listed.double())
    torch.testing.assert_close(total, (torch.arange(5) != 3).double()[:, None].expand(5, 2))


GRAPHS = [
    as_graph(EDGES, num_nodes=6),
    CompleteGraph(6, causal=True),
    CompleteGraph.from_batch(torch.tensor([1, 0, 1, 2, 0, 1])),
    WindowGraph(6, (1, 2)),
    GridGraph((2, 3), 1, border="shift"),
]


@pytest.mark.parametrize("graph", GRAPHS, ids=repr)
def test_messages_give_the_same_numbers(graph, fused_calls):
    ours, _ = twins(8, 2)
    bias = features(*graph.edge_shape, 2, seed=4)
    call = lambda m, x, bias: m(x, graph, bias=bias, return_attention_weights=True)  # noqa: E731
    expected = run(ours, [features(3, 6, 8), bias], call)
    assert fused_calls == [1]
    seen = []
    ours.register_message_forward_hook(lambda _, kwargs, out: seen.append((kwargs[0]["alpha"], out)))
    torch.testing.assert_close(run(ours, [features(3, 6, 8), bias], call), expected, rtol=1e-10, atol=1e-12)
    assert fused_calls == [1]
    ((alpha, messages),) = seen
    assert alpha.shape == (3, graph.num_edges, 2) and messages.shape == (3, graph.num_edges, 2, 4)


def test_an_edge_mask_scales_the_edges():
    ours, _ = twins(8, 2)
    x, mask = features(5, 8), torch.tensor([1.0, 0.5, 0.0, 1.0, 1.0, 0.25, 1.0, 1.0]).double()
    set_masks(ours, mask, EDGES, apply_sigmoid=False)
    out = ours(x, EDGES)
    clear_masks(ours)
    _, weights = ours(x, EDGES, return_attention_weights=True)
    value = (x @ ours.in_proj_weight[16:].T + ours.in_proj_bias[16:]).view(5, 2, 4)
    expected = torch.zeros(5, 2, 4).double()
    for e, (j, i) in enumerate(EDGES.T.tolist()):
        expected[i] += mask[e] * weights[e, :, None] * value[j]
    torch.testing.assert_close(out, expected.flatten(1) @ ours.out_proj.weight.T + ours.out_proj.bias)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GraphMultiheadAttention(8, 2), GraphMultiheadAttention(8, 4)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index).log_softmax(-1)


def test_explainers():
    model, x = Classifier(), features(5, 8, dtype=torch.float32)
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "log_probs"}
    options = {
        "model": model,
        "explanation_type": "model",
        "edge_mask_type": "object",
        "model_config": config,
    }
    explanation = Explainer(algorithm=AttentionExplainer(), **options)(x, EDGES)
    seen, h = [], x
    for layer, act in ((model.first, torch.relu), (model.second, lambda x: x)):
        h, weights = layer(h, EDGES, return_attention_weights=True)
        h = act(h)
        seen.append(weights.amax(1))
    torch.testing.assert_close(explanation.edge_mask, torch.stack(seen).amax(0))

    explanation = Explainer(algorithm=GNNExplainer(epochs=3), node_mask_type="attributes", **options)(
        x, EDGES
    )
    assert explanation.edge_mask.shape == (8,) and explanation.edge_mask.gt(0).any()
    torch.testing.assert_close(model(x, EDGES), model(x, as_graph(EDGES, num_nodes=5)))  # masks are gone


def test_summary_and_hetero():
    assert "GraphMultiheadAttention" in pyg.summary(Classifier(), features(5, 8, dtype=torch.float32), EDGES)
    to_b, to_a = (
        twins(8, 2, kdim=6, vdim=6, dtype=torch.float32)[0],
        GraphMultiheadAttention(6, 2, kdim=8, vdim=8),
    )
    conv = pyg.HeteroConv({("a", "to", "b"): to_b, ("b", "of", "a"): to_a})
    x = {"a": features(3, 6, dtype=torch.float32), "b": features(4, 8, dtype=torch.float32)}
    edges = {
        ("a", "to", "b"): torch.tensor([[0, 1, 2], [3, 3, 0]]),
        ("b", "of", "a"): torch.empty(2, 0).long(),
    }
    out = conv(x, edges)
    assert torch.equal(out["b"], to_b(x["b"], edges["a", "to", "b"], x["a"]))
    assert torch.equal(out["a"], to_a.out_proj.bias.expand(3, 6))


def test_compile_and_export():
    layer = GraphMultiheadAttention(8, 2)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for nodes, edges in ((5, 8), (7, 30), (11, 4)):
        x = features(nodes, 8, dtype=torch.float32).requires_grad_()
        edge_index = torch.randint(nodes, (2, edges))
        grads = [torch.autograd.grad(m(x, edge_index).square().sum(), x)[0] for m in (layer, compiled)]
        torch.testing.assert_close(grads[1], grads[0])
    graph = WindowGraph(6, 1)
    x = features(2, 6, 8, dtype=torch.float32)
    exported = torch.export.export(layer, (x, graph))
    torch.testing.assert_close(exported.module()(x, graph), layer(x, graph))


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((10, 3), {}, "`embed_dim` must be a positive multiple of `num_heads`, got embed_dim=10"),
        ((10, 0), {}, "`num_heads`"),
        ((8, 2), {"dropout": 1.5}, "`dropout` must be a probability"),
        ((8, 2), {"kdim": 0}, r"`kdim` must be at least 1 and below 2\*\*31, got 0"),
    ],
)
def test_wrong_layers(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        GraphMultiheadAttention(*arguments, **options)


def test_numbers_of_numpy_are_numbers():
    layer = GraphMultiheadAttention(np.int64(8), np.int32(2), dropout=np.float32(0.5))
    assert (layer.embed_dim, layer.num_heads) == (8, 2)
    for arguments in ((8.0, 2), (8, "2"), (True, 1), (8, None)):
        with pytest.raises(TypeError, match=r"must be an int, got (float|str|bool|NoneType)"):
            GraphMultiheadAttention(*arguments)
    with pytest.raises(TypeError, match="`dropout` must be a number"):
        GraphMultiheadAttention(8, 2, dropout="0.5")


@pytest.mark.parametrize("weights, inputs", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_autocast_takes_features_and_weights_of_two_dtypes(weights, inputs):
    x, layer = features(5, 8, dtype=torch.float32), GraphMultiheadAttention(8, 2)
    expected = layer(x, CompleteGraph(5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer.to(getattr(torch, weights))(x.to(getattr(torch, inputs)), CompleteGraph(5))
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
        with pytest.raises(TypeError, match="`query` must have the dtype"):
            layer(x.double(), CompleteGraph(5))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda m, x: m(x[:, :7], CompleteGraph(5)),
            ValueError,
            r"`query` .* \[..., nodes, 8\], got \[5, 7\]",
        ),
        (lambda m, x: m(x[0], CompleteGraph(5)), ValueError, "`query` must have shape"),
        (lambda m, x: m(x, CompleteGraph(4)), ValueError, "`graph` must join the 5 keys and 5 queries"),
        (lambda m, x: m(x, CompleteGraph(5), x[:4]), ValueError, "4 keys and 5 queries"),
        (lambda m, x: m(x, CompleteGraph(5), x, x[:4]), ValueError, "`key` and `value` as many nodes"),
        (lambda m, x: m(x[None], CompleteGraph(5), x), ValueError, "same leading dimensions"),
        (lambda m, x: m(x.long(), CompleteGraph(5)), TypeError, "`query` must be floating point"),
        (
            lambda m, x: m(torch.nested.as_nested_tensor([x, x[:3]], layout=torch.jagged), CompleteGraph(5)),
            TypeError,
            "`query` must be one dense tensor, got a nested one. .*from_ptr",
        ),
        (lambda m, x: m(x.to_sparse(), CompleteGraph(5)), TypeError, "`query` must be dense"),
        (
            lambda m, x: m(x.double(), CompleteGraph(5)),
            TypeError,
            "`query` must have the dtype of the layer's weights, torch.float32, got torch.float64",
        ),
        (lambda m, x: m(x, CompleteGraph(5), x.bfloat16()), TypeError, "`key` must have the dtype"),
        (lambda m, x: m(None, CompleteGraph(5)), TypeError, "`query` must be a tensor, got NoneType"),
        (lambda m, x: m((x, None), CompleteGraph(5)), TypeError, "both ends, .* None for the targets"),
        (lambda m, x: m((x, x), CompleteGraph(5), x), ValueError, "pair .* together with them"),
        (lambda m, x: m(x, 3), TypeError, "A graph must be"),
        (lambda m, x: m(x, torch.tensor([[5], [0]])), IndexError, r"\[0, 5\), got 5"),
        (lambda m, x: m(x, CompleteGraph(5), bias=x), ValueError, "`bias` must have shape"),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call(GraphMultiheadAttention(8, 2), features(5, 8, dtype=torch.float32))
