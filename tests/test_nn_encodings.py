"""Encodings with parameters, rotary encoding and relative biases."""

import builtins
import math

import pytest
import torch

from graphattn import (
    CompleteGraph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    attention_weights,
    graph_attention,
)
from graphattn.nn import ContinuousEncoding, LearnedEncoding, RelativeBias, RotaryEncoding

DTYPES = [torch.float32, torch.float64]
PRECISION = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def one_thread():
    """These are small problems, and two threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestLearnedEncoding:
    @PRECISION
    def test_looks_up(self, dtype):
        encoding = LearnedEncoding(5, 3).to(dtype)
        out = encoding(torch.tensor([4, 0, 4]))
        assert torch.equal(out, encoding.weight[[4, 0, 4]])
        out.sum().backward()
        assert encoding.weight.grad[:, 0].tolist() == [1, 0, 0, 0, 2]
        assert torch.equal(encoding(WindowGraph(5, 1).positions()), encoding.weight)

    def test_grid_is_row_major(self):
        encoding = LearnedEncoding((3, 4), 2)
        assert torch.equal(encoding(GridGraph((3, 4), 1).positions()), encoding.weight)
        assert torch.equal(encoding(torch.tensor([[2, 1]])), encoding.weight[9:10])
        assert encoding(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2)
        assert "num_positions=(3, 4), dim=2" in repr(encoding)

    def test_bad_input(self):
        encoding = LearnedEncoding((3, 4), 2)
        with pytest.raises(IndexError, match=r"\[0, 4\), got 4"):
            encoding(torch.tensor([[0, 4]]))
        with pytest.raises(IndexError, match=r"\[0, 3\), got -1"):
            encoding(torch.tensor([[-1, 0]]))
        with pytest.raises(TypeError, match="integers"):
            encoding(torch.zeros(1, 2))
        with pytest.raises(ValueError, match=r"\[nodes, 2\]"):
            encoding(torch.zeros(3, dtype=torch.int64))
        with pytest.raises(ValueError, match="positions"):
            encoding(torch.zeros(3, 2, 1, dtype=torch.int64))
        for arguments, error in [
            ((0, 2), ValueError),
            ((2, 0), ValueError),
            ((2.0, 2), TypeError),
            (((), 2), ValueError),
        ]:
            with pytest.raises(error, match="must"):
                LearnedEncoding(*arguments)


class TestContinuousEncoding:
    @pytest.fixture(autouse=True)
    def _needs_torchdiffeq(self):
        pytest.importorskip("torchdiffeq", reason="ContinuousEncoding needs torchdiffeq")

    @PRECISION
    def test_linear_dynamics_by_formula(self, dtype):
        """With dynamics A e the path is exp(0.1 p A) e(0)."""
        encoding = ContinuousEncoding(4).to(dtype)
        A = torch.randn(4, 4, dtype=dtype) * 0.5
        encoding.dynamics = torch.nn.Linear(4, 4, bias=False, dtype=dtype)
        with torch.no_grad():
            encoding.dynamics.weight.copy_(A)
        positions = torch.tensor([3.0, 0.0, -2.5, 17.0, 3.0], dtype=dtype)  # unsorted, repeated, negative
        out = encoding(positions)
        start = encoding.initial[0].double()
        exact = torch.stack(
            [torch.linalg.matrix_exp(0.1 * p * A.double()) @ start for p in positions.double()]
        )
        tolerance = 1e-7 if dtype == torch.float64 else 2e-4
        torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)
        assert out.dtype == dtype

    def test_gradients(self):
        encoding = ContinuousEncoding(3, num_layers=2).double()
        parameters = tuple(encoding.parameters())
        positions = torch.tensor([0, 5, 2, -3])

        def call(*values):
            named = dict(zip(dict(encoding.named_parameters()), values))
            return torch.func.functional_call(encoding, named, (positions, 1))

        assert torch.autograd.gradcheck(call, parameters, eps=1e-5, atol=1e-5)

    def test_gradient_with_respect_to_positions(self):
        """Repeated, negative and zero positions each move along the path: de/dp = 0.1 h(e)."""
        encoding = ContinuousEncoding(3).double()
        positions = torch.tensor([2.0, -1.5, 0.0, 2.0, 7.0], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(encoding, positions, eps=1e-4, atol=1e-5)
        out = encoding(positions)
        weight = torch.randn_like(out)
        (grad,) = torch.autograd.grad((out * weight).sum(), positions)
        torch.testing.assert_close(grad, 0.1 * (weight * encoding.dynamics(out)).sum(1))
        single = ContinuousEncoding(3)
        short = torch.tensor([1.0, 4.0], dtype=torch.float16, requires_grad=True)
        single(short).sum().backward()
        expected = 0.1 * single.dynamics(single(short)).sum(1)
        torch.testing.assert_close(short.grad, expected.half())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision(self, dtype):
        """The path of the rounded parameters, in float32, rounded once."""
        encoding = ContinuousEncoding(4).to(dtype)
        exact = ContinuousEncoding(4).double()
        exact.load_state_dict(encoding.state_dict())
        positions = torch.tensor([0, 300, 7, -40, 7])
        out = encoding(positions)
        assert out.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), exact(positions), atol=eps, rtol=eps)
        out.sum().backward()
        exact(positions).sum().backward()
        for ours, theirs in zip(encoding.parameters(), exact.parameters()):
            size = theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=4 * eps * size, rtol=4 * eps)

    def test_autocast_does_not_reach_the_integration(self):
        encoding, positions = ContinuousEncoding(4), torch.arange(50)
        expected = encoding(positions)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(encoding(positions), expected)

    def test_layers_share_the_dynamics(self):
        encoding = ContinuousEncoding(4, num_layers=3)
        same = torch.arange(6)
        assert (encoding(same, 0) - encoding(same, 2)).abs().max() > 1e-2
        assert torch.equal(encoding(same, 1)[0], encoding.initial[1])
        assert sum(p.numel() for p in encoding.dynamics.parameters()) == 4 * 16 + 16 + 16 * 4 + 4

    @pytest.mark.parametrize("n", [0, 1, 2])
    def test_few_positions(self, n):
        assert ContinuousEncoding(4)(torch.arange(n)).shape == (n, 4)
        assert ContinuousEncoding(4)(torch.full((n, 1), 7)).shape == (n, 4)

    def test_extrapolates(self):
        """Trained to tell a wave of period 16 over 32 positions; the next 32 are those of the same wave."""
        encoding = ContinuousEncoding(4, hidden_dim=16)
        readout = torch.nn.Linear(4, 2)
        angle = torch.arange(64) * (2 * math.pi / 16)
        wave = torch.stack([angle.cos(), angle.sin()], dim=1)
        parameters = [*encoding.parameters(), *readout.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=0.03)
        for step in range(150):
            length = min(32, 8 + step // 3)  # a long path is fitted from its start on
            loss = (readout(encoding(torch.arange(length))) - wave[:length]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        with torch.no_grad():
            error = (readout(encoding(torch.arange(64))) - wave).square().mean(1)
        # Guessing 0 has an error of 0.5; a table of learned vectors has nothing to say beyond 32.
        assert error[:32].mean() < 0.02
        assert error[32:].mean() < 0.05

    def test_bad_input(self):
        encoding = ContinuousEncoding(4)
        with pytest.raises(ValueError, match=r"\[nodes, 1\]"):
            encoding(torch.zeros(3, 2))
        with pytest.raises(ValueError, match="finite"):
            encoding(torch.tensor([math.nan]))
        for layer, error in [(1, IndexError), (-1, ValueError), (0.0, TypeError), (False, TypeError)]:
            with pytest.raises(error, match="layer"):
                encoding(torch.zeros(3), layer)
        for options in ({"num_layers": 0}, {"hidden_dim": 0}):
            with pytest.raises(ValueError, match="at least 1"):
                ContinuousEncoding(4, **options)
        with pytest.raises(ValueError, match="dim"):
            ContinuousEncoding(0)


def test_continuous_encoding_says_what_it_needs(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "torchdiffeq":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"graphattn\[ode\]"):
        ContinuousEncoding(4)


class TestRotaryEncoding:
    @PRECISION
    def test_formula(self, dtype):
        """Neighbouring dims are a complex number, multiplied by exp(i p base^(-2c/dim))."""
        x, positions = torch.randn(2, 7, 3, 6, dtype=dtype), torch.tensor([0, 1, 2, 50, -4, 3, 1000])
        turned = RotaryEncoding(6)(x, positions)
        numbers = torch.view_as_complex(x.double().unflatten(-1, (3, 2)).contiguous())
        frequency = 10000.0 ** -(torch.arange(3, dtype=torch.float64) / 3)
        angle = (positions.double().view(-1, 1) * frequency).view(7, 1, 3)
        exact = torch.view_as_real(numbers * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
        torch.testing.assert_close(turned, exact.to(dtype))
        assert torch.equal(turned[:, 0], x[:, 0])

    @PRECISION
    def test_scores_depend_on_differences(self, dtype):
        rotary = RotaryEncoding(8)
        query, key = torch.randn(30, 2, 8, dtype=dtype), torch.randn(30, 2, 8, dtype=dtype)
        p = torch.arange(30)
        scores = [
            torch.einsum("ihd,jhd->hij", rotary(query, p + shift), rotary(key, p + shift))
            for shift in (0, 1000)
        ]
        torch.testing.assert_close(*scores, atol=2e-5 if dtype == torch.float32 else 1e-11, rtol=0)

    def test_axial(self):
        rotary, x = RotaryEncoding(8), torch.randn(12, 2, 8)
        positions = GridGraph((3, 4), 1).positions()
        turned = rotary(x, positions)
        torch.testing.assert_close(turned[..., :4], RotaryEncoding(4)(x[..., :4], positions[:, 0]))
        torch.testing.assert_close(turned[..., 4:], RotaryEncoding(4)(x[..., 4:], positions[:, 1]))

    def test_in_attention_a_shifted_sequence_is_the_same(self):
        rotary, graph = RotaryEncoding(8), WindowGraph(20, (3, 0))
        query, key, value = torch.randn(3, 20, 2, 8)
        outs = [
            graph_attention(rotary(query, p), rotary(key, p), value, graph)
            for p in (graph.positions(), graph.positions() + 77)
        ]
        torch.testing.assert_close(*outs, atol=1e-5, rtol=0)
        assert (outs[0] - graph_attention(query, key, value, graph)).abs().max() > 0.05

    def test_dtypes_and_gradient(self):
        rotary, positions = RotaryEncoding(4), torch.arange(3)
        x = torch.randn(3, 1, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: rotary(x, positions), x)
        half = torch.randn(3, 1, 4).bfloat16()
        assert rotary(half, positions).dtype == torch.bfloat16
        torch.testing.assert_close(rotary(half, positions), rotary(half.float(), positions).bfloat16())
        assert rotary(torch.empty(2, 0, 1, 4), positions[:0]).shape == (2, 0, 1, 4)

    def test_bad_input(self):
        rotary, x = RotaryEncoding(8), torch.randn(5, 2, 8)
        for arguments, error, words in [
            ((x, torch.arange(4)), ValueError, r"\[\.\.\., 4, heads, 8\]"),
            ((x[..., :6], torch.arange(5)), ValueError, "dim=8"),
            ((x[0], torch.arange(5)), ValueError, "shape"),
            ((x, torch.zeros(5, 3)), ValueError, "3 axes"),
            ((x, torch.zeros(5, 0)), ValueError, "0 axes"),
            ((x, torch.zeros(5, 1, 1)), ValueError, "positions"),
            ((x, torch.full((5,), math.inf)), ValueError, "finite"),
            ((x.long(), torch.arange(5)), TypeError, "floating"),
            ((x.to_sparse(), torch.arange(5)), TypeError, "sparse_coo"),
        ]:
            with pytest.raises(error, match=words):
                rotary(*arguments)
        for dim, error in [(7, ValueError), (0, ValueError), (8.0, TypeError)]:
            with pytest.raises(error, match="dim"):
                RotaryEncoding(dim)
        with pytest.raises(ValueError, match="base"):
            RotaryEncoding(8, base=-1.0)


def by_offset(graph, bias):
    """The bias of every edge, and the offset of its key from its query."""
    heads = bias.shape[-1]
    entries = bias.expand(*graph.edge_shape, heads).reshape(-1, heads)[graph.slots()]
    source, target = graph.to_edge_index()
    return entries, graph.positions()[source] - graph.positions()[target]


class TestRelativeBias:
    @PRECISION
    @pytest.mark.parametrize(
        ("graph", "rows"),
        [
            (WindowGraph(9, (2, 1)), 4),
            (WindowGraph(12, 2, dilation=3), 5),
            (WindowGraph(6, (None, 0)), 11),
            (WindowGraph.from_ptr(torch.tensor([0, 4, 4, 9]), 2), 5),
            (GridGraph((5, 6), 1), 9),
            (GridGraph((5, 6), (1, 2), border="shift"), 5 * 9),
            (GridGraph((3, 4), None), 5 * 7),
            (CompleteGraph(4), 7),
            (CompleteGraph.from_ptr(torch.tensor([0, 3, 5])), 5),
        ],
        ids=str,
    )
    def test_one_row_for_each_offset(self, graph, rows, dtype):
        module = RelativeBias(graph, 3).to(dtype)
        assert module.weight.shape == (rows, 3)
        bias = module()
        entries, offsets = by_offset(graph, bias)
        seen = {}
        for entry, offset in zip(entries, offsets.tolist()):
            assert torch.equal(seen.setdefault(tuple(offset), entry), entry)
        assert len({tuple(entry.tolist()) for entry in seen.values()}) == len(seen)
        x = torch.randn(graph.num_queries, 3, 4, dtype=dtype)
        out = graph_attention(x, x, x, graph, bias=bias)
        torch.testing.assert_close(out, graph_attention(x, x, x, graph.to_sparse(), bias=entries))
        out.square().sum().backward()
        assert module.weight.grad.isfinite().all() and module.weight.grad.abs().max() > 0

    def test_windows_and_clipped_grids_share_it_over_queries(self):
        assert RelativeBias(WindowGraph(10**6, 3), 2)().shape == (1, 7, 2)
        assert RelativeBias(GridGraph((500, 500), 2), 2)().shape == (1, 25, 2)

    def test_swin_index(self):
        """On a complete grid of M × M the table is Swin's, (2M - 1)² rows by row-major offset."""
        M = 4
        graph = GridGraph((M, M), None)
        coords = torch.stack(torch.meshgrid(torch.arange(M), torch.arange(M), indexing="ij")).flatten(1)
        relative = (coords[:, None, :] - coords[:, :, None]).permute(1, 2, 0) + (M - 1)
        index = relative[..., 0] * (2 * M - 1) + relative[..., 1]
        module = RelativeBias(graph, 2)
        assert module.weight.shape == ((2 * M - 1) ** 2, 2)
        assert torch.equal(module(), module.weight[index])

    def test_it_is_learned(self):
        """Attention learns to look at the key two before, by nothing but the bias."""
        graph = WindowGraph(12, (3, 0))
        module = RelativeBias(graph, 1)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.3)
        zero, value = torch.zeros(12, 1, 1), torch.randn(12, 1, 8)
        for _ in range(60):
            out = graph_attention(zero, zero, value, graph, bias=module())
            loss = (out[2:] - value[:-2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert attention_weights(zero, zero, graph, bias=module())[5].argmax() == 1
        assert loss < 0.01

    def test_state_dict_and_repr(self):
        module = RelativeBias(WindowGraph(9, 2), 3)
        assert list(module.state_dict()) == ["weight"]
        longer = RelativeBias(WindowGraph(90, 2), 3)
        longer.load_state_dict(module.state_dict())
        assert torch.equal(longer(), module())
        assert "offsets=5, heads=3" in repr(module)
        assert RelativeBias(WindowGraph(0, 2), 3)().shape == (1, 5, 3)

    @pytest.mark.parametrize(
        "graph", [CompleteGraph(200), WindowGraph(200, 150), GridGraph((200,), None)], ids=str
    )
    def test_buckets_of_t5(self, graph):
        """32 rows for distances up to 128: those of 0 to 7 alone, then from 8, 12, 16, 23, 32, 46, 64 and 91 on."""
        first = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91])
        module = RelativeBias(graph, 3, num_buckets=32)
        assert module.weight.shape == (32, 3) and repr(module) == "RelativeBias(rows=32, heads=3)"
        entries, offsets = by_offset(graph, module())
        offsets = offsets.squeeze(1)
        rows = torch.searchsorted(first, offsets.abs(), right=True) - 1 + 16 * (offsets > 0)
        assert torch.equal(entries, module.weight[rows])
        past = RelativeBias(graph, 3, num_buckets=16, bidirectional=False)
        entries, _ = by_offset(graph, past())
        rows = torch.where(offsets > 0, 0, torch.searchsorted(first, offsets.abs(), right=True) - 1)
        assert torch.equal(entries, past.weight[rows])

    def test_buckets_of_the_axes_of_a_grid(self):
        graph = GridGraph((9, 12), None)
        module = RelativeBias(graph, 2, num_buckets=4, max_distance=3)
        assert module.weight.shape == (16, 2)
        entries, offsets = by_offset(graph, module())
        # 0, behind by 1 and more, (none), ahead by 1 and more
        along = torch.where(offsets > 0, 3, (offsets < 0).long())
        assert torch.equal(entries, module.weight[along[:, 0] * 4 + along[:, 1]])
        larger = RelativeBias(GridGraph((30, 7), 2, border="shift"), 2, num_buckets=4, max_distance=3)
        larger.load_state_dict(module.state_dict())  # one table for grids of any size

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"num_buckets": 3}, ValueError, "`num_buckets` must be at least 4 and below .*, got 3"),
            ({"num_buckets": 7}, ValueError, "`num_buckets` must be even, half for each direction, got 7"),
            (
                {"num_buckets": 1, "bidirectional": False},
                ValueError,
                "`num_buckets` must be at least 2 and below .*, got 1",
            ),
            ({"num_buckets": 8.0}, TypeError, "`num_buckets` must be an int, got float"),
            (
                {"num_buckets": 32, "max_distance": 8},
                ValueError,
                "`max_distance` must be at least 9 and below .*, got 8",
            ),
            ({"num_buckets": 32, "max_distance": 9.5}, TypeError, "`max_distance` must be an int, got float"),
            ({"num_buckets": 32, "bidirectional": 1}, TypeError, "`bidirectional` must be a bool, got int"),
        ],
    )
    def test_bad_buckets(self, options, error, message):
        with pytest.raises(error, match=message):
            RelativeBias(WindowGraph(9, 2), 3, **options)

    def test_bad_input(self):
        sparse = SparseGraph.from_edge_index(torch.tensor([[0], [1]]))
        with pytest.raises(ValueError, match="positions"):
            RelativeBias(sparse, 2)
        for options in ({}, {"num_buckets": 8}):
            with pytest.raises(
                ValueError, match="`graph` must hold numbers, got none: it is on the meta device"
            ):
                RelativeBias(WindowGraph(9, 2).to("meta"), 2, **options)
        with pytest.raises(TypeError, match="Graph"):
            RelativeBias(3, 2)
        with pytest.raises(ValueError, match="heads"):
            RelativeBias(WindowGraph(3, 1), 0)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (LearnedEncoding((3, 4), 8), (GridGraph((3, 4), 1).positions(),)),
        (RotaryEncoding(8), (torch.randn(12, 2, 8), GridGraph((3, 4), 1).positions())),
        (RelativeBias(WindowGraph(9, 2), 3), ()),
    ],
    ids=["learned", "rotary", "relative bias"],
)
def test_compiles(module, inputs):
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), module(*inputs))


def test_compiled_lookup_finds_no_row_for_a_position_outside():
    encoding = LearnedEncoding((3, 4), 2)
    compiled = torch.compile(encoding, fullgraph=True, backend="aot_eager")
    inside = torch.tensor([[0, 1], [2, 3]])
    assert torch.equal(compiled(inside), encoding(inside))
    for outside in ([[0, 5], [0, 0]], [[0, -1], [0, 0]]):  # rows 5 and -1 exist
        with pytest.raises((IndexError, RuntimeError)):
            compiled(torch.tensor(outside))
