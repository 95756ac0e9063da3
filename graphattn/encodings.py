"""Positional encodings as functions: positions or a graph in, node features or a bias out.

Attention alone does not see order: permuted nodes give permuted outputs. Add one of these to the node features,
concatenate it, or pass it as a bias.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphattn.graph import (
    CompleteGraph,
    Graph,
    GridGraph,
    WindowGraph,
    axis_intervals,
    check_graph,
    check_readable,
    check_word,
    checked_count,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int

_DENSE = 256  # nodes up to which a full eigendecomposition is the fastest
_FALLBACK = 4096  # nodes up to which one is affordable where iterations do not converge
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
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
        ValueError: positions have another shape or are not finite, `dim` is negative, or `base` less than 1.
        TypeError: positions are not a dense tensor of real numbers, `dim` not an int, or `base` not a number.

    Example:
        >>> sinusoidal(torch.tensor([0, 1]), 4)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])

    Vaswani et al., `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
    """
    dim = checked_count("`dim`", dim)
    base = checked_base(base)
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
    a step: with a sparse factorization of L where the graph is long and thin (chains, trees, roads, meshes),
    whose eigenvalues are tiny, and with L itself where it spreads fast. The residual is below 1e-8 of the largest
    eigenvalue of the component, however far apart the weights are; eigenvectors whose eigenvalues are the same
    up to 1e-12 of that come in any mixture. A progress bar appears in a terminal after five seconds.

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
        RuntimeError: a component of more than 4096 nodes, not thin, with weights too far apart for the iteration.

    Example:
        >>> from graphattn import SparseGraph
        >>> pair = SparseGraph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), num_nodes=3)
        >>> laplacian_eigenvectors(pair, 2)
        tensor([[ 0.7071,  0.0000],
                [-0.7071,  0.0000],
                [ 0.0000,  0.0000]])

    Dwivedi et al., `Benchmarking Graph Neural Networks <https://arxiv.org/abs/2003.00982>`_, 2020.
    """
    from scipy.sparse import coo_array, csgraph, diags_array, eye_array

    k = checked_count("`k`", k)
    if normalization is not None and (not isinstance(normalization, str) or normalization != "sym"):
        raise ValueError(f'`normalization` must be "sym" or None, got {normalization!r}.')
    check_word("`directed`", directed, ("symmetrize", "raise"))
    source, target, weight, dtype = _weighted_edges(graph, edge_weight)
    n = graph.num_queries
    _, component = csgraph.connected_components(
        coo_array((np.ones_like(weight), (source, target)), shape=(n, n)), directed=False
    )
    # Only ratios of weights within a component matter. Relative to the largest at either end, or without
    # normalization to the largest of the component, no sum overflows and no small component is lost.
    largest = np.zeros(n)
    np.maximum.at(largest, source, weight)
    np.maximum.at(largest, target, weight)
    scale = np.zeros(n)
    np.maximum.at(scale, component, largest)
    scale = scale[component]
    unit = largest if normalization == "sym" else scale
    here, there = weight / unit[source], weight / unit[target]
    degree = (np.bincount(source, here, n) + np.bincount(target, there, n)) / 2
    A = coo_array((np.sqrt(here) * np.sqrt(there), (source, target)), shape=(n, n)).tocsr()
    symmetric = (A + A.T) / 2
    if directed == "raise" and (abs(A - symmetric) - 1e-6 * symmetric).max() > 0:
        raise ValueError(
            '`graph` must be symmetric with `directed="raise"`, got edges without an equal edge back.'
            " Add them, or leave `directed` at its default."
        )
    if normalization == "sym":
        joined = degree > 0
        inverse = diags_array(np.divide(1.0, np.sqrt(degree), out=np.zeros(n), where=joined))
        L = eye_array(n, format="csr") - inverse @ symmetric @ inverse
        null = np.sqrt(degree * np.divide(largest, scale, out=np.zeros(n), where=joined))
        scale = np.ones(n)
    else:
        L, null = diags_array(degree, format="csr") - symmetric, np.ones(n)
    L = L.tocsr()

    order = np.argsort(component, kind="stable")
    ends = np.cumsum(np.bincount(component))
    pairs = []  # (logarithm of the eigenvalue, its nodes, its eigenvector)
    for start, end in zip(np.append(0, ends[:-1]), ends):
        wanted = min(k, end - start - 1)
        if wanted > 0:
            nodes = np.sort(order[start:end])
            part = L[nodes][:, nodes] if len(nodes) < n else L
            values, vectors = _smallest_eigenpairs(part.tocsr(), null[nodes], wanted)
            size = np.log2(np.maximum(values, np.finfo(float).tiny)) + np.log2(scale[nodes[0]])
            pairs += zip(size.tolist(), [nodes] * wanted, vectors.T)
    pairs.sort(key=lambda pair: pair[0])

    out = np.zeros((n, k))
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
    from scipy.sparse import coo_array, diags_array, eye_array
    from tqdm import tqdm

    steps = checked_count("`steps`", steps)
    source, target, weight, dtype = _weighted_edges(graph, edge_weight)
    num_nodes = graph.num_queries
    largest = np.zeros(
        num_nodes
    )  # of the weights that leave a node: relative to it their sum cannot overflow
    np.maximum.at(largest, source, weight)
    A: Any = coo_array((weight / largest[source], (source, target)), shape=(num_nodes, num_nodes)).tocsr()
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
    check_graph(graph)
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
    heads = checked_count("`heads`", heads, 1)
    power = 2 ** (heads.bit_length() - 1)
    exponents = [8 * (h + 1) / power for h in range(power)]
    exponents += [4 * (2 * h + 1) / power for h in range(heads - power)]
    distance = relative_positions(graph).double().norm(dim=-1)
    slopes = 2.0 ** -torch.tensor(exponents, dtype=torch.float64, device=distance.device)
    return (0.0 - distance.unsqueeze(-1) * slopes).to(torch.get_default_dtype())


def checked_positions(positions: Tensor) -> tuple[Tensor, torch.dtype]:
    """Positions as ``[nodes, axes]``, and the dtype of an encoding of them."""
    if not isinstance(positions, Tensor) or positions.layout is not torch.strided:
        got = positions.layout if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"`positions` must be a dense tensor, got {got}.")
    floating = positions.is_floating_point()
    if positions.dtype in (torch.bool, torch.complex64, torch.complex128, torch.complex32) or (
        floating and positions.dtype not in FLOATS
    ):
        raise TypeError(
            f"`positions` must be integers, float16, bfloat16, float32 or float64, got {positions.dtype}."
        )
    if positions.dim() not in (1, 2):
        raise ValueError(
            f"`positions` must have shape [nodes] or [nodes, axes], got {list(positions.shape)}."
            " Graphs of one batch go side by side along nodes."
        )
    unknown = torch.compiler.is_compiling() or positions.is_meta
    if floating and not unknown and not positions.isfinite().all():
        raise ValueError("`positions` must be finite, got NaN or infinity.")
    dtype = positions.dtype if floating else torch.get_default_dtype()
    return positions.unsqueeze(1) if positions.dim() == 1 else positions, dtype


def checked_base(base: float) -> float:
    """The ratio of the longest to the shortest wavelength."""
    if isinstance(base, bool) or not isinstance(base, (int, float, np.integer, np.floating)):
        raise TypeError(f"`base` must be a number, got {type(base).__name__}.")
    base = base.item() if isinstance(base, np.generic) else base
    # The longest wavelength is no shorter than the shortest; and so no angle is larger than its position.
    if not 1.0 <= base <= sys.float_info.max:
        raise ValueError(f"`base` must be a finite number of at least 1, got {base!r}.")
    return float(base)


def _smallest_eigenpairs(L, null: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k smallest eigenpairs of the Laplacian of a connected graph, its null vector aside."""
    n = len(null)
    largest = 2.0 * L.diagonal().max()  # no eigenvalue is larger
    constant = torch.from_numpy(null / np.linalg.norm(null)).unsqueeze(1)

    def densely() -> tuple[np.ndarray, np.ndarray]:
        # The null vector is moved above all other eigenvalues: however small those are, none is mistaken.
        moved = torch.from_numpy(L.toarray()).addmm_(constant, constant.T, alpha=2 * largest)
        values, vectors = torch.linalg.eigh(moved)
        return values[:k].numpy(), vectors[:, :k].numpy()

    if n <= _DENSE or n < 10 * (k + 2):
        return densely()

    fixed = constant  # what is known already

    def project(x: Tensor) -> Tensor:
        return x - fixed @ (fixed.T @ x)

    def times(x: Tensor) -> Tensor:
        return torch.from_numpy(L @ x.numpy())

    if _is_thin(L):
        inverse = _inverse(L, largest)

        def first(values: Tensor) -> Tensor:
            return values >= 1e-4 * values[0]

        def accepts(values: Tensor, error: Tensor, x: Tensor) -> bool:
            exact = (error <= 1e-10 * values) | (_residuals(times, x) <= 1e-13 * largest)
            return bool(exact[first(values)].all())

        # Beside an eigenvalue of the inverse others are known to its rounding errors only: large ones go first.
        converged = True
        while converged and fixed.size(1) <= k:
            converged, values, vectors = _largest_eigenpairs(
                lambda x: project(inverse(x)), project, accepts, (n, k + 1 - fixed.size(1), 300)
            )
            if converged:
                fixed = torch.cat([fixed, vectors[:, first(values)]], 1)
        vectors = fixed[:, 1:]
    else:
        converged, values, vectors = _largest_eigenpairs(
            lambda x: project(largest * x - times(x)),
            project,
            lambda _values, error, _: bool((error <= 1e-10 * largest).all()),
            (n, k, 40),
        )
        if not converged:
            cut = largest - float(values[-1])
            converged, _, vectors = _largest_eigenpairs(
                lambda x: project(_chebyshev(times, x, cut, largest)),
                project,
                lambda _values, _error, x: bool((_residuals(times, x) <= 1e-10 * largest).all()),
                (n, k, 100 if n <= _FALLBACK else 5_000),
            )
    if converged:
        vectors = torch.linalg.qr(vectors)[0]
        converged = bool((_residuals(times, vectors) <= 1e-9 * largest).all())
    if not converged and n <= _FALLBACK:
        return densely()
    if not converged:
        raise RuntimeError(
            f"laplacian_eigenvectors did not converge on a component of {n} nodes. Weights that span many orders"
            " of magnitude are hard: leave out the smallest, or take a smaller `k`."
        )
    return (vectors * times(vectors)).sum(0).numpy(), vectors.numpy()


def _residuals(times: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """How far orthonormal vectors are from being eigenvectors."""
    image = times(x)
    return (image - x * (x * image).sum(0)).norm(dim=0)


def _inverse(L, largest: float) -> Callable[[Tensor], Tensor]:
    """The inverse of a Laplacian, which is shifted to be regular by less than its eigenvalues are known."""
    from scipy.sparse import eye_array
    from scipy.sparse.linalg import splu

    factors = splu(
        (L + 1e-13 * largest * eye_array(L.shape[0])).tocsc(),
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    return lambda x: torch.from_numpy(factors.solve(x.numpy()))


def _chebyshev(times: Callable[[Tensor], Tensor], x: Tensor, cut: float, largest: float) -> Tensor:
    """A polynomial of the Laplacian that is at most 1 from `cut` to `largest` and steep below: T_16."""

    def scaled(x: Tensor) -> Tensor:  # maps [cut, largest] to [1, -1]
        return ((largest + cut) * x - 2 * times(x)) / (largest - cut)

    before, now = x, scaled(x)
    for _ in range(15):
        before, now = now, 2 * scaled(now) - before
    return now


def _is_thin(L) -> bool:
    """Whether a factorization stays small: few cycles, or every level of a breadth-first search cuts the graph."""
    from scipy.sparse import csgraph

    few = 8 * math.sqrt(L.shape[0])
    if (L.nnz - L.shape[0]) / 2 - L.shape[0] + 1 <= few:
        return True
    order, predecessor = csgraph.breadth_first_order(L, 0, directed=False)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    # Nodes are found in the order of those that found them: a level ends where its last node's finds do.
    found_by = rank[predecessor[order[1:]]]
    widest, start, end = 1, 0, 1
    while end < len(order):
        start, end = end, 1 + int(np.searchsorted(found_by, end))
        widest = max(widest, end - start)
    return widest <= few


def _largest_eigenpairs(
    operator: Callable[[Tensor], Tensor],
    project: Callable[[Tensor], Tensor],
    accepts: Callable[[Tensor, Tensor, Tensor], bool],
    sizes: tuple[int, int, int],
) -> tuple[bool, Tensor, Tensor]:
    """The k largest eigenpairs of an n × n matrix by a block Krylov method with restarts, in so many steps at most.

    They are done when their values, residuals and vectors are accepted; this is the first result. A block is
    wider than k, so it meets every copy of a repeated eigenvalue, which a single vector would miss. On failure
    the values are those of the whole last subspace.
    """
    from tqdm import tqdm

    n, k, steps = sizes
    width = k + 2
    most = min(10 * width, n - 1)
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(n, width, generator=generator, dtype=torch.float64)

    block = torch.linalg.qr(project(noise()))[0]
    for _ in range(3):  # where very many eigenvalues are all but the same this is what finds some of them
        block = torch.linalg.qr(operator(block))[0]
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
            if accepts(values[:k], error[:k], ritz[:, :k]):
                return True, values[:k], ritz[:, :k]
            if basis.size(1) + width > most:
                keep = min(basis.size(1), 4 * width)
                basis, image = basis @ rotation[:, :keep], image @ rotation[:, :keep]
            # A vector that is exact already leads nowhere: a random one takes its place.
            block = torch.where(error > 1e-14 * values[0], residual, noise())
            for _ in range(2):  # once leaves rounding errors of what was taken away
                block = torch.linalg.qr(project(block - basis @ (basis.T @ block)))[0]
    return False, values[: 4 * width], ritz[:, :k]


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


def _weighted_edges(
    graph: Graph, edge_weight: Tensor | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.dtype]:
    """Sources, targets and float64 weights of the edges whose weight is not 0, and the dtype of an encoding."""
    check_graph(graph)
    if graph.num_keys != graph.num_queries:
        raise ValueError(
            f"`graph` must have the same nodes as keys and queries, got {graph.num_keys} keys and"
            f" {graph.num_queries} queries."
        )
    check_readable("`graph`", graph.device)
    source, target = graph.to_edge_index().cpu().numpy()
    if edge_weight is None:
        return source, target, np.ones(len(source)), torch.get_default_dtype()
    if not isinstance(edge_weight, Tensor) or edge_weight.dtype not in FLOATS:
        got = edge_weight.dtype if isinstance(edge_weight, Tensor) else type(edge_weight).__name__
        raise TypeError(f"`edge_weight` must be a floating point tensor, got {got}.")
    if edge_weight.layout is not torch.strided or edge_weight.is_meta:
        raise TypeError(f"`edge_weight` must be a dense tensor with numbers in it, got {edge_weight}.")
    if edge_weight.shape != (len(source),):
        raise ValueError(
            f"`edge_weight` must have shape [{len(source)}] for {graph}, got {list(edge_weight.shape)}."
        )
    weight = edge_weight.detach().cpu().double().numpy()
    if not np.all((weight >= 0) & np.isfinite(weight)):
        raise ValueError(
            "`edge_weight` must be finite and not negative, got"
            f" {weight[~((weight >= 0) & np.isfinite(weight))][0]}."
        )
    some = weight > 0
    return source[some], target[some], weight[some], edge_weight.dtype
