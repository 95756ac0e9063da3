"""Positional encodings as PyG transforms, which attach them to a `Data`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from graphattn.encodings import laplacian_eigenvectors, random_walk, sinusoidal
from graphattn.graph import Graph, as_graph, checked_count


@functional_transform("add_laplacian_eigenvectors")
class AddLaplacianEigenvectorPE(BaseTransform):
    """Attaches the first k non-constant eigenvectors of the graph's Laplacian, `[nodes, k]`.

    See `graphattn.encodings.laplacian_eigenvectors`: symmetric normalised, every null vector left out, zeros
    where a graph has fewer than k. Edges are those of the data, weighted by `edge_weight` where there is one,
    whatever graph a model attends on. A `Batch` is encoded graph by graph.

    Args:
        k: number of eigenvectors.
        attr_name: attribute to write, or None to concatenate to `data.x`.
        random_sign: draw the sign of each eigenvector anew on every call, as augmentation in training.

    Raises:
        ValueError: `k` is negative, `attr_name` taken, or the data has no edges to look at.
        TypeError: `k` is not an int, `attr_name` neither a str nor None, `random_sign` not a bool, the data not a
            `Data`, or `x` not dense floating point.

    Example:
        >>> data = Data(x=torch.zeros(2, 3), edge_index=torch.tensor([[0, 1], [1, 0]]))
        >>> AddLaplacianEigenvectorPE(2)(data).laplacian_eigenvector_pe
        tensor([[ 0.7071,  0.0000],
                [-0.7071,  0.0000]])

    Dwivedi et al., `Benchmarking Graph Neural Networks <https://arxiv.org/abs/2003.00982>`_, 2020.
    """

    def __init__(
        self, k: int, attr_name: str | None = "laplacian_eigenvector_pe", *, random_sign: bool = False
    ) -> None:
        self.k = checked_count("`k`", k)
        self.attr_name = _checked_name(attr_name)
        if not isinstance(random_sign, bool):
            raise TypeError(f"`random_sign` must be a bool, got {random_sign!r}.")
        self.random_sign = random_sign

    def forward(self, data: Data) -> Data:
        def encode(data: Data) -> Tensor:
            graph, edge_weight = _structure(data)
            return laplacian_eigenvectors(
                graph, self.k, edge_weight=edge_weight, random_sign=self.random_sign
            )

        return _attach(data, encode, self.attr_name)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(k={self.k}, attr_name={self.attr_name!r}, random_sign={self.random_sign})"
        )


@functional_transform("add_random_walks")
class AddRandomWalkPE(BaseTransform):
    """Attaches the probabilities that a random walk is back after 1, 2, ... steps, `[nodes, walk_length]`.

    See `graphattn.encodings.random_walk`: parallel edges count each, rows of nodes without outgoing edges are
    0. Edges are those of the data, weighted by `edge_weight` where there is one, whatever graph a model
    attends on.

    Args:
        walk_length: number of steps.
        attr_name: attribute to write, or None to concatenate to `data.x`.

    Raises:
        ValueError: `walk_length` is negative, `attr_name` taken, or the data has no edges to look at.
        TypeError: `walk_length` is not an int, `attr_name` neither a str nor None, the data not a `Data`, or `x` not
            dense floating point.

    Example:
        >>> data = Data(x=torch.zeros(2, 3), edge_index=torch.tensor([[0, 1], [1, 0]]))
        >>> AddRandomWalkPE(2)(data).random_walk_pe
        tensor([[0., 1.],
                [0., 1.]])

    Dwivedi et al., `Graph Neural Networks with Learnable Structural and Positional Representations
    <https://arxiv.org/abs/2110.07875>`_, 2022.
    """

    def __init__(self, walk_length: int, attr_name: str | None = "random_walk_pe") -> None:
        self.walk_length = checked_count("`walk_length`", walk_length)
        self.attr_name = _checked_name(attr_name)

    def forward(self, data: Data) -> Data:
        def encode(data: Data) -> Tensor:
            graph, edge_weight = _structure(data)
            return random_walk(graph, self.walk_length, edge_weight=edge_weight)

        return _attach(data, encode, self.attr_name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(walk_length={self.walk_length}, attr_name={self.attr_name!r})"


@functional_transform("add_sinusoidal")
class AddSinusoidalPE(BaseTransform):
    """Attaches sines and cosines of `data.pos`, or of the order of the nodes where there is none.

    See `graphattn.encodings.sinusoidal`. In a `Batch` nodes are counted within their graph.

    Args:
        dim: number of features.
        attr_name: attribute to write, or None to concatenate to `data.x`.

    Raises:
        ValueError: `dim` is negative, `attr_name` taken, `pos` is not finite or of another shape than `[nodes]` or
            `[nodes, axes]`, or the data does not say how many nodes it has.
        TypeError: `dim` is not an int, `attr_name` neither a str nor None, the data not a `Data`, or `x` not dense
            floating point.

    Example:
        >>> AddSinusoidalPE(2)(Data(num_nodes=2)).sinusoidal_pe
        tensor([[0.0000, 1.0000],
                [0.8415, 0.5403]])

    Vaswani et al., `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
    """

    def __init__(self, dim: int, attr_name: str | None = "sinusoidal_pe") -> None:
        self.dim = checked_count("`dim`", dim)
        self.attr_name = _checked_name(attr_name)

    def forward(self, data: Data) -> Data:
        def encode(data: Data) -> Tensor:
            if data.pos is not None:
                nodes = data.x.size(0) if isinstance(data.x, Tensor) else data.num_nodes
                if nodes is not None and isinstance(data.pos, Tensor) and data.pos.shape[:1] != (nodes,):
                    raise ValueError(f"`data.pos` must have {nodes} rows, got {list(data.pos.shape)}.")
                return sinusoidal(data.pos, self.dim)
            if data.num_nodes is None:
                raise ValueError(f"`data` must hold `pos` or say its `num_nodes`, got {data}.")
            return sinusoidal(torch.arange(data.num_nodes, device=_device(data)), self.dim)

        return _attach(data, encode, self.attr_name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={self.dim}, attr_name={self.attr_name!r})"


def _structure(data: Data) -> tuple[Graph, Tensor | None]:
    """The edges that the data stores, and their weights."""
    graph = as_graph(data)
    weight = data.get("edge_weight")
    if weight is not None and (not isinstance(weight, Tensor) or weight.numel() != graph.num_edges):
        got = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"`data.edge_weight` must have shape [{graph.num_edges}], got {got}.")
    if weight is None and data.edge_index is None:  # an adjacency stores its weights
        adjacency: Any = data.get("adj_t")
        if not isinstance(adjacency, Tensor):
            weight = adjacency.storage.value()
        else:
            weight = adjacency._values() if adjacency.layout == torch.sparse_coo else adjacency.values()
    if weight is None or (weight.dim() > 1 and weight.size(1) != 1):
        return graph, None
    weight = weight.reshape(-1)
    return graph, weight if weight.is_floating_point() else weight.to(torch.get_default_dtype())


def _attach(data: Data, encode: Callable[[Data], Tensor], attr_name: str | None) -> Data:
    """Write an encoding to `data`, which PyG has copied, or concatenate it to the features."""
    if not isinstance(data, Data):
        raise TypeError(f"`data` must be a PyG Data, got {type(data).__name__}.")
    x = data.x
    if attr_name is None and x is not None:
        # Written into integers an encoding would be cut to zeros.
        if not isinstance(x, Tensor) or x.layout is not torch.strided or not x.is_floating_point():
            got = f"{x.layout} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"`data.x` must be a dense floating point tensor to concatenate an encoding to it, got {got}."
                " Convert it, or give the encoding an `attr_name` of its own."
            )
        if x.dim() not in (1, 2):
            raise ValueError(f"`data.x` must have shape [nodes, channels], got {list(x.shape)}.")
    encoding = _by_graph(data, encode) if data.batch is not None else encode(data)
    if attr_name is not None:
        held = data.get(attr_name)
        if held is not None and not (isinstance(held, Tensor) and held.shape[:1] == encoding.shape[:1]):
            got = f"shape {list(held.shape)}" if isinstance(held, Tensor) else type(held).__name__
            raise ValueError(
                f"`attr_name` must not name what is no encoding, but `data.{attr_name}` has {got}."
                " Give the encoding another name."
            )
        data[attr_name] = encoding
    elif x is None:
        data.x = encoding
    else:
        x = x.unsqueeze(1) if x.dim() == 1 else x
        data.x = torch.cat([x, encoding.to(x.device, x.dtype)], dim=1)
    _keep_separable(data, attr_name or "x")
    return data


def _keep_separable(data: Data, attr_name: str) -> None:
    """Tell a collated batch where the encodings of its graphs are, so that they are theirs when it is taken apart."""
    slices, batch = getattr(data, "_slice_dict", None), data.batch
    if slices is None or batch is None or (batch.diff() < 0).any():
        return
    counts = batch.bincount(minlength=data.num_graphs)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).cpu()
    # The dictionaries are shared with the batch that was given.
    data._slice_dict = {**slices, attr_name: starts}
    data._inc_dict = {**data._inc_dict, attr_name: torch.zeros(data.num_graphs, dtype=torch.int64)}


def _by_graph(data: Data, encode: Callable[[Data], Tensor]) -> Tensor:
    """Encode each graph of a batch alone.

    As the batch is now: its own `to_data_list` cuts edges where the graphs had them when they were collated.
    """
    owner: Any = data.batch
    if not isinstance(owner, Tensor) or owner.dtype != torch.int64 or owner.shape != (data.num_nodes,):
        got = f"{owner.dtype} {list(owner.shape)}" if isinstance(owner, Tensor) else type(owner).__name__
        raise ValueError(f"`data.batch` must be an int64 tensor of shape [{data.num_nodes}], got {got}.")
    if owner.numel() and int(owner.min()) < 0:
        raise ValueError(f"`data.batch` must not be negative, got {int(owner.min())}.")
    nodes, sizes = owner.argsort(stable=True), owner.bincount().tolist()
    graphs = [Data(num_nodes=size, x=torch.empty(size, 0, device=owner.device)) for size in sizes]
    if data.edge_index is not None or data.get("adj_t") is not None:
        graph, weight = _structure(data)
        edge_index = graph.to_edge_index()
        source, target = owner[edge_index]
        if not torch.equal(source, target):
            raise ValueError("`data` must not have edges between the graphs of its `batch`.")
        starts = nodes.new_tensor([0, *sizes]).cumsum(0)
        place = torch.empty_like(nodes)  # of a node in its graph
        place[nodes] = torch.arange(len(nodes), device=nodes.device) - starts[owner[nodes]]
        counts, order = source.bincount(minlength=len(sizes)).tolist(), source.argsort(stable=True)
        for one, edges in zip(graphs, order.split(counts)):
            one.edge_index = place[edge_index[:, edges]]
            one.edge_weight = None if weight is None else weight[edges]
    if data.pos is not None:
        for one, own in zip(graphs, nodes.split(sizes)):
            one.pos = data.pos[own]
    encodings = [encode(one) for one in graphs] or [encode(data)]
    encoding = torch.cat(encodings)
    return torch.empty_like(encoding).index_copy(0, nodes, encoding)


def _device(data: Data) -> torch.device | None:
    held = next((x for x in data.to_dict().values() if isinstance(x, Tensor)), None)
    return None if held is None else held.device


def _checked_name(attr_name: str | None) -> str | None:
    """A name under which PyG keeps, concatenates and takes apart a row for each node."""
    if attr_name is None:
        return None
    if not isinstance(attr_name, str):
        raise TypeError(f"`attr_name` must be a str or None, got {type(attr_name).__name__}.")
    data, row = Data(num_nodes=1), torch.zeros(1, 1)
    per_node = data.__cat_dim__(attr_name, row) == 0 and data.__inc__(attr_name, row) == 0
    taken = hasattr(Data, attr_name) or attr_name in ("adj", "adj_t", "ptr")
    if not attr_name or attr_name.startswith("_") or taken or not per_node:
        raise ValueError(
            f"`attr_name` must be a name that PyG gives no meaning of its own, got {attr_name!r}."
            " None concatenates to `data.x`."
        )
    return attr_name
