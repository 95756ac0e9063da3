"""Which query may attend to which key: graphs as plain data, and the functions that build them."""

from __future__ import annotations

import ast
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import MappingKey, register_pytree_node
from torch.utils.weak import WeakIdKeyDictionary

from graphattn.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    import networkx
    from jaxtyping import Bool, Int

_CPU = torch.device("cpu")
_LIMIT = 2**31  # node and edge numbers are int32
_THREAD_EDGES = 50_000  # below this a second thread costs more than it saves
_CACHED_EDGES = 2**18  # an edge list below this stays in the cache while it is sorted
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Graph:
    """A set of edges, each from a key node (source) to a query node (target) that may attend to it.

    The common type of all graph kinds. Each kind is plain data; what is written here follows from its edges.

    Example:
        >>> graph = WindowGraph(3, (1, 0))
        >>> graph.num_queries, graph.num_keys, graph.num_edges, graph.edge_shape
        (3, 3, 5, (3, 2))
        >>> graph.to_edge_index().tolist()
        [[0, 0, 1, 1, 2], [0, 1, 1, 2, 2]]
        >>> graph.slots().tolist()  # query 0 has no key before it: slot 0 carries no edge
        [1, 2, 3, 4, 5]
        >>> graph.to_mask().int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        >>> graph.to_sparse()
        SparseGraph(3 keys -> 3 queries, 5 edges)
    """

    def __init__(self) -> None:
        raise TypeError(
            "Graph is the common type of SparseGraph, CompleteGraph, WindowGraph and GridGraph: build one of these."
        )

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
        """The same graph on `device`; tensors that are there already are not copied."""
        raise NotImplementedError

    def to_sparse(self) -> SparseGraph:
        """The same edges as a `SparseGraph`, in `to_edge_index()` order: two counting sorts, O(edges + nodes).

        A `SparseGraph` returns itself.

        Raises:
            ValueError: there are 2**31 edges or more.
        """
        raise NotImplementedError

    def to_edge_index(self) -> Int[Tensor, "2 edges"]:
        """The edges as an int64 `edge_index` `[2, num_edges]`: keys in row 0, queries in row 1. O(num_edges)."""
        raise NotImplementedError

    def slots(self) -> Int[Tensor, " edges"]:
        """For each edge of `to_edge_index()` the place of its entry in a flattened edge tensor, int64.

        `edge_tensor.view(-1, heads)[graph.slots()]` are the entries of the edges, one row for each.
        """
        return torch.arange(self.num_edges, device=self.device)

    def to_mask(self) -> Bool[Tensor, "queries keys"]:
        """The edges as a bool mask `[num_queries, num_keys]`, True where the query may attend to the key.

        Parallel edges fall together. Takes O(num_queries · num_keys) memory.

        Example:
            >>> CompleteGraph(2, causal=True).to_mask().tolist()
            [[True, False], [True, True]]
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

        Example:
            >>> list(WindowGraph(2, (1, 0)).to_networkx().edges(keys=True))
            [(0, 0, 0), (0, 1, 1), (1, 1, 2)]
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
        parts = [f"{self.num_keys} keys -> {self.num_queries} queries", f"{self.num_edges} edges"]
        parts += self._rule()
        if self.device.type != "cpu":
            parts.append(f"device={str(self.device)!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _rule(self) -> list[str]:
        return []


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
                more, or disagree; both `num_nodes` and `size` are given.
            TypeError: `edge_index` is not a tensor or a sparse one, `num_nodes` or an entry of `size` not an
                int, or `size` not a pair.
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
            ValueError: `rowptr` or `col` is no one-dimensional integer tensor, or `rowptr` does not rise from 0
                to `len(col)`; `num_keys` is negative or not below 2**31.
            TypeError: `num_keys` is not an int.
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

        Args:
            mask: bool `[num_queries, num_keys]`.

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
        check_readable("`mask`", mask.device)
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
            TypeError: `G` is not a networkx graph, or `nodelist` not a sequence of nodes.
            ValueError: `nodelist` names a node twice, or one that is not in `G`.

        Example:
            >>> import networkx
            >>> SparseGraph.from_networkx(networkx.Graph([("a", "b"), ("b", "b")])).to_edge_index().tolist()
            [[0, 1, 1], [1, 0, 1]]
        """
        import networkx

        if not isinstance(G, networkx.Graph):
            raise TypeError(f"`G` must be a networkx graph, got {type(G).__name__}.")
        try:
            nodes = list(G if nodelist is None else nodelist)
            number = {node: i for i, node in enumerate(nodes)}
        except (TypeError, NotImplementedError) as error:
            raise TypeError(
                f"`nodelist` must be a sequence of nodes of `G`, got {type(nodelist).__name__}: {error}."
            ) from error
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

        Args:
            A: SciPy sparse, of any format, `[num_queries, num_keys]`.

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A file may hold anything, and kernels trust what they are given. O(E), a fraction of a sort.
        if not isinstance(state, dict) or state.keys() != {field.name for field in fields(self)}:
            raise ValueError(f"A stored SparseGraph must hold its six tensors, got {_names(state)}.")
        _fill(self, **state)
        for name, ptr in (("rowptr", self.rowptr), ("colptr", self.colptr)):
            _check_stored(name, ptr, torch.int64)
            if ptr.numel() == 0:
                raise ValueError(f"A stored `{name}` must have at least one entry, got none.")
        sides = (
            ("col", self.col, "edge_id", self.edge_id, self.rowptr, self.num_keys),
            ("row", self.row, "edge_id_t", self.edge_id_t, self.colptr, self.num_queries),
        )
        for name, ids, order_name, order, ptr, limit in sides:
            _check_stored(name, ids, torch.int32)
            _check_stored(order_name, order, torch.int32)
            check_count("the number of nodes", limit)
            if {x.device for x in (ids, order, ptr)} != {
                self.device
            } or not ids.shape == order.shape == self.col.shape:
                raise ValueError(
                    "The tensors of a stored SparseGraph must be of one length and on one device."
                )
            if not _has_numbers(ids):
                continue
            _check_range(f"The stored `{name}`", ids, limit)
            if ptr[0] != 0 or ptr[-1] != ids.numel() or (ptr.diff() < 0).any():
                raise ValueError(f"The stored pointers to `{name}` must rise from 0 to {ids.numel()}.")
            _check_permutation(order_name, order)


torch.export.register_dataclass(SparseGraph, serialized_type_name="graphattn.SparseGraph")
torch.serialization.add_safe_globals([SparseGraph])


@dataclass(frozen=True, eq=False, repr=False, init=False)
class _StructuredGraph(Graph):
    # A kind whose edges follow from a rule: row-major by query, keys ascending. What is written here follows
    # from its `axis_intervals`. Defaults of the first fields only hide the properties of Graph.

    num_queries: int = 0
    num_keys: int = 0
    num_edges: int = 0
    device: torch.device = _CPU
    offset: int = 0
    ptr: Tensor | None = None
    order: Tensor | None = None

    def to(self, device: torch.device | str | int) -> Graph:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in values.items()}
        return _fill(object.__new__(type(self)), **{**values, "device": torch.empty(0, device=device).device})

    def to_sparse(self) -> SparseGraph:
        check_count("the number of edges", self.num_edges)
        return SparseGraph.from_edge_index(self.to_edge_index(), size=(self.num_keys, self.num_queries))

    def to_edge_index(self) -> Int[Tensor, "2 edges"]:
        axes = axis_intervals(self)
        queries, keys = _listed(
            self, axes, [(axis.first, axis.step, axis.first_query.numel()) for axis in axes]
        )
        return torch.stack([keys if self.order is None else self.order[keys], queries])

    def slots(self) -> Int[Tensor, " edges"]:
        if len(self.edge_shape) == 1:
            return super().slots()
        axes = axis_intervals(self)
        queries, slots = _listed(self, axes, [(axis.slot, axis.slot_step, axis.slots) for axis in axes])
        return slots + queries * self.edge_shape[1]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A file may hold anything: what the rule gives is what counts.
        usual = {field.name: field.default for field in fields(self)}
        if not isinstance(state, dict) or not state.keys() <= usual.keys():
            raise ValueError(f"A stored {type(self).__name__} must hold its rule, got {_names(state)}.")
        state = {**usual, **state}
        ptr, device = state["ptr"], state["device"]
        if not isinstance(device, torch.device):
            raise TypeError(f"A stored `device` must be a torch.device, got {type(device).__name__}.")
        if not isinstance(ptr, Tensor) or _has_numbers(ptr):
            checked = _by_rule(type(self), **state)
            for name in ("num_queries", "num_keys", "num_edges", "offset"):
                if getattr(checked, name) != state[name]:
                    raise ValueError(
                        f"The stored `{name}` of a {checked} must be {getattr(checked, name)}, got {state[name]}."
                    )
            if ptr is not None and ptr.device != device:
                raise ValueError(f"A stored `ptr` must be on {device}, got {ptr.device}.")
        _fill(self, **state)

    def positions(self) -> Int[Tensor, "queries axes"]:
        """Where each query is in its sequence, clique or grid, int64 `[num_queries, axes]`.

        With an `offset`, query i is at `offset + i`, where key `offset + i` is. O(num_queries).

        Example:
            >>> CompleteGraph.from_ptr(torch.tensor([0, 2, 3])).positions().flatten().tolist()
            [0, 1, 0]
            >>> GridGraph((1, 2), 1).positions().tolist()
            [[0, 0], [0, 1]]
        """
        nodes = torch.arange(self.num_queries, device=self.device)
        if self.ptr is not None:
            nodes = _in_node_order(self, nodes - _bounds(self.ptr, self.num_queries)[0])
        return (nodes + self.offset).view(-1, 1)

    def _rule(self) -> list[str]:
        usual = {"shape": None, "radius": None, "causal": False, "dilation": 1, "offset": 0, "border": "clip"}
        values = {name: getattr(self, name, default) for name, default in usual.items()}
        parts = [] if self.ptr is None else [f"{self.ptr.numel() - 1} sequences"]
        return parts + [f"{name}={value!r}" for name, value in values.items() if value != usual[name]]


@dataclass(frozen=True, eq=False, repr=False, init=False)
class CompleteGraph(_StructuredGraph):
    """Every query attends to every key, or, causal, to those up to its own position.

    Edge tensors have shape `[num_queries, num_keys]`; in a graph of several cliques `[num_edges]`, in the
    order of `to_edge_index()`. Holds nothing per edge: cliques take 8 bytes each, and 8 for each node where
    the nodes of a clique are not consecutive.

    Args:
        num_nodes: number of queries.
        num_keys: number of keys, as many as queries by default.
        causal: query i attends only to the keys `0..offset + i`; where that is none, its output is 0.
        offset: position of query 0 among the keys. In a causal rectangle 0 is PyTorch's top-left alignment,
            `num_keys - num_nodes` its bottom-right.

    Raises:
        ValueError: a size is negative or not below 2**31.
        TypeError: a size or `offset` is not an int, or `causal` not a bool.

    Example:
        >>> CompleteGraph(2, num_keys=4, causal=True, offset=2).to_mask().int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]

    Vaswani et al., `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
    """

    causal: bool = False

    def __init__(
        self, num_nodes: int, *, num_keys: int | None = None, causal: bool = False, offset: int = 0
    ) -> None:
        num_nodes = checked_count("`num_nodes`", num_nodes)
        num_keys = num_nodes if num_keys is None else checked_count("`num_keys`", num_keys)
        offset = checked_count("`offset`", offset, least=1 - _LIMIT)
        radius = _causal_radius(_checked_causal(causal))
        _fill(
            self,
            num_queries=num_nodes,
            num_keys=num_keys,
            num_edges=_window_edges(num_nodes, num_keys, offset, *radius, 1),
            device=torch.empty(0).device,
            offset=offset,
            causal=causal,
        )

    @staticmethod
    def from_ptr(ptr: Int[Tensor, "cliques+1"], *, causal: bool = False) -> CompleteGraph:
        """Graphs of different sizes side by side, each complete: clique c is the nodes `ptr[c]:ptr[c + 1]`.

        Args:
            ptr: integer `[cliques + 1]`, from 0 up to the number of nodes, never falling (PyG's `Batch.ptr`).
            causal: a node attends only to those of its clique up to itself.

        Raises:
            ValueError: `ptr` is not one-dimensional, does not start at 0, falls, or ends at 2**31 or more.
            TypeError: `ptr` is not an integer tensor, or `causal` not a bool.

        Example:
            >>> CompleteGraph.from_ptr(torch.tensor([0, 2, 3])).to_edge_index().tolist()
            [[0, 1, 0, 1, 2], [0, 0, 1, 1, 2]]
        """
        return _ragged(CompleteGraph, _checked_ptr(ptr), causal=_checked_causal(causal))

    @staticmethod
    def from_batch(batch: Int[Tensor, " nodes"], *, causal: bool = False) -> CompleteGraph:
        """One clique for each label: nodes attend to the nodes that carry the same label as they do.

        The cliques of a PyG mini-batch (`Batch.batch`), or the blocks of a grid (`grid_blocks`). O(N) for
        labels in ascending order, else O(N log N).

        Args:
            batch: integer `[nodes]`, any label for each node, in any order.
            causal: a node attends only to those of its clique that come before it, and to itself.

        Raises:
            ValueError: `batch` is not one-dimensional.
            TypeError: `batch` is not an integer tensor, or `causal` not a bool.

        Example:
            >>> CompleteGraph.from_batch(torch.tensor([7, 3, 7])).to_edge_index().tolist()
            [[0, 2, 1, 0, 2], [0, 0, 1, 2, 2]]
        """
        labels, order = _checked_line("batch", batch, "[nodes]"), None
        if (labels[1:] < labels[:-1]).any():
            labels, order = labels.sort(stable=True)
        sizes = labels.unique_consecutive(return_counts=True)[1]
        ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return _ragged(CompleteGraph, ptr, order=order, causal=_checked_causal(causal))

    @property
    def edge_shape(self) -> tuple[int, ...]:
        return (self.num_queries, self.num_keys) if self.ptr is None else (self.num_edges,)


@dataclass(frozen=True, eq=False, repr=False, init=False)
class WindowGraph(_StructuredGraph):
    """Every query attends to the keys near its own position: a chain, a band, a sliding window.

    Query i, at position p = offset + i, attends to those of the keys `p - before · dilation, ..., p - dilation,
    p, p + dilation, ..., p + after · dilation` that exist. Edge tensors have shape
    `[num_queries, before + 1 + after]`, one slot for each of these, those that fall off the sequence
    included. With an unbounded side they have the complete graph's `[num_queries, num_keys]`, in a graph of
    several sequences `[num_edges]` then. Holds nothing per edge or node, only 8 bytes for each sequence.

    Args:
        length: number of queries.
        radius: how many keys on either side, an int or `(before, after)`; None in place of either is all of
            them, so `(None, 0)` is causal. An even window of 2r as in NATTEN is `(r, r - 1)`.
        dilation: distance of neighbouring keys of a window, also on an unbounded side.
        num_keys: number of keys, as many as queries by default.
        offset: position of query 0 among the keys, negative or past the end too; a query whose window lies
            outside has no edge.

    Raises:
        ValueError: a size or radius is negative, `dilation` below 1, any of them not below 2**31, or `radius`
            not a pair.
        TypeError: one of them is not an int.

    Example:
        >>> WindowGraph(4, (1, 0)).to_mask().int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
        >>> WindowGraph(100, 2)
        WindowGraph(100 keys -> 100 queries, 494 edges, radius=(2, 2))

    Beltagy et al., `Longformer <https://arxiv.org/abs/2004.05150>`_, 2020.
    """

    radius: tuple[int | None, int | None] = (0, 0)
    dilation: int = 1

    def __init__(
        self,
        length: int,
        radius: int | tuple[int | None, int | None] | None,
        *,
        dilation: int = 1,
        num_keys: int | None = None,
        offset: int = 0,
    ) -> None:
        length = checked_count("`length`", length)
        num_keys = length if num_keys is None else checked_count("`num_keys`", num_keys)
        offset = checked_count("`offset`", offset, least=1 - _LIMIT)
        dilation = checked_count("`dilation`", dilation, least=1)
        radius = _checked_radius(radius)
        _fill(
            self,
            num_queries=length,
            num_keys=num_keys,
            num_edges=_window_edges(length, num_keys, offset, *radius, dilation),
            device=torch.empty(0).device,
            offset=offset,
            radius=radius,
            dilation=dilation,
        )

    @staticmethod
    def from_ptr(
        ptr: Int[Tensor, "sequences+1"],
        radius: int | tuple[int | None, int | None] | None,
        *,
        dilation: int = 1,
    ) -> WindowGraph:
        """Sequences of different lengths side by side: sequence b is the nodes `ptr[b]:ptr[b + 1]`.

        A window ends where its sequence does. Slots are those of one sequence; with an unbounded side the
        edge layout is `[num_edges]`.

        Args:
            ptr: integer `[sequences + 1]`, from 0 up to the number of nodes, never falling.
            radius: as for one sequence.
            dilation: as for one sequence.

        Raises:
            ValueError: `ptr` is not one-dimensional, does not start at 0, falls, or ends at 2**31 or more; a
                radius is negative, `dilation` below 1, or `radius` not a pair.
            TypeError: `ptr` is not an integer tensor, a radius or `dilation` not an int.

        Example:
            >>> WindowGraph.from_ptr(torch.tensor([0, 2, 3]), 1).to_edge_index().tolist()
            [[0, 1, 0, 1, 2], [0, 0, 1, 1, 2]]
        """
        dilation = checked_count("`dilation`", dilation, least=1)
        return _ragged(WindowGraph, _checked_ptr(ptr), radius=_checked_radius(radius), dilation=dilation)

    @property
    def edge_shape(self) -> tuple[int, ...]:
        before, after = self.radius
        if before is not None and after is not None:
            return (self.num_queries, before + 1 + after)
        return (self.num_queries, self.num_keys) if self.ptr is None else (self.num_edges,)


@dataclass(frozen=True, eq=False, repr=False, init=False)
class GridGraph(_StructuredGraph):
    """The cells of an n-dimensional grid attend to those in a box around them: neighbourhood attention.

    Node numbers are row-major: the last axis runs fastest. On every axis the box is a window as in
    `WindowGraph`; where it crosses the border of the grid, `"clip"` takes away what lies outside (as
    zero-padding does for a convolution), `"shift"` moves it inward, so that it keeps its size, or is the
    whole axis if that is smaller (with a dilation, all cells of the axis that are a multiple of it away).
    Edge tensors have shape `[num_nodes, slots]`: slots of the axes in row-major order, `before + 1 + after`
    for a bounded axis, where slot s is the s-th cell of the box (clipped ones included); an axis with an
    unbounded side has one slot for each coordinate. Holds nothing per edge or node.

    Args:
        shape: cells along each axis.
        radius: an int or, for each axis, an int, `(before, after)` or None, the whole axis. None in place of
            before or after is everything on that side (causal along that axis), with `"clip"` only. An even
            NATTEN kernel 2r is `((r, r - 1),) * axes`.
        dilation: distance of neighbouring keys of a window, along every axis.
        border: `"clip"` or `"shift"`.

    Raises:
        ValueError: an axis has no cell, a radius is negative, `dilation` below 1, the grid has 2**31 cells or
            more, `radius` does not fit the axes, `border` is neither word, or `"shift"` is asked for with a
            window unbounded on one side.
        TypeError: one of these numbers is not an int, or `shape` neither a tuple nor a list.

    Example:
        >>> GridGraph((3, 4), 1)
        GridGraph(12 keys -> 12 queries, 70 edges, shape=(3, 4), radius=((1, 1), (1, 1)))
        >>> GridGraph((5,), 1, border="shift").to_edge_index()[0].view(5, 3).tolist()
        [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4], [2, 3, 4]]

    Hassani et al., `Neighborhood Attention Transformer <https://arxiv.org/abs/2204.07143>`_, 2023, and
    `Dilated Neighborhood Attention Transformer <https://arxiv.org/abs/2209.15001>`_, 2022.
    """

    shape: tuple[int, ...] = ()
    radius: tuple[tuple[int | None, int | None], ...] = ()
    dilation: int = 1
    border: str = "clip"

    def __init__(
        self,
        shape: Sequence[int],
        radius: int | Sequence[int | tuple[int | None, int | None] | None] | None,
        *,
        dilation: int = 1,
        border: str = "clip",
    ) -> None:
        shape = _checked_shape(shape)
        box = tuple(_checked_radius(one) for one in _per_axis("radius", radius, shape))
        dilation = checked_count("`dilation`", dilation, least=1)
        check_word("`border`", border, ("clip", "shift"))
        if border == "shift" and any((before is None) != (after is None) for before, after in box):
            raise ValueError(
                f'With border="shift" no window may be unbounded on one side only, got radius={radius!r}.'
                " Use None for the whole axis."
            )
        edges = [_box_edges(n, *one, dilation, border) for n, one in zip(shape, box)]
        _fill(
            self,
            num_queries=math.prod(shape),
            num_keys=math.prod(shape),
            num_edges=math.prod(edges),
            device=torch.empty(0).device,
            shape=shape,
            radius=box,
            dilation=dilation,
            border=border,
        )

    @property
    def edge_shape(self) -> tuple[int, ...]:
        slots = [_axis_slots(*one, n) for one, n in zip(self.radius, self.shape)]
        return (self.num_queries, math.prod(slots))

    def positions(self) -> Int[Tensor, "queries axes"]:
        axes = [torch.arange(n, device=self.device) for n in self.shape]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, len(axes))


# The sizes and tensors of a structured graph are leaves; its rule belongs to the type of the tree.
_LEAVES = ("num_queries", "num_keys", "num_edges", "offset", "ptr", "order")


def _register(kind: type[_StructuredGraph]) -> None:
    rule = [field.name for field in fields(kind) if field.name not in (*_LEAVES, "device")]

    def flatten(graph):
        context = (str(graph.device), *(getattr(graph, name) for name in rule))
        return [getattr(graph, name) for name in _LEAVES], context

    def flatten_with_keys(graph):
        leaves, context = flatten(graph)
        return [(MappingKey(name), leaf) for name, leaf in zip(_LEAVES, leaves)], context

    def unflatten(leaves, context):
        device, *values = context
        return _fill(
            object.__new__(kind),
            device=torch.device(device),
            **dict(zip(_LEAVES, leaves)),
            **dict(zip(rule, values)),
        )

    register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"graphattn.{kind.__name__}",
        to_dumpable_context=repr,
        from_dumpable_context=ast.literal_eval,
        flatten_with_keys_fn=flatten_with_keys,  # pyright: ignore[reportArgumentType]
    )


for _kind in (CompleteGraph, WindowGraph, GridGraph):
    _register(_kind)
torch.serialization.add_safe_globals([CompleteGraph, WindowGraph, GridGraph])


class AxisIntervals(NamedTuple):
    """Along one axis the keys of each query and the queries of each key, as arithmetic progressions.

    The query at coordinate x has the keys `first[x] + step · t`, `t = 0..count[x] - 1`, the t-th of them in
    slot `slot[x] + slot_step · t`; the key at y has the queries `first_query[y] + step · t`,
    `t = 0..query_count[y] - 1`. All tensors are int64. Where a count is 0, the start and slot mean nothing,
    but the start is still at least 0 and at most the number of coordinates.
    """

    first: Tensor
    count: Tensor
    slot: Tensor
    first_query: Tensor
    query_count: Tensor
    step: int
    slot_step: int
    slots: int


def axis_intervals(graph: Graph) -> tuple[AxisIntervals, ...]:
    """The edges of a structured graph as products of arithmetic progressions, one factor for each axis.

    The edges of a query are all combinations of its keys on the axes, in `to_edge_index()` order when t of
    the last axis runs fastest. O(sum of the axes) memory.

    Coordinates of a grid are those of its cells, of all other graphs node numbers; where a graph has an
    `order`, node `order[x]` is at coordinate x. An edge's entry in a flattened edge tensor is
    `query · (slots of all axes) + slot`, with slots of a grid in row-major order; `slots` is 0 where the
    edge layout is `[num_edges]` and `slot` the edge's own number.

    Args:
        graph: a complete, window or grid graph.

    Returns:
        One `AxisIntervals` for each axis.

    Raises:
        TypeError: `graph` is none of these.

    Example:
        >>> (axis,) = axis_intervals(WindowGraph(4, (1, 0)))
        >>> axis.first.tolist(), axis.count.tolist(), axis.slot.tolist()
        ([0, 0, 1, 2], [1, 2, 2, 2], [1, 0, 0, 0])
    """
    if isinstance(graph, GridGraph):  # Dynamo of PyTorch 2.8 does not trace `match`
        box, step = zip(graph.shape, graph.radius), graph.dilation
        if graph.border == "shift":
            return tuple(_shifted(n, *radius, step, graph.device) for n, radius in box)
        return tuple(_clipped(n, n, 0, *radius, step, graph.device) for n, radius in box)
    if not isinstance(graph, (CompleteGraph, WindowGraph)):
        raise TypeError(f"axis_intervals takes a structured graph, got {type(graph).__name__}.")
    if isinstance(graph, CompleteGraph):
        radius, step = _causal_radius(graph.causal), 1
    else:
        radius, step = graph.radius, graph.dilation
    axis = _clipped(graph.num_queries, graph.num_keys, graph.offset, *radius, step, graph.device, graph.ptr)
    if len(graph.edge_shape) == 1:
        counts = _in_node_order(graph, axis.count)
        starts = counts.cumsum(0) - counts
        starts = starts if graph.order is None else starts[graph.order]
        axis = AxisIntervals(
            axis.first, axis.count, starts, axis.first_query, axis.query_count, axis.step, 1, 0
        )
    return (axis,)


def _clipped(
    num_queries: int,
    num_keys: int,
    offset: int,
    before: int | None,
    after: int | None,
    step: int,
    device: torch.device,
    ptr: Tensor | None = None,
) -> AxisIntervals:
    low, query_end, key_end = 0, num_queries, num_keys
    if ptr is not None:
        low, key_end = _bounds(ptr, num_keys)
        query_end = key_end
    at = torch.arange(num_queries, device=device) + offset
    first, count = _progressions(at, low, key_end, before, after, step)
    if before is None or after is None:
        slot, slot_step = first, step
    else:
        slot, slot_step = (first - at) // step + before, 1
    at = torch.arange(num_keys, device=device) - offset
    transposed = _progressions(at, low, query_end, after, before, step)
    return AxisIntervals(
        first, count, slot, *transposed, step, slot_step, _axis_slots(before, after, num_keys)
    )


def _progressions(at, low, end, before, after, step) -> tuple[Tensor, Tensor]:
    # First and number of those `at + step · t`, `-before <= t <= after`, that lie in [low, end).
    least = -((at - low) // step)
    most = (end - 1 - at) // step
    least = least if before is None else least.clamp(min=-before)
    most = most if after is None else most.clamp(max=after)
    return (at + step * least).clamp(max=end), (most - least + 1).clamp(min=0)


def _shifted(n: int, before: int | None, after: int | None, step: int, device: torch.device) -> AxisIntervals:
    if before is None or after is None:
        return _clipped(n, n, 0, before, after, step, device)
    x = torch.arange(n, device=device)
    cell, rest = x // step, x % step  # a window stays among the cells that are a multiple of step away
    cells = (n - 1 - rest) // step + 1
    size = cells.clamp(max=before + 1 + after)
    first = torch.minimum((cell - before).clamp(min=0), cells - size)
    # Windows move by one cell or by none, so the queries of a key have no gap. Its window's end reaches a
    # query from the first cells on at once, and its start those up to the last cells.
    lowest = torch.where(cell < size, 0, cell - size + 1 + before)
    highest = torch.where(cell < cells - size, cell + before, cells - 1)
    return AxisIntervals(
        first=rest + step * first,
        count=size,
        slot=torch.zeros_like(x),
        first_query=rest + step * lowest,
        query_count=highest - lowest + 1,
        step=step,
        slot_step=1,
        slots=before + 1 + after,
    )


def _axis_slots(before: int | None, after: int | None, num_keys: int) -> int:
    return num_keys if before is None or after is None else before + 1 + after


def _window_edges(
    num_queries: int, num_keys: int, offset: int, before: int | None, after: int | None, step: int
) -> int:
    # At distance s = offset + step · t, a trapezoid of s says how many queries i have a key i + s: it is the
    # sum of four ramps max(0, s - corner), and each of them an arithmetic series in t.
    lowest = -((num_queries - 1 + offset) // step)
    highest = (num_keys - 1 - offset) // step
    lowest = lowest if before is None else max(lowest, -before)
    highest = highest if after is None else min(highest, after)
    total = 0
    for corner, sign in ((-num_queries, 1), (0, -1), (num_keys - num_queries, -1), (num_keys, 1)):
        start = max(lowest, (corner - offset) // step + 1)
        terms = max(highest - start + 1, 0)
        total += sign * (terms * (offset - corner) + terms * (start + highest) // 2 * step)
    return total


def _box_edges(n: int, before: int | None, after: int | None, step: int, border: str) -> int:
    if border == "clip" or before is None or after is None:
        return _window_edges(n, n, 0, before, after, step)
    cells, longer = divmod(n, step)  # `longer` residue classes have a cell more
    width = before + 1 + after
    return longer * (cells + 1) * min(cells + 1, width) + (step - longer) * cells * min(cells, width)


def _listed(
    graph: _StructuredGraph, axes: Sequence[AxisIntervals], walks: Sequence[tuple[Tensor, int, int]]
) -> tuple[Tensor, Tensor]:
    # The query of every edge, and the row-major number of (start[x] + step · t) on axes of these sizes.
    if isinstance(graph, GridGraph):
        coordinates = graph.positions().unbind(1)
    else:
        coordinates = [_in_node_order(graph, torch.arange(graph.num_queries, device=graph.device))]
    counts = [axis.count[x] for axis, x in zip(axes, coordinates)]
    degree = math.prod(counts[1:], start=counts[0])
    start, strides, stride = torch.zeros_like(degree), [], 1
    for (first, step, size), x in zip(reversed(walks), reversed(coordinates)):
        start = start + first[x] * stride
        strides.append(step * stride)
        stride = stride * size
    queries = torch.arange(graph.num_queries, device=graph.device)
    queries = queries.repeat_interleave(degree, output_size=graph.num_edges)
    number = start[queries]
    rank = torch.arange(graph.num_edges, device=graph.device)  # of the edge among those of its query
    rank -= (degree.cumsum(0) - degree)[queries]
    for count, stride in zip(reversed(counts[1:]), strides):
        count = count[queries]
        number.add_(rank % count, alpha=stride)
        rank //= count
    return queries, number.add_(rank, alpha=strides[-1])


def _in_node_order(graph: _StructuredGraph, values: Tensor) -> Tensor:
    # Values by coordinate, that is grouped by clique, brought to the order of the nodes.
    return values if graph.order is None else torch.empty_like(values).index_copy_(0, graph.order, values)


def _bounds(ptr: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    # Start and end of the sequence that each node is in.
    sequence = torch.arange(ptr.numel() - 1, device=ptr.device)
    sequence = sequence.repeat_interleave(ptr.diff(), output_size=num_nodes)
    return ptr[sequence], ptr[sequence + 1]


def _ragged(kind: type[_StructuredGraph], ptr: Tensor, **rule: Any) -> Any:
    num_nodes = int(ptr[-1])
    check_count("the number of nodes, `ptr[-1]`,", num_nodes)
    if ptr.is_inference():  # a graph outlives the call that builds it, and must serve training too
        with torch.inference_mode(False):
            ptr = ptr.clone()
            rule = {name: x.clone() if isinstance(x, Tensor) else x for name, x in rule.items()}
    graph = _fill(
        object.__new__(kind), num_queries=num_nodes, num_keys=num_nodes, device=ptr.device, ptr=ptr, **rule
    )
    return _fill(graph, num_edges=int(axis_intervals(graph)[0].count.sum()))


def _by_rule(kind: type[_StructuredGraph], **stored: Any) -> Any:
    # The graph that the constructors, which check, make of a rule.
    size, ptr, order = stored["num_queries"], stored["ptr"], stored["order"]
    if kind is GridGraph:
        rule = (stored[name] for name in ("shape", "radius"))
        return GridGraph(*rule, dilation=stored["dilation"], border=stored["border"])
    if order is not None:
        _check_stored("order", order, torch.int64)
        if ptr is None or kind is not CompleteGraph or order.numel() != size or order.device != ptr.device:
            raise ValueError("A stored `order` must be that of the nodes of cliques.")
        _check_permutation("order", order)
    if kind is CompleteGraph:
        causal = stored["causal"]
        if ptr is not None:
            return _fill(CompleteGraph.from_ptr(ptr, causal=causal), order=order)
        return CompleteGraph(size, num_keys=stored["num_keys"], causal=causal, offset=stored["offset"])
    radius, dilation = stored["radius"], stored["dilation"]
    if ptr is not None:
        return WindowGraph.from_ptr(ptr, radius, dilation=dilation)
    return WindowGraph(size, radius, dilation=dilation, num_keys=stored["num_keys"], offset=stored["offset"])


def _names(state: Any) -> str:
    return ", ".join(map(str, state)) or "nothing" if isinstance(state, dict) else type(state).__name__


def _has_numbers(x: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return x.device.type != "meta" and not isinstance(x, FakeTensor)


def _check_stored(name: str, x: Any, dtype: torch.dtype) -> None:
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.dtype != dtype or x.dim() != 1:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"A stored `{name}` must be a one-dimensional tensor of {dtype}, got {got}.")


def _check_permutation(name: str, order: Tensor) -> None:
    _check_range(f"The stored `{name}`", order, order.numel())
    seen = torch.zeros(order.numel(), dtype=torch.bool, device=order.device)
    seen[order.long()] = True
    if not seen.all():
        raise ValueError(f"The stored `{name}` must hold every number once.")


def _fill(graph: Any, **values: Any) -> Any:
    # Past the constructor, which checks, and past the frozen attributes.
    for name, value in values.items():
        object.__setattr__(graph, name, value)
    return graph


def _causal_radius(causal: bool) -> tuple[None, int | None]:
    return None, 0 if causal else None


def _checked_causal(causal: bool) -> bool:
    if not isinstance(causal, bool):
        raise TypeError(f"`causal` must be a bool, got {type(causal).__name__}.")
    return causal


def _checked_radius(radius: Any) -> tuple[int | None, int | None]:
    sides = radius if isinstance(radius, (tuple, list)) else (radius, radius)
    if len(sides) != 2:
        raise ValueError(f"`radius` must be an int, None or a pair (before, after), got {radius!r}.")
    before, after = (None if side is None else checked_count("`radius`", side) for side in sides)
    return before, after


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"`shape` must be a tuple of ints, one for each axis, got {type(shape).__name__}.")
    if not shape:
        raise ValueError(f"`shape` must have at least one axis, got {shape!r}.")
    shape = tuple(checked_count(f"`shape[{a}]`", n, least=1) for a, n in enumerate(shape))
    check_count("the number of nodes in `shape`", math.prod(shape))
    return shape


def _per_axis(name: str, value: Any, shape: tuple[int, ...]) -> tuple:
    entries = tuple(value) if isinstance(value, (tuple, list)) else (value,) * len(shape)
    if len(entries) != len(shape):
        raise ValueError(
            f"`{name}` must be one for all axes, or a tuple with an entry for each of the {len(shape)} axes"
            f" of `shape`, got {value!r}."
        )
    return entries


def _checked_line(name: str, x: Any, shape: str) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"`{name}` must be a tensor of integers, got {got}.")
    if x.dim() != 1:
        raise ValueError(f"`{name}` must have shape {shape}, got {list(x.shape)}.")
    check_readable(f"`{name}`", x.device)
    return x.long()


def _checked_ptr(ptr: Any) -> Tensor:
    line = _checked_line("ptr", ptr, "[sequences + 1]")
    if line.numel() == 0 or line[0] != 0 or (line[1:] < line[:-1]).any():
        raise ValueError(
            f"`ptr` must start at 0 and never fall: the start of each sequence, then the number of nodes."
            f" Got {line.tolist() if line.numel() < 10 else f'{line[:10].tolist()}...'}."
        )
    return line.clone()


def grid_blocks(
    shape: Sequence[int], block: int | Sequence[int], *, shift: int | Sequence[int] = 0
) -> Int[Tensor, " nodes"]:
    """Cut a grid into blocks: for each cell the number of its block, labels for `CompleteGraph.from_batch`.

    The windows of Swin. A shift moves the cuts by `shift` cells towards higher
    coordinates; blocks that cross the border of the grid are cut off there, which is what Swin's cyclic shift
    and its mask come to. O(num_nodes).

    Args:
        shape: cells along each axis; node numbers are row-major.
        block: cells of a block along each axis, or one number for all; the last block may be smaller.
        shift: 0 up to `block - 1`, for each axis or one number for all; Swin's is `block // 2`.

    Returns:
        int64 `[num_nodes]`, blocks numbered row-major from 0.

    Raises:
        ValueError: an axis has no cell, a block none, a shift is not in `[0, block)`, or there are more or
            fewer of them than axes.
        TypeError: one of these numbers is not an int, or `shape` neither a tuple nor a list.

    Example:
        >>> grid_blocks((2, 5), 2).view(2, 5).tolist()
        [[0, 0, 1, 1, 2], [0, 0, 1, 1, 2]]
        >>> grid_blocks((1, 5), (1, 2), shift=(0, 1)).tolist()
        [0, 1, 1, 2, 2]

    Liu et al., `Swin Transformer <https://arxiv.org/abs/2103.14030>`_, 2021.
    """
    shape = _checked_shape(shape)
    labels = torch.zeros((), dtype=torch.int64)
    for n, width, start in zip(shape, _per_axis("block", block, shape), _per_axis("shift", shift, shape)):
        check_count("`block`", width, least=1)
        check_count("`shift`", start)
        if start >= width:
            raise ValueError(f"`shift` must be below `block`, got {start} and {width}.")
        along = (torch.arange(n) - start) // width
        along = along - along[0]
        labels = labels.unsqueeze(-1) * (int(along[-1]) + 1) + along
    return labels.flatten()


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
        TypeError: `x` is none of these; a size is not an int, or `size` not a pair.
        ValueError: sizes disagree, `Data` holds no edges, `flow` is another word, or `"target_to_source"` comes
            with anything but an `edge_index`; and as `SparseGraph.from_edge_index`.
        IndexError: an id is out of range.

    Example:
        >>> edge_index = torch.tensor([[0, 1], [1, 2]])
        >>> as_graph(edge_index, num_nodes=3)
        SparseGraph(3 keys -> 3 queries, 2 edges)
        >>> as_graph(edge_index, num_nodes=3) is as_graph(edge_index, num_nodes=3)
        True
    """
    check_word("`flow`", flow, ("source_to_target", "target_to_source"))
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

    Args:
        *graphs: one or more, of the same numbers of keys and queries, on one device.

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
    `num_nodes <= degree + 1`. These are the long-range edges of Exphormer; a union of random cycles is an
    expander with high probability (Friedman, 2008). O(num_nodes · degree), and a sort of these edges.

    Args:
        num_nodes: number of nodes.
        degree: highest number of keys of a query, 0 or more.
        seed: of a generator of its own; the same seed gives the same graph.

    Returns:
        The graph, its edges sorted by (query, key).

    Raises:
        ValueError: `num_nodes` or `degree` is negative or not below 2**31, or `seed` not a number of 64 bits.
        TypeError: `num_nodes`, `degree` or `seed` is not an int.

    Example:
        >>> expander_graph(5, 4, seed=0)  # complete
        SparseGraph(5 keys -> 5 queries, 20 edges)

    Shirzad et al., `Exphormer <https://arxiv.org/abs/2303.06147>`_, 2023.
    """
    check_count("`num_nodes`", num_nodes)
    check_count("`degree`", degree)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"`seed` must be an int, got {type(seed).__name__}.")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"`seed` must be at least -2**63 and below 2**64, got {seed}.")
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

    The global tokens of Longformer and BigBird, O(num_nodes) edges for each: `union` it with a local pattern.
    A global node attends to itself too; no parallel edges.

    Args:
        num_nodes: number of nodes.
        global_nodes: ids, repeats count once.

    Returns:
        The graph, its edges sorted by (query, key).

    Raises:
        ValueError: `global_nodes` is not a one-dimensional list of integers; `num_nodes` is negative or not
            below 2**31.
        TypeError: `global_nodes` is neither a tensor nor a sequence of numbers, or `num_nodes` not an int.
        IndexError: an id is outside `[0, num_nodes)`.

    Example:
        >>> global_graph(4, [0]).to_mask().sum().item()
        7

    Beltagy et al., `Longformer <https://arxiv.org/abs/2004.05150>`_, 2020; Zaheer et al., `Big Bird
    <https://arxiv.org/abs/2007.14062>`_, 2020.
    """
    check_count("`num_nodes`", num_nodes)
    try:
        ids = torch.as_tensor(global_nodes)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"`global_nodes` must be node ids, got {type(global_nodes).__name__}. Pass a list or a tensor."
        ) from error
    if ids.numel() == 0:
        ids = ids.long()
    if ids.dtype not in INTEGERS or ids.dim() != 1:
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
    if edge_index.dtype not in INTEGERS:
        raise ValueError(
            f"Expected 'edge_index' to be of integer type (got '{edge_index.dtype}')."
            + (
                " SparseGraph.from_mask reads masks."
                if edge_index.dtype == torch.bool
                else " Convert it with .long()."
            )
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' to have shape [2, num_edges] (got {list(edge_index.shape)})."
            " Row 0 holds the sources (keys), row 1 the targets (queries)."
        )
    check_count("the number of edges", edge_index.size(1))
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
    check_count("the number of edges", col.numel())
    return SparseGraph.from_edge_index(torch.stack([col.long(), row.long()]), size=(num_keys, num_queries))


def _rows_of(ptr: Tensor, ids: Tensor, ptr_name: str, ids_name: str) -> Tensor:
    for name, tensor in ((ptr_name, ptr), (ids_name, ids)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in INTEGERS or tensor.dim() != 1:
            got = (
                f"{tensor.dtype} {list(tensor.shape)}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            raise ValueError(f"`{name}` must be a one-dimensional integer tensor, got {got}.")
        check_count(f"the length of `{name}`", tensor.numel())
    check_one_device(f"`{ptr_name}`", ptr.device, f"`{ids_name}`", ids.device)
    check_readable(f"`{ptr_name}`", ptr.device)
    counts = ptr.long().diff()
    if ptr.numel() == 0 or ptr[0] != 0 or ptr[-1] != ids.numel() or (counts < 0).any():
        raise ValueError(f"`{ptr_name}` must rise from 0 to len({ids_name}) = {ids.numel()} without falling.")
    return torch.arange(counts.numel(), device=ids.device).repeat_interleave(counts, output_size=ids.numel())


def _given_size(num_nodes: int | None, size: tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        if num_nodes is None:
            return None
        check_count("`num_nodes`", num_nodes)
        return num_nodes, num_nodes
    if num_nodes is not None:
        raise ValueError(f"Pass `num_nodes` or `size`, not both, got {num_nodes} and {size}.")
    if not isinstance(size, (tuple, list)):
        raise TypeError(f"`size` must be (num_keys, num_queries), got {type(size).__name__}.")
    if len(size) != 2:
        raise ValueError(f"`size` must be (num_keys, num_queries), got {size}.")
    check_count("`size[0]` (num_keys)", size[0])
    check_count("`size[1]` (num_queries)", size[1])
    return size[0], size[1]


def _check_dense(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout}. as_graph reads adjacencies.")


def check_one_device(name: str, device: torch.device, other: str, others: torch.device) -> None:
    if device != others:
        raise ValueError(
            f"{name} and {other} must be on one device, got {device} and {others}. Move them with `.to(device)`."
        )


def check_readable(name: str, device: torch.device) -> None:
    if device.type == "meta":
        raise ValueError(
            f"{name} must hold numbers, got none: it is on the meta device. Build from it on another device, then"
            " move the result with `.to(device)`."
        )


def check_count(name: str, count: Any, least: int = 0) -> None:
    """Check how many of something there are; `name` is what an error calls it."""
    if isinstance(count, bool) or not isinstance(count, (int, np.integer, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(count).__name__}.")
    # Compiled code must not branch on a size it does not know yet; there the operator checks when it runs.
    if not torch.compiler.is_compiling() and not least <= count < _LIMIT:
        raise ValueError(f"{name} must be at least {least} and below 2**31, got {count}.")


def checked_count(name: str, count: Any, least: int = 0) -> int:
    check_count(name, count, least)
    return int(count)


def check_word(name: str, word: Any, words: tuple[str, ...]) -> None:
    if not isinstance(word, str) or word not in words:
        *most, last = (f'"{one}"' for one in words)
        raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {word!r}.")


def check_graph(graph: Any) -> None:
    if not isinstance(graph, Graph):
        raise TypeError(
            f"`graph` must be a Graph, got {type(graph).__name__}. Build one with graphattn.as_graph."
        )


def _one_above(ids: Tensor) -> int:
    if ids.is_meta:
        raise ValueError(
            "`num_nodes` or `size` must be given for an `edge_index` on the meta device, whose ids cannot be read."
        )
    # At least 0: a negative id is then reported as out of range, not as a negative size.
    count = max(int(ids.max()) + 1, 0) if ids.numel() else 0
    check_count("the highest node id + 1", count)
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
        check_count(name, count)
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


@compiled
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
