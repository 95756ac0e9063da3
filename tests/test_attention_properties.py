"""What must hold on any graph (hypothesis), and the claims: known layers as this operator on known graphs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import TransformerConv

from graphattn import SparseGraph, attention_weights, graph_attention


@st.composite
def inputs(draw) -> tuple[dict[str, Tensor], Tensor, int, int]:
    """Operands in float64 for a drawn graph: `(operands, edge_index, num_keys, num_queries)`."""
    num_keys, num_queries = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    pair = st.tuples(st.integers(0, num_keys - 1), st.integers(0, num_queries - 1))
    edge_index = torch.tensor(draw(st.lists(pair, max_size=30)), dtype=torch.int64).view(-1, 2).t()
    heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 4, 8]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    operands = {
        "query": normal(num_queries, heads, dim),
        "key": normal(num_keys, heads, dim),
        "value": normal(num_keys, heads, dim),
        "bias": normal(edge_index.shape[1], heads),
    }
    return operands, edge_index, num_keys, num_queries


def attend(operands: dict[str, Tensor], edge_index: Tensor, num_keys: int, num_queries: int) -> Tensor:
    return graph_attention(
        **operands, graph=SparseGraph.from_edge_index(edge_index, size=(num_keys, num_queries))
    )


def assert_same(actual: Tensor, expected: Tensor):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@given(inputs(), st.randoms(use_true_random=False))
def test_relabelling_nodes_permutes_the_output(drawn, random):
    operands, edge_index, num_keys, num_queries = drawn
    # Node j of the relabelled graph is node keys[j] of the old one.
    keys = torch.tensor(random.sample(range(num_keys), num_keys))
    queries = torch.tensor(random.sample(range(num_queries), num_queries))
    relabelled = torch.stack((keys.argsort()[edge_index[0]], queries.argsort()[edge_index[1]]))
    permuted = {
        "query": operands["query"][queries],
        "key": operands["key"][keys],
        "value": operands["value"][keys],
        "bias": operands["bias"],
    }
    actual = attend(permuted, relabelled, num_keys, num_queries)
    assert_same(actual, attend(*drawn)[queries])


@given(inputs(), st.randoms(use_true_random=False))
def test_the_order_of_edges_does_not_matter(drawn, random):
    operands, edge_index, num_keys, num_queries = drawn
    num_edges = edge_index.shape[1]
    order = torch.tensor(random.sample(range(num_edges), num_edges), dtype=torch.int64)
    shuffled = {**operands, "bias": operands["bias"][order]}
    assert_same(attend(shuffled, edge_index[:, order], num_keys, num_queries), attend(*drawn))


@given(inputs(), st.randoms(use_true_random=False))
def test_weights_follow_the_order_of_edges(drawn, random):
    operands, edge_index, num_keys, num_queries = drawn
    num_edges = edge_index.shape[1]
    order = torch.tensor(random.sample(range(num_edges), num_edges), dtype=torch.int64)
    weights, shuffled = (
        attention_weights(
            operands["query"],
            operands["key"],
            SparseGraph.from_edge_index(edge_index[:, which], size=(num_keys, num_queries)),
            bias=operands["bias"][which],
        )
        for which in (torch.arange(num_edges), order)
    )
    assert_same(shuffled, weights[order])


@given(inputs(), st.integers(0, 10**6))
def test_a_disjoint_union_is_a_concatenation(first, seed):
    operands, edge_index, num_keys, num_queries = first
    generator = torch.Generator().manual_seed(seed)
    second = {name: torch.randn(x.shape, generator=generator).double() for name, x in operands.items()}
    shifted = edge_index.flip(1) + torch.tensor([[num_keys], [num_queries]])
    both = {name: torch.cat((x, second[name])) for name, x in operands.items()}
    actual = attend(both, torch.cat((edge_index, shifted), 1), 2 * num_keys, 2 * num_queries)
    expected = torch.cat((attend(*first), attend(second, edge_index.flip(1), num_keys, num_queries)))
    assert_same(actual, expected)


@given(inputs(), st.data())
def test_removing_an_edge_changes_one_row(drawn, data):
    operands, edge_index, num_keys, num_queries = drawn
    num_edges = edge_index.shape[1]
    if num_edges == 0:
        return
    removed = data.draw(st.integers(0, num_edges - 1))
    kept = torch.arange(num_edges) != removed
    without = attend({**operands, "bias": operands["bias"][kept]}, edge_index[:, kept], num_keys, num_queries)
    before = attend(*drawn)
    others = torch.arange(num_queries) != edge_index[1, removed]
    assert torch.equal(without[others], before[others])
    assert not torch.equal(without[~others], before[~others]) or (
        # Taking away one of several edges from the same key may change nothing.
        edge_index[0, edge_index[1] == edge_index[1, removed]].unique().numel() == 1 and kept.any()
    )


@given(inputs())
def test_removing_an_edge_is_a_bias_of_minus_infinity(drawn):
    operands, edge_index, num_keys, num_queries = drawn
    kept = torch.arange(edge_index.shape[1]) % 3 != 1
    masked = {**operands, "bias": operands["bias"].masked_fill(~kept.view(-1, 1), -torch.inf)}
    without = {**operands, "bias": operands["bias"][kept]}
    assert_same(
        attend(masked, edge_index, num_keys, num_queries),
        attend(without, edge_index[:, kept], num_keys, num_queries),
    )


@given(inputs())
def test_constant_values_come_back(drawn):
    operands, edge_index, num_keys, num_queries = drawn
    constant = torch.randn(operands["value"].shape[1:], dtype=torch.float64).expand_as(operands["value"])
    out = attend({**operands, "value": constant}, edge_index, num_keys, num_queries)
    reached = torch.zeros(num_queries, dtype=torch.bool).index_fill(0, edge_index[1], True)
    assert_same(out[reached], constant[:1].expand_as(out[reached]))
    assert (out[~reached] == 0).all()


@given(inputs())
def test_one_vector_added_to_all_keys_changes_nothing(drawn):
    operands, *graph = drawn
    shift = torch.randn(operands["key"].shape[1:], dtype=torch.float64)
    assert_same(attend({**operands, "key": operands["key"] + shift}, *graph), attend(*drawn))


@given(inputs())
def test_an_edge_twice_is_a_bias_of_log_two(drawn):
    operands, edge_index, num_keys, num_queries = drawn
    twice = {**operands, "bias": torch.cat((operands["bias"], operands["bias"]))}
    even = {**operands, "bias": operands["bias"] + torch.tensor(2.0).double().log()}
    assert_same(attend(twice, torch.cat((edge_index, edge_index), 1), num_keys, num_queries), attend(*drawn))
    assert_same(attend(even, edge_index, num_keys, num_queries), attend(*drawn))


# Claims.


def complete(num_queries: int, num_keys: int) -> SparseGraph:
    target, source = torch.cartesian_prod(torch.arange(num_queries), torch.arange(num_keys)).t()
    return SparseGraph.from_edge_index(torch.stack((source, target)), size=(num_keys, num_queries))


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_complete_graph_is_scaled_dot_product_attention(kv_heads):
    query, key, value = (
        torch.randn(2, n, heads, 16, requires_grad=True)
        for n, heads in ((20, 6), (33, kv_heads), (33, kv_heads))
    )
    out = graph_attention(query, key, value, complete(20, 33))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), enable_gqa=kv_heads != 6
    ).transpose(1, 2)
    flowing = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    for actual, wanted in zip(
        torch.autograd.grad(out, (query, key, value), flowing),
        torch.autograd.grad(expected, (query, key, value), flowing),
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def test_any_edges_are_masked_scaled_dot_product_attention():
    mask = torch.rand(20, 33) < 0.3
    mask[4] = False
    bias = torch.randn(20, 33)
    query, key, value = (torch.randn(n, 4, 16) for n in (20, 33, 33))
    graph = SparseGraph.from_mask(mask)
    source, target = graph.to_edge_index()
    out = graph_attention(query, key, value, graph, bias=bias[target, source].unsqueeze(1))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, key, value)), attn_mask=bias.masked_fill(~mask, -torch.inf)
    ).transpose(0, 1)
    torch.testing.assert_close(out, expected)


def test_complete_graph_is_multihead_attention():
    reference = torch.nn.MultiheadAttention(24, 3, dtype=torch.float64)
    x = torch.randn(11, 24, dtype=torch.float64)
    expected, expected_weights = reference(x, x, x, average_attn_weights=False)
    query, key, value = (
        torch.nn.functional.linear(x, reference.in_proj_weight, reference.in_proj_bias)
        .view(11, 3, 3, 8)
        .unbind(1)
    )
    graph = complete(11, 11)
    torch.testing.assert_close(
        reference.out_proj(graph_attention(query, key, value, graph).flatten(1)), expected
    )
    weights = attention_weights(query, key, graph)
    torch.testing.assert_close(weights.view(11, 11, 3).permute(2, 0, 1), expected_weights)


@pytest.mark.parametrize("edge_dim", [None, 5])
def test_listed_edges_are_the_message_passing_of_transformer_conv(edge_dim):
    conv = TransformerConv(7, 8, heads=3, edge_dim=edge_dim, root_weight=False).double()
    x = torch.randn(30, 7, dtype=torch.float64)
    edge_index = torch.randint(0, 30, (2, 140))
    edge_attr = None if edge_dim is None else torch.randn(140, edge_dim, dtype=torch.float64)
    query, key, value = (lin(x).view(30, 3, 8) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    projection = None if edge_dim is None else conv.lin_edge.weight.view(3, 8, 5).transpose(1, 2)
    graph = SparseGraph.from_edge_index(edge_index, 30)
    features = {"edge_attr": edge_attr, "edge_projection": projection}
    out = graph_attention(query, key, value, graph, **features)
    expected, (_, expected_weights) = conv(x, edge_index, edge_attr, return_attention_weights=True)
    torch.testing.assert_close(out.flatten(1), expected)
    torch.testing.assert_close(attention_weights(query, key, graph, **features), expected_weights)
    flowing = torch.randn_like(expected)
    parameters = [p for name, p in conv.named_parameters() if "skip" not in name]  # PyG keeps an unused one
    for actual, wanted in zip(
        torch.autograd.grad(out.flatten(1), parameters, flowing),
        torch.autograd.grad(expected, parameters, flowing),
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)
