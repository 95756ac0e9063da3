"""Run one Hugging Face BERT on several graphs: all pairs of tokens, a window, a window and global tokens.

    pip install "graphattn[huggingface]"
    python -m examples.huggingface                       # random weights, no download
    python -m examples.huggingface --length 2048 --radius 32

On the complete graph, and on any graph given to eager attention as a mask, the outputs must be the same: the
script compares them before it prints a time.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from torch import Tensor

from graphattn import CompleteGraph, Graph, WindowGraph, global_graph, union
from graphattn.integrations.huggingface import register


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


def run(model: transformers.BertModel, implementation: str, tokens: Tensor, mask: Tensor | None) -> tuple:
    model.set_attn_implementation(implementation)
    start = time.perf_counter()
    with torch.no_grad():
        out = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return out, time.perf_counter() - start


def compare(name: str, function, model: transformers.BertModel, tokens: Tensor, rounds: int) -> Row:
    """Time graph attention and eager attention under the same graph in turn.

    Raises:
        RuntimeError: their outputs differ.
    """
    register("example", function)
    graph = function(tokens.size(1), tokens.size(1), None)
    mask = torch.zeros(graph.num_queries, graph.num_keys).masked_fill(~graph.to_mask(), torch.finfo().min)
    mask = mask.expand(len(tokens), 1, -1, -1)
    seconds: dict[str, list[float]] = {"example": [], "eager": []}
    for _ in range(1 + rounds):
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


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.huggingface", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--radius", type=int, default=16, help="of the window, in tokens on either side")
    parser.add_argument(
        "--global-tokens", type=int, default=1, help="that attend to all and are attended by all"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("length", "batch", "radius", "global_tokens", "rounds"):
        least = 0 if name in ("radius", "global_tokens") else 1
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")

    model = new_bert(args.length, args.seed)
    tokens = torch.randint(
        1000, (args.batch, args.length), generator=torch.Generator().manual_seed(args.seed)
    )
    rows = [
        compare(name, function, model, tokens, args.rounds)
        for name, function in graphs(args.radius, args.global_tokens).items()
    ]
    print(f"BERT, {args.batch} sequences of {args.length} tokens, 2 layers of 4 heads, width 128")
    print(f"{'graph':<14} {'edges':>9} {'difference':>11} {'ms':>8} {'eager with the mask, ms':>24}")
    for row in rows:
        print(
            f"{row.graph:<14} {row.edges:>9} {row.difference:>11.1e} {1000 * row.seconds:>8.1f}"
            f" {1000 * row.eager_seconds:>24.1f}"
        )
    return rows


if __name__ == "__main__":
    main()
