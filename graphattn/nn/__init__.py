"""Layers that put graph attention into PyTorch and PyTorch Geometric models."""

from graphattn.nn.attention import GraphMultiheadAttention
from graphattn.nn.conv import TransformerConv
from graphattn.nn.convolution import ConvolutionalAttention
from graphattn.nn.encodings import ContinuousEncoding, LearnedEncoding, RelativeBias, RotaryEncoding
from graphattn.nn.transformer import GPSConv, GraphTransformer, GraphTransformerLayer
from graphattn.nn.vision import VisionTransformer

__all__ = [
    "ContinuousEncoding",
    "ConvolutionalAttention",
    "GPSConv",
    "GraphMultiheadAttention",
    "GraphTransformer",
    "GraphTransformerLayer",
    "LearnedEncoding",
    "RelativeBias",
    "RotaryEncoding",
    "TransformerConv",
    "VisionTransformer",
]
