"""The loaders: what they return against known numbers, and roots that lack or damage files."""

import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
import torch
from scipy.spatial.distance import cdist
from torch_geometric.utils import coalesce

import datasets

# A root with real data: the folders planetoid, heterophilous, amazon and splits_60_20_20.
ROOT = os.environ.get("GRAPHATTN_DATA")
needs_data = pytest.mark.skipif(ROOT is None, reason="set GRAPHATTN_DATA to a folder with the real data")


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits")


def test_digits_are_those_of_scikit_learn(digits):
    peer = sklearn.datasets.load_digits()
    np.testing.assert_array_equal(digits.x.numpy() * 16, peer.data)
    np.testing.assert_array_equal(digits.y.numpy(), peer.target)
    assert digits.x.dtype == torch.float32 and digits.y.dtype == torch.int64


def test_digits_edges_join_the_nearest_images(digits):
    distance = cdist(digits.x.double().numpy(), digits.x.double().numpy(), "sqeuclidean")
    np.fill_diagonal(distance, np.inf)
    adjacent = np.zeros(distance.shape, dtype=bool)
    adjacent[tuple(digits.edge_index.numpy())] = True
    assert adjacent.sum() == digits.num_edges  # no parallel edges
    np.testing.assert_array_equal(adjacent, adjacent.T)
    kth = np.sort(distance, axis=1)[:, 7]
    # Whatever is nearer than the eighth nearest of either end must be joined, whatever is farther must not:
    # images at the same distance as the eighth may be chosen freely.
    limit = np.maximum(kth[:, None], kth[None, :])
    assert adjacent[distance < limit].all()
    assert not adjacent[distance > limit].any()


def test_digits_split(digits):
    masks = torch.stack([digits.train_mask, digits.val_mask, digits.test_mask])
    assert masks.sum(1).tolist() == [200, 500, 1000]
    assert masks.sum(0).max() == 1
    assert torch.bincount(digits.y[digits.train_mask]).tolist() == [20] * 10
    assert torch.equal(datasets.load("digits").train_mask, digits.train_mask)


@pytest.mark.parametrize("num_neighbors", [0, 1797])
def test_digits_number_of_neighbours(num_neighbors):
    with pytest.raises(ValueError, match=r"`num_neighbors` must be in \[1, 1796\]"):
        datasets.digits(num_neighbors)


# Nodes, edges (both directions), features and nodes per class, as published with the data sets.
KNOWN = {
    "Cora": (2708, 10556, 1433, [351, 217, 418, 818, 426, 298, 180]),
    "CiteSeer": (3327, 9104, 3703, [264, 590, 668, 701, 596, 508]),
    "PubMed": (19717, 88648, 500, [4103, 7739, 7875]),
    "Minesweeper": (10000, 78804, 7, [8000, 2000]),
    "Tolokers": (11758, 1038000, 10, [9192, 2566]),
    "Computers": (13752, 491722, 767, [436, 2142, 1414, 542, 5158, 308, 487, 818, 2156, 291]),
    "Photo": (7650, 238162, 745, [369, 1686, 703, 915, 882, 823, 1941, 331]),
}


@needs_data
@pytest.mark.parametrize("name", KNOWN)
def test_known_counts(name):
    data = datasets.load(name, ROOT)
    num_nodes, num_edges, num_features, classes = KNOWN[name]
    assert data.x.shape == (num_nodes, num_features)
    assert data.edge_index.shape == (2, num_edges)
    assert torch.bincount(data.y).tolist() == classes
    assert data.is_undirected() and not data.has_self_loops()
    assert coalesce(data.edge_index).size(1) == num_edges  # no parallel edges

    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.sum(0).max() == 1  # disjoint
    sizes = masks.sum(1)
    if name in ("Cora", "CiteSeer", "PubMed"):
        assert sizes.tolist() == [20 * len(classes), 500, 1000]
        assert torch.bincount(data.y[data.train_mask]).tolist() == [20] * len(classes)
    elif name in ("Minesweeper", "Tolokers"):
        assert sizes.shape == (3, 10)
        assert (sizes.sum(0) == num_nodes).all()
        assert ((sizes[0] - num_nodes / 2).abs() <= 1).all()
    else:
        assert sizes.sum() == num_nodes
        assert abs(sizes[0] - 0.6 * num_nodes) <= 1


@needs_data
def test_split_file_is_used_if_there_is_one(tmp_path):
    (tmp_path / "amazon").symlink_to(Path(ROOT, "amazon"))
    drawn = datasets.load("Photo", tmp_path)
    assert drawn.train_mask.sum() == 4590 and drawn.val_mask.sum() == 1530 and drawn.test_mask.sum() == 1530
    assert torch.equal(datasets.load("Photo", tmp_path).train_mask, drawn.train_mask)

    file = np.load(Path(ROOT, "splits_60_20_20", "amazon-photo_split.npz"))
    for mask, part in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
        assert datasets.load("Photo", ROOT)[mask].nonzero()[:, 0].tolist() == sorted(file[part])

    split = tmp_path / "splits_60_20_20" / "amazon-photo_split.npz"
    split.parent.mkdir()
    np.savez(split, train=np.arange(10), valid=np.arange(10), test=np.arange(10))
    with pytest.raises(ValueError, match=r"amazon-photo_split.npz must hold each of the 7650 nodes once"):
        datasets.load("Photo", tmp_path)


@needs_data
def test_root_of_a_pyg_class_is_read_and_not_written_to(tmp_path):
    root = tmp_path / "Cora"
    shutil.copytree(Path(ROOT, "planetoid", "Cora", "raw"), root / "raw")
    for path in (root / "raw", root):
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert datasets.load("Cora", tmp_path).num_edges == 10556
    assert [path.name for path in root.iterdir()] == ["raw"]
    for path in (root, root / "raw"):
        path.chmod(stat.S_IRWXU)


def test_unknown_name():
    with pytest.raises(ValueError, match=r"`name` must be one of digits, Cora, .*, got 'cora'"):
        datasets.load("cora")


RAW = {
    "Cora": "planetoid/Cora/raw/ind.cora.{}",
    "Minesweeper": "heterophilous/minesweeper/raw/minesweeper.npz",
    "Photo": "amazon/Photo/raw/amazon_electronics_photo.npz",
}


def refuse(*args, **kwargs):
    raise OSError("no route to host")


@pytest.mark.parametrize("name", RAW)
def test_empty_root_says_what_would_be_downloaded(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("torch_geometric.io.fs.cp", refuse)
    with pytest.raises(ConnectionError) as caught:
        datasets.load(name, tmp_path)
    file = Path(tmp_path, RAW[name].format("x"))
    announced = capsys.readouterr().err.splitlines()[0]
    for text in (str(caught.value), announced):
        assert str(file.parent) in text and file.name in text and "https://github.com/" in text
    assert "no route to host" in str(caught.value) and "by hand" in str(caught.value)
    assert not any(tmp_path.iterdir())  # nothing half-downloaded is left to be taken for the data set


def test_download_that_works(tmp_path, monkeypatch, capsys):
    """A stand-in for the server: PyG's class writes the files it fetched, the loader then reads them."""
    features = np.eye(7, dtype=np.float32)[np.arange(10000) % 7]
    row = np.arange(39402)
    edges = np.stack([row % 10000, (row % 10000 + 1 + row // 10000) % 10000], 1)
    split = (np.arange(10000)[None, :] + np.arange(10)[:, None]) % 4

    def fetch(url, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        np.savez(
            Path(folder, url.rpartition("/")[2]),
            node_features=features,
            node_labels=np.arange(10000) % 2,
            edges=edges,
            train_masks=split < 2,
            val_masks=split == 2,
            test_masks=split == 3,
        )

    monkeypatch.setattr("torch_geometric.datasets.heterophilous_graph_dataset.download_url", fetch)
    data = datasets.load("Minesweeper", tmp_path)
    assert "Downloading Minesweeper" in capsys.readouterr().err
    np.testing.assert_array_equal(data.x.numpy(), features)
    assert data.train_mask.sum(0).tolist() == [5000] * 10
    assert datasets.load("Minesweeper", tmp_path).num_edges == 2 * 39402
    assert "Downloading" not in capsys.readouterr().err


def test_missing_file(tmp_path):
    path = tmp_path / "planetoid/Cora/raw/ind.cora.x"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    with pytest.raises(
        FileNotFoundError, match=r"raw lacks ind.cora.tx, .*ind.cora.test.index: copy from https"
    ):
        datasets.load("Cora", tmp_path)


@needs_data
@pytest.mark.parametrize("part", ["x", "graph", "test.index", None])
def test_truncated_file(part, tmp_path):
    name = "Cora" if part else "Minesweeper"
    path = tmp_path / RAW[name].format(part)
    shutil.copytree(Path(ROOT, RAW[name]).parent, path.parent, copy_function=shutil.copyfile)
    path.parent.chmod(stat.S_IRWXU)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{path}.*: replace by what https://github.com/"):
        datasets.load(name, tmp_path)


@needs_data
def test_files_of_another_data_set(tmp_path):
    raw = tmp_path / "planetoid/Cora/raw"
    raw.mkdir(parents=True)
    for file in Path(ROOT, "planetoid", "CiteSeer", "raw").iterdir():
        shutil.copyfile(file, raw / file.name.replace("citeseer", "cora"))
    with pytest.raises(
        ValueError, match=rf"The files in {raw} are not those of Cora .*: replace by what https"
    ):
        datasets.load("Cora", tmp_path)


# Graphs, nodes, edges (both directions), features and graphs per class, as published with the data sets.
MOLECULES = {
    "MUTAG": (188, 3371, 7442, 7, [63, 125]),
    "PROTEINS": (1113, 43471, 162088, 3, [663, 450]),
    "ENZYMES": (600, 19580, 74564, 18 + 3, [100] * 6),
}


@needs_data
@pytest.mark.parametrize("name", MOLECULES)
def test_known_molecules(name):
    data = datasets.molecules(name, ROOT)
    num_graphs, num_nodes, num_edges, num_features, classes = MOLECULES[name]
    assert len(data) == num_graphs
    assert torch.cat([graph.y for graph in data]).bincount().tolist() == classes
    x = torch.cat([graph.x for graph in data])
    assert x.shape == (num_nodes, num_features)
    labels = 7 if name == "MUTAG" else 3
    assert (x[:, -labels:].sum(1) == 1).all() and set(x[:, -labels:].unique().tolist()) == {0, 1}
    assert sum(graph.num_edges for graph in data) == num_edges
    assert all(graph.is_undirected() for graph in data)
    # The first atom and bond of the second graph, read by hand.
    raw = Path(ROOT, "tudataset", name, "raw")
    owner, bonds = (
        np.loadtxt(raw / f"{name}_{part}.txt", int, delimiter=",") for part in ("graph_indicator", "A")
    )
    first = np.flatnonzero(owner == 2)[0]
    own = bonds[owner[bonds[:, 0] - 1] == 2] - 1 - first
    assert set(map(tuple, own)) == set(map(tuple, data[1].edge_index.T.tolist()))
    assert data[1].num_nodes == (owner == 2).sum()


def test_molecules_that_are_not_there(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="`name` must be one of MUTAG, PROTEINS, ENZYMES, got 'NCI1'"):
        datasets.molecules("NCI1")
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("torch_geometric.io.fs.cp", refuse)
    monkeypatch.setattr("torch_geometric.datasets.tu_dataset.fs.cp", refuse)
    with pytest.raises(ConnectionError, match="MUTAG could not be downloaded"):
        datasets.molecules("MUTAG", tmp_path)
    announced = capsys.readouterr().err.splitlines()[0]
    raw = tmp_path / "tudataset/MUTAG/raw"
    assert "MUTAG_A.txt" in announced and "https://" in announced and str(raw) in announced
    assert not any(tmp_path.iterdir())


@needs_data
def test_molecules_of_damaged_files(tmp_path):
    raw = tmp_path / "MUTAG/raw"
    shutil.copytree(Path(ROOT, "tudataset/MUTAG/raw"), raw, copy_function=shutil.copyfile)
    raw.chmod(stat.S_IRWXU)
    assert len(datasets.molecules("MUTAG", tmp_path)) == 188
    assert not (raw.parent / "processed").exists()
    bonds = raw / "MUTAG_A.txt"
    whole = bonds.read_text().splitlines()
    for lines in (whole[:-40], ["what", "is", "this"], []):
        bonds.write_text("\n".join(lines))
        with pytest.raises(
            ValueError, match=rf"The files in {raw} are not those of MUTAG.*: replace by what"
        ):
            datasets.molecules("MUTAG", tmp_path)
