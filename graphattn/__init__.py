"""graphattn: attention restricted to the edges of a graph."""

from graphattn.attention import attention_weights, graph_attention
from graphattn.graph import Graph, SparseGraph, as_graph, expander_graph, global_graph, union

__all__ = [
    "Graph",
    "SparseGraph",
    "as_graph",
    "attention_weights",
    "expander_graph",
    "global_graph",
    "graph_attention",
    "union",
]
