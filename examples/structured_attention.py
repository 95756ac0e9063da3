"""Run one layer on five graphs, and see what each of them lets a pixel attend to.

    python -m examples.structured_attention                 # handwritten digits, no download
    python -m examples.structured_attention --root DIR      # MNIST from the files in DIR, at 8 x 8 pixels

The pixels of an image are the nodes. A small network with one attention layer learns to read digits while the
graph changes from step to step: complete, causal, window, grid, random. No parameter belongs to a graph, so
what is learned on one is used on all; the table shows how well it reads on each. The figure shows the layer's
attention matrices for one image (grey: no edge), and below them where one pixel looks.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from examples import vision_transformer
from examples.long_training import rise_and_fall
from examples.positional_encodings import check_figure
from graphattn import (
    CompleteGraph,
    Graph,
    GridGraph,
    WindowGraph,
    attention_weights,
    expander_graph,
    graph_attention,
    union,
)
from graphattn.plot import attention_matrix, draw_attention_matrix, draw_image_attention

SIDE = 8
PIXELS = SIDE * SIDE
QUERY = 3 * SIDE + 4  # the pixel whose view is drawn, near the middle
BATCH = 64


def load(root: Path | None) -> vision_transformer.Images:
    """The embedded digits, or MNIST from `root`, each pixel the mean of those it takes the place of.

    Raises:
        FileNotFoundError: files are missing.
    """
    if root is None:
        return vision_transformer.digits()
    data = vision_transformer.mnist(root, train_images=5000)
    train, test = (F.adaptive_avg_pool2d(images, SIDE) for images in (data.train, data.test[:1000]))
    return replace(data, train=train, test=test, test_labels=data.test_labels[:1000])


def graphs(seed: int) -> dict[str, Graph]:
    """Five answers to the question which pixels a pixel may attend to; each may attend to itself."""
    return {
        "complete": CompleteGraph(PIXELS),
        "causal": CompleteGraph(PIXELS, causal=True),
        "window": WindowGraph(PIXELS, SIDE),
        "grid": GridGraph((SIDE, SIDE), 2),
        "random": union(expander_graph(PIXELS, 16, seed=seed), WindowGraph(PIXELS, 0)),
    }


class Reader(torch.nn.Module):
    """One transformer layer over the pixels of an image, then the class of their mean.

    Every pixel is its own intensity and those of its eight neighbours, with a learned position.
    """

    def __init__(self, channels: int = 32, heads: int = 4, classes: int = 10):
        super().__init__()
        self.heads = heads
        self.embedding = torch.nn.Conv2d(1, channels, 3, padding=1)
        self.position = torch.nn.Parameter(0.1 * torch.randn(PIXELS, channels))
        self.norm = torch.nn.LayerNorm(channels)
        self.query, self.key, self.value = (torch.nn.Linear(channels, channels) for _ in range(3))
        self.out = torch.nn.Linear(channels, channels)
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(channels),
            torch.nn.Linear(channels, 2 * channels),
            torch.nn.GELU(),
            torch.nn.Linear(2 * channels, channels),
        )
        self.classes = torch.nn.Linear(channels, classes)

    def nodes(self, images: Tensor) -> Tensor:
        return self.embedding(images.view(-1, 1, SIDE, SIDE)).flatten(2).transpose(1, 2) + self.position

    def heads_of(self, linear: torch.nn.Linear, x: Tensor) -> Tensor:
        return linear(self.norm(x)).unflatten(-1, (self.heads, -1))

    def attention(self, x: Tensor, graph: Graph) -> Tensor:
        query, key, value = (self.heads_of(linear, x) for linear in (self.query, self.key, self.value))
        return self.out(graph_attention(query, key, value, graph).flatten(-2))

    def forward(self, images: Tensor, graph: Graph) -> Tensor:
        x = self.nodes(images)
        x = x + self.attention(x, graph)
        x = x + self.mlp(x)
        return self.classes(x.mean(1))

    def weights(self, image: Tensor, graph: Graph) -> Tensor:
        """The attention weights of one image, in the edge layout of the graph."""
        x = self.nodes(image)[0]
        return attention_weights(self.heads_of(self.query, x), self.heads_of(self.key, x), graph)


def train(
    model: Reader, images: Tensor, labels: Tensor, all_graphs: dict[str, Graph], epochs: int, seed: int
) -> None:
    """Train with AdamW, every batch on the next of the graphs."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    schedule = rise_and_fall(optimizer, epochs * -(-len(images) // BATCH), rise=0.3)
    graph_of_step = itertools.cycle(all_graphs.values())
    with tqdm(range(epochs), desc="training", leave=False, disable=None) as bar:
        for _ in bar:
            for batch in torch.randperm(len(images), generator=generator).split(BATCH):
                loss = F.cross_entropy(model(images[batch], next(graph_of_step)), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")


@dataclass(frozen=True)
class Result:
    """One row of the table: what one graph costs and how well the shared layer reads on it."""

    graph: str
    edges: int
    milliseconds: float  # of the attention layer on all test images, median
    accuracy: float


@torch.no_grad()
def evaluate(model: Reader, images: Tensor, labels: Tensor, all_graphs: dict[str, Graph]) -> list[Result]:
    """Read the test images on every graph; the layers are timed in turn, so that all have the same chance."""
    x = model.nodes(images)
    seconds: dict[str, list[float]] = {name: [] for name in all_graphs}
    for _ in range(6):
        for name, graph in all_graphs.items():
            start = time.perf_counter()
            model.attention(x, graph)
            seconds[name].append(time.perf_counter() - start)
    return [
        Result(
            name,
            graph.num_edges,
            1000 * float(np.median(seconds[name][1:])),  # the first round warms up
            (model(images, graph).argmax(1) == labels).float().mean().item(),
        )
        for name, graph in all_graphs.items()
    ]


def table(results: Sequence[Result]) -> str:
    lines = [f"{'graph':<10} {'edges':>6} {'keys a query':>13} {'ms':>7} {'test accuracy':>14}"]
    for row in results:
        lines.append(
            f"{row.graph:<10} {row.edges:>6} {row.edges / PIXELS:>13.1f} {row.milliseconds:>7.1f}"
            f" {100 * row.accuracy:>14.2f}"
        )
    return "\n".join(lines)


@torch.no_grad()
def draw(path: Path, model: Reader, image: Tensor, all_graphs: dict[str, Graph], title: str) -> None:
    """Attention matrices side by side, and below each the image as the pixel `QUERY` sees it."""
    figure = Figure(figsize=(15, 6.5), layout="constrained")
    figure.suptitle(title)
    rows = figure.subplots(2, len(all_graphs))
    ink = 1 - 0.5 * image.view(SIDE, SIDE)  # pale, under the colours of the weights
    for (name, graph), (above, below) in zip(all_graphs.items(), rows.T):
        weights = model.weights(image, graph)
        draw_attention_matrix(graph, weights, ax=above)
        above.set(title=f"{name}, {graph.num_edges} edges", xlabel="key pixel", ylabel="query pixel")
        draw_image_attention(ink, attention_matrix(graph, weights), QUERY, (SIDE, SIDE), ax=below)
        below.set(xlabel=f"what pixel {QUERY} attends to")
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.structured_attention", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--root", type=Path, help="folder with the MNIST files (default: the embedded digits)"
    )
    parser.add_argument("--epochs", type=int, default=25, help="passes over the training images (25)")
    parser.add_argument("--image", type=int, default=0, help="number of the test image that is drawn")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights, the batches and the random graph"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out", "structured_attention.png"),
        help="the figure (default: out/structured_attention.png)",
    )
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    try:
        data = load(args.root)
    except (OSError, ValueError, KeyError) as error:
        parser.exit(1, f"{error}\n")
    if not 0 <= args.image < len(data.test):
        parser.error(f"--image must be from 0 to {len(data.test) - 1}")
    check_figure(parser, args.out)

    torch.manual_seed(args.seed)
    model, all_graphs = Reader(), graphs(args.seed)
    train(model, data.train, data.train_labels, all_graphs, args.epochs, args.seed)
    results = evaluate(model, data.test, data.test_labels, all_graphs)
    print(f"One layer, the same {sum(p.numel() for p in model.parameters())} parameters on every graph;")
    print(f"{len(data.test)} test images of {PIXELS} pixels; ms is the layer on all of them\n")
    print(table(results))
    digit = int(data.test_labels[args.image])
    title = f"One layer on five graphs, looking at a {digit}"
    draw(args.out, model, data.test[args.image], all_graphs, title)
    print(f"\nFigure: {args.out}")
    return results


if __name__ == "__main__":
    main()
