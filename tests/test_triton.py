"""The Triton kernels without a GPU: in the interpreter, compiled ahead of time, and the plan they work by."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from graphattn import CompleteGraph, GridGraph, SparseGraph, WindowGraph

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
ROOT = Path(__file__).parent.parent
# Compilers that keep more numbers in memory, and whose package lacks a linker for AMD's GPUs.
OLD = importlib.util.find_spec("triton") is not None and version("triton").startswith(("3.4.", "3.5."))


@pytest.mark.parametrize(
    "contract, which",
    [
        ("triton_contract", "graphs or options or dtypes"),
        ("triton_contract", "not graphs and not options and not dtypes"),
        ("triton_structured", "graphs or dtypes or bias"),
        ("triton_structured", "not graphs and not dtypes and not bias"),
        ("triton_windows", "graphs or dtypes or dims"),
        ("triton_windows", "not graphs and not dtypes and not dims"),
    ],
)
def test_the_contract_in_the_interpreter(contract, which):
    """A process of its own, as the interpreter is chosen when Triton is imported."""
    plugin = ["-p", "tests.triton_interpreter", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, f"tests/{contract}.py", "-k", which],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


# The plans.


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


@settings(max_examples=200)
@given(
    st.data(),
    st.integers(1, 300),
    st.integers(1, 40),
    st.sampled_from([0.0, 1.0, 1.5, 8.0]),
    st.integers(1, 30),
)
def test_every_edge_is_one_bit_of_a_window_or_left_to_other_kernels(data, num_rows, num_far, least, piece):
    """A window where there are enough edges for a column, and only there. The rest is a plan of rows."""
    from graphattn.kernels import windows_triton

    pair = st.tuples(st.integers(0, num_rows - 1), st.integers(0, num_far - 1))
    few = data.draw(st.lists(st.tuples(pair, st.integers(1, 3)), max_size=30))
    dense = data.draw(st.lists(pair, max_size=3))
    listed = [x for x, times in few for _ in range(times)]
    listed += [((i + r) % num_rows, (j + s) % num_far) for i, j in dense for r in range(60) for s in range(5)]
    if not listed:
        return
    row, far = torch.tensor(listed).t()
    row, order = row.sort(stable=True)
    far = far[order].int()
    degree = torch.bincount(row, minlength=num_rows)
    pointer = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows_triton, "_piece", lambda _: piece)
        windows = windows_triton._make_windows(pointer, far, num_far, least)

    # By the definition: rows by what power of two their number of edges is below, 64 of them a window, and as many
    # columns for a far end as it has edges with one row.
    edges = Counter(zip(row.tolist(), far.tolist()))
    by_degree = sorted(range(num_rows), key=lambda i: -int(degree[i]).bit_length())
    expected = []
    for start in range(0, num_rows, 64):
        members, columns = by_degree[start : start + 64], Counter()
        for (i, j), times in edges.items():
            if i in members:
                columns[j] = max(columns[j], times)
        if columns and sum(int(degree[i]) for i in members) >= least * columns.total():
            expected.append((members, columns))
    if windows is None:
        assert not expected
        return
    rows = [[i for i in line if i >= 0] for line in windows.rows.tolist()]
    assert rows == [members for members, _ in expected]
    inside = [i for line in rows for i in line]
    assert sorted(inside + windows.rest.segments[:, 0].tolist()) == list(range(num_rows))

    found, at, slots, long = Counter(), 0, [], {entry[0]: entry for entry in windows.plan.long.tolist()}
    ordered = sorted(windows.plan.segments.tolist(), key=lambda segment: segment[1])
    for window, (members, columns) in enumerate(expected):
        pieces = [segment for segment in ordered if segment[0] == window]
        listed = []
        for _, first, count, slot in pieces:
            assert first == at and 0 < count <= piece and (slot >= 0) == (len(pieces) > 1)
            at += count
            slots += [slot] if slot >= 0 else []
            listed += windows.columns[first:at].tolist()
            for j, mask in zip(listed[-count:], windows.masks[first:at].tolist()):
                assert mask != 0
                found.update((members[r], j) for r in range(64) if mask >> r & 1)
        assert Counter(listed) == columns
        for r, i in enumerate(
            members
        ):  # the pieces of a row lie side by side in the workspace, in their order
            if len(pieces) > 1:
                first = r * (windows.plan.slots // 64) + pieces[0][3]
                assert long.pop(i) == [i, first, len(pieces), -1]
                assert [slot for *_, slot in pieces] == [pieces[0][3] + n for n in range(len(pieces))]
    assert found == Counter({(i, j): times for (i, j), times in edges.items() if i in inside})
    assert sorted(slots) == list(range(windows.plan.slots // 64)) and not long.keys() - {-1}


def test_few_edges_are_not_searched_for_windows():
    from graphattn.kernels import windows_triton

    pointer, far = torch.arange(11) * 15, torch.zeros(150, dtype=torch.int32)
    assert windows_triton._windows(pointer, far, 1, 0.0) is None and pointer not in windows_triton._kept
    pointer, far = torch.arange(11) * 16, torch.zeros(160, dtype=torch.int32)
    windows = windows_triton._windows(pointer, far, 1, 0.0)
    assert windows is not None and windows_triton._windows(pointer, far, 1, 0.0) is windows
    assert windows.masks.tolist() == [2**10 - 1] * 16  # parallel edges: a column for each


def ragged(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


SIDE = st.one_of(st.none(), st.integers(0, 9))
LENGTH = st.integers(0, 60)
STRUCTURED = st.one_of(
    st.builds(
        lambda length, radius, step, keys, offset: WindowGraph(
            length, radius, dilation=step, num_keys=keys, offset=offset
        ),
        LENGTH,
        st.tuples(SIDE, SIDE),
        st.sampled_from([1, 2, 3, 70]),
        LENGTH,
        st.integers(-20, 20),
    ),
    st.builds(
        lambda lengths, radius, step: WindowGraph.from_ptr(ragged(lengths), radius, dilation=step),
        st.lists(st.integers(0, 12), max_size=6),
        st.tuples(SIDE, SIDE),
        st.integers(1, 4),
    ),
    st.builds(lambda lengths: CompleteGraph.from_ptr(ragged(lengths)), st.lists(LENGTH, max_size=4)),
    st.builds(
        lambda shape, radius, step, border: GridGraph(shape, radius, dilation=step, border=border),
        st.lists(st.integers(1, 7), min_size=1, max_size=3),
        st.integers(0, 3),
        st.integers(1, 3),
        st.sampled_from(["clip", "shift"]),
    ),
)


@settings(max_examples=150)
@given(STRUCTURED, st.booleans(), st.sampled_from([1, 4, 16, 64]))
def test_every_row_is_in_one_block_whose_box_is_its_far_ends(graph, of_queries, most):
    """Of one sequence, and no larger than what some row of the block has an edge with."""
    from graphattn.attention import _intervals
    from graphattn.kernels import intervals_triton

    plan = intervals_triton._make_pass(*_intervals(graph)[:4], of_queries, most)
    assert plan.rows >= 16 and plan.table.dtype == torch.int32
    ends = {}
    for key, query in graph.to_edge_index().t().tolist():
        row, far = (query, key) if of_queries else (key, query)
        ends.setdefault(row, set()).add(far)
    meta, table, seen = plan.meta.tolist(), plan.table.tolist(), []
    for block in range(plan.blocks):
        rows, box, width = [0], [0], 1
        for first, inner, count, _, size, step, row_stride, far_stride, *_ in meta:
            x, n, y, far = table[first + block // inner % count]
            assert n <= size
            width *= size
            rows = [row + (x + i * step) * row_stride for row in rows for i in range(n)]
            box = [node + (y + j * step) * far_stride for node in box for j in range(far)]
        assert width <= most
        seen += rows
        if rows:
            assert set(box) == set().union(*(ends.get(row, ()) for row in rows)) and len(box) == len(set(box))
        if rows and graph.ptr is not None:
            assert len(set(torch.searchsorted(graph.ptr, torch.tensor(rows), right=True).tolist())) == 1
    assert sorted(seen) == list(range(graph.num_queries if of_queries else graph.num_keys))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_attention_of_shapes(dtype, monkeypatch):
    """PyTorch's operator takes the arguments of the call, and its outputs are brought into the shapes of ours."""
    from graphattn.attention import _causal
    from graphattn.kernels import intervals_triton

    asked = []
    monkeypatch.setattr(intervals_triton, "can_use_flash_attention", lambda of: asked.append(of) or True)
    query = torch.empty(2, 5, 4, 16, dtype=dtype, device="meta")
    key, value = torch.empty(2, 2, 9, 2, 16, dtype=dtype, device="meta")
    by_query, by_key = (torch.empty(*shape, dtype=torch.int64, device="meta") for shape in ((3, 5), (2, 9)))
    edges = (by_query, by_key, None, [5, 9, 1, 1, 9], [5, 9])
    causal = _causal(CompleteGraph(5, num_keys=9, causal=True))
    options = (None, None, None, None, 0.25, 0.0, 0.0, False)
    outputs = intervals_triton._forward(query, key, value, *edges, causal, *options)
    assert [x.shape for x in outputs] == [(2, 5, 4, 16), (2, 5, 4), (2, 5, 4), (2, 5, 4, 0), (0,)]
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in outputs)
    (of,) = asked
    assert of.key.shape == (2, 2, 5, 16) and of.is_causal and of.enable_gqa and of.dropout == 0.0


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
    """`compile(arch, call)` → for each kernel that the call launches: its name, registers and bytes spilled.

    The launches of the call itself are compiled, for its very arguments, and not run.
    """
    import triton
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run, tool = JITFunction.run, Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    kernels = {}

    def compile_only(self, *arguments, grid, warmup, **options):
        assert all(n > 0 for n in grid)
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        kernels[id(kernel)] = (self.__name__, kernel)

    def compile(arch, call):
        if OLD and isinstance(arch, str):
            pytest.skip("before Triton 3.6 its package has no linker for AMD's GPUs")
        monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", Device(arch))
        kernels.clear()
        call()
        used = []
        for name, kernel in kernels.values():
            if isinstance(arch, int):
                assert "trap;" not in kernel.asm["ptx"], f"{name} needs more than a multiprocessor has"
                assert kernel.metadata.shared <= 99 * 1024, (
                    f"{name} needs more shared memory than some devices have"
                )
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


def listed(*shape, **options):
    """Forward and backward pass on listed edges."""
    from graphattn.kernels import sparse_triton

    sparse_triton.backward(*arguments(*shape, sparse_triton.forward, **options))


def structured(graph, dtype, heads, kv_heads, dim, options=False):
    """Forward and backward pass on a structured graph."""
    from graphattn.attention import _intervals
    from graphattn.kernels import intervals_triton

    query = torch.randn(2, graph.num_queries, heads, dim).to(dtype)
    key, value = torch.randn(2, 2, graph.num_keys, kv_heads, dim).to(dtype)
    inputs = (
        query, key, value, *_intervals(graph), None,
        torch.randn(*[1] * (len(graph.edge_shape) - 1), graph.edge_shape[-1], heads).to(dtype) if options else None,
        None, None, torch.tensor([1]) if options else None, 0.5, 2.0 if options else 0.0, 0.1 if options else 0.0,
        options,
    )  # fmt: skip
    outputs = intervals_triton.forward(*inputs)
    intervals_triton.backward(*(torch.zeros_like(outputs[i]) for i in (0, 1, 4)), *outputs, *inputs)


@pytest.mark.parametrize("heads, dim", [(8, 16), (4, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_main_variants_keep_to_registers(compiled, dtype, heads, dim):
    """Nothing is spilled, and enough programs fit on a multiprocessor (64 Ki registers) to keep the memory busy."""
    used = compiled(90, lambda: listed(dtype, heads, heads, dim))
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
    used = compiled(arch, lambda: listed(torch.float16, 8, 4, 16, features=16, options=True))
    assert len({name for name, *_ in used}) == 8
    assert all(spilled <= (8 if OLD else 0) for _, _, spilled in used), used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_awkward_shapes_compile(compiled, dtype):
    compiled(90, lambda: listed(dtype, 3, 1, 20, degree=2))


def windows(dtype, heads, kv_heads, dim, softcap=0.0):
    """Forward and backward pass on windows, of queries in pieces."""
    from graphattn.kernels import windows_triton

    edge_index = torch.cartesian_prod(torch.arange(704), torch.arange(64)).t()
    graph = SparseGraph.from_edge_index(edge_index, size=(704, 64))
    query = torch.randn(2, 64, heads, dim).to(dtype)
    key, value = torch.randn(2, 2, 704, kv_heads, dim).to(dtype)
    inputs = (
        query, key, value, graph.rowptr, graph.col, graph.edge_id, graph.colptr, graph.row, graph.edge_id_t,
        None, None, None, None, 0.5, softcap, 0.0, False,
    )  # fmt: skip
    outputs = windows_triton.forward(*inputs)
    windows_triton.backward(*(torch.zeros_like(outputs[i]) for i in (0, 1, 4)), *outputs, *inputs)


def on_windows(used):
    """Of the kernels on windows, the numbers of the first launch and of the one after it where there are marks."""
    found = {}
    for name, *numbers in used:
        if name.startswith("_window"):
            found.setdefault(name, []).append(numbers)
    assert found.keys() == {"_window_forward_kernel", "_window_query_kernel", "_window_key_kernel"}
    return list(found.items())


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype, dim", [(torch.float16, 64), (torch.bfloat16, 128), (torch.float32, 64)])
def test_the_main_variants_on_windows_keep_to_registers(compiled, arch, dtype, dim):
    """Nothing is spilled, but a few bytes in float32, other than where numbers are not finite."""
    for name, (first, again) in on_windows(compiled(arch, lambda: windows(dtype, 2, 2, dim))):
        assert first[0] <= (255 if arch == 80 else 216), (name, first)
        assert first[1] <= (32 if dtype == torch.float32 else 0), (name, first)
        assert again[1] <= 256, (name, again)


@pytest.mark.parametrize(
    "arch, dtype, heads, kv_heads, dim",
    [
        (90, torch.float16, 8, 4, 16),
        (90, torch.float32, 3, 1, 16),
        (90, torch.bfloat16, 3, 1, 5),
        ("gfx942", torch.float16, 8, 4, 16),
    ],
)
def test_other_variants_on_windows_compile(compiled, arch, dtype, heads, kv_heads, dim):
    used = compiled(arch, lambda: windows(dtype, heads, kv_heads, dim, softcap=2.0))
    for name, (first, again) in on_windows(used):
        assert first[1] <= (32 if dtype == torch.float32 else 0) and again[1] <= 256, (name, first, again)


KERNELS = {"_forward_kernel", "_delta_kernel", "_query_kernel", "_key_kernel"}


@pytest.mark.parametrize("dtype, dim", [(torch.float16, 64), (torch.bfloat16, 128), (torch.float32, 64)])
def test_the_main_variants_on_structured_graphs_keep_to_registers(compiled, dtype, dim):
    """float32 products without tf32 are worked out in registers: from Triton 3.9 on some 32 bytes do not fit."""
    used = compiled(90, lambda: structured(WindowGraph(300, 100), dtype, 2, 2, dim))
    assert {name for name, *_ in used} == KERNELS
    assert all(spilled <= (32 if dtype == torch.float32 else 0) for _, _, spilled in used), used


@pytest.mark.parametrize("arch", [80, 90, 100, "gfx942"])
def test_every_option_on_structured_graphs_compiles(compiled, arch):
    """All of them together spill a little, under older compilers more."""
    graph = GridGraph((20, 20), 3) if arch == 90 else WindowGraph(300, 100)
    used = compiled(arch, lambda: structured(graph, torch.float16, 4, 2, 32, options=True))
    assert {name for name, *_ in used} == {*KERNELS, "_weights_kernel"}
    assert all(spilled <= (512 if OLD else 128) for _, _, spilled in used), used


def test_awkward_shapes_on_structured_graphs_compile(compiled):
    ptr = ragged((3, 0, 20))
    compiled(
        90, lambda: structured(WindowGraph.from_ptr(ptr, (None, 1)), torch.float64, 3, 1, 20, options=True)
    )
