"""Layers that put graph attention into PyTorch and PyTorch Geometric models."""

from graphattn.nn.attention import GraphMultiheadAttention
from graphattn.nn.conv import TransformerConv
from graphattn.nn.transformer import GPSConv, GraphTransformer, GraphTransformerLayer
from graphattn.nn.vision import VisionTransformer

__all__ = [
    "GPSConv",
    "GraphMultiheadAttention",
    "GraphTransformer",
    "GraphTransformerLayer",
    "TransformerConv",
    "VisionTransformer",
]
