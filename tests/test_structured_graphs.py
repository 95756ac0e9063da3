"""Complete, window and grid graphs against loops over their definitions."""

import copy
import io
import itertools
import math

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch_geometric.data import Batch, Data

from graphattn import CompleteGraph, Graph, GridGraph, SparseGraph, WindowGraph, as_graph, union
from graphattn.graph import axis_intervals, grid_blocks
from tests.test_graph import COPIES


def line_cells(p, low, end, before, after, dilation):
    """[(key position, slot)] of a query at position p: every key is looked at."""
    cells = []
    for j in range(low, end):
        steps, rest = divmod(j - p, dilation)
        if rest == 0 and (before is None or -before <= steps) and (after is None or steps <= after):
            cells.append((j, j if before is None or after is None else before + steps))
    return cells


def shifted_cells(p, n, before, after, dilation):
    """[(key position, slot)]: of all runs of the window's size, the one that has p nearest to its place."""
    line = list(range(p % dilation, n, dilation))
    size = min(before + 1 + after, len(line))
    runs = [line[a : a + size] for a in range(len(line) - size + 1)]
    best = min((run for run in runs if p in run), key=lambda run: abs(run.index(p) - before))
    return [(j, slot) for slot, j in enumerate(best)]


def pair(radius):
    return radius if isinstance(radius, tuple) else (radius, radius)


def expected_line(num_queries, num_keys, radius, dilation=1, offset=0):
    """[(query, key, slot)], and the slots of a query."""
    before, after = pair(radius)
    edges = [
        (i, j, slot)
        for i in range(num_queries)
        for j, slot in line_cells(i + offset, 0, num_keys, before, after, dilation)
    ]
    return edges, num_keys if before is None or after is None else before + 1 + after


def expected_grid(shape, radius, dilation=1, border="clip"):
    widths, axes = [], []
    for n, (before, after) in zip(shape, map(pair, radius), strict=True):
        whole = before is None or after is None
        widths.append(n if whole else before + 1 + after)
        if border == "clip" or whole:
            axes.append([line_cells(p, 0, n, before, after, dilation) for p in range(n)])
        else:
            axes.append([shifted_cells(p, n, before, after, dilation) for p in range(n)])
    edges = []
    for i, p in enumerate(itertools.product(*map(range, shape))):
        for cells in itertools.product(*(axis[x] for axis, x in zip(axes, p, strict=True))):
            j, slot = 0, 0
            for (x, s), n, width in zip(cells, shape, widths, strict=True):
                j, slot = j * n + x, slot * width + s
            edges.append((i, j, slot))
    return edges, math.prod(widths)


def assert_holds(graph, edges, num_keys, num_queries, edge_shape):
    """Everything that `graph` says about its edges against the list of them, [(query, key, slot)]."""
    assert isinstance(graph, Graph)
    assert edges == sorted(edges)
    queries, keys = [i for i, _, _ in edges], [j for _, j, _ in edges]
    edge_index = graph.to_edge_index()
    assert edge_index.dtype == torch.int64 and edge_index.tolist() == [keys, queries]
    assert (graph.num_keys, graph.num_queries) == (num_keys, num_queries)
    assert graph.num_edges == len(edges) and type(graph.num_edges) is int
    assert graph.edge_shape == edge_shape
    mask = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for i, j in zip(queries, keys, strict=True):
        mask[i, j] = True
    assert graph.to_mask().equal(mask)

    sparse = graph.to_sparse()
    assert type(sparse) is SparseGraph
    assert (sparse.num_keys, sparse.num_queries) == (num_keys, num_queries)
    assert sparse.to_edge_index().tolist() == [keys, queries]
    assert sparse.slots().tolist() == list(range(len(edges)))

    slots = graph.slots()
    assert slots.dtype == torch.int64
    if len(edge_shape) == 1:
        assert slots.tolist() == list(range(len(edges)))
    else:
        assert slots.tolist() == [i * edge_shape[1] + slot for i, _, slot in edges]
    assert_intervals_hold(graph, dict(zip(zip(queries, keys, strict=True), slots.tolist(), strict=True)))


def assert_intervals_hold(graph, slot_of):
    """The progressions of `axis_intervals`, walked both ways, are the edges and their slots."""
    tensors = ("first", "count", "slot", "first_query", "query_count")
    axes = axis_intervals(graph)
    assert all(getattr(axis, name).dtype == torch.int64 for axis in axes for name in tensors)
    axes = [axis._replace(**{name: getattr(axis, name).tolist() for name in tensors}) for axis in axes]
    num_queries, num_keys = [len(axis.first) for axis in axes], [len(axis.first_query) for axis in axes]
    for axis, queries, keys in zip(axes, num_queries, num_keys, strict=True):
        assert len(axis.count) == len(axis.slot) == queries and len(axis.query_count) == keys
        assert all(0 <= j <= keys for j in axis.first) and all(0 <= i <= queries for i in axis.first_query)
        assert min(axis.count + axis.query_count, default=0) >= 0
    order = range(max(graph.num_queries, graph.num_keys)) if graph.order is None else graph.order.tolist()
    found, transposed = {}, set()
    for i, p in enumerate(itertools.product(*map(range, num_queries))):
        query = order[i]
        for ts in itertools.product(*(range(axis.count[x]) for axis, x in zip(axes, p, strict=True))):
            j, slot = 0, 0
            for axis, x, t, n in zip(axes, p, ts, num_keys, strict=True):
                j = j * n + axis.first[x] + axis.step * t
                slot = slot * axis.slots + axis.slot[x] + axis.slot_step * t
            found[query, order[j]] = query * math.prod(axis.slots for axis in axes) + slot
    for j, p in enumerate(itertools.product(*map(range, num_keys))):
        for ts in itertools.product(*(range(axis.query_count[y]) for axis, y in zip(axes, p, strict=True))):
            i = 0
            for axis, y, t, n in zip(axes, p, ts, num_queries, strict=True):
                i = i * n + axis.first_query[y] + axis.step * t
            transposed.add((order[i], order[j]))
    assert found == slot_of
    assert transposed == set(slot_of)


sides = st.one_of(st.none(), st.integers(0, 4), st.integers(5, 40))
radii = st.one_of(st.integers(0, 5), st.tuples(sides, sides))


# -------------------------------------------------------------------------------------------------- complete


@given(st.integers(0, 7), st.none() | st.integers(0, 7), st.booleans(), st.integers(-9, 9))
@settings(max_examples=60)
def test_complete(num_nodes, num_keys, causal, offset):
    graph = CompleteGraph(num_nodes, num_keys=num_keys, causal=causal, offset=offset)
    num_keys = num_nodes if num_keys is None else num_keys
    edges = [(i, j, j) for i in range(num_nodes) for j in range(num_keys) if not causal or j <= i + offset]
    assert_holds(graph, edges, num_keys, num_nodes, (num_nodes, num_keys))
    assert graph.positions().tolist() == [[offset + i] for i in range(num_nodes)]
    if not causal:
        assert graph.slots().tolist() == list(range(graph.num_edges))


@pytest.mark.parametrize(("num_nodes", "num_keys"), [(5, 5), (3, 8), (8, 3), (1, 4)])
def test_causal_alignments_of_torch(num_nodes, num_keys):
    ones = torch.ones(num_nodes, num_keys, dtype=torch.bool)
    top_left = CompleteGraph(num_nodes, num_keys=num_keys, causal=True)
    bottom_right = CompleteGraph(num_nodes, num_keys=num_keys, causal=True, offset=num_keys - num_nodes)
    assert top_left.to_mask().equal(ones.tril())
    assert bottom_right.to_mask().equal(ones.tril(num_keys - num_nodes))
    query, key = torch.randn(1, num_nodes, 4), torch.randn(1, num_keys, 4)
    value = torch.eye(num_keys)[None]
    weights = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert top_left.to_mask().equal(weights[0] > 0)


@given(st.lists(st.sampled_from([-5, 0, 3, 7]), max_size=9), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_cliques_of_labels(labels, causal, ascending):
    labels = sorted(labels) if ascending else labels
    graph = CompleteGraph.from_batch(torch.tensor(labels, dtype=torch.int64), causal=causal)
    edges = [
        (i, j, None)
        for i, mine in enumerate(labels)
        for j, other in enumerate(labels)
        if mine == other and (not causal or j <= i)
    ]
    assert_holds(graph, edges, len(labels), len(labels), (len(edges),))
    assert graph.positions().tolist() == [[labels[:i].count(mine)] for i, mine in enumerate(labels)]
    assert (graph.order is None) == (labels == sorted(labels))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(), (0,), (1,), (3, 2), (0, 2, 0, 0, 3, 1, 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ragged_cliques(sizes, causal, dtype):
    labels = [c for c, size in enumerate(sizes) for _ in range(size)]
    ptr = torch.tensor([0, *itertools.accumulate(sizes)], dtype=dtype)
    one, other = (
        CompleteGraph.from_ptr(ptr, causal=causal),
        CompleteGraph.from_batch(torch.tensor(labels, dtype=dtype), causal=causal),
    )
    edges = [
        (i, j, None)
        for i, j in itertools.product(range(len(labels)), repeat=2)
        if labels[i] == labels[j] and (not causal or j <= i)
    ]
    for graph in (one, other):
        assert_holds(graph, edges, len(labels), len(labels), (len(edges),))
    assert one.ptr.dtype == torch.int64
    assert one.positions().tolist() == other.positions().tolist()


@pytest.mark.field_report("B48")
def test_cliques_of_a_mini_batch():
    batch = Batch.from_data_list([Data(x=torch.zeros(n, 1)) for n in (2, 4, 1)])
    expected = torch.block_diag(*(torch.ones(n, n) for n in (2, 4, 1))).bool()
    assert CompleteGraph.from_ptr(batch.ptr).to_mask().equal(expected)
    assert CompleteGraph.from_batch(batch.batch).to_mask().equal(expected)
    shuffled = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    graph = CompleteGraph.from_batch(batch.batch[shuffled])
    assert graph.to_mask().equal(expected[shuffled][:, shuffled])


# --------------------------------------------------------------------------------------------------- windows


@given(st.integers(0, 8), radii, st.integers(1, 4), st.none() | st.integers(0, 8), st.integers(-12, 12))
@settings(max_examples=120)
def test_window(length, radius, dilation, num_keys, offset):
    graph = WindowGraph(length, radius, dilation=dilation, num_keys=num_keys, offset=offset)
    num_keys = length if num_keys is None else num_keys
    edges, width = expected_line(length, num_keys, radius, dilation, offset)
    assert_holds(graph, edges, num_keys, length, (length, width))
    assert graph.positions().tolist() == [[offset + i] for i in range(length)]


@given(st.lists(st.integers(0, 6), max_size=5), radii, st.integers(1, 3))
@settings(max_examples=60)
def test_ragged_window(sizes, radius, dilation):
    ptr = [0, *itertools.accumulate(sizes)]
    graph = WindowGraph.from_ptr(torch.tensor(ptr), radius, dilation=dilation)
    before, after = pair(radius)
    edges, positions = [], []
    for start, end in itertools.pairwise(ptr):
        for i in range(start, end):
            edges += [(i, j, s) for j, s in line_cells(i, start, end, before, after, dilation)]
            positions.append([i - start])
    bounded = before is not None and after is not None
    shape = (ptr[-1], before + 1 + after) if bounded else (len(edges),)
    assert_holds(graph, edges, ptr[-1], ptr[-1], shape)
    assert graph.positions().tolist() == positions


def test_windows_by_hand():
    chain = WindowGraph(4, 1)
    assert chain.to_edge_index().tolist() == [[0, 1, 0, 1, 2, 1, 2, 3, 2, 3], [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]]
    assert chain.edge_shape == (4, 3)
    assert chain.slots().tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    # Position 1 of 4 keys, every second one: -1 is off, then 1, 3.
    query = WindowGraph(1, 1, dilation=2, num_keys=4, offset=1)
    assert query.to_edge_index().tolist() == [[1, 3], [0, 0]]
    assert query.slots().tolist() == [1, 2] and query.positions().tolist() == [[1]]
    # Unbounded backwards: every second key up to the own one, in the layout of the complete graph.
    strided = WindowGraph(5, (None, 0), dilation=2)
    assert strided.to_mask()[4].tolist() == [True, False, True, False, True]
    assert strided.edge_shape == (5, 5) and strided.slots().tolist()[-3:] == [20, 22, 24]


def test_windows_that_others_define():
    i, j = torch.arange(9)[:, None], torch.arange(9)
    hugging_face = (j <= i) & (j > i - 4)  # sliding_window=4
    assert WindowGraph(9, (3, 0)).to_mask().equal(hugging_face)
    assert WindowGraph(9, (None, 0)).to_mask().equal(CompleteGraph(9, causal=True).to_mask())
    assert WindowGraph(9, (None, None)).to_mask().all()
    assert WindowGraph(9, 8).to_mask().all() and not WindowGraph(9, 7).to_mask().all()
    ring = networkx.path_graph(9)
    assert WindowGraph(9, 1).to_mask().equal(SparseGraph.from_networkx(ring).to_mask() | torch.eye(9).bool())


def test_an_offset_may_leave_no_keys():
    for offset in (-20, 20, 2**31 - 1, 1 - 2**31):
        graph = WindowGraph(5, 3, num_keys=6, offset=offset)
        assert graph.num_edges == 0 and graph.edge_shape == (5, 7)
        assert graph.to_edge_index().shape == (2, 0) and graph.to_sparse().num_edges == 0
    assert CompleteGraph(5, causal=True, offset=-5).num_edges == 0
    assert CompleteGraph(5, causal=True, offset=-4).to_edge_index().tolist() == [[0], [4]]
    assert WindowGraph(5, 2, num_keys=0).num_edges == 0


# ----------------------------------------------------------------------------------------------------- grids


@st.composite
def grids(draw):
    border = draw(st.sampled_from(["clip", "shift"]))
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).filter(lambda n: math.prod(n) <= 60))
    one = st.integers(0, 4)
    side = st.none() | one if border == "clip" else one
    radius = [draw(st.one_of(one, st.tuples(side, side), st.just((None, None)))) for _ in shape]
    return tuple(shape), radius, draw(st.integers(1, 4)), border


@given(grids())
@settings(max_examples=60)
def test_grid(case):
    shape, radius, dilation, border = case
    given_radius = tuple(None if one == (None, None) else one for one in radius)
    graph = GridGraph(shape, given_radius, dilation=dilation, border=border)
    edges, width = expected_grid(shape, radius, dilation, border)
    num_nodes = math.prod(shape)
    assert_holds(graph, edges, num_nodes, num_nodes, (num_nodes, width))
    assert graph.positions().dtype == torch.int64
    assert graph.positions().tolist() == [list(p) for p in itertools.product(*map(range, shape))]


def test_one_radius_is_for_all_axes():
    for border in ("clip", "shift"):
        one, all_axes = (GridGraph((4, 5, 2), r, border=border) for r in (1, (1, (1, 1), 1)))
        assert one.radius == all_axes.radius == ((1, 1),) * 3
        assert one.to_edge_index().equal(all_axes.to_edge_index())
    assert GridGraph((3, 4), None).to_mask().all()
    assert GridGraph([3, 4], [None, 0]).to_edge_index()[0][:3].tolist() == [0, 4, 8]


def natten_start(index, length, kernel, dilation):
    """First key of a neighbourhood, as NATTEN's kernels work it out for an axis no shorter than it."""
    left, right = kernel // 2, kernel // 2 - 1 + kernel % 2
    last = (length - 1 - index % dilation) // dilation  # number of the last cell of this residue
    cell = index // dilation
    start = max(cell - left, 0)
    if cell + right > last:
        start += last - cell - right
    return index % dilation + dilation * start


@pytest.mark.field_report("B67")
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_natten(kernel, dilation):
    for length in range(kernel * dilation, kernel * dilation + 2 * dilation + 3):
        graph = GridGraph((length,), (((kernel // 2), (kernel - 1) // 2),), dilation=dilation, border="shift")
        starts = torch.tensor([natten_start(x, length, kernel, dilation) for x in range(length)])
        expected = starts[:, None] + dilation * torch.arange(kernel)
        assert graph.to_edge_index()[0].view(length, kernel).equal(expected)
        assert graph.slots().equal(torch.arange(length * kernel))


def test_natten_by_hand():
    def keys(*arguments, **options):
        source, target = GridGraph(*arguments, border="shift", **options).to_edge_index()
        return [source[target == i].tolist() for i in range(int(target.max()) + 1)]

    assert keys((6,), 1) == [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [3, 4, 5]]
    # An even kernel: 4 is two before and one after.
    assert keys((6,), ((2, 1),)) == [
        [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [2, 3, 4, 5],
    ]  # fmt: skip
    # Dilated windows stay among the even or the odd cells.
    assert keys((7,), 1, dilation=2) == [
        [0, 2, 4], [1, 3, 5], [0, 2, 4], [1, 3, 5], [2, 4, 6], [1, 3, 5], [2, 4, 6],
    ]  # fmt: skip
    # The axis is smaller than the window: the window is the axis. Its last slots stay empty.
    assert keys((2,), 1) == [[0, 1], [0, 1]]
    small = GridGraph((2,), 1, border="shift")
    assert small.edge_shape == (2, 3) and small.slots().tolist() == [0, 1, 3, 4]
    # Corner, edge and centre of a 3 × 4 grid see 3 × 3 cells each.
    assert keys((3, 4), 1)[0] == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert keys((3, 4), 1)[7] == [1, 2, 3, 5, 6, 7, 9, 10, 11]


@pytest.mark.parametrize(("height", "width"), [(5, 6), (1, 4), (3, 3)])
@pytest.mark.parametrize("radius", [0, 1, (2, 1), 4])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_clip_is_what_unfold_pads_with_zeros(height, width, radius, dilation):
    radius = pair(radius)
    graph = GridGraph((height, width), radius, dilation=dilation)
    image = 1.0 + torch.arange(height * width).view(1, 1, height, width)
    patches = torch.nn.functional.unfold(
        image, [2 * r + 1 for r in radius], dilation, padding=[r * dilation for r in radius]
    )
    expected = patches[0].t().long()
    assert graph.edge_shape == expected.shape
    keys = torch.zeros(graph.edge_shape, dtype=torch.int64)
    keys.view(-1)[graph.slots()] = 1 + graph.to_edge_index()[0]
    assert keys.equal(expected)


# ---------------------------------------------------------------------------------------------------- blocks


def swin_mask(shape, window, shift):
    """Roll, cut into windows, number the regions, mask where regions differ; back at the nodes' places."""
    rolled = torch.arange(math.prod(shape)).view(shape).roll([-s for s in shift], dims=(0, 1))
    regions = torch.zeros(shape)
    cuts = [
        (slice(0, -w), slice(-w, -s), slice(-s, None)) if s else (slice(None),)
        for w, s in zip(window, shift, strict=True)
    ]
    for number, (rows, columns) in enumerate(itertools.product(*cuts)):
        regions[rows, columns] = number

    def windows(x):
        (height, width), (h, w) = shape, window
        return x.view(height // h, h, width // w, w).permute(0, 2, 1, 3).reshape(-1, h * w)

    mask = torch.zeros(math.prod(shape), math.prod(shape), dtype=torch.bool)
    for nodes, region in zip(windows(rolled), windows(regions), strict=True):
        mask[nodes[:, None], nodes] = region[:, None] == region
    return mask


@pytest.mark.parametrize(
    ("shape", "window", "shift"),
    [
        ((8, 8), (4, 4), (2, 2)),
        ((6, 12), (3, 4), (1, 3)),
        ((4, 8), (4, 4), (2, 2)),
        ((8, 4), (4, 4), (1, 0)),
        ((4, 6), (2, 3), (0, 0)),
        ((7, 7), (7, 7), (3, 3)),
    ],
)
def test_blocks_are_swins_masked_cyclic_shift(shape, window, shift):
    labels = grid_blocks(shape, window, shift=shift)
    assert labels.dtype == torch.int64
    assert labels.unique().tolist() == list(range(int(labels.max()) + 1))
    graph = CompleteGraph.from_batch(labels)
    assert graph.to_mask().equal(swin_mask(shape, window, shift))


def test_blocks_by_hand():
    assert grid_blocks((3, 5), 2).view(3, 5).tolist() == [[0, 0, 1, 1, 2], [0, 0, 1, 1, 2], [3, 3, 4, 4, 5]]
    assert grid_blocks((2, 5), 2, shift=1).view(2, 5).tolist() == [[0, 1, 1, 2, 2], [3, 4, 4, 5, 5]]
    assert grid_blocks((4,), 9).tolist() == [0] * 4
    assert grid_blocks((4,), 9, shift=2).tolist() == [0, 0, 1, 1]
    assert grid_blocks((2, 1, 3), (1, 1, 3)).tolist() == [0, 0, 0, 1, 1, 1]


# ---------------------------------------------------------------------------------- with the rest of a graph


KINDS = [
    CompleteGraph(4),
    CompleteGraph(4, num_keys=6, causal=True, offset=2),
    CompleteGraph.from_ptr(torch.tensor([0, 3, 4])),
    CompleteGraph.from_batch(torch.tensor([1, 0, 1, 5]), causal=True),
    WindowGraph(4, (2, 1), dilation=2),
    WindowGraph(4, (None, 0), num_keys=6, offset=1),
    WindowGraph.from_ptr(torch.tensor([0, 3, 4]), 1),
    WindowGraph.from_ptr(torch.tensor([0, 3, 4]), (None, 0)),
    GridGraph((2, 2), (1, None)),
    GridGraph((4,), 1, border="shift"),
]
each_kind = pytest.mark.parametrize("graph", KINDS, ids=map(repr, KINDS))


def assert_same(one, other):
    assert type(one) is type(other) and repr(one) == repr(other)
    assert one.edge_shape == other.edge_shape and one.device == other.device
    assert one.to_edge_index().equal(other.to_edge_index()) and one.slots().equal(other.slots())


@each_kind
@pytest.mark.parametrize("copied", COPIES)
def test_copies(graph, copied):
    assert_same(copied(graph), graph)


@each_kind
def test_to_another_device(graph):
    moved = graph.to("meta")
    assert moved.device.type == "meta" and moved.positions().device.type == "meta"
    assert {x.device.type for x in tree_flatten(moved)[0] if isinstance(x, torch.Tensor)} <= {"meta"}
    assert repr(moved) == repr(graph)[:-1] + ", device='meta')"
    assert graph.device.type == "cpu"


@each_kind
def test_graphs_do_not_change_and_are_compared_by_identity(graph):
    assert graph == graph and graph != copy.copy(graph) and len({graph, copy.copy(graph)}) == 2
    with pytest.raises(AttributeError):
        graph.num_keys = 5


@each_kind
def test_to_networkx(graph):
    if graph.num_keys != graph.num_queries:
        with pytest.raises(ValueError, match="6 keys and 4 queries"):
            graph.to_networkx()
        return
    G = graph.to_networkx()
    assert sorted(G.edges(keys=True), key=lambda edge: edge[2]) == [
        (j, i, e) for e, (j, i) in enumerate(graph.to_edge_index().t().tolist())
    ]


def test_representations():
    assert [repr(graph) for graph in KINDS] == [
        "CompleteGraph(4 keys -> 4 queries, 16 edges)",
        "CompleteGraph(6 keys -> 4 queries, 18 edges, causal=True, offset=2)",
        "CompleteGraph(4 keys -> 4 queries, 10 edges, 2 sequences)",
        "CompleteGraph(4 keys -> 4 queries, 5 edges, 3 sequences, causal=True)",
        "WindowGraph(4 keys -> 4 queries, 8 edges, radius=(2, 1), dilation=2)",
        "WindowGraph(6 keys -> 4 queries, 14 edges, radius=(None, 0), offset=1)",
        "WindowGraph(4 keys -> 4 queries, 8 edges, 2 sequences, radius=(1, 1))",
        "WindowGraph(4 keys -> 4 queries, 7 edges, 2 sequences, radius=(None, 0))",
        "GridGraph(4 keys -> 4 queries, 16 edges, shape=(2, 2), radius=((1, 1), (None, None)))",
        "GridGraph(4 keys -> 4 queries, 12 edges, shape=(4,), radius=((1, 1),), border='shift')",
    ]


@each_kind
def test_as_graph_lets_a_graph_pass(graph):
    size = graph.num_keys, graph.num_queries
    assert as_graph(graph) is graph and as_graph(graph, size=size) is graph
    with pytest.raises(ValueError, match="num_nodes"):
        as_graph(graph, num_nodes=99)


def test_union_of_kinds():
    square = [graph for graph in KINDS if graph.num_keys == 4]
    square.append(SparseGraph.from_edge_index(torch.tensor([[3, 3], [0, 0]]), num_nodes=4))
    for graphs in itertools.combinations(square, 2):
        expected = graphs[0].to_mask() | graphs[1].to_mask()
        assert union(*graphs).to_edge_index().flip(0).tolist() == expected.nonzero().t().tolist()
    with pytest.raises(ValueError, match="same"):
        union(*KINDS[:2])


def test_later_writes_do_not_change_a_graph():
    ptr, labels = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1])
    graphs = [CompleteGraph.from_ptr(ptr), WindowGraph.from_ptr(ptr, 1), CompleteGraph.from_batch(labels)]
    before = [graph.to_edge_index() for graph in graphs]
    ptr.zero_(), labels.zero_()
    for graph, edge_index in zip(graphs, before, strict=True):
        assert graph.to_edge_index().equal(edge_index)


def test_numbers_of_numpy_are_ints():
    graph = WindowGraph(
        np.int64(5), np.int32(1), dilation=np.int64(2), num_keys=np.int64(6), offset=np.int8(1)
    )
    assert_same(graph, WindowGraph(5, 1, dilation=2, num_keys=6, offset=1))
    assert_same(GridGraph(tuple(np.array([2, 3])), np.int64(1)), GridGraph(torch.Size([2, 3]), 1))
    fields = (graph.num_queries, graph.num_keys, graph.offset, graph.dilation, *graph.radius, graph.num_edges)
    assert {type(field) for field in fields} == {int}


def test_default_device():
    with torch.device("meta"):
        graphs = CompleteGraph(3), WindowGraph(3, 1), GridGraph((3,), 1)
    assert {graph.device.type for graph in graphs} == {"meta"}


# ---------------------------------------------------------------------------------------------------- memory


class LargestTensor(TorchDispatchMode):
    """The most elements that any tensor has that is made meanwhile."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_flatten(out)[0]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


@pytest.mark.field_report("B04", "B86")
def test_large_graphs_take_no_memory():
    n = 10**8
    with LargestTensor() as largest:
        assert WindowGraph(n, 5).num_edges == 11 * n - 30
        assert WindowGraph(n, (None, 0)).num_edges == n * (n + 1) // 2
        assert WindowGraph(n, (3, 0), dilation=10).num_edges == 4 * n - 10 - 20 - 30
        assert CompleteGraph(n, num_keys=n // 2).num_edges == n * n // 2
        assert repr(CompleteGraph(n, causal=True)) == (
            f"CompleteGraph({n} keys -> {n} queries, {n * (n + 1) // 2} edges, causal=True)"
        )
        for dilation in (1, 3):
            assert GridGraph((4096, 4096), 3, dilation=dilation, border="shift").num_edges == 4096**2 * 49
        clipped = GridGraph((4096, 4096), 3)
        assert clipped.num_edges == (7 * 4096 - 12) ** 2
        assert clipped.edge_shape == (4096**2, 49)
        assert GridGraph((n,), 3, dilation=7, border="shift").num_edges == 7 * n
    assert largest.numel == 0  # but for empty ones, which say where they are


def test_graphs_are_walked_in_memory_of_their_nodes():
    n = 3000
    ptr = torch.tensor([0, 1, n])
    labels = torch.arange(n) % 2
    builds = {
        "complete": lambda: CompleteGraph(n),
        "ptr": lambda: CompleteGraph.from_ptr(ptr),
        "labels": lambda: CompleteGraph.from_batch(labels),
        "window": lambda: WindowGraph(n, 400),
        "ragged window": lambda: WindowGraph.from_ptr(ptr, (None, 0)),
    }
    for name, build in builds.items():
        with LargestTensor() as largest:
            graph = build()
            assert graph.positions().shape == (n, 1)
            assert axis_intervals(graph)[0].count.numel() == n
            assert repr(graph) and graph.num_edges > n * 100 and graph.edge_shape
        assert largest.numel <= n + 1, name
    with LargestTensor() as largest:
        axis_intervals(GridGraph((n, n, 10), None))
        axis_intervals(GridGraph((n, n, 10), 5, border="shift"))
    assert largest.numel == n


# --------------------------------------------------------------------------------------- compile and export


class Sums(torch.nn.Module):
    """Sum over the keys of each query, and the number of the last slot."""

    def forward(self, x, graph):
        source, target = graph.to_edge_index()
        out = x.new_zeros(graph.num_queries, x.size(1)).index_add(0, target, x[source])
        return out, graph.slots()[-1] + graph.positions()[0, 0]


DYNAMIC = {
    "window": lambda n: WindowGraph(n, (2, 1)),
    "labels": lambda n: CompleteGraph.from_batch(torch.arange(n) % 3),
    "ptr": lambda n: WindowGraph.from_ptr(torch.tensor([0, *range(2, n, 3), n]), (None, 0)),
}
each_dynamic = pytest.mark.parametrize("build", DYNAMIC.values(), ids=DYNAMIC)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_sums(model, graph):
    x = torch.randn(graph.num_keys, 3)
    out, number = model(x, graph)
    torch.testing.assert_close(out, graph.to_mask().float() @ x)
    assert int(number) == graph.slots()[-1]


@pytest.mark.field_report("B77")
@each_dynamic
def test_compiles_once_for_all_sizes(build, fresh_compiler):
    compiles = CompileCounterWithBackend("eager")
    compiled = torch.compile(Sums(), backend=compiles, fullgraph=True, dynamic=True)
    for n in (7, 11, 40):
        assert_sums(compiled, build(n))
    assert compiles.frame_count == 1


@pytest.mark.parametrize(("build", "strict"), [("window", True), ("labels", False), ("ptr", False)])
def test_exports_with_dynamic_sizes(build, strict, fresh_compiler):
    auto = torch.export.Dim.AUTO
    graph = DYNAMIC[build](7)
    tensors = [None if x is None else {0: auto} for x in (graph.ptr, graph.order)]
    shapes = ({0: auto}, [auto, auto, auto, None, *tensors])
    program = torch.export.export(Sums(), (torch.randn(7, 3), graph), dynamic_shapes=shapes, strict=strict)
    assert_sums(program.module(), DYNAMIC[build](11))


@pytest.mark.parametrize(("border", "strict"), [("clip", True), ("shift", False)])
def test_exported_programs_know_their_rule(border, strict, fresh_compiler):
    graph = GridGraph((3, 4), (1, None), border=border)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Sums(), (torch.randn(12, 3), graph), strict=strict), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    assert_sums(loaded, graph)
    for other in (GridGraph((4, 3), (1, None), border=border), GridGraph((3, 4), (0, None), border=border)):
        with pytest.raises((ValueError, AssertionError)):
            loaded(torch.randn(12, 3), other)


# ------------------------------------------------------------------------------------------------- bad input


INT = TypeError, "must be an int"
cliques, labelled, windows = CompleteGraph.from_ptr, CompleteGraph.from_batch, WindowGraph.from_ptr
LOW = ValueError, "must be at least"


@pytest.mark.parametrize(
    ("error", "message", "build"),
    [
        (*LOW, lambda: CompleteGraph(-1)),
        (ValueError, r"`num_nodes`.*below 2\*\*31", lambda: CompleteGraph(2**31)),
        (*LOW, lambda: CompleteGraph(3, num_keys=-1)),
        (*INT, lambda: CompleteGraph(2.0)),
        (*INT, lambda: CompleteGraph(True)),
        (*INT, lambda: CompleteGraph(torch.tensor([0, 3]))),
        (TypeError, "`offset` must be an int", lambda: CompleteGraph(3, causal=True, offset=0.5)),
        (ValueError, "`offset`", lambda: CompleteGraph(3, causal=True, offset=-(2**31))),
        (TypeError, "`causal` must be a bool, got int", lambda: CompleteGraph(3, causal=1)),
        (TypeError, "`causal`", lambda: cliques(torch.tensor([0, 1]), causal="yes")),
        (TypeError, "`causal`", lambda: labelled(torch.tensor([0, 1]), causal=None)),
        (ValueError, "`ptr` must start at 0", lambda: cliques(torch.tensor([1, 2]))),
        (ValueError, "`ptr` must start at 0 and never fall", lambda: cliques(torch.tensor([0, 3, 2]))),
        (ValueError, "`ptr` must start", lambda: cliques(torch.tensor([], dtype=int))),
        (ValueError, r"`ptr` .*\[sequences \+ 1\], got \[1, 2\]", lambda: cliques(torch.tensor([[0, 2]]))),
        (ValueError, r"`ptr\[-1\]`.*below 2\*\*31", lambda: cliques(torch.tensor([0, 2**31]))),
        (TypeError, "`ptr` .*got torch.float32", lambda: cliques(torch.tensor([0.0, 2.0]))),
        (TypeError, "`ptr` .*got list", lambda: cliques([0, 2])),
        (TypeError, "`ptr` .*got torch.bool", lambda: windows(torch.tensor([False, True]), 1)),
        (ValueError, "`ptr` must start at 0", lambda: windows(torch.tensor([1, 2]), 1)),
        (ValueError, "never fall", lambda: windows(torch.tensor([0, 200, 100] + [300] * 20), 1)),
        (TypeError, "`batch` .*got torch.float32", lambda: labelled(torch.zeros(3))),
        (TypeError, "`batch`.*torch.bool", lambda: labelled(torch.ones(3, dtype=torch.bool))),
        (ValueError, r"`batch` .*\[nodes\], got \[3, 1\]", lambda: labelled(torch.zeros(3, 1, dtype=int))),
        (ValueError, r"\[\]", lambda: labelled(torch.tensor(3))),
        (ValueError, "`radius` must be at least 0.*got -1", lambda: WindowGraph(5, -1)),
        (ValueError, "`radius` must be at least 0", lambda: WindowGraph(5, (2, -1))),
        (ValueError, r"`radius`.*2\*\*31", lambda: WindowGraph(5, 2**31)),
        (TypeError, "`radius` must be an int, got float", lambda: WindowGraph(5, 1.5)),
        (TypeError, "`radius` must be an int, got bool", lambda: WindowGraph(5, (True, 0))),
        (TypeError, "`radius` must be an int, got str", lambda: WindowGraph(5, "all")),
        (ValueError, r"`radius` must be an int.*pair.*got \(1, 2, 3\)", lambda: WindowGraph(5, (1, 2, 3))),
        (ValueError, r"`radius` must be an int.*pair.*got \(\)", lambda: windows(torch.tensor([0, 5]), ())),
        (*LOW, lambda: WindowGraph(-5, 1)),
        (*INT, lambda: WindowGraph(5.0, 1)),
        (*LOW, lambda: WindowGraph(5, 1, num_keys=-2)),
        (ValueError, "`dilation` must be at least 1.*got 0", lambda: WindowGraph(5, 1, dilation=0)),
        (TypeError, "`dilation` must be an int", lambda: WindowGraph(5, 1, dilation=1.0)),
        (ValueError, "`dilation` must be at least 1", lambda: windows(torch.tensor([0, 5]), 1, dilation=-1)),
        (TypeError, "`offset`", lambda: WindowGraph(5, 1, offset=None)),
        (ValueError, r"`shape\[1\]` must be at least 1.*got 0", lambda: GridGraph((3, 0), 1)),
        (ValueError, r"`shape\[0\]` must be at least 1.*got -2", lambda: GridGraph((-2, 3), 1)),
        (ValueError, "at least one axis", lambda: GridGraph((), 1)),
        (TypeError, "`shape` must be a tuple", lambda: GridGraph(5, 1)),
        (TypeError, r"`shape\[0\]` must be an int, got float", lambda: GridGraph((2.0, 3), 1)),
        (TypeError, r"`shape\[1\]` must be an int, got bool", lambda: GridGraph((2, True), 1)),
        (ValueError, r"number of nodes.*below 2\*\*31", lambda: GridGraph((2**16, 2**15), 1)),
        (ValueError, "`radius`.*each of the 2 axes.*got", lambda: GridGraph((3, 3), (1, 1, 1))),
        (ValueError, "`radius`.*each of the 1 axes.*got", lambda: GridGraph((3,), (1, 0))),
        (ValueError, "`radius` must be at least 0", lambda: GridGraph((3, 3), (1, -1))),
        (ValueError, "`radius` must be an int.*pair", lambda: GridGraph((3, 3), (1, (1, 2, 3)))),
        (TypeError, "`radius` must be an int, got float", lambda: GridGraph((3, 3), 0.5)),
        (ValueError, '`border` must be "clip" or "shift", got \'wrap\'', lambda: GridGraph((3,), 1, border="wrap")),
        (ValueError, "one side only", lambda: GridGraph((3,), ((None, 0),), border="shift")),
        (ValueError, "`dilation` must be at least 1", lambda: GridGraph((3,), 1, dilation=0)),
        (ValueError, "number of edges", lambda: CompleteGraph(2**16).to_sparse()),
        (ValueError, "`shift` must be below `block`, got 2 and 2", lambda: grid_blocks((4,), 2, shift=2)),
        (ValueError, "`shift` must be at least 0", lambda: grid_blocks((4,), 2, shift=-1)),
        (ValueError, "`block` must be at least 1", lambda: grid_blocks((4, 4), (2, 0))),
        (TypeError, "`block` must be an int", lambda: grid_blocks((4, 4), 2.0)),
        (ValueError, "`block`.*each of the 2 axes", lambda: grid_blocks((4, 4), (2,))),
        (ValueError, "`shift`.*each of the 2 axes", lambda: grid_blocks((4, 4), 2, shift=(1, 1, 1))),
        (ValueError, r"`shape\[0\]`", lambda: grid_blocks((0, 4), 2)),
        (TypeError, "axis_intervals takes", lambda: axis_intervals(SparseGraph.from_mask(torch.ones(2, 2).bool()))),
    ],
)  # fmt: skip
def test_wrong_input(error, message, build):
    with pytest.raises(error, match=message):
        build()
