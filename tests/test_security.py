"""Files of strangers run no code and harm no kernel; nothing calls out, or writes where it was not asked to."""

import ast
import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import datasets
from graphattn import (
    CompleteGraph,
    GridGraph,
    SparseGraph,
    WindowGraph,
    expander_graph,
    graph_attention,
)
from graphattn.nn import GPSConv, GraphTransformer, TransformerConv, VisionTransformer

ROOT = Path(__file__).parent.parent


class Touch:
    """Unpickled by a reader that runs what a file asks for, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def written(x):
    stream = io.BytesIO()
    torch.save(x, stream)
    stream.seek(0)
    return stream


# --- what is read ---------------------------------------------------------------------------------------


def test_the_trap_works(tmp_path):
    pickle.loads(pickle.dumps(Touch(tmp_path / "trap")))
    assert (tmp_path / "trap").exists()


def test_states_and_graphs_are_read_without_running_code(tmp_path):
    models = [
        TransformerConv(4, 2, heads=2, edge_dim=3, beta=True),
        GPSConv(8, TransformerConv(8, 4, heads=2), heads=2),
        GraphTransformer(3, 8, 2, 1, 2),
        VisionTransformer(8, 4, 5, dim=8, depth=1, heads=2, mlp_dim=8),
    ]
    graphs = [
        expander_graph(9, 4, seed=0),
        CompleteGraph.from_batch(torch.tensor([1, 0, 1])),
        WindowGraph(5, (None, 0)),
        GridGraph((2, 3), 1),
    ]
    stored = written({"models": [model.state_dict() for model in models], "graphs": graphs})
    read = torch.load(stored, weights_only=True)
    for model, state in zip(models, read["models"]):
        copy.deepcopy(model).load_state_dict(state)
    for graph, one in zip(graphs, read["graphs"]):
        assert repr(one) == repr(graph) and torch.equal(one.to_edge_index(), graph.to_edge_index())
    trap = tmp_path / "trap"
    with pytest.raises(pickle.UnpicklingError):
        torch.load(written({**models[0].state_dict(), "lin_key.weight": Touch(trap)}), weights_only=True)
    assert not trap.exists()
    with pytest.raises(TypeError, match="names to tensors"):
        VisionTransformer.from_state_dict({"cls_token": Touch(trap)}, heads=2)


def planetoid(folder, **files):
    raw = folder / "planetoid/Cora/raw"
    raw.mkdir(parents=True)
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        (raw / f"ind.cora.{part}").write_bytes(pickle.dumps(files.get(part, [[1]]), protocol=2))
    np.savetxt(raw / "ind.cora.test.index", np.arange(1000), fmt="%d")


@pytest.mark.parametrize("part", ["x", "tx", "allx", "y", "ty", "ally", "graph"])
def test_code_in_a_pickled_data_set_is_not_run(part, tmp_path):
    trap = tmp_path / "trap"
    planetoid(tmp_path, **{part: {0: [Touch(trap)]}})
    with pytest.raises(ValueError, match=rf"ind\.cora\.{part} cannot be read .*asks for \w+\.mkdir"):
        datasets.load("Cora", tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize(
    "name, file",
    [
        ("Computers", "amazon/Computers/raw/amazon_electronics_computers.npz"),
        ("Minesweeper", "heterophilous/minesweeper/raw/minesweeper.npz"),
    ],
)
def test_code_in_an_array_is_not_run(name, file, tmp_path):
    trap, path = tmp_path / "trap", tmp_path / file
    path.parent.mkdir(parents=True)
    names = ["adj_data", "adj_indices", "adj_indptr", "attr_data", "attr_indices", "attr_indptr", "labels"]
    names += ["node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks"]
    array = np.empty(1, dtype=object)
    array[0] = Touch(trap)
    np.savez(path, **dict.fromkeys(names, array))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        datasets.load(name, tmp_path)
    assert not trap.exists()


LISTED = SparseGraph.from_edge_index(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]), 3)
IDS, PTR = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 3, 4])
FORGED = [
    (LISTED, {"col": torch.tensor([0, 1, 2, 9], dtype=torch.int32)}, IndexError, r"`col`.*\[0, 3\), got 9"),
    (LISTED, {"row": torch.tensor([0, -1, 2, 1], dtype=torch.int32)}, IndexError, r"`row`.*got -1"),
    (LISTED, {"edge_id": torch.tensor([0, 1, 2, 4], dtype=torch.int32)}, IndexError, r"`edge_id`.*\[0, 4\)"),
    (LISTED, {"edge_id_t": torch.tensor([0, 1, 2, 2], dtype=torch.int32)}, ValueError, "every number once"),
    (LISTED, {"rowptr": torch.tensor([0, 1, 3, 1000])}, ValueError, "rise from 0 to 4"),
    (LISTED, {"colptr": torch.tensor([0, 3, 1, 4])}, ValueError, "rise from 0 to 4"),
    (LISTED, {"rowptr": torch.tensor([-5, 1, 3, 4])}, ValueError, "rise from 0 to 4"),
    (LISTED, {"rowptr": PTR[:0]}, ValueError, "at least one entry"),
    (LISTED, {"rowptr": PTR.int()}, TypeError, "torch.int64.*torch.int32"),
    (LISTED, {"col": IDS}, TypeError, "torch.int32.*torch.int64"),
    (LISTED, {"col": IDS.int()[:2]}, ValueError, "one length"),
    (LISTED, {"row": IDS.int().view(2, 2)}, TypeError, r"one-dimensional.*\[2, 2\]"),
    (LISTED, {"row": IDS.int().to("meta")}, ValueError, "one device"),
    (LISTED, {"col": None}, TypeError, "NoneType"),
    (LISTED, {"more": IDS}, ValueError, "six tensors"),
    (CompleteGraph(4), {"num_edges": 5}, ValueError, "`num_edges`.*must be 16, got 5"),
    (CompleteGraph(4), {"num_keys": -1}, ValueError, "num_keys"),
    (CompleteGraph(4), {"causal": "yes"}, TypeError, "`causal`"),
    (CompleteGraph(4), {"order": torch.arange(4)}, ValueError, "`order`"),
    (CompleteGraph(4), {"device": "cpu"}, TypeError, "torch.device"),
    (CompleteGraph(4), {"grid": 3}, ValueError, "must hold its rule"),
    (CompleteGraph.from_ptr(PTR), {"ptr": torch.tensor([0, 3, 2, 4])}, ValueError, "never fall"),
    (CompleteGraph.from_ptr(PTR), {"ptr": torch.tensor([0, 2000])}, ValueError, "`num_queries`.*2000, got 4"),
    (
        CompleteGraph.from_batch(torch.tensor([1, 0, 1])),
        {"order": torch.tensor([0, 1, 7])},
        IndexError,
        "order",
    ),
    (
        CompleteGraph.from_batch(torch.tensor([1, 0, 1])),
        {"order": torch.tensor([0, 1, 1])},
        ValueError,
        "once",
    ),
    (CompleteGraph.from_batch(torch.tensor([1, 0, 1])), {"order": torch.arange(2)}, ValueError, "`order`"),
    (WindowGraph(6, 1), {"radius": (1, -3)}, ValueError, "radius"),
    (WindowGraph(6, 1), {"radius": (1, 2)}, ValueError, "`num_edges`"),
    (WindowGraph(6, 1), {"dilation": 0}, ValueError, "dilation"),
    (WindowGraph(6, 1), {"offset": 2}, ValueError, "`num_edges`"),
    (WindowGraph.from_ptr(PTR, 1), {"offset": 2}, ValueError, "`offset`.*0, got 2"),
    (GridGraph((2, 3), 1), {"shape": (2, 4)}, ValueError, "`num_queries`.*8, got 6"),
    (GridGraph((2, 3), 1), {"border": "wrap"}, ValueError, "border"),
    (GridGraph((2, 3), 1), {"shape": None}, TypeError, "shape"),
]


@pytest.mark.parametrize("graph, change, error, message", FORGED, ids=range(len(FORGED)))
def test_a_forged_graph_does_not_reach_a_kernel(graph, change, error, message):
    forged = object.__new__(type(graph))
    forged.__dict__.update({**vars(graph), **change})
    for read in (
        lambda: torch.load(written(forged), weights_only=True),
        lambda: pickle.loads(pickle.dumps(forged)),
    ):
        with pytest.raises(error, match=message):
            read()


@pytest.mark.parametrize(
    "graph", [LISTED, CompleteGraph.from_batch(torch.tensor([1, 0, 1]))], ids=["listed", "cliques"]
)
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_graph_without_numbers_is_copied_unchecked(kind, graph):
    if kind == "meta":
        graph = graph.to("meta")
    else:
        mode = FakeTensorMode()
        graph = tree_map_only(torch.Tensor, mode.from_tensor, graph)
    assert repr(copy.copy(graph)) == repr(graph)


# --- what is called and written -------------------------------------------------------------------------

# Python tells an audit hook of every file that is opened or moved and of every address that is looked up.
WATCH = """
import os, sys, tempfile
said = []
allowed = [os.path.realpath(tempfile.gettempdir())]

def may_write(path):
    if isinstance(path, int) or path == os.devnull:
        return True
    path = os.path.realpath(os.fsdecode(path))
    return "__pycache__" in path.split(os.sep) or any(path == a or path.startswith(a + os.sep) for a in allowed)

def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"):
        said.append((event, str(arguments[1:])))
    elif event == "open":
        path, mode, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(flags, int) else "w" in str(mode)
        if writes and not may_write(path):
            said.append((event, str(path)))
    elif event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"):
        if not may_write(arguments[1] if event == "os.rename" else arguments[0]):
            said.append((event, str(arguments[:2])))

sys.addaudithook(watch)
"""
EVERYTHING = """
import importlib, pkgutil
import torch
import graphattn
from graphattn import *
from graphattn import nn, transforms, encodings
from torch_geometric.data import Data
for module in pkgutil.walk_packages(graphattn.__path__, "graphattn."):
    if module.name not in ("graphattn.kernels.sparse_triton", "graphattn.__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError:  # of a package that is optional
            pass
edge_index = torch.tensor([[0, 1, 2, 5], [1, 2, 0, 3]])
x = torch.randn(6, 2, 8, requires_grad=True)
for graph in (as_graph(edge_index, num_nodes=6), CompleteGraph(6), WindowGraph(6, 1), GridGraph((2, 3), 1)):
    graph_attention(x, x, x, graph).sum().backward()
    attention_weights(x, x, graph)
conv = nn.TransformerConv(16, 8, heads=2)
gps = nn.GPSConv(16, conv, heads=2)
gps(x.detach().flatten(1), edge_index).sum().backward()
nn.GraphTransformer(16, 16, 2, 1, 2)(x.detach().flatten(1), edge_index)
nn.VisionTransformer(8, 4, 5, dim=16, depth=1, heads=2, mlp_dim=8, radius=1)(torch.randn(2, 3, 8, 8))
accelerate(gps)
data = Data(edge_index=edge_index, num_nodes=6)
for transform in (
    transforms.AddLaplacianEigenvectorPE(2), transforms.AddRandomWalkPE(2), transforms.AddSinusoidalPE(4)
):
    transform(data)
import datasets
datasets.digits()
from graphattn.__main__ import report
report()
"""


def watched(script, folder):
    """What is said of a script that may write to `folder/scratch` alone, and whose home is below a file."""
    scratch = folder / "scratch"
    scratch.mkdir()
    (folder / "file").touch()
    home = str(folder / "file" / "home")
    environment = {**os.environ, "HOME": home, "USERPROFILE": home, "OMP_NUM_THREADS": "1"}
    environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP", "MPLCONFIGDIR"), str(scratch))
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "inductor")
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "NUMBA_CACHE_DIR"):
        environment.pop(name, None)
    script = WATCH + script + "\nsys.stdout.write('said: ' + repr(said))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.rpartition("said: ")[2])


def test_the_watch_works(tmp_path):
    script = """
import pathlib, socket
home = pathlib.Path.home()
for call in (
    lambda: home.mkdir(),
    lambda: open(home.parent, "w"),
    lambda: open(pathlib.Path(tempfile.gettempdir(), "allowed"), "w"),
    lambda: socket.create_connection(("localhost", 9), timeout=0.1),
):
    try:
        call()
    except OSError:
        pass
"""
    said = watched(script, tmp_path)
    assert [event for event, _ in said][:3] == ["os.mkdir", "open", "socket.getaddrinfo"]
    assert said[1] == ("open", str(tmp_path / "file"))


def test_nothing_calls_out_or_writes_outside_the_caches(tmp_path):
    """What is written is compiled code beside its source, and temporary files."""
    assert watched(EVERYTHING, tmp_path) == []


def test_an_example_writes_its_figure_and_nothing_else(tmp_path):
    figure = tmp_path / "made" / "figure.png"
    script = f"""
import runpy
allowed.append({str(figure.parent)!r})
sys.path.insert(0, os.getcwd())
sys.argv = ["positional_encodings", "--epochs", "1", "--out", {str(figure)!r}]
runpy.run_module("examples.positional_encodings", run_name="__main__")
"""
    assert watched(script, tmp_path) == []
    assert figure.exists()


@pytest.mark.parametrize("path", sorted((ROOT / "graphattn").rglob("*.py")), ids=lambda path: path.name)
def test_the_package_has_no_means_to_call_out_or_to_run_what_it_reads(path):
    tree = ast.parse(path.read_text())
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {
        str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    # `ctypes` there for the kernels' own code and the library that PyTorch has loaded
    foreign = {"ctypes"} if path.name == "threads.py" else set()
    assert not imported & {"socket", "urllib", "http", "requests", "subprocess", "pickle", "ctypes"} - foreign
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"eval", "exec", "torch.load", "np.load", "os.system", "torch.hub.load"}


def test_a_graph_that_was_read_attends():
    query = torch.randn(3, 1, 8)
    read = torch.load(written(LISTED), weights_only=True)
    assert torch.equal(
        graph_attention(query, query, query, read), graph_attention(query, query, query, LISTED)
    )
