"""Positional encodings as functions: positions or a graph in, node features or a bias out.

Attention alone does not see order: permuted nodes give permuted outputs. Add one of these to the node features,
concatenate it, or pass it as a bias.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphattn.graph import CompleteGraph, Graph, GridGraph, WindowGraph, axis_intervals

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int

_DENSE = 256  # nodes up to which a full eigendecomposition is the fastest
_BLOCK = 2**22  # entries of a matrix power that are held at once


def sinusoidal(
    positions: Int[Tensor, "nodes axes"] | Float[Tensor, "nodes axes"], dim: int, *, base: float = 10000.0
) -> Float[Tensor, "nodes dim"]:
    """Sines and cosines of the positions, at wavelengths that grow geometrically from 2π to 2π · base.

    .. math:: e_{i,2c} = \\sin(p_i \\, base^{-2c/w}), \\qquad e_{i,2c+1} = \\cos(p_i \\, base^{-2c/w})

    The encoding of p + s is a rotation of that of p that depends only on s. Positions on several axes are
    encoded one axis after the other, each in an equal, even share w of the dims; dims that are left over are 0.
    Angles are computed in float64, so large positions are as exact as small ones. O(nodes · dim).

    Args:
        positions: ``[nodes]`` or ``[nodes, axes]``, any real numbers, such as ``graph.positions()``.
        dim: number of features.
        base: ratio of the longest to the shortest wavelength.

    Returns:
        ``[nodes, dim]`` in the dtype of floating positions, else in PyTorch's default dtype.

    Raises:
        ValueError: positions have another shape or are not finite, `dim` is negative, or `base` not positive.
        TypeError: positions are not a real tensor, or `dim` is not an int.

    Example:
        >>> sinusoidal(torch.tensor([0, 1]), 4)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])

    Vaswani et al., `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
    """
    dim = _count("dim", dim)
    if (
        isinstance(base, bool)
        or not isinstance(base, (int, float))
        or not 0 < base <= int(np.finfo(float).max)
    ):
        raise ValueError(f"`base` must be a positive number, got {base!r}.")
    positions, dtype = checked_positions(positions)
    num_nodes, axes = positions.shape
    pairs = dim // (2 * axes) if axes else 0
    exponent = torch.arange(pairs, dtype=torch.float64, device=positions.device) / max(pairs, 1)
    angles = positions.double().unsqueeze(-1) * base**-exponent
    waves = torch.stack([angles.sin(), angles.cos()], dim=-1).view(num_nodes, 2 * pairs * axes)
    return torch.nn.functional.pad(waves, (0, dim - waves.size(1))).to(dtype)


def laplacian_eigenvectors(
    graph: Graph,
    k: int,
    *,
    edge_weight: Float[Tensor, " edges"] | None = None,
    normalization: str | None = "sym",
    directed: str = "symmetrize",
    random_sign: bool = False,
) -> Float[Tensor, "nodes k"]:
    """The k smoothest non-constant vibrations of a graph: eigenvectors of its Laplacian.

    .. math:: L = I - D^{-1/2} A D^{-1/2}, \\qquad L e_c = λ_c e_c, \\qquad 0 < λ_1 \\le \\dots \\le λ_k

    A counts edges with their multiplicity (or sums their weights), self-loops included, D holds its row sums.
    Every connected component has one null vector, constant up to the degrees; all of them are left out, so a
    node without edges has zeros. Eigenvectors are solved for component by component, are orthonormal, and come
    in ascending order of eigenvalue; columns for which the graph has no eigenvector are 0, at the end. The
    first entry of (nearly) the largest size in each is positive, which makes the signs reproducible;
    eigenvectors of one repeated eigenvalue are some basis of their space. The same result on every call, not
    differentiable.

    Components of up to 256 nodes are solved densely. Larger ones by a block Krylov method in float64, O(E · k)
    a step: with a sparse factorization of L where the graph is long and thin (chains, roads, meshes), whose
    eigenvalues are tiny, and with L itself where it spreads fast. The residual is below 1e-8 of the largest
    eigenvalue. A progress bar appears in a terminal after five seconds.

    Args:
        graph: any graph whose keys and queries are the same nodes.
        k: number of eigenvectors.
        edge_weight: ``[edges]`` in ``graph.to_edge_index()`` order, none negative; 1 by default.
        normalization: ``"sym"``, or None for :math:`L = D - A`.
        directed: ``"symmetrize"`` takes :math:`(A + A^\\top) / 2`, ``"raise"`` refuses a graph that is not
            symmetric.
        random_sign: multiply each column by ±1 drawn from PyTorch's generator, as augmentation in training.

    Returns:
        ``[nodes, k]`` in the dtype of edge_weight, else in PyTorch's default dtype.

    Raises:
        ValueError: `k` is negative, the graph bipartite or, with ``"raise"``, not symmetric, a weight negative
            or not finite, or an option unknown.
        TypeError: `graph` is not a Graph, `k` not an int, or weights not floating point.

    Example:
        >>> from graphattn import SparseGraph
        >>> pair = SparseGraph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), num_nodes=3)
        >>> laplacian_eigenvectors(pair, 2)
        tensor([[ 0.7071,  0.0000],
                [-0.7071,  0.0000],
                [ 0.0000,  0.0000]])

    Dwivedi et al., `Benchmarking Graph Neural Networks <https://arxiv.org/abs/2003.00982>`_, 2020.
    """
    from scipy.sparse import csgraph, diags_array, eye_array

    k = _count("k", k)
    if normalization is not None and (not isinstance(normalization, str) or normalization != "sym"):
        raise ValueError(f'`normalization` must be "sym" or None, got {normalization!r}.')
    if not isinstance(directed, str) or directed not in ("symmetrize", "raise"):
        raise ValueError(f'`directed` must be "symmetrize" or "raise", got {directed!r}.')
    A, dtype = _adjacency(graph, edge_weight)
    symmetric = (A + A.T) / 2
    if directed == "raise" and np.abs((A - symmetric).data).max(initial=0) > 1e-6 * A.data.max(initial=0):
        raise ValueError(
            '`graph` must be symmetric with `directed="raise"`, got edges without an equal edge back.'
            " Add them, or leave `directed` at its default."
        )
    A = symmetric
    degree = A.sum(axis=1)
    if normalization == "sym":
        root = np.sqrt(degree)
        inverse = np.divide(1.0, root, out=np.zeros_like(root), where=root > 0)
        scaling = diags_array(inverse)
        L, null = eye_array(A.shape[0], format="csr") - scaling @ A @ scaling, root
        largest = 2.0
    else:
        L, null = diags_array(degree, format="csr") - A, np.ones_like(degree)
        largest = 2.0 * degree.max(initial=0.0)
    L = L.tocsr()

    _, component = csgraph.connected_components(A, directed=False)
    order = np.argsort(component, kind="stable")
    ends = np.cumsum(np.bincount(component))
    pairs = []  # (eigenvalue, its nodes, its eigenvector)
    for start, end in zip(np.append(0, ends[:-1]), ends):
        wanted = min(k, end - start - 1)
        if wanted > 0:
            nodes = np.sort(order[start:end])
            part = L[nodes][:, nodes] if len(nodes) < len(component) else L
            values, vectors = _smallest_eigenpairs(part.tocsr(), null[nodes], largest, wanted)
            pairs += [(value, nodes, vector) for value, vector in zip(values, vectors.T)]
    pairs.sort(key=lambda pair: pair[0])

    out = np.zeros((A.shape[0], k))
    for column, (_, nodes, vector) in enumerate(pairs[:k]):
        size = np.abs(vector)
        first = np.argmax(size >= (1 - 1e-6) * size.max())
        out[nodes, column] = vector * np.sign(vector[first])
    encoding = torch.from_numpy(out).to(graph.device, dtype)
    if random_sign:
        encoding = encoding * (torch.randint(2, (k,), device=graph.device) * 2 - 1)
    return encoding


def random_walk(
    graph: Graph, steps: int, *, edge_weight: Float[Tensor, " edges"] | None = None
) -> Float[Tensor, "nodes steps"]:
    """How likely a random walk is back where it started after 1, 2, ..., `steps` steps.

    .. math:: e_{i,t} = (P^t)_{ii}, \\qquad P = D^{-1} A

    A walk leaves a node along one of its outgoing edges (those it is the key of), drawn in proportion to their
    weights; parallel edges count each. Where a node has no outgoing edge the walk is lost, so its row is 0.
    Every entry is in [0, 1]. Computed from powers up to half of `steps`, :math:`P^t_{ii} = \\sum_j
    P^{⌈t/2⌉}_{ij} P^{⌊t/2⌋}_{ji}`, in slabs of nodes that stay sparse while they can: O(nodes · edges · steps)
    time at worst, O(nodes + edges) memory. A progress bar appears in a terminal after five seconds. Not
    differentiable.

    Args:
        graph: any graph whose keys and queries are the same nodes.
        steps: length of the longest walk.
        edge_weight: ``[edges]`` in ``graph.to_edge_index()`` order, none negative; 1 by default.

    Returns:
        ``[nodes, steps]`` in the dtype of edge_weight, else in PyTorch's default dtype.

    Raises:
        ValueError: `steps` is negative, the graph bipartite, or a weight negative or not finite.
        TypeError: `graph` is not a Graph, `steps` not an int, or weights not floating point.

    Example:
        >>> from graphattn import SparseGraph
        >>> star = SparseGraph.from_edge_index(torch.tensor([[0, 1, 0, 2], [1, 0, 2, 0]]))
        >>> random_walk(star, 2)
        tensor([[0.0000, 1.0000],
                [0.0000, 0.5000],
                [0.0000, 0.5000]])

    Dwivedi et al., `Graph Neural Networks with Learnable Structural and Positional Representations
    <https://arxiv.org/abs/2110.07875>`_, 2022.
    """
    from scipy.sparse import diags_array, eye_array
    from tqdm import tqdm

    steps = _count("steps", steps)
    A, dtype = _adjacency(graph, edge_weight)
    num_nodes = A.shape[0]
    outgoing = A.sum(axis=1)
    P: Any = diags_array(np.divide(1.0, outgoing, out=np.zeros_like(outgoing), where=outgoing > 0)) @ A
    P, backwards = P.tocsr(), P.T.tocsr()
    identity: Any = eye_array(num_nodes, format="csc")
    if num_nodes <= _DENSE:
        P, backwards = P.toarray(), backwards.toarray()

    out = np.zeros((num_nodes, steps))
    smallest = max(1, _BLOCK // max(num_nodes, 1))
    slabs = [(0, num_nodes)]
    with tqdm(total=num_nodes, desc="random_walk", delay=5, leave=False, disable=None) as bar:
        while slabs:
            start, end = slabs.pop()
            diagonals = _returns(P, backwards, identity[:, start:end].tocsr(), steps, end - start > smallest)
            if diagonals is None:
                middle = (start + end) // 2
                slabs += [(middle, end), (start, middle)]
            else:
                out[start:end] = diagonals
                bar.update(end - start)
    return torch.from_numpy(out.clip(0.0, 1.0)).to(graph.device, dtype)


def relative_positions(graph: Graph) -> Int[Tensor, "*edges axes"]:
    """Position of the key minus position of the query, for every edge of a structured graph.

    In the edge layout, with 1 in place of the queries where all of them see the same offsets: ``[1, slots,
    axes]`` on windows and on clipped grids. O(what it returns). Entries without an edge hold the offset that
    the edge would have.

    Args:
        graph: a complete, window or grid graph.

    Returns:
        int64 ``[*edge_shape, axes]``, the first size 1 where it can be.

    Raises:
        ValueError: the graph has no positions.
        TypeError: `graph` is not a Graph.

    Example:
        >>> relative_positions(WindowGraph(100, (2, 1))).flatten()
        tensor([-2, -1,  0,  1])
    """
    _check_graph(graph)
    if not isinstance(graph, (CompleteGraph, WindowGraph, GridGraph)):
        raise ValueError(
            f"`graph` must have positions, as a CompleteGraph, WindowGraph or GridGraph does, got {graph}."
        )
    if len(graph.edge_shape) == 1:
        source, target = graph.to_edge_index()
        positions = graph.positions()
        return positions[source] - positions[target]
    if isinstance(graph, GridGraph):
        radius, border, offset = graph.radius, graph.border, 0
    else:
        radius = (graph.radius,) if isinstance(graph, WindowGraph) else ((None, None),)
        border, offset = "clip", graph.offset

    along = []  # for each axis [coordinates, slots], or [1, slots] where all coordinates see the same
    for axis, (before, after) in zip(axis_intervals(graph), radius):
        slot = torch.arange(axis.slots, device=graph.device)
        x = torch.arange(axis.first.numel(), device=graph.device).view(-1, 1) + offset
        if before is None or after is None:  # one slot for each key
            along.append(slot - x)
        elif border == "shift":
            along.append(axis.first.view(-1, 1) + axis.step * slot - x)
        else:
            along.append((slot - before).view(1, -1) * axis.step)
    shared = all(table.size(0) == 1 for table in along)
    full = [1 if shared else axis.first.numel() for axis in axis_intervals(graph)]
    full += [table.size(1) for table in along]
    offsets = []
    for a, table in enumerate(along):
        shape = [1] * len(full)
        shape[a], shape[a + len(along)] = table.shape
        offsets.append(table.reshape(shape).expand(full))
    queries = math.prod(full[: len(along)])
    return torch.stack(offsets, dim=-1).view(queries, math.prod(full[len(along) :]), len(along))


def alibi(graph: Graph, heads: int) -> Float[Tensor, "*edges heads"]:
    """Attention with linear biases: a penalty that grows with the distance of query and key.

    .. math:: b_{ij,h} = -m_h \\, |p_i - p_j|, \\qquad m_h = 2^{-8h / heads}, \\quad h = 1 \\dots heads

    Distances on grids are Euclidean. For a number of heads that is no power of two the slopes are the paper's:
    those of the next lower power, then every other one of the next higher. It works for longer sequences than
    those trained on. The result broadcasts over the queries where it can: O(slots · heads) on windows and
    clipped grids, O(num_queries · slots · heads) elsewhere.

    Args:
        graph: a complete, window or grid graph.
        heads: number of heads.

    Returns:
        A bias for `graph_attention`, in the edge layout of `graph`, in PyTorch's default dtype.

    Raises:
        ValueError: the graph has no positions, or `heads` is not positive.
        TypeError: `graph` is not a Graph, or `heads` not an int.

    Example:
        >>> alibi(WindowGraph(100, (2, 0)), heads=2)
        tensor([[[-0.1250, -0.0078],
                 [-0.0625, -0.0039],
                 [ 0.0000,  0.0000]]])

    Press et al., `Train Short, Test Long <https://arxiv.org/abs/2108.12409>`_, 2022; on grids: Fuller et al.,
    `CROMA <https://arxiv.org/abs/2311.00566>`_, 2023.
    """
    heads = _count("heads", heads, least=1)
    power = 2 ** (heads.bit_length() - 1)
    exponents = [8 * (h + 1) / power for h in range(power)]
    exponents += [4 * (2 * h + 1) / power for h in range(heads - power)]
    distance = relative_positions(graph).double().norm(dim=-1)
    slopes = 2.0 ** -torch.tensor(exponents, dtype=torch.float64, device=distance.device)
    return (0.0 - distance.unsqueeze(-1) * slopes).to(torch.get_default_dtype())


def checked_positions(positions: Tensor) -> tuple[Tensor, torch.dtype]:
    """Positions as ``[nodes, axes]``, and the dtype of an encoding of them."""
    if not isinstance(positions, Tensor) or positions.is_complex() or positions.dtype == torch.bool:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"`positions` must be a tensor of real numbers, got {got}.")
    if positions.layout is not torch.strided:
        raise TypeError(f"`positions` must be dense, got {positions.layout}. Convert it with `.to_dense()`.")
    if positions.dim() not in (1, 2):
        raise ValueError(
            f"`positions` must have shape [nodes] or [nodes, axes], got {list(positions.shape)}."
            " Graphs of one batch go side by side along nodes."
        )
    floating = positions.is_floating_point()
    if floating and not torch.compiler.is_compiling() and not positions.isfinite().all():
        raise ValueError("`positions` must be finite, got NaN or infinity.")
    dtype = positions.dtype if floating else torch.get_default_dtype()
    return positions.unsqueeze(1) if positions.dim() == 1 else positions, dtype


def _smallest_eigenpairs(L, null: np.ndarray, largest: float, k: int) -> tuple[list[float], np.ndarray]:
    """The k smallest eigenpairs of the Laplacian of a connected graph, its null vector aside."""
    n = len(null)
    constant = torch.from_numpy(null / np.linalg.norm(null)).unsqueeze(1)
    if n <= _DENSE or 4 * k > n:
        # The null vector is moved above all other eigenvalues: however small those are, none is mistaken.
        values, vectors = torch.linalg.eigh(
            torch.from_numpy(L.toarray()) + 2 * largest * constant @ constant.T
        )
        return values[:k].tolist(), vectors[:, :k].numpy()

    def project(x: Tensor) -> Tensor:
        return x - constant @ (constant.T @ x)

    def times(x: Tensor) -> Tensor:
        return project(torch.from_numpy(L @ x.numpy()))

    if _is_thin(L):
        converged, _, vectors = _largest_eigenpairs(_inverse(L, project), project, n, k, 5_000)
    else:
        converged, values, vectors = _largest_eigenpairs(lambda x: largest * x - times(x), project, n, k, 40)
        if not converged:
            cut = largest - float(values[-1])
            converged, _, vectors = _largest_eigenpairs(
                lambda x: _chebyshev(times, x, cut, largest), project, n, k, 5_000
            )
    if not converged:
        raise RuntimeError(f"laplacian_eigenvectors did not converge on a component of {n} nodes.")
    vectors = torch.linalg.qr(vectors[:, :k])[0]
    return (vectors * times(vectors)).sum(0).tolist(), vectors.numpy()


def _inverse(L, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The pseudoinverse of the Laplacian of a connected graph."""
    from scipy.sparse.linalg import splu

    # Without one node, whose value is then set to 0, the matrix is regular; what is lost is the null vector.
    rest = np.delete(np.arange(L.shape[0]), np.argmax(L.diagonal()))
    factors = splu(
        L[rest][:, rest].tocsc(),
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )

    def solve(x: Tensor) -> Tensor:
        y = np.zeros(x.shape)
        y[rest] = factors.solve(x.numpy()[rest])
        return project(torch.from_numpy(y))

    return solve


def _chebyshev(times: Callable[[Tensor], Tensor], x: Tensor, cut: float, largest: float) -> Tensor:
    """A polynomial of the Laplacian that is at most 1 from `cut` to `largest` and steep below: T_16."""

    def scaled(x: Tensor) -> Tensor:  # maps [cut, largest] to [1, -1]
        return ((largest + cut) * x - 2 * times(x)) / (largest - cut)

    before, now = x, scaled(x)
    for _ in range(15):
        before, now = now, 2 * scaled(now) - before
    return now


def _is_thin(L) -> bool:
    """Whether a factorization stays small: every level of a breadth-first search cuts the graph in two."""
    from scipy.sparse import csgraph

    order, predecessor = csgraph.breadth_first_order(L, 0, directed=False)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    # Nodes are found in the order of those that found them: a level ends where its last node's finds do.
    found_by = rank[predecessor[order[1:]]]
    widest, start, end = 1, 0, 1
    while end < len(order):
        start, end = end, 1 + int(np.searchsorted(found_by, end))
        widest = max(widest, end - start)
    return widest <= 8 * math.sqrt(len(order))


def _largest_eigenpairs(
    operator: Callable[[Tensor], Tensor], project: Callable[[Tensor], Tensor], n: int, k: int, steps: int
) -> tuple[bool, Tensor, Tensor]:
    """The k largest eigenpairs by a block Krylov method with restarts, and whether they converged in so many steps.

    A block is wider than k, so it meets every copy of a repeated eigenvalue, which a single vector would miss.
    The values are those of the whole last subspace, the vectors those of a block.
    """
    from tqdm import tqdm

    width = k + 2
    most = min(10 * width, n - 1)
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(n, width, generator=generator, dtype=torch.float64)

    block = torch.linalg.qr(project(noise()))[0]
    basis, image = block[:, :0], block[:, :0]
    with tqdm(desc="laplacian_eigenvectors", unit=" steps", delay=5, leave=False, disable=None) as bar:
        for _ in range(steps):
            bar.update()
            basis, image = torch.cat([basis, block], 1), torch.cat([image, operator(block)], 1)
            small = basis.T @ image
            values, rotation = torch.linalg.eigh((small + small.T) / 2)
            values, rotation = values.flip(0), rotation.flip(1)
            ritz, ritz_image = basis @ rotation[:, :width], image @ rotation[:, :width]
            residual = ritz_image - ritz * values[:width]
            error = residual.norm(dim=0)
            if (error[:k] <= 1e-10 * values[:k] + 1e-14 * values[0]).all():
                return True, values, ritz
            if basis.size(1) + width > most:
                keep = min(basis.size(1), 4 * width)
                basis, image = basis @ rotation[:, :keep], image @ rotation[:, :keep]
            # A vector that is exact already leads nowhere: a random one takes its place.
            block = torch.where(error > 1e-14 * values[0], residual, noise())
            for _ in range(2):  # once leaves rounding errors of what was taken away
                block = torch.linalg.qr(project(block - basis @ (basis.T @ block)))[0]
    return False, values[: 4 * width], ritz


def _returns(P: Any, backwards: Any, start: Any, steps: int, may_split: bool) -> np.ndarray | None:
    """Diagonals of the powers of P for the nodes of a slab; None if its columns fill up and it may be split."""
    diagonals = np.zeros((start.shape[1], steps))
    there = back = start  # a column for each node of the slab: its row of P^s, and its column of P^t
    for step in range(steps):
        if step % 2 == 0:
            there = backwards @ there
        else:
            back = P @ back
        for x in (there, back):
            if may_split and not isinstance(x, np.ndarray) and x.nnz > _BLOCK:
                return None
        there, back = (
            x if isinstance(x, np.ndarray) or 8 * x.nnz < math.prod(x.shape) else x.toarray()
            for x in (there, back)
        )
        both = there * back if isinstance(there, np.ndarray) else there.multiply(back)
        diagonals[:, step] = np.asarray(both.sum(axis=0)).reshape(-1)
    return diagonals


def _adjacency(graph: Graph, edge_weight: Tensor | None) -> tuple[Any, torch.dtype]:
    """Float64 CSR adjacency, A[source, target], parallel edges summed, and the dtype of an encoding."""
    from scipy.sparse import coo_array

    _check_graph(graph)
    if graph.num_keys != graph.num_queries:
        raise ValueError(
            f"`graph` must have the same nodes as keys and queries, got {graph.num_keys} keys and"
            f" {graph.num_queries} queries."
        )
    source, target = graph.to_edge_index().cpu().numpy()
    dtype = torch.get_default_dtype()
    weight = np.ones(len(source))
    if edge_weight is not None:
        if not isinstance(edge_weight, Tensor) or not edge_weight.is_floating_point():
            got = edge_weight.dtype if isinstance(edge_weight, Tensor) else type(edge_weight).__name__
            raise TypeError(f"`edge_weight` must be a floating point tensor, got {got}.")
        if edge_weight.shape != (len(source),):
            raise ValueError(
                f"`edge_weight` must have shape [{len(source)}] for {graph}, got {list(edge_weight.shape)}."
            )
        dtype = edge_weight.dtype
        weight = edge_weight.detach().cpu().double().numpy()
        if not np.all((weight >= 0) & np.isfinite(weight)):
            raise ValueError("`edge_weight` must be finite and not negative.")
        # Only ratios matter; sums of the largest numbers would overflow.
        weight = weight / max(weight.max(initial=0.0), np.finfo(np.float64).tiny)
    A = coo_array((weight, (source, target)), shape=(graph.num_keys, graph.num_keys)).tocsr()
    A.eliminate_zeros()
    return A, dtype


def _check_graph(graph: Graph) -> None:
    if not isinstance(graph, Graph):
        raise TypeError(
            f"`graph` must be a Graph, got {type(graph).__name__}. Build one with graphattn.as_graph."
        )


def _count(name: str, x: int, least: int = 0) -> int:
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
        raise TypeError(f"`{name}` must be an int, got {type(x).__name__}.")
    if not least <= x < 2**31:
        raise ValueError(f"`{name}` must be at least {least} and below 2**31, got {x}.")
    return int(x)
