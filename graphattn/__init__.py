"""graphattn: attention restricted to the edges of a graph."""

from graphattn import nn
from graphattn.attention import attention_weights, graph_attention
from graphattn.graph import (
    CompleteGraph,
    Graph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    as_graph,
    expander_graph,
    global_graph,
    union,
)
from graphattn.nn.conv import accelerate

__all__ = [
    "CompleteGraph",
    "Graph",
    "GridGraph",
    "SparseGraph",
    "WindowGraph",
    "accelerate",
    "as_graph",
    "attention_weights",
    "expander_graph",
    "global_graph",
    "graph_attention",
    "nn",
    "union",
]
