"""Training that an interruption cannot undo, after every epoch all of it is on disk, and its learning rate."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

STEPS = 25  # of an epoch where batches are drawn at random, so that no pass over the data says when one ends


@dataclass(frozen=True)
class Checkpoint:
    """Where a run is kept, and what makes it this run and no other."""

    path: Path
    settings: Mapping[str, Any]  # all that the outcome depends on: numbers, strings, None
    resume: bool  # go on from what is in the file, if there is one


class CheckpointError(Exception):
    """A checkpoint cannot be continued or written; the message says which and why."""


def train(
    checkpoint: Checkpoint,
    epochs: int,
    parts: Mapping[str, Any],
    one_epoch: Callable[[], dict[str, float]],
) -> list[dict[str, float]]:
    """Call `one_epoch` until there are `epochs` of them; return its figures and the seconds of each.

    After every epoch the states of the parts (model, optimizer, ...), PyTorch's random generator and the figures
    are written to a new file that then takes the place of the old one, so there is a whole one at any time. What
    is resumed ends with the same bits as what was never interrupted, if all that is random comes from that
    generator.

    Raises:
        CheckpointError: the file is damaged, belongs to a run with other settings, or cannot be written.
    """
    history: list[dict[str, float]] = []
    if checkpoint.resume and checkpoint.path.exists():
        state = _load(checkpoint)
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name])
        torch.set_rng_state(state["generator"])
        history = state["history"]
    name = checkpoint.path.stem
    with tqdm(total=epochs, initial=len(history), desc=name, leave=False, disable=None) as bar:
        while len(history) < epochs:
            start = time.perf_counter()
            row = one_epoch()
            history.append({**row, "seconds": time.perf_counter() - start})
            _save(checkpoint, {name: part.state_dict() for name, part in parts.items()}, history)
            bar.set_postfix({key: f"{value:.3f}" for key, value in row.items()})
            bar.update()
    return history


@contextmanager
def interruptible(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End the program with one line where it is interrupted, or where a checkpoint cannot be used."""
    try:
        yield
    except KeyboardInterrupt:
        parser.exit(
            130, "\nInterrupted. The same command with --resume goes on after the last whole epoch.\n"
        )
    except CheckpointError as error:
        parser.exit(1, f"{error}\n")


def rise_and_fall(
    optimizer: torch.optim.Optimizer, steps: int, rise: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning rate that rises in a line over a share of the steps, then falls to 0 as half a cosine does."""
    top = max(1, round(rise * steps))

    def factor(step: int) -> float:
        if step < top:
            return (step + 1) / top
        return (1 + math.cos(math.pi * min(1.0, (step + 1 - top) / (steps + 1 - top)))) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _save(checkpoint: Checkpoint, parts: dict[str, Any], history: list[dict[str, float]]) -> None:
    state = {
        "settings": dict(checkpoint.settings),
        "parts": parts,
        "generator": torch.get_rng_state(),
        "history": history,
    }
    unfinished = checkpoint.path.with_suffix(".tmp")
    try:
        checkpoint.path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, checkpoint.path)
    except (OSError, RuntimeError) as error:  # PyTorch's own writer raises the latter
        raise CheckpointError(
            f"{checkpoint.path} cannot be written ({error}). Make room for it and go on with --resume, or choose"
            " another --out."
        ) from error


def _load(checkpoint: Checkpoint) -> dict[str, Any]:
    path, settings = checkpoint.path, dict(checkpoint.settings)
    remedy = "Start anew without --resume, or remove the file."
    try:
        state = torch.load(path, weights_only=True)
        kept = state["settings"]
    except Exception as error:  # a damaged file can fail in many ways
        raise CheckpointError(
            f"{path} is no checkpoint that can be read ({type(error).__name__}). {remedy}"
        ) from error
    if kept != settings:
        other = sorted(key for key in {*kept, *settings} if kept.get(key) != settings.get(key))
        raise CheckpointError(
            f"{path} was made with "
            + ", ".join(f"{key}={kept.get(key)}, not {settings.get(key)}" for key in other)
            + f". {remedy}"
        )
    return state
