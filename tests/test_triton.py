"""The Triton kernels without a GPU: in the interpreter, compiled ahead of time, and the plan they work by."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from graphattn import SparseGraph

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "which", ["graphs or options or dtypes", "not graphs and not options and not dtypes"]
)
def test_the_contract_in_the_interpreter(which):
    """A process of its own, as the interpreter is chosen when Triton is imported."""
    plugin = ["-p", "tests.triton_interpreter", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "tests/triton_contract.py", "-k", which],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


# The plan.


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 1500)), max_size=40),
    st.integers(-256, 256),
    st.booleans(),
)
def test_every_edge_is_in_one_segment(degrees, shift, near):
    """In order, none longer than a piece, every row with a segment, and the pieces of a row in neighbouring slots."""
    from graphattn.kernels import sparse_triton

    if near and degrees:  # about a multiple of the piece
        degrees[0] = 1024 + shift
    num_edges = sum(degrees)
    pointer = torch.tensor([0, *degrees]).cumsum(0)
    plan = sparse_triton._make_plan(pointer, num_edges)
    limit = sparse_triton._piece(len(degrees), num_edges)
    assert 256 <= limit <= 2048
    found = {}
    used = []
    for row, first, count, slot in plan.segments.tolist():
        if row < 0:
            assert count == 0 and slot == -1
            continue
        assert count <= limit
        found.setdefault(row, []).append((first, count, slot))
    assert sorted(found) == list(range(len(degrees)))
    long = {row: (first, count) for row, first, count, _ in plan.long.tolist() if row >= 0}
    for row, pieces in found.items():
        pieces.sort()
        at = pointer[row].item()
        for first, count, _ in pieces:
            assert first == at
            at += count
        assert at == pointer[row + 1].item()
        slots = [slot for *_, slot in pieces]
        if len(pieces) == 1:
            assert slots == [-1] and row not in long
        else:
            first, count = long.pop(row)
            assert slots == list(range(first, first + count))
            used += slots
    assert not long and len(set(used)) == len(used) and all(slot < plan.slots for slot in used)
    turns = [-(-count // 4) for row, _, count, _ in plan.segments.tolist() if row >= 0]
    assert turns == sorted(turns, reverse=True)
    assert all(row < 0 for row, *_ in plan.segments.tolist()[len(turns) :])


def test_a_plan_follows_its_pointers():
    from graphattn.kernels import sparse_triton

    pointer = torch.tensor([0, 1, 3])
    plan = sparse_triton._plan(pointer, 3)
    assert sparse_triton._plan(pointer, 3) is plan
    pointer[1] = 2
    again = sparse_triton._plan(pointer, 3)
    assert again is not plan and sorted(again.segments[:, 2].tolist()) == [1, 2]


def test_heads_too_wide_for_a_tile():
    from graphattn.kernels import sparse_triton

    with pytest.raises(NotImplementedError, match="up to 8192 numbers, got 8193"):
        arguments(torch.float32, 1, 1, 8193, sparse_triton.forward, degree=1)


# Compiled ahead of time.


class Device:
    """Triton's driver for a GPU that is not there."""

    def __init__(self, arch: int | str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 99 * 1024})

    def get_current_device(self) -> int | str:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        return self.target


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """`compile(arch, ...)` → for each kernel that a call launches: its name, registers and bytes spilled.

    The launches of the call itself are compiled, for its very arguments, and not run.
    """
    import triton
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from graphattn.kernels import sparse_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run, tool = JITFunction.run, Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    kernels = {}

    def compile_only(self, *arguments, grid, warmup, **options):
        assert all(n > 0 for n in grid)
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        kernels[id(kernel)] = (self.__name__, kernel)

    def compile(arch, dtype, heads, kv_heads, dim, **options):
        monkeypatch.setattr(driver, "_active", Device(arch))
        kernels.clear()
        sparse_triton.backward(*arguments(dtype, heads, kv_heads, dim, sparse_triton.forward, **options))
        used = []
        for name, kernel in kernels.values():
            if isinstance(arch, int):
                path = tmp_path / "kernel.cubin"
                path.write_bytes(kernel.asm["cubin"])
                command = [tool, "--dump-resource-usage", path]
                text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                pattern = r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
            else:
                text = kernel.asm["amdgcn"]
                pattern = r"\.vgpr_count:\s+(\d+)\s+\.vgpr_spill_count:\s+(\d+)"
            numbers = re.search(pattern, text)
            assert numbers, text
            registers, *spilled = map(int, numbers.groups())
            used.append((name, registers, sum(spilled)))
        return used

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return compile


def arguments(dtype, heads, kv_heads, dim, forward, *, features=0, options=False, degree=50):
    """The arguments of the operator's backward pass after its forward pass, on a graph with long rows."""
    graph = SparseGraph.from_edge_index(torch.randint(100, (2, 100 * degree)), 100)
    query = torch.randn(2, 100, heads, dim).to(dtype)
    key, value = torch.randn(2, 2, 100, kv_heads, dim).to(dtype)
    inputs = (
        query, key, value, graph.rowptr, graph.col, graph.edge_id, graph.colptr, graph.row, graph.edge_id_t,
        torch.randn(graph.num_edges, heads).to(dtype) if options else None,
        torch.randn(graph.num_edges, features).to(dtype) if features else None,
        torch.randn(heads, features, dim).to(dtype) if features else None,
        torch.tensor([1]) if options else None, 0.5, 2.0 if options else 0.0, 0.1 if options else 0.0, options,
    )  # fmt: skip
    outputs = forward(*inputs)
    return (*(torch.zeros_like(outputs[i]) for i in (0, 1, 4)), *outputs, *inputs)


@pytest.mark.parametrize("heads, dim", [(8, 16), (4, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_main_variants_keep_to_registers(compiled, dtype, heads, dim):
    """Nothing is spilled, and enough programs fit on a multiprocessor (64 Ki registers) to keep the memory busy."""
    used = compiled(90, dtype, heads, heads, dim)
    names = {name for name, *_ in used}
    assert names >= {
        "_forward_kernel",
        "_merge_softmax_kernel",
        "_query_kernel",
        "_key_kernel",
        "_merge_sums_kernel",
    }
    for name, registers, spilled in used:
        assert spilled == 0, name
        assert registers <= 168, (name, registers)


@pytest.mark.parametrize("arch", [80, 90, 100, "gfx942"])
def test_every_option_compiles(compiled, arch):
    used = compiled(arch, torch.float16, 8, 4, 16, features=16, options=True)
    assert len({name for name, *_ in used}) == 8
    assert all(spilled == 0 for _, _, spilled in used), used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_awkward_shapes_compile(compiled, dtype):
    compiled(90, dtype, 3, 1, 20, degree=2)
