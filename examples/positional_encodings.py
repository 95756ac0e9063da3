"""Show what attention does not see without a positional encoding, and what each encoding tells it.

    python -m examples.positional_encodings                # random sequences, no download
    python -m examples.positional_encodings --root DIR     # draws a molecule of MUTAG, from the files in DIR

First, numbers: permuted nodes give permuted outputs, unless positions are part of the features. Then a task that
needs order, with and without each encoding: say which of the symbols A and B of a random sequence came first.
Random walks and ALiBi's distances do not help here: they tell places apart, but are the same for a sequence that
is read backwards. The figure shows the encodings as heat maps, and Laplacian eigenvectors as colours of the nodes
of a graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import networkx as nx
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch_geometric.utils import to_networkx
from tqdm import tqdm

import datasets
from examples.long_training import STEPS
from graphattn import CompleteGraph, GridGraph, SparseGraph, graph_attention
from graphattn.encodings import alibi, laplacian_eigenvectors, random_walk, sinusoidal
from graphattn.nn import LearnedEncoding, RelativeBias, RotaryEncoding

SYMBOLS, LENGTH, WIDTH, HEADS = 8, 24, 32, 4
GRAPH = CompleteGraph(LENGTH)


def chain(n: int) -> SparseGraph:
    """Every node joined to the next, both ways."""
    node = torch.arange(n - 1)
    there = torch.stack([node, node + 1])
    return SparseGraph.from_edge_index(torch.cat([there, there.flip(0)], dim=1), n)


# What is added to the features of the nodes, as a function of their positions.
FEATURES: dict[str, Callable[[], Tensor]] = {
    "sinusoidal": lambda: sinusoidal(torch.arange(LENGTH), WIDTH),
    "Laplacian": lambda: F.pad(laplacian_eigenvectors(chain(LENGTH), 8), (0, WIDTH - 8)) * LENGTH**0.5,
    "random walk": lambda: F.pad(random_walk(chain(LENGTH), 16), (0, WIDTH - 16)) * 4,
}
ENCODINGS = ("none", *FEATURES, "learned", "rotary", "relative bias", "ALiBi")


class Reader(torch.nn.Module):
    """Two attention layers on a complete graph, then the mean over the nodes."""

    def __init__(self, encoding: str):
        super().__init__()
        self.symbol = torch.nn.Embedding(SYMBOLS, WIDTH)
        self.learned = LearnedEncoding(LENGTH, WIDTH) if encoding == "learned" else None
        self.rotary = RotaryEncoding(WIDTH // HEADS) if encoding == "rotary" else None
        self.bias = torch.nn.ModuleList(
            [RelativeBias(GRAPH, HEADS) for _ in range(2)] if encoding == "relative bias" else []
        )
        self.register_buffer("features", FEATURES[encoding]() if encoding in FEATURES else None)
        self.register_buffer("slope", alibi(GRAPH, HEADS) if encoding == "ALiBi" else None)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mlp = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(WIDTH),
                torch.nn.Linear(WIDTH, 64),
                torch.nn.GELU(),
                torch.nn.Linear(64, WIDTH),
            )
            for _ in range(2)
        )
        self.answer = torch.nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.symbol(tokens)
        if self.learned is not None:
            x = x + self.learned(GRAPH.positions())
        if self.features is not None:
            x = x + self.features
        for layer, (qkv, mlp) in enumerate(zip(self.qkv, self.mlp)):
            query, key, value = F.layer_norm(qkv(x), (3 * WIDTH,)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
            if self.rotary is not None:
                query, key = self.rotary(query, GRAPH.positions()), self.rotary(key, GRAPH.positions())
            bias = self.bias[layer]() if self.bias else self.slope
            x = x + graph_attention(query, key, value, GRAPH, bias=bias).flatten(-2)
            x = x + mlp(x)
        return self.answer(x.mean(dim=-2))


def sequences(number: int) -> tuple[Tensor, Tensor]:
    """Random symbols with one A (0) and one B (1); the answer says whether A comes first."""
    tokens = torch.randint(2, SYMBOLS, (number, LENGTH))
    places = torch.rand(number, LENGTH).argsort(dim=1)[:, :2]
    row = torch.arange(number)
    tokens[row, places[:, 0]], tokens[row, places[:, 1]] = 0, 1
    return tokens, (places[:, 0] < places[:, 1]).long()


def accuracy(encoding: str, epochs: int, seed: int) -> float:
    """Train on fresh sequences; the share of right answers on 1,000 others."""
    torch.manual_seed(seed)
    model = Reader(encoding)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in tqdm(range(epochs * STEPS), desc=encoding, leave=False, disable=None):
        tokens, answer = sequences(64)
        loss = F.cross_entropy(model(tokens), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        tokens, answer = sequences(1000)
        return (model(tokens).argmax(1) == answer).float().mean().item()


def permutation_differences(seed: int) -> tuple[float, float]:
    """Largest difference between attention to permuted nodes and permuted attention; without, with positions."""
    torch.manual_seed(seed)
    x, order = torch.randn(LENGTH, 1, WIDTH), torch.randperm(LENGTH)
    position = sinusoidal(torch.arange(LENGTH), WIDTH).unsqueeze(1)

    def attend(x: Tensor) -> Tensor:
        return graph_attention(x, x, x, GRAPH)

    without = attend(x[order]) - attend(x)[order]
    added = attend(x[order] + position) - attend(x + position)[order]
    return without.abs().max().item(), added.abs().max().item()


def random_graph() -> tuple[nx.Graph, dict[int, Sequence[float]]]:
    """The largest connected part of a random geometric graph, and where its nodes are."""
    G = nx.random_geometric_graph(120, 0.16, seed=3)
    G = nx.convert_node_labels_to_integers(G.subgraph(max(nx.connected_components(G), key=len)))
    return G, nx.get_node_attributes(G, "pos")


def largest_molecule(root: Path) -> tuple[nx.Graph, dict[int, Sequence[float]]]:
    """The molecule of MUTAG with the most atoms, and where to draw them."""
    G = to_networkx(
        max(datasets.molecules("MUTAG", root), key=lambda data: data.num_nodes), to_undirected=True
    )
    return G, nx.kamada_kawai_layout(G)


def draw(path: Path, scores: dict[str, float], G: nx.Graph, place: dict[int, Sequence[float]]) -> None:
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    maps = {
        "sinusoidal, position × dim": sinusoidal(torch.arange(64), 32),
        "Laplacian eigenvectors of a chain, position × k": laplacian_eigenvectors(chain(64), 32),
        "ALiBi, query × key, one of 4 heads": alibi(CompleteGraph(64), 4)[..., 1],
        "random walks on a 6 × 6 grid, cell × steps": random_walk(GridGraph((6, 6), 1), 12),
    }
    for ax, (title, values) in zip(axes.flat, maps.items()):
        image = ax.imshow(values.numpy(), aspect="auto", interpolation="nearest")
        ax.set_title(title, fontsize=10)
        figure.colorbar(image, ax=ax)

    colours = laplacian_eigenvectors(SparseGraph.from_networkx(G), 2)
    ax = axes[1, 1]
    nx.draw_networkx_edges(G, place, ax=ax, alpha=0.3)
    nx.draw_networkx_nodes(
        G, place, ax=ax, node_size=60, node_color=colours[:, 0].numpy(), edgecolors="k", cmap="coolwarm"
    )
    ax.set_title("first Laplacian eigenvector on a graph", fontsize=10)
    ax.axis("off")

    ax = axes[1, 2]
    ax.barh(list(scores), list(scores.values()))
    ax.axvline(0.5, color="k", linestyle=":")
    ax.set(title="which of two symbols came first: accuracy", xlim=(0, 1))
    ax.title.set_fontsize(10)
    ax.invert_yaxis()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.positional_encodings", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--root", type=Path, help="folder with MUTAG, of which a molecule is drawn (default: a random graph)"
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=16,
        help=f"for each encoding, an epoch being {STEPS} steps of 64 new sequences (16)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("out", "positional_encodings.png"), help="the figure"
    )
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    check_figure(parser, args.out)
    try:
        drawn = random_graph() if args.root is None else largest_molecule(args.root)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")

    without, added = permutation_differences(args.seed)
    print(f"attend(permuted x) - permuted attend(x):            at most {without:.1e}")
    print(f"the same with sinusoidal positions added to x:      at most {added:.1e}")
    print(
        f"\nwhich came first, A or B? {LENGTH} nodes, complete graph, {args.epochs * STEPS} steps;"
        " a guess is right in 50 %"
    )
    scores = {}
    for encoding in ENCODINGS:
        scores[encoding] = accuracy(encoding, args.epochs, args.seed)
        print(f"{encoding:<14} {100 * scores[encoding]:5.1f} %", flush=True)
    draw(args.out, scores, *drawn)
    print(f"Figure: {args.out}")
    return scores


def check_figure(parser: argparse.ArgumentParser, out: Path) -> None:
    """End the program before it has computed anything if the figure cannot be saved."""
    formats = Figure().canvas.get_supported_filetypes()
    if out.suffix[1:].lower() not in formats:
        parser.error(f"--out must end in one of {', '.join(formats)}, got {out}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out} cannot be written: {error}")


if __name__ == "__main__":
    main()
