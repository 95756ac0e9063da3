"""Trains on the public data sets and appends a row for every run to a CSV, as each run ends.

    python -m benchmarks.accuracy --root DIR                              every data set, ten runs of each
    python -m benchmarks.accuracy --root DIR --dataset Photo --splits 3   three runs of one
    python -m benchmarks.accuracy --root DIR --resume                     leave out what the file has

Model, training and settings are those of `examples/node_classification.py`. Minesweeper and Tolokers come with
ten fixed splits and every run has its own; the others have one split and the runs differ by their seed. The
test score of a run is that of the epoch which the validation nodes chose. A run that the file has is done
again, without `--resume`, and replaced when it ends. `python -m benchmarks.tables` sets the means beside
published ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch_geometric.data import Data
from tqdm import tqdm

import datasets
from benchmarks.run import ORIGIN, RESULTS, machine_and_versions, read_rows, write_rows
from examples.node_classification import SETTINGS, Settings, prepare, train, with_split

ACCURACY_RESULTS = RESULTS.with_name("accuracy.csv")
NAMES = [name for name in datasets.NAMES if name != "digits"]  # those that others have published scores of

COLUMNS = (
    "dataset",
    "split",  # which of the splits the data set comes with
    "seed",  # of the first weights and of dropout
    "metric",
    "val",  # both at the chosen epoch, between 0 and 1
    "test",
    "epoch",  # the chosen one
    "epochs",  # trained until then or until patience ended
    "seconds",  # wall time of the run
    "settings",
    "threads",
    *ORIGIN,
)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    origin = machine_and_versions(("../graphattn", "../examples", "../datasets", "."))
    with tqdm(total=len(options.dataset) * options.splits, unit="run", disable=None) as progress:
        try:
            for name in options.dataset:
                _measure(name, options, origin, progress)
        except (OSError, ValueError) as error:  # what it says is all there is to know
            tqdm.write(str(error), file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            message = f"Interrupted: the runs that ended are in {options.out}, --resume goes on after them."
            tqdm.write(message, file=sys.stderr)
            return 130
    return 0


def _measure(name: str, options: argparse.Namespace, origin: dict[str, str | int], progress: tqdm) -> None:
    settings = SETTINGS[name]
    if options.epochs is not None:
        settings = replace(settings, epochs=options.epochs)
    data = prepare(datasets.load(name, options.root), settings)
    num_splits = data.train_mask.size(1) if data.train_mask.dim() == 2 else 1
    if 1 < num_splits < options.splits:
        raise ValueError(f"{name} has {num_splits} splits, --splits asks for {options.splits}.")
    for number in range(options.splits):
        split, seed = number % num_splits, options.seed + number
        run = {"dataset": name, "split": split, "seed": seed, "settings": json.dumps(asdict(settings))}
        progress.set_description(f"{name}, split {split}, seed {seed}")
        if options.resume and any(_same(row, run) for row in read_rows(options.out)):
            tqdm.write(f"{name}, split {split}, seed {seed}: in {options.out} already")
        else:
            row = {**origin, **run, "threads": options.threads, **scores(data, split, settings, seed)}
            add_row(options.out, row)
            tqdm.write(
                f"{name}, split {split}, seed {seed}: validation {row['metric']} {row['val']}, test "
                f"{row['test']}, epoch {row['epoch']} of {row['epochs']}, {row['seconds']} s"
            )
        progress.update()


def scores(data: Data, split: int, settings: Settings, seed: int) -> dict[str, str | int]:
    """Trains one network and returns the columns that say what came of it."""
    start = time.perf_counter()
    run = train("graphattn", with_split(data, split), settings, seed)
    return {
        "metric": settings.metric,
        "val": f"{run.val:.6f}",
        "test": f"{run.test:.6f}",
        "epoch": run.epoch,
        "epochs": int(run.history[-1]["epoch"]),
        "seconds": f"{time.perf_counter() - start:.3f}",
    }


def add_row(path: Path, row: dict) -> None:
    """Writes a row to the file, in place of that of the same run, in one move: either file is whole."""
    new = {column: str(row[column]) for column in COLUMNS}
    kept = [old for old in read_rows(path) if not _same(old, row, ("dataset", "split", "seed"))]
    write_rows(path, [*kept, new], COLUMNS)


def _same(row: dict, other: dict, columns: tuple = ("dataset", "split", "seed", "settings")) -> bool:
    return all(str(row[column]) == str(other[column]) for column in columns)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--root", type=Path, help="folder with the data (default: datasets/, downloaded to it)"
    )
    parser.add_argument(
        "--dataset", nargs="+", choices=NAMES, default=NAMES, metavar="DATASET", help=", ".join(NAMES)
    )
    parser.add_argument("--splits", type=int, default=10, help="runs of each data set (default: 10)")
    # The settings were chosen with the seeds from 0 on.
    parser.add_argument(
        "--seed", type=int, default=100, help="of the first run, then one more (default: 100)"
    )
    parser.add_argument("--epochs", type=int, help="of each run (default: as set for the data set)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=ACCURACY_RESULTS)
    parser.add_argument(
        "--resume", action="store_true", help="leave out runs that the file has with these settings"
    )
    options = parser.parse_args(arguments)
    for name in ("splits", "epochs", "threads"):
        number = getattr(options, name)
        if number is not None and number < 1:
            parser.error(f"--{name} must be at least 1, got {number}")
    if not 0 <= options.seed <= 2**63 - options.splits:
        parser.error(f"--seed must be in [0, 2**63 - {options.splits}], got {options.seed}")
    if options.root is not None and not options.root.is_dir():
        parser.error(f"--root must be a folder with the data, {options.root} is none")
    options.dataset = list(dict.fromkeys(options.dataset))
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        rows = read_rows(options.out)
    except (OSError, ValueError) as error:
        parser.error(f"--out {options.out} cannot be read and written: {error}")
    if rows and tuple(rows[0]) != COLUMNS:
        parser.error(f"--out {options.out} holds other results than this command writes: give another file")
    return options


if __name__ == "__main__":
    sys.exit(main())
