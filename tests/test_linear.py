"""Linear maps by the project's own matrix product, against float64 and against PyTorch's."""

import copy
import io
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode

import graphattn
from graphattn import CompleteGraph
from graphattn.kernels import product_cpu
from graphattn.kernels.product_cpu import multiply
from graphattn.nn import linear as module
from graphattn.nn.linear import linear

SHAPES = [
    (1, 1, 1), (7, 3, 16), (48, 256, 64), (49, 257, 65), (100, 300, 9), (6, 1000, 530), (500, 20, 1030),
    (20, 2100, 40), (200, 2500, 70), (192, 3000, 33),
]  # fmt: skip


@pytest.fixture
def always(monkeypatch):
    """Every product is taken, however small and on whatever machine; the list grows with each."""
    taken = []

    def counted(*operands):
        taken.append(operands)
        return multiply(*operands)

    monkeypatch.setattr(product_cpu, "FASTER", True)
    monkeypatch.setattr(product_cpu, "multiply", counted)
    monkeypatch.setattr(module, "_LEAST_WORK", 1)
    return taken


def close(ours, exact, dtype):
    scale = exact.abs().max().clamp_min(1)
    torch.testing.assert_close(
        ours.double() / scale, exact / scale, rtol=0, atol=3e-6 if dtype == torch.float32 else 1e-14
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_multiply(shape, with_bias, dtype):
    rows, depth, columns = shape
    bias = torch.randn(columns, dtype=dtype) if with_bias else None
    a, b = torch.randn(rows, depth, dtype=dtype), torch.randn(depth, columns, dtype=dtype)
    exact = a.double() @ b.double() + (0 if bias is None else bias.double())
    apart = torch.randn(3 * rows, 2 * depth, dtype=dtype)[::3, ::2].copy_(a)
    for left in (a, a.t().contiguous().t(), apart):
        for right in (
            b,
            b.t().contiguous().t(),
            torch.randn(depth, columns + 5, dtype=dtype)[:, 2:-3].copy_(b),
        ):
            out = multiply(left, right, bias)
            assert out.is_contiguous() and out.dtype == dtype
            close(out, exact, dtype)


def test_multiply_with_the_registers_of_other_machines(monkeypatch):
    lanes = {torch.float32: (16, 16, 16), torch.float64: (8, 8, 8)}
    monkeypatch.setattr(product_cpu, "LANES", lanes)
    for dtype in lanes:
        a, b = torch.randn(101, 300, dtype=dtype), torch.randn(300, 77, dtype=dtype)
        close(multiply(a, b), a.double() @ b.double(), dtype)


@pytest.mark.parametrize("shape", [(2000, 300, 70), (150, 9000, 90)], ids=str)
def test_multiply_does_not_depend_on_the_number_of_threads(shape):
    rows, depth, columns = shape
    a, b, before = torch.randn(depth, rows).t(), torch.randn(depth, columns), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(multiply(a, b))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_multiply_keeps_to_its_memory():
    """Numbers around the operands reach no sum, not even as 0 times NaN, and those around the result stay."""
    for rows, depth, columns in ((13, 70, 35), (70, 2100, 19)):
        a, b, bias = torch.randn(rows, depth), torch.randn(depth, columns), torch.randn(columns)
        parts = []
        for x in (a, b, bias):
            around = torch.full([n + 20 for n in x.shape], math.nan)
            parts.append(around[tuple(slice(10, -10) for _ in x.shape)].copy_(x))
        exact = a.double() @ b.double()
        close(multiply(*parts), exact + bias.double(), torch.float32)
        close(multiply(parts[0].t().contiguous().t(), parts[1]), exact, torch.float32)


def test_what_is_not_finite_stays_in_its_row_and_column():
    a, b = torch.randn(50, 40), torch.randn(40, 30)
    a[3, 7], b[5, 11] = math.nan, math.inf
    expected = a.numpy() @ b.numpy()
    assert np.isnan(expected[3]).all()
    torch.testing.assert_close(
        multiply(a, b), torch.from_numpy(expected), rtol=1e-5, atol=1e-5, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("leading", [(), (3,), (2, 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients(always, with_bias, leading, dtype):
    x, weight = torch.randn(*leading, 29, 37, dtype=dtype), torch.randn(21, 37, dtype=dtype)
    operands = [x, weight] + ([torch.randn(21, dtype=dtype)] if with_bias else [])
    ours = [y.clone().requires_grad_() for y in operands]
    exact = [y.double().requires_grad_() for y in operands]
    out, expected = linear(*ours), F.linear(*exact)
    assert out.shape == expected.shape and always
    close(out, expected, dtype)
    flow = torch.randn_like(expected)
    grads = torch.autograd.grad(out, ours, flow.to(dtype))
    assert len(always) == 3
    for grad, right in zip(grads, torch.autograd.grad(expected, exact, flow)):
        close(grad, right, dtype)


def test_second_derivatives(always):
    operands = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((9, 5), (4, 5), (4,))
    ]
    assert torch.autograd.gradcheck(linear, operands)
    assert torch.autograd.gradgradcheck(linear, operands)
    assert always


def test_only_what_is_asked_for_is_computed(always):
    x, weight = torch.randn(30, 8), torch.randn(8, 8, requires_grad=True)
    linear(x, weight).sum().backward()  # of an expanded gradient
    assert len(always) == 2
    torch.testing.assert_close(weight.grad, x.sum(0).expand(8, 8))
    x, bias = torch.randn(30, 8), torch.randn(8, requires_grad=True)
    linear(x, weight.detach(), bias).sum().backward()
    assert len(always) == 3
    torch.testing.assert_close(bias.grad, torch.full((8,), 30.0))


def test_what_others_look_into_is_left_to_pytorch(always):
    x, weight, bias = torch.randn(40, 16), torch.randn(24, 16), torch.randn(24)
    expected = F.linear(x, weight, bias)
    vmapped = torch.func.vmap(linear, in_dims=(0, None, None))(x.view(4, 10, 16), weight, bias)
    torch.testing.assert_close(vmapped.flatten(0, 1), expected)
    grad = torch.func.grad(lambda w: linear(x, w, bias).sum())(weight)
    torch.testing.assert_close(grad, x.sum(0).expand(24, 16))
    compiled = torch.compile(linear, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight, bias), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    assert linear(x.half(), weight.half(), bias.half()).dtype == torch.float16
    assert linear(x.to("meta"), weight.to("meta")).shape == (40, 24)
    assert linear(x[:0], weight, bias).shape == (0, 24)
    assert not always
    traced = torch.jit.trace(linear, (x, weight, bias), check_trace=False)  # which runs it once untraced
    always.clear()
    torch.testing.assert_close(traced(x, weight, bias), expected)
    assert not always


def test_many_gradients_at_a_time(always):
    x, weight = torch.randn(20, 6), torch.randn(5, 6, requires_grad=True)
    flows = torch.randn(3, 20, 5)
    (grads,) = torch.autograd.grad(linear(x, weight), weight, flows, is_grads_batched=True)
    torch.testing.assert_close(grads, flows.mT @ x)
    assert len(always) == 1


@pytest.mark.parametrize(
    "shapes", [((5, 3), (4, 2)), ((5, 3), (4, 3), (5,)), ((3,), (4, 3)), ((5, 3), (3,))], ids=str
)
def test_wrong_shapes_are_what_they_are_in_pytorch(always, shapes):
    operands = [torch.randn(*shape) for shape in shapes]
    try:
        expected = F.linear(*operands)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            linear(*operands)
    else:
        torch.testing.assert_close(linear(*operands), expected)


def layers():
    graph_of = torch.randint(30, (2, 90))
    conv = {"edge_index": graph_of}
    yield (
        "TransformerConv",
        torch_geometric.nn.TransformerConv(16, 8, 4),
        graphattn.nn.TransformerConv(16, 8, 4),
        conv,
    )
    yield "lazy", torch_geometric.nn.TransformerConv(-1, 8, 4), graphattn.nn.TransformerConv(-1, 8, 4), conv
    accelerated = graphattn.accelerate(torch_geometric.nn.TransformerConv(16, 8, 4))
    yield "accelerate", torch_geometric.nn.TransformerConv(16, 8, 4), accelerated, conv
    gps = (library.GPSConv(16, None, heads=2) for library in (torch_geometric.nn, graphattn.nn))
    yield "GPSConv", *gps, {**conv, "batch": torch.arange(30) // 10}


@pytest.mark.parametrize("name", ["TransformerConv", "lazy", "accelerate", "GPSConv"])
def test_layers_with_it_are_the_same(always, name):
    theirs, ours, rest = next(rest for of, *rest in layers() if of == name)
    x = torch.randn(30, 16)
    theirs(x, **rest)
    ours.load_state_dict(theirs.state_dict())
    if name != "GPSConv":  # whose attention is another
        assert [*map(repr, ours.modules())] == [*map(repr, theirs.modules())]
    operands = [x.clone().requires_grad_() for _ in range(2)]
    outs = [layer(operand, **rest) for layer, operand in zip((theirs, ours), operands)]
    assert len(always) == (6 if name == "GPSConv" else 4)  # all maps
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(operands[1].grad, operands[0].grad, rtol=1e-4, atol=1e-4)
    grads = dict(ours.named_parameters())
    for key, parameter in theirs.named_parameters():
        torch.testing.assert_close(grads[key].grad, parameter.grad, rtol=1e-3, atol=1e-3)


def large():
    return torch.randn(60, 16), torch.randn(24, 16), torch.randn(24)


def test_tensors_that_are_not_the_numbers_in_memory(always):
    """Negated lazily, zero without memory, nested, or freed: what PyTorch makes of them."""
    x, weight, bias = large()
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    torch.testing.assert_close(linear(negative, weight, bias), F.linear(-x, weight, bias))
    x.requires_grad_()
    for flow, expected in (
        (torch.complex(torch.zeros(60, 24), torch.ones(60, 24)).conj().imag, -weight.sum(0).expand(60, 16)),
        (torch._efficientzerotensor(60, 24), torch.zeros(60, 16)),
        (torch.ones(60, 24).to_sparse(), weight.sum(0).expand(60, 16)),
    ):
        (grad,) = torch.autograd.grad(linear(x, weight, bias), x, flow)
        torch.testing.assert_close(grad, expected)
    x = x.detach()
    assert torch.equal(linear(torch._efficientzerotensor(60, 16), weight, bias), bias.expand(60, 24))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are young
        nested = torch.nested.nested_tensor([x[:8], x[:3]])
    torch.testing.assert_close(linear(nested, weight, bias).unbind()[1], F.linear(x[:3], weight, bias))
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        linear(x, weight, bias)


def test_where_operations_are_recorded_replaced_or_counted(always):
    x, weight, bias = large()
    expected = F.linear(x, weight, bias)
    always.clear()
    traced = make_fx(lambda x: linear(x, weight, bias))(x)
    torch.testing.assert_close(traced(2 * x), F.linear(2 * x, weight, bias))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(linear(x, weight, bias), FakeTensor)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 60 * 16 * 24
    with torch.device("meta"):
        torch.testing.assert_close(linear(x, weight, bias), expected)
    # Operands that take no part in a transformation themselves.
    grad = torch.func.grad(lambda p: (linear(x, weight, bias) * p).sum())(torch.ones(24))
    torch.testing.assert_close(grad, expected.sum(0))
    products = torch.func.vmap(lambda p: linear(x, weight, bias) * p)(torch.arange(3.0))
    torch.testing.assert_close(products, expected * torch.arange(3.0)[:, None, None])
    with forward_ad.dual_level():
        dual = linear(forward_ad.make_dual(x, x), weight, bias)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, x @ weight.t())
    assert not always


@pytest.mark.parametrize("shape", [(60, 16), (3, 20, 16)])
def test_results_are_changed_in_place(always, shape):
    _, weight, bias = large()
    x, factor = torch.randn(shape, requires_grad=True), torch.randn(24, requires_grad=True)
    expected = (F.linear(x, weight, bias) * factor).relu()
    out = linear(x, weight, bias).mul_(factor).relu_()
    torch.testing.assert_close(out, expected)
    for ours, right in zip(
        torch.autograd.grad(out.sum(), [x, factor]), torch.autograd.grad(expected.sum(), [x, factor])
    ):
        torch.testing.assert_close(ours, right)
    linear(x, weight, bias).detach_()
    with torch.no_grad():
        out = linear(x, weight, bias)
    (grad,) = torch.autograd.grad(out.clone().mul_(factor).sum(), factor)
    torch.testing.assert_close(grad, F.linear(x, weight, bias).flatten(0, -2).sum(0))
    out.mul_(factor).sum().backward()
    assert always


def test_only_what_the_gradients_need_is_kept(always):
    x, weight, bias = large()
    for number, kept in ((0, [1]), (1, [0]), (2, [])):
        operands = [operand.clone() for operand in (x, weight, bias)]
        operands[number].requires_grad_()
        out = linear(*operands)
        for i, operand in enumerate(operands):
            if i not in kept:  # after an optimizer's step, say
                with torch.no_grad():
                    operand.add_(1)
        out.sum().backward()
        assert operands[number].grad is not None
        if kept:
            out = linear(*operands)
            operands[kept[0]].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
    with torch.inference_mode():
        x = x.clone()
    linear(x, weight, bias.requires_grad_()).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((24,), 60.0))


def test_modules_of_layers_are_those_that_tools_look_for(always):
    """By their exact class, as quantization, TorchScript and hooks on all modules do."""
    graph, x = CompleteGraph(20), torch.randn(20, 16)
    layer = graphattn.nn.GraphTransformerLayer(16, 2, 32).eval()
    gps = graphattn.nn.GPSConv(16, None, heads=2).eval()
    expected = layer(x, graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(layer), {torch.nn.Linear})
        script = torch.jit.script(gps.mlp)
    assert type(quantized.linear1) is not torch.nn.Linear
    torch.testing.assert_close(quantized(x, graph), expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(script(x), gps.mlp(x))
    seen = []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        torch.testing.assert_close(layer(x, graph), expected)
    assert {layer.linear1, layer.linear2, layer.self_attn.out_proj} <= set(seen)
    layer.linear1.forward = lambda x: torch.zeros(*x.shape[:-1], 32)
    zero = layer.norm1(x + layer.self_attn(x, graph))
    torch.testing.assert_close(layer(x, graph), layer.norm2(zero + layer.linear2.bias))
    seen.clear()
    gps.mlp[0].register_forward_hook(lambda module, *_: seen.append(module))
    gps.mlp.register_forward_hook(lambda module, *_: seen.append(module))
    gps(x, torch.empty(2, 0, dtype=torch.long))
    assert seen == [gps.mlp[0], gps.mlp]


def test_weights_that_are_computed_are_computed_once():
    """Spectral normalisation takes a step whenever it is looked at."""
    theirs = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    ours = graphattn.nn.GraphTransformerLayer(16, 2, 32, dropout=0.0)
    ours.load_state_dict(theirs.state_dict())
    for layer in (theirs, ours):
        torch.manual_seed(0)
        for linear_map in (layer.linear1, layer.linear2, layer.self_attn.out_proj):
            spectral_norm(linear_map)
    x = torch.randn(10, 16)
    for _ in range(3):
        torch.testing.assert_close(ours(x, CompleteGraph(10)), theirs(x[None])[0], rtol=1e-4, atol=1e-5)


def test_its_modules_are_copied_pickled_hooked_and_wrapped_as_ever(always):
    conv, edge_index = graphattn.nn.TransformerConv(16, 8, 2), torch.randint(20, (2, 50))
    x = torch.randn(20, 16)
    expected = conv(x, edge_index)
    file = io.BytesIO()
    torch.save(conv, file)
    file.seek(0)
    for other in (copy.deepcopy(conv), torch.load(file, weights_only=False)):
        assert torch.equal(other(x, edge_index), expected)
    seen = []
    conv.lin_value.register_forward_hook(lambda layer, args, out: seen.append(out) or out * 2)
    doubled = conv(x, edge_index) - conv.lin_skip(x)
    torch.testing.assert_close(doubled, 2 * (expected - conv.lin_skip(x)), rtol=1e-4, atol=1e-5)
    assert len(seen) == 1
    conv.lin_key = torch.nn.Sequential(conv.lin_key, torch.nn.Identity())  # as adapters do
    torch.testing.assert_close(conv(x, edge_index) - conv.lin_skip(x), doubled)
    torch.nn.utils.parametrizations.weight_norm(conv.lin_query)
    torch.testing.assert_close(conv(x, edge_index) - conv.lin_skip(x), doubled, rtol=1e-4, atol=1e-5)
