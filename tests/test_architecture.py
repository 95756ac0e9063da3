"""The package keeps to its layout: who may import whom, and what importing it does not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphattn

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "graphattn").rglob("*.py"))
ATTEND = """
import torch
from graphattn import SparseGraph, graph_attention
x = torch.randn(3, 1, 4)
graph_attention(x, x, x, SparseGraph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3))
"""


def python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_follow_the_contracts():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout and " 0 kept" not in done.stdout, done.stdout


def test_works_without_optional_packages():
    blocked = ("triton", "matplotlib", "transformers", "sklearn", "torch_sparse", "pyg_lib")
    python(f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n{ATTEND}")


def test_a_missing_optional_package_is_named():
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        + """
from graphattn.integrations.huggingface import register
try:
    register()
except ImportError as error:
    print(error)
"""
    )
    assert "pip install 'transformers>=5.2'" in python(script)


def test_importing_loads_nothing_that_it_does_not_need():
    # Triton itself comes with torch._dynamo, which PyG imports, where it is installed.
    heavy = ("matplotlib", "networkx", "sklearn", "transformers", "graphattn.kernels.sparse_triton")
    loaded = python(f"{ATTEND}\nimport sys; print([name for name in {heavy} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_without_triton_cuda_tensors_get_an_error_that_says_what_to_install(monkeypatch):
    from graphattn.kernels import sparse

    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "graphattn.kernels.sparse_triton", raising=False)
    monkeypatch.delattr("graphattn.kernels.sparse_triton", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"CUDA tensors needs Triton.*pip install triton"):
        sparse.triton_kernels("sparse_triton")


@pytest.mark.parametrize("backward", ["", "_backward"])
@pytest.mark.parametrize("operator", ["sparse_attention", "interval_attention"])
def test_the_operator_has_a_body_on_cuda(operator, backward):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"graphattn::{operator}{backward}", "CUDA")


def test_public_names():
    for name in graphattn.__all__:
        assert hasattr(graphattn, name), name
    assert {"graph_attention", "attention_weights", "Graph", "SparseGraph"} <= set(graphattn.__all__)
    assert {"CompleteGraph", "WindowGraph", "GridGraph"} <= set(graphattn.__all__)
    assert {"as_graph", "union", "expander_graph", "global_graph", "accelerate", "nn"} <= set(
        graphattn.__all__
    )


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_library_code_neither_asserts_nor_prints(path):
    """`python -O` must not switch a check off, and a library's output is its return value."""
    found = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print")
    ]
    assert not found, f"{path.name}: lines {found}"
