"""One operator, many names: each structured graph gives the attention that its literature defines.

Every peer here is PyTorch's own, or written from the published rule, in the peer's own layout, and knows
nothing of edges. Values and all gradients are compared.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from graphattn import CompleteGraph, GridGraph, WindowGraph, attention_weights, graph_attention
from graphattn.graph import grid_blocks
from tests.oracle import assert_close_to_oracle

pytestmark = pytest.mark.usefixtures("poisoned_memory")

in_both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])

Attention = Callable[..., Tensor]


def assert_same(ours: Attention, theirs: Attention, operands: tuple[Tensor, ...], dtype: torch.dtype):
    """`ours` in `dtype` has the values and gradients that `theirs` has in float64.

    The operands are float32 numbers. What their own float32 run is off by is the measure of the error.
    """
    with torch.no_grad():
        shape = theirs(*operands).shape
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def results(function: Attention, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in operands]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]

    exact, plain, actual = (
        results(theirs, torch.float64),
        results(theirs, torch.float32),
        results(ours, dtype),
    )
    for number, tensors in enumerate(zip(actual, exact, plain, strict=True)):
        assert_close_to_oracle(*tensors, dtype, f"gradient {number}" if number else "out")


def normal(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape) for shape in shapes)


def nodes_first(function: Attention) -> Attention:
    """A function of `[..., heads, nodes, dim]`, PyTorch's layout, as one of `[..., nodes, heads, dim]`."""
    return lambda *operands: function(*(x.transpose(-3, -2) for x in operands)).transpose(-3, -2)


def masked(mask: Tensor, **options) -> Attention:
    """PyTorch's attention where a bool mask `[queries, keys]` is True."""
    return nodes_first(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options))


def on(graph, **options) -> Attention:
    return lambda q, k, v: graph_attention(q, k, v, graph, **options)


# -------------------------------------------------------------------------------------------------- complete


@in_both_precisions
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(67, 3, 8)] * 3, {}),
        ([(1, 1, 1)] * 3, {}),
        ([(2, 3, 33, 2, 8)] * 3, {}),
        ([(9, 2, 16), (40, 2, 16), (40, 2, 5)], {}),
        ([(21, 6, 8), (30, 2, 8), (30, 2, 8)], {"enable_gqa": True}),
        ([(40, 2, 4)] * 3, {"scale": -1.3}),
    ],
    ids=["square", "one node", "leading", "rectangle", "grouped heads", "scale"],
)
def test_complete_is_scaled_dot_product_attention(shapes, options, dtype):
    graph = CompleteGraph(shapes[0][-3], num_keys=shapes[1][-3])
    theirs = nodes_first(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options))
    assert_same(on(graph, scale=options.get("scale")), theirs, normal(*shapes), dtype)


@in_both_precisions
@pytest.mark.parametrize("num_keys", [19, 12], ids=["self-attention", "cross-attention"])
@pytest.mark.parametrize("causal", [False, True], ids=["complete", "causal"])
def test_complete_is_multihead_attention(causal, num_keys, dtype):
    num_nodes, heads, dim = 19, 4, 6
    module = torch.nn.MultiheadAttention(heads * dim, heads, batch_first=True)
    torch.nn.init.normal_(module.in_proj_bias)
    torch.nn.init.normal_(module.out_proj.bias)
    names = [name for name, _ in module.named_parameters()]
    assert names == ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    # Its masks say where not to attend.
    forbidden = torch.ones(num_nodes, num_keys).triu(1).bool() if causal else None
    graph = CompleteGraph(num_nodes, num_keys=num_keys, causal=causal)

    def theirs(x, context, *parameters):
        out, weights = torch.func.functional_call(
            module,
            dict(zip(names, parameters)),
            (x, context, context),
            {"attn_mask": forbidden, "average_attn_weights": False},
        )
        return torch.cat([out.flatten(), weights.flatten()])

    def ours(x, context, weight, bias, out_weight, out_bias):
        query, key, value = (
            F.linear(tokens, w, b).unflatten(-1, (heads, dim))
            for tokens, w, b in zip((x, context, context), weight.chunk(3), bias.chunk(3))
        )
        out = F.linear(graph_attention(query, key, value, graph).flatten(-2), out_weight, out_bias)
        weights = attention_weights(query, key, graph).permute(0, 3, 1, 2)
        return torch.cat([out.flatten(), weights.flatten()])

    inputs = normal((2, num_nodes, heads * dim), (2, num_keys, heads * dim))
    assert_same(ours, theirs, (*inputs, *module.parameters()), dtype)


@in_both_precisions
@pytest.mark.parametrize(("num_queries", "num_keys"), [(31, 31), (7, 40), (40, 7), (1, 16)])
def test_causal_offsets_are_pytorchs_alignments(num_queries, num_keys, dtype):
    operands = normal((num_queries, 2, 8), (num_keys, 2, 8), (num_keys, 2, 8))
    with warnings.catch_warnings():
        # PyTorch warns of queries without a key; its kernels give 0 for them by now, as ours do.
        warnings.simplefilter("ignore")
        alignments = {
            0: causal_upper_left(num_queries, num_keys),
            num_keys - num_queries: causal_lower_right(num_queries, num_keys),
        }
    assert len(alignments) == (1 if num_queries == num_keys else 2)
    for offset, bias in alignments.items():
        # A CausalBias goes with four-dimensional operands.
        theirs = nodes_first(
            lambda q, k, v, bias=bias: F.scaled_dot_product_attention(
                q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=bias
            ).squeeze(0)
        )
        for graph in (
            CompleteGraph(num_queries, num_keys=num_keys, causal=True, offset=offset),
            WindowGraph(num_queries, (None, 0), num_keys=num_keys, offset=offset),
        ):
            assert_same(on(graph), theirs, operands, dtype)


@pytest.mark.field_report("B52")
@in_both_precisions
@pytest.mark.parametrize("causal", [False, True])
def test_cliques_are_attention_on_each_graph_alone(causal, dtype):
    labels = torch.tensor([7, -3, 7, 0, 0, 7, 7, 12, 0, -3, 7, 7, 0] * 4 + [99])
    alone = nodes_first(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal))

    def one_by_one(q, k, v):
        out = torch.empty_like(q)
        for label in labels.unique():
            (nodes,) = torch.where(labels == label)
            out = out.index_copy(0, nodes, alone(q[nodes], k[nodes], v[nodes]))
        return out

    operands = normal(*[(len(labels), 2, 8)] * 3)
    assert_same(on(CompleteGraph.from_batch(labels, causal=causal)), one_by_one, operands, dtype)
    labels, _ = labels.sort()
    ptr = torch.tensor([0, 8, 8 + 16, 8 + 16 + 24, 8 + 16 + 24 + 4, 53])
    assert_same(on(CompleteGraph.from_ptr(ptr, causal=causal)), one_by_one, operands, dtype)


# -------------------------------------------------------------------------------------------------- windows


@in_both_precisions
@pytest.mark.parametrize(
    ("num_queries", "radius", "options"),
    [
        (150, 5, {}),
        (150, (40, 0), {}),
        (97, (0, 33), {}),
        (60, 0, {}),
        (40, 200, {}),
        (50, (None, 3), {}),
        (50, (3, 2), {"dilation": 4}),
        (33, (None, 1), {"dilation": 2}),
        (8, (16, 0), {"num_keys": 50, "offset": 42}),
        (30, 2, {"num_keys": 20, "offset": -5}),
    ],
    ids=str,
)
def test_window_is_masked_attention(num_queries, radius, options, dtype):
    graph = WindowGraph(num_queries, radius, **options)
    num_keys, step = options.get("num_keys", num_queries), options.get("dilation", 1)
    before, after = radius if isinstance(radius, tuple) else (radius, radius)
    before, after = (math.inf if side is None else side for side in (before, after))
    i = torch.arange(num_queries).view(-1, 1) + options.get("offset", 0)
    distance = torch.arange(num_keys) - i
    mask = (distance % step == 0) & (-before * step <= distance) & (distance <= after * step)
    assert torch.equal(graph.to_mask(), mask)
    operands = normal((2, num_queries, 3, 8), (2, num_keys, 3, 8), (2, num_keys, 3, 8))
    assert_same(on(graph), masked(mask), operands, dtype)


@pytest.mark.field_report("B62")
@in_both_precisions
@pytest.mark.parametrize("window", [1, 16, 129, 500])
def test_window_is_hugging_faces_sliding_window(window, dtype):
    """There query i sees key j iff i - window < j <= i: `window` keys with itself, in Mistral and Gemma."""
    n = 200
    i, j = torch.arange(n).view(-1, 1), torch.arange(n)
    allowed = (i - window < j) & (j <= i)
    groups = 2  # of query heads that share a key head

    def eager(q, k, v):
        k, v = (x.repeat_interleave(groups, dim=-3) for x in (k, v))
        mask = torch.zeros(n, n, dtype=q.dtype).masked_fill(~allowed, torch.finfo(q.dtype).min)
        return (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5 + mask).softmax(-1) @ v

    operands = normal((n, 4, 8), (n, 4 // groups, 8), (n, 4 // groups, 8))
    assert_same(on(WindowGraph(n, (window - 1, 0))), nodes_first(eager), operands, dtype)


@in_both_precisions
@pytest.mark.parametrize("radius", [3, (20, 0), (None, 0)])
def test_sequences_side_by_side_are_windows_on_each_alone(radius, dtype):
    lengths = [17, 0, 1, 64, 5]
    before, after = radius if isinstance(radius, tuple) else (radius, radius)

    def one_by_one(q, k, v):
        parts = []
        for sequence in zip(*(x.split(lengths) for x in (q, k, v))):
            n = sequence[0].size(0)
            band = torch.ones(n, n).bool().tril(after).triu(-n if before is None else -before)
            parts.append(masked(band)(*sequence))
        return torch.cat(parts)

    ptr = torch.tensor([0, *itertools.accumulate(lengths)])
    assert_same(on(WindowGraph.from_ptr(ptr, radius)), one_by_one, normal(*[(87, 2, 8)] * 3), dtype)


# ----------------------------------------------------------------------------------------------------- grids


def neighbourhood(shape: tuple[int, ...], kernel: tuple[int, ...], dilation: int) -> Iterator[list[int]]:
    """For each cell of the grid, row by row, the cells it attends to in neighbourhood attention.

    On every axis these are `kernel` consecutive ones of the cells that are a multiple of the dilation away,
    as nearly around the query as the border allows; an even kernel has its longer side before the query.
    """

    def along(x: int, length: int, kernel: int) -> list[int]:
        cells = list(range(x % dilation, length, dilation))
        wanted = cells.index(x) - kernel // 2
        starts = range(max(len(cells) - kernel, 0) + 1)
        start = min(starts, key=lambda s: abs(s - wanted))
        return cells[start : start + kernel]

    for x in itertools.product(*map(range, shape)):
        cells = []
        for y in itertools.product(*map(along, x, shape, kernel)):
            number = 0
            for coordinate, length in zip(y, shape):
                number = number * length + coordinate
            cells.append(number)
        yield cells


def neighbourhood_attention(shape: tuple[int, ...], kernel: tuple[int, ...], dilation: int) -> Attention:
    """One query and head after the other; a bias has one row for each cell of the neighbourhood."""
    cells = list(neighbourhood(shape, kernel, dilation))

    def attention(q, k, v, bias=None):
        rows = []
        for i, keys in enumerate(cells):
            for h in range(q.size(1)):
                scores = k[keys, h] @ q[i, h] * q.size(-1) ** -0.5
                if bias is not None:
                    scores = scores + bias[0, :, h]
                rows.append(scores.softmax(0) @ v[keys, h])
        return torch.stack(rows).view(*q.shape[:2], -1)

    return attention


def radius_of(kernel: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((width // 2, (width - 1) // 2) for width in kernel)


@in_both_precisions
@pytest.mark.parametrize(
    ("shape", "kernel", "dilation"),
    [
        ((23,), (5,), 1),
        ((23,), (4,), 1),
        ((23,), (5,), 3),
        ((22,), (4,), 4),
        ((9, 8), (3, 3), 1),
        ((8, 9), (4, 2), 1),
        ((7, 11), (3, 5), 1),
        ((7, 9), (3, 3), 2),
        ((8, 6), (2, 3), 2),
        ((3, 12), (7, 3), 1),
        ((4, 5, 6), (3, 3, 3), 1),
        ((3, 6, 5), (2, 3, 4), 1),
        ((4, 5, 4), (2, 2, 2), 2),
    ],
    ids=str,
)
def test_shifted_grid_is_neighbourhood_attention(shape, kernel, dilation, dtype):
    graph = GridGraph(shape, radius_of(kernel), dilation=dilation, border="shift")
    theirs = neighbourhood_attention(shape, kernel, dilation)
    assert_same(on(graph), theirs, normal(*[(math.prod(shape), 2, 4)] * 3), dtype)


@in_both_precisions
@pytest.mark.parametrize("kernel", [(5, 4), (3, 3)], ids=str)
def test_shifted_grid_has_a_bias_for_each_cell_of_the_neighbourhood(kernel, dtype):
    shape = (6, 7)
    graph = GridGraph(shape, radius_of(kernel), border="shift")
    theirs = neighbourhood_attention(shape, kernel, 1)
    operands = normal(*[(42, 2, 4)] * 3, (1, math.prod(kernel), 2))
    assert_same(lambda q, k, v, bias: graph_attention(q, k, v, graph, bias=bias), theirs, operands, dtype)


@in_both_precisions
@pytest.mark.parametrize(
    ("shape", "radius", "dilation"),
    [
        ((1, 30), (0, 4), 1),
        ((9, 8), 2, 1),
        ((9, 8), ((3, 0), (1, 2)), 1),
        ((10, 7), ((1, 2), (2, 1)), 2),
        ((3, 5), 7, 1),
        ((5, 6), 0, 3),
    ],
    ids=str,
)
def test_clipped_grid_is_zero_padded_attention(shape, radius, dilation, dtype):
    """As convolutions do it: pad, unfold, and mask what the padding brought in.

    The bias has one number for each offset of the window and head: relative position attention.
    """
    heads, dim = 2, 4
    graph = GridGraph(shape, radius, dilation=dilation)
    both = radius if isinstance(radius, tuple) else (radius, radius)
    (up, down), (left, right) = (side if isinstance(side, tuple) else (side, side) for side in both)
    kernel = (up + 1 + down, left + 1 + right)

    def windows(image: Tensor) -> Tensor:
        """`[cells, channels]` to `[cells, cells of the window, channels]`."""
        image = image.t().unflatten(-1, shape)
        padded = F.pad(image, [dilation * side for side in (left, right, up, down)])
        columns = F.unfold(padded.unsqueeze(0), kernel, dilation=dilation)
        return columns.view(image.size(0), math.prod(kernel), -1).permute(2, 1, 0)

    def theirs(q, k, v, bias):
        outside = windows(q.new_ones(q.size(0), 1)).squeeze(-1) == 0
        keys, values = (windows(x.flatten(1)).unflatten(-1, (heads, dim)) for x in (k, v))
        scores = torch.einsum("nhd,nshd->nsh", q, keys) * dim**-0.5 + bias
        weights = scores.masked_fill(outside.unsqueeze(-1), -math.inf).softmax(1)
        return torch.einsum("nsh,nshd->nhd", weights, values)

    operands = normal(*[(math.prod(shape), heads, dim)] * 3, (1, math.prod(kernel), heads))
    assert_same(lambda q, k, v, bias: graph_attention(q, k, v, graph, bias=bias), theirs, operands, dtype)


@in_both_precisions
def test_clipped_volume_is_zero_padded_attention(dtype):
    shape, radius, heads, dim = (4, 5, 3), 1, 2, 4

    def windows(volume: Tensor) -> Tensor:
        padded = F.pad(volume.t().unflatten(-1, shape), [radius] * 6)
        for axis in (1, 2, 3):
            padded = padded.unfold(axis, 2 * radius + 1, 1)
        return padded.flatten(4).flatten(1, 3).permute(1, 2, 0)

    def theirs(q, k, v):
        outside = windows(q.new_ones(q.size(0), 1)) == 0
        keys, values = (windows(x.flatten(1)).unflatten(-1, (heads, dim)) for x in (k, v))
        scores = torch.einsum("nhd,nshd->nsh", q, keys) * dim**-0.5
        return torch.einsum("nsh,nshd->nhd", scores.masked_fill(outside, -math.inf).softmax(1), values)

    operands = normal(*[(math.prod(shape), heads, dim)] * 3)
    assert_same(on(GridGraph(shape, radius)), theirs, operands, dtype)


@in_both_precisions
@pytest.mark.parametrize(
    ("shape", "block", "shift"),
    [((8, 12), 4, 2), ((8, 12), 4, 0), ((9, 6), 3, 1), ((10, 5), 5, 2), ((4, 4), 4, 2)],
    ids=str,
)
def test_blocks_are_swins_masked_cyclic_shift(shape, block, shift, dtype):
    """Roll the image, cut it into blocks, and mask pairs that were not neighbours before the roll."""
    height, width = shape

    def cut(image: Tensor) -> Tensor:
        """`[images, height, width, ...]` to `[images · blocks, block², ...]`, after the roll."""
        image = image.roll((-shift, -shift), (1, 2))
        tiles = image.unflatten(2, (width // block, block)).unflatten(1, (height // block, block))
        return tiles.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def joined(tiles: Tensor) -> Tensor:
        tiles = tiles.unflatten(0, (-1, height // block, width // block)).unflatten(3, (block, block))
        return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2).roll((shift, shift), (1, 2))

    # The regions of the rolled image whose pixels belong together: all of it but the last blocks, what the
    # last blocks hold of its end, and what the roll has brought there from its beginning.
    def strips(length: int) -> Tensor:
        x = torch.arange(length)
        return (x >= length - block).int() + (x >= length - shift).int()

    region = 3 * strips(height).view(-1, 1) + strips(width)
    regions = cut(region.roll((shift, shift), (0, 1)).unsqueeze(0))
    allowed = regions.unsqueeze(2) == regions.unsqueeze(1)  # [blocks, block², block²]

    def swin(q, k, v):
        images = q.size(0)
        q, k, v = (cut(x.unflatten(1, shape)).transpose(1, 2) for x in (q, k, v))
        mask = allowed.repeat(images, 1, 1).unsqueeze(1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return joined(out.transpose(1, 2)).flatten(1, 2)

    graph = CompleteGraph.from_batch(grid_blocks(shape, block, shift=shift))
    operands = normal(*[(2, math.prod(shape), 3, 8)] * 3)
    assert_same(on(graph), swin, operands, dtype)
    assert (shift == 0) == bool(allowed.all())
