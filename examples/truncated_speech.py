"""Recognise spoken digits with a transformer whose frames attend to their neighbours only.

    python -m examples.truncated_speech                             # synthesised speech, no download
    python -m examples.truncated_speech --root DIR                  # Free Spoken Digit Dataset, features in DIR
    python -m examples.truncated_speech --radii 4 16                # how far a frame sees
    python -m examples.truncated_speech --leave-one-speaker-out     # test on a speaker never heard before

A recording is a chain of frames of 10 ms. Recordings of different lengths lie side by side in a batch, without
padding: `WindowGraph.from_ptr` says where each ends. The same model runs on windows of several radii and on the
complete graph. The figure shows accuracy against the radius, and the cost of one long recording.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch_geometric.nn import global_mean_pool

from examples.long_training import Checkpoint, interruptible, rise_and_fall, train
from examples.positional_encodings import check_figure
from graphattn import CompleteGraph, WindowGraph
from graphattn.encodings import sinusoidal
from graphattn.nn import GraphTransformer

EMBEDDED = Path(__file__).parents[1] / "datasets" / "spoken_digits.npz"
FILE = "fsdd_logmel40_f16.npz"


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and how it is trained."""

    channels: int = 64
    layers: int = 3
    heads: int = 4
    positions: int = 32  # features of a frame's place in its recording
    dropout: float = 0.1
    epochs: int = 40
    batch: int = 32  # recordings
    lr: float = 3e-3
    weight_decay: float = 0.05
    stretch: float = 0.15  # of the time and of the frequencies of training recordings, at most
    mask: float = 0.1  # of the time and of the frequencies that is blotted out, at most


EMBEDDED_SETTINGS = Settings(epochs=20)
FSDD_SETTINGS = Settings()


@dataclass(frozen=True)
class Recordings:
    """Recordings side by side: recording b is the frames `ptr[b]:ptr[b + 1]`."""

    frames: Tensor  # float32 [frames, bins]
    ptr: Tensor  # int64 [recordings + 1]
    digit: Tensor  # int64 [recordings]
    speaker: Tensor  # int64 [recordings]
    index: Tensor  # int64 [recordings], numbers the recordings of one digit by one speaker
    speakers: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.digit)


def load(path: Path) -> Recordings:
    """Read log-mel features, and take the mean over time from every bin of a recording.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it does not hold what it should.
    """
    try:
        with np.load(path) as file:
            frames, ptr = torch.from_numpy(file["frames"]).float(), torch.from_numpy(file["offsets"])
            label, speaker, index = (
                torch.from_numpy(file[name]).long() for name in ("label", "speaker", "index")
            )
            speakers = tuple(file["speakers"].tolist())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist: give the folder that has it as --root, or no --root for the embedded set."
        ) from None
    except Exception as error:  # of a damaged archive: BadZipFile, zlib.error, KeyError, EOFError, ...
        raise ValueError(
            f"{path} does not hold log-mel features ({type(error).__name__}: {error})."
        ) from error
    count = ptr.diff()
    if (
        frames.dim() != 2
        or len(count) != len(label)
        or count.min() < 1
        or ptr[0] != 0
        or ptr[-1] != len(frames)
    ):
        raise ValueError(f"{path} is not whole: `offsets` must say where each recording's frames start.")
    if not frames.isfinite().all():
        raise ValueError(f"{path} is not whole: `frames` must be finite.")
    if label.aminmax() != (0, 9) or speaker.min() < 0 or speaker.max() >= len(speakers):
        raise ValueError(
            f"{path} must have all digits from 0 to 9 as `label`, and a name for every `speaker`."
        )
    owner = torch.repeat_interleave(count)
    frames = frames - global_mean_pool(frames, owner)[owner]
    return Recordings(frames / frames.std(), ptr, label, speaker, index, speakers)


def select(data: Recordings, chosen: Tensor) -> Recordings:
    """The recordings of the given numbers, or those that a mask is True for, in a new packing."""
    chosen = chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen
    count = data.ptr.diff()[chosen]
    ptr = F.pad(count.cumsum(0), (1, 0))
    owner = torch.repeat_interleave(count)
    frame = torch.arange(len(owner)) + (data.ptr[chosen] - ptr[:-1])[owner]
    return Recordings(
        data.frames[frame], ptr, data.digit[chosen], data.speaker[chosen], data.index[chosen], data.speakers
    )


def split(data: Recordings, embedded: bool, validate: bool) -> tuple[Recordings, Recordings]:
    """Training and test recordings. With `validate` both are taken from the training recordings.

    Embedded: every fourth speaker is for the test, of the others every fourth for validation. Free Spoken Digit:
    the official split, recordings 0 to 4 of each digit by each speaker are for the test; 5 to 9 for validation.
    """
    if embedded:
        rank = data.speaker % 4
        return select(data, rank < (2 if validate else 3)), select(data, rank == (2 if validate else 3))
    first = 5 if validate else 0
    return select(data, data.index >= first + 5), select(
        data, (data.index >= first) & (data.index < first + 5)
    )


def distorted(data: Recordings, settings: Settings) -> Recordings:
    """Every recording faster or slower, its spectrum wider or narrower, and a part of both blotted out."""
    count, (low, bins) = data.ptr.diff(), (1 - settings.stretch, data.frames.size(1))
    pace, width = low + 2 * settings.stretch * torch.rand(2, len(count))
    new = (count * pace).round().long().clamp(min=1)
    ptr = F.pad(new.cumsum(0), (1, 0))
    owner = torch.repeat_interleave(new)
    share = (torch.arange(len(owner)) - ptr[owner] + 0.5) / new[owner]  # of the recording that has passed
    frames = _between(data.frames, data.ptr[owner], count[owner], share)
    # The bins of a frame are read in the same way, as one long row.
    first = torch.arange(len(owner)).mul(bins).unsqueeze(1).expand(-1, bins).flatten()
    at = (torch.arange(bins) + 0.5) / bins * width[owner].unsqueeze(1)
    frames = _between(frames.reshape(-1, 1), first, torch.tensor(bins), at.flatten()).view(-1, bins)
    blot, start = torch.rand(2, 2, len(count))
    blot = blot * settings.mask
    start = (start * (1 - blot))[:, owner]
    frequency = torch.arange(bins) / bins
    hidden = ((share >= start[0]) & (share < start[0] + blot[0, owner])).unsqueeze(1) | (
        (frequency >= start[1].unsqueeze(1)) & (frequency < (start[1] + blot[1, owner]).unsqueeze(1))
    )
    return replace(data, frames=frames.masked_fill(hidden, 0.0), ptr=ptr)


def _between(rows: Tensor, first: Tensor, count: Tensor, share: Tensor) -> Tensor:
    """The rows at the given shares of the `count` rows from `first` on, interpolated between neighbours."""
    at = (share * count - 0.5).clamp(min=torch.zeros(()), max=count - 1)
    left = at.long()
    right = torch.minimum(left + 1, count - 1)
    return torch.lerp(rows[first + left], rows[first + right], (at - left).unsqueeze(1))


def graph_of(ptr: Tensor, radius: int | None) -> WindowGraph | CompleteGraph:
    """The frames that a frame attends to: those of the same recording, up to `radius` away."""
    return CompleteGraph.from_ptr(ptr) if radius is None else WindowGraph.from_ptr(ptr, radius)


class Listener(torch.nn.Module):
    """A transformer on the frames; the digit is what they say on average."""

    def __init__(self, bins: int, settings: Settings, radius: int | None):
        super().__init__()
        self.radius, self.positions = radius, settings.positions
        self.transformer = GraphTransformer(
            bins,
            settings.channels,
            10,
            settings.layers,
            settings.heads,
            dropout=settings.dropout,
            encoding_channels=settings.positions,
        )

    def forward(self, frames: Tensor, ptr: Tensor) -> Tensor:
        graph = graph_of(ptr, self.radius)
        said = self.transformer(frames, graph, sinusoidal(graph.positions(), self.positions))
        return global_mean_pool(said, torch.repeat_interleave(ptr.diff()), len(ptr) - 1)


def accuracy(model: Listener, data: Recordings) -> float:
    model.eval()
    with torch.no_grad():
        parts = [select(data, chosen) for chosen in torch.arange(len(data)).split(256)]
        right = sum((model(part.frames, part.ptr).argmax(1) == part.digit).sum() for part in parts)
    return int(right) / len(data)


def training(
    data: Recordings, settings: Settings, radius: int | None, seed: int
) -> tuple[dict[str, Any], Callable[[], dict[str, float]]]:
    """A new model with its optimizer and learning rate, and the function that trains it for one epoch."""
    torch.manual_seed(seed)
    model = Listener(data.frames.size(1), settings, radius)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    steps = settings.epochs * -(-len(data) // settings.batch)
    schedule = rise_and_fall(optimizer, steps, rise=0.2)

    def one_epoch() -> dict[str, float]:
        model.train()
        total = 0.0
        for chosen in torch.randperm(len(data)).split(settings.batch):
            batch = distorted(select(data, chosen), settings)
            loss = F.cross_entropy(model(batch.frames, batch.ptr), batch.digit)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(chosen)
        return {"loss": total / len(data)}

    return {"model": model, "optimizer": optimizer, "schedule": schedule}, one_epoch


@dataclass(frozen=True)
class Result:
    """What one graph costs and brings: a score for every test set, seconds for an epoch, MiB for training."""

    name: str
    edges: int  # of all training recordings
    accuracy: list[float]
    seconds: float
    memory: float | None  # None: not measured


def peak_memory(data: Recordings, settings: Settings, radius: int | None) -> float | None:
    """Measure by how many MiB training steps raise the memory of a new process that holds only the data.

    None where the system has no /proc, where a process's own peak is read.
    """
    if not Path("/proc/self/status").exists():
        return None
    few = select(data, torch.arange(min(len(data), 4 * settings.batch)))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_peak_memory_here, few, settings, radius, torch.get_num_threads()).result()


def _peak_memory_here(data: Recordings, settings: Settings, radius: int | None, threads: int) -> float:
    torch.set_num_threads(threads)
    training(select(data, torch.arange(2)), settings, radius, 0)[1]()  # loads code, and hardly any memory
    _, one_epoch = training(data, settings, radius, 0)
    before = _memory("VmRSS")
    one_epoch()
    return _memory("VmHWM") - before


def _memory(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def seconds_of_long(
    radii: Sequence[int | None], lengths: Sequence[int], bins: int, settings: Settings
) -> dict[int | None, list[float]]:
    """Median time of a forward pass over one recording of so many frames, the graphs taking turns."""
    models = {radius: Listener(bins, settings, radius).eval() for radius in radii}
    result: dict[int | None, list[float]] = {radius: [] for radius in radii}
    for length in lengths:
        frames, ptr = torch.randn(length, bins), torch.tensor([0, length])
        times: dict[int | None, list[float]] = {radius: [] for radius in radii}
        for _ in range(4):
            for radius, model in models.items():
                with torch.no_grad():
                    start = time.perf_counter()
                    model(frames, ptr)
                    times[radius].append(time.perf_counter() - start)
        for radius in radii:
            result[radius].append(statistics.median(times[radius][1:]))  # the first round warms up
    return result


def name_of(radius: int | None) -> str:
    return "complete" if radius is None else f"radius {radius}"


def table(results: Sequence[Result]) -> str:
    lines = [f"{'graph':<12} {'edges':>12} {'test accuracy':>16} {'s/epoch':>9} {'peak MiB':>9}"]
    for row in results:
        score = f"{100 * np.mean(row.accuracy):.2f}"
        score += f" ± {100 * np.std(row.accuracy):.2f}" if len(row.accuracy) > 1 else ""
        memory = "-" if row.memory is None else f"{row.memory:.0f}"
        lines.append(f"{row.name:<12} {row.edges:>12,} {score:>16} {row.seconds:>9.2f} {memory:>9}")
    return "\n".join(lines)


def draw(
    path: Path,
    title: str,
    radii: Sequence[int | None],
    results: Sequence[Result],
    lengths: Sequence[int],
    times: dict[int | None, list[float]],
) -> None:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    scores, epochs, cost = figure.subplots(1, 3)
    names = ["all" if radius is None else str(radius) for radius in radii]
    for ax, values in (
        (scores, [[100 * a for a in row.accuracy] for row in results]),
        (epochs, [[row.seconds] for row in results]),
    ):
        ax.plot(names[:-1], [np.mean(v) for v in values[:-1]], marker="o", label="window")
        ax.plot(
            names[-1:], [np.mean(values[-1])], marker="s", linestyle="", color="k", label="complete graph"
        )
        for name, v in zip(names, values):
            if len(v) > 1:
                ax.plot([name] * len(v), v, linestyle="", marker="_", color="0.4")
        ax.set_xlabel("radius: frames of 10 ms on either side")
        ax.grid(alpha=0.3)
    low = min(min(row.accuracy) for row in results)
    scores.set(title=title, ylabel="test accuracy, %", ylim=(max(0, min(100 * low - 2, 95)), 100.5))
    scores.legend(loc="lower right")
    slowest = max(row.seconds for row in results)
    epochs.set(title="training", ylabel="seconds per epoch", ylim=(0, 1.15 * slowest))
    for radius, name in zip(radii, names):
        style = {"color": "k", "linestyle": "--"} if radius is None else {}
        cost.plot(lengths, [1000 * t for t in times[radius]], marker="o", label=name, **style)
    cost.set(title="one long recording, forward pass", xlabel="seconds that it lasts", ylabel="ms")
    cost.set(xscale="log", yscale="log")
    cost.set_xticks(lengths, [f"{n / 100:.3g}" for n in lengths])
    cost.minorticks_off()
    cost.legend(title="radius")
    cost.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.truncated_speech", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--root", type=Path, help=f"folder with {FILE} (default: the embedded synthesised set)"
    )
    parser.add_argument(
        "--radii", type=int, nargs="+", default=[0, 1, 4, 16], help="frames on either side (0 1 4 16)"
    )
    parser.add_argument(
        "--leave-one-speaker-out",
        action="store_true",
        help="train as often as there are speakers, on all others, and test on that one",
    )
    parser.add_argument(
        "--validate", action="store_true", help="test on held-out training recordings: to choose settings"
    )
    parser.add_argument(
        "--epochs", type=int, help="passes over the training recordings (default: as set for the data)"
    )
    parser.add_argument("--longest", type=int, default=16384, help="frames of the longest recording timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out", "truncated_speech.png"), help="the figure")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")
    args = parser.parse_args(argv)
    if min(args.radii) < 0 or len(set(args.radii)) < len(args.radii):
        parser.error(f"--radii must be different numbers of at least 0, got {args.radii}")
    if (args.epochs is not None and args.epochs < 1) or args.longest < 1:
        parser.error("--epochs and --longest must be at least 1")
    if args.leave_one_speaker_out and args.validate:
        parser.error("--validate has no meaning with --leave-one-speaker-out, which tests on every speaker")
    check_figure(parser, args.out)
    embedded = args.root is None
    path = EMBEDDED if embedded else _find(args.root)
    try:
        data = load(path)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    settings = EMBEDDED_SETTINGS if embedded else FSDD_SETTINGS
    settings = settings if args.epochs is None else replace(settings, epochs=args.epochs)
    if args.leave_one_speaker_out:
        splits = {
            f"without {name}": (select(data, data.speaker != i), select(data, data.speaker == i))
            for i, name in enumerate(data.speakers)
        }
    else:
        splits = {"validation" if args.validate else "test": split(data, embedded, args.validate)}
    if not all(len(learn) and len(test) for learn, test in splits.values()):
        parser.exit(1, f"{path} has no recordings for training, or none for the test.\n")
    first = next(iter(splits.values()))
    print(
        f"{len(first[0])} recordings for training, {len(first[1])} for the test, {data.ptr.diff().min()} to"
        f" {data.ptr.diff().max()} frames each, {settings}"
    )

    radii, results = [*args.radii, None], []
    with interruptible(parser):
        for radius in radii:
            scores, seconds = [], []
            for name, (learn, test) in splits.items():
                run = {**asdict(settings), "radius": radius, "seed": args.seed, "split": name}
                run["data"] = zlib.crc32(data.frames.numpy().tobytes())
                place = args.out.with_suffix("") / f"{name} {name_of(radius)}.pt".replace(" ", "_")
                parts, one_epoch = training(learn, settings, radius, args.seed)
                history = train(Checkpoint(place, run, args.resume), settings.epochs, parts, one_epoch)
                scores.append(accuracy(parts["model"], test))
                seconds += [row["seconds"] for row in history]
                print(f"{name_of(radius)}, {name}: {100 * scores[-1]:.2f} %", flush=True)
            edges = graph_of(first[0].ptr, radius).num_edges
            memory = peak_memory(first[0], settings, radius)
            results.append(Result(name_of(radius), edges, scores, statistics.median(seconds), memory))
    print(f"\n{table(results)}")
    lengths = [n for n in (256, 1024, 4096, 16384) if n <= args.longest] or [args.longest]
    times = seconds_of_long(radii, lengths, data.frames.size(1), settings)
    print(f"\n{'forward pass, ms, of frames:':<28}" + "".join(f"{n:>10}" for n in lengths))
    for radius in radii:
        print(f"{name_of(radius):<28}" + "".join(f"{1000 * t:>10.2f}" for t in times[radius]))
    title = "synthesised digits, unheard voices" if embedded else "Free Spoken Digit Dataset"
    draw(args.out, title, radii, results, lengths, times)
    print(f"Figure: {args.out}")
    return results


def _find(root: Path) -> Path:
    """The file in `root` or in its folder fsdd."""
    return next((p for p in (root / FILE, root / "fsdd" / FILE) if p.is_file()), root / FILE)


if __name__ == "__main__":
    main()
