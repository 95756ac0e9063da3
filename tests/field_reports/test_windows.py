"""Reports about windows on sequences and grids, and about more edges than 32 bits can count."""

import itertools
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from graphattn import CompleteGraph, GridGraph, SparseGraph, WindowGraph, attention_weights, graph_attention
from graphattn.encodings import alibi
from graphattn.graph import grid_blocks
from graphattn.nn import GraphMultiheadAttention, GraphTransformer, RelativeBias
from tests import oracle


def keys_of(graph):
    """The keys of each query, in the order in which they are listed."""
    source, target = graph.to_edge_index()
    return [source[target == i].tolist() for i in range(graph.num_queries)]


def assert_attends(graph, expected_keys):
    """The graph lists these keys, and its own kernel attends to them."""
    assert keys_of(graph) == expected_keys
    assert graph.num_edges == sum(map(len, expected_keys))
    inputs = [torch.randn(n, 2, 8).double() for n in (graph.num_queries, graph.num_keys, graph.num_keys)]
    pairs = [(j, i) for i, keys in enumerate(expected_keys) for j in keys]
    exact, _, _ = oracle.attention(*inputs, torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t())
    torch.testing.assert_close(graph_attention(*inputs, graph), exact)


@pytest.mark.field_report("B62")
def test_how_far_a_window_reaches():
    """A causal window of 3 is `(2, 0)`, the own token among them; a radius is on either side."""
    assert_attends(WindowGraph(8, (2, 0)), [list(range(max(t - 2, 0), t + 1)) for t in range(8)])
    assert keys_of(WindowGraph(8, (2, 0)))[7] == [5, 6, 7]
    assert_attends(WindowGraph(8, 2), [list(range(max(i - 2, 0), min(i + 3, 8))) for i in range(8)])
    assert WindowGraph(4, 1).num_edges == 10
    assert "radius=(2, 0)" in repr(WindowGraph(8, (2, 0))) and "radius=(2, 2)" in repr(WindowGraph(8, 2))


@pytest.mark.field_report("B63")
def test_a_window_larger_than_what_it_is_on():
    for graph, n in (
        (WindowGraph(3, 10), 3),
        (GridGraph((3,), 10), 3),
        (GridGraph((2, 2), 3), 4),
        (GridGraph((2, 2), 3, border="shift"), 4),
        (WindowGraph(1, 10), 1),
        (WindowGraph(0, 10), 0),
    ):
        assert_attends(graph, [list(range(n))] * n)
    assert [WindowGraph(n, 10).num_edges for n in (3, 1, 0)] == [9, 1, 0]
    assert GridGraph((2, 2), 3).num_edges == 16


@pytest.mark.field_report("B66")
def test_blocks_of_a_grid_that_they_do_not_divide():
    labels = grid_blocks((5, 7), 3)
    assert labels.bincount().tolist() == [9, 9, 3, 6, 6, 2]  # (3, 2) by (3, 3, 1)
    graph = CompleteGraph.from_batch(labels)
    cells = list(itertools.product(range(5), range(7)))
    expected = [
        [j for j, (r, c) in enumerate(cells) if (r // 3, c // 3) == (row // 3, column // 3)]
        for row, column in cells
    ]
    assert_attends(graph, expected)


def natten(n, kernel, border):
    """One axis: `kernel // 2` before, the cell, `(kernel - 1) // 2` after, moved inward or cut off."""
    before, after = kernel // 2, (kernel - 1) // 2
    if border == "clip":
        return [list(range(max(i - before, 0), min(i + after + 1, n))) for i in range(n)]
    size = min(kernel, n)
    starts = [min(max(i - before, 0), n - size) for i in range(n)]
    return [list(range(start, start + size)) for start in starts]


@pytest.mark.field_report("B67")
@pytest.mark.parametrize("border", ["clip", "shift"])
@pytest.mark.parametrize("kernel", [1, 2, 4, 15, 31])
def test_kernels_of_any_size(kernel, border):
    """Even ones too, `(r, r - 1)`: one cell more before than after; on one axis and on two."""
    radius = (kernel // 2, (kernel - 1) // 2)
    line = natten(33, kernel, border)
    assert_attends(GridGraph((33,), (radius,), border=border), line)
    rows, columns = natten(4, kernel, border), natten(33, kernel, border)
    expected = [[r * 33 + c for r in rows[y] for c in columns[x]] for y in range(4) for x in range(33)]
    assert_attends(GridGraph((4, 33), (radius, radius), border=border), expected)


@pytest.mark.field_report("B68")
def test_padding_within_a_window():
    """The last 3 of 10 are padding: a bias of -inf takes them away, and so does a list of edges without them."""
    graph, valid = WindowGraph(10, 2), torch.arange(10) < 7
    expected = [[j for j in range(max(i - 2, 0), min(i + 3, 10)) if j < 7] for i in range(10)]
    inputs = torch.randn(3, 10, 2, 8).double()
    pairs = torch.tensor([(j, i) for i, keys in enumerate(expected) for j in keys]).t()
    exact, _, weights = oracle.attention(*inputs, pairs)
    source, _ = graph.to_edge_index()
    bias = torch.zeros(graph.edge_shape).double()
    bias.view(-1)[graph.slots()] = torch.where(valid[source], 0.0, -torch.inf).double()
    out = graph_attention(*inputs, graph, bias=bias.unsqueeze(-1))
    torch.testing.assert_close(out, exact)
    listed = SparseGraph.from_edge_index(graph.to_edge_index()[:, valid[source]], 10)
    torch.testing.assert_close(graph_attention(*inputs, listed), exact)
    ours = attention_weights(*inputs[:2], listed)
    torch.testing.assert_close(ours, weights)
    totals = torch.zeros(10, 2).double().index_add(0, pairs[1], ours)
    torch.testing.assert_close(totals[:9], torch.ones(9, 2).double())  # 9 sees padding alone
    assert (totals[9] == 0).all() and (out[9] == 0).all()


@pytest.mark.field_report("B70")
def test_dilated_windows_train_on_the_cpu():
    graph = WindowGraph(11, 2, dilation=2)
    assert_attends(graph, [[j for j in range(i - 4, i + 5, 2) if 0 <= j < 11] for i in range(11)])
    layer, x, goal = GraphMultiheadAttention(8, 2), torch.randn(11, 8), torch.randn(11, 8)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x, graph), goal)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


# --- distances ------------------------------------------------------------------------------------------


@pytest.mark.field_report("B109")
def test_alibi_on_some_of_the_heads_and_for_positions_of_ones_own():
    graph, heads, biased = WindowGraph(6, 2), 6, 4
    slopes = torch.tensor([2 ** (-8 * (h + 1) / biased) for h in range(biased)] + [0.0, 0.0])
    bias = F.pad(alibi(graph, biased), (0, heads - biased))
    assert bias.shape[-1] == heads
    query, key, value = torch.randn(3, 6, heads, 8).unbind()
    i, j = torch.arange(6)[:, None], torch.arange(6)
    dense = (-(i - j).abs() * slopes[:, None, None]).masked_fill((i - j).abs() > 2, -torch.inf)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, key, value)), attn_mask=dense
    )
    out = graph_attention(query, key, value, graph, bias=bias)
    torch.testing.assert_close(out, expected.transpose(0, 1))

    # Positions that the graph does not know: one number for each edge, from one for each node.
    positions = torch.tensor([0.0, 0.5, 3.0, 3.1, 7.0, 9.0])
    listed = graph.to_sparse()
    source, target = listed.to_edge_index()
    distance = (positions[source] - positions[target]).abs()
    out = graph_attention(query, key, value, listed, bias=-distance[:, None] * slopes)
    dense = -(positions[:, None] - positions).abs() * slopes[:, None, None]
    dense = dense.masked_fill((i - j).abs() > 2, -torch.inf)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, key, value)), attn_mask=dense
    )
    torch.testing.assert_close(out, expected.transpose(0, 1))
    with pytest.raises(ValueError, match=r"`bias`.*\[6, 5, 6\].*\[1, 5, 4\]"):
        graph_attention(query, key, value, graph, bias=alibi(graph, biased))
    with pytest.raises(ValueError, match="positions"):
        alibi(listed, biased)


@pytest.mark.field_report("B110")
def test_a_window_has_no_parameters_and_says_how_wide_it_is():
    layer = GraphTransformer(3, 8, 2, num_layers=1, heads=2)
    count = sum(parameter.numel() for parameter in layer.parameters())
    x = torch.randn(30, 3)
    outs = [layer(x, WindowGraph(30, radius)) for radius in (1, 5)]
    assert not torch.allclose(*outs)
    assert count == sum(parameter.numel() for parameter in layer.parameters())
    assert repr(WindowGraph(30, 5)).endswith("radius=(5, 5))")
    assert "radius=((3, 2), (3, 3)), dilation=2, border='shift'" in repr(
        GridGraph((9, 9), ((3, 2), 3), dilation=2, border="shift")
    )
    assert repr(RelativeBias(WindowGraph(30, 5), 2)) == "RelativeBias(offsets=11, heads=2)"  # this has some
    assert "8" in repr(GraphMultiheadAttention(8, 2)) and "2" in repr(GraphMultiheadAttention(8, 2))


# --- numbers beyond 32 bits -----------------------------------------------------------------------------


@pytest.mark.field_report("B86")
def test_more_edges_and_scores_than_32_bits_count():
    """Shapes alone: nothing is allocated on the meta device."""
    n = 2**31 - 1
    assert WindowGraph(n, 2).num_edges == 5 * n - 6
    assert CompleteGraph(2**20).num_edges == 2**40
    with pytest.raises(ValueError, match=r"the number of edges must be at least 0 and below 2\*\*31, got"):
        WindowGraph(n, 2).to_sparse()
    with pytest.raises(ValueError, match=r"below 2\*\*31"):
        WindowGraph(n + 1, 2)
    num_edges, heads = 2**30, 8  # 2**33 scores
    ids = torch.empty(num_edges, dtype=torch.int32, device="meta")
    ptr = torch.empty(1001, dtype=torch.int64, device="meta")
    graph = SparseGraph(rowptr=ptr, colptr=ptr, col=ids, row=ids, edge_id_t=ids, edge_id=ids)
    query = torch.empty(1000, heads, 16, device="meta", requires_grad=True)
    bias = torch.empty(num_edges, heads, device="meta", requires_grad=True)
    out = graph_attention(query, query, query, graph, bias=bias)
    grads = torch.autograd.grad(out.sum(), (query, bias))
    assert out.shape == query.shape and grads[1].shape == (num_edges, heads)
    assert attention_weights(query, query, graph).shape == (num_edges, heads)


@pytest.mark.field_report("B86")
@pytest.mark.skipif(os.name == "nt", reason="the file has no holes there")
@pytest.mark.parametrize("kind", ["listed", "window"])
def test_rows_that_lie_past_the_first_two_billion_numbers(kind, tmp_path):
    """Keys and values in a file with a hole of 8 GB before the rows that are read."""
    rows, heads, dim = 2**22 + 4, 4, 128
    file = np.memmap(tmp_path / "rows", dtype=np.float32, mode="w+", shape=(rows, heads, dim))
    key = torch.from_numpy(file)
    assert key[-4:].storage_offset() > 2**31 - 1
    key[-4:] = torch.randn(4, heads, dim)
    query = torch.randn(4, heads, dim)
    near = torch.arange(4)
    if kind == "listed":
        edge_index = torch.stack([torch.cat([near, near.flip(0)]) + rows - 4, torch.cat([near, near])])
        graph = SparseGraph.from_edge_index(edge_index, size=(rows, 4))
    else:
        graph = WindowGraph(4, 1, num_keys=rows, offset=rows - 4)
        edge_index = graph.to_edge_index()
    local = torch.stack([edge_index[0] - (rows - 8), edge_index[1]])
    last = key[-8:].clone()
    exact, _, _ = oracle.attention(query.double(), last.double(), last.double(), local)
    torch.testing.assert_close(graph_attention(query, key, key, graph), exact.float())
