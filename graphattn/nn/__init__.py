"""Layers that put graph attention into PyTorch and PyTorch Geometric models."""

from graphattn.nn.conv import TransformerConv
from graphattn.nn.convolution import ConvolutionalAttention
from graphattn.nn.encodings import ContinuousEncoding, LearnedEncoding, RelativeBias, RotaryEncoding

__all__ = [
    "ContinuousEncoding",
    "ConvolutionalAttention",
    "LearnedEncoding",
    "RelativeBias",
    "RotaryEncoding",
    "TransformerConv",
]
