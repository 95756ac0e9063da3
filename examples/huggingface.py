"""Run one Hugging Face BERT on several graphs: all pairs of tokens, a window, a window and global tokens.

    pip install "graphattn[huggingface]"
    python -m examples.huggingface                       # random weights, no download
    python -m examples.huggingface --length 2048 --radius 32
    python -m examples.huggingface --root DIR            # the BERT that save_pretrained wrote to DIR

Nothing is trained. On the complete graph, and on any graph given to eager attention as a mask, the outputs must be
the same: the script compares them before it prints a time. The figure shows edges and times.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from examples.positional_encodings import check_figure
from graphattn import CompleteGraph, Graph, WindowGraph, global_graph, union
from graphattn.integrations.huggingface import register

try:
    import transformers
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error}: this example runs a Hugging Face model. Install it with `pip install -e '.[huggingface]'`."
    ) from error


@dataclass(frozen=True)
class Row:
    """One graph: its edges, how far the outputs are from eager attention's, and the median seconds of both."""

    graph: str
    edges: int
    difference: float
    seconds: float
    eager_seconds: float


def graphs(radius: int, num_global: int) -> dict:
    """For each name a function as `register` takes it, which builds a graph once for each size."""

    def window(num_queries: int, num_keys: int, module: object = None) -> Graph:
        return WindowGraph(num_queries, radius)

    def window_and_global(num_queries: int, num_keys: int, module: object = None) -> Graph:
        first = range(min(num_global, num_queries))
        return union(WindowGraph(num_queries, radius), global_graph(num_queries, first))

    def complete(num_queries: int, num_keys: int, module: object = None) -> Graph:
        return CompleteGraph(num_queries, num_keys=num_keys)

    functions = {"complete": complete, "window": window, "window+global": window_and_global}
    return {name: functools.lru_cache(maxsize=8)(function) for name, function in functions.items()}


def new_bert(length: int, seed: int) -> transformers.BertModel:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=length,
        initializer_range=0.1,
    )
    return transformers.BertModel(config).eval()


def load_bert(root: Path) -> transformers.BertModel:
    """The model in a folder.

    Raises:
        OSError: there is none.
        ValueError: it is no BERT.
    """
    config = transformers.AutoConfig.from_pretrained(root, local_files_only=True)
    if config.model_type != "bert":
        raise ValueError(f"{root} must hold a BERT, it holds a model of type {config.model_type}")
    return transformers.BertModel.from_pretrained(root, local_files_only=True).eval()


def run(model: transformers.BertModel, implementation: str, tokens: Tensor, mask: Tensor | None) -> tuple:
    model.set_attn_implementation(implementation)
    start = time.perf_counter()
    with torch.no_grad():
        out = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return out, time.perf_counter() - start


def compare(name: str, function, model: transformers.BertModel, tokens: Tensor, epochs: int) -> Row:
    """Time graph attention and eager attention under the same graph in turn, after a round to warm up.

    Raises:
        RuntimeError: their outputs differ.
    """
    register("example", function)
    graph = function(tokens.size(1), tokens.size(1), None)
    mask = torch.zeros(graph.num_queries, graph.num_keys).masked_fill(~graph.to_mask(), torch.finfo().min)
    mask = mask.expand(len(tokens), 1, -1, -1)
    seconds: dict[str, list[float]] = {"example": [], "eager": []}
    for _ in range(1 + epochs):
        ours, spent = run(model, "example", tokens, None)
        seconds["example"].append(spent)
        eager, spent = run(model, "eager", tokens, mask)
        seconds["eager"].append(spent)
    difference = (ours - eager).abs().max().item()
    if not difference < 1e-4:
        raise RuntimeError(
            f"On the {name} graph the outputs differ by {difference:.1e} from those of eager attention."
        )
    ours_seconds, eager_seconds = (float(np.median(times[1:])) for times in seconds.values())
    return Row(name, graph.num_edges, difference, ours_seconds, eager_seconds)


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    edges, times = figure.subplots(1, 2)
    names, places = [row.graph for row in rows], np.arange(len(rows))
    edges.bar(names, [row.edges for row in rows], color="0.6")
    edges.set(title=title, ylabel="edges")
    times.bar(places - 0.2, [1000 * row.seconds for row in rows], 0.4, label="graph attention")
    times.bar(places + 0.2, [1000 * row.eager_seconds for row in rows], 0.4, label="eager with the mask")
    times.set(title="forward pass", ylabel="ms")
    times.set_xticks(places, names)
    times.margins(y=0.25)  # room for the legend
    times.legend()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.huggingface", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--root", type=Path, help="folder that save_pretrained wrote a BERT to (default: random weights)"
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--radius", type=int, default=16, help="of the window, in tokens on either side")
    parser.add_argument(
        "--global-tokens", type=int, default=1, help="that attend to all and are attended by all"
    )
    parser.add_argument(
        "--epochs", type=int, default=5, help="timed passes over the sequences, with no training (5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the tokens and the random weights")
    parser.add_argument("--out", type=Path, default=Path("out", "huggingface.png"), help="the figure")
    args = parser.parse_args(argv)
    for name in ("length", "batch", "radius", "global_tokens", "epochs"):
        least = 0 if name in ("radius", "global_tokens") else 1
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    check_figure(parser, args.out)
    try:
        model = new_bert(args.length, args.seed) if args.root is None else load_bert(args.root)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    config = model.config
    if args.length > config.max_position_embeddings:
        parser.error(
            f"--length must be at most {config.max_position_embeddings} for this model, got {args.length}"
        )

    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(config.vocab_size, (args.batch, args.length), generator=generator)
    rows = [
        compare(name, function, model, tokens, args.epochs)
        for name, function in graphs(args.radius, args.global_tokens).items()
    ]
    print(
        f"BERT, {args.batch} sequences of {args.length} tokens, {config.num_hidden_layers} layers of"
        f" {config.num_attention_heads} heads, width {config.hidden_size}"
    )
    print(f"{'graph':<14} {'edges':>9} {'difference':>11} {'ms':>8} {'eager with the mask, ms':>24}")
    for row in rows:
        print(
            f"{row.graph:<14} {row.edges:>9} {row.difference:>11.1e} {1000 * row.seconds:>8.1f}"
            f" {1000 * row.eager_seconds:>24.1f}"
        )
    draw(args.out, f"BERT, {args.batch} × {args.length} tokens", rows)
    print(f"Figure: {args.out}")
    return rows


if __name__ == "__main__":
    main()
