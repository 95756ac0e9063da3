"""graphattn: attention restricted to the edges of a graph."""

from graphattn import encodings, nn, transforms
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
    "encodings",
    "expander_graph",
    "global_graph",
    "graph_attention",
    "nn",
    "transforms",
    "union",
]
