"""Learn to write, character by character, with a transformer that looks back a few characters only.

    python -m examples.character_language_model                        # graphattn's own source, no download
    python -m examples.character_language_model --root FILE_OR_FOLDER  # any text, Tiny Shakespeare's input.txt
    python -m examples.character_language_model --radii 16 64          # how far a layer looks back
    python -m examples.character_language_model --prompt 'def '        # what the samples begin with

Every character attends to itself and to the `radius` characters before it: `WindowGraph(n, (radius, 0))`. Cost
grows with the length of the text, not with its square, and what one of L layers cannot see the next ones pass
on: a prediction depends on the last L · radius + 1 characters. So the held-out text is scored as one long
sequence, and a sample can become as long as you like. The figure shows bits per character against the radius.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import graphattn
from examples.long_training import Checkpoint, interruptible, rise_and_fall, train
from examples.positional_encodings import check_figure
from graphattn import WindowGraph
from graphattn.encodings import alibi
from graphattn.nn import GraphTransformerLayer, RelativeBias


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and how it is trained."""

    channels: int
    layers: int
    heads: int
    length: int  # of a training sequence
    batch: int  # sequences
    epochs: int
    dropout: float
    lr: float = 3e-3
    weight_decay: float = 0.1


SMALL = Settings(channels=64, layers=2, heads=2, length=128, batch=8, epochs=4, dropout=0.0, lr=4e-3)
LARGE = Settings(channels=128, layers=4, heads=4, length=256, batch=8, epochs=5, dropout=0.1)


@dataclass(frozen=True)
class Text:
    """A text as numbers of the characters of its alphabet: the first nine tenths to learn from, and the rest."""

    alphabet: str
    train: Tensor
    test: Tensor


def own_source() -> str:
    """The modules of the package, one after the other."""
    files = sorted(Path(graphattn.__file__).parent.rglob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def read(root: Path) -> str:
    """The text of a file, or of `input.txt` in a folder or in its folder `tinyshakespeare`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a text.
    """
    places = [root] if root.is_file() else [root / "input.txt", root / "tinyshakespeare" / "input.txt"]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"{root} is no text file, and has none named input.txt or tinyshakespeare/input.txt."
        )
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}.") from error


def encode(text: str, length: int) -> Text:
    """Split a text and number its characters.

    Raises:
        ValueError: the text is empty, or either part holds no sequence of `length` and one more character.
    """
    alphabet = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([number[character] for character in text], dtype=torch.int64)
    cut = len(text) * 9 // 10
    if min(cut, len(text) - cut) < length + 1:
        raise ValueError(
            f"the text must have at least {10 * (length + 1)} characters, of which nine tenths are for training, to"
            f" hold a sequence of {length} in both parts; it has {len(text)}."
        )
    return Text(alphabet, tokens[:cut], tokens[cut:])


class Writer(torch.nn.Module):
    """A causal transformer on a window: at every character the scores of the next one.

    Positions enter as a trained bias for each distance, so a text can be longer than those trained on. It starts
    as ALiBi's.
    """

    def __init__(self, characters: int, settings: Settings, radius: int):
        super().__init__()
        self.radius, self.reach = (
            radius,
            settings.layers * radius,
        )  # characters before the last one that matter
        self.embedding = torch.nn.Embedding(characters, settings.channels)
        self.layers = torch.nn.ModuleList(
            GraphTransformerLayer(
                settings.channels,
                settings.heads,
                4 * settings.channels,
                settings.dropout,
                activation="gelu",
                norm_first=True,
            )
            for _ in range(settings.layers)
        )
        window = WindowGraph(radius + 1, (radius, 0))
        self.biases = torch.nn.ModuleList(
            RelativeBias(window, settings.heads) for _ in range(settings.layers)
        )
        self.norm = torch.nn.LayerNorm(settings.channels)
        self.next = torch.nn.Linear(settings.channels, characters)
        torch.nn.init.normal_(self.embedding.weight, std=0.5)
        with (
            torch.no_grad()
        ):  # training begins with a look at what is near: a mean of the window blurs everything
            for bias in self.biases:
                bias.weight.copy_(alibi(window, settings.heads)[0])

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores `[..., n, characters]` of the characters that follow each of `tokens [..., n]`."""
        graph = WindowGraph(tokens.size(-1), (self.radius, 0))
        x = self.embedding(tokens)
        for layer, bias in zip(self.layers, self.biases):
            x = layer(x, graph, bias=bias())
        return self.next(self.norm(x))


@torch.no_grad()
def bits_per_character(model: Writer, tokens: Tensor, piece: int = 8192) -> float:
    """Mean of -log2 of the probability of each character after the first, given all those before it.

    The text is one sequence. It is computed in pieces, each of which begins as many characters early as the
    model can look back, which changes nothing but the memory.
    """
    model.eval()
    total = 0.0
    for start in range(0, len(tokens) - 1, piece):
        early = min(model.reach, start)
        stop = min(start + piece, len(tokens) - 1)
        scores = model(tokens[start - early : stop])[early:]
        total += F.cross_entropy(scores.double(), tokens[start + 1 : stop + 1], reduction="sum").item()
    return total / math.log(2) / (len(tokens) - 1)


@torch.no_grad()
def sample(model: Writer, alphabet: str, prompt: str, length: int, temperature: float, seed: int) -> str:
    """Write on from the prompt. Only as many characters as the model can look back are computed each time."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = [alphabet.index(character) for character in prompt]
    for _ in range(length):
        scores = model(torch.tensor(tokens[-model.reach - 1 :]))[-1] / temperature
        tokens.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
    return "".join(alphabet[token] for token in tokens)


def training(
    text: Text, settings: Settings, radius: int, seed: int
) -> tuple[dict[str, Any], Callable[[], dict[str, float]]]:
    """A new model with its optimizer and learning rate, and the function that trains it for one epoch.

    An epoch is the training text cut into sequences, from a random first character on, in random order.
    """
    torch.manual_seed(seed)
    model = Writer(len(text.alphabet), settings, radius)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, betas=(0.9, 0.98)
    )
    sequences = (len(text.train) - 1) // settings.length
    steps = -(-sequences // settings.batch)
    schedule = rise_and_fall(optimizer, settings.epochs * steps, rise=0.1)

    def one_epoch() -> dict[str, float]:
        model.train()
        slack = len(text.train) - 1 - sequences * settings.length
        first = int(torch.randint(slack + 1, ())) + settings.length * torch.randperm(sequences)
        total = 0.0
        for chosen in tqdm(first.split(settings.batch), leave=False, disable=None):
            window = text.train[chosen.unsqueeze(1) + torch.arange(settings.length + 1)]
            loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(chosen)
        return {"bits": total / sequences / math.log(2)}

    return {"model": model, "optimizer": optimizer, "schedule": schedule}, one_epoch


@dataclass(frozen=True)
class Result:
    """What one radius brings: bits per character of the training text (in training) and of the rest."""

    radius: int
    reach: int
    train_bits: float
    test_bits: float
    seconds: float  # per epoch, median
    sample: str


def draw(path: Path, title: str, results: Sequence[Result], order_zero: float) -> None:
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    bits, written = figure.subplots(1, 2, width_ratios=(1, 1.1))
    names = [str(row.radius) for row in results]
    bits.plot(names, [row.test_bits for row in results], marker="o", label="held-out text")
    bits.plot(
        names, [row.train_bits for row in results], marker="o", linestyle=":", label="last training epoch"
    )
    bits.axhline(order_zero, color="0.6", linestyle="--", label="frequencies of the characters")
    bits.set(xlabel="radius: characters that a layer looks back", ylabel="bits per character", ylim=(0, None))
    bits.set_title(title)
    bits.legend()
    bits.grid(alpha=0.3)
    best = min(results, key=lambda row: row.test_bits)
    lines = [line[i : i + 64] for line in best.sample.split("\n") for i in range(0, max(len(line), 1), 64)]
    written.axis("off")
    written.set_title(f"written with radius {best.radius}", loc="left")
    written.text(0, 1, "\n".join(lines[:20]), va="top", family="monospace", fontsize=8, parse_math=False)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.character_language_model", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--root",
        type=Path,
        help="a text file, or a folder with input.txt (default: the package's own source)",
    )
    parser.add_argument(
        "--radii",
        type=int,
        nargs="+",
        help="characters that a layer looks back (1 4 16 64; own source: 1 4 16)",
    )
    parser.add_argument("--epochs", type=int, help="passes over the text (default: as set for its size)")
    parser.add_argument("--prompt", help="what samples begin with (default: the first character of the text)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of sampling: towards 0 the likeliest")
    parser.add_argument("--sample", type=int, default=500, help="characters to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("out", "character_language_model.png"), help="the figure"
    )
    parser.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")
    args = parser.parse_args(argv)
    radii = args.radii or ([1, 4, 16] if args.root is None else [1, 4, 16, 64])
    if min(radii) < 0 or len(set(radii)) < len(radii):
        parser.error(f"--radii must be different numbers of at least 0, got {radii}")
    if (args.epochs is not None and args.epochs < 1) or args.sample < 0:
        parser.error("--epochs must be at least 1, --sample at least 0")
    if not 0 < args.temperature < math.inf:
        parser.error(f"--temperature must be a positive number, got {args.temperature}")
    check_figure(parser, args.out)

    settings = SMALL if args.root is None else LARGE
    settings = settings if args.epochs is None else replace(settings, epochs=args.epochs)
    try:
        text = encode(own_source() if args.root is None else read(args.root), settings.length)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    prompt = text.alphabet[text.train[0]] if args.prompt is None else args.prompt
    foreign = sorted(set(prompt) - set(text.alphabet))
    if foreign or not prompt:
        parser.error(
            f"--prompt must be characters of the text, at least one, got {prompt!r}; none are {foreign}"
        )
    counts = torch.bincount(text.test, minlength=len(text.alphabet))
    frequency = (torch.bincount(text.train, minlength=len(text.alphabet)) + 1).double()
    order_zero = -float((counts / counts.sum() * (frequency / frequency.sum()).log2()).sum())
    print(
        f"{len(text.train)} characters to learn from, {len(text.test)} held out, an alphabet of"
        f" {len(text.alphabet)}, {order_zero:.3f} bits per character by its frequencies, {settings}"
    )

    results = []
    with interruptible(parser):
        for radius in radii:
            run = {**asdict(settings), "radius": radius, "seed": args.seed, "alphabet": text.alphabet}
            run["text"] = zlib.crc32(text.train.numpy().tobytes())
            place = args.out.with_suffix("") / f"radius_{radius}.pt"
            parts, one_epoch = training(text, settings, radius, args.seed)
            history = train(Checkpoint(place, run, args.resume), settings.epochs, parts, one_epoch)
            model = parts["model"]
            results.append(
                Result(
                    radius,
                    model.reach,
                    history[-1]["bits"],
                    bits_per_character(model, text.test),
                    sorted(row["seconds"] for row in history)[len(history) // 2],
                    sample(model, text.alphabet, prompt, args.sample, args.temperature, args.seed),
                )
            )
            print(f"radius {radius}: {results[-1].test_bits:.3f} bits per character", flush=True)
    best = min(results, key=lambda row: row.test_bits)
    print(f"\nWritten with radius {best.radius}:\n{best.sample}")
    print(f"\n{'radius':>6} {'looks back':>11} {'training bits':>14} {'held-out bits':>14} {'s/epoch':>9}")
    for row in results:
        print(
            f"{row.radius:>6} {row.reach:>11} {row.train_bits:>14.3f} {row.test_bits:>14.3f} {row.seconds:>9.1f}"
        )
    name = "graphattn's own source" if args.root is None else args.root.resolve().name
    title = f"{name}, {len(text.train) + len(text.test):,} characters"
    draw(args.out, title, results, order_zero)
    print(f"Figure: {args.out}")
    return results


if __name__ == "__main__":
    main()
