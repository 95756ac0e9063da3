"""Convolution is attention on a grid graph with fixed scores; what the fixed scores are worth on few images.

    python -m examples.convolution                        # 8×8 digits, no download
    python -m examples.convolution --root DIR             # MNIST, 28×28, from the files in DIR

First the equality: a convolution of a real image, and attention on a grid graph that gives the same numbers. Then
a small convolutional network, a vision transformer (complete graph of patches) and the same transformer on a
window of patches, trained on growing numbers of images: the less a model knows about images, the more it needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import datasets
from examples.long_training import STEPS, rise_and_fall
from examples.positional_encodings import check_figure
from examples.vision_transformer import mnist_part
from graphattn import CompleteGraph, Graph, GridGraph, graph_attention
from graphattn.nn import ConvolutionalAttention, LearnedEncoding, RelativeBias

MODELS = ("CNN", "ViT", "ViT on windows")


def load(root: Path | None) -> tuple[Tensor, Tensor]:
    """Images `[n, 1, H, W]` in [0, 1], in random order, and labels.

    Raises:
        FileNotFoundError: files are missing.
    """
    if root is None:
        data = datasets.digits()
        images, labels = data.x.view(-1, 1, 8, 8), data.y
    else:
        images, labels = (torch.from_numpy(array) for array in mnist_part(root, "train"))
        images, labels = images.unsqueeze(1).float() / 255, labels.long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


class ConvNet(torch.nn.Module):
    """Three convolutions down to 4 × 4 cells, and a linear map of these."""

    def __init__(self, size: int, width: int = 32):
        super().__init__()
        stride = 1 if size < 16 else 2
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, width, 3, stride, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(width, width, 3, stride, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(width, 2 * width, 3, 2, padding=1),
            torch.nn.ReLU(),
        )
        self.head = torch.nn.Linear(2 * width * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(1))


class PatchTransformer(torch.nn.Module):
    """Patches of the image attend to each other along the edges of a graph; mean over the patches."""

    def __init__(self, size: int, radius: int | None, width: int = 64, heads: int = 4, depth: int = 2):
        super().__init__()
        patch = 2 if size < 16 else 4
        self.heads = heads
        cells = (size // patch, size // patch)
        self.graph: Graph = CompleteGraph(cells[0] * cells[1]) if radius is None else GridGraph(cells, radius)
        self.patches = torch.nn.Conv2d(1, width, patch, patch)
        self.position = LearnedEncoding(cells, width)
        torch.nn.init.normal_(self.position.weight, std=0.5)  # as large as the patches
        self.register_buffer("positions", GridGraph(cells, 0).positions())
        # A window is the same around every patch, as a convolution is: it comes with relative positions.
        self.bias = torch.nn.ModuleList(
            RelativeBias(self.graph, heads) for _ in range(depth if radius is not None else 0)
        )
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2 * depth))
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(depth))
        self.project = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.mlp = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
            )
            for _ in range(depth)
        )
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position(self.positions)
        for layer, (qkv, project, mlp) in enumerate(zip(self.qkv, self.project, self.mlp)):
            query, key, value = qkv(self.norms[2 * layer](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
            bias = self.bias[layer]() if self.bias else None
            x = x + project(graph_attention(query, key, value, self.graph, bias=bias).flatten(-2))
            x = x + mlp(self.norms[2 * layer + 1](x))
        return self.head(x.mean(dim=1))


def new_model(name: str, size: int) -> torch.nn.Module:
    if name == "CNN":
        return ConvNet(size)
    return PatchTransformer(size, radius=None if name == "ViT" else 1)


def accuracy(
    name: str, images: Tensor, labels: Tensor, number: int, tests: int, epochs: int, seed: int
) -> float:
    """Train on the first images, in batches of 32; the share of right answers on the last."""
    torch.manual_seed(seed)
    model = new_model(name, images.size(-1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = rise_and_fall(optimizer, epochs * STEPS, rise=0.3)
    for _ in tqdm(range(epochs * STEPS), desc=f"{name}, {number} images", leave=False, disable=None):
        batch = torch.randint(number, (32,))
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        answers = torch.cat([model(part).argmax(1) for part in images[-tests:].split(100)])
    return (answers == labels[-tests:]).float().mean().item()


def equality(images: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A 3×3 convolution of an image, the same by attention, and what one head attends to."""
    torch.manual_seed(seed)
    conv = torch.nn.Conv2d(1, 4, 3, padding=1)
    layer = ConvolutionalAttention.from_conv2d(conv)
    with torch.no_grad():
        return images[0, 0], conv(images[:1])[0, 0], layer(images[:1])[0, 0]


def draw(
    path: Path, shown: tuple[Tensor, Tensor, Tensor], scores: dict[str, list[float]], numbers: Sequence[int]
):
    figure = Figure(figsize=(13, 4), layout="constrained")
    *panels, curve = figure.subplots(1, 4, width_ratios=(1, 1, 1, 1.6))
    for ax, image, title in zip(panels, shown, ("image", "convolution", "attention on a grid graph")):
        ax.imshow(image.numpy(), cmap="gray")
        ax.set_title(title)
        ax.axis("off")
    for name, marker in zip(MODELS, "os^"):
        curve.plot(numbers, scores[name], marker=marker, label=name)
    curve.set(title="test accuracy", xlabel="training images", xscale="log", ylim=(None, 1))
    curve.set_xticks(numbers, labels=[f"{n:,}" for n in numbers])
    curve.minorticks_off()
    curve.legend()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.convolution", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--root", type=Path, help="folder with the MNIST files (default: the embedded digits)"
    )
    parser.add_argument("--images", type=int, nargs="+", default=[30, 100, 300, 1000], help="training images")
    parser.add_argument(
        "--epochs",
        type=int,
        default=10,
        help=f"an epoch is {STEPS} batches of 32 images, however many there are to draw from (10)",
    )
    parser.add_argument("--tests", type=int, default=700, help="test images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out", "convolution.png"), help="the figure")
    args = parser.parse_args(argv)
    try:
        images, labels = load(args.root)
    except (OSError, ValueError, KeyError) as error:
        parser.exit(1, f"{error}\n")
    if min(args.images) < 1 or args.tests < 1 or args.epochs < 1:
        parser.error("--images, --tests and --epochs must be at least 1")
    if max(args.images) + args.tests > len(labels):
        parser.error(f"--images and --tests must together be at most the {len(labels)} images")
    check_figure(parser, args.out)

    shown = equality(images, args.seed)
    difference = (shown[1] - shown[2]).abs().max().item()
    print(f"Conv2d and ConvolutionalAttention.from_conv2d differ by at most {difference:.1e}\n")
    print(f"{'test accuracy, %':<16}" + "".join(f"{n:>8}" for n in args.images) + "  training images")
    scores = {}
    for name in MODELS:
        scores[name] = [
            accuracy(name, images, labels, n, args.tests, args.epochs, args.seed) for n in args.images
        ]
        print(f"{name:<16}" + "".join(f"{100 * score:>8.1f}" for score in scores[name]), flush=True)
    draw(args.out, shown, scores, args.images)
    print(f"Figure: {args.out}")
    return scores


if __name__ == "__main__":
    main()
