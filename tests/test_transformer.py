"""Encoder layer, transformer and GPS: torch's and PyG's layers with the same weights are the oracle."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

from graphattn import CompleteGraph, SparseGraph, WindowGraph, as_graph
from graphattn.nn import (
    GPSConv,
    GraphMultiheadAttention,
    GraphTransformer,
    GraphTransformerLayer,
    TransformerConv,
)
from tests.test_nn_attention import features, run

EDGES = torch.tensor([[0, 1, 2, 2, 0, 4, 4, 0, 5], [1, 0, 1, 2, 4, 0, 4, 1, 6]])  # 0 -> 1 twice, 3 has none
BATCH = torch.tensor([0, 0, 0, 0, 0, 2, 2, 2, 3])  # graph 1 is empty


def assert_agree(ours, theirs, inputs, call, their_call=None, rtol=1e-10, atol=1e-11):
    result, expected = run(ours, inputs, call), run(theirs, inputs, their_call or call)
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


# --- GraphTransformerLayer ------------------------------------------------------------------------------


def layer_twins(*args, dtype=torch.float64, **kwargs):
    torch.manual_seed(3)
    theirs = nn.TransformerEncoderLayer(*args, batch_first=True, **kwargs).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = GraphTransformerLayer(*args, **kwargs).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize(
    "norm_first, activation, bias",
    [
        (False, "relu", True),
        (True, "gelu", True),
        (False, "gelu", False),
        (True, "relu", False),
        (True, F.silu, True),
    ],
)
def test_layer_is_torch_s(norm_first, activation, bias):
    options = {"activation": activation, "norm_first": norm_first, "bias": bias, "dropout": 0.0}
    ours, theirs = layer_twins(8, 2, 16, layer_norm_eps=1e-3, **options)
    x = [features(3, 7, 8)]
    assert_agree(ours, theirs, x, lambda m, x: m(x, CompleteGraph(7)), lambda m, x: m(x))
    window = WindowGraph(7, (2, 1))
    assert_agree(ours, theirs, x, lambda m, x: m(x, window), lambda m, x: m(x, src_mask=~window.to_mask()))
    assert_agree(  # in evaluation torch takes a path of its own
        ours.eval(), theirs.eval(), x, lambda m, x: m(x, CompleteGraph(7)), lambda m, x: m(x)
    )


def test_layer_in_float32():
    ours, theirs = layer_twins(8, 2, 16, 0.0, dtype=torch.float32)
    x = [features(3, 7, 8, dtype=torch.float32)]
    assert_agree(ours, theirs, x, lambda m, x: m(x, CompleteGraph(7)), lambda m, x: m(x), 1e-5, 1e-5)


def test_layer_on_packed_graphs_is_torch_s_with_padding():
    ours, theirs = layer_twins(8, 2, 16, 0.0)
    sizes = torch.tensor([3, 1, 5])
    ptr = torch.cat([torch.zeros(1).long(), sizes.cumsum(0)])
    batch = torch.arange(3).repeat_interleave(sizes)
    place = batch, torch.arange(9) - ptr[batch]

    def padded(m, x):
        dense = x.new_zeros(3, 5, 8).index_put(place, x)
        return m(dense, src_key_padding_mask=torch.arange(5) >= sizes[:, None])[place]

    for graph in (CompleteGraph.from_ptr(ptr), CompleteGraph.from_ptr(ptr).to_sparse()):
        assert_agree(ours, theirs, [features(9, 8)], lambda m, x, g=graph: m(x, g), padded)


def test_layer_parameters_are_torch_s():
    torch.manual_seed(7)
    ours = GraphTransformerLayer(8, 2, 16)
    torch.manual_seed(7)
    theirs = nn.TransformerEncoderLayer(8, 2, 16)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    for name in ("linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2"):
        assert repr(getattr(ours, name)) == repr(getattr(theirs, name))
    assert ours.self_attn.dropout == 0.1


def test_layer_takes_a_bias_and_gives_its_weights():
    layer, _ = layer_twins(8, 2, 16, 0.0)
    graph, x = WindowGraph(7, 1), features(2, 7, 8)
    out, weights = layer(x, graph, return_attention_weights=True)
    assert torch.equal(out, layer(x, graph)) and weights.shape == (2, 7, 3, 2)
    only_self = torch.tensor([-torch.inf, 0.0, -torch.inf]).double().view(1, 3, 1)
    loops = SparseGraph.from_mask(torch.eye(7, dtype=torch.bool))
    torch.testing.assert_close(layer(x, graph, bias=only_self), layer(x, loops))


def test_layer_drops_everywhere_torch_does():
    # With every branch dropped only the residual path is left: x, in pre-norm.
    layer = GraphTransformerLayer(8, 2, 16, dropout=1.0, norm_first=True)
    x = features(7, 8, dtype=torch.float32)
    assert torch.equal(layer(x, EDGES), x)
    assert not torch.equal(layer.eval()(x, EDGES), x)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"d_model": 8, "nhead": 3},
            "`d_model` must be a positive multiple of `nhead`, got d_model=8 and nhead=3",
        ),
        (
            {"d_model": 8, "nhead": 2, "activation": "swish"},
            '`activation` must be "relu", "gelu" or a function',
        ),
        ({"d_model": 8, "nhead": 2, "activation": None}, "`activation` must be .* got None"),
        ({"d_model": 8, "nhead": 2, "dropout": 2.0}, "`dropout` must be a probability"),
        ({"d_model": 8, "nhead": 2, "layer_norm_eps": -1.0}, "`layer_norm_eps` must be .* got -1.0"),
        ({"d_model": 8, "nhead": 2, "layer_norm_eps": "1e-5"}, "`layer_norm_eps` must be a number"),
        ({"d_model": 8, "nhead": 2, "layer_norm_eps": float("nan")}, "`layer_norm_eps` must .* got nan"),
        ({"d_model": 8, "nhead": 2, "dim_feedforward": 0}, "`dim_feedforward` must be at least 1"),
    ],
)
def test_wrong_layers(arguments, message):
    with pytest.raises(ValueError, match=message):
        GraphTransformerLayer(**arguments)


# --- GraphTransformer -----------------------------------------------------------------------------------


def transformer(**kwargs):
    torch.manual_seed(2)
    return GraphTransformer(3, 8, 4, num_layers=3, heads=2, **kwargs).double()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_transformer_is_a_stack_of_torch_s_layers(checkpointing):
    model = transformer(encoding_channels=5, checkpointing=checkpointing)
    stack = nn.ModuleDict(
        {
            "lin_in": nn.Linear(3, 8),
            "lin_encoding": nn.Linear(5, 8, bias=False),
            "layers": nn.ModuleList(
                nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
                for _ in range(3)
            ),
            "norm": nn.LayerNorm(8),
            "lin_out": nn.Linear(8, 4),
        }
    ).double()
    stack.load_state_dict(model.state_dict())
    graph = WindowGraph(6, 2)

    def by_torch(m, x, encoding):
        h = m["lin_in"](x) + m["lin_encoding"](encoding)
        for layer in m["layers"]:
            h = layer(h, src_mask=~graph.to_mask())
        return m["lin_out"](m["norm"](h))

    inputs = [features(2, 6, 3), features(6, 5, seed=4)]
    assert_agree(model, stack, inputs, lambda m, x, encoding: m(x, graph, encoding), by_torch)


def test_transformer_weights_of_every_layer():
    model, x = transformer(), features(7, 3)
    out, weights = model(x, EDGES, return_attention_weights=True)
    torch.testing.assert_close(out, model(x, EDGES))
    assert [alpha.shape for alpha in weights] == 3 * [(9, 2)]
    h = model.lin_in(x)
    for layer, alpha in zip(model.layers, weights):
        _, expected = layer.self_attn(layer.norm1(h), EDGES, return_attention_weights=True)
        torch.testing.assert_close(alpha, expected)
        h = layer(h, EDGES)


def test_checkpointing_keeps_the_dropped_edges():
    plain, kept = transformer(dropout=0.4), transformer(dropout=0.4, checkpointing=True)
    results = []
    for model in (plain, kept):
        torch.manual_seed(11)
        results.append(
            run(model, [features(7, 3)], lambda m, x: m(x, EDGES, return_attention_weights=True)[0])
        )
    torch.testing.assert_close(results[1], results[0])


def test_checkpointing_holds_less():
    def held(checkpointing):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
            transformer(checkpointing=checkpointing)(features(50, 3), WindowGraph(50, 2))
        return sum(saved)

    assert held(True) < held(False) / 4


def test_transformer_ends():
    model = transformer()
    assert model(features(0, 3), torch.empty(2, 0, dtype=torch.int64)).shape == (0, 4)
    assert model(features(2, 1, 3), CompleteGraph(1)).shape == (2, 1, 4)
    assert GraphTransformer(3, 8, 4, num_layers=0, heads=2)(torch.randn(5, 3), EDGES[:, :0]).shape == (5, 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(features(7, 3), EDGES), model(features(7, 3), EDGES))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    model.reset_parameters()
    assert not any((parameter == 7.0).any() for parameter in model.parameters())
    assert "GraphTransformerLayer" in pyg.summary(model, features(7, 3), EDGES)


def test_relabelling_nodes_permutes_outputs():
    model, x = transformer(), features(7, 3)
    order = torch.tensor([3, 6, 0, 2, 5, 1, 4])
    new_name = order.argsort()
    torch.testing.assert_close(model(x[order], new_name[EDGES]), model(x, EDGES)[order])


def test_transformer_compiles():
    model = transformer()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for nodes, edges in ((5, 8), (7, 30)):
        x, edge_index = features(nodes, 3), torch.randint(nodes, (2, edges))
        torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index))


def test_transformer_is_explained():
    model, x = transformer().float(), features(7, 3, dtype=torch.float32)
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    options = {
        "model": model,
        "explanation_type": "model",
        "edge_mask_type": "object",
        "model_config": config,
    }
    mask = Explainer(algorithm=AttentionExplainer(), **options)(x, EDGES).edge_mask
    _, weights = model(x, EDGES, return_attention_weights=True)
    torch.testing.assert_close(mask, torch.stack(weights).amax((0, 2)))
    mask = Explainer(algorithm=GNNExplainer(epochs=2), **options)(x, EDGES).edge_mask
    assert mask.shape == (9,) and mask.gt(0).any()


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: GraphTransformer(3, 8, 4, 2, 3),
            ValueError,
            "`hidden_channels` must be a positive multiple",
        ),
        (
            lambda: GraphTransformer(3, 8, 4, -1, 2),
            ValueError,
            r"`num_layers` must be at least 0 and below 2\*\*31, got -1",
        ),
        (lambda: transformer()(features(7, 4), EDGES), ValueError, r"`x` .* \[..., nodes, 3\], got \[7, 4\]"),
        (lambda: transformer()(features(7, 3), CompleteGraph(6)), ValueError, "`graph` must join the 7 keys"),
        (lambda: transformer()(features(7, 3).long(), EDGES), TypeError, "`x` must be floating point"),
        (
            lambda: transformer()(features(7, 3), EDGES, features(7, 5)),
            ValueError,
            "`encoding` must not be given",
        ),
        (
            lambda: transformer(encoding_channels=5)(features(7, 3), EDGES),
            ValueError,
            "`encoding` must be given for a model with `encoding_channels=5`, got None",
        ),
        (
            lambda: transformer(encoding_channels=5)(features(7, 3), EDGES, features(6, 5)),
            ValueError,
            r"`encoding` must have shape \[..., 7, 5\]",
        ),
        (  # which would broadcast the outputs
            lambda: transformer(encoding_channels=5)(features(7, 3), EDGES, features(2, 7, 5)),
            ValueError,
            r"`encoding` must have shape .* broadcast to \[\], got \[2, 7, 5\]",
        ),
        (
            lambda: transformer(encoding_channels=5)(features(2, 7, 3), EDGES, features(3, 7, 5)),
            ValueError,
            r"`encoding` must have shape .* broadcast to \[2\], got \[3, 7, 5\]",
        ),
        (
            lambda: transformer(encoding_channels=5)(features(7, 3), EDGES, features(7, 5).float()),
            TypeError,
            "`encoding` must have the dtype of the layer's weights, torch.float64, got torch.float32",
        ),
        (
            lambda: transformer()(features(7, 3).half(), EDGES),
            TypeError,
            "`x` must have the dtype .*torch.float16",
        ),
        (lambda: transformer()(features(7, 3).to_sparse(), EDGES), TypeError, "`x` must be dense"),
    ],
)
def test_wrong_transformers(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- GPSConv --------------------------------------------------------------------------------------------


def gps_twins(local=True, dtype=torch.float64, **kwargs):
    torch.manual_seed(5)
    ours = GPSConv(8, TransformerConv(8, 4, 2) if local else None, heads=2, **kwargs).to(dtype)
    theirs = pyg.GPSConv(8, pyg.TransformerConv(8, 4, 2) if local else None, heads=2, **kwargs).to(dtype)
    for name, parameter in ours.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": None, "act": "gelu"},
        {"norm": "layer_norm", "norm_kwargs": {"mode": "graph"}},
        {"norm": "graph_norm", "attn_kwargs": {"bias": False}},
        {"local": False},
        {"attn_type": "performer", "norm": None},
    ],
    ids=str,
)
def test_gps_is_pyg_s(options):
    ours, theirs = gps_twins(**options)
    x, edges = [features(9, 8)], EDGES
    assert_agree(ours, theirs, x, lambda m, x: m(x, edges, BATCH))
    assert_agree(ours, theirs, x, lambda m, x: m(x, edges))
    assert str(ours) == str(theirs)
    # Labels in any order: the same nodes in another order, which PyG refuses or mixes up.
    order = torch.tensor([8, 3, 0, 6, 5, 1, 7, 2, 4])
    back = order.argsort()
    assert_agree(
        ours,
        theirs,
        x,
        lambda m, x: m(x[order], back[edges], BATCH[order])[back],
        lambda m, x: m(x, edges, BATCH),
        rtol=1e-8,
        atol=1e-9,
    )


def test_gps_in_float32():
    ours, theirs = gps_twins(dtype=torch.float32)
    x = [features(9, 8, dtype=torch.float32)]
    assert_agree(ours, theirs, x, lambda m, x: m(x, EDGES, BATCH), rtol=1e-5, atol=1e-5)


def test_gps_parameters_are_pyg_s():
    results = []
    for cls, conv in ((GPSConv, TransformerConv), (pyg.GPSConv, pyg.TransformerConv)):
        torch.manual_seed(3)
        results.append(cls(8, conv(8, 4, 2), heads=2, dropout=0.3))
    ours, theirs = results
    assert isinstance(ours.attn, GraphMultiheadAttention)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in ours.parameters())
    for parameter in ours.parameters():
        nn.init.constant_(parameter, 7.0)
    ours.reset_parameters()
    assert not any((parameter == 7.0).any() for parameter in ours.parameters())


def test_gps_dropout_of_the_attention():
    ours, _ = gps_twins(norm=None, attn_kwargs={"dropout": 1.0})
    x = features(9, 8)
    local = ours.conv(x, EDGES) + x
    h = local + ours.attn.out_proj.bias + x  # every weight dropped
    torch.testing.assert_close(ours(x, EDGES, BATCH), h + ours.mlp(h))


def test_gps_weights():
    ours, _ = gps_twins()
    x = features(9, 8)
    for batch, sizes in ((BATCH, [5, 3, 1]), (None, [9])):
        out, (edges, alpha) = ours(x, EDGES, batch, return_attention_weights=True)
        torch.testing.assert_close(out, ours(x, EDGES, batch))
        assert alpha.shape == (sum(n * n for n in sizes), 2) and edges.shape == (2, len(alpha))
        total = torch.zeros(9, 2).double().index_add(0, edges[1], alpha)
        torch.testing.assert_close(total, torch.ones_like(total))
        listed = as_graph(edges, num_nodes=9)
        torch.testing.assert_close(ours.attn(x, listed, return_attention_weights=True)[1], alpha)
        if batch is not None:
            assert torch.equal(batch[edges[0]], batch[edges[1]])


def test_gps_global_edges_are_explained():
    ours, _ = gps_twins(norm=None)
    x = features(9, 8)
    expected, (edges, _) = ours(x, EDGES, BATCH, return_attention_weights=True)
    set_masks(ours, torch.zeros(9).double(), EDGES, apply_sigmoid=False)  # as explainers do: local edges only
    local_only = ours(x, EDGES, BATCH)
    clear_masks(ours)
    h = ours.conv.lin_skip(x) + x + ours.attn(x, as_graph(edges, num_nodes=9)) + x
    torch.testing.assert_close(local_only, h + ours.mlp(h))

    ours.attn.explain = None
    mask = torch.zeros(edges.size(1)).double().requires_grad_()
    set_masks(ours.attn, mask, edges, apply_sigmoid=False)
    out = ours(x, EDGES, BATCH)
    h = ours.conv(x, EDGES) + x + ours.attn.out_proj.bias + x
    torch.testing.assert_close(out, h + ours.mlp(h))
    assert torch.autograd.grad(out.sum(), mask)[0].all()
    clear_masks(ours.attn)
    torch.testing.assert_close(ours(x, EDGES, BATCH), expected)


@pytest.mark.parametrize("local", [True, False])
def test_an_explainer_with_other_edges_than_the_layer_s(local):
    model, _ = gps_twins(local=local, norm=None)
    model.attn.explain = None  # lets the mask of the local edges reach the global attention
    explainer = Explainer(
        model.eval(),
        GNNExplainer(epochs=1),
        explanation_type="model",
        edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
    )
    with pytest.raises(ValueError, match="got a mask of 9 for 81 edges"):
        explainer(features(9, 8), EDGES)


@pytest.mark.parametrize("attn_type", ["multihead", "performer"])
def test_gps_takes_any_labels(attn_type):
    model, _ = gps_twins(attn_type=attn_type, norm=None)
    model.eval()
    expected = model(features(9, 8), EDGES, BATCH)
    for labels in (BATCH - 7, BATCH * 2**40, BATCH.to(torch.int8), BATCH.byte()):
        torch.testing.assert_close(model(features(9, 8), EDGES, labels), expected)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    shuffled = model(features(9, 8)[order], order.argsort()[EDGES], BATCH[order])
    torch.testing.assert_close(shuffled, expected[order])


def test_gps_trains_every_parameter():
    ours, _ = gps_twins()
    ours(features(9, 8), EDGES, BATCH).square().sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


@pytest.mark.parametrize("sizes", list(itertools.permutations([0, 1, 30])))
def test_graphs_of_a_batch_do_not_meet(sizes):
    ours, _ = gps_twins(local=False, norm=None)
    x, batch = features(31, 8), torch.arange(3).repeat_interleave(torch.tensor(sizes))
    none = torch.empty(2, 0, dtype=torch.int64)
    parts = [ours(part, none) for part in x.split(list(sizes)) if len(part)]
    torch.testing.assert_close(ours(x, none, batch), torch.cat(parts))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda m: m(features(9, 8), EDGES, BATCH[:8]),
            ValueError,
            r"`batch` must have shape \[9\], .* got \[8\]",
        ),
        (
            lambda m: m(features(9, 8), EDGES, BATCH.double()),
            TypeError,
            "`batch` must be a tensor of integers",
        ),
        (
            lambda m: m(features(9, 7), EDGES),
            ValueError,
            r"`x` must have shape \[..., nodes, 8\], got \[9, 7\]",
        ),
        (lambda m: m(features(2, 9, 8), EDGES), ValueError, r"`x` must have shape \[nodes, 8\]"),
        (lambda m: m(features(9, 8), EDGES, BATCH.bool()), TypeError, "`batch` must be a tensor of integers"),
        (lambda m: m(features(9, 8), EDGES, BATCH.to_sparse()), TypeError, "`batch` must be dense"),
        (
            lambda m: m(features(9, 8), EDGES, BATCH.to("meta")),
            ValueError,
            "`batch` must be on the device of `x`",
        ),
        (
            lambda m: m(features(9, 8).float(), EDGES),
            TypeError,
            "`x` must have the dtype of the layer's weights",
        ),
        (
            lambda m: GPSConv(8, None, heads=3),
            ValueError,
            "`channels` must be a positive multiple of `heads`",
        ),
        (lambda m: GPSConv(8, None, heads=2.0), TypeError, "`heads` must be an int, got float"),
        (lambda m: GPSConv(8, TransformerConv), TypeError, "`conv` must be a message passing layer or None"),
        (lambda m: GPSConv(8, None, dropout=1.5), ValueError, "`dropout` must be a probability"),
        (lambda m: GPSConv(8, None, attn_type="linear"), ValueError, '`attn_type` must be "multihead" or'),
        (
            lambda m: GPSConv(8, None, attn_kwargs={"heads": 2}),
            TypeError,
            r"`attn_kwargs` .* got \['heads'\]",
        ),
        (lambda m: GPSConv(8, None, attn_kwargs={"kdim": 4}), ValueError, "`attn_kwargs` must have kdim=8"),
        (lambda m: GPSConv(8, None, attn_kwargs={"dropout": 2.0}), ValueError, "must be a probability"),
        (  # which would broadcast
            lambda m: GPSConv(8, TransformerConv(8, 1))(features(9, 8, dtype=torch.float32), EDGES),
            ValueError,
            r"`conv` must give features of shape \[9, 8\], as it takes them, got \[9, 1\]",
        ),
        (lambda m: GPSConv(8, None, attn_kwargs={"add_bias_kv": True}), NotImplementedError, "`add_bias_kv`"),
        (
            lambda m: GPSConv(8, None, attn_kwargs={"add_zero_attn": True}),
            NotImplementedError,
            "`add_zero_attn`",
        ),
        (
            lambda m: gps_twins(attn_type="performer")[0](
                features(9, 8), EDGES, return_attention_weights=True
            ),
            ValueError,
            "`return_attention_weights` must be falsy",
        ),
    ],
)
def test_wrong_gps(call, error, message):
    with pytest.raises(error, match=message):
        call(gps_twins()[0])


@pytest.mark.parametrize("norm_first", [False, True])
def test_wrong_features_are_named_before_the_norm_sees_them(norm_first):
    layer = GraphTransformerLayer(8, 2, norm_first=norm_first)
    with pytest.raises(ValueError, match=r"`x` must have shape \[..., nodes, 8\]"):
        layer(torch.randn(5, 7), CompleteGraph(5))
    with pytest.raises(TypeError, match="`x` must be floating point"):
        layer(torch.ones(5, 8, dtype=torch.long), CompleteGraph(5))


def test_numbers_of_channels():
    with pytest.raises(ValueError, match=r"`in_channels` must be at least 1 and below .*, got -1"):
        GraphTransformer(-1, 8, 2, 1, 2)
