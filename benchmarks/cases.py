"""The graphs that are measured, by name: real ones from `GRAPHATTN_DATA`, others from a seed or rule."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.io import read_npz, read_planetoid_data, read_tu_data
from torch_geometric.utils import to_undirected

from graphattn import CompleteGraph, Graph, GridGraph, WindowGraph

if TYPE_CHECKING:
    from collections.abc import Callable


class EdgeList(NamedTuple):
    """A graph as data sets have it; its sizes have the names that they have in a `Graph`."""

    edge_index: Tensor
    num_nodes: int

    @property
    def num_queries(self) -> int:
        return self.num_nodes

    @property
    def num_keys(self) -> int:
        return self.num_nodes

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)


class Case(NamedTuple):
    """How to get a graph, and the shape it is measured with unless another is asked for."""

    build: Callable[[], EdgeList | Graph]
    heads: int = 8
    dim: int = 16
    leading: tuple[int, ...] = ()  # before the nodes


def _raw(*parts: str) -> Path:
    """A raw file or folder under `GRAPHATTN_DATA`; FileNotFoundError naming it if it is not there."""
    root = os.environ.get("GRAPHATTN_DATA")
    path = Path(root or "GRAPHATTN_DATA", *parts)
    if root is None or not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: set GRAPHATTN_DATA to the folder that holds {Path(*parts)}."
        )
    return path


def _planetoid(name: str) -> EdgeList:
    data = read_planetoid_data(str(_raw("planetoid", name, "raw")), name.lower())
    return EdgeList(data.edge_index, data.num_nodes)


def _tolokers() -> EdgeList:
    with np.load(_raw("heterophilous", "tolokers", "raw", "tolokers.npz")) as raw:
        edges, num_nodes = torch.from_numpy(raw["edges"]).long(), len(raw["node_labels"])
    return EdgeList(to_undirected(edges.t(), num_nodes=num_nodes), num_nodes)


def _computers() -> EdgeList:
    data = read_npz(str(_raw("amazon", "Computers", "raw", "amazon_electronics_computers.npz")))
    return EdgeList(data.edge_index, data.num_nodes)


def _large_graph(name: str) -> EdgeList:
    with np.load(_raw("large_graphs", f"{name}.npz")) as raw:
        edges = torch.from_numpy(np.stack([raw["row"], raw["col"]])).long()
        num_nodes = int(raw["num_nodes"])
    return EdgeList(to_undirected(edges, num_nodes=num_nodes), num_nodes)


def molecules(count: int = 512) -> Batch:
    """One mini-batch: `count` molecules drawn from the 188 of MUTAG."""
    data, slices, _ = read_tu_data(str(_raw("tudataset", "MUTAG", "raw")), "MUTAG")
    nodes, edges = slices["x"].diff(), slices["edge_index"]
    one_each = [
        Data(edge_index=data.edge_index[:, edges[i] : edges[i + 1]], num_nodes=int(nodes[i]))
        for i in range(len(nodes))
    ]
    drawn = np.random.default_rng(0).integers(len(one_each), size=count)
    return Batch.from_data_list([one_each[i] for i in drawn])


def _molecules() -> EdgeList:
    batch = molecules()
    return EdgeList(batch.edge_index, batch.num_nodes)


def power_law(num_nodes: int, num_edges: int, *, seed: int = 0) -> EdgeList:
    """A citation-like graph: each undirected edge joins a uniform node to one of power-law degree.

    The r-th most cited node is drawn with probability ∝ r^-0.6 and node ids are shuffled, so the rows that a
    query reads lie anywhere in memory. `num_edges` counts directed edges, every pair is there both ways.
    """
    rng = np.random.default_rng(seed)
    half = num_edges // 2
    # inverse of the cumulative distribution (r / N)^0.4
    rank = (num_nodes * rng.random(half) ** 2.5).astype(np.int64)
    cited = rng.permutation(num_nodes)[rank]
    citing = rng.integers(num_nodes, size=half)
    edge_index = np.empty((2, 2 * half), dtype=np.int64)
    edge_index[0, :half], edge_index[1, :half] = citing, cited
    edge_index[0, half:], edge_index[1, half:] = cited, citing
    return EdgeList(torch.from_numpy(edge_index), num_nodes)


def ragged(count: int, least: int, most: int, *, seed: int = 0) -> CompleteGraph:
    """A mini-batch of `count` complete graphs of `least` to `most` nodes, all sizes equally likely."""
    sizes = torch.randint(least, most + 1, (count,), generator=torch.Generator().manual_seed(seed))
    return CompleteGraph.from_ptr(torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))


SPARSE: dict[str, Case] = {
    "molecules": Case(_molecules),
    "cora": Case(lambda: _planetoid("Cora")),
    "pubmed": Case(lambda: _planetoid("PubMed")),
    "computers": Case(_computers),
    "github_musae": Case(lambda: _large_graph("github_musae")),
    "tolokers": Case(_tolokers),
    "arxiv-like": Case(lambda: power_law(169_343, 2_400_000)),
    "road_FLA": Case(lambda: _large_graph("road_FLA")),
    # Runs only when asked for, and is meant for 4 heads of 16: nothing edge-wise fits in memory here.
    "large": Case(lambda: power_law(2_000_000, 100_000_000)),
}
STRUCTURED: dict[str, Case] = {
    "full_512": Case(lambda: CompleteGraph(512), dim=64),
    "full_1024": Case(lambda: CompleteGraph(1024), dim=64),
    "full_2048": Case(lambda: CompleteGraph(2048), dim=64),
    "full_4096": Case(lambda: CompleteGraph(4096), dim=64),
    "full_128x50": Case(lambda: CompleteGraph(50), 4, 16, (128,)),  # digits of 28 × 28 in patches of 4
    "full_16x197": Case(lambda: CompleteGraph(197), 12, 64, (16,)),  # images of 224 × 224 in patches of 16
    "window_8192_128": Case(lambda: WindowGraph(8192, 128), dim=64),
    "window_65536_4": Case(lambda: WindowGraph(65_536, 4), dim=64),
    "window_65536_16": Case(lambda: WindowGraph(65_536, 16), dim=64),
    "window_65536_64": Case(lambda: WindowGraph(65_536, 64), dim=64),
    "window_65536_256": Case(lambda: WindowGraph(65_536, 256), dim=64),
    "grid_64x64_7": Case(lambda: GridGraph((64, 64), 3), dim=32),
    "ragged_256_10-60": Case(lambda: ragged(256, 10, 60)),
    "ragged_1024_5-500": Case(lambda: ragged(1024, 5, 500)),
}
CASES = SPARSE | STRUCTURED
GROUPS = {"sparse": [name for name in SPARSE if name != "large"], "structured": list(STRUCTURED)}
