"""The graphs that are measured, by name: real ones from `GRAPHATTN_DATA`, synthetic ones from a seed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.io import read_npz, read_planetoid_data, read_tu_data
from torch_geometric.utils import to_undirected

if TYPE_CHECKING:
    from collections.abc import Callable


def _raw(*parts: str) -> Path:
    """A raw file or folder under `GRAPHATTN_DATA`; FileNotFoundError naming it if it is not there."""
    root = os.environ.get("GRAPHATTN_DATA")
    path = Path(root or "GRAPHATTN_DATA", *parts)
    if root is None or not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: set GRAPHATTN_DATA to the folder that holds {Path(*parts)}."
        )
    return path


def _planetoid(name: str) -> tuple[Tensor, int]:
    data = read_planetoid_data(str(_raw("planetoid", name, "raw")), name.lower())
    return data.edge_index, data.num_nodes


def _tolokers() -> tuple[Tensor, int]:
    with np.load(_raw("heterophilous", "tolokers", "raw", "tolokers.npz")) as raw:
        edges, num_nodes = torch.from_numpy(raw["edges"]).long(), len(raw["node_labels"])
    return to_undirected(edges.t(), num_nodes=num_nodes), num_nodes


def _computers() -> tuple[Tensor, int]:
    data = read_npz(str(_raw("amazon", "Computers", "raw", "amazon_electronics_computers.npz")))
    return data.edge_index, data.num_nodes


def _large_graph(name: str) -> tuple[Tensor, int]:
    with np.load(_raw("large_graphs", f"{name}.npz")) as raw:
        edges = torch.from_numpy(np.stack([raw["row"], raw["col"]])).long()
        num_nodes = int(raw["num_nodes"])
    return to_undirected(edges, num_nodes=num_nodes), num_nodes


def _molecules(count: int = 512) -> tuple[Tensor, int]:
    """One mini-batch: `count` molecules drawn from the 188 of MUTAG."""
    data, slices, _ = read_tu_data(str(_raw("tudataset", "MUTAG", "raw")), "MUTAG")
    nodes, edges = slices["x"].diff(), slices["edge_index"]
    molecules = [
        Data(edge_index=data.edge_index[:, edges[i] : edges[i + 1]], num_nodes=int(nodes[i]))
        for i in range(len(nodes))
    ]
    drawn = np.random.default_rng(0).integers(len(molecules), size=count)
    batch = Batch.from_data_list([molecules[i] for i in drawn])
    return batch.edge_index, batch.num_nodes


def power_law(num_nodes: int, num_edges: int, *, seed: int = 0) -> tuple[Tensor, int]:
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
    return torch.from_numpy(edge_index), num_nodes


CASES: dict[str, Callable[[], tuple[Tensor, int]]] = {
    "molecules": _molecules,
    "cora": lambda: _planetoid("Cora"),
    "pubmed": lambda: _planetoid("PubMed"),
    "computers": _computers,
    "github_musae": lambda: _large_graph("github_musae"),
    "tolokers": _tolokers,
    "arxiv-like": lambda: power_law(169_343, 2_400_000),
    "road_FLA": lambda: _large_graph("road_FLA"),
    # Runs only when asked for, and is meant for 4 heads of 16: nothing edge-wise fits in memory here.
    "large": lambda: power_law(2_000_000, 100_000_000),
}
DEFAULT_CASES = [name for name in CASES if name != "large"]
