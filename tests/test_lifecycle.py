"""Threads, forks, other processes, copies and files: what happens to graphs, models and compiled kernels there."""

import copy
import importlib.util
import io
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.package import PackageExporter, PackageImporter

from graphattn import (
    CompleteGraph,
    Graph,
    GridGraph,
    WindowGraph,
    as_graph,
    attention_weights,
    graph_attention,
)
from graphattn.compiled import compiled
from graphattn.nn import (
    GPSConv,
    GraphMultiheadAttention,
    GraphTransformer,
    GraphTransformerLayer,
    TransformerConv,
    VisionTransformer,
)
from tests.test_attention_torch import run_script
from tests.test_fuzz import LONG

ROOT = Path(__file__).parent.parent


def random_edges(seed: int, num_nodes: int = 300, num_edges: int = 2000) -> Tensor:
    return torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(seed))


def graphs(seed: int = 0) -> dict[str, Graph]:
    """One of each kind, all of 300 nodes."""
    return {
        "sparse": as_graph(random_edges(seed), num_nodes=300),
        "complete": CompleteGraph(300, causal=True),
        "cliques": CompleteGraph.from_batch(random_edges(seed)[0, :300] % 7),
        "window": WindowGraph(300, (2, 1), dilation=3),
        "wide window": WindowGraph.from_ptr(torch.tensor([0, 100, 300]), 70),
        "grid": GridGraph((15, 20), (2, None), border="shift"),
    }


def step(graph: Graph, seed: int = 0) -> list[Tensor]:
    """The output and the gradients, with dropout."""
    generator = torch.Generator().manual_seed(seed)
    operands = [torch.randn(300, 2, 8, generator=generator, requires_grad=True) for _ in range(3)]
    out = graph_attention(*operands, graph)
    weights = attention_weights(operands[0], operands[1], graph)
    return [out.detach(), *torch.autograd.grad(out.sum() + (weights**2).sum(), operands)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Threads and processes.


def test_threads_build_and_attend_on_every_kind():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = {
            seed: {name: step(graph, seed) for name, graph in graphs(seed).items()} for seed in (0, 1)
        }
        shared = graphs(0)

        def run(seed: int) -> bool:
            own = shared if seed == 0 else graphs(seed)
            return all(same(step(graph, seed), expected[seed][name]) for name, graph in own.items())

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(run, [0, 1] * 6))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_build_graphs_and_attend(method, tmp_path):
    """Graphs come back from a worker as they were built there, and what it computed on them has the parent's bits."""
    run_script(
        tmp_path,
        f"""
        import torch
        from tests.test_lifecycle import graphs, same, step

        class Steps(torch.utils.data.Dataset):
            def __len__(self):
                return 2

            def __getitem__(self, seed):
                return {{name: (graph, step(graph, seed)) for name, graph in graphs(seed).items()}}

        if __name__ == "__main__":
            torch.set_num_threads(1)  # PyTorch's own loops do not survive a fork
            expected = [Steps()[seed] for seed in range(2)]
            loader = torch.utils.data.DataLoader(
                Steps(), batch_size=None, num_workers=1, multiprocessing_context="{method}"
            )
            for built, here in zip(loader, expected, strict=True):
                for name, (graph, results) in built.items():
                    assert same(results, here[name][1]), name
                    assert same(step(graph), step(here[name][0])), name
                    assert repr(graph) == repr(here[name][0])
        """,
    )


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {
        "conv": TransformerConv(8, 4, heads=2, beta=True),
        "attention": GraphMultiheadAttention(8, 2),
        "layer": GraphTransformerLayer(8, 2, 16, dropout=0.0),
        "transformer": GraphTransformer(8, 8, 3, 2, 2),
        "gps": GPSConv(8, TransformerConv(8, 4, heads=2), heads=2, norm="layer_norm"),
        "vision": VisionTransformer(16, 4, 3, dim=8, depth=1, heads=2, mlp_dim=16, radius=1),
    }


def output(name: str, model: torch.nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "vision":
        return model(torch.randn(2, 3, 16, 24, generator=generator)).detach()
    return model(torch.randn(300, 8, generator=generator), random_edges(0)).detach()


def test_copies_of_used_models_are_independent():
    for name, model in models().items():
        expected = output(name, model)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(output(name, copied), expected), name
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.zero_()
            assert torch.equal(output(name, model), expected), name
            assert not torch.equal(output(name, copied), expected), name


# What another process does, which has one thread, no home, no cache folder of Numba's and none of its thread layers.
ELSEWHERE = """
import sys
import numba, torch
from graphattn import SparseGraph
from tests.test_lifecycle import models, output, step

folder = sys.argv[1]
graphs = torch.load(f"{folder}/graphs.pt", weights_only=True)
results = {name: step(graph) for name, graph in graphs.items()}
for name, model in models().items():
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(torch.load(f"{folder}/{name}.pt", weights_only=True))
    whole = torch.load(f"{folder}/{name}.whole.pt", weights_only=False)
    results[name] = [output(name, model), output(name, whole)]
torch.save(results, f"{folder}/results.pt")
assert torch.get_num_threads() == 1
try:
    numba.threading_layer()
    raise AssertionError("a thread layer of Numba was started")
except ValueError:
    pass
"""


def test_graphs_and_models_go_to_another_process(tmp_path):
    torch.save(graphs(), tmp_path / "graphs.pt")
    expected = {name: step(graph) for name, graph in graphs().items()}
    for name, model in models().items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        expected[name] = [output(name, model)] * 2
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
        torch.save(model, tmp_path / f"{name}.whole.pt")
    script = tmp_path / "script.py"
    script.write_text(ELSEWHERE)
    environment = {
        **{name: x for name, x in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "USER")},
        "NUMBA_CACHE_DIR": "/dev/null/cache",
        "NUMBA_THREADING_LAYER": "tbb",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    assert results.keys() == expected.keys()
    for name, one in results.items():
        assert same(one, expected[name]), name


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_torch_package():
    """A packaged model finds the library where it is loaded. The library itself has operators, so it is not packed."""
    model = models()["transformer"]
    buffer = io.BytesIO()
    with PackageExporter(buffer) as exporter:
        exporter.extern(["graphattn.**", "torch_geometric.**"])
        exporter.save_pickle("model", "model.pkl", model)
    buffer.seek(0)
    loaded = PackageImporter(buffer).load_pickle("model", "model.pkl")
    assert torch.equal(output("transformer", loaded), output("transformer", model))


# The cache of compiled kernels. Loading a module anew stands for another process.


def half_of(folder: Path):
    spec = importlib.util.spec_from_file_location("half", folder / "half.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return compiled(module.half, sources=[str(folder / "source.txt")])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    (tmp_path / "half.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "source.txt").write_text("first")
    return tmp_path


def served(half) -> int:
    """How many compiled variants came from the cache."""
    return sum(half._cache_hits.values())


def test_later_processes_find_what_was_compiled(folder):
    assert half_of(folder)(3) == 1.5
    half = half_of(folder)
    assert half(5) == 2.5 and half(5.0) == 2.5 and served(half) == 1


def test_two_processes_that_compile_at_once_do_not_mix_up_their_code(folder, monkeypatch):
    """Both have seen an empty index; the second writes index and code between the first's index and code."""
    first, second = half_of(folder), half_of(folder)
    files = first._cache._cache_file
    write = files._save_data

    def after_the_other(name, data):
        assert second(3.0) == 1.5
        write(name, data)

    monkeypatch.setattr(second._cache._cache_file, "_load_index", dict)
    monkeypatch.setattr(files, "_save_data", after_the_other)
    assert first(3) == 1.5
    third = half_of(folder)
    assert third(7.5) == 3.75 and served(third) == 1
    assert (
        third(7) == 3.5 and served(third) == 1
    )  # lost from the index, so compiled, and not taken from the other


@pytest.mark.parametrize("name", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("left", [0, 0.5, 0.99])
def test_damaged_files_are_compiled_anew(folder, name, left):
    half_of(folder)(3)
    (path,) = (folder / "__pycache__").glob(name)
    content = path.read_bytes()
    path.write_bytes(content[: int(left * len(content))])
    half = half_of(folder)
    assert half(5) == 2.5 and served(half) == 0
    half = half_of(folder)
    assert half(5) == 2.5 and served(half) == 1


def test_a_missing_file_is_compiled_anew(folder):
    """As a process leaves it that is killed between writing the index and the code."""
    half_of(folder)(3)
    for path in (folder / "__pycache__").glob("*.nbc"):
        path.unlink()
    half = half_of(folder)
    assert half(5) == 2.5 and served(half) == 0


def test_code_of_another_version_is_not_served(folder):
    half_of(folder)(3)
    (folder / "source.txt").write_text("second")
    half = half_of(folder)
    assert half(5) == 2.5 and served(half) == 0


def test_works_when_the_folder_is_gone(folder):
    half = half_of(folder)
    for path in (folder / "__pycache__").iterdir():
        path.unlink()
    (folder / "__pycache__").rmdir()
    (folder / "__pycache__").write_text("no folder")
    assert half(3) == 1.5


def test_compiles_where_nothing_can_be_cached():
    namespace = {}
    exec(compile("def double(x): return 2 * x", "<no file>", "exec"), namespace)
    assert compiled(namespace["double"])(21) == 42


FRESH = """
import torch
from graphattn import SparseGraph, graph_attention

x = torch.arange(24.0).view(3, 1, 8).div(24).requires_grad_()
graph = SparseGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 1, 0]]), 3)
out = graph_attention(x, x, x, graph)
out.sum().backward()
print(out.sum().item(), x.grad.sum().item())
"""


@pytest.mark.skipif(not LONG, reason="compiles the kernels four times: GRAPHATTN_FUZZ")
def test_processes_that_compile_at_once_or_are_killed(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def start():
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(FRESH)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    killed, *others = [start() for _ in range(3)]
    while not any(tmp_path.rglob("*.nbi")) and killed.poll() is None:
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    outputs = []
    for process in itertools.chain(others, [start()]):
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        outputs.append(output)
    assert len(set(outputs)) == 1 and "nan" not in outputs[0]
