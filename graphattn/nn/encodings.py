"""Positional encodings with parameters, and those that turn queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphattn.encodings import checked_base, checked_positions, relative_positions
from graphattn.graph import Graph, check_count, check_one_device, check_readable, checked_count

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class LearnedEncoding(torch.nn.Module):
    """A trained vector for every position, as in BERT and ViT.

    It knows no position beyond those of its table; `ContinuousEncoding` does.

    Args:
        num_positions: number of positions, or for a grid the number along each axis.
        dim: number of features.

    Raises:
        ValueError: a size is not positive.
        TypeError: a size is not an int.

    Example:
        >>> from graphattn import GridGraph
        >>> LearnedEncoding((4, 6), dim=8)(GridGraph((4, 6), 1).positions()).shape
        torch.Size([24, 8])

    Gehring et al., `Convolutional Sequence to Sequence Learning <https://arxiv.org/abs/1705.03122>`_, 2017.
    """

    def __init__(self, num_positions: int | Sequence[int], dim: int) -> None:
        super().__init__()
        sizes: Any = num_positions if isinstance(num_positions, (tuple, list)) else (num_positions,)
        self.sizes = tuple(checked_count("`num_positions`", n, 1) for n in sizes)
        if not self.sizes:
            raise ValueError("`num_positions` must have at least one axis, got none.")
        rows = math.prod(self.sizes)
        self.weight = torch.nn.Parameter(torch.empty(rows, checked_count("`dim`", dim, 1)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Int[Tensor, "nodes axes"]) -> Float[Tensor, "nodes dim"]:
        """The vectors of integer positions.

        Args:
            positions: ``[nodes]`` or ``[nodes, axes]``, as many axes as the table has.

        Returns:
            ``[nodes, dim]``.

        Raises:
            ValueError: positions have another shape, or another number of axes than the table.
            TypeError: positions are not integers.
            IndexError: a position is outside ``[0, num_positions)``.
        """
        positions, _ = checked_positions(positions)
        if positions.is_floating_point():
            raise TypeError(f"`positions` must be integers to look up, got {positions.dtype}.")
        if positions.size(1) != len(self.sizes):
            raise ValueError(
                f"`positions` must have shape [nodes, {len(self.sizes)}] for {self},"
                f" got {list(positions.shape)}."
            )
        row = torch.zeros_like(positions[:, 0], dtype=torch.int64)
        inside = torch.ones_like(row, dtype=torch.bool)
        for n, along in zip(self.sizes, positions.long().unbind(1)):
            if not torch.compiler.is_compiling() and not along.is_meta and along.numel():
                low, high = torch.stack(along.aminmax()).tolist()
                if low < 0 or high >= n:
                    raise IndexError(
                        f"`positions` must lie in the interval [0, {n}), got {low if low < 0 else high}."
                        " Raise `num_positions`, or use an encoding that extrapolates."
                    )
            inside &= (along >= 0) & (along < n)
            row = row * n + along
        if positions.device.type != "cpu":  # from where PyTorch looks up rows on any device
            check_one_device("`positions`", positions.device, "the layer's weights", self.weight.device)
        # Compiled code, which cannot stop here, looks for a row that does not exist.
        return self.weight[row.masked_fill(~inside, self.weight.size(0))]

    def extra_repr(self) -> str:
        return f"num_positions={self.sizes}, dim={self.weight.size(1)}"


class ContinuousEncoding(torch.nn.Module):
    """Positions as the path of a learned dynamical system: FLOATER.

    .. math:: e(t) = e(0) + \\int_0^t h_θ(e(τ)) \\, dτ, \\qquad t = 0.1 \\cdot position

    h is a two-layer network that does not depend on time, so what it learns on short sequences is followed on
    longer ones; the number of parameters does not depend on the length. Layers of a model share h and start
    from vectors of their own, as in the paper. Positions need be neither integers nor sorted nor positive. The
    path is integrated once over all of them, by the adaptive method of Dormand and Prince, in float32 or float64:
    time grows with the largest position, memory of training too. Differentiable in the parameters, and once in
    real positions. Needs torchdiffeq.

    Args:
        dim: number of features.
        num_layers: number of layers that share the dynamics.
        hidden_dim: width of h, 4 · dim by default.

    Raises:
        ImportError: torchdiffeq is not installed.
        ValueError: a size is not positive.
        TypeError: a size is not an int.

    Example:
        >>> encoding = ContinuousEncoding(dim=8)  # doctest: +SKIP
        >>> encoding(torch.arange(100)).shape  # doctest: +SKIP
        torch.Size([100, 8])

    Liu et al., `Learning to Encode Position for Transformer with Continuous Dynamical Model
    <https://arxiv.org/abs/2003.09229>`_, 2020.
    """

    def __init__(self, dim: int, *, num_layers: int = 1, hidden_dim: int | None = None) -> None:
        super().__init__()
        dim = checked_count("`dim`", dim, 1)
        hidden_dim = 4 * dim if hidden_dim is None else checked_count("`hidden_dim`", hidden_dim, 1)
        num_layers = checked_count("`num_layers`", num_layers, 1)
        try:
            import torchdiffeq  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                "ContinuousEncoding needs torchdiffeq. Install it with `pip install 'graphattn[ode]'`."
            ) from error
        self._odeint = torchdiffeq.odeint
        self.initial = torch.nn.Parameter(torch.empty(num_layers, dim))
        self.dynamics = torch.nn.Sequential(
            torch.nn.Linear(dim, hidden_dim), torch.nn.Tanh(), torch.nn.Linear(hidden_dim, dim)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.initial, std=0.5)
        for parameter in self.dynamics.parameters():
            if parameter.dim() == 2:
                torch.nn.init.xavier_uniform_(parameter)
            else:
                torch.nn.init.zeros_(parameter)

    def forward(
        self, positions: Int[Tensor, "nodes 1"] | Float[Tensor, "nodes 1"], layer: int = 0
    ) -> Float[Tensor, "nodes dim"]:
        """The encoding of positions for a layer.

        Args:
            positions: ``[nodes]`` or ``[nodes, 1]``, any real numbers.
            layer: number of the layer, from 0 on.

        Returns:
            ``[nodes, dim]``.

        Raises:
            ValueError: positions have another shape or are not finite, or `layer` is negative.
            TypeError: positions are not real numbers, or `layer` is not an int.
            IndexError: there is no such layer.
        """
        positions, _ = checked_positions(positions)
        if positions.size(1) != 1:
            raise ValueError(
                f"`positions` must have shape [nodes] or [nodes, 1], got {list(positions.shape)}."
            )
        check_one_device("`positions`", positions.device, "the layer's weights", self.initial.device)
        layer = checked_count("`layer`", layer)
        if layer >= self.initial.size(0):
            raise IndexError(f"`layer` must lie in the interval [0, {self.initial.size(0)}), got {layer}.")
        # Steps of half precision are too coarse to integrate with; autocast would take them inside.
        wide = torch.promote_types(self.initial.dtype, torch.float32)
        with torch.autocast(self.initial.device.type, enabled=False):
            tensors = dict(self.dynamics.named_parameters()) | dict(self.dynamics.named_buffers())
            tensors = {name: x.to(wide) if x.is_floating_point() else x for name, x in tensors.items()}

            def dynamics(state: Tensor) -> Tensor:
                return torch.func.functional_call(self.dynamics, tensors, (state,))

            # A scale for time in which neighbouring positions are close.
            time = (0.1 * positions[:, 0].double()).to(wide)
            start = self.initial[layer].to(wide)
            times, place = time.detach().unique(return_inverse=True)
            zero = times.new_zeros(1)
            ahead, behind = times[times > 0], times[times < 0].flip(0)
            parts = [self._path(dynamics, start, torch.cat([zero, behind]))[1:].flip(0)]
            if bool((times == 0).any()):
                parts.append(start.unsqueeze(0))
            parts.append(self._path(dynamics, start, torch.cat([zero, ahead]))[1:])
            path = torch.cat(parts)[place]
            if time.requires_grad:
                path = _AlongPath.apply(path, time, dynamics)
            return path.to(self.initial.dtype)

    def _path(self, dynamics: Callable[[Tensor], Tensor], start: Tensor, times: Tensor) -> Tensor:
        """The state at the times, of which the first is 0."""
        if times.numel() == 1:
            return start.unsqueeze(0)
        tolerance = 1e-9 if start.dtype == torch.float64 else 1e-5
        path = self._odeint(
            lambda _, state: dynamics(state), start, times, rtol=tolerance, atol=tolerance, method="dopri5"
        )
        return path if isinstance(path, Tensor) else path[0]

    def extra_repr(self) -> str:
        return f"dim={self.initial.size(1)}, num_layers={self.initial.size(0)}"


class _AlongPath(torch.autograd.Function):
    """States of a path, whose derivative with respect to time is what the dynamics say."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, time: Tensor, dynamics: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.dynamics = dynamics
        ctx.save_for_backward(states)
        return states.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (states,) = ctx.saved_tensors
        return grad, (grad * ctx.dynamics(states)).sum(1), None


class RotaryEncoding(torch.nn.Module):
    """Turns queries and keys by angles that grow with their position: RoPE.

    .. math:: (x_{2c}, x_{2c+1}) \\mapsto (x_{2c} \\cos φ_c - x_{2c+1} \\sin φ_c, \\;
        x_{2c} \\sin φ_c + x_{2c+1} \\cos φ_c), \\qquad φ_c = p \\, base^{-2c/w}

    Turned queries and keys have a product that depends on the difference of their positions only. On a grid
    every axis turns an equal share w of the dims (axial rotary encoding). Pairs are neighbouring dims, as in
    the paper; models that pair dim c with c + w/2 need the dims of their projections permuted. Angles are
    computed in float64. It has no parameters.

    Args:
        dim: dims of a head.
        base: ratio of the longest to the shortest wavelength.

    Raises:
        ValueError: `dim` is odd or not positive, or `base` less than 1.
        TypeError: `dim` is not an int, or `base` not a number.

    Example:
        >>> from graphattn import WindowGraph, graph_attention
        >>> graph, rotary = WindowGraph(10, 2), RotaryEncoding(dim=8)
        >>> query, key, value = torch.randn(3, 10, 4, 8)
        >>> query, key = (rotary(x, graph.positions()) for x in (query, key))
        >>> graph_attention(query, key, value, graph).shape
        torch.Size([10, 4, 8])

    Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021; on grids: Heo et al., `Rotary Position
    Embedding for Vision Transformer <https://arxiv.org/abs/2403.13298>`_, 2024.
    """

    def __init__(self, dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = checked_count("`dim`", dim, 1), checked_base(base)
        if dim % 2:
            raise ValueError(f"`dim` must be even, got {dim}.")

    def forward(
        self, x: Float[Tensor, "*batch nodes heads dim"], positions: Int[Tensor, "nodes axes"]
    ) -> Float[Tensor, "*batch nodes heads dim"]:
        """Queries or keys, turned by their positions.

        Args:
            x: ``[..., nodes, heads, dim]``.
            positions: ``[nodes]`` or ``[nodes, axes]``, any real numbers.

        Returns:
            ``[..., nodes, heads, dim]`` in the dtype of `x`, computed in float32 (float64 for float64).

        Raises:
            ValueError: a shape does not fit, positions are not finite, or `dim` cannot be shared by the axes.
            TypeError: `x` is not floating point, or positions are not real numbers.
        """
        positions, _ = checked_positions(positions)
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
            got = f"{x.layout} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"`x` must be a dense floating point tensor, got {got}.")
        check_one_device("`x`", x.device, "`positions`", positions.device)
        nodes, axes = positions.shape
        if x.dim() < 3 or x.size(-3) != nodes or x.size(-1) != self.dim:
            raise ValueError(
                f"`x` must have shape [..., {nodes}, heads, {self.dim}] for these positions and"
                f" `dim={self.dim}`, got {list(x.shape)}."
            )
        if axes == 0 or self.dim % (2 * axes):
            raise ValueError(
                f"`dim` must be a multiple of two for each of the {axes} axes of `positions`, got {self.dim}."
            )
        pairs = self.dim // (2 * axes)
        exponent = torch.arange(pairs, dtype=torch.float64, device=x.device) / pairs
        angles = (positions.double().unsqueeze(-1) * self.base**-exponent).view(nodes, 1, self.dim // 2)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = angles.cos().to(wide), angles.sin().to(wide)
        even, odd = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return turned.flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base}"


class RelativeBias(torch.nn.Module):
    """A trained bias for every relative position that occurs in a graph, as in T5 and Swin.

    .. math:: b_{ij,h} = W_{(p_j - p_i), h}

    The table has one row for each offset of key from query (on a grid: each combination of the offsets along
    the axes, row-major), whatever the number of nodes: 2r + 1 on a window of radius r, (2M - 1)² on a complete
    grid of M × M cells. Where all queries see the same offsets the bias broadcasts over them.

    With ``num_buckets`` n the table has n rows for each axis and serves graphs of any size, as in T5: small
    offsets have a row each, larger ones share rows, the more the farther away, and all from ``max_distance`` on
    share the last. Half of the rows are for keys after the query, or none where not ``bidirectional``, as in T5's
    decoder; row numbers are T5's, so ``weight`` takes its ``relative_attention_bias.weight``.

    Args:
        graph: a complete, window or grid graph.
        heads: number of heads.
        num_buckets: rows for each axis; None for one for each offset.
        max_distance: offset from which on all share a row.
        bidirectional: tell keys after the query apart; otherwise they share the row of offset 0.

    Raises:
        ValueError: the graph has no positions or none to read, `heads` is not positive, `num_buckets` is less
            than 4 (2 if not `bidirectional`) or odd in both directions, or `max_distance` not above the offsets
            that have a row each.
        TypeError: `graph` is not a Graph, `bidirectional` not a bool, or a number not an int.

    Example:
        >>> from graphattn import WindowGraph, graph_attention
        >>> graph, x = WindowGraph(10, 2), torch.randn(10, 4, 8)
        >>> bias = RelativeBias(graph, heads=4)()
        >>> bias.shape
        torch.Size([1, 5, 4])
        >>> graph_attention(x, x, x, graph, bias=bias).shape
        torch.Size([10, 4, 8])

    Raffel et al., `T5 <https://arxiv.org/abs/1910.10683>`_, 2020; Liu et al., `Swin Transformer
    <https://arxiv.org/abs/2103.14030>`_, 2021.
    """

    index: Tensor

    def __init__(
        self,
        graph: Graph,
        heads: int,
        *,
        num_buckets: int | None = None,
        max_distance: int = 128,
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        offsets = relative_positions(graph)
        check_readable("`graph`", graph.device)
        if num_buckets is not None:
            _check_buckets(num_buckets, max_distance, bidirectional)
        self.num_buckets = num_buckets
        index, rows = offsets.new_zeros(offsets.shape[:-1]), 1
        for along in offsets.unbind(-1):
            if num_buckets is None:
                values, number = along.unique(return_inverse=True)
                size = values.numel()
            else:
                number, size = _buckets(along, num_buckets, max_distance, bidirectional), num_buckets
            index = index * max(size, 1) + number
            rows *= size
        self.register_buffer("index", index, persistent=False)
        self.weight = torch.nn.Parameter(
            torch.empty(rows, checked_count("`heads`", heads, 1), device=index.device)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self) -> Float[Tensor, "*edges heads"]:
        """The bias, ``[*edge_shape, heads]`` in the edge layout of the graph, the first size 1 where it can be."""
        return self.weight[self.index]

    def extra_repr(self) -> str:
        rows = "offsets" if self.num_buckets is None else "rows"
        return f"{rows}={self.weight.size(0)}, heads={self.weight.size(1)}"


def _check_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    if not isinstance(bidirectional, bool):
        raise TypeError(f"`bidirectional` must be a bool, got {type(bidirectional).__name__}.")
    directions = 2 if bidirectional else 1
    check_count("`num_buckets`", num_buckets, 2 * directions)
    if num_buckets % directions:
        raise ValueError(f"`num_buckets` must be even, half for each direction, got {num_buckets}.")
    check_count("`max_distance`", max_distance, num_buckets // directions // 2 + 1)


def _buckets(offsets: Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Rows of offsets in T5's table."""
    after = torch.zeros_like(offsets)
    if bidirectional:
        num_buckets //= 2
        after, distance = (offsets > 0) * num_buckets, offsets.abs()
    else:
        distance = (-offsets).clamp(min=0)
    exact = num_buckets // 2  # distances with a row of their own
    # In float32, as T5 does: whole numbers, which are borders, may round to either side.
    ratio = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    shared = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return after + torch.where(distance < exact, distance, shared)
