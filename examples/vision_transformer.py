"""Train a small Vision Transformer from scratch, on all pairs of patches and on neighbouring patches only.

    python -m examples.vision_transformer                # handwritten digits of 8 x 8 pixels, no download
    python -m examples.vision_transformer --root DIR     # MNIST from the files in DIR
    python -m examples.vision_transformer --radius 2     # how far a patch sees in the second model
    python -m examples.vision_transformer --validate     # to choose settings: the test images are not looked at

The two models have the same parameters to start from; only the graph of patches differs. In the second one a
patch attends to the patches around it and to the class token, which attends to all.
"""

from __future__ import annotations

import argparse
import gzip
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import datasets
from examples.long_training import rise_and_fall
from examples.positional_encodings import check_figure
from graphattn.nn import VisionTransformer


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and how it is trained."""

    patch: int
    dim: int
    depth: int
    heads: int
    epochs: int
    rotation: float  # of training images, at most, in degrees
    shift: float  # at most, in pixels
    scale: float  # at most, as a share of the size
    batch: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.05
    dropout: float = 0.0


DIGITS = Settings(
    patch=2, dim=48, depth=3, heads=4, epochs=25, rotation=8, shift=0.5, scale=0.08, batch=32, lr=3e-3
)
MNIST = Settings(patch=4, dim=64, depth=4, heads=4, epochs=50, rotation=12, shift=2.0, scale=0.12, batch=32)
MNIST_FILES = {  # what may hold the training and the test set, in order of preference
    "train": ("mnist_mlxtend5k.npz", "train"),
    "test": ("mnist_t10k.npz", "t10k"),
}


@dataclass(frozen=True)
class Images:
    """Images `[n, 1, height, width]` in [0, 1] and their labels, for training and for the test."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def digits() -> Images:
    """The embedded digits: 1,297 for training and 500 for the test, drawn with a fixed seed."""
    data = datasets.digits()
    x, order = (
        data.x.view(-1, 1, 8, 8),
        torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0)),
    )
    train, test = order[:-500], order[-500:]
    return Images(x[train], data.y[train], x[test], data.y[test])


def mnist(root: Path, train_images: int) -> Images:
    """MNIST from `root` or `root/mnist`: the original idx files (.gz or not), or npz with `image` and `label`.

    Raises:
        FileNotFoundError: files are missing.
    """
    parts = [mnist_part(root, part) for part in MNIST_FILES]
    (train, train_labels), (test, test_labels) = (
        (torch.from_numpy(image).unsqueeze(1).float() / 255, torch.from_numpy(label).long())
        for image, label in parts
    )
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:train_images]
    return Images(train[chosen], train_labels[chosen], test, test_labels)


def held_out(data: Images) -> Images:
    """The training images alone, the last fifth of them in the place of the test images."""
    train = len(data.train) - len(data.train) // 5
    images, labels = data.train, data.train_labels
    return Images(images[:train], labels[:train], images[train:], labels[train:])


def mnist_part(root: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, 28, 28]` and labels of MNIST's part "train" or "test", uint8."""
    npz, idx = MNIST_FILES[part]
    for folder in (root, root / "mnist", root / "MNIST" / "raw"):
        if (folder / npz).is_file():
            with np.load(folder / npz) as file:
                return file["image"], file["label"]
        for end in ("", ".gz"):
            files = [folder / f"{idx}-{what}-ubyte{end}" for what in ("images-idx3", "labels-idx1")]
            if all(file.is_file() for file in files):
                raw = [gzip.decompress(file.read_bytes()) if end else file.read_bytes() for file in files]
                image, label = (np.frombuffer(bytes_, np.uint8) for bytes_ in raw)
                return image[16:].reshape(-1, 28, 28).copy(), label[8:].copy()
    raise FileNotFoundError(
        f"{root} has neither {npz} nor {idx}-images-idx3-ubyte[.gz] and {idx}-labels-idx1-ubyte[.gz], nor has"
        " its folder mnist."
    )


def distorted(images: Tensor, settings: Settings) -> Tensor:
    """Every image turned, scaled and shifted a little, by random amounts."""
    turn, scale, *shift = (torch.rand(4, len(images)) * 2 - 1).unbind()
    turn = turn * math.radians(settings.rotation)
    scale = 1 + scale * settings.scale
    columns = torch.stack(
        [turn.cos() / scale, -turn.sin() / scale, turn.sin() / scale, turn.cos() / scale], 1
    )
    pixel = 2 / images.size(-1)  # in the coordinates of affine_grid, which run from -1 to 1
    offset = torch.stack(shift, 1).unsqueeze(2) * settings.shift * pixel
    grid = F.affine_grid(
        torch.cat([columns.view(-1, 2, 2), offset], 2), list(images.shape), align_corners=False
    )
    return F.grid_sample(images, grid, align_corners=False)


def new_model(data: Images, settings: Settings, radius: int | None, seed: int) -> VisionTransformer:
    torch.manual_seed(seed)
    return VisionTransformer(
        tuple(data.train.shape[-2:]),
        settings.patch,
        int(data.train_labels.max()) + 1,
        in_channels=1,
        dim=settings.dim,
        depth=settings.depth,
        heads=settings.heads,
        mlp_dim=2 * settings.dim,
        radius=radius,
        dropout=settings.dropout,
    )


def accuracy(model: VisionTransformer, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = [model(x).argmax(1) == y for x, y in zip(images.split(500), labels.split(500))]
    return torch.cat(right).float().mean().item()


@dataclass(frozen=True)
class Run:
    """A trained model, its accuracy on the test images, and the median time of an epoch."""

    name: str
    model: VisionTransformer
    edges: int
    accuracy: float
    seconds: float


def train(name: str, data: Images, settings: Settings, radius: int | None, seed: int) -> Run:
    """Train with AdamW on a learning rate that rises and then falls to 0; the test images are seen once, after."""
    model = new_model(data, settings, radius, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    steps = settings.epochs * -(-len(data.train) // settings.batch)
    schedule = rise_and_fall(optimizer, steps, rise=0.1)
    seconds = []
    with tqdm(range(settings.epochs), desc=name, leave=False, disable=None) as bar:
        for _ in bar:
            start = time.perf_counter()
            model.train()
            for chosen in torch.randperm(len(data.train)).split(settings.batch):
                optimizer.zero_grad()
                scores = model(distorted(data.train[chosen], settings))
                loss = F.cross_entropy(scores, data.train_labels[chosen])
                loss.backward()
                optimizer.step()
                schedule.step()
            seconds.append(time.perf_counter() - start)
            bar.set_postfix(loss=f"{loss.item():.3f}")
    edges = model.patch_graph(*model.position_embedding.shape[:2]).num_edges
    return Run(name, model, edges, accuracy(model, data.test, data.test_labels), float(np.median(seconds)))


def class_attention(model: VisionTransformer, images: Tensor) -> Tensor:
    """What the class token looks at in each layer: `[layers, images, rows, columns]`, mean over the heads."""
    rows, columns, _ = model.position_embedding.shape
    source, target = model.patch_graph(rows, columns).to_edge_index()
    looks = (target == 0) & (source >= model.num_prefix_tokens)  # the edges from the patches, in their order
    model.eval()
    with torch.no_grad():
        _, weights = model(images, return_attention_weights=True)
    alpha = torch.stack([w.reshape(len(images), len(target), -1)[:, looks].mean(-1) for w in weights])
    return alpha.view(len(weights), len(images), rows, columns)


def draw(path: Path, runs: Sequence[Run], data: Images) -> None:
    """Beside one test image of each class: what the class token looks at, averaged over the layers."""
    chosen = [int((data.test_labels == label).nonzero()[0]) for label in data.test_labels.unique()]
    images = data.test[chosen]
    figure = Figure(figsize=(1.2 * len(chosen), 1.3 * (1 + len(runs))), layout="constrained")
    axes = figure.subplots(1 + len(runs), len(chosen), squeeze=False)
    for ax, image in zip(axes[0], images):
        ax.imshow(image[0].numpy(), cmap="gray_r")
    for row, run in zip(axes[1:], runs):
        attention = class_attention(run.model, images).mean(0)
        for ax, image, alpha in zip(row, images, attention):
            height, width = image.shape[-2:]
            ax.imshow(image[0].numpy(), cmap="gray_r")
            ax.imshow(alpha.numpy(), cmap="Reds", alpha=0.6, extent=(-0.5, width - 0.5, height - 0.5, -0.5))
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
    for row, name in zip(axes, ("image", *(run.name for run in runs))):
        row[0].set_ylabel(name)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Run]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.vision_transformer", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--root", type=Path, help="folder with the MNIST files (default: the embedded digits)"
    )
    parser.add_argument("--radius", type=int, default=1, help="of the local patch graph, in patches")
    parser.add_argument("--train-images", type=int, default=5000, help="of MNIST, at most")
    parser.add_argument(
        "--epochs", type=int, help="passes over the training images (default: as set for the data)"
    )
    parser.add_argument(
        "--validate", action="store_true", help="hold out a fifth of the training images and test on these"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out", "vision_transformer.png"), help="the figure")
    args = parser.parse_args(argv)
    for name in ("radius", "epochs", "train_images"):
        value, least = getattr(args, name), 0 if name == "radius" else 1
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    check_figure(parser, args.out)

    settings = DIGITS if args.root is None else MNIST
    if args.epochs is not None:
        settings = replace(settings, epochs=args.epochs)
    try:
        data = digits() if args.root is None else mnist(args.root, args.train_images)
    except (OSError, ValueError, KeyError) as error:
        parser.exit(1, f"{error}\n")
    if args.validate:
        if len(data.train) < 5:
            parser.error(f"--validate needs at least 5 training images, got {len(data.train)}")
        data = held_out(data)
    height, width = data.train.shape[-2:]
    print(
        f"{len(data.train)} images of {height} x {width} for training, {len(data.test)} for the test, {settings}"
    )

    runs = [
        train(name, data, settings, radius, args.seed)
        for name, radius in (("complete", None), (f"radius {args.radius}", args.radius))
    ]
    print(
        f"\n{'graph':<10} {'edges/image':>12} {'held out' if args.validate else 'test accuracy':>14} {'s/epoch':>9}"
    )
    for run in runs:
        print(f"{run.name:<10} {run.edges:>12} {100 * run.accuracy:>13.2f}% {run.seconds:>9.2f}")
    draw(args.out, runs, data)
    print(f"Figure: {args.out}")
    return runs


if __name__ == "__main__":
    main()
