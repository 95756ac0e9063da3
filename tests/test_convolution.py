"""Convolution as attention: the same numbers and gradients, and a kernel found by training."""

import math

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version

from graphattn.nn import ConvolutionalAttention

DTYPES = [torch.float32, torch.float64]
PRECISION = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def one_thread():
    """These are small problems, and two threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CONVOLUTIONS = {
    "1x1": {"kernel_size": 1},
    "3x3": {"kernel_size": 3},
    "3x3, same size": {"kernel_size": 3, "padding": 1},
    "5x3": {"kernel_size": (5, 3), "padding": (2, 1)},
    "even": {"kernel_size": 2},
    "even, padded": {"kernel_size": 4, "padding": 2},
    "odd by even, same": {"kernel_size": (3, 4), "padding": "same"},
    "valid": {"kernel_size": (2, 3), "padding": "valid"},
    "wide padding": {"kernel_size": 3, "padding": (4, 3)},
    "dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "dilated, padding no multiple": {"kernel_size": 3, "dilation": 3, "padding": 1},
    "dilated apart": {"kernel_size": (3, 2), "dilation": (1, 3), "padding": (1, 2)},
    "dilated by 2 and 4": {"kernel_size": (2, 3), "dilation": (4, 2), "padding": "same"},
    "grouped": {"kernel_size": 3, "groups": 2},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1},
    "no bias": {"kernel_size": 3, "bias": False},
    "reflect": {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"},
    "replicate": {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"},
    "circular": {"kernel_size": (3, 5), "padding": "same", "padding_mode": "circular"},
    "row": {"kernel_size": (1, 7), "padding": (0, 3)},
    "as large as the image": {"kernel_size": (9, 11)},
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@PRECISION
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_equal_to_conv2d(name, dtype):
    """Values, and the gradients of images, weights and bias."""
    conv = torch.nn.Conv2d(4, 8, **CONVOLUTIONS[name]).to(dtype)
    layer = ConvolutionalAttention.from_conv2d(conv)
    images = torch.randn(2, 4, 9, 11, dtype=dtype)
    ours, theirs = images.clone().requires_grad_(), images.clone().requires_grad_()
    out, exact = layer(ours), conv(theirs)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert out.dtype == dtype
    torch.testing.assert_close(out, exact, atol=tolerance, rtol=0)
    grad = torch.randn_like(exact)
    out.backward(grad)
    exact.backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=tolerance * 10, rtol=0)
    weight = layer.weight.grad.unflatten(-1, conv.kernel_size)
    torch.testing.assert_close(weight, conv.weight.grad, atol=tolerance * 100, rtol=0)
    if conv.bias is not None:
        torch.testing.assert_close(layer.bias.grad, conv.bias.grad, atol=tolerance * 100, rtol=0)
    assert layer.center.grad.isfinite().all() and layer.alpha.grad.isfinite().all()
    torch.testing.assert_close(layer(images[0]), conv(images[0]), atol=tolerance, rtol=0)
    assert layer(images[:0]).shape == conv(images[:0]).shape


def test_the_convolution_is_copied():
    conv = torch.nn.Conv2d(1, 1, 3)
    layer, image = ConvolutionalAttention.from_conv2d(conv), torch.randn(1, 1, 5, 5)
    before = layer(image)
    with torch.no_grad():
        conv.weight.zero_()
    assert torch.equal(layer(image), before)
    assert layer.weight.requires_grad and layer.center.shape == (9, 2)
    assert "kernel_size=(3, 3), heads=9" in repr(layer)


@PRECISION
def test_scores_are_quadratic(dtype):
    """Against a loop over the pixels, with heads somewhere between the taps."""
    layer = ConvolutionalAttention(2, 3, (3, 2), heads=4, dilation=(1, 2)).to(dtype)
    with torch.no_grad():
        layer.alpha.copy_(torch.rand(4))
        layer.bias.copy_(torch.randn(3))
    image = torch.randn(2, 6, 7, dtype=dtype)
    out = layer(image)
    assert out.shape == (3, 4, 5)
    for y in range(4):
        for x in range(5):
            expected = layer.bias.double().clone()
            for h in range(4):
                scores, pixels = [], []
                for r in range(3):
                    for c in range(2):
                        place = torch.tensor([r, c], dtype=torch.float64)
                        distance = (place - layer.center[h].double()).square().sum()
                        scores.append(-layer.alpha[h].double() * distance)
                        pixels.append(image[:, y + r, x + 2 * c].double())
                mean = (torch.stack(scores).softmax(0).view(-1, 1) * torch.stack(pixels)).sum(0)
                expected = expected + layer.weight[:, :, h].double() @ mean
            torch.testing.assert_close(out[:, y, x].double(), expected, atol=1e-5, rtol=0)


def test_gradients():
    layer = ConvolutionalAttention(2, 2, 2, heads=3, groups=2, padding=1).double()
    names, values = zip(*layer.named_parameters())
    image = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def call(image, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (image,))

    assert torch.autograd.gradcheck(call, (image, *values))
    assert torch.autograd.gradgradcheck(call, (image, *values))


def test_training_finds_a_blur():
    """The binomial blur is one head in the middle whose weights halve at a distance of 1: α = log 2."""
    kernel = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]).view(1, 1, 3, 3) / 16
    layer = ConvolutionalAttention(1, 1, 3, heads=1, bias=False)
    with torch.no_grad():
        layer.center.copy_(torch.tensor([[0.3, 1.8]]))
        layer.alpha.fill_(2.0)
        layer.weight.fill_(0.5)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        images = torch.randn(4, 1, 12, 12)
        loss = (layer(images) - F.conv2d(images, kernel)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert loss < 1e-6
    torch.testing.assert_close(layer.center, torch.ones(1, 2), atol=0.01, rtol=0)
    torch.testing.assert_close(layer.alpha, torch.tensor([math.log(2)]), atol=0.02, rtol=0)
    torch.testing.assert_close(layer.weight.flatten(), torch.ones(1), atol=0.01, rtol=0)


def test_bad_input():
    with pytest.raises(ValueError, match="stride"):
        ConvolutionalAttention.from_conv2d(torch.nn.Conv2d(1, 1, 3, stride=2))
    for wrong in (torch.nn.Conv1d(1, 1, 3), torch.nn.ConvTranspose2d(1, 1, 3), None):
        with pytest.raises(TypeError, match="Conv2d"):
            ConvolutionalAttention.from_conv2d(wrong)
    layer = ConvolutionalAttention(2, 3, 3)
    for images, error, words in [
        (torch.zeros(1, 3, 5, 5), ValueError, r"\[batch, 2, height, width\]"),
        (torch.zeros(5, 5), ValueError, "height, width"),
        (torch.zeros(1, 2, 2, 5), ValueError, r"\[3, 3\]"),
        (torch.zeros(1, 2, 5, 5, dtype=torch.float64), TypeError, "float32"),
        (torch.zeros(1, 2, 5, 5, dtype=torch.int64), TypeError, "float32"),
        (None, TypeError, "NoneType"),
    ]:
        with pytest.raises(error, match=words):
            layer(images)
    with pytest.raises(TypeError, match="dense"):
        layer(torch.zeros(1, 2, 5, 5).to_sparse())


@pytest.mark.parametrize(
    "name", ["in_channels", "out_channels", "kernel_size", "dilation", "groups", "heads"]
)
@pytest.mark.parametrize(
    ("wrong", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("3", TypeError)],
)
def test_bad_numbers(name, wrong, error):
    arguments = {"in_channels": 2, "out_channels": 4, "kernel_size": 3}
    with pytest.raises(error, match=f"`{name}` must be"):
        ConvolutionalAttention(**(arguments | {name: wrong}))
    if name in ("kernel_size", "dilation"):
        with pytest.raises(error, match=f"`{name}` must be"):
            ConvolutionalAttention(**(arguments | {name: (1, wrong)}))
        for wrong_pair in ((), (3,), (3, 3, 3)):
            with pytest.raises(ValueError, match="a pair"):
                ConvolutionalAttention(**(arguments | {name: wrong_pair}))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"groups": 2}, ValueError, "divisible by groups"),
        ({"padding_mode": "mirror"}, ValueError, '`padding_mode` must be "zeros", "reflect", "replicate" or'),
        ({"padding_mode": ["zeros"]}, ValueError, "`padding_mode`"),
        ({"padding": "all"}, ValueError, '`padding` must be "same" or "valid", got'),
        ({"padding": -1}, ValueError, "`padding`"),
        ({"padding": (1, 2, 3)}, ValueError, "a pair"),
        ({"padding": None}, TypeError, "`padding`"),
        ({"padding": True}, TypeError, "`padding`"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        ConvolutionalAttention(3, 4, 3, **options)


@pytest.mark.parametrize("kernel", [3, (5, 2), 9])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_pixels_that_are_not_finite(bad, kernel):
    """They reach the outputs that a convolution's do, and leave all others as they are."""
    conv = torch.nn.Conv2d(3, 2, kernel, padding=1)
    layer, images = ConvolutionalAttention.from_conv2d(conv), torch.randn(2, 3, 14, 12)
    images[0, 1, 4, 6] = bad
    exact = conv(images)
    nan = torch.where(exact.isfinite(), exact, math.nan)
    torch.testing.assert_close(layer(images), nan, atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    """Dtypes as in a convolution, also in a chain of them, and float64 kept."""
    conv = torch.nn.Conv2d(2, 3, 3, padding=1)
    layer, images = ConvolutionalAttention.from_conv2d(conv), torch.randn(2, 2, 6, 7)
    exact = conv(images)
    with torch.autocast("cpu", dtype):
        for given in (images, images.to(dtype)):
            out, theirs = layer(given), conv(given)
            assert out.dtype == theirs.dtype == dtype
            torch.testing.assert_close(out.float(), exact, atol=8 * torch.finfo(dtype).eps, rtol=0)
        chain = torch.nn.Sequential(layer, torch.nn.ReLU(), ConvolutionalAttention(3, 2, 3))
        chain(images).float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.isfinite().all()
        double = ConvolutionalAttention.from_conv2d(conv.double())
        torch.testing.assert_close(double(images.double()), conv(images.double()))
        with pytest.raises(TypeError, match="float64"):
            layer(images.double())


def test_compiles():
    """In one graph, for images of any size."""
    conv = torch.nn.Conv2d(2, 3, (3, 2), padding=1, dilation=(1, 2))
    layer = ConvolutionalAttention.from_conv2d(conv)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    if Version(torch.__version__) < Version("2.13"):  # whose Dynamo cannot make a graph while it traces
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(torch.randn(2, 2, 6, 7))
        return
    for height in (6, 9):
        images = torch.randn(2, 2, height, 7, requires_grad=True)
        out = compiled(images)
        torch.testing.assert_close(out, conv(images), atol=1e-5, rtol=0)
        (grad,) = torch.autograd.grad(out.square().sum(), images)
        (expected,) = torch.autograd.grad(conv(images).square().sum(), images)
        torch.testing.assert_close(grad, expected, atol=1e-4, rtol=0)


def test_a_convolution_with_a_forward_of_its_own_is_refused():
    class Doubled(torch.nn.Conv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(TypeError, match="got Doubled"):
        ConvolutionalAttention.from_conv2d(Doubled(1, 1, 3))
    with pytest.raises(TypeError, match="complex64"):
        ConvolutionalAttention.from_conv2d(torch.nn.Conv2d(1, 1, 3, dtype=torch.complex64))
    plain = torch.nn.Conv2d(1, 1, 3)
    plain.forward = lambda x: 0 * x
    with pytest.raises(TypeError, match="forward of that class"):
        ConvolutionalAttention.from_conv2d(plain)
    hooked = torch.nn.Conv2d(1, 1, 3)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(TypeError, match="hooks"):
        ConvolutionalAttention.from_conv2d(hooked)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_convolution_without_weights_is_refused():
    with pytest.raises(ValueError, match="LazyConv2d"):
        ConvolutionalAttention.from_conv2d(torch.nn.LazyConv2d(2, 3))


def test_a_parametrized_convolution():
    conv = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv2d(2, 3, 3))
    images = torch.randn(1, 2, 5, 5)
    torch.testing.assert_close(
        ConvolutionalAttention.from_conv2d(conv)(images), conv(images), atol=1e-5, rtol=0
    )
