"""Reports of NaN, overflow, lost precision and memory, each as the smallest input that shows its kind."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import nn as pyg

from graphattn import (
    CompleteGraph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    graph_attention,
)
from graphattn import nn as graphattn_nn
from graphattn.nn import GPSConv, GraphMultiheadAttention, GraphTransformer, TransformerConv
from tests import oracle


def sparse(edge_index, num_keys, num_queries):
    return SparseGraph.from_edge_index(edge_index, size=(num_keys, num_queries))


# --- memory ---------------------------------------------------------------------------------------------


@pytest.mark.field_report("B01")
def test_a_dense_graph_has_the_values_of_dense_attention():
    query, key, value = torch.randn(3, 200, 4, 16)
    listed = CompleteGraph(200).to_sparse()
    expected = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (query, key, value)))
    for graph in (listed, CompleteGraph(200)):
        out = graph_attention(query, key, value, graph)
        torch.testing.assert_close(out, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.field_report("B04")
def test_a_window_on_a_long_sequence():
    """Length 18,000: every row is the softmax over its own 129 keys, and nothing has a side of the whole length."""
    n, radius = 18_000, 64
    query, key, value = torch.randn(3, n, 8, 2).unbind()
    inputs = [x.requires_grad_() for x in (query, key, value)]
    saved = []

    def pack(x):
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = graph_attention(*inputs, WindowGraph(n, radius))
    assert max(saved) < 40 * n
    grads = torch.autograd.grad(out[9000].sum(), inputs)
    for i in (0, 64, 9000, n - 1):
        near = slice(max(i - radius, 0), i + radius + 1)
        scores = torch.einsum("hd,jhd->jh", query[i].double(), key[near].double()) / math.sqrt(2)
        expected = torch.einsum("jh,jhd->hd", scores.softmax(0), value[near].double())
        torch.testing.assert_close(out[i].double(), expected, rtol=1e-5, atol=1e-6)
    assert grads[2].abs().sum(dim=(1, 2)).nonzero().flatten().tolist() == list(range(8936, 9065))


# --- NaN and overflow -----------------------------------------------------------------------------------


@pytest.mark.field_report("B08")
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_any_number_of_heads_trains(heads):
    conv = TransformerConv(6, 8 // heads, heads=heads)
    optimizer = torch.optim.Adam(conv.parameters(), lr=0.05)
    x, edge_index, goal = torch.randn(12, 6), torch.randint(12, (2, 40)), torch.randn(12, 8)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(conv(x, edge_index), goal)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]


@pytest.mark.field_report("B08")
def test_two_heads_of_the_same_weights_are_one_head_twice():
    one, two = TransformerConv(6, 4, heads=1).double(), TransformerConv(6, 4, heads=2).double()
    two.load_state_dict(
        {name: torch.cat([x, x]) for name, x in one.state_dict().items()}  # heads are rows of the projections
    )
    x, edge_index = torch.randn(12, 6).double(), torch.randint(12, (2, 40))
    torch.testing.assert_close(two(x, edge_index), one(x, edge_index).repeat(1, 2))


@pytest.mark.field_report("B09")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_far_below_zero_beside_queries_without_edges(dtype):
    """A filler for the maximum of an empty row must not become the maximum of another."""
    key = torch.tensor([-2e4, -2e4 - 1, -3e4, -1e30], dtype=dtype).view(-1, 1, 1).requires_grad_()
    value = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype).view(-1, 1, 1).requires_grad_()
    query = torch.ones(4, 1, 1, dtype=dtype, requires_grad=True)
    graph = sparse(torch.tensor([[0, 1, 2, 3, 3], [1, 1, 1, 3, 3]]), 4, 4)
    out, lse = graph_attention(query, key, value, graph, return_lse=True)
    e = math.exp(-1.0)
    expected = torch.tensor([0.0, (1 + 2 * e) / (1 + e), 0.0, 4.0], dtype=dtype)
    torch.testing.assert_close(out.flatten(), expected)
    assert lse.flatten()[[0, 2]].tolist() == [-math.inf, -math.inf]
    for grad in torch.autograd.grad(out.sum(), (query, key, value)):
        assert grad.isfinite().all()


@pytest.mark.field_report("B10")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_row_of_a_mask_that_is_all_false(dtype):
    mask = torch.ones(6, 5, dtype=torch.bool).tril(1)
    mask[5] = False
    case = oracle.draw_case((mask.nonzero().t().flip(0), 5, 6), dtype=dtype)

    def operator(case, operands):
        return graph_attention(**operands, graph=SparseGraph.from_mask(mask), return_lse=True)

    oracle.assert_agrees(operator, case)
    actual = oracle.results(operator, case)
    assert (actual["out"][5] == 0).all() and (actual["gradient of query"][5] == 0).all()
    # PyTorch's attention over the rows that see something, beside which the last row changes nothing.
    q, k, v = (case.operands[name].double().transpose(0, 1) for name in ("query", "key", "value"))
    expected = F.scaled_dot_product_attention(q[:, :5], k, v, attn_mask=mask[:5]).transpose(0, 1)
    oracle.assert_close_to_oracle(actual["out"][:5], expected, expected.float().to(dtype), dtype)


@pytest.mark.field_report("B13")
@pytest.mark.parametrize("graph", [CompleteGraph(7), WindowGraph(7, 2), "listed"], ids=str)
def test_a_head_that_is_masked_gives_the_same_output_with_and_without_weights(graph):
    graph = SparseGraph.from_edge_index(torch.randint(7, (2, 20)), 7) if graph == "listed" else graph
    layer, x = GraphMultiheadAttention(12, 3).double(), torch.randn(7, 12).double()
    bias = torch.zeros(*(1 for _ in graph.edge_shape), 3).double()
    bias[..., 2] = -math.inf
    plain = layer(x, graph, bias=bias, return_attention_weights=False)
    out, weights = layer(x, graph, bias=bias, return_attention_weights=True)
    assert torch.equal(out, plain) and out.isfinite().all()
    weights = weights.flatten(0, -2)[graph.slots()]
    assert (weights[:, 2] == 0).all()
    target = graph.to_edge_index()[1]
    totals = torch.zeros(7, 3).double().index_add(0, target, weights)
    reached = torch.zeros(7).index_fill(0, target, 1.0).double()
    torch.testing.assert_close(totals[:, :2], reached[:, None].expand(7, 2))


MODULES = {
    "TransformerConv": lambda: TransformerConv(5, 4, heads=2, edge_dim=3, beta=True),
    "GraphMultiheadAttention": lambda: GraphMultiheadAttention(8, 2),
    "GraphMultiheadAttention, own widths": lambda: GraphMultiheadAttention(8, 2, kdim=3, vdim=5),
    "GraphTransformerLayer": lambda: graphattn_nn.GraphTransformerLayer(8, 2, 16),
    "GraphTransformer": lambda: GraphTransformer(3, 8, 2, 2, heads=2, encoding_channels=4),
    "GPSConv": lambda: GPSConv(8, TransformerConv(8, 4, heads=2), heads=2),
    "VisionTransformer": lambda: graphattn_nn.VisionTransformer(
        8, 4, 5, dim=8, depth=1, heads=2, mlp_dim=8, registers=2
    ),
    "LearnedEncoding": lambda: graphattn_nn.LearnedEncoding((4, 3), 8),
    "RelativeBias": lambda: graphattn_nn.RelativeBias(GridGraph((3, 4), 1), 2),
    "ContinuousEncoding": lambda: graphattn_nn.ContinuousEncoding(8),
    "ConvolutionalAttention": lambda: graphattn_nn.ConvolutionalAttention(3, 4, (3, 3)),
    "RotaryEncoding": lambda: graphattn_nn.RotaryEncoding(8),
}


@pytest.mark.field_report("B15")
@pytest.mark.parametrize("name", MODULES)
def test_reset_parameters_draws_every_parameter(name, poisoned_memory):
    if name == "ContinuousEncoding":
        pytest.importorskip("torchdiffeq")
    module = MODULES[name]()  # in memory that is full of NaN
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    if not list(module.parameters()):
        return
    drawn = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(math.nan)
        torch.manual_seed(5)
        module.reset_parameters()
        drawn.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(*drawn))


@pytest.mark.field_report("B15")
def test_every_module_is_among_those_that_are_reset():
    assert {name.split(",")[0] for name in MODULES} == set(graphattn_nn.__all__)


@pytest.mark.field_report("B16")
def test_dropout_that_drops_every_edge_of_a_node_leaves_its_skip_connection():
    conv = TransformerConv(4, 4, heads=2, dropout=0.99, edge_dim=2)
    x, e = torch.randn(8, 4), torch.randn(12, 2)
    edge_index = torch.stack([torch.arange(12) % 8, torch.arange(12) % 4])
    alone = 0
    for seed in range(200):
        torch.manual_seed(seed)
        out = conv(x, edge_index, e)
        assert out.isfinite().all()
        skip = conv.lin_skip(x)
        assert torch.equal(out[4:], skip[4:])
        alone += (out[:4] == skip[:4]).all(dim=1).sum().item()
    # 3 edges and 2 heads for each of 4 nodes, each dropped with 0.99
    assert abs(alone / 800 - 0.99**6) < 5 * (0.06 * 0.94 / 800) ** 0.5


@pytest.mark.field_report("B17")
@pytest.mark.parametrize("kind", ["listed", "window", "complete"])
def test_sizes_around_those_of_a_block(kind, poisoned_memory):
    """Degrees and sizes of a block (32 edges, 64 queries) less one, the same, and one more, in any mixture."""
    generator = torch.Generator().manual_seed(0)

    def operator(case, operands):
        return graph_attention(**operands, graph=graph, return_lse=True)

    for draw in range(120):
        if kind == "listed":
            choices = torch.tensor([0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65])
            degrees = choices[torch.randint(len(choices), (1 + draw % 9,), generator=generator)]
            target = torch.arange(len(degrees)).repeat_interleave(degrees)
            keys = int(torch.randint(1, 40, (), generator=generator))
            source = torch.randint(keys, target.shape, generator=generator)
            graph = sparse(torch.stack([source, target]), keys, len(degrees))
        else:
            n = int(torch.tensor([1, 15, 31, 32, 33, 63, 64, 65, 127, 128, 129])[draw % 11])
            radius = int(torch.tensor([0, 1, 15, 16, 64, 65])[draw % 6])
            graph = WindowGraph(n, radius) if kind == "window" else CompleteGraph(n, causal=draw % 2 == 1)
        edges = graph.to_edge_index()
        case = oracle.draw_case((edges, graph.num_keys, graph.num_queries), dim=4, seed=draw)
        exact = oracle.results(oracle.oracle(), case)
        for name, x in oracle.results(operator, case).items():
            torch.testing.assert_close(x, exact[name], rtol=1e-10, atol=1e-12, msg=lambda m: f"{name}: {m}")  # noqa: B023


# --- precision ------------------------------------------------------------------------------------------


@pytest.mark.field_report("B18", "B22")
def test_one_rule_for_mixed_precision():
    """Autocast casts, a model in bfloat16 stays there, and without either two dtypes are an error that names them."""
    x, e = torch.randn(6, 5), torch.randn(9, 3)
    edge_index = torch.randint(6, (2, 9))
    conv = TransformerConv(5, 4, heads=2, edge_dim=3)
    expected = conv(x, edge_index, e)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = conv(x, edge_index, e)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in conv.parameters())
    half = TransformerConv(5, 4, heads=2, edge_dim=3).bfloat16()
    half.load_state_dict(conv.state_dict())
    out = half(x.bfloat16(), edge_index, e.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).abs().max() < 8 * torch.finfo(torch.bfloat16).eps * expected.abs().max()
    with pytest.raises(TypeError, match=r"`query` and `edge_attr`.*bfloat16 and torch.float32"):
        half(x.bfloat16(), edge_index, e)
    query = torch.randn(6, 2, 4)
    graph = SparseGraph.from_edge_index(edge_index, 6)
    with pytest.raises(TypeError, match=r"`query` and `bias`.*bfloat16 and torch.float32"):
        graph_attention(*3 * [query.bfloat16()], graph, bias=torch.zeros(9, 1))
    with pytest.raises(TypeError, match=r"`query` and `key`.*bfloat16 and torch.float32"):
        graph_attention(query.bfloat16(), query, query, graph)
    with pytest.raises(TypeError, match=r"dtype of the layer's weights, torch.float32, got torch.float64"):
        conv(x.double(), edge_index, e)


@pytest.mark.field_report("B19")
@pytest.mark.parametrize("num_edges", [0, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("path", ["fused", "edge by edge", "weights", "attention", "window", "GPS", "hetero"])
def test_autocast_on_every_path(path, dtype, num_edges):
    x, edge_index = torch.randn(6, 8, requires_grad=True), torch.randint(6, (2, num_edges))
    e = torch.randn(num_edges, 3, requires_grad=True)
    layer = {
        "fused": lambda: TransformerConv(8, 4, heads=2, edge_dim=3, beta=True),
        "edge by edge": lambda: TransformerConv(8, 4, heads=2, edge_dim=3),
        "weights": lambda: TransformerConv(8, 4, heads=2, edge_dim=3),
        "attention": lambda: GraphMultiheadAttention(8, 2),
        "window": lambda: GraphMultiheadAttention(8, 2),
        "GPS": lambda: GPSConv(8, TransformerConv(8, 4, heads=2), heads=2, norm="layer_norm"),
        "hetero": lambda: pyg.HeteroConv({("a", "to", "a"): TransformerConv(8, 4, heads=2, edge_dim=3)}),
    }[path]()
    if path == "edge by edge":
        layer.register_message_forward_hook(lambda *_: None)

    def call():
        if path == "weights":
            out, (_, alpha) = layer(x, edge_index, e, return_attention_weights=True)
            return out.float() + alpha.float().sum()
        if path == "window":
            return layer(x, WindowGraph(6, 1))
        if path in ("attention", "GPS"):
            return layer(x, edge_index)
        if path == "hetero":
            kind = ("a", "to", "a")
            return layer({"a": x}, {kind: edge_index}, edge_attr_dict={kind: e})["a"]
        return layer(x, edge_index, e)

    expected = call()
    with torch.autocast("cpu", dtype=dtype):
        out = call()
    # GPS ends in a norm, which autocast leaves in float32
    assert out.dtype == (torch.float32 if path in ("GPS", "weights") else dtype)
    tolerance = 16 * torch.finfo(dtype).eps * max(expected.abs().max().item(), 1.0)
    assert (out.float() - expected).abs().max() < tolerance
    out.float().square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is None or parameter.grad.dtype == torch.float32
        assert parameter.grad is None or parameter.grad.isfinite().all()
    assert x.grad.dtype == torch.float32 and x.grad.isfinite().all()


@pytest.mark.field_report("B21")
def test_training_in_bfloat16_is_as_good_as_in_float32():
    """A planted partition of noisy nodes that only the neighbours tell apart."""
    n, classes = 300, 3
    label = torch.arange(n) % classes
    pairs = torch.randint(n, (2, 30 * n))
    same = label[pairs[0]] == label[pairs[1]]
    edge_index = pairs[:, same | (torch.rand(30 * n) < 0.1)]
    x = F.one_hot(label, classes) + 1.0 * torch.randn(n, classes)
    train = torch.rand(n) < 0.5

    def accuracy(autocast):
        torch.manual_seed(1)
        first, second = (
            TransformerConv(classes, 8, heads=2, root_weight=False),
            TransformerConv(16, classes, root_weight=False),
        )
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=0.02)
        scaler = torch.amp.GradScaler("cpu", enabled=autocast)
        for _ in range(50):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                logits = second(first(x, edge_index).relu(), edge_index)
                loss = F.cross_entropy(logits[train], label[train])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return (logits.argmax(1) == label)[~train].double().mean().item()

    full, half = accuracy(False), accuracy(True)
    assert full > 0.9  # of the features alone 0.6 can be read
    assert abs(full - half) <= 0.01
