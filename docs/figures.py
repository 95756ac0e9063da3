"""Draws the figures of the documentation: `python -m docs.figures FOLDER`, and on every build of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import networkx
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import datasets
from benchmarks.run import BASELINE, RESULTS, STRUCTURED_RESULTS, read_rows
from benchmarks.tables import FAMILIES, MAIN_SHAPE, PEERS, STRUCTURED_PEERS
from graphattn import (
    CompleteGraph,
    Graph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    attention_weights,
    expander_graph,
    global_graph,
    union,
)
from graphattn.encodings import alibi, laplacian_eigenvectors, random_walk, relative_positions, sinusoidal
from graphattn.graph import grid_blocks
from graphattn.plot import (
    attention_matrix,
    draw_attention_matrix,
    draw_graph_attention,
    draw_image_attention,
)


def random_weights(graph: Graph, heads: int = 2) -> Tensor:
    """Attention weights of random queries and keys, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    query, key = (
        1.5 * torch.randn(n, heads, 4, generator=generator) for n in (graph.num_queries, graph.num_keys)
    )
    return attention_weights(query, key, graph)


def draw_pairs(kinds: dict[str, Graph], width: float = 3.0) -> Figure:
    """Each graph above its attention matrix."""
    figure = Figure(figsize=(width * len(kinds), 2 * width), layout="constrained")
    for (title, graph), (above, below) in zip(kinds.items(), figure.subplots(2, len(kinds), squeeze=False).T):
        weights = random_weights(graph)
        draw_graph_attention(graph, weights, ax=above)
        draw_attention_matrix(graph, weights, ax=below)
        above.set_title(title, fontsize="medium")
        above.margins(0.12)
    return figure


def graphs() -> Figure:
    return draw_pairs(
        {
            "complete: CompleteGraph(8)": CompleteGraph(8),
            "chain: WindowGraph(12, 1)": WindowGraph(12, 1),
            "grid: GridGraph((4, 4), 1)": GridGraph((4, 4), 1),
            "any edges: SparseGraph": ladder(),
        },
        width=2.7,
    )


def ladder() -> SparseGraph:
    """A small molecule: the carbon atoms of naphthalene."""
    rings = networkx.cycle_graph(10)
    rings.add_edge(0, 5)
    return SparseGraph.from_networkx(rings)


def sparse() -> Figure:
    """Zachary's karate club; nodes attend to neighbours that are like them in the graph's slow vibrations."""
    club = networkx.karate_club_graph()
    graph = SparseGraph.from_networkx(club)
    features = 12 * laplacian_eigenvectors(graph, 4).view(-1, 1, 4)
    weights = attention_weights(features, features, graph)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.3, 1)})
    draw_graph_attention(graph, weights, networkx.spring_layout(club, seed=2), ax=left)
    draw_attention_matrix(graph, weights, ax=right)
    return figure


def complete() -> Figure:
    return draw_pairs(
        {
            "CompleteGraph(8)": CompleteGraph(8),
            "causal=True": CompleteGraph(8, causal=True),
            "from_ptr([0, 3, 4, 9])": CompleteGraph.from_ptr(torch.tensor([0, 3, 4, 9])),
        }
    )


def window() -> Figure:
    return draw_pairs(
        {
            "WindowGraph(12, 2)": WindowGraph(12, 2),
            "WindowGraph(12, (3, 0))": WindowGraph(12, (3, 0)),
            "WindowGraph(12, 1, dilation=3)": WindowGraph(12, 1, dilation=3),
            "from_ptr([0, 5, 12], 2)": WindowGraph.from_ptr(torch.tensor([0, 5, 12]), 2),
        }
    )


def grid() -> Figure:
    """What two pixels of a digit may attend to, on four grids."""
    picture = 1 - 0.5 * datasets.digits().x[10].view(8, 8)
    kinds = {
        "GridGraph((8, 8), 2)": GridGraph((8, 8), 2),
        'border="shift"': GridGraph((8, 8), 2, border="shift"),
        "radius (1, None)": GridGraph((8, 8), (1, None)),
        "radius 1, dilation=2": GridGraph((8, 8), 1, dilation=2),
    }
    figure = Figure(figsize=(12, 6), layout="constrained")
    for (title, graph), axes in zip(kinds.items(), figure.subplots(2, 4).T):
        weights = random_weights(graph)
        for pixel, ax in zip([(0, 1), (4, 4)], axes):
            draw_image_attention(picture, weights, pixel, graph, ax=ax)
        axes[0].set_title(title, fontsize="medium")
    return figure


def unions() -> Figure:
    n = 24
    local, spread, tokens = WindowGraph(n, 1), expander_graph(n, 3, seed=0), global_graph(n, [0, 1])
    circle = networkx.circular_layout(range(n))
    kinds = {
        "WindowGraph(24, 1)": local,
        "expander_graph(24, 3, seed=0)": spread,
        "global_graph(24, [0, 1])": tokens,
        "union of the three": union(local, spread, tokens),
    }
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    for (title, graph), (above, below) in zip(kinds.items(), figure.subplots(2, 4).T):
        weights = random_weights(graph)
        draw_graph_attention(graph, weights, circle, ax=above)
        draw_attention_matrix(graph, weights, ax=below)
        above.set_title(title, fontsize="medium")
    return figure


def blocks() -> Figure:
    """The windows of Swin: blocks, and the same shifted by half a block."""
    picture = 1 - 0.5 * datasets.digits().x[10].view(8, 8)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for shift, ax in zip((0, 2), figure.subplots(1, 2)):
        graph = CompleteGraph.from_batch(grid_blocks((8, 8), 4, shift=shift))
        matrix = attention_matrix(graph, random_weights(graph))
        draw_image_attention(picture, matrix, (3, 4), (8, 8), ax=ax)
        ax.set_title(f"grid_blocks((8, 8), 4, shift={shift})", fontsize="medium")
    return figure


def encodings() -> Figure:
    """What each encoding gives to the nodes of a chain, and ALiBi and offsets to their pairs."""
    n = 48
    node = torch.arange(n - 1)
    there = torch.stack([node, node + 1])
    chain = SparseGraph.from_edge_index(torch.cat([there, there.flip(0)], 1), n)
    features = {
        "sinusoidal(positions, 32)": sinusoidal(torch.arange(n), 32),
        "laplacian_eigenvectors(chain, 8)": laplacian_eigenvectors(chain, 8),
        "random_walk(chain, 16)": random_walk(chain, 16),
    }
    pairs = {
        "alibi(WindowGraph(48, 8), 4), head 2": (WindowGraph(n, 8), lambda g: alibi(g, 4)[..., 1]),
        "relative_positions(WindowGraph(48, 8))": (
            WindowGraph(n, 8),
            lambda g: relative_positions(g)[..., 0].float(),
        ),
    }
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    above, below = figure.subfigures(2, 1)
    for (title, x), ax in zip(features.items(), above.subplots(1, 3)):
        shown = ax.imshow(x, aspect="auto", cmap="RdBu", vmin=-x.abs().max(), vmax=x.abs().max())
        ax.set(title=title, xlabel="feature", ylabel="node")
        above.colorbar(shown, ax=ax)
    for (title, (graph, values)), ax in zip(pairs.items(), below.subplots(1, 2)):
        x = attention_matrix(graph, values(graph).expand(graph.edge_shape))
        shown = ax.imshow(x, cmap="RdBu", vmin=-np.nanmax(x.abs()), vmax=np.nanmax(x.abs()))
        ax.set(title=title, xlabel="key", ylabel="query")
        below.colorbar(shown, ax=ax)
    return figure


def _draw_times(ax, rows: Sequence[dict[str, str]], peers: dict[str, list[str]], title: str) -> None:
    """A line for each graph, a mark for the time of each contender: of several providers the fastest."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for n, (name, providers) in enumerate([("graphattn", [BASELINE]), *peers.items()]):
        times = {}
        for row in rows:
            if row["provider"] in providers:
                times[row["case"]] = min(float(row["ms"]), times.get(row["case"], np.inf))
        if times:
            style = {
                "marker": "D",
                "color": "black",
                "markersize": 9,
                "fillstyle": "none",
                "markeredgewidth": 2,
            }
            style = {"marker": "o", "color": f"C{n - 1}"} if n else style
            places = [cases.index(case) for case in times]
            ax.plot(
                list(times.values()), places, linestyle="", label=name.strip("`"), zorder=3 - bool(n), **style
            )
    ax.set(xscale="log", xlabel="ms", title=title, yticks=range(len(cases)), yticklabels=cases)
    ax.invert_yaxis()
    ax.grid(alpha=0.3)


def sparse_times() -> Figure:
    rows = [row for row in read_rows(RESULTS) if row["ms"]]
    most = max((row["threads"] for row in rows), key=int)
    rows = [row for row in rows if row["threads"] == most and (row["heads"], row["dim"]) == MAIN_SHAPE]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    for mode, ax in zip(("forward", "forward+backward"), axes):
        _draw_times(ax, [row for row in rows if row["mode"] == mode], PEERS, mode)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def structured_times() -> Figure:
    rows = [row for row in read_rows(STRUCTURED_RESULTS) if row["ms"]]
    rows = [row for row in rows if row["case"].split("_")[0] in FAMILIES]
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    axes = figure.subplots(1, 2)
    for mode, ax in zip(("forward", "forward+backward"), axes):
        _draw_times(ax, [row for row in rows if row["mode"] == mode], STRUCTURED_PEERS, mode)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def growth() -> Figure:
    rows = [row for row in read_rows(STRUCTURED_RESULTS) if row["ms"] and row["case"].startswith("growth_")]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    time, memory = figure.subplots(1, 2)
    for mode in dict.fromkeys(row["mode"] for row in rows):
        line = sorted((int(row["nodes"]), row) for row in rows if row["mode"] == mode)
        nodes = [n for n, _ in line]
        time.plot(nodes, [float(row["ms"]) for _, row in line], "o-", label=mode)
        memory.plot(nodes, [float(row["extra_mb"]) for _, row in line], "o-", label=mode)
    for ax, label in ((time, "ms"), (memory, "MB")):
        ax.set(xscale="log", yscale="log", xlabel="nodes", ylabel=label)
        ax.grid(alpha=0.3)
    time.legend()
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "graphs": graphs,
    "sparse": sparse,
    "complete": complete,
    "window": window,
    "grid": grid,
    "unions": unions,
    "blocks": blocks,
    "encodings": encodings,
    "sparse_times": sparse_times,
    "structured_times": structured_times,
    "growth": growth,
}


def draw_all(folder: Path, suffix: str = ".svg") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        # Without a date the same figure is the same file.
        metadata = {"Date": None} if suffix == ".svg" else None
        draw().savefig(folder / f"{name}{suffix}", metadata=metadata)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.figures", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suffix", default=".svg", help="kind of file (default: .svg)")
    args = parser.parse_args(argv)
    draw_all(args.folder, args.suffix)


if __name__ == "__main__":
    main()
