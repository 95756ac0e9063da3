"""Classify the nodes of a graph with a small stack of attention layers.

    python -m examples.node_classification                                 # handwritten digits, no download
    python -m examples.node_classification --dataset Cora --root DIR       # PyG's data sets, here from DIR
    python -m examples.node_classification --compare                       # beside PyG's own layer

Every layer is a `TransformerConv`: each node attends to its neighbours. Swapping PyG's layer for graphattn's
changes one import, neither the parameters nor the result. On PubMed, where few labels must reach far, nodes score the
classes by themselves, and attention then spreads the scores along the edges, ten steps with the same weights.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import networkx as nx
import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric.nn
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import rankdata
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch_geometric.data import Data
from torch_geometric.transforms import AddSelfLoops, NormalizeFeatures
from torch_geometric.utils import degree, scatter, softmax
from tqdm import tqdm

import datasets
import graphattn.nn
from examples.positional_encodings import check_figure

NORMS = {"none": torch.nn.Identity, "batch": torch.nn.BatchNorm1d, "layer": torch.nn.LayerNorm}
LAYERS = {
    "graphattn": graphattn.nn.TransformerConv,
    "pyg": torch_geometric.nn.TransformerConv,
}


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters, chosen by validation score."""

    layers: int = 2
    heads: int = 8
    channels: int = 8  # per head
    output_heads: int = 1  # of the last layer: their class scores are averaged
    diffusion: int = 0  # steps in which attention spreads class scores; 0: layers of attention
    root_weight: bool = False  # add a linear map of the node itself to what it attends to
    norm: str = "none"  # normalisation after every hidden layer: one of NORMS
    input_dropout: float | None = None  # of the features of the data; None: as all others
    dropout: float = 0.6  # of features
    attention_dropout: float = 0.6
    lr: float = 0.01
    weight_decay: float = 1e-3
    epochs: int = 1000
    patience: int | None = 100  # epochs without a better one; None: all epochs are trained
    choose_by: str = "loss"  # the best epoch has the lowest validation "loss" or the highest "score"
    one_cycle: bool = False  # the learning rate rises to `lr` and falls to 0, else it is constant
    evaluate_every: int = 1  # epochs from one look at the validation nodes to the next
    degree: bool = False  # a feature more, as means over neighbours do not tell how many there are
    normalize_features: bool = False  # rows sum to 1
    metric: str = "accuracy"


SETTINGS = {
    "digits": Settings(dropout=0.3, attention_dropout=0.3, weight_decay=5e-4, epochs=200, patience=50),
    "Cora": Settings(dropout=0.8, normalize_features=True),
    "CiteSeer": Settings(weight_decay=2e-3, normalize_features=True),
    "PubMed": Settings(diffusion=10, attention_dropout=0.0, weight_decay=2e-3, normalize_features=True),
    "Minesweeper": Settings(
        layers=14,
        heads=4,
        root_weight=True,
        norm="batch",
        input_dropout=0.0,
        dropout=0.2,
        attention_dropout=0.0,
        lr=0.015,
        weight_decay=0.0,
        epochs=1000,
        patience=None,
        choose_by="score",
        one_cycle=True,
        evaluate_every=20,
        metric="ROC AUC",
    ),
    "Tolokers": Settings(
        layers=4,
        root_weight=True,
        norm="batch",
        input_dropout=0.0,
        dropout=0.4,
        attention_dropout=0.2,
        weight_decay=0.0,
        epochs=250,
        patience=None,
        choose_by="score",
        one_cycle=True,
        evaluate_every=10,
        degree=True,
        metric="ROC AUC",
    ),
    "Computers": Settings(
        layers=3,
        root_weight=True,
        norm="layer",
        input_dropout=0.0,
        dropout=0.4,
        attention_dropout=0.1,
        weight_decay=5e-5,
        epochs=250,
        patience=None,
        choose_by="score",
        one_cycle=True,
        evaluate_every=10,
    ),
    "Photo": Settings(
        root_weight=True,
        norm="layer",
        input_dropout=0.3,
        attention_dropout=0.4,
        lr=0.005,
        weight_decay=5e-4,
        epochs=100,
        patience=None,
        choose_by="score",
        one_cycle=True,
        evaluate_every=10,
    ),
}


class NodeClassifier(torch.nn.Module):
    """`settings.layers` attention layers, the last of which gives the class scores."""

    def __init__(self, layer: str, in_channels: int, num_classes: int, settings: Settings):
        super().__init__()
        conv, hidden = LAYERS[layer], settings.heads * settings.channels
        options = {"dropout": settings.attention_dropout, "root_weight": settings.root_weight}
        widths = [in_channels] + [hidden] * (settings.layers - 1)
        self.convs = torch.nn.ModuleList(
            conv(width, settings.channels, settings.heads, **options) for width in widths[:-1]
        )
        self.convs.append(conv(widths[-1], num_classes, settings.output_heads, concat=False, **options))
        self.norms = torch.nn.ModuleList(NORMS[settings.norm](hidden) for _ in widths[1:])
        self.dropout = settings.dropout
        self.input_dropout = settings.dropout if settings.input_dropout is None else settings.input_dropout
        for conv in self.convs:  # all scores start at 0: attention begins as the mean over the neighbours
            torch.nn.init.zeros_(conv.lin_query.weight)
            torch.nn.init.zeros_(conv.lin_query.bias)

    def attention(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The weights of the first layer, one row for every edge and one column for every head."""
        return self.convs[0](x, edge_index, return_attention_weights=True)[1][1]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, self.input_dropout, self.training)
        for conv, norm in zip(self.convs, self.norms):  # one norm less than convs: this leaves out the last
            x = F.elu(norm(conv(x, edge_index)))
            x = F.dropout(x, self.dropout, self.training)
        return self.convs[-1](x, edge_index)


class DiffusionClassifier(torch.nn.Module):
    """Nodes score the classes from their own features; attention spreads the scores along the edges.

    In each of `settings.diffusion` steps a node keeps a tenth of its own first scores and takes the rest from its
    neighbours: z ← 0.9 Attention(q, k, z) + 0.1 z⁰, with the same queries and keys in every step. Personalised
    PageRank (Gasteiger et al., Predict then Propagate, ICLR 2019) with the weights of attention (Wang et al.,
    Multi-hop Attention Graph Neural Networks, IJCAI 2021).
    """

    def __init__(self, layer: str, in_channels: int, num_classes: int, settings: Settings):
        super().__init__()
        hidden = settings.heads * settings.channels
        self.lin_in = torch.nn.Linear(in_channels, hidden)
        self.lin_scores = torch.nn.Linear(hidden, num_classes)
        self.lin_query = torch.nn.Linear(hidden, hidden)
        self.lin_key = torch.nn.Linear(hidden, hidden)
        torch.nn.init.zeros_(self.lin_query.weight)  # as in NodeClassifier
        torch.nn.init.zeros_(self.lin_query.bias)
        self.attend, self.settings = ATTENTION[layer], settings

    def hidden(self, x: Tensor) -> Tensor:
        rate = self.settings.dropout if self.settings.input_dropout is None else self.settings.input_dropout
        x = F.elu(self.lin_in(F.dropout(x, rate, self.training)))
        return F.dropout(x, self.settings.dropout, self.training)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = (self.settings.heads, self.settings.channels)
        return self.lin_query(x).unflatten(-1, heads), self.lin_key(x).unflatten(-1, heads)

    def attention(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The weights of all steps, one row for every edge and one column for every head."""
        graph = graphattn.as_graph(edge_index, num_nodes=x.size(0))
        return graphattn.attention_weights(*self.queries_and_keys(self.hidden(x)), graph)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.hidden(x)
        query, key = self.queries_and_keys(x)
        first = scores = self.lin_scores(x).unsqueeze(1).expand(-1, self.settings.heads, -1)
        dropout = self.settings.attention_dropout if self.training else 0.0
        for _ in range(self.settings.diffusion):
            scores = 0.9 * self.attend(query, key, scores, edge_index, dropout) + 0.1 * first
        return scores.mean(1)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, edge_index: Tensor, dropout: float) -> Tensor:
    graph = graphattn.as_graph(edge_index, num_nodes=query.size(0))
    return graphattn.graph_attention(query, key, value, graph, dropout_p=dropout)


def edge_wise_attention(
    query: Tensor, key: Tensor, value: Tensor, edge_index: Tensor, dropout: float
) -> Tensor:
    """The same with PyG's functions, edge by edge."""
    (source, target), nodes = edge_index, query.size(0)
    scores = (query[target] * key[source]).sum(-1) / query.size(-1) ** 0.5
    weights = F.dropout(softmax(scores, target, num_nodes=nodes), dropout)
    return scatter(weights.unsqueeze(-1) * value[source], target, dim_size=nodes)


ATTENTION = {"graphattn": fused_attention, "pyg": edge_wise_attention}


@dataclass(frozen=True)
class Run:
    """One training run: the model and its scores at the chosen epoch, and a row for every look at it."""

    model: NodeClassifier | DiffusionClassifier
    val: float
    test: float
    epoch: int
    history: list[dict[str, float]]


def prepare(data: Data, settings: Settings) -> Data:
    """Let every node attend to itself as well; add the degree and scale the features if the settings say so."""
    data = copy.copy(data)
    if settings.degree:
        log_degree = degree(data.edge_index[1], data.num_nodes).log1p()
        data.x = torch.cat([data.x, (log_degree - log_degree.mean()).div(log_degree.std())[:, None]], dim=1)
    data = AddSelfLoops()(data)
    return NormalizeFeatures()(data) if settings.normalize_features else data


def with_split(data: Data, number: int) -> Data:
    """Pick one split of a data set that comes with several (masks `[nodes, splits]`)."""
    data = copy.copy(data)
    for name in ("train_mask", "val_mask", "test_mask"):
        if data[name].dim() == 2:
            data[name] = data[name][:, number % data[name].size(1)]
    return data


def score(logits: Tensor, y: Tensor, metric: str) -> float:
    """Return the accuracy, or the ROC AUC: the share of pairs of both classes that are ranked rightly."""
    if metric == "accuracy":
        return (logits.argmax(1) == y).float().mean().item()
    positive = y.numpy() == 1
    ranks = rankdata((logits[:, 1] - logits[:, 0]).numpy())
    wins = ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2
    return float(wins / (positive.sum() * (~positive).sum()))


def new_model(
    layer: str, data: Data, settings: Settings, seed: int
) -> tuple[NodeClassifier | DiffusionClassifier, torch.optim.Adam]:
    torch.manual_seed(seed)
    kind = DiffusionClassifier if settings.diffusion else NodeClassifier
    model = kind(layer, data.num_features, int(data.y.max()) + 1, settings)
    return model, torch.optim.Adam(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)


def one_epoch(model: torch.nn.Module, optimizer: torch.optim.Adam, data: Data) -> float:
    """Take one step on all training nodes; return the loss before it."""
    model.train()
    optimizer.zero_grad()
    logits = model(data.x, data.edge_index)
    loss = F.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def class_scores(model: torch.nn.Module, data: Data) -> Tensor:
    model.eval()
    return model(data.x, data.edge_index)


def train(layer: str, data: Data, settings: Settings, seed: int) -> Run:
    """Train until the validation nodes get no better; the test nodes are looked at, never used.

    Few validation nodes choose the epoch by their loss: the best of hundreds of scores on them is mostly luck.
    """

    def merit(row: dict[str, float]) -> float:
        return -row["val_loss"] if settings.choose_by == "loss" else row["val"]

    model, optimizer = new_model(layer, data, settings, seed)
    schedule = OneCycleLR(optimizer, settings.lr, total_steps=settings.epochs) if settings.one_cycle else None
    history: list[dict[str, float]] = []
    with tqdm(range(1, settings.epochs + 1), desc=f"{layer}, seed {seed}", leave=False, disable=None) as bar:
        for epoch in bar:
            start = time.perf_counter()
            loss = one_epoch(model, optimizer, data)
            if schedule is not None:
                schedule.step()
            if epoch % settings.evaluate_every and epoch != settings.epochs:
                continue
            logits = class_scores(model, data)
            seconds = time.perf_counter() - start

            row = {"epoch": epoch, "loss": loss, "seconds": seconds}
            row["val_loss"] = F.cross_entropy(logits[data.val_mask], data.y[data.val_mask]).item()
            row["val"], row["test"] = (
                score(logits[mask], data.y[mask], settings.metric) for mask in (data.val_mask, data.test_mask)
            )
            history.append(row)
            bar.set_postfix(loss=f"{loss:.3f}", val=f"{row['val']:.3f}")

            if len(history) == 1 or merit(row) > merit(best):
                best, best_state = row, copy.deepcopy(model.state_dict())
            elif settings.patience is not None and epoch - best["epoch"] >= settings.patience:
                break
    model.load_state_dict(best_state)
    return Run(model, best["val"], best["test"], best["epoch"], history)


def seconds_per_epoch(data: Data, settings: Settings) -> dict[str, list[float]]:
    """Time epochs of all layers in turn, so that whatever else the machine does meets each of them alike."""
    runs = {layer: new_model(layer, data, settings, seed=0) for layer in LAYERS}
    seconds: dict[str, list[float]] = {layer: [] for layer in LAYERS}
    for _ in range(1 + min(9, settings.epochs)):
        for layer, (model, optimizer) in runs.items():
            start = time.perf_counter()
            one_epoch(model, optimizer, data)
            class_scores(model, data)
            seconds[layer].append(time.perf_counter() - start)
    return {layer: times[1:] for layer, times in seconds.items()}  # the first round warms up


def peak_memory(layer: str, data: Data, settings: Settings) -> float | None:
    """Measure by how many MiB three epochs raise the memory of a new process that holds only the data.

    None where the system has no /proc: a process's own peak is read there, as `getrusage` would also count
    what the parent process held before.
    """
    if not Path("/proc/self/status").exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.pt")
        torch.save(data, path)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            return process.submit(_peak_memory_here, layer, path, settings).result()


def _peak_memory_here(layer: str, path: Path, settings: Settings) -> float:
    data = torch.load(path, weights_only=False)
    first = data.subgraph(data.train_mask.nonzero()[:2, 0])  # two nodes: loads code, and hardly any memory
    one_epoch(*new_model(layer, first, settings, seed=0), first)
    before = _memory("VmRSS")
    run = new_model(layer, data, settings, seed=0)
    for _ in range(3):
        one_epoch(*run, data)
    return _memory("VmHWM") - before


def _memory(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def draw(path: Path, title: str, run: Run, data: Data) -> None:
    """Draw the training curves and, around one test node, the first layer's attention (mean over heads)."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curves, around = figure.subplots(1, 2)
    names = {"loss": "training loss", "val_loss": "validation loss"}
    names |= {"val": "validation score", "test": "test score"}
    for name, label in names.items():
        epochs = [row["epoch"] for row in run.history]
        curves.plot(epochs, [row[name] for row in run.history], label=label)
    curves.set(title=title, xlabel="epoch", ylabel="loss, score", ylim=(0, None))
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    curves.legend()

    run.model.eval()
    with torch.no_grad():
        weights = run.model.attention(data.x, data.edge_index)
    source, target = data.edge_index
    # The test node with the most neighbours of other classes, of those with few enough neighbours to draw.
    others = torch.bincount(target[data.y[source] != data.y[target]], minlength=data.num_nodes)
    degree = torch.bincount(target, minlength=data.num_nodes)
    node = int((others * data.test_mask * (degree <= 13)).argmax())
    into = target == node

    graph = nx.DiGraph()
    graph.add_weighted_edges_from(
        (j, node, weight) for j, weight in zip(source[into].tolist(), weights[into].mean(1).tolist())
    )
    own = graph.edges[node, node]["weight"]
    graph.remove_edge(node, node)
    neighbours = list(graph.predecessors(node))
    position = {node: np.zeros(2), **nx.circular_layout(neighbours)}
    share = {edge: graph.edges[edge]["weight"] for edge in graph.edges}
    largest = max(share.values(), default=1.0)
    nx.draw_networkx_nodes(
        graph,
        position,
        ax=around,
        node_size=500,
        node_color=data.y[list(graph)].numpy(),
        cmap="tab10",
        vmax=9,
        vmin=0,
    )
    nx.draw_networkx_edges(graph, position, ax=around, width=[8 * a / largest for a in share.values()])
    nx.draw_networkx_labels(graph, position, {j: int(data.y[j]) for j in graph}, ax=around)
    nx.draw_networkx_edge_labels(graph, position, {e: f"{a:.2f}" for e, a in share.items()}, ax=around)
    around.set(title=f"what node {node} attends to: classes and weights ({own:.2f} to itself)")
    around.margins(0.15)
    around.axis("off")
    figure.savefig(path, dpi=120)


@dataclass(frozen=True)
class Result:
    """One row of the final table: scores of every seed, and the cost of an epoch."""

    layer: str
    val: list[float]
    test: list[float]
    seconds: float  # per epoch, median
    memory: float | None  # peak, MiB; None: not measured


def table(results: Sequence[Result], metric: str) -> str:
    lines = [
        f"{'layer':<10} {'validation ' + metric:>20} {'test ' + metric:>16} {'ms/epoch':>10} {'peak MiB':>9}"
    ]
    for row in results:
        val, test = (f"{100 * np.mean(x):.2f} ± {100 * np.std(x):.2f}" for x in (row.val, row.test))
        memory = "-" if row.memory is None else f"{row.memory:.0f}"
        lines.append(f"{row.layer:<10} {val:>20} {test:>16} {1000 * row.seconds:>10.1f} {memory:>9}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.node_classification", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--dataset", choices=datasets.NAMES, default="digits")
    parser.add_argument(
        "--root", type=Path, help="folder with the data (default: datasets/, downloaded to it)"
    )
    parser.add_argument("--layer", choices=LAYERS, default="graphattn")
    parser.add_argument("--compare", action="store_true", help="run both layers; measure time and memory")
    parser.add_argument(
        "--epochs", type=int, help="passes over the graph, at most (default: as set for the data set)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--out", type=Path, help="the figure (default: out/node_classification_DATASET.png)")
    args = parser.parse_args(argv)
    if args.seeds < 1 or (args.epochs is not None and args.epochs < 1):
        parser.error("--seeds and --epochs must be at least 1")
    out = args.out or Path("out", f"node_classification_{args.dataset}.png")
    check_figure(parser, out)

    settings = SETTINGS[args.dataset]
    if args.epochs is not None:
        settings = replace(settings, epochs=args.epochs)
    try:
        data = prepare(datasets.load(args.dataset, args.root), settings)
    except (OSError, ValueError) as error:  # what it says is all there is to know
        parser.exit(1, f"{error}\n")
    print(f"{args.dataset}: {data.num_nodes} nodes, {data.num_edges} edges with self-loops, {settings}")

    layers = list(LAYERS) if args.compare else [args.layer]
    runs = {
        layer: [
            train(layer, with_split(data, seed), settings, seed)
            for seed in range(args.seed, args.seed + args.seeds)
        ]
        for layer in layers
    }
    if args.compare:
        seconds = seconds_per_epoch(with_split(data, 0), settings)
        memory = {layer: peak_memory(layer, with_split(data, 0), settings) for layer in layers}
    else:
        seconds = {args.layer: [row["seconds"] for run in runs[args.layer] for row in run.history]}
        memory = {args.layer: None}
    results = [
        Result(
            layer,
            [run.val for run in runs[layer]],
            [run.test for run in runs[layer]],
            float(np.median(seconds[layer])),
            memory[layer],
        )
        for layer in layers
    ]
    print(
        f"\n{args.seeds} seeds, mean ± standard deviation, at the epoch of the best validation {settings.choose_by}"
    )
    print(table(results, settings.metric))
    if args.compare:
        ratio = np.median(np.divide(seconds["pyg"], seconds["graphattn"]))
        print(f"An epoch takes PyG's layer {ratio:.2f} times as long (median over epochs run in turn).")

    draw(
        out, f"{args.dataset}, {layers[0]}, seed {args.seed}", runs[layers[0]][0], with_split(data, args.seed)
    )
    print(f"Figure: {out}")
    return results


if __name__ == "__main__":
    main()
