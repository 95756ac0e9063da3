"""Loaders of the graphs that the examples train on; README.md says where the data comes from."""

from __future__ import annotations

import io
import pickle
import shutil
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, HeterophilousGraphDataset, Planetoid, TUDataset
from torch_geometric.utils import index_to_mask, to_undirected

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class _Source:
    """Where a data set's raw files lie below a root, which PyG class reads them, and what must come out."""

    dataset: type
    collection: str
    folder: str
    files: tuple[str, ...]
    num_nodes: int
    num_edges: int
    split_file: str | None = None


def _planetoid(name: str, num_nodes: int, num_edges: int) -> _Source:
    parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    files = tuple(f"ind.{name.lower()}.{part}" for part in parts)
    return _Source(Planetoid, "planetoid", name, files, num_nodes, num_edges)


def _heterophilous(name: str, num_nodes: int, num_edges: int) -> _Source:
    files = (f"{name}.npz",)
    return _Source(HeterophilousGraphDataset, "heterophilous", name, files, num_nodes, num_edges)


def _amazon(name: str, num_nodes: int, num_edges: int, split_file: str) -> _Source:
    files = (f"amazon_electronics_{name.lower()}.npz",)
    return _Source(Amazon, "amazon", name, files, num_nodes, num_edges, split_file)


_SOURCES = {
    "Cora": _planetoid("Cora", 2708, 10556),
    "CiteSeer": _planetoid("CiteSeer", 3327, 9104),
    "PubMed": _planetoid("PubMed", 19717, 88648),
    "Minesweeper": _heterophilous("minesweeper", 10000, 78804),
    "Tolokers": _heterophilous("tolokers", 11758, 1038000),
    "Computers": _amazon("Computers", 13752, 491722, "amazon-computer_split.npz"),
    "Photo": _amazon("Photo", 7650, 238162, "amazon-photo_split.npz"),
}

NAMES = ("digits", *_SOURCES)


def _tu(name: str, num_nodes: int, num_edges: int, *more: str) -> _Source:
    parts = ("A", "graph_indicator", "graph_labels", "node_labels", *more)
    return _Source(
        TUDataset, "tudataset", name, tuple(f"{name}_{p}.txt" for p in parts), num_nodes, num_edges
    )


_MOLECULES = {
    "MUTAG": _tu("MUTAG", 3371, 7442),
    "PROTEINS": _tu("PROTEINS", 43471, 162088),
    "ENZYMES": _tu("ENZYMES", 19580, 74564, "node_attributes"),
}


def digits(num_neighbors: int = 8) -> Data:
    """Return 1,797 handwritten digits as a graph that joins every image to the images nearest to it.

    An edge joins two images if either is among the `num_neighbors` nearest of the other (Euclidean distance
    of the pixels), so the graph is symmetric. Labels are used only for the split: 20 images a class for
    training, then 500 for validation and 1000 for testing, drawn with a fixed seed.

    Args:
        num_neighbors: nearest images of each image, from 1 to 1796.

    Returns:
        Data with `x` float32 `[1797, 64]` in [0, 1] (8x8 pixels, row by row), `edge_index`, `y`, three masks.

    Raises:
        ValueError: `num_neighbors` is not in [1, 1796].

    Example:
        >>> data = digits()
        >>> data.num_nodes, data.num_edges, int(data.train_mask.sum())
        (1797, 19864, 200)
    """
    with np.load(_HERE / "digits.npz") as file:
        x = torch.from_numpy(file["images"]).flatten(1) / 16
        y = torch.from_numpy(file["labels"]).long()
    if not 1 <= num_neighbors < len(x):
        raise ValueError(f"`num_neighbors` must be in [1, {len(x) - 1}], got {num_neighbors}.")
    # The nearest image is the image itself: no two of them are equal.
    nearest = torch.from_numpy(cKDTree(x.numpy()).query(x.numpy(), num_neighbors + 1)[1][:, 1:])
    image = torch.arange(len(x)).repeat_interleave(num_neighbors)
    edge_index = to_undirected(torch.stack([nearest.flatten(), image]), num_nodes=len(x))

    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train = torch.cat([order[y[order] == digit][:20] for digit in range(10)])
    rest = order[~index_to_mask(train, len(x))[order]]
    return _with_split(Data(x=x, edge_index=edge_index, y=y), train, rest[:500], rest[500:1500])


def load(name: str, root: str | Path | None = None) -> Data:
    """Return the graph of that name with its features, labels and split.

    `digits` is read from this folder. The others are read by PyG's dataset classes from raw files under
    `root`, which is never written to if the files are there; else they are downloaded to it, which is
    announced on stderr first.

    Args:
        name: one of `NAMES`.
        root: folder that holds `planetoid`, `heterophilous` and `amazon`, or the root of one PyG dataset
            class. Default: the folder of this file.

    Returns:
        Data with `x`, `edge_index`, `y`, and `train_mask`, `val_mask`, `test_mask` of shape `[nodes]`
        (Minesweeper, Tolokers: `[nodes, 10]`, a column a split).

    Raises:
        ValueError: unknown name, or a file that is truncated or not of this data set.
        FileNotFoundError: some of the raw files are missing.
        ConnectionError: the files could not be downloaded.
    """
    if name == "digits":
        return digits()
    if name not in _SOURCES:
        raise ValueError(f"`name` must be one of {', '.join(NAMES)}, got {name!r}.")
    source = _SOURCES[name]
    root = _HERE if root is None else Path(root).expanduser()
    raw = _raw_files(name, source, root)
    remedy = f"replace by what {source.dataset.url} has"

    # PyG writes a `processed` folder next to `raw`: let it do so where it may, and where nothing stale lies. It
    # unpickles some of the files: what it reads are the copies that were checked.
    with tempfile.TemporaryDirectory() as scratch:
        copies = Path(scratch, source.folder, "raw")
        copies.mkdir(parents=True)
        for file in source.files:
            shutil.copyfile(raw / file, copies / file)
            _check_readable(copies / file, raw / file, remedy)
        try:
            data = source.dataset(scratch, name)[0]
        except Exception as error:
            raise ValueError(f"The files in {raw} are not those of {name} ({error}): {remedy}.") from error
    if (data.num_nodes, data.num_edges) != (source.num_nodes, source.num_edges):
        raise ValueError(
            f"The files in {raw} are not those of {name}, which has {source.num_nodes} nodes and "
            f"{source.num_edges} edges, they have {data.num_nodes} and {data.num_edges}: {remedy}."
        )
    if source.split_file is not None:
        train, val, test = _split_60_20_20(root / "splits_60_20_20" / source.split_file, data.num_nodes)
        data = _with_split(data, train, val, test)
    return data


def molecules(name: str, root: str | Path | None = None) -> list[Data]:
    """Return the graphs of a set for graph classification, each with its label.

    Read by PyG's `TUDataset` from raw files under `root`, as `load` reads graphs: never written to if the files
    are there, else downloaded to, which is announced on stderr first.

    Args:
        name: MUTAG, PROTEINS or ENZYMES.
        root: folder that holds `tudataset`, or the root of `TUDataset`. Default: the folder of this file.

    Returns:
        A list of Data with `x` (node labels, one column each, after 18 measured attributes in ENZYMES),
        `edge_index` and `y` of shape `[1]`.

    Raises:
        ValueError: unknown name, or files that are not of this data set.
        FileNotFoundError: some of the raw files are missing.
        ConnectionError: the files could not be downloaded.
    """
    if name not in _MOLECULES:
        raise ValueError(f"`name` must be one of {', '.join(_MOLECULES)}, got {name!r}.")
    source = _MOLECULES[name]
    raw = _raw_files(name, source, _HERE if root is None else Path(root).expanduser())
    remedy = f"replace by what {source.dataset.url} has"
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, source.folder, "raw")
        copy.mkdir(parents=True)
        for file in source.files:  # those named alone: sources differ in what else they have
            shutil.copyfile(raw / file, copy / file)
        try:
            data = list(TUDataset(scratch, name, use_node_attr=True))
        except Exception as error:
            raise ValueError(f"The files in {raw} are not those of {name} ({error}): {remedy}.") from error
    size = (sum(graph.num_nodes for graph in data), sum(graph.num_edges for graph in data))
    if size != (source.num_nodes, source.num_edges):
        raise ValueError(
            f"The files in {raw} are not those of {name}, which has {source.num_nodes} nodes and"
            f" {source.num_edges} edges, they have {size[0]} and {size[1]}: {remedy}."
        )
    return data


def _raw_files(name: str, source: _Source, root: Path) -> Path:
    """Return the folder with the raw files, after downloading them if there are none."""
    for parent in (root / source.collection, root):
        raw = parent / source.folder / "raw"
        missing = [file for file in source.files if not (raw / file).is_file()]
        if not missing:
            return raw
        if raw.is_dir() and any(raw.iterdir()):
            raise FileNotFoundError(
                f"{raw} lacks {', '.join(missing)}: copy from {source.dataset.url}, or remove {raw} and all "
                "the files of the data set are downloaded again."
            )
    parent = root / source.collection
    raw = parent / source.folder / "raw"
    files = ", ".join(source.files)
    print(f"Downloading {name} ({files}) from {source.dataset.url} to {raw}", file=sys.stderr)
    try:
        source.dataset(str(parent), name)
    except Exception as error:
        # What came of an interrupted download must not be taken for the data set next time.
        shutil.rmtree(raw, ignore_errors=True)
        with suppress(OSError):  # a folder that holds something stays, and those that it lies in
            for folder in (raw, *raw.parents):
                if folder == root:
                    break
                if folder.exists():
                    folder.rmdir()
        raise ConnectionError(
            f"{name} could not be downloaded from {source.dataset.url} to {raw} ({type(error).__name__}: "
            f"{error}): copy {files} there by hand, or give the folder that has them as the root."
        ) from error
    return raw


class _ArraysOnly(pickle.Unpickler):
    """Reads the arrays and lists that Planetoid's files consist of; whatever else a pickle asks for is refused."""

    allowed = frozenset(
        {
            ("numpy", "dtype"),
            ("numpy", "ndarray"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("scipy.sparse.csr", "csr_matrix"),
            ("collections", "defaultdict"),
            ("__builtin__", "list"),
        }
    )

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
        return super().find_class(module, name)


def _check_readable(path: Path, shown: Path, remedy: str) -> None:
    """Read one file as a whole, so that an error names the file, which PyG's own errors do not, and runs no code."""
    try:
        if path.suffix == ".npz":
            with ZipFile(path) as archive:
                broken = archive.testzip()
        elif path.suffix == ".index":
            broken = len(np.loadtxt(path, dtype=np.int64)) != 1000
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the pickles name modules that SciPy has since moved
                broken = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="latin1").load() is None
    except Exception as error:
        raise ValueError(f"{shown} cannot be read ({type(error).__name__}: {error}): {remedy}.") from error
    if broken:
        raise ValueError(f"{shown} is not complete: {remedy}.")


def _split_60_20_20(path: Path, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nodes of the three parts, from the file if there is one, else drawn with a fixed seed."""
    if not path.is_file():
        order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(0))
        return order.tensor_split([num_nodes * 6 // 10, num_nodes * 8 // 10])
    remedy = "replace it, or remove it and a split is drawn instead"
    _check_readable(path, path, remedy)
    with np.load(path) as file:
        train, val, test = (torch.from_numpy(file[part]) for part in ("train", "valid", "test"))
    if not torch.equal(torch.cat([train, val, test]).sort().values, torch.arange(num_nodes)):
        raise ValueError(f"{path} must hold each of the {num_nodes} nodes once: {remedy}.")
    return train, val, test


def _with_split(data: Data, train: Tensor, val: Tensor, test: Tensor) -> Data:
    data.train_mask = index_to_mask(train, data.num_nodes)
    data.val_mask = index_to_mask(val, data.num_nodes)
    data.test_mask = index_to_mask(test, data.num_nodes)
    return data
