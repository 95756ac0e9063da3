"""Reports about models around the operator: images, compilers, heterogeneous graphs, encodings, explanations."""

import ast
import copy
import io
import pickle
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import set_masks
from torch_geometric.utils import k_hop_subgraph

import graphattn
from graphattn import CompleteGraph, GridGraph, SparseGraph, WindowGraph, graph_attention
from graphattn import nn as graphattn_nn
from graphattn.encodings import laplacian_eigenvectors, random_walk
from graphattn.integrations.huggingface import register
from graphattn.kernels import reference
from graphattn.nn import (
    GPSConv,
    GraphMultiheadAttention,
    GraphTransformer,
    TransformerConv,
    VisionTransformer,
)
from graphattn.transforms import AddLaplacianEigenvectorPE, AddRandomWalkPE

PACKAGE = Path(graphattn.__file__).parent
NONE = torch.empty(2, 0, dtype=torch.int64)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- images ---------------------------------------------------------------------------------------------


def vision(image_size, patch_size=16, **options):
    settings = {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 16, "registers": 2, **options}
    return VisionTransformer(image_size, patch_size, 5, **settings)


@pytest.mark.field_report("B71")
def test_positions_of_a_rectangle_are_resampled_from_a_rectangle():
    """Made for 32 x 64, that is 2 x 4 patches; called on 48 x 80, 3 x 5. A model of that size is the reference."""
    model, target = vision((32, 64)), vision((48, 80))
    assert model.position_embedding.shape == (2, 4, 8)
    state = model.state_dict()
    planes = state["position_embedding"].permute(2, 0, 1).unsqueeze(0)
    planes = F.interpolate(planes, (3, 5), mode="bicubic", antialias=True)
    target.load_state_dict({**state, "position_embedding": planes[0].permute(1, 2, 0)})
    images = torch.randn(2, 3, 48, 80)
    torch.testing.assert_close(model(images), target(images))
    swapped = vision((64, 32))
    assert swapped.position_embedding.shape == (4, 2, 8)


@pytest.mark.field_report("B73")
@pytest.mark.parametrize("radius", [None, 1])
def test_an_image_of_33_by_33_pixels(radius):
    images = torch.randn(1, 3, 33, 33)
    with pytest.raises(ValueError, match=r"whole number of patches of 16 x 16 .* got 33 x 33"):
        vision(32, radius=radius)(images)
    with pytest.raises(ValueError, match="got 33 x 33"):
        vision(33, radius=radius)
    padded = vision(33, radius=radius, remainder="pad")
    assert padded.position_embedding.shape == (3, 3, 8)
    _, weights = padded(images, return_attention_weights=True)
    assert weights[0].shape[1:-1] == padded.patch_graph(3, 3).edge_shape
    torch.testing.assert_close(padded(images), padded(F.pad(images, (0, 15, 0, 15))))
    cropped = vision(32, radius=radius, remainder="crop")
    torch.testing.assert_close(cropped(images), cropped(images[:, :, :32, :32]))


@pytest.mark.field_report("B75")
@pytest.mark.parametrize("with_prefix", [True, False])
def test_trained_weights_on_another_grid(with_prefix):
    """timm's names for 4 x 4 patches; images of 6 x 5; with and without positions of class and register tokens."""
    weights = {
        "cls_token": (1, 1, 8),
        "reg_token": (1, 2, 8),
        "pos_embed": (1, 16 + 3 * with_prefix, 8),
        "patch_embed.proj.weight": (8, 3, 4, 4),
        "patch_embed.proj.bias": (8,),
        "blocks.0.norm1.weight": (8,),
        "blocks.0.norm1.bias": (8,),
        "blocks.0.attn.qkv.weight": (24, 8),
        "blocks.0.attn.qkv.bias": (24,),
        "blocks.0.attn.proj.weight": (8, 8),
        "blocks.0.attn.proj.bias": (8,),
        "blocks.0.norm2.weight": (8,),
        "blocks.0.norm2.bias": (8,),
        "blocks.0.mlp.fc1.weight": (16, 8),
        "blocks.0.mlp.fc1.bias": (16,),
        "blocks.0.mlp.fc2.weight": (8, 16),
        "blocks.0.mlp.fc2.bias": (8,),
        "norm.weight": (8,),
        "norm.bias": (8,),
        "head.weight": (5, 8),
        "head.bias": (5,),
    }
    state = {name: torch.randn(shape).double() for name, shape in weights.items()}
    model = VisionTransformer.from_state_dict(state, heads=2)

    def expected(images):
        x = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=4)
        height, width = x.shape[2:]
        positions = state["pos_embed"][:, -16:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
        if (height, width) != (4, 4):
            positions = F.interpolate(positions, (height, width), mode="bicubic", antialias=True)
        x = (x + positions).flatten(2).mT
        prefix = torch.cat([state["cls_token"], state["reg_token"]], dim=1)
        prefix = prefix + state["pos_embed"][:, :3] if with_prefix else prefix
        x = torch.cat([prefix.expand(len(x), -1, -1), x], dim=1)

        def linear(name, x):
            return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

        def norm(name, x):
            return F.layer_norm(x, (8,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

        qkv = linear("blocks.0.attn.qkv", norm("blocks.0.norm1", x)).unflatten(-1, (3, 2, 4))
        h = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2)
        x = x + linear("blocks.0.attn.proj", h)
        h = F.gelu(linear("blocks.0.mlp.fc1", norm("blocks.0.norm2", x)))
        x = x + linear("blocks.0.mlp.fc2", h)
        return linear("head", norm("norm", x)[:, 0])

    for size in ((16, 16), (24, 20)):
        images = torch.randn(2, 3, *size).double()
        torch.testing.assert_close(model(images), expected(images))
    without = {name: x for name, x in state.items() if name != "blocks.0.norm2.bias"}
    with pytest.raises(ValueError, match=r"blocks\.0\.norm2\.bias"):
        VisionTransformer.from_state_dict(without, heads=2)
    with pytest.raises(ValueError, match=r"dist_token"):
        VisionTransformer.from_state_dict({**state, "dist_token": state["cls_token"]}, heads=2)


# --- compilers ------------------------------------------------------------------------------------------


@pytest.mark.field_report("B76")
def test_no_backend_is_asked_for_and_every_graph_trains_on_the_cpu():
    x = torch.randn(12, 2, 8, requires_grad=True)
    with pytest.raises(TypeError, match="backend"):
        graph_attention(x, x, x, CompleteGraph(12), backend="flex")
    for graph in (
        CompleteGraph(12),
        WindowGraph(12, 2),
        GridGraph((3, 4), 1),
        WindowGraph(12, 2).to_sparse(),
    ):
        out = graph_attention(x, x, x, graph)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        mask = graph.to_mask()
        y = x.transpose(0, 1)
        expected = F.scaled_dot_product_attention(y, y, y, attn_mask=mask).transpose(0, 1)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(grad, torch.autograd.grad(expected.square().sum(), x)[0])


@pytest.mark.field_report("B77")
def test_every_length_after_one_compilation(fresh_compiler):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(graph_attention, fullgraph=True, dynamic=True, backend=counter)
    for n in (104, 110, 100, 107, 103, 3):
        query, key, value = torch.randn(3, n, 2, 8).unbind()
        graph = WindowGraph(n, 5)
        expected = F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (query, key, value)), attn_mask=graph.to_mask()
        )
        torch.testing.assert_close(compiled(query, key, value, graph), expected.transpose(0, 1))
    assert counter.frame_count <= 2


@pytest.mark.field_report("B80")
def test_no_graph_breaks_with_loops_and_without_edges(fresh_compiler):
    layer = TransformerConv(4, 2, heads=2, edge_dim=3)
    x, edge_index, e = torch.randn(6, 4), torch.randint(6, (2, 9)), torch.randn(9, 3)
    explained = torch._dynamo.explain(layer)(x, edge_index, e)
    assert explained.graph_break_count == 0 and explained.graph_count == 1
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for nodes, num_edges in ((6, 9), (7, 0), (5, 12), (2, 1)):
        x, e = torch.randn(nodes, 4), torch.randn(num_edges, 3)
        edge_index = torch.randint(nodes, (2, num_edges))
        edge_index[:, : min(num_edges, 2)] = 1  # a loop, twice where there is room
        out = compiled(x, edge_index, e)
        torch.testing.assert_close(out, layer(x, edge_index, e))
        out.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.field_report("B81")
def test_an_exported_program_is_saved_and_loaded(fresh_compiler):
    """`torch.export` is the way out; ONNX has no operator to put in the place of ours."""
    layer = TransformerConv(4, 2, heads=2).eval()
    nodes, num_edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    program = torch.export.export(
        layer, (torch.randn(6, 4), torch.randint(6, (2, 9))), dynamic_shapes=({0: nodes}, {1: num_edges})
    )
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    loaded = torch.export.load(stream).module()
    for n, count in ((6, 9), (40, 100), (3, 2)):
        x, edge_index = torch.randn(n, 4), torch.randint(n, (2, count))
        torch.testing.assert_close(loaded(x, edge_index), layer(x, edge_index))


def used_modules():
    edge_index, x = torch.randint(6, (2, 12)), torch.randn(6, 8)
    image = torch.randn(2, 3, 8, 8)
    positions = GridGraph((2, 3), 1).positions()
    return {
        "TransformerConv": (TransformerConv(8, 4, 2), (x, edge_index)),
        "GraphMultiheadAttention": (GraphMultiheadAttention(8, 2), (x, edge_index)),
        "GraphTransformerLayer": (graphattn_nn.GraphTransformerLayer(8, 2, 16, dropout=0.0), (x, edge_index)),
        "GraphTransformer": (GraphTransformer(8, 8, 2, 1, 2), (x, edge_index)),
        "GPSConv": (GPSConv(8, TransformerConv(8, 4, 2), 2), (x, edge_index)),
        "VisionTransformer": (vision(8, 4, radius=1), (image,)),
        "ConvolutionalAttention": (
            graphattn_nn.ConvolutionalAttention.from_conv2d(nn.Conv2d(3, 4, 3, padding=1)),
            (image,),
        ),
        "LearnedEncoding": (graphattn_nn.LearnedEncoding((2, 3), 8), (positions,)),
        "RotaryEncoding": (graphattn_nn.RotaryEncoding(8), (torch.randn(6, 2, 8), positions)),
        "RelativeBias": (graphattn_nn.RelativeBias(GridGraph((2, 3), 1), 2), ()),
    }


@pytest.mark.field_report("B82")
@pytest.mark.parametrize("name", used_modules())
def test_copies_before_and_after_the_first_call(name):
    module, inputs = used_modules()[name]
    module.eval()
    names = {path: set(vars(part)) for path, part in module.named_modules()}
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    expected = module(*inputs)
    assert names == {path: set(vars(part)) for path, part in module.named_modules()}
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    copies += [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(stream, weights_only=False),
    ]
    for each in copies:
        torch.testing.assert_close(each(*inputs), expected)


@pytest.mark.field_report("B05")
def test_checkpointing_every_layer_is_exact():
    torch.manual_seed(2)
    x, graph = torch.randn(12, 8), WindowGraph(12, 2)
    layers = nn.ModuleList(graphattn_nn.GraphTransformerLayer(8, 2, 16, dropout=0.5) for _ in range(8))
    runs = []
    for kept in (True, False):
        torch.manual_seed(7)
        h = x
        for layer in layers:
            h = layer(h, graph) if kept else checkpoint(layer, h, graph, use_reentrant=False)
        runs.append([h, *torch.autograd.grad(h.square().sum(), list(layers.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


# --- heterogeneous graphs and batches -------------------------------------------------------------------


@pytest.mark.field_report("B88")
def test_an_edge_type_that_is_missing():
    """Empty it leaves the skip connection; where it is not there at all, PyG's `to_hetero` says so."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = TransformerConv((-1, -1), 4, heads=2)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    kinds = [("a", "to", "b"), ("b", "to", "a"), ("a", "has", "a")]
    model = pyg.to_hetero(Model(), (["a", "b"], kinds))
    x = {"a": torch.randn(4, 3), "b": torch.randn(5, 6)}
    edges = {kinds[0]: torch.tensor([[0, 3], [4, 1]]), kinds[1]: NONE, kinds[2]: NONE}
    out = model(x, edges)
    layers = model.conv
    torch.testing.assert_close(
        out["a"], layers["b__to__a"].lin_skip(x["a"]) + layers["a__has__a"].lin_skip(x["a"])
    )
    assert out["b"].shape == (5, 8)
    empty = model({"a": x["a"], "b": torch.empty(0, 6)}, {**edges, kinds[0]: NONE})
    assert empty["b"].shape == (0, 8)
    with pytest.raises((TypeError, ValueError), match="NoneType"):
        model(x, {kind: edges[kind] for kind in kinds[:2]})
    stack = pyg.HeteroConv({kind: TransformerConv((-1, -1), 4, heads=2) for kind in kinds})
    assert stack(x, {kinds[0]: edges[kinds[0]]}).keys() == {"b"}  # PyG leaves out what is absent


@pytest.mark.field_report("B89")
def test_lazy_layers_of_one_tensor():
    for edge_index in (torch.tensor([[0, 1], [1, 2]]), NONE):
        layer = TransformerConv((-1, -1), 4, heads=2, edge_dim=-1, beta=True)
        e = torch.randn(edge_index.size(1), 3)
        out = layer(torch.randn(3, 5), edge_index, e)
        assert not any(isinstance(p, nn.UninitializedParameter) for p in layer.parameters())
        out.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        assert layer.lin_edge.weight.shape == (8, 3) and layer.lin_key.weight.shape == (8, 5)


@pytest.mark.field_report("B108")
def test_seeds_of_a_sampled_batch_in_any_order():
    """They are found by their ids. Nothing here relies on their being the first rows."""
    edge_index, x = torch.randint(50, (2, 120)), torch.randn(50, 6).double()
    layers = nn.ModuleList(TransformerConv(6, 3, heads=2) for _ in range(2)).double()

    def model(x, edge_index):
        return layers[1](layers[0](x, edge_index).relu(), edge_index)

    seeds = torch.tensor([31, 2, 44, 7])
    subset, local, mapping, _ = k_hop_subgraph(seeds, 2, edge_index, relabel_nodes=True, num_nodes=50)
    shuffled = torch.randperm(len(subset))
    place = shuffled.argsort()
    rows = model(x[subset[shuffled]], place[local][:, torch.randperm(local.size(1))])
    torch.testing.assert_close(rows[place[mapping]], model(x, edge_index)[seeds])


# --- encodings ------------------------------------------------------------------------------------------


@pytest.mark.field_report("B90")
@pytest.mark.parametrize("n, k", [(1, 8), (2, 8), (3, 8), (101, 120)])
def test_more_eigenvectors_than_there_are(n, k):
    """Of a path: n - 1 that are not constant, orthonormal, then zeros; through the transform too."""
    edge_index = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    for vectors in (
        laplacian_eigenvectors(SparseGraph.from_edge_index(edge_index, n), k),
        AddLaplacianEigenvectorPE(k)(Data(edge_index=edge_index, num_nodes=n)).laplacian_eigenvector_pe,
    ):
        assert vectors.shape == (n, k) and (vectors[:, n - 1 :] == 0).all()
        inner = vectors[:, : n - 1].T @ vectors[:, : n - 1]
        torch.testing.assert_close(inner, torch.eye(n - 1), atol=1e-5, rtol=0)
    for edgeless in (5, 150):
        data = Data(edge_index=NONE, num_nodes=edgeless)
        assert torch.equal(
            AddLaplacianEigenvectorPE(8)(data).laplacian_eigenvector_pe, torch.zeros(edgeless, 8)
        )


@pytest.mark.field_report("B92")
def test_eigenvectors_of_directed_graphs():
    """Of the symmetrised graph: a directed cycle is a triangle, a directed path the path."""
    cycle = SparseGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    triangle = torch.eye(3) - (torch.ones(3, 3) - torch.eye(3)) / 2
    vectors = laplacian_eigenvectors(cycle, 3)
    assert (vectors * (triangle @ vectors)).sum(0).tolist() == pytest.approx([1.5, 1.5, 0.0], abs=1e-6)
    line = torch.tensor([[0, 1, 2], [1, 2, 3]])
    dag, both = (SparseGraph.from_edge_index(x, 4) for x in (line, torch.cat([line, line.flip(0)], dim=1)))
    vectors = laplacian_eigenvectors(dag, 3)
    torch.testing.assert_close(vectors, laplacian_eigenvectors(both, 3))
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(3), atol=1e-6, rtol=0)


@pytest.mark.field_report("B96", "B97")
def test_random_walks_of_data():
    """Weights and duplicates are probabilities, never counts; isolated nodes and sinks come back never."""
    pairs = torch.tensor([[0, 1, 0, 1, 0, 2], [1, 0, 1, 0, 2, 0]])
    walks = AddRandomWalkPE(4)(Data(edge_index=pairs, num_nodes=3)).random_walk_pe
    expected = torch.tensor([[0, 1, 0, 1], [0, 2 / 3, 0, 2 / 3], [0, 1 / 3, 0, 1 / 3]])
    torch.testing.assert_close(walks, expected)
    weighted = Data(edge_index=pairs[:, 2:], edge_weight=torch.tensor([3.0, 3.0, 1.0, 1.0]), num_nodes=3)
    torch.testing.assert_close(
        AddRandomWalkPE(2)(weighted).random_walk_pe[:, 1], torch.tensor([1, 0.75, 0.25])
    )
    small = Data(edge_index=pairs[:, :2], edge_weight=torch.tensor([0.1, 0.1]), num_nodes=3)
    assert AddRandomWalkPE(2)(small).random_walk_pe.tolist() == [[0, 1], [0, 1], [0, 0]]
    directed = SparseGraph.from_edge_index(torch.tensor([[0], [1]]), 2)
    assert not random_walk(directed, 5).any()


# --- explanations and devices ---------------------------------------------------------------------------


@pytest.mark.field_report("B104")
def test_an_edge_mask_acts_on_every_layer():
    x, edge_index = torch.randn(5, 8), torch.tensor([[0, 1, 2, 3], [1, 2, 0, 1]])
    for layer, alone in (
        (TransformerConv(8, 4, heads=2), lambda layer: layer.lin_skip(x)),
        (GraphMultiheadAttention(8, 2), lambda layer: layer.out_proj.bias.expand(5, 8)),
    ):
        full = layer(x, edge_index)
        mask = torch.zeros(4, requires_grad=True)
        set_masks(layer, mask, edge_index, apply_sigmoid=False)
        out = layer(x, edge_index)
        torch.testing.assert_close(out, alone(layer))
        (grad,) = torch.autograd.grad((out * torch.randn(8)).sum(), mask)
        assert (grad != 0).all() and not torch.allclose(full, out)


@pytest.mark.field_report("B104")
def test_gnn_explainer_finds_the_edge_that_matters():
    """Node 0 hears from four others, of which one alone says anything."""
    torch.manual_seed(0)
    x = torch.zeros(5, 4)
    x[2] = 3.0
    edge_index = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
    explainer = Explainer(
        TransformerConv(4, 2, bias=False, root_weight=False),
        algorithm=GNNExplainer(epochs=60, lr=0.1),
        explanation_type="model",
        edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
    )
    assert explainer(x, edge_index, index=0).edge_mask.argmax() == 1


@pytest.mark.field_report("B107")
def test_the_reference_needs_no_device_of_a_kind():
    """It runs on a device that computes nothing, on operators that every backend has."""
    ids = torch.empty(7, dtype=torch.int64, device="meta")
    query = torch.empty(1, 3, 2, 4, device="meta", requires_grad=True)
    key, value = (torch.empty(1, 5, 2, 4, device="meta", requires_grad=True) for _ in range(2))
    rowptr = torch.empty(4, dtype=torch.int64, device="meta")
    options = (None, None, None, None, 0.5, 0.0, 0.0)
    out, *_ = reference.sparse_attention(query, key, value, rowptr, ids, ids, *options, layout=(7,))
    assert out.shape == (1, 3, 2, 4) and out.device.type == "meta"
    torch.autograd.grad(out.sum(), (query, key, value))
    called = {
        node.func.attr
        for node in ast.walk(ast.parse((PACKAGE / "kernels/reference.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not called & {"segment_reduce", "index_put", "cuda", "cpu"}
    placed = [
        f"{path.name}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
    ]
    assert not placed  # tensors stay where the arguments are


# --- Hugging Face ---------------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch):
    """What `register` hands to Transformers, by a stand-in for it."""
    attention, masks = {}, {}
    library, masking = ModuleType("transformers"), ModuleType("transformers.masking_utils")
    library.AttentionInterface = SimpleNamespace(register=attention.__setitem__)
    library.AttentionMaskInterface = SimpleNamespace(register=masks.__setitem__)
    masking.sdpa_mask = object()
    utils = ModuleType("transformers.utils")
    utils.output_capturing = SimpleNamespace(_active_collector=ContextVar("collector", default=None))
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masking)
    monkeypatch.setitem(sys.modules, "transformers.utils", utils)
    register("named")
    assert attention.keys() == {"named"} and masks == {"named": masking.sdpa_mask}
    return attention["named"]


@pytest.mark.field_report("B106")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_registered_attention_keeps_padding_and_causality(registered, causal, padded):
    """The mask function is registered too; grouped heads come as they are; without a mask the module decides."""
    module = SimpleNamespace(
        is_causal=causal, training=False, config=SimpleNamespace(output_attentions=False)
    )
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = None
    if padded:  # as sdpa_mask makes it: True is kept
        mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
        mask[1, :, :, 3:] = False
        mask = mask.tril() if causal else mask
    out, weights = registered(module, query, key, value, mask, scaling=None, position_ids=torch.arange(5))
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal and not padded, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert out.shape == (2, 5, 4, 8) and weights is None
