"""Recall what was said long ago: a recurrent network step by step, attention all at once.

    python -m examples.recurrence                          # random values, no download
    python -m examples.recurrence --root FILE_OR_FOLDER    # the characters of a text, Tiny Shakespeare's input.txt

Associative recall: a sequence of key-value pairs, then one of the keys again; the answer is its value. An LSTM
passes everything it has seen through one state, one step after the other. Causal attention on a complete graph
sees all the past at once, attention on a window only what is near. The figure shows accuracy against how many
pairs ago the answer was, and the time of a forward pass against the length.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from examples.character_language_model import read
from examples.long_training import STEPS, rise_and_fall
from examples.positional_encodings import check_figure
from graphattn import CompleteGraph, Graph, WindowGraph, graph_attention

WIDTH, HEADS = 64, 4
MODELS = ("LSTM", "causal attention", "window attention")


def graph_of(model: str, length: int, radius: int) -> Graph:
    if model == "causal attention":
        return CompleteGraph(length, causal=True)
    return WindowGraph(length, (radius, 0))


class Recaller(torch.nn.Module):
    """Pairs in, at every position the class scores of the value that belongs to its key."""

    def __init__(self, model: str, keys: int, values: int, radius: int):
        super().__init__()
        self.model, self.radius = model, radius
        self.key = torch.nn.Embedding(keys, WIDTH)
        self.value = torch.nn.Embedding(values + 1, WIDTH)  # the last one is the question mark
        if model == "LSTM":
            self.lstm = torch.nn.LSTM(WIDTH, 2 * WIDTH, batch_first=True)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH)
        )
        self.answer = torch.nn.Linear(2 * WIDTH if model == "LSTM" else WIDTH, values)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        x = self.key(keys) + self.value(values)
        if self.model == "LSTM":
            return self.answer(self.lstm(x)[0])
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        x = x + graph_attention(query, key, value, graph_of(self.model, x.size(1), self.radius)).flatten(-2)
        return self.answer(x + self.mlp(x))


def numbered(text: str, length: int) -> Tensor:
    """The characters of a text as numbers from 0 on.

    Raises:
        ValueError: it has fewer than `length` of them.
    """
    if len(text) < length:
        raise ValueError(f"the text must have at least --length={length} characters, it has {len(text)}")
    alphabet = sorted(set(text))
    return torch.tensor([alphabet.index(character) for character in text])


def pairs(
    number: int, length: int, keys: int, values: int, text: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values, the last of them a question; the answers, and how many pairs ago they were.

    Values are random, or consecutive characters of a text. No two keys of a sequence are the same.
    """
    key = torch.rand(number, keys).argsort(dim=1)[:, :length]
    if text is None:
        value = torch.randint(values, (number, length))
    else:
        value = text[torch.randint(len(text) - length + 1, (number, 1)) + torch.arange(length)]
    ago = torch.randint(1, length, (number,))
    row = torch.arange(number)
    key[:, -1] = key[row, length - 1 - ago]
    answer = value[row, length - 1 - ago]
    value[:, -1] = values
    return key, value, answer, ago


def train(
    name: str, length: int, radius: int, epochs: int, seed: int, text: Tensor | None = None
) -> tuple[Tensor, Recaller]:
    """Train on fresh sequences; the share of right answers for each distance, on others."""
    torch.manual_seed(seed)
    keys, values = 2 * length, 8 if text is None else int(text.max()) + 1
    model = Recaller(name, keys, values, radius)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = rise_and_fall(optimizer, epochs * STEPS, rise=0.3)
    for _ in tqdm(range(epochs * STEPS), desc=name, leave=False, disable=None):
        key, value, answer, _ = pairs(64, length, keys, values, text)
        loss = F.cross_entropy(model(key, value)[:, -1], answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        key, value, answer, ago = pairs(8000, length, keys, values, text)
        asked = zip(key.split(1000), value.split(1000))
        right = (torch.cat([model(*part)[:, -1].argmax(1) for part in asked]) == answer).float()
    count = torch.bincount(ago, minlength=length)[1:].clamp(min=1)
    return torch.bincount(ago, right, length)[1:] / count, model


def seconds(lengths: Sequence[int], radius: int, rounds: int) -> dict[str, list[float]]:
    """Median time of a forward pass over one sequence of each length, the models taking turns."""
    models = {name: Recaller(name, 8, 8, radius).eval() for name in MODELS}
    result: dict[str, list[float]] = {name: [] for name in MODELS}
    for length in lengths:
        tokens = torch.randint(8, (1, length))
        times: dict[str, list[float]] = {name: [] for name in MODELS}
        for _ in range(rounds + 1):
            for name, model in models.items():
                with torch.no_grad():
                    start = time.perf_counter()
                    model(tokens, tokens)
                    times[name].append(time.perf_counter() - start)
        for name in MODELS:
            result[name].append(statistics.median(times[name][1:]))
    return result


def draw(
    path: Path,
    recall: dict[str, Tensor],
    guess: float,
    lengths: Sequence[int],
    times: dict[str, list[float]],
    radius: int,
):
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    accuracy, cost = figure.subplots(1, 2)
    for name, marker in zip(MODELS, "os^"):
        share = recall[name]
        accuracy.plot(range(1, len(share) + 1), share, marker=marker, markersize=4, label=name)
        cost.plot(lengths, [1000 * t for t in times[name]], marker=marker, label=name)
    accuracy.axhline(guess, color="k", linestyle=":", label="guessing")
    accuracy.axvline(radius + 0.5, color="0.7", linestyle="--", label="end of the window")
    accuracy.set(
        title="associative recall",
        xlabel="pairs between answer and question",
        ylabel="accuracy",
        ylim=(0, 1.05),
    )
    cost.set(title="forward pass, one sequence", xlabel="length", ylabel="ms", xscale="log", yscale="log")
    cost.set_xticks(lengths, labels=[f"{n:,}" for n in lengths])
    cost.xaxis.minorticks_off()
    accuracy.legend(loc="center right")
    cost.legend()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> dict[str, Tensor]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.recurrence", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--length", type=int, default=24, help="pairs in a sequence")
    parser.add_argument("--radius", type=int, default=8, help="pairs that the window reaches back")
    parser.add_argument(
        "--root",
        type=Path,
        help="a text file, or a folder with input.txt, whose characters are the values (default: random values)",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=20,
        help=f"for each model, an epoch being {STEPS} steps of 64 new sequences (20)",
    )
    parser.add_argument("--longest", type=int, default=4096, help="longest sequence that is timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out", "recurrence.png"), help="the figure")
    args = parser.parse_args(argv)
    if args.length < 2 or args.radius < 0 or args.epochs < 1 or args.longest < 64:
        parser.error("--length must be at least 2, --radius 0, --epochs 1 and --longest 64")
    check_figure(parser, args.out)
    text, guess = None, 1 / 8
    if args.root is not None:
        try:
            text = numbered(read(args.root), args.length)
        except (OSError, ValueError) as error:
            parser.exit(1, f"{error}\n")
        guess = int(text.bincount().max()) / len(text)

    recall = {}
    for name in MODELS:
        recall[name], _ = train(name, args.length, args.radius, args.epochs, args.seed, text)
        near, far = recall[name][: args.radius], recall[name][args.radius :]
        print(
            f"{name:<17} recalls {100 * near.mean():5.1f} % up to {args.radius} pairs ago,"
            f" {100 * far.mean():5.1f} % of those before",
            flush=True,
        )
    lengths = [n for n in (64, 256, 1024, 4096, 16384) if n <= args.longest]
    times = seconds(lengths, args.radius, rounds=9)
    print(f"\n{'forward pass, ms':<18}" + "".join(f"{n:>10}" for n in lengths))
    for name in MODELS:
        print(f"{name:<18}" + "".join(f"{1000 * t:>10.2f}" for t in times[name]))
    draw(args.out, recall, guess, lengths, times, args.radius)
    print(f"Figure: {args.out}")
    return recall


if __name__ == "__main__":
    main()
