"""Which query may attend to which key: graphs as plain data, and the functions that build them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Sequence

    import networkx
    from jaxtyping import Bool, Int

_LIMIT = 2**31  # node and edge numbers are int32
_THREAD_EDGES = 50_000  # below this a second thread costs more than it saves
_CACHED_EDGES = 2**18  # an edge list below this stays in the cache while it is sorted
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Graph:
    """A set of edges, each from a key node (source) to a query node (target) that may attend to it.

    The common type of all graph kinds. Each kind is plain data; what is written here follows from its edges.
    """

    @property
    def num_queries(self) -> int:
        """Number of nodes that attend (targets, `edge_index[1]`)."""
        raise NotImplementedError

    @property
    def num_keys(self) -> int:
        """Number of nodes that are attended to (sources, `edge_index[0]`)."""
        raise NotImplementedError

    @property
    def num_edges(self) -> int:
        """Number of edges; parallel edges count each."""
        raise NotImplementedError

    @property
    def edge_shape(self) -> tuple[int, ...]:
        """Shape in which edge tensors (bias, weights) are laid out, heads excluded."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the graph's tensors are."""
        raise NotImplementedError

    def to(self, device: torch.device | str | int) -> Graph:
        """The same graph on `device`."""
        raise NotImplementedError

    def to_sparse(self) -> SparseGraph:
        """The same edges as a `SparseGraph`, in `to_edge_index()` order."""
        raise NotImplementedError

    def to_edge_index(self) -> Int[Tensor, "2 edges"]:
        """The edges as an int64 `edge_index` `[2, num_edges]`: keys in row 0, queries in row 1."""
        raise NotImplementedError

    def to_mask(self) -> Bool[Tensor, "queries keys"]:
        """The edges as a bool mask `[num_queries, num_keys]`, True where the query may attend to the key.

        Parallel edges fall together. Takes O(num_queries · num_keys) memory.
        """
        source, target = self.to_edge_index()
        mask = torch.zeros(self.num_queries, self.num_keys, dtype=torch.bool, device=self.device)
        mask[target, source] = True
        return mask

    def to_networkx(self) -> networkx.MultiDiGraph:
        """The edges as a `networkx.MultiDiGraph` on nodes `0..n-1`, directed key → query.

        The networkx key of an edge is its number in `to_edge_index()`, with which to find its weight.

        Raises:
            ValueError: keys and queries are not the same nodes (`num_keys != num_queries`).
        """
        import networkx

        if self.num_keys != self.num_queries:
            raise ValueError(
                f"to_networkx() needs keys and queries to be the same nodes, got {self.num_keys} keys and"
                f" {self.num_queries} queries. Use to_edge_index() for a bipartite graph."
            )
        G = networkx.MultiDiGraph()
        G.add_nodes_from(range(self.num_queries))
        for e, (j, i) in enumerate(self.to_edge_index().t().tolist()):
            G.add_edge(j, i, key=e)
        return G

    def __repr__(self) -> str:
        place = "" if self.device.type == "cpu" else f", device={str(self.device)!r}"
        return (
            f"{type(self).__name__}({self.num_keys} keys -> {self.num_queries} queries,"
            f" {self.num_edges} edges{place})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class SparseGraph(Graph):
    """Any set of edges, stored grouped by query (CSR) and grouped by key (its transpose).

    Build one with `as_graph` or a `from_` method, which check every id; the plain constructor checks nothing.
    Edge tensors (bias, edge features, attention weights) have one row per edge, in the caller's order, which
    is the order of `to_edge_index()`. Memory: 16 bytes for each edge, 8 for each key and each query.

    Args:
        rowptr: int64 `[num_queries + 1]`; the edges of query i are the positions `rowptr[i]:rowptr[i + 1]`.
        col: int32 `[num_edges]`, key of the edge at each of those positions.
        edge_id: int32 `[num_edges]`, the caller's number of that edge; ascending within a query.
        colptr: int64 `[num_keys + 1]`; the edges of key j are the positions `colptr[j]:colptr[j + 1]`.
        row: int32 `[num_edges]`, query of the edge at each of those positions.
        edge_id_t: int32 `[num_edges]`, the caller's number of that edge; ascending within a key.

    Example:
        >>> graph = SparseGraph.from_edge_index(torch.tensor([[1, 2, 3], [0, 0, 1]]), num_nodes=4)
        >>> graph
        SparseGraph(4 keys -> 4 queries, 3 edges)
        >>> graph.col[graph.rowptr[0] : graph.rowptr[1]].tolist()  # what query 0 attends to
        [1, 2]
    """

    # No name is a prefix of a later one: torch.export replaces them as text.
    rowptr: Tensor
    colptr: Tensor
    col: Tensor
    row: Tensor
    edge_id_t: Tensor
    edge_id: Tensor

    @staticmethod
    def from_edge_index(
        edge_index: Int[Tensor, "2 edges"],
        num_nodes: int | None = None,
        *,
        size: tuple[int, int] | None = None,
    ) -> SparseGraph:
        """Graph of an `edge_index`: edge e goes from key `edge_index[0, e]` to query `edge_index[1, e]`.

        Two stable counting sorts, O(E + N). The tensor is copied: later writes to it change nothing. This is
        the one constructor that also works inside compiled or exported code, there with `num_nodes` or `size`
        given; the ids are then checked when the code runs.

        Args:
            edge_index: integer `[2, E]` or PyG `EdgeIndex`, in any order; parallel edges and self-loops are
                kept. A `[2, 2]` tensor is read as this, never as two (source, target) rows.
            num_nodes: number of nodes when keys and queries are the same nodes. By default what an
                `EdgeIndex` says, else the highest id + 1, which loses isolated nodes at the end.
            size: `(num_keys, num_queries)` of a bipartite graph, instead of `num_nodes`.

        Returns:
            The graph, its edges in the order of `edge_index`.

        Raises:
            ValueError: `edge_index` has another shape or is not of integer type; sizes are negative, 2**31 or
                more, or disagree.
            TypeError: `edge_index` is not a tensor or a sparse one, `num_nodes` or an entry of `size` not an
                int.
            IndexError: an id is outside `[0, num_keys)` or `[0, num_queries)`.

        Example:
            >>> graph = SparseGraph.from_edge_index(torch.tensor([[0, 0, 2], [1, 1, 0]]), size=(3, 2))
            >>> graph.to_edge_index().tolist()
            [[0, 0, 2], [1, 1, 0]]
        """
        return _from_edges(edge_index, _given_size(num_nodes, size))

    @staticmethod
    def from_csr(
        rowptr: Int[Tensor, "queries+1"], col: Int[Tensor, "edges"], num_keys: int | None = None
    ) -> SparseGraph:
        """Graph of a CSR matrix whose rows are queries: query i attends to `col[rowptr[i]:rowptr[i + 1]]`.

        Args:
            rowptr: integer `[num_queries + 1]`, from 0 up to E, never falling.
            col: integer `[E]`, keys, in any order within a row, parallel edges kept.
            num_keys: number of keys; as many as queries by default.

        Returns:
            The graph, its edges in CSR order: edge e has key `col[e]`.

        Raises:
            ValueError: a shape or dtype is wrong, or `rowptr` does not rise from 0 to `len(col)`.
            IndexError: an id in `col` is outside `[0, num_keys)`.

        Example:
            >>> graph = SparseGraph.from_csr(torch.tensor([0, 2, 2, 3]), torch.tensor([2, 1, 0]))
            >>> graph.to_edge_index().tolist()
            [[2, 1, 0], [0, 0, 2]]
        """
        queries = _rows_of(rowptr, col, "rowptr", "col")
        num_queries = rowptr.numel() - 1
        size = (num_queries if num_keys is None else num_keys, num_queries)
        return SparseGraph.from_edge_index(torch.stack([col.long(), queries]), size=size)

    @staticmethod
    def from_mask(mask: Bool[Tensor, "queries keys"]) -> SparseGraph:
        """Graph of a bool mask `[num_queries, num_keys]`: True = the query may attend to the key.

        This is the polarity of `scaled_dot_product_attention`; invert the masks of `nn.MultiheadAttention`.

        Returns:
            The graph, its edges row by row of the mask, keys ascending.

        Raises:
            TypeError: `mask` is not a bool tensor, or a sparse one.
            ValueError: `mask` is not two-dimensional.

        Example:
            >>> SparseGraph.from_mask(torch.ones(2, 3, dtype=torch.bool).tril()).to_edge_index().tolist()
            [[0, 0, 1], [0, 1, 1]]
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(
                f"`mask` must be a bool tensor, True where a query may attend to a key, got {got}."
            )
        _check_dense("`mask`", mask)
        if mask.dim() != 2:
            raise ValueError(f"`mask` must have shape [num_queries, num_keys], got {list(mask.shape)}.")
        num_queries, num_keys = mask.shape
        return SparseGraph.from_edge_index(mask.nonzero().t().flip(0), size=(num_keys, num_queries))

    @staticmethod
    def from_networkx(G: networkx.Graph, nodelist: Sequence | None = None) -> SparseGraph:
        """Graph of a networkx graph: an edge u → v lets v attend to u; an undirected edge counts both ways.

        Node names may be anything; node and edge attributes are not looked at. Parallel edges of a multigraph
        are kept, an undirected self-loop is one edge.

        Args:
            G: any networkx graph, directed or not, multi or not.
            nodelist: the nodes in the order of their ids, `list(G)` by default. Nodes left out take their
                edges with them.

        Returns:
            The graph, its edges in the order of `G.to_directed().edges()`, as in PyG's `from_networkx`.

        Raises:
            TypeError: `G` is not a networkx graph.
            ValueError: `nodelist` names a node twice, or one that is not in `G`.

        Example:
            >>> import networkx
            >>> SparseGraph.from_networkx(networkx.Graph([("a", "b"), ("b", "b")])).to_edge_index().tolist()
            [[0, 1, 1], [1, 0, 1]]
        """
        import networkx

        if not isinstance(G, networkx.Graph):
            raise TypeError(f"`G` must be a networkx graph, got {type(G).__name__}.")
        nodes = list(G if nodelist is None else nodelist)
        number = {node: i for i, node in enumerate(nodes)}
        if len(number) != len(nodes):
            raise ValueError("`nodelist` must name every node once, got a repeated node.")
        if not all(node in G for node in nodes):
            raise ValueError(
                f"`nodelist` must hold nodes of `G`, got {next(n for n in nodes if n not in G)!r}."
            )
        edges = [
            (number[u], number[v])
            for u, neighbours in G.adjacency()
            for v, data in neighbours.items()
            if u in number and v in number
            for _ in range(len(data) if G.is_multigraph() else 1)
        ]
        edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()
        return SparseGraph.from_edge_index(edge_index, len(nodes))

    @staticmethod
    def from_scipy(A: Any) -> SparseGraph:
        """Graph of a SciPy sparse matrix or array `[num_queries, num_keys]`: entry (i, j) lets i attend to j.

        Every stored entry is an edge, whatever its value: stored zeros and duplicates too.

        Returns:
            The graph, its edges in the order of `A.tocoo()`, for CSR row by row.

        Raises:
            TypeError: `A` is not a SciPy sparse matrix or array.
            ValueError: `A` is not two-dimensional.

        Example:
            >>> import scipy.sparse
            >>> A = scipy.sparse.csr_array([[0, 1, 0], [1, 0, 1]])
            >>> SparseGraph.from_scipy(A)
            SparseGraph(3 keys -> 2 queries, 3 edges)
        """
        import scipy.sparse

        if not scipy.sparse.issparse(A):
            raise TypeError(f"`A` must be a scipy.sparse matrix or array, got {type(A).__name__}.")
        if A.ndim != 2:
            raise ValueError(f"`A` must have shape [num_queries, num_keys], got {list(A.shape)}.")
        A = A.tocoo()
        num_queries, num_keys = A.shape
        return SparseGraph.from_edge_index(
            torch.from_numpy(np.stack([A.col, A.row])), size=(num_keys, num_queries)
        )

    @property
    def num_queries(self) -> int:
        return self.rowptr.numel() - 1

    @property
    def num_keys(self) -> int:
        return self.colptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.col.numel()

    @property
    def edge_shape(self) -> tuple[int, ...]:
        return (self.num_edges,)

    @property
    def device(self) -> torch.device:
        return self.col.device

    def to(self, device: torch.device | str | int) -> SparseGraph:
        return SparseGraph(*(getattr(self, field.name).to(device=device) for field in fields(self)))

    def to_sparse(self) -> SparseGraph:
        return self

    def to_edge_index(self) -> Int[Tensor, "2 edges"]:
        edge_index = self.col.new_empty(2, self.num_edges, dtype=torch.int64)
        edge_index[0, self.edge_id] = self.col.long()
        edge_index[1, self.edge_id_t] = self.row.long()
        return edge_index


torch.export.register_dataclass(SparseGraph, serialized_type_name="graphattn.SparseGraph")
torch.serialization.add_safe_globals([SparseGraph])


def as_graph(
    x: Any,
    *,
    num_nodes: int | None = None,
    size: tuple[int, int] | None = None,
    flow: str = "source_to_target",
) -> Graph:
    """The graph that `x` stands for: a Graph, an `edge_index`, a sparse adjacency or a PyG `Data`.

    The graph of an `edge_index` tensor is kept as long as the tensor lives and handed out again while the
    same tensor comes unmodified, with the same sizes and flow, so that layers sort the edges once. Writes
    that autograd does not see (through `.data` or NumPy) are not noticed. Nothing is kept for inference
    tensors and inside compiled code.

    Args:
        x: one of
            a Graph, returned as it is;
            an `edge_index` or PyG `EdgeIndex`, as in `SparseGraph.from_edge_index`;
            a `torch.sparse` COO, CSR or CSC tensor or `torch_sparse.SparseTensor` adjacency, rows = queries
            (PyG's `adj_t`): every stored entry is an edge, in the order of the stored values;
            a PyG `Data` with `edge_index` or `adj_t`.
        num_nodes: number of nodes, when keys and queries are the same.
        size: `(num_keys, num_queries)`, instead of `num_nodes`. Neither is needed where `x` knows its sizes.
        flow: `"target_to_source"` reads an `edge_index` backwards, as in PyG: row 0 holds the queries.

    Returns:
        The graph.

    Raises:
        TypeError: `x` is none of these.
        ValueError: sizes disagree, or `flow` is `"target_to_source"` for anything but an `edge_index`; and as
            `SparseGraph.from_edge_index`.
        IndexError: an id is out of range.

    Example:
        >>> edge_index = torch.tensor([[0, 1], [1, 2]])
        >>> as_graph(edge_index, num_nodes=3)
        SparseGraph(3 keys -> 3 queries, 2 edges)
        >>> as_graph(edge_index, num_nodes=3) is as_graph(edge_index, num_nodes=3)
        True
    """
    if flow not in ("source_to_target", "target_to_source"):
        raise ValueError(f'`flow` must be "source_to_target" or "target_to_source", got {flow!r}.')
    backwards = flow == "target_to_source"
    if isinstance(x, Tensor) and x.layout is torch.strided:
        return _reused(x, _given_size(num_nodes, size), backwards)

    from torch_geometric.data import Data
    from torch_geometric.typing import SparseTensor  # pyright: ignore[reportAttributeAccessIssue]

    if isinstance(x, Data):
        adjacency = x.edge_index if x.edge_index is not None else x.get("adj_t")
        if adjacency is None:
            raise ValueError(f"`Data` must hold `edge_index` or `adj_t`, got {x}.")
        if num_nodes is None and size is None:
            num_nodes = x.num_nodes
        return as_graph(adjacency, num_nodes=num_nodes, size=size, flow=flow)
    if not isinstance(x, (Graph, Tensor, SparseTensor)):
        raise TypeError(
            "A graph must be a Graph, an `edge_index` tensor, an EdgeIndex, a torch.sparse or SparseTensor"
            f" adjacency or a Data, got {type(x).__name__}."
            " For others see SparseGraph.from_csr, from_mask, from_networkx and from_scipy."
        )
    if backwards:
        raise ValueError(
            '`flow="target_to_source"` is defined for an `edge_index` only,'
            f" got a {type(x).__name__}. Pass the transposed adjacency instead."
        )
    graph = x if isinstance(x, Graph) else _from_adjacency(x)
    given = _given_size(num_nodes, size)
    if given is not None and given != (graph.num_keys, graph.num_queries):
        raise ValueError(
            f"The graph has (num_keys, num_queries) = {(graph.num_keys, graph.num_queries)},"
            f" but `num_nodes` or `size` says {given}."
        )
    return graph


def union(*graphs: Graph) -> SparseGraph:
    """Graph that has every edge that one of `graphs` has, once: the set union, for mixing attention patterns.

    O(E log E) in the number of edges of all graphs.

    Returns:
        The graph, its edges sorted by (query, key).

    Raises:
        TypeError: no graph, or something else than a Graph.
        ValueError: the graphs differ in size or device.

    Example:
        >>> ring = SparseGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> union(ring, global_graph(3, [0])).to_edge_index().tolist()
        [[0, 1, 2, 0, 0, 1], [0, 0, 0, 1, 2, 2]]
    """
    if not graphs or not all(isinstance(graph, Graph) for graph in graphs):
        raise TypeError(f"union takes one or more Graphs, got {[type(graph).__name__ for graph in graphs]}.")
    sizes = [(graph.num_keys, graph.num_queries) for graph in graphs]
    if len(set(sizes)) > 1:
        raise ValueError(f"All graphs of a union must have the same (num_keys, num_queries), got {sizes}.")
    devices = [str(graph.device) for graph in graphs]
    if len(set(devices)) > 1:
        raise ValueError(f"All graphs of a union must be on one device, got {devices}. Move them with `.to`.")
    return _simple(torch.cat([graph.to_edge_index() for graph in graphs], dim=1), *sizes[0])


def expander_graph(num_nodes: int, degree: int, *, seed: int) -> SparseGraph:
    """Random sparse graph that joins all nodes in few steps: the union of `degree / 2` random cycles.

    Symmetric, no self-loops, no parallel edges; connected from degree 2 on. Where cycles share an edge, its
    nodes have fewer than `degree` keys; an odd degree adds a random matching. Complete when
    `num_nodes <= degree + 1`. These are the long-range edges of Exphormer (Shirzad et al., 2023); a union of
    random cycles is an expander with high probability (Friedman, 2008).

    Args:
        num_nodes: number of nodes.
        degree: highest number of keys of a query, 0 or more.
        seed: of a generator of its own; the same seed gives the same graph.

    Returns:
        The graph, its edges sorted by (query, key).

    Raises:
        ValueError: `num_nodes` or `degree` is negative.
        TypeError: `num_nodes`, `degree` or `seed` is not an int.

    Example:
        >>> expander_graph(5, 4, seed=0)  # complete
        SparseGraph(5 keys -> 5 queries, 20 edges)
    """
    _check_count("`num_nodes`", num_nodes)
    _check_count("`degree`", degree)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"`seed` must be an int, got {type(seed).__name__}.")
    if num_nodes <= degree + 1:
        return SparseGraph.from_mask(~torch.eye(num_nodes, dtype=torch.bool, device="cpu"))
    generator = torch.Generator().manual_seed(int(seed))
    pairs = [torch.empty(2, 0, dtype=torch.int64, device="cpu")]
    for _ in range(degree // 2):
        order = torch.randperm(num_nodes, generator=generator, device="cpu")
        pairs.append(torch.stack([order, order.roll(1)]))
    if degree % 2:
        order = torch.randperm(num_nodes, generator=generator, device="cpu")
        pairs.append(order[: num_nodes // 2 * 2].view(-1, 2).t())
    one_way = torch.cat(pairs, dim=1)
    return _simple(torch.cat([one_way, one_way.flip(0)], dim=1), num_nodes, num_nodes)


def global_graph(num_nodes: int, global_nodes: Int[Tensor, "globals"] | Sequence[int]) -> SparseGraph:
    """Graph in which `global_nodes` attend to all nodes and all nodes attend to them.

    The global tokens of Longformer and BigBird (Beltagy et al., 2020; Zaheer et al., 2020), O(n) edges for
    each: `union` it with a local pattern. A global node attends to itself too; no parallel edges.

    Args:
        num_nodes: number of nodes.
        global_nodes: ids, repeats count once.

    Returns:
        The graph, its edges sorted by (query, key).

    Raises:
        ValueError: `global_nodes` is not a one-dimensional list of integers.
        TypeError: `global_nodes` is neither a tensor nor a sequence of numbers.
        IndexError: an id is outside `[0, num_nodes)`.

    Example:
        >>> global_graph(4, [0]).to_mask().sum().item()
        7
    """
    _check_count("`num_nodes`", num_nodes)
    try:
        ids = torch.as_tensor(global_nodes)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"`global_nodes` must be node ids, got {type(global_nodes).__name__}. Pass a list or a tensor."
        ) from error
    if ids.numel() == 0:
        ids = ids.long()
    if ids.dtype not in _INTEGERS or ids.dim() != 1:
        raise ValueError(
            f"`global_nodes` must be integers of shape [nodes], got {list(ids.shape)} of type {ids.dtype}."
        )
    ids = ids.long()
    _check_range("`global_nodes`", ids, num_nodes)
    everyone = torch.arange(num_nodes, device=ids.device)
    to_all = torch.cartesian_prod(ids, everyone).t().reshape(2, -1)
    return _simple(torch.cat([to_all, to_all.flip(0)], dim=1), num_nodes, num_nodes)


def _simple(edge_index: Tensor, num_keys: int, num_queries: int) -> SparseGraph:
    # The ids are in range, so query · num_keys + key names a pair; it stays below 2**62.
    pairs = torch.unique(edge_index[1] * num_keys + edge_index[0])
    width = max(num_keys, 1)
    return SparseGraph.from_edge_index(
        torch.stack([pairs % width, pairs // width]), size=(num_keys, num_queries)
    )


# Graphs of edge_index tensors: tensor -> (its version then, {(size, backwards): graph}). The keys are weak
# and a graph is a copy, so nothing here keeps a tensor alive. No lock, which a fork could leave locked: a
# dict operation is atomic, and two threads that want the same graph at worst both build it.
_built = WeakIdKeyDictionary()


def _reused(edge_index: Tensor, size: tuple[int, int] | None, backwards: bool) -> SparseGraph:
    from torch_geometric import EdgeIndex

    plain = type(edge_index) in (Tensor, EdgeIndex)  # not the stand-ins of a tracer
    if torch.compiler.is_compiling() or edge_index.is_inference() or not plain:
        return _from_edges(edge_index, size, backwards)
    version = edge_index._version
    entry = _built.get(edge_index)
    graphs = {} if entry is None or entry[0] != version else entry[1]
    if (size, backwards) not in graphs:
        graphs[size, backwards] = _from_edges(edge_index, size, backwards)
        _built[edge_index] = version, graphs
    return graphs[size, backwards]


def _from_edges(edge_index: Tensor, size: tuple[int, int] | None, backwards: bool = False) -> SparseGraph:
    from torch_geometric import EdgeIndex

    if not isinstance(edge_index, Tensor):
        raise TypeError(f"`edge_index` must be an integer tensor, got {type(edge_index).__name__}.")
    _check_dense("`edge_index`", edge_index)
    num_keys, num_queries = None, None
    if isinstance(edge_index, EdgeIndex):
        num_keys, num_queries = edge_index.sparse_size()
        edge_index = edge_index.as_tensor()
    if edge_index.dtype not in _INTEGERS:
        raise ValueError(
            f"Expected 'edge_index' to be of integer type (got '{edge_index.dtype}')."
            " Convert it with .long(); SparseGraph.from_mask reads masks."
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' to have shape [2, num_edges] (got {list(edge_index.shape)})."
            " Row 0 holds the sources (keys), row 1 the targets (queries)."
        )
    _check_count("the number of edges", edge_index.size(1))
    if backwards:
        edge_index = edge_index.flip(0)
        num_keys, num_queries = num_queries, num_keys
    if size is not None:
        if num_keys not in (None, size[0]) or num_queries not in (None, size[1]):
            raise ValueError(
                f"The EdgeIndex has (num_keys, num_queries) = {(num_keys, num_queries)},"
                f" but `num_nodes` or `size` says {size}."
            )
        num_keys, num_queries = size
    elif num_keys is None and num_queries is None:
        num_keys = num_queries = _one_above(edge_index)
    else:
        num_keys = _one_above(edge_index[0]) if num_keys is None else num_keys
        num_queries = _one_above(edge_index[1]) if num_queries is None else num_queries
    names = ("rowptr", "col", "edge_id", "colptr", "row", "edge_id_t")
    return SparseGraph(**dict(zip(names, _build_csr(edge_index, num_queries, num_keys))))


def _from_adjacency(A: Any) -> SparseGraph:
    if not isinstance(A, Tensor):  # torch_sparse's SparseTensor
        row, col, _ = A.coo()
        num_queries, num_keys = A.sparse_sizes()
    elif (
        A.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc) or A.dim() - A.dense_dim() != 2
    ):
        raise ValueError(
            "A torch.sparse adjacency must be a COO, CSR or CSC matrix [num_queries, num_keys],"
            f" got {A.layout} of shape {list(A.shape)}."
        )
    else:
        num_queries, num_keys = A.shape[:2]
        if A.layout == torch.sparse_coo:
            row, col = A._indices()  # also of an uncoalesced tensor: its duplicates are parallel edges
        else:  # PyTorch checks neither the ids nor the pointers of a tensor, unless asked to
            by_row = A.layout == torch.sparse_csr
            ptr_name, ids_name, lines, number_of_lines = (
                ("crow_indices", "col_indices", "rows", num_queries)
                if by_row
                else ("ccol_indices", "row_indices", "columns", num_keys)
            )
            ptr, ids = getattr(A, ptr_name)(), getattr(A, ids_name)()
            if ptr.numel() != number_of_lines + 1:
                raise ValueError(
                    f"`{ptr_name}` must have one entry more than the {number_of_lines} {lines},"
                    f" got {ptr.numel()}."
                )
            others = _rows_of(ptr, ids, ptr_name, ids_name)
            row, col = (others, ids) if by_row else (ids, others)
    return SparseGraph.from_edge_index(torch.stack([col.long(), row.long()]), size=(num_keys, num_queries))


def _rows_of(ptr: Tensor, ids: Tensor, ptr_name: str, ids_name: str) -> Tensor:
    for name, tensor in ((ptr_name, ptr), (ids_name, ids)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS or tensor.dim() != 1:
            got = (
                f"{tensor.dtype} {list(tensor.shape)}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            raise ValueError(f"`{name}` must be a one-dimensional integer tensor, got {got}.")
    counts = ptr.long().diff()
    if ptr.numel() == 0 or ptr[0] != 0 or ptr[-1] != ids.numel() or (counts < 0).any():
        raise ValueError(f"`{ptr_name}` must rise from 0 to len({ids_name}) = {ids.numel()} without falling.")
    return torch.arange(counts.numel(), device=ids.device).repeat_interleave(counts, output_size=ids.numel())


def _given_size(num_nodes: int | None, size: tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        if num_nodes is None:
            return None
        _check_count("`num_nodes`", num_nodes)
        return num_nodes, num_nodes
    if num_nodes is not None:
        raise ValueError(f"Pass `num_nodes` or `size`, not both, got {num_nodes} and {size}.")
    if not isinstance(size, (tuple, list)):
        raise TypeError(f"`size` must be (num_keys, num_queries), got {type(size).__name__}.")
    if len(size) != 2:
        raise ValueError(f"`size` must be (num_keys, num_queries), got {size}.")
    _check_count("`size[0]` (num_keys)", size[0])
    _check_count("`size[1]` (num_queries)", size[1])
    return size[0], size[1]


def _check_dense(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout}. as_graph reads adjacencies.")


def _check_count(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, (int, np.integer, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(count).__name__}.")
    # Compiled code must not branch on a size it does not know yet; there the operator checks when it runs.
    if not torch.compiler.is_compiling() and not 0 <= count < _LIMIT:
        raise ValueError(f"{name} must be at least 0 and below 2**31, got {count}.")


def _one_above(ids: Tensor) -> int:
    # At least 0: a negative id is then reported as out of range, not as a negative size.
    count = max(int(ids.max()) + 1, 0) if ids.numel() else 0
    _check_count("the highest node id + 1", count)
    return count


def _check_range(name: str, ids: Tensor, limit: int) -> None:
    if ids.numel():
        low, high = torch.stack(ids.aminmax()).tolist()
        if low < 0 or high >= limit:
            raise _out_of_range(name, low if low < 0 else high, limit)


def _out_of_range(name: str, node: int, limit: int) -> IndexError:
    return IndexError(
        f"{name} must lie in the interval [0, {limit}), got {node}."
        " Correct the ids, or raise `num_nodes` or `size`."
    )


_KEYS = "Key ids (sources, `edge_index[0]`)"
_QUERIES = "Query ids (targets, `edge_index[1]`)"


@torch.library.custom_op("graphattn::build_csr", mutates_args=())
def _build_csr(
    edge_index: Tensor, num_queries: int, num_keys: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # The checks are here too, because compiled code comes straight to this place.
    for name, count in (
        ("num_queries", num_queries),
        ("num_keys", num_keys),
        ("the number of edges", edge_index.size(1)),
    ):
        _check_count(name, count)
    on_cpu = edge_index.device.type == "cpu"
    # A graph outlives the call that builds it: one from an evaluation must serve the training after it.
    with torch.inference_mode(False):
        return (_sorted_by_numba if on_cpu else _sorted_by_torch)(edge_index, num_queries, num_keys)


@_build_csr.register_fake
def _(edge_index, num_queries, num_keys):
    num_edges = edge_index.size(1)
    sides = []
    for num_nodes in (num_queries, num_keys):
        sides += [edge_index.new_empty(num_nodes + 1, dtype=torch.int64)]
        sides += [edge_index.new_empty(num_edges, dtype=torch.int32) for _ in range(2)]
    return tuple(sides)


def _sorted_by_numba(edge_index: Tensor, num_queries: int, num_keys: int):
    num_edges = edge_index.size(1)
    sources, targets = edge_index.long().contiguous().numpy()  # one type of array: Numba compiles once
    rowptr, colptr = (torch.zeros(n + 1, dtype=torch.int64) for n in (num_queries, num_keys))
    col, edge_id, row, edge_id_t = (torch.empty(num_edges, dtype=torch.int32) for _ in range(4))
    by_query = (targets, sources, rowptr.numpy(), col.numpy(), edge_id.numpy())
    by_key = (sources, targets, colptr.numpy(), row.numpy(), edge_id_t.numpy())
    if num_edges >= _THREAD_EDGES and torch.get_num_threads() > 1:
        # Threads that last for one call: none is left over for a fork to lose.
        with ThreadPoolExecutor(1) as second:
            key_sort = second.submit(_counting_sort, *by_key)
            bad_query = _counting_sort(*by_query)
            bad_key = key_sort.result()
    else:
        bad_query, bad_key = _counting_sort(*by_query), _counting_sort(*by_key)
    if bad_key >= 0:
        raise _out_of_range(_KEYS, int(sources[bad_key]), num_keys)
    if bad_query >= 0:
        raise _out_of_range(_QUERIES, int(targets[bad_query]), num_queries)
    return rowptr, col, edge_id, colptr, row, edge_id_t


def _sorted_by_torch(edge_index: Tensor, num_queries: int, num_keys: int):
    sources, targets = edge_index
    _check_range(_KEYS, sources, num_keys)
    _check_range(_QUERIES, targets, num_queries)
    sides = []
    for ids, others, num_nodes in ((targets, sources, num_queries), (sources, targets, num_keys)):
        ascending, order = ids.int().sort(stable=True)
        starts = torch.arange(num_nodes + 1, dtype=torch.int32, device=ids.device)
        sides += [torch.searchsorted(ascending, starts), others[order].int(), order.int()]
    return tuple(sides)


def _compiled(function):
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to cache in: a read-only installation without a home
        return numba.njit(nogil=True)(function)


@_compiled
def _counting_sort(ids, others, ptr, grouped, order):
    # Groups the edges by `ids` into `ptr`, `grouped`, `order`; returns the first edge out of range, or -1.
    num_nodes = ptr.size - 1
    ascending = True
    previous = 0
    for e in range(ids.size):
        node = ids[e]
        if node < 0 or node >= num_nodes:
            return e
        ptr[node + 1] += 1
        ascending &= node >= previous
        previous = node
    for node in range(num_nodes):
        ptr[node + 1] += ptr[node]
    if ascending:
        for e in range(ids.size):
            grouped[e] = others[e]
            order[e] = e
        return -1
    if ids.size < _CACHED_EDGES:
        for e in range(ids.size):
            position = ptr[ids[e]]
            ptr[ids[e]] = position + 1
            grouped[position] = others[e]
            order[position] = e
    else:
        # Written straight to their places the edges would miss the cache one by one. So first into some 256
        # buckets of consecutive nodes, then within each bucket: twice as fast.
        shift = 0
        while shift < 16 and num_nodes >> shift > 256:
            shift += 1
        ends = ptr[: num_nodes : 1 << shift].copy()
        rest = np.empty(ids.size, np.uint16)  # a node's place in its bucket
        for e in range(ids.size):
            bucket = ids[e] >> shift
            position = ends[bucket]
            ends[bucket] = position + 1
            grouped[position] = others[e]
            order[position] = e
            rest[position] = ids[e] - (bucket << shift)
        for bucket in range(ends.size):
            first = bucket << shift
            start = ptr[first]
            bucket_grouped = grouped[start : ends[bucket]].copy()
            bucket_order = order[start : ends[bucket]].copy()
            for k in range(bucket_order.size):
                node = first + rest[start + k]
                position = ptr[node]
                ptr[node] = position + 1
                grouped[position] = bucket_grouped[k]
                order[position] = bucket_order[k]
    for node in range(num_nodes, 0, -1):  # every pointer has moved on to the start of the next node
        ptr[node] = ptr[node - 1]
    ptr[0] = 0
    return -1
