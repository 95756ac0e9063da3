"""Classify molecules with GPS layers: message passing along bonds, and attention between all atoms.

    python -m examples.molecules                                  # generated ring systems, no download
    python -m examples.molecules --dataset MUTAG --root DIR       # MUTAG, PROTEINS or ENZYMES, here from DIR
    python -m examples.molecules --encodings none random_walk     # what the atoms know about their place

The generated molecules are made so that neither message passing nor attention can tell the two classes apart:
two rings of six that share a bond, as in decalin, and two rings of five joined by a bond, as in bicyclopentyl,
both with the same side chains. Atom by atom they look the same to any number of layers. Random walks tell them
apart at once: a walk is back after five steps in one of them only. Laplacian eigenvectors differ too, but have
no sign of their own, which a model does not learn to see through from a hundred pairs of them. Scores are those of
a stratified 10-fold cross-validation.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool, global_mean_pool
from torch_geometric.utils import to_networkx

import datasets
from examples.long_training import Checkpoint, interruptible, rise_and_fall, train
from examples.positional_encodings import check_figure
from graphattn.nn import GPSConv
from graphattn.transforms import AddLaplacianEigenvectorPE, AddRandomWalkPE

ENCODINGS = {
    "none": None,
    "random_walk": AddRandomWalkPE(16, "encoding"),
    "laplacian": AddLaplacianEigenvectorPE(8, "encoding"),
}


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and how it is trained."""

    channels: int = 32
    layers: int = 3
    heads: int = 4
    dropout: float = 0.2
    attention_dropout: float = 0.3
    epochs: int = 100
    batch: int = 32  # molecules
    lr: float = 2e-3
    weight_decay: float = 1e-3


SETTINGS = {
    "generated": Settings(layers=2, dropout=0.0, attention_dropout=0.0, epochs=8, batch=16, lr=5e-3),
    "MUTAG": Settings(),
    "PROTEINS": Settings(epochs=50),
    "ENZYMES": Settings(channels=64, epochs=150),
}

NODE_LABELS = {"generated": 3, "MUTAG": 7, "PROTEINS": 3, "ENZYMES": 3}  # the last columns of the features

# Accuracy in %, mean and standard deviation over ten folds. "Best epoch": one epoch for all folds, that with the
# highest mean score on the test folds, which is optimistic; the others chose by validation.
PUBLISHED = {
    "MUTAG": [("GIN-0, best epoch", 89.4, 5.6, "Xu et al., ICLR 2019")],
    "PROTEINS": [
        ("GIN-0, best epoch", 76.2, 2.8, "Xu et al., ICLR 2019"),
        ("GIN", 73.3, 4.0, "Errica et al., ICLR 2020"),
        ("no structure", 75.8, 3.7, "Errica et al., ICLR 2020"),
    ],
    "ENZYMES": [
        ("GIN", 59.6, 4.5, "Errica et al., ICLR 2020"),
        ("no structure", 65.2, 6.4, "Errica et al., ICLR 2020"),
    ],
}


def ring_system(label: int, rng: np.random.Generator) -> Data:
    """One molecule of ten ring atoms with side chains: two rings of six (label 0) or of five (label 1).

    Three kinds of ring atoms there are in both: the two with three neighbours in rings (0 and 1), their other
    neighbours, and the rest. All atoms of one kind are the same element and carry the same side chain.
    """
    if label == 0:  # the bond 0-1 belongs to both rings
        rings = [(0, 2, 3, 4, 5, 1), (0, 6, 7, 8, 9, 1)]
        kind = [0, 0, 1, 2, 2, 1, 1, 2, 2, 1]
    else:  # and joins them here
        rings = [(0, 2, 3, 4, 5), (1, 6, 7, 8, 9)]
        kind = [0, 0, 1, 2, 2, 1, 1, 2, 2, 1]
    bonds = {(0, 1)}
    for ring in rings:
        bonds |= {(min(a, b), max(a, b)) for a, b in zip(ring, ring[1:] + ring[:1])}
    element = rng.integers(3, size=3)[kind].tolist()
    chains = [
        rng.integers(3, size=rng.integers(3)).tolist() for _ in range(3)
    ]  # up to two atoms on each kind
    for atom in range(10):
        end = atom
        for other in chains[kind[atom]]:
            bonds.add((end, len(element)))
            end = len(element)
            element.append(other)
    source, target = torch.tensor(sorted(bonds)).T
    edge_index = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    x = F.one_hot(torch.tensor(element), 3).float()
    return Data(x=x, edge_index=edge_index, y=torch.tensor([label]))


def generated(pairs: int, seed: int) -> list[Data]:
    """Pairs of twins with random elements and side chains, the same in both: class 0, class 1, class 0, ..."""
    rngs = [np.random.default_rng((seed, number)) for number in range(pairs) for _ in range(2)]
    return [ring_system(i % 2, rng) for i, rng in enumerate(rngs)]


def folds(y: Tensor, number: int, seed: int) -> Tensor:
    """The fold of each molecule: every fold has as many of each class as the others, or one more or less."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    order = order[y[order].argsort(stable=True)]
    fold = torch.empty_like(y)
    fold[order] = torch.arange(len(y)) % number
    return fold


class Classifier(torch.nn.Module):
    """GPS layers on atoms and their encodings; the class comes from sum and mean over the molecule."""

    def __init__(self, in_channels: int, encoding_channels: int, classes: int, settings: Settings):
        super().__init__()
        channels = settings.channels
        self.norm = torch.nn.BatchNorm1d(in_channels)  # measured attributes come in units of their own
        self.lin_in = torch.nn.Linear(in_channels, channels)
        self.lin_encoding = (
            torch.nn.Linear(encoding_channels, channels, bias=False) if encoding_channels else None
        )
        self.convs = torch.nn.ModuleList(
            GPSConv(
                channels,
                GINConv(
                    torch.nn.Sequential(
                        torch.nn.Linear(channels, channels),
                        torch.nn.ReLU(),
                        torch.nn.Linear(channels, channels),
                    )
                ),
                heads=settings.heads,
                dropout=settings.dropout,
                attn_kwargs={"dropout": settings.attention_dropout},
            )
            for _ in range(settings.layers)
        )
        self.out = torch.nn.Sequential(
            torch.nn.Linear(2 * channels, channels),
            torch.nn.ReLU(),
            torch.nn.Dropout(settings.dropout),
            torch.nn.Linear(channels, classes),
        )

    def embed(self, data: Data) -> Tensor:
        x = self.lin_in(self.norm(data.x))
        return x if self.lin_encoding is None else x + self.lin_encoding(data.encoding)

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch)
        for conv in self.convs:
            x = conv(x, batch.edge_index, batch.batch)
        size = batch.num_graphs
        # The sum in tens of atoms: of the same order as the mean.
        pooled = [global_mean_pool(x, batch.batch, size), global_add_pool(x, batch.batch, size) / 10]
        return self.out(torch.cat(pooled, dim=-1))


def encoded(data: Sequence[Data], encoding: str) -> list[Data]:
    """The molecules with an attribute `encoding`, of no columns for none."""
    transform = ENCODINGS[encoding]
    if transform is None:
        return [Data(x=m.x, edge_index=m.edge_index, y=m.y, encoding=m.x[:, :0]) for m in data]
    return [transform(Data(x=m.x, edge_index=m.edge_index, y=m.y)) for m in data]


def training(
    learn: Sequence[Data], test: Sequence[Data], classes: int, flip: bool, settings: Settings, seed: int
) -> tuple[dict[str, Any], Callable[[], dict[str, float]]]:
    """A new model with its optimizer and learning rate, and the function that trains it for one epoch.

    `flip` draws the signs of a molecule's encodings anew in every epoch: eigenvectors have none of their own.
    """
    torch.manual_seed(seed)
    model = Classifier(learn[0].num_features, learn[0].encoding.size(1), classes, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    loader = DataLoader(learn, settings.batch, shuffle=True)
    schedule = rise_and_fall(optimizer, settings.epochs * len(loader), rise=0.2)
    held_out = Batch.from_data_list(list(test))

    def one_epoch() -> dict[str, float]:
        model.train()
        total = 0.0
        for batch in loader:
            if flip:
                sign = torch.randint(2, (batch.num_graphs, batch.encoding.size(1))) * 2 - 1
                batch.encoding = batch.encoding * sign[batch.batch]
            loss = F.cross_entropy(model(batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * batch.num_graphs
        model.eval()
        with torch.no_grad():
            right = (model(held_out).argmax(1) == held_out.y).sum().item()
        return {"loss": total / len(learn), "test": right / len(test)}

    return {"model": model, "optimizer": optimizer, "schedule": schedule}, one_epoch


@dataclass(frozen=True)
class Result:
    """Scores of one encoding: `[folds, epochs]`, in %, and the median seconds of an epoch."""

    encoding: str
    scores: np.ndarray
    seconds: float
    model: Classifier  # of the last fold

    @property
    def last(self) -> np.ndarray:
        """Of every fold after the last epoch."""
        return self.scores[:, -1]

    @property
    def best(self) -> np.ndarray:
        """Of every fold after the epoch that is the best for all of them together."""
        return self.scores[:, self.scores.mean(0).argmax()]


def table(dataset: str, results: Sequence[Result]) -> str:
    lines = [f"{'':<28} {'last epoch':>14} {'best epoch':>14} {'s/epoch':>9}"]
    for row in results:
        last, best = (f"{x.mean():.1f} ± {x.std():.1f}" for x in (row.last, row.best))
        lines.append(f"GPS, {row.encoding:<23} {last:>14} {best:>14} {row.seconds:>9.2f}")
    for name, mean, deviation, source in PUBLISHED.get(dataset, []):
        score = f"{mean:.1f} ± {deviation:.1f}"
        columns = f"{'':>14} {score:>14}" if "best epoch" in name else f"{score:>14} {'':>14}"
        lines.append(f"{name.removesuffix(', best epoch'):<28} {columns} {'':>9} {source}")
    return "\n".join(lines)


def draw(path: Path, dataset: str, results: Sequence[Result], molecules: dict[str, Sequence[Data]]) -> None:
    """Draw the scores of all folds, and for one molecule of each class where its atoms look."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    scores, *drawings = figure.subplots(1, 3, width_ratios=(1.1, 1, 1))
    for place, row in enumerate(results):
        spread = np.linspace(-0.15, 0.15, len(row.last)) if len(row.last) > 1 else [0.0]
        scores.plot(place + np.asarray(spread), row.last, "o", color="0.6", markersize=4)
        scores.errorbar(
            place, row.last.mean(), row.last.std(), marker="s", capsize=6, color="C0", linewidth=2
        )
    for number, (name, mean, _, source) in enumerate(PUBLISHED.get(dataset, [])):
        scores.axhline(mean, linestyle="--", color=f"C{number + 1}", label=f"{name}: {source}")
    if dataset == "generated":
        scores.axhline(50, linestyle=":", color="k", label="guessing")
    scores.set_xticks(range(len(results)), [row.encoding.replace("_", " ") for row in results])
    scores.set(title=f"{dataset}: {len(results[0].last)} folds", ylabel="accuracy after the last epoch, %")
    scores.set_xlim(-0.5, len(results) - 0.5)
    # Below the axes: points may lie anywhere in them.
    scores.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    scores.grid(alpha=0.3, axis="y")

    best = max(results, key=lambda row: row.last.mean())
    held = molecules[best.encoding]
    # A molecule of middle size, and the one of the other class that follows: among the generated ones its twin.
    first = sorted((m.num_nodes, i) for i, m in enumerate(held) if int(m.y) == 0)[
        sum(m.y == 0 for m in held) // 2
    ][1]
    second = next(i % len(held) for i in range(first, first + len(held)) if int(held[i % len(held)].y) == 1)
    for ax, number in zip(drawings, (first, second)):
        molecule = held[number]
        received = attention_received(best.model, molecule)
        graph = to_networkx(molecule, to_undirected=True)
        flat, _ = nx.check_planarity(graph)
        place = nx.kamada_kawai_layout(graph, pos=nx.planar_layout(graph) if flat else None)
        nx.draw_networkx_edges(graph, place, ax=ax, edge_color="0.5")
        nx.draw_networkx_nodes(
            graph,
            place,
            ax=ax,
            node_size=(150 * received).clamp(20, 900).numpy(),
            node_color=molecule.x[:, -NODE_LABELS[dataset] :].argmax(1).numpy(),
            cmap="tab10",
            vmin=0,
            vmax=9,
        )
        ax.set_title(f"class {int(molecule.y)}")
        ax.set_aspect("equal")
        ax.margins(0.12)
        ax.axis("off")
    figure.suptitle(
        f"Right: colour is the kind of an atom, area the attention it receives (encoding:"
        f" {best.encoding.replace('_', ' ')})",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


@torch.no_grad()
def attention_received(model: Classifier, molecule: Data) -> Tensor:
    """How much all atoms of a molecule look at each of them in the first layer; 1 is an equal share."""
    model.eval()
    x = model.embed(molecule)
    _, ((source, _), alpha) = model.convs[0](x, molecule.edge_index, return_attention_weights=True)
    return torch.zeros(molecule.num_nodes).index_add(0, source, alpha.mean(1))


def main(argv: Sequence[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(prog="python -m examples.molecules", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", choices=SETTINGS, default="generated")
    parser.add_argument(
        "--root",
        type=Path,
        help="folder with the data (default: datasets/, downloaded to it if it is not there)",
    )
    parser.add_argument("--encodings", choices=ENCODINGS, nargs="+", default=list(ENCODINGS))
    parser.add_argument("--pairs", type=int, default=100, help="of twins that are generated")
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument(
        "--validate",
        action="store_true",
        help="leave the test fold out altogether and test on the next one: to choose settings",
    )
    parser.add_argument(
        "--epochs", type=int, help="passes over the training molecules (default: as set for the data set)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the figure (default: out/molecules_DATASET.png)")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")
    args = parser.parse_args(argv)
    least = 3 if args.validate else 2
    if args.folds < least or args.pairs < args.folds or (args.epochs is not None and args.epochs < 1):
        parser.error(f"--folds must be at least {least}, --pairs as many as folds, --epochs at least 1")
    if args.root is not None and args.dataset == "generated":
        parser.error("--root has no meaning without --dataset: molecules are generated")
    args.out = args.out or Path("out", f"molecules_{args.dataset}.png")
    check_figure(parser, args.out)
    try:
        if args.dataset == "generated":
            data = generated(args.pairs, args.seed)
        else:
            data = datasets.molecules(args.dataset, args.root)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    y = torch.cat([molecule.y for molecule in data])
    if y.bincount().min() < args.folds:
        parser.error(
            f"--folds must be at most the molecules of the smallest class, {int(y.bincount().min())}, got {args.folds}"
        )
    settings = SETTINGS[args.dataset]
    settings = settings if args.epochs is None else replace(settings, epochs=args.epochs)
    sizes = [molecule.num_nodes for molecule in data]
    print(
        f"{args.dataset}: {len(data)} molecules of {min(sizes)} to {max(sizes)} atoms, {y.bincount().tolist()} in"
        f" the classes, {settings}"
    )

    if args.dataset == "generated":  # twins stay together, else a model could learn one from the other
        fold = folds(torch.zeros_like(y[::2]), args.folds, args.seed).repeat_interleave(2)
    else:
        fold = folds(y, args.folds, args.seed)
    checksum = zlib.crc32(Batch.from_data_list(data).x.numpy().tobytes())
    results, molecules = [], {}
    with interruptible(parser):
        for encoding in dict.fromkeys(args.encodings):
            molecules[encoding] = encoded(data, encoding)
            histories = []
            for k in range(args.folds):
                tested = (k + 1) % args.folds if args.validate else k
                test = [m for m, f in zip(molecules[encoding], fold.tolist()) if f == tested]
                learn = [m for m, f in zip(molecules[encoding], fold.tolist()) if f not in (k, tested)]
                run = {**asdict(settings), "encoding": encoding, "seed": args.seed, "data": checksum}
                run |= {"fold": k, "folds": args.folds, "validate": args.validate}
                place = args.out.with_suffix("") / f"{encoding}_fold_{k}.pt"
                parts, one_epoch = training(
                    learn, test, int(y.max()) + 1, encoding == "laplacian", settings, args.seed
                )
                histories.append(
                    train(Checkpoint(place, run, args.resume), settings.epochs, parts, one_epoch)
                )
            scores = np.array([[100 * row["test"] for row in history] for history in histories])
            seconds = float(np.median([row["seconds"] for history in histories for row in history]))
            results.append(Result(encoding, scores, seconds, parts["model"]))
            print(f"{encoding}: {results[-1].last.mean():.1f} ± {results[-1].last.std():.1f} %", flush=True)
    tested = "validation" if args.validate else "test"
    print(f"\n{tested} accuracy in %, mean ± standard deviation over {args.folds} folds")
    print(table(args.dataset, results))
    draw(args.out, args.dataset, results, molecules)
    print(f"Figure: {args.out}")
    return results


if __name__ == "__main__":
    main()
