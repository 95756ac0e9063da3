"""Random graphs of every kind, options and dtypes against the oracle; random forms and states of one thing agree.

``GRAPHATTN_FUZZ=n`` draws n examples for each test, other ones every time.
"""

import math
import os
from dataclasses import replace

import networkx
import pytest
import scipy.sparse
import torch
import torch_geometric
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

from graphattn import (
    CompleteGraph,
    Graph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    as_graph,
    attention_weights,
    expander_graph,
    global_graph,
    graph_attention,
    union,
)
from graphattn.nn import GraphMultiheadAttention, GraphTransformerLayer, TransformerConv
from tests import oracle
from tests.test_structured_attention import draw, on_edges, own, with_listed_bias

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LONG = int(os.environ.get("GRAPHATTN_FUZZ", "0"))
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
KINDS = [
    "sparse",
    "complete",
    "cliques",
    "labels",
    "window",
    "windows",
    "grid",
    "union",
    "expander",
    "globals",
]


def examples(number: int):
    """So many examples, always the same ones; in the long mode as many as it asks for, and new ones."""
    if LONG:
        return settings(max_examples=LONG, derandomize=False, print_blob=True)
    return settings(max_examples=number)


def sides(most: int):
    """A radius: an int, a pair, or one with a side that has no end."""
    side = st.integers(0, most)
    return side | st.tuples(side | st.none(), side | st.none())


@st.composite
def edge_lists(draw, num_keys: int, num_queries: int) -> Tensor:
    """Any edges, parallel ones and loops among them."""
    if not num_keys or not num_queries:
        return torch.empty(2, 0, dtype=torch.int64)
    number = draw(st.integers(0, 40) | st.just(150))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    skew = draw(st.sampled_from([1.0, 3.0]))  # 3: hubs
    return torch.stack(
        [(torch.rand(number, generator=generator) ** skew * n).long() for n in (num_keys, num_queries)]
    )


@st.composite
def graphs(draw, long: int = 150) -> Graph:
    """A graph of any kind, small, or a band or clique of up to `long` nodes, which other kernels serve."""
    few = st.integers(0, 9)
    many = few | st.integers(60, long)
    kind = draw(st.sampled_from(KINDS))
    if kind == "sparse":
        num_keys, num_queries = draw(few), draw(few)
        return SparseGraph.from_edge_index(
            draw(edge_lists(num_keys, num_queries)), size=(num_keys, num_queries)
        )
    offset, dilation = draw(st.integers(-12, 12) | st.integers(-long, long)), draw(st.integers(1, 5))
    if kind == "complete":
        return CompleteGraph(draw(many), num_keys=draw(many), causal=draw(st.booleans()), offset=offset)
    if kind in ("cliques", "windows"):
        sizes = draw(st.lists(few, max_size=6) | st.lists(st.integers(60, 80), max_size=2))
        ptr = torch.tensor([0, *sizes]).cumsum(0)
        if kind == "cliques":
            return CompleteGraph.from_ptr(ptr, causal=draw(st.booleans()))
        return WindowGraph.from_ptr(ptr, draw(sides(80)), dilation=dilation)
    if kind == "labels":
        labels = draw(st.lists(st.integers(-2, 3), max_size=20) | st.lists(st.integers(0, 1), min_size=120))
        return CompleteGraph.from_batch(torch.tensor(labels, dtype=torch.int64), causal=draw(st.booleans()))
    if kind == "window":
        radius = draw(sides(6) | sides(100))
        return WindowGraph(draw(many), radius, dilation=dilation, num_keys=draw(many), offset=offset)
    if kind == "grid":
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3) | st.just([3, 1, 2, 2])))
        border = draw(st.sampled_from(["clip", "shift"]))
        side = st.integers(0, 7)
        one = side | st.tuples(side, side) | st.none()
        if border == "clip":
            one |= st.tuples(side | st.none(), side | st.none())
        radius = draw(side | st.none() | st.tuples(*[one] * len(shape)))
        return GridGraph(shape, radius, dilation=dilation, border=border)
    num_nodes = draw(st.integers(1, 14))
    if kind == "union":
        parts = [SparseGraph.from_edge_index(draw(edge_lists(num_nodes, num_nodes)), num_nodes)]
        parts += [WindowGraph(num_nodes, draw(sides(3)), dilation=dilation)]
        parts += [CompleteGraph.from_batch(torch.arange(num_nodes) % 3, causal=True)]
        return union(*parts[: draw(st.integers(1, 3))])
    if kind == "expander":
        return expander_graph(num_nodes, draw(st.integers(0, 5)), seed=draw(few))
    return global_graph(num_nodes, draw(st.lists(st.integers(0, num_nodes - 1), max_size=3)))


@st.composite
def cases(draw_from, dtypes=DTYPES, parallel: bool = True) -> tuple[Graph, oracle.Case]:
    """A graph, without parallel edges if they are not wanted, and operands with any options."""
    graph = draw_from(graphs())
    if isinstance(graph, SparseGraph) and not parallel:
        graph = union(graph)
    kv_heads = draw_from(st.sampled_from([1, 2]))
    layout = "E" if len(graph.edge_shape) == 1 else "QS"
    bias = draw_from(st.none() | st.tuples(*[st.sampled_from([axis, "1"]) for axis in layout + "H"]))
    options = {
        "dtype": draw_from(st.sampled_from(dtypes)),
        "heads": kv_heads * draw_from(st.sampled_from([1, 1, 2, 4])),
        "kv_heads": kv_heads,
        "dim": draw_from(st.sampled_from([1, 3, 8])),
        "leading": draw_from(st.sampled_from([(), (), (2,), (1, 2), (0,)])),
        "scale": draw_from(st.none() | st.sampled_from([-0.7, 0.0, 1.3])),
        "softcap": draw_from(st.none() | st.sampled_from([0.5, 3.0])),
        "removed": draw_from(st.sampled_from([0.0, 0.3, 1.0])),
        "seed": draw_from(st.integers(0, 2**20)),
    }
    options["value_dim"] = draw_from(st.sampled_from([options["dim"], 2, 8]))
    if isinstance(graph, SparseGraph) and draw_from(st.booleans()):
        options.update(edge_dim=draw_from(st.sampled_from([1, 3])), value_dim=options["dim"])
    return graph, draw(graph, bias=None if bias is None else "".join(bias), **options)


def magnitudes(case: oracle.Case, keep: Tensor | None, of_weights: bool) -> dict[str, Tensor]:
    """For each result the sum of the absolute values of the terms that it is computed from, and their rounding.

    An entry that is a small difference of large terms has their error, in any order of summation; and a weight
    has the absolute error of its score as a relative one.
    """
    operands = {name: x.detach().abs().requires_grad_() for name, x in case.operands.items()}
    weights = oracle.attention(**case.operands, edge_index=case.edge_index, **case.settings)[2]
    source, target = case.edge_index
    heads, dim = case.operands["query"].shape[-2:]
    key, value = (
        operands[name][..., source, :, :].repeat_interleave(heads // operands[name].shape[-2], -2)
        for name in ("key", "value")
    )
    if "edge_attr" in operands:
        feature = torch.einsum("ef,hfd->ehd", operands["edge_attr"], operands["edge_projection"])
        key = key + feature
        value = value if of_weights else value + feature
    score = abs(case.settings.get("scale", dim**-0.5)) * (operands["query"][..., target, :, :] * key).sum(-1)
    if "bias" in operands:
        score = score + operands["bias"].masked_fill(operands["bias"].isinf(), 0.0)
    kept = weights if keep is None else weights * keep
    flowing, flowing_lse = case.grad_out.abs(), case.grad_lse.abs()
    if of_weights:
        out = weights
        terms = (
            flowing + torch.zeros_like(flowing_lse).index_add(-2, target, weights * flowing)[..., target, :]
        )
        loss = ((weights * terms).detach() * score).sum()
    else:
        out = torch.zeros_like(case.grad_out).index_add(-3, target, kept.unsqueeze(-1) * value)
        terms = (flowing[..., target, :, :] * value).sum(-1) * (1 if keep is None else keep)
        terms = terms + ((flowing * out).sum(-1) + flowing_lse)[..., target, :]
        loss = ((weights * terms).detach() * score).sum() + (flowing * out).sum()
    gradients = torch.autograd.grad(loss, tuple(operands.values()), materialize_grads=True)
    largest = score.detach().max().item() if score.numel() else 0.0
    named = {"out": out.detach(), "lse": torch.ones_like(case.grad_lse)}
    named |= {f"gradient of {name}": x for name, x in zip(operands, gradients)}
    return {name: (1.0 + largest) * x for name, x in named.items()}


def assert_within_rounding(actual: Tensor, exact: Tensor, magnitude: Tensor, dtype: torch.dtype, name: str):
    assert actual.dtype == dtype, f"{name}: dtype {actual.dtype}, not {dtype}"
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    info, computed = torch.finfo(dtype), torch.finfo(oracle.statistics_dtype(dtype))
    allowed = 16 * computed.eps * magnitude + info.eps * exact.abs()
    # What is below the smallest number of the output is lost, and a weight below that of the sums counts as 0.
    allowed += info.smallest_normal * info.eps + computed.smallest_normal * 1e6
    equal = actual.double() == exact  # infinities
    worst = ((actual.double() - exact).abs() / allowed).masked_fill(equal, 0.0)
    # Written so that NaN fails.
    assert (worst <= 1).all(), f"{name}: {worst.max():.3g} times the error that rounding allows"


def with_bias_of_edges(graph: Graph, case: oracle.Case) -> oracle.Case:
    """The same case with a bias of one row for each listed edge."""
    if "bias" not in case.operands:
        return case
    bias = on_edges(graph, case.operands["bias"], case.operands["query"].shape[-2])
    return replace(case, operands={**case.operands, "bias": bias})


def assert_agrees(
    graph: Graph,
    case: oracle.Case,
    operator: oracle.Operator,
    exactly: oracle.Operator | None = None,
    keep: Tensor | None = None,
):
    """Every entry of every result is the oracle's, up to the rounding of the terms that it is the sum of.

    Another `exactly` than the oracle's out and lse may give out alone, or the weights of the listed edges.
    """
    case64 = case.to(torch.float64)
    exact = oracle.results(with_listed_bias(graph, exactly or oracle.oracle(keep=keep)), case64)
    of_weights = case.grad_out.dim() != case.operands["query"].dim()
    magnitude = magnitudes(with_bias_of_edges(graph, case64), keep, of_weights)
    if "bias" in case.operands:  # from the edges back to what it was broadcast from
        bias = case64.operands["bias"].detach().nan_to_num().requires_grad_()
        listed = on_edges(graph, bias, case.operands["query"].shape[-2])
        (magnitude["gradient of bias"],) = torch.autograd.grad(listed, bias, magnitude["gradient of bias"])
    for name, tensor in oracle.results(operator, case).items():
        wide = name == "lse" or (name == "out" and of_weights)
        dtype = oracle.statistics_dtype(case.dtype) if wide else case.dtype
        assert_within_rounding(tensor, exact[name], magnitude[name], dtype, name)


@examples(60)
@given(cases())
def test_any_graph_and_options(drawn):
    graph, case = drawn
    assert_agrees(graph, case, own(graph))
    if not isinstance(graph, SparseGraph):
        listed = graph.to_sparse()
        assert_agrees(listed, with_bias_of_edges(graph, case), own(listed))


def constant_lse(case: oracle.Case) -> Tensor:
    return torch.zeros_like(case.grad_lse, requires_grad=True)


@examples(40)
@given(cases(parallel=False), st.sampled_from([0.0, 0.3, 0.7]), st.integers(0, 2**20))
def test_out_alone_and_dropout(drawn, dropout_p, seed):
    """Which weights are dropped shows where values are one-hot; with those, everything is the oracle's.

    Without lse other kernels may serve. Those that drop for one seed must do so whatever the operands hold.
    """
    graph, case = drawn
    case = replace(case, grad_lse=torch.zeros_like(case.grad_lse))
    *leading, num_keys, kv_heads, _ = case.operands["value"].shape
    heads = case.operands["query"].shape[-2]
    revealing = {name: torch.zeros_like(x) for name, x in case.operands.items()}
    revealing["value"] = torch.eye(num_keys).view(num_keys, 1, num_keys).expand(*leading, -1, kv_heads, -1)
    if "edge_attr" in revealing:
        revealing["edge_projection"] = torch.zeros(heads, revealing["edge_attr"].shape[1], num_keys)
        revealing["query"] = revealing["query"][..., :1].expand(*leading, -1, -1, num_keys)
        revealing["key"] = revealing["key"][..., :1].expand(*leading, -1, -1, num_keys)

    def attend(operands, dropout_p):
        torch.manual_seed(seed)
        return graph_attention(**operands, graph=graph, dropout_p=dropout_p, **case.settings)

    source, target = case.edge_index
    keep = None
    if dropout_p > 0.0 and num_keys > 0:
        float32 = {name: x.float() for name, x in revealing.items()}
        kept, full = (attend(float32, p).movedim(-2, -1)[..., target, source, :] for p in (dropout_p, 0.0))
        keep = (kept / full).double()
        assert ((keep == 0) | (keep * (1 - dropout_p) - 1).abs().lt(1e-5)).all()
        keep = (keep > 0).double() / (1 - dropout_p)

    def alone(case, operands):
        return attend(operands, dropout_p), constant_lse(case)

    def exactly(case, operands):
        out, _, _ = oracle.attention(**operands, edge_index=case.edge_index, **case.settings, keep=keep)
        return out, constant_lse(case)

    assert_agrees(graph, case, alone, exactly, keep)


@examples(40)
@given(cases())
def test_weights_of_any_graph(drawn):
    graph, case = drawn
    heads = case.operands["query"].shape[-2]

    def of_edges(case, operands):
        arguments = {name: x for name, x in operands.items() if name != "value"}
        weights = attention_weights(**arguments, graph=graph, **case.settings)
        flat = weights.flatten(-1 - len(graph.edge_shape), -2)
        unused = torch.ones(flat.shape[-2], dtype=torch.bool)
        unused[graph.slots()] = False
        assert (flat[..., unused, :] == 0).all()
        return flat[..., graph.slots(), :] + 0.0 * operands["value"].sum(), constant_lse(case)

    def exactly(case, operands):
        weights = oracle.attention(**operands, edge_index=case.edge_index, **case.settings)[2]
        return weights + 0.0 * operands["value"].sum(), constant_lse(case)

    flowing = torch.randn(*case.grad_out.shape[:-3], graph.num_edges, heads).to(case.dtype)
    assert_agrees(graph, replace(case, grad_out=flowing), of_edges, exactly)


# Forms of one adjacency, and states of one layer.


@st.composite
def adjacencies(draw) -> tuple[Tensor, int, int]:
    """An `edge_index` with its sizes: `(edge_index, num_keys, num_queries)`."""
    num_keys, num_queries = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return draw(edge_lists(num_keys, num_queries)), num_keys, num_queries


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
@examples(60)
@given(adjacencies(), st.randoms(use_true_random=False))
def test_every_form_of_an_adjacency_attends_alike(drawn, random):
    """Stored values are biases: they stay with their edges, whatever order a form lists these in."""
    edge_index, num_keys, num_queries = drawn
    num_edges, size = edge_index.shape[1], (num_keys, num_queries)
    source, target = edge_index
    values = torch.randn(num_edges, dtype=torch.float64)
    operands = [torch.randn(n, 1, 3, dtype=torch.float64) for n in (num_queries, num_keys, num_keys)]

    def attend(graph: Graph, bias: Tensor) -> Tensor:
        assert (graph.num_keys, graph.num_queries, graph.num_edges) == (*size, num_edges)
        return graph_attention(*operands, graph, bias=bias.view(-1, 1))

    expected = oracle.attention(*operands, edge_index, bias=values.view(-1, 1))[0]
    coo = torch.sparse_coo_tensor(torch.stack([target, source]), values, size[::-1], check_invariants=True)
    by_query = (target * num_keys + source).argsort(stable=True)
    by_key = (source * num_queries + target).argsort(stable=True)
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), target.bincount(minlength=num_queries).cumsum(0)])
    colptr = torch.cat([torch.zeros(1, dtype=torch.int64), source.bincount(minlength=num_keys).cumsum(0)])
    scipy_coo = scipy.sparse.coo_array((values.numpy(), (target.numpy(), source.numpy())), shape=size[::-1])
    shuffled = torch.tensor(random.sample(range(num_edges), num_edges), dtype=torch.int64)
    pyg = EdgeIndex(edge_index[:, by_query], sparse_size=size, sort_order="col")
    graphs = [
        (as_graph(edge_index, size=size), values),
        (as_graph(edge_index.int(), size=size), values),
        (as_graph(edge_index.flip(0), size=size, flow="target_to_source"), values),
        (as_graph(edge_index[:, shuffled], size=size), values[shuffled]),
        (as_graph(pyg), values[by_query]),
        (as_graph(coo), coo._values()),
        (SparseGraph.from_csr(rowptr, source[by_query], num_keys), values[by_query]),
        (SparseGraph.from_scipy(scipy_coo), values),
    ]
    distinct = torch.unique(edge_index, dim=1).shape[1] == num_edges
    if distinct:  # these forms do not allow an entry twice, or sum them up
        csr = torch.sparse_csr_tensor(
            rowptr, source[by_query], values[by_query], size[::-1], check_invariants=True
        )
        csc = torch.sparse_csc_tensor(
            colptr, target[by_key], values[by_key], size[::-1], check_invariants=True
        )
        dense = torch.full(size[::-1], math.nan, dtype=torch.float64)
        dense[target, source] = values
        graphs += [(as_graph(csr), csr.values()), (as_graph(csc), csc.values())]
        graphs += [(SparseGraph.from_mask(~dense.isnan()), dense[~dense.isnan()])]
        for form in ("csr", "csc"):
            A = scipy_coo.asformat(form)
            graphs += [(SparseGraph.from_scipy(A), torch.from_numpy(A.tocoo().data))]
    if num_keys == num_queries:
        G = networkx.MultiDiGraph()
        G.add_nodes_from(range(num_keys))
        G.add_edges_from(
            (j, i, {"value": x}) for j, i, x in zip(source.tolist(), target.tolist(), values.tolist())
        )
        listed = torch.tensor([x for *_, x in G.edges(data="value")], dtype=torch.float64)
        graphs += [(SparseGraph.from_networkx(G), listed)]
        graphs += [(as_graph(Data(edge_index=edge_index, num_nodes=num_keys)), values)]
        graphs += [(as_graph(Data(adj_t=coo)), coo._values())]
        parts = SparseGraph.from_edge_index(edge_index, num_keys)
        graphs += [(as_graph(parts), values)]
    for graph, bias in graphs:
        torch.testing.assert_close(attend(graph, bias), expected, rtol=1e-12, atol=1e-12)


LAYERS = {
    "attention": (lambda: GraphMultiheadAttention(8, 2), lambda: torch.nn.MultiheadAttention(8, 2)),
    "layer": (
        lambda: GraphTransformerLayer(8, 2, 12, dropout=0.0),
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0),
    ),
    "conv": (
        lambda: TransformerConv(8, 4, 2, beta=True, edge_dim=3),
        lambda: torch_geometric.nn.TransformerConv(8, 4, 2, beta=True, edge_dim=3),
    ),
}


@st.composite
def states(draw, layer: str) -> dict:
    """A state_dict of the reference layer in which a few entries are wrong, or only other numbers."""
    torch.manual_seed(draw(st.integers(0, 2**20)))
    state = dict(LAYERS[layer][1]().state_dict())
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(state)))
        x = state[name]
        change = draw(
            st.sampled_from(["drop", "rename", "add", "shape", "one", "dtype", "nothing", "object"])
        )
        if change in ("drop", "rename"):
            state[name + "_" if change == "rename" else "kept"] = state.pop(name)
            state.pop("kept", None)
        elif change == "add":
            state["unknown.weight"] = x
        elif not isinstance(x, Tensor) or change == "object":
            state[name] = draw(st.sampled_from([None, 1.0, "x", [1.0]]))
        elif change in ("shape", "one"):
            state[name] = x.flatten()[:1] if change == "one" else torch.cat([x, x])
        elif change == "dtype":
            state[name] = x.to(draw(st.sampled_from([torch.float64, torch.bfloat16, torch.int64])))
        else:
            state[name] = torch.randn(x.shape).to(x.dtype)  # a change before may have left integers
    return state


@pytest.mark.parametrize("name", LAYERS)
@examples(30)
@given(data=st.data())
def test_a_state_is_refused_or_gives_the_numbers_of_the_reference(name, data):
    ours, reference = (build() for build in LAYERS[name])
    state = data.draw(states(name))
    refused = []
    for layer in (ours, reference):
        try:
            layer.load_state_dict(state)
            refused.append(None)
        except RuntimeError as error:
            refused.append(str(error).splitlines()[1:])
    assert refused[0] == refused[1]
    if refused[0] is not None:
        return
    x = torch.randn(5, 8)
    graph = CompleteGraph(5)
    if name == "conv":
        edge_index, edge_attr = graph.to_edge_index(), torch.randn(25, 3)
        actual, expected = (layer(x, edge_index, edge_attr) for layer in (ours, reference))
    elif name == "attention":
        actual, expected = ours(x, graph), reference(x, x, x)[0]
    else:
        actual, expected = ours(x, graph), reference(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
