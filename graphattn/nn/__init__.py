"""Layers that put graph attention into PyTorch and PyTorch Geometric models."""

from graphattn.nn.conv import TransformerConv

__all__ = ["TransformerConv"]
