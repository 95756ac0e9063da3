"""`python -m graphattn`: what it says is so, and it says it wherever it is started."""

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import graphattn.attention as attention_module
from graphattn import __main__ as main
from graphattn import graph_attention
from graphattn.kernels import product_cpu
from graphattn.kernels.product_cpu import multiply

ROOT = Path(__file__).parent.parent


def sections(text):
    """The lines of each section, by its title."""
    parts = re.split(r"^(\S.*)\n", text, flags=re.MULTILINE)[1:]
    return {title: body.split("\n") for title, body in zip(parts[::2], parts[1::2])}


def started(folder=ROOT, **environment):
    without_home = {name: x for name, x in os.environ.items() if name not in ("HOME", "USERPROFILE")}
    done = subprocess.run(
        [sys.executable, "-m", "graphattn"],
        capture_output=True,
        text=True,
        cwd=folder,
        # of what PyTorch deprecates and PyG uses
        env={
            **without_home,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore::FutureWarning",
            **environment,
        },
        timeout=300,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return sections(done.stdout)


def test_what_a_bug_report_needs():
    report = started()
    assert list(report) == ["Versions", "Devices and threads", "Kernels", "Kernel cache"]
    said = dict(line.split(maxsplit=1) for line in report["Versions"] if line.strip())
    assert said["python"].startswith(platform.python_version())
    for name in ("torch", "torch-geometric", "numba", "numpy"):
        assert said[name] == version(name)
    assert {"triton", "transformers"} <= said.keys()
    devices = " ".join(report["Devices and threads"])
    assert "1 threads of PyTorch" in devices and "OMP_NUM_THREADS=1" in devices
    assert torch.cuda.is_available() or "no accelerator" in devices
    assert not any("unknown" in line for lines in report.values() for line in lines)


@pytest.mark.parametrize("name", main._graphs())
def test_the_kernel_that_is_named_is_the_one_that_runs(name, monkeypatch):
    called = []
    for operator in ("sparse_attention", "interval_attention", "block_attention"):
        run = getattr(attention_module, operator)
        monkeypatch.setattr(
            attention_module, operator, lambda *a, name=operator, run=run: called.append(name) or run(*a)
        )
    graph = main._graphs()[name]
    query = torch.randn(graph.num_queries, 1, 8)
    graph_attention(query, query, query, graph)
    assert main._kernel("cpu", graph) == f"graphattn::{called[0]}"
    (line,) = [line for line in main.report().splitlines() if re.search(rf"cpu +{name} +\w", line)]
    assert line.endswith(f"graphattn::{called[0]}")


def test_a_device_without_a_kernel_is_said_to_have_none(monkeypatch):
    monkeypatch.setattr(main, "_accelerators", lambda: ["xpu:0"])
    lines = [line for line in main.report().splitlines() if " xpu " in line]
    assert len(lines) == len(main._graphs())
    assert "none: graph_attention has no kernel for GridGraph on xpu. Use graph.to_sparse()." in lines[-1]


def test_a_part_that_fails_leaves_the_others(monkeypatch):
    monkeypatch.setattr(main, "_accelerators", lambda: 1 / 0)
    report = sections(main.report())
    assert report["Kernels"][0] == "  unknown: ZeroDivisionError: division by zero"
    assert "torch" in report["Versions"][2] and "__pycache__" in report["Kernel cache"][0]


def test_the_cache_holds_what_was_compiled():
    query = torch.randn(3, 1, 8, requires_grad=True)
    graph = main.SparseGraph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
    graph_attention(query, query, query, graph).sum().backward()
    graph_attention(query, query, query, main.CompleteGraph(3)).sum().backward()
    multiply(query[:, 0], query[0].mT)
    sort, kernels, blocks, product = main._cache()
    assert re.search(r"graphattn\.graph +\S+, writable, compiled: _counting_sort [1-9]", sort), sort
    for name in ("backward_key", "backward_query", "forward"):
        assert re.search(rf"compiled: .*\b{name} [1-9]", kernels), kernels
    assert re.search(r"blocks_cpu .*compiled: backward [1-9]\d*, forward [1-9]", blocks), blocks
    assert re.search(r"product_cpu .*compiled: multiply [1-9]", product), product


def test_what_computes_the_linear_maps(monkeypatch):
    for faster, named in ((True, "graphattn.kernels.product_cpu"), (False, "torch.nn.functional.linear")):
        monkeypatch.setattr(product_cpu, "FASTER", faster)
        (line,) = [line for line in main.report().splitlines() if "linear maps" in line]
        assert line.endswith(f" {named}")


@pytest.fixture
def without_a_cache(tmp_path):
    """A copy of the package beside whose files nothing can be written, not even by an administrator."""
    shutil.copytree(ROOT / "graphattn", tmp_path / "graphattn", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("graphattn", "graphattn/kernels"):
        (tmp_path / folder / "__pycache__").touch()
    return tmp_path


def test_without_a_cache_or_a_home(without_a_cache):
    """It says so, and what to do."""
    home = str(without_a_cache / "graphattn" / "__init__.py")  # no folder
    report = started(without_a_cache, HOME=home, USERPROFILE=home, XDG_CACHE_HOME=home, LOCALAPPDATA=home)
    assert f"  this package     {without_a_cache / 'graphattn'}" in report["Versions"]
    for line in report["Kernel cache"][:4]:
        assert "none: no folder can be written" in line and "NUMBA_CACHE_DIR" in line


def test_with_a_cache_of_ones_own(without_a_cache):
    report = started(without_a_cache, NUMBA_CACHE_DIR=str(without_a_cache / "mine"))
    for line in report["Kernel cache"][:4]:
        assert f"{without_a_cache / 'mine'}{os.sep}" in line and line.endswith("writable, nothing compiled")
