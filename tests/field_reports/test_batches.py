"""Reports about several graphs side by side, about padding, and about masks and their polarity."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Batch, Data

from graphattn import CompleteGraph, SparseGraph, WindowGraph, graph_attention
from graphattn.nn import GPSConv, GraphMultiheadAttention, TransformerConv
from tests import oracle


def heads_first(*tensors):
    return (x.transpose(-3, -2) for x in tensors)


# --- graphs side by side --------------------------------------------------------------------------------


@pytest.mark.field_report("B48")
def test_labels_need_not_be_sorted():
    """The same rows as of the sorted nodes, brought back; and of PyG's layer, which must have them sorted."""
    batch = torch.tensor([0, 1, 0, 1, 2, 0])
    order = batch.argsort(stable=True)
    back = order.argsort()
    query = torch.randn(6, 2, 4).double()
    out = graph_attention(query, query, query, CompleteGraph.from_batch(batch))
    in_order = graph_attention(*3 * [query[order]], CompleteGraph.from_batch(batch[order]))
    torch.testing.assert_close(out, in_order[back])
    exact, _, _ = oracle.attention(*3 * [query], (batch[:, None] == batch).nonzero().t())
    torch.testing.assert_close(out, exact)

    x, edge_index = torch.randn(6, 8).double(), torch.tensor([[0, 2, 1, 5], [2, 0, 3, 0]])
    for attn_type in ("multihead", "performer"):
        torch.manual_seed(0)
        ours = GPSConv(8, TransformerConv(8, 4, heads=2), heads=2, attn_type=attn_type).double().eval()
        torch.manual_seed(0)
        theirs = (
            pyg.GPSConv(8, pyg.TransformerConv(8, 4, heads=2), heads=2, attn_type=attn_type).double().eval()
        )
        theirs.load_state_dict(ours.state_dict())
        expected = theirs(x[order], back[edge_index], batch[order])[back]
        torch.testing.assert_close(ours(x, edge_index, batch), expected)
        torch.testing.assert_close(ours(x[order], back[edge_index], batch[order])[back], expected)


@pytest.mark.field_report("B49")
def test_graphs_of_a_batch_that_have_no_nodes():
    ptr, batch = torch.tensor([0, 3, 3, 5, 5]), torch.tensor([0, 0, 0, 2, 2])
    value = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0]).view(5, 1, 1)
    zero = torch.zeros(5, 1, 1)
    for graph in (CompleteGraph.from_ptr(ptr), CompleteGraph.from_batch(batch)):
        assert graph.num_edges == 9 + 0 + 4 + 0 and graph.num_queries == 5
        out = graph_attention(zero, zero, value, graph).flatten()
        torch.testing.assert_close(out, torch.tensor([2.0, 2, 2, 15, 15]))
        pooled = pyg.global_mean_pool(out, batch, size=4)
        torch.testing.assert_close(pooled, torch.tensor([2.0, 0, 15, 0]))
    assert WindowGraph.from_ptr(ptr, 1).num_edges == 7 + 0 + 4 + 0
    graphs = [Data(x=torch.ones(n, 1), edge_index=torch.empty(2, 0).long()) for n in (3, 0, 2, 0)]
    collated = Batch.from_data_list(graphs)
    assert collated.num_graphs == 4 and CompleteGraph.from_ptr(collated.ptr).num_edges == 13


@pytest.mark.field_report("B50")
def test_no_batch_is_one_graph():
    torch.manual_seed(0)
    layer = GPSConv(8, TransformerConv(8, 4, heads=2), heads=2).eval()
    x, edge_index = torch.randn(6, 8), torch.randint(6, (2, 10))
    torch.testing.assert_close(layer(x, edge_index), layer(x, edge_index, torch.zeros(6, dtype=torch.int64)))
    one = CompleteGraph.from_batch(torch.zeros(6, dtype=torch.int64))
    query = torch.randn(6, 2, 4)
    torch.testing.assert_close(
        graph_attention(query, query, query, one), graph_attention(query, query, query, CompleteGraph(6))
    )


@pytest.mark.field_report("B52")
@pytest.mark.parametrize("causal", [False, True])
def test_every_sequence_of_a_batch_is_attended_alone(causal):
    """Lengths 2, 5, 1, 4: the own kernel, the general one and PyTorch's attention on each of them agree."""
    lengths = [2, 5, 1, 4]
    ptr = torch.tensor([0, *itertools.accumulate(lengths)])
    inputs = [torch.randn(12, 2, 8).requires_grad_() for _ in range(3)]
    graph = CompleteGraph.from_ptr(ptr, causal=causal)
    alone = [
        F.scaled_dot_product_attention(*heads_first(*parts), is_causal=causal).transpose(-3, -2)
        for parts in zip(*(x.split(lengths) for x in inputs))
    ]
    expected = torch.cat(alone)
    grads = torch.autograd.grad(expected.square().sum(), inputs)
    for form in (graph, graph.to_sparse(), WindowGraph.from_ptr(ptr, (None, 0 if causal else None))):
        out = graph_attention(*inputs, form)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), inputs), grads)


@pytest.mark.field_report("B53")
def test_offsets_that_are_none():
    """They start at 0, never fall and end at the number of nodes: nothing may lie between two sequences."""
    for build in (CompleteGraph.from_ptr, lambda ptr: WindowGraph.from_ptr(ptr, 1)):
        for wrong in ([2, 5, 7], [0, 4, 2, 7], [], [-1, 3]):
            with pytest.raises(ValueError, match="`ptr` must start at 0 and never fall"):
                build(torch.tensor(wrong, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"`ptr`.*\[1, 3\]"):
            build(torch.tensor([[0, 3, 7]]))
        with pytest.raises(TypeError, match="`ptr`"):
            build(torch.tensor([0.0, 7.0]))
        graph = build(torch.tensor([0, 3, 6]))  # of seven nodes
        with pytest.raises(ValueError, match=r"`query` must have shape \[..., 6, heads, dim\].*\[7, 1, 2\]"):
            graph_attention(*3 * [torch.zeros(7, 1, 2)], graph)
    assert "from 0 up to the number of nodes, never falling" in CompleteGraph.from_ptr.__doc__


@pytest.mark.field_report("B54")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_stands_in_padding_changes_nothing(dtype):
    """Padded sequences as a graph of their real tokens: these have the same bits, the padding gets 0."""
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [False] * 5])
    real = valid.flatten()
    sequence = torch.arange(3).repeat_interleave(5)
    graph = SparseGraph.from_mask((sequence[:, None] == sequence) & real & real[:, None])
    fill = torch.randn(3, 15, 2, 8).to(dtype)
    outs = []
    for pad in (0.0, 1e-10, 1e4 if dtype == torch.float16 else 1e10, math.nan, math.inf):
        inputs = [x.masked_fill(~real[:, None, None], pad).requires_grad_() for x in fill]
        out = graph_attention(*inputs, graph)
        grads = torch.autograd.grad(out.sum(), inputs)
        assert (out[~real] == 0).all() and all((grad[~real] == 0).all() for grad in grads)
        outs.append((out, *grads))
    assert all(torch.equal(a, b) for other in outs[1:] for a, b in zip(outs[0], other))
    assert outs[0][0][real].isfinite().all()
    # Packed without padding they are the same numbers.
    packed = graph_attention(*(x[real] for x in fill), CompleteGraph.from_ptr(torch.tensor([0, 5, 8, 8])))
    torch.testing.assert_close(packed, outs[0][0][real])


@pytest.mark.field_report("B57")
def test_a_sample_without_a_valid_token_compiled_and_not():
    torch._dynamo.reset()
    mask = torch.zeros(4, 4, dtype=torch.bool)
    graphs = [SparseGraph.from_mask(mask), CompleteGraph(4)]
    for graph in graphs:
        x = torch.randn(4, 2, 4, requires_grad=True)
        bias = torch.full((*(1 for _ in graph.edge_shape), 1), -math.inf)

        def call(x, graph=graph, bias=bias):
            return graph_attention(x, x, x, graph, bias=bias)

        for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            out = run(x)
            assert torch.equal(out, torch.zeros_like(out))
            (grad,) = torch.autograd.grad(out.sum(), x)
            assert torch.equal(grad, torch.zeros_like(grad))


# --- masks ----------------------------------------------------------------------------------------------


@pytest.mark.field_report("B58")
def test_true_means_may_attend():
    """As in `scaled_dot_product_attention`; `nn.MultiheadAttention` has it the other way round."""
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    graph = SparseGraph.from_mask(mask)
    query, key, value = torch.randn(3, 4, 2, 8).unbind()
    expected = F.scaled_dot_product_attention(*heads_first(query, key, value), attn_mask=mask)
    out = graph_attention(query, key, value, graph)
    torch.testing.assert_close(out, expected.transpose(-3, -2))
    swapped = graph_attention(query, key, value, SparseGraph.from_mask(~mask))
    assert (swapped[3] == 0).all() and not torch.allclose(swapped, out)

    torchs, ours = nn.MultiheadAttention(16, 2), GraphMultiheadAttention(16, 2)
    ours.load_state_dict(torchs.state_dict())
    x = torch.randn(4, 16)
    torch.testing.assert_close(ours(x, graph), torchs(x, x, x, attn_mask=~mask, need_weights=False)[0])
    assert "invert the masks of `nn.MultiheadAttention`" in SparseGraph.from_mask.__doc__


@pytest.mark.field_report("B59")
def test_a_number_is_added_and_a_mask_is_not():
    """Zeros and ones are a bias like any other; what is not bool is no mask, what is not floating no bias."""
    graph, query = CompleteGraph(4), torch.randn(4, 2, 8)
    ones = torch.ones(4, 4).tril()
    expected = F.scaled_dot_product_attention(*heads_first(query, query, query), attn_mask=ones)
    out = graph_attention(query, query, query, graph, bias=ones.unsqueeze(-1))
    torch.testing.assert_close(out, expected.transpose(-3, -2))
    for dtype in (torch.float32, torch.int64, torch.uint8):
        with pytest.raises(TypeError, match=rf"`mask` must be a bool tensor, True where.*{dtype}"):
            SparseGraph.from_mask(ones.to(dtype))
    for dtype in (torch.int64, torch.uint8):
        with pytest.raises(TypeError, match=r"`bias` must be floating point"):
            graph_attention(query, query, query, graph, bias=ones.to(dtype).unsqueeze(-1))
    with pytest.raises(TypeError, match=r"got a bool mask.*-inf.*from_mask"):
        graph_attention(query, query, query, graph, bias=ones.bool().unsqueeze(-1))
