"""Convolution as attention on a grid graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphattn.attention import autocast_dtype, graph_attention
from graphattn.graph import GridGraph, check_one_device, check_word, checked_count

if TYPE_CHECKING:
    from jaxtyping import Float

# exp(-_SHARP) is 0 beside 1 in float64, also where its sum over all taps of a kernel is taken.
_SHARP = 64.0


class ConvolutionalAttention(torch.nn.Module):
    """Multi-head attention that scores relative positions only; one head for each kernel tap is a convolution.

    .. math:: s_{ij,h} = -α_h \\, ‖δ_{ij} - Δ_h‖^2, \\qquad
        out_i = b + \\sum_h W_h \\sum_j \\mathrm{softmax}_j(s_{ij,h}) \\, x_j

    with the place δ of pixel j in the kernel over pixel i. Head h looks at the place Δ_h, the more sharply the
    larger α_h: the quadratic encoding of Cordonnier et al. As α grows each head attends to one pixel, and the
    layer is a convolution whose taps are the W_h (their theorem 1); at α = 0 it is a mean. Places and widths are
    parameters. `from_conv2d` gives the layer that computes the numbers of a convolution. O(pixels · taps · heads)
    scores; pixels outside the image are padded and the windows that fit are kept, as in `torch.nn.Conv2d`. A pixel
    that is not finite makes NaN of the outputs whose windows see it, and no others.

    Args:
        in_channels: channels of the images.
        out_channels: channels of the output.
        kernel_size: pixels of the window, an int or (height, width).
        heads: number of heads, one for each pixel of the window by default.
        padding: pixels added around the image, an int, (height, width), "same" or "valid".
        dilation: distance of neighbouring pixels of a window, an int or (height, width).
        groups: blocks of channels that do not mix.
        bias: add a vector b.
        padding_mode: "zeros", "reflect", "replicate" or "circular".

    Raises:
        ValueError: a number is out of range, channels cannot be shared by the groups, or a word is unknown.
        TypeError: a number is not an int.

    Example:
        >>> conv = torch.nn.Conv2d(3, 8, kernel_size=3, padding=1)
        >>> images = torch.randn(2, 3, 10, 12)
        >>> torch.allclose(ConvolutionalAttention.from_conv2d(conv)(images), conv(images), atol=1e-5)
        True

    Cordonnier et al., `On the Relationship between Self-Attention and Convolutional Layers
    <https://arxiv.org/abs/1911.03584>`_, 2020.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        *,
        heads: int | None = None,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__()
        in_channels = checked_count("`in_channels`", in_channels, 1)
        out_channels = checked_count("`out_channels`", out_channels, 1)
        groups = checked_count("`groups`", groups, 1)
        height, width = size = checked_pair("kernel_size", kernel_size)
        heads = height * width if heads is None else checked_count("`heads`", heads, 1)
        if isinstance(padding, str):
            check_word("`padding`", padding, ("same", "valid"))
        check_word("`padding_mode`", padding_mode, ("zeros", "reflect", "replicate", "circular"))
        # The convolution checks how the channels divide and reads "same"; on the meta device it holds no numbers.
        form = torch.nn.Conv2d(
            in_channels,
            out_channels,
            size,
            padding=padding if isinstance(padding, str) else checked_pair("padding", padding, 0),
            dilation=checked_pair("dilation", dilation),
            groups=groups,
            bias=bias,
            padding_mode=padding_mode,  # pyright: ignore[reportArgumentType]
            device="meta",
        )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.dilation, self.padding_mode = form.kernel_size, form.dilation, padding_mode
        self._padding = form._reversed_padding_repeated_twice
        self.center = torch.nn.Parameter(torch.empty(heads, 2))
        self.alpha = torch.nn.Parameter(torch.empty(heads))
        self.weight = torch.nn.Parameter(torch.empty(out_channels, in_channels // groups, heads))
        self.bias = torch.nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start from heads all over the window, as wide as the distance of pixels, and a random linear map."""
        with torch.no_grad():
            middle = torch.tensor([(n - 1) / 2 for n in self.kernel_size])
            self.center.copy_(middle + torch.randn_like(self.center) * middle / 2)
            self.alpha.fill_(1.0)
        torch.nn.init.kaiming_uniform_(self.weight.flatten(1), a=5**0.5)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    @staticmethod
    def from_conv2d(conv: torch.nn.Conv2d) -> ConvolutionalAttention:
        """The layer that computes what a convolution does: every head looks at one tap of the kernel.

        Args:
            conv: any kernel, padding, dilation, groups, with or without bias, and a stride of 1.

        Returns:
            The layer, with a copy of the weights, on the device and in the dtype of `conv`.

        Raises:
            TypeError: `conv` is not a `torch.nn.Conv2d`, or computes something of its own, or is not real.
            ValueError: its stride is not 1, or it has no weights yet.

        Example:
            >>> conv = torch.nn.Conv2d(3, 8, kernel_size=(1, 3), dilation=2)
            >>> ConvolutionalAttention.from_conv2d(conv)
            ConvolutionalAttention(3, 8, kernel_size=(1, 3), heads=3, dilation=(2, 2), groups=1)
        """
        own = isinstance(conv, torch.nn.Conv2d) and type(conv).forward is torch.nn.Conv2d.forward
        if not own or "forward" in vars(conv):
            raise TypeError(
                f"`conv` must be a torch.nn.Conv2d with the forward of that class, got {type(conv).__name__}."
            )
        if torch.nn.parameter.is_lazy(conv.weight):
            raise ValueError(
                "`conv` must have weights, got a LazyConv2d that was not called yet. Call it once."
            )
        if conv._forward_hooks or conv._forward_pre_hooks:
            raise TypeError("`conv` must have no forward hooks, which may change its numbers. Remove them.")
        if not conv.weight.is_floating_point():
            raise TypeError(f"`conv` must have real floating point weights, got {conv.weight.dtype}.")
        if tuple(conv.stride) != (1, 1):
            raise ValueError(
                f"`conv` must have a stride of 1, got {conv.stride}. Take every s-th output instead."
            )
        layer = ConvolutionalAttention(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            bias=conv.bias is not None,
            padding_mode=conv.padding_mode,
        ).to(conv.weight.device, conv.weight.dtype)
        with torch.no_grad():
            layer.center.copy_(layer._taps())
            layer.alpha.fill_(_SHARP)
            layer.weight.copy_(conv.weight.flatten(2))
            if layer.bias is not None and conv.bias is not None:
                layer.bias.copy_(conv.bias)
        return layer.train(conv.training)

    def forward(self, images: Float[Tensor, "*batch channels height width"]) -> Tensor:
        """Images in, images out, as `Conv2d`.

        Args:
            images: ``[B, in_channels, H, W]`` or ``[in_channels, H, W]``.

        Returns:
            ``[B, out_channels, H', W']`` or without B: the padded size less what the dilated kernel spans beside one
            pixel.

        Raises:
            ValueError: images of another shape or on another device, or smaller than the kernel after padding.
            TypeError: images of another dtype than the layer; under autocast, not floating point.
            RuntimeError: "reflect" or "circular" padding that is too wide for the images, as in `Conv2d`.
        """
        dtype = self.weight.dtype
        if not isinstance(images, Tensor) or images.layout is not torch.strided:
            got = images.layout if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"`images` must be a dense {dtype} tensor, got {got}.")
        check_one_device("`images`", images.device, "the layer's weights", self.weight.device)
        autocast = autocast_dtype(images.device.type)
        if autocast is not None and images.is_floating_point() and torch.float64 not in (images.dtype, dtype):
            dtype = autocast  # which leaves float64 alone, as in a convolution
            images = images.to(dtype)
        if images.dtype != dtype:
            raise TypeError(f"`images` must be a {dtype} tensor as the layer's weights, got {images.dtype}.")
        if images.dim() not in (3, 4) or images.size(-3) != self.in_channels:
            raise ValueError(
                f"`images` must have shape [batch, {self.in_channels}, height, width] or without batch, got"
                f" {list(images.shape)}."
            )
        batched = images if images.dim() == 4 else images.unsqueeze(0)
        if any(self._padding):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            batched = F.pad(batched, self._padding, mode=mode)
        shape = (batched.size(-2), batched.size(-1))
        span = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size)]
        height, width = shape[0] - span[0], shape[1] - span[1]
        if height < 1 or width < 1:
            raise ValueError(
                f"`images` must be at least as large as the kernel, {[s + 1 for s in span]} after padding, got"
                f" {list(shape)}."
            )
        # A window starts at its query: windows cut off at the far border are those that do not fit.
        mean = self._attend(batched, shape)[:, :height, :width]
        mean = mean.unflatten(-1, (self.groups, -1))
        weight = self.weight.unflatten(0, (self.groups, -1))
        out = torch.einsum("byxhgc,gdch->bgdyx", mean, weight).flatten(1, 2)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).view(-1, 1, 1)
        return out if images.dim() == 4 else out.squeeze(0)

    def _attend(self, images: Tensor, shape: tuple[int, int]) -> Tensor:
        """What each head sees at each pixel, ``[B, H, W, heads, channels]``."""
        batch, channels = images.shape[:2]
        heads = self.alpha.numel()
        distance = (self._taps().unsqueeze(1) - self.center).square().sum(-1)  # [taps, heads]
        scores = -self.alpha * distance
        # A grid graph has one dilation for all axes: pixels between the taps of the other axis are removed.
        step = math.gcd(*self.dilation)
        stride = [d // step for d in self.dilation]
        reach = [s * (k - 1) + 1 for s, k in zip(stride, self.kernel_size)]
        if stride != [1, 1]:
            window = scores.new_full((*reach, heads), -torch.inf)
            window[:: stride[0], :: stride[1]] = scores.view(*self.kernel_size, heads)
            scores = window.flatten(0, 1)
        graph = GridGraph(shape, [(0, n - 1) for n in reach], dilation=step).to(images.device)
        value = images.flatten(2).transpose(1, 2).unsqueeze(2)
        query = value.new_zeros(batch, value.size(1), heads, 1)
        key = value.new_zeros(batch, value.size(1), 1, 1)
        out: Any = graph_attention(query, key, value, graph, bias=scores.unsqueeze(0))
        return out.view(batch, *shape, heads, channels)

    def _taps(self) -> Tensor:
        """Places (row, column) of the kernel's taps, ``[taps, 2]``."""
        places = [torch.arange(n, device=self.center.device) for n in self.kernel_size]
        return torch.cartesian_prod(*places).to(self.center.dtype)

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            "ConvolutionalAttention: the fused operator has no TorchScript; use torch.compile or torch.export."
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size},"
            f" heads={self.alpha.numel()}, dilation={self.dilation}, groups={self.groups}"
        )


def checked_pair(name: str, x: Any, least: int = 1) -> tuple[int, int]:
    """A number for both axes, or one for each: (height, width)."""
    sizes: Any = x if isinstance(x, (tuple, list)) else (x, x)
    if len(sizes) != 2:
        raise ValueError(f"`{name}` must be an int or a pair (height, width) of them, got {x!r}.")
    return checked_count(f"`{name}`", sizes[0], least), checked_count(f"`{name}`", sizes[1], least)
