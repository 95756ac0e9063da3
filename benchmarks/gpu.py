"""Checks the operator on a CUDA device against the oracle, then measures it beside its peers.

    python -m benchmarks.gpu                      the contract and every case: under 8 minutes on an H200
    python -m benchmarks.gpu --case mesh --no-contract

No number is printed if the contract fails, or for a provider that disagrees with graphattn on the case. Times are
medians of CUDA events, the providers taking turns. Two floors go with them, as shares of the time (1 is the best there
can be): of reading every row once, and of reading it again for every edge, both at the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.measure import largest_error
from benchmarks.providers import _message_passing
from graphattn import CompleteGraph, Graph, GridGraph, SparseGraph, WindowGraph, graph_attention
from tests import oracle, test_structured_attention
from tests.test_attention import DTYPES, EVERYTHING, GRAPHS, OPTIONS, drawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Step = Callable[[], tuple[Tensor, ...]]

RESULTS = Path(__file__).parent / "results" / "gpu.csv"
TOLERANCE = {
    torch.float16: 1e-2,
    torch.float32: 1e-4,
}  # relative to the largest entry, between orders of summation
COLUMNS = (
    "case", "nodes", "edges", "heads", "dim", "dtype", "mode", "provider", "ms", "ratio", "floor_once", "floor_edge",
    "peak_mb", "error", "note", "device", "torch", "commit", "date",
)  # fmt: skip


HALVES = (torch.float16, torch.bfloat16)


class Case(NamedTuple):
    """Edges, number of keys, number of queries, features of an edge; a structured graph and its mask (query, key)."""

    edge_index: Tensor
    num_keys: int
    num_queries: int
    features: int = 0
    graph: Graph | None = None
    mask: Callable[[Tensor, Tensor], Tensor] | None = None


# The contract.

DISTINCT = (
    "bias per head",
    "all edges removed",
    "edge features",
    "softcap, bias",
    "one key head",
    "two leading",
)


def contract(device: str) -> int:
    """Compare values and every gradient with the float64 oracle; the number of cases that agreed."""

    def operator(case: oracle.Case, operands: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        edge_index = case.edge_index.to(device)
        graph = SparseGraph.from_edge_index(edge_index, size=(case.num_keys, case.num_queries))
        there = {name: x.to(device) for name, x in operands.items()}
        out, lse = graph_attention(**there, graph=graph, **case.settings, return_lse=True)
        return out.cpu(), lse.cpu()

    cases = [(graph, options, torch.float32) for graph in GRAPHS.values() for options in ({}, EVERYTHING)]
    # Every variant takes seconds to compile: one of each kind.
    cases += [(GRAPHS["100 nodes"], EVERYTHING, dtype) for dtype in DTYPES]
    cases += [(GRAPHS["100 nodes"], OPTIONS[name], torch.float32) for name in DISTINCT]
    for dim, value_dim in [(1, 1), (20, 20), (130, 130), (64, 16)]:
        options = {"heads": 1 if dim > 64 else 3, "dim": dim, "value_dim": value_dim}
        cases += [(GRAPHS["63 nodes"], options, dtype) for dtype in (torch.float16, torch.float32)]
    for graph, options, dtype in cases:
        try:
            oracle.assert_agrees(operator, oracle.draw_case(graph, dtype=dtype, **options))
        except AssertionError as error:
            raise AssertionError(f"{options}, {dtype}, {graph[1:]}: {error}") from error
    return len(cases) + windows_contract(device) + structured_contract(device)


def share_in_windows(graph: SparseGraph, dtype: torch.dtype) -> float:
    """The share of edges whose query is in a window of queries that have many keys in common."""
    from graphattn.kernels import windows_triton  # Triton loads where a kernel runs

    windows = windows_triton._windows(graph.rowptr, graph.col, graph.num_keys, windows_triton._LEAST[dtype])
    if windows is None:
        return 0.0
    rows = windows.rows[windows.rows >= 0].long()
    return graph.rowptr.diff()[rows].sum().item() / graph.num_edges


def windows_contract(device: str) -> int:
    """The same where all queries, and keys, are in windows; the number of cases that agreed."""
    edges = drawn(60, 300, 12_000)
    cases = [({"dim": dim}, dtype) for dim in (16, 64, 128) for dtype in (*HALVES, torch.float32)]
    options = {
        "heads": 4,
        "kv_heads": 2,
        "leading": (2,),
        "scale": 0.4,
        "softcap": 3.0,
        "dim": 20,
        "value_dim": 11,
    }
    cases += [(options, dtype) for dtype in (*HALVES, torch.float32)]
    graph = SparseGraph.from_edge_index(edges[0].to(device), size=edges[1:])

    def operator(case: oracle.Case, operands: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if not share_in_windows(graph, case.dtype) == 1.0:
            raise AssertionError(f"{graph} has no windows.")
        there = {name: x.to(device) for name, x in operands.items()}
        out, lse = graph_attention(**there, graph=graph, **case.settings, return_lse=True)
        return out.cpu(), lse.cpu()

    for options, dtype in cases:
        case = oracle.draw_case(edges, dtype=dtype, **options)
        try:
            oracle.assert_agrees(operator, case)
        except AssertionError as error:
            raise AssertionError(f"windows, {options}, {dtype}: {error}") from error
        clean = oracle.results(operator, case)
        case.operands["value"][..., 5, :, :] = torch.nan
        joined = torch.zeros(case.num_queries, dtype=torch.bool)
        joined[edges[0][1, edges[0][0] == 5]] = True
        dirty = oracle.results(operator, case)["out"]
        same = dirty[..., ~joined, :, :].equal(clean["out"][..., ~joined, :, :])
        if joined.all() or not (dirty[..., joined, :, :].isnan().all() and same):
            raise AssertionError(
                f"windows, {options}, {dtype}: NaN reaches other queries than those joined to it."
            )
    return len(cases)


# Of each kind one, with blocks of all sizes.
STRUCTURED = (
    "no edges", "complete", "causal, aligned at the end", "causal cliques of labels", "one long row", "window",
    "window of 33", "unbounded, dilated", "ragged windows", "grid", "even kernel, shifted", "three axes", "four axes",
)  # fmt: skip


def structured_contract(device: str) -> int:
    """The same for structured graphs; the number of cases that agreed."""
    plain = [(name, {}, torch.float32) for name in STRUCTURED]
    everything = {"bias": "QSH", **test_structured_attention.EVERYTHING}
    cases = plain + [(name, everything, torch.float32) for name in STRUCTURED]
    for name in ("causal cliques of labels", "window of 33", "grid"):
        cases += [(name, {**everything, "bias": "1SH"}, dtype) for dtype in DTYPES]
        cases += [(name, {"dim": 64}, torch.float16)]
    cases += [(name, {"dim": 64}, dtype) for name in ("complete", "causal") for dtype in HALVES]
    for name, options, dtype in cases:
        graph = test_structured_attention.GRAPHS[name]
        there = graph.to(device)

        def operator(case, operands, there=there) -> tuple[Tensor, Tensor]:
            moved = {name: x.to(device) for name, x in operands.items()}
            out, lse = graph_attention(**moved, graph=there, **case.settings, return_lse=True)
            return out.cpu(), lse.cpu()

        def without_lse(case, operands, operator=operator, there=there) -> tuple[Tensor, Tensor]:
            """The output as it comes where lse is not asked for: of complete graphs, by flash attention."""
            moved = {name: x.to(device) for name, x in operands.items()}
            out = graph_attention(**moved, graph=there, **case.settings)
            return out.cpu(), operator(case, operands)[1]

        case = test_structured_attention.draw(graph, dtype=dtype, **options)
        try:
            test_structured_attention.assert_agrees(graph, case, operators=[operator, without_lse])
        except AssertionError as error:
            raise AssertionError(f"{name}, {options}, {dtype}: {error}") from error
    return len(cases)


def repeats(device: str, times: int = 10) -> None:
    """Same inputs, same bits: values and gradients; and the dropout that the CPU draws."""
    case = power_law(20_000, 400_000, device)
    graph = SparseGraph.from_edge_index(case.edge_index, 20_000)
    window = WindowGraph(20_000, 64).to(device)
    inputs = [
        torch.randn(20_000, 8, 16, device=device, dtype=torch.float16).requires_grad_() for _ in range(3)
    ]
    flowing = torch.randn_like(inputs[0])

    def run() -> list[Tensor]:
        found = []
        for each in (graph, window):
            out = graph_attention(*inputs, each)
            found += [out.detach(), *torch.autograd.grad(out, inputs, flowing)]
        return found

    first = run()
    for _ in range(times):
        for x, y in zip(first, run()):
            if not torch.equal(x, y):
                raise AssertionError("Two runs differ in their bits.")
    arguments = (
        graph.rowptr, graph.col, graph.edge_id, graph.colptr, graph.row, graph.edge_id_t, None, None, None,
        torch.tensor([2**61 + 7], device=device), 0.25, 0.0, 0.5, False,
    )  # fmt: skip
    query, key, _ = (x.detach().float()[None] for x in inputs)
    value = torch.ones(1, 20_000, 8, 1, device=device)
    here = torch.ops.graphattn.sparse_attention(query, key, value, *arguments)[0]
    there = [x.cpu() if isinstance(x, Tensor) else x for x in (query, key, value, *arguments)]
    torch.testing.assert_close(
        here.cpu(), torch.ops.graphattn.sparse_attention(*there)[0], rtol=1e-4, atol=1e-4
    )


def captured(device: str) -> None:
    """A CUDA graph of forward and backward follows its inputs, the graph's own tensors among them.

    Of too few edges for windows, which a CUDA graph does not have.
    """
    cases = [power_law(5_000, 60_000, device, seed=seed) for seed in range(2)]
    graphs = [SparseGraph.from_edge_index(case.edge_index, 5_000) for case in cases]
    graph = graphs[0].to(device)
    names = ("rowptr", "col", "edge_id", "colptr", "row", "edge_id_t")
    graph = SparseGraph(*(getattr(graph, name).clone() for name in names))
    inputs = [torch.randn(5_000, 4, 32, device=device).requires_grad_() for _ in range(3)]

    def run(graph: SparseGraph) -> list[Tensor]:
        out = graph_attention(*inputs, graph)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(graph)
    torch.cuda.current_stream().wait_stream(stream)
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        results = run(graph)
    for name in names:
        getattr(graph, name).copy_(getattr(graphs[1], name))
    recording.replay()
    for x, y in zip(results, run(graphs[1])):
        if not torch.equal(x, y):
            raise AssertionError("A replayed CUDA graph differs from the call.")


# The cases.


def power_law(num_nodes: int, num_edges: int, device: str, seed: int = 0) -> Case:
    """As `benchmarks.cases.power_law`, drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(num_edges // 2, generator=generator, device=device)
    rank = (num_nodes * uniform**2.5).long().clamp_(max=num_nodes - 1)
    cited = torch.randperm(num_nodes, generator=generator, device=device)[rank]
    citing = torch.randint(num_nodes, (num_edges // 2,), generator=generator, device=device)
    edge_index = torch.stack([torch.cat([citing, cited]), torch.cat([cited, citing])])
    return Case(edge_index, num_nodes, num_nodes)


def mesh(device: str, num_keys: int = 542_080, num_queries: int = 40_962) -> Case:
    """Every grid point sends to the three nodes of a coarser mesh that it lies between."""
    key = torch.arange(num_keys, device=device).repeat_interleave(3)
    query = (key * num_queries // num_keys + torch.arange(3, device=device).repeat(num_keys)) % num_queries
    return Case(torch.stack([key, query]), num_keys, num_queries, features=16)


def molecules(device: str, count: int = 4096) -> Case:
    """Rings of 18 atoms: every atom has two neighbours, as most in a molecule have."""
    atom = torch.arange(18 * count, device=device)
    following = atom // 18 * 18 + (atom + 1) % 18
    edge_index = torch.stack([torch.cat([atom, following]), torch.cat([following, atom])])
    return Case(edge_index, 18 * count, 18 * count)


def structured(graph: Graph, device: str, mask: Callable[[Tensor, Tensor], Tensor]) -> Case:
    graph = graph.to(device)
    return Case(graph.to_edge_index(), graph.num_keys, graph.num_queries, graph=graph, mask=mask)


def window(device: str, length: int, radius: int) -> Case:
    return structured(WindowGraph(length, radius), device, lambda i, j: (i - j).abs() <= radius)


def grid(device: str, side: int, radius: int) -> Case:
    def near(i: Tensor, j: Tensor) -> Tensor:
        return ((i // side - j // side).abs() <= radius) & ((i % side - j % side).abs() <= radius)

    return structured(GridGraph((side, side), radius), device, near)


def complete(device: str, nodes: int) -> Case:
    return structured(CompleteGraph(nodes), device, lambda i, j: (i >= 0) & (j >= 0))


def cliques(device: str, count: int) -> Case:
    """Of 10 to 60 nodes."""
    sizes = torch.randint(10, 61, (count,), generator=torch.Generator().manual_seed(0))
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    label = torch.arange(count).repeat_interleave(sizes).to(device)
    return structured(CompleteGraph.from_ptr(ptr), device, lambda i, j: label[i] == label[j])


HALF, FULL = torch.float16, torch.float32
# The case, and its (heads, dim, dtype).
CASES: dict[str, tuple[Callable[[str], Case], list[tuple[int, int, torch.dtype]]]] = {
    "arxiv-like": (
        lambda device: power_law(169_343, 2_400_000, device),
        [(8, 16, HALF), (8, 16, FULL), (4, 64, HALF)],
    ),
    "products-like": (lambda device: power_law(2_450_000, 124_000_000, device), [(8, 16, HALF)]),
    "reddit-like": (lambda device: power_law(233_000, 115_000_000, device), [(8, 16, HALF), (1, 128, HALF)]),
    "mesh": (mesh, [(16, 64, HALF)]),
    "molecules": (molecules, [(8, 16, HALF)]),
    "window 65536 ±16": (lambda device: window(device, 65_536, 16), [(8, 64, HALF)]),
    "window 8192 ±128": (lambda device: window(device, 8_192, 128), [(8, 64, HALF), (8, 64, FULL)]),
    "grid 64x64 7x7": (lambda device: grid(device, 64, 3), [(8, 32, HALF)]),
    "complete 4096": (lambda device: complete(device, 4_096), [(8, 64, HALF)]),
    "cliques of 10-60": (lambda device: cliques(device, 256), [(8, 16, HALF)]),
}


# The peers: from a case and operands to a step that returns the output, and the edge tensors it holds at its peak.


def _graphattn(case: Case, inputs: list[Tensor], compiled: Callable) -> Callable[[], Tensor]:
    if case.graph is None:
        return _listed(case, inputs, compiled)
    return lambda: graph_attention(*inputs, case.graph)


def _listed(case: Case, inputs: list[Tensor], compiled: Callable) -> Callable[[], Tensor]:
    graph = SparseGraph.from_edge_index(case.edge_index, size=(case.num_keys, case.num_queries))
    features = dict(zip(("edge_attr", "edge_projection"), inputs[3:]))
    return lambda: graph_attention(*inputs[:3], graph, **features)


def _edge_wise(query: Tensor, key: Tensor, value: Tensor, edge_index: Tensor, *features: Tensor) -> Tensor:
    """What PyG's `TransformerConv` does with edge features: one more row per edge and head."""
    if not features:
        return _message_passing(query, key, value, edge_index)
    term = torch.einsum("ef,hfd->ehd", *features)
    every = torch.arange(edge_index.size(1), device=edge_index.device)
    key_j, value_j = (x.index_select(0, edge_index[0]) + term for x in (key, value))
    return _message_passing(query, key_j, value_j, torch.stack([every, edge_index[1]]))


def _pyg(case: Case, inputs: list[Tensor], compiled: Callable) -> Callable[[], Tensor]:
    return lambda: _edge_wise(*inputs[:3], case.edge_index, *inputs[3:])


def _pyg_compiled(case: Case, inputs: list[Tensor], compiled: Callable) -> Callable[[], Tensor]:
    run = compiled(_edge_wise)
    return lambda: run(*inputs[:3], case.edge_index, *inputs[3:])


def _flex(case: Case, inputs: list[Tensor], compiled: Callable) -> Callable[[], Tensor]:
    near = case.mask
    if near is None:
        raise NotImplementedError("graphs only as dense blocks")
    mask = compiled(create_block_mask)(
        lambda b, h, i, j: near(i, j),
        None, None, case.num_queries, case.num_keys, device=str(case.edge_index.device),
    )  # fmt: skip
    run = compiled(flex_attention)
    return lambda: run(*(x.transpose(0, 1)[None] for x in inputs), block_mask=mask)[0].transpose(0, 1)


def _sdpa(case: Case, inputs: list[Tensor], compiled: Callable) -> Callable[[], Tensor]:
    if case.mask is None or case.num_queries > 16_384:
        raise NotImplementedError("a mask of nodes by nodes")
    at = torch.arange(case.num_queries, device=case.edge_index.device)
    mask = (
        None
        if isinstance(case.graph, CompleteGraph) and case.graph.ptr is None
        else case.mask(at[:, None], at)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(*(x.transpose(0, 1)[None] for x in inputs), attn_mask=mask)[0].transpose(0, 1)


PROVIDERS = {
    "graphattn": (_graphattn, 0),
    "graphattn_listed": (_listed, 0),
    "pyg": (_pyg, 9),
    "pyg_compiled": (_pyg_compiled, 5),
    "flex": (_flex, 0),
    "sdpa": (_sdpa, 0),
}


# The measuring.


def milliseconds(steps: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Times of each step, in turn, for so many seconds or 50 rounds, three at least."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    begin = time.perf_counter()
    for turn in range(50):
        if turn >= 3 and time.perf_counter() - begin > seconds:
            break
        for name, step in steps.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def bandwidth(device: str) -> float:
    """Bytes a second of a copy, read and written."""
    x = torch.empty(2**30, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    times = milliseconds({"copy": lambda: (y.copy_(x),)}, 1.0)["copy"]
    return 2 * x.numel() / (min(times) / 1e3)


def least_bytes(case: Case, row: int, feature_row: int, heads: int, mode: str) -> tuple[int, int]:
    """Bytes to read if every row is read once, and if it is read for every edge."""
    edges = case.edge_index.size(1)
    ids = 4 * edges + feature_row * edges
    once = (2 * case.num_keys + 2 * case.num_queries) * row + ids
    edge = (2 * row + 4 + feature_row) * edges
    if mode == "forward":
        return once, edge
    return 3 * once, 3 * edge + 8 * heads * edges


def measure(name: str, heads: int, dim: int, dtype: torch.dtype, case: Case, speed: float) -> Iterator[dict]:
    device = case.edge_index.device
    torch.manual_seed(0)
    shapes = [(case.num_queries, heads, dim), *[(case.num_keys, heads, dim)] * 2]
    if case.features:
        shapes += [(case.edge_index.size(1), case.features), (heads, case.features, dim)]
    inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    flowing = torch.randn(case.num_queries, heads, dim, device=device, dtype=dtype)
    edges, size = case.edge_index.size(1), dtype.itemsize
    fixed = {
        "case": name, "nodes": case.num_keys + (case.num_queries if case.features else 0), "edges": edges,
        "heads": heads, "dim": dim, "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    for mode in ("forward", "forward+backward"):
        steps: dict[str, Step] = {}
        rows: dict[str, dict] = {}
        exact: tuple[Tensor, ...] = ()
        torch.compiler.reset()
        for provider, (make, edge_tensors) in PROVIDERS.items():
            rows[provider] = {**fixed, "mode": mode, "provider": provider}
            try:
                needed = edge_tensors * edges * heads * dim * size
                if needed > 0.8 * torch.cuda.mem_get_info()[0]:
                    raise NotImplementedError(f"needs about {needed / 1e9:.0f} GB")
                if provider == "graphattn_listed" and case.graph is None:
                    raise NotImplementedError("as graphattn")
                attend = make(case, inputs, lambda function: torch.compile(function, dynamic=False))

                def step(attend=attend, mode=mode) -> tuple[Tensor, ...]:
                    if mode == "forward":
                        with torch.no_grad():
                            return (attend(),)
                    out = attend()
                    return out.detach(), *torch.autograd.grad(out, inputs, flowing)

                result = step()
                exact = exact or result
                error = largest_error(result, exact)
                rows[provider]["error"] = error
                if not error <= TOLERANCE[dtype]:
                    raise NotImplementedError("disagrees")
                del result
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                step()
                rows[provider]["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
                steps[provider] = step
            except (NotImplementedError, torch.cuda.OutOfMemoryError) as error:
                rows[provider]["note"] = str(error).splitlines()[0]
        del exact
        times = milliseconds(steps, 3.0)
        once, edge = least_bytes(case, heads * dim * size, case.features * size, heads, mode)
        for provider, taken in times.items():
            ms = median(taken)
            ratio = median(a / b for a, b in zip(times["graphattn"], taken))
            floors = {"floor_once": once / speed * 1e3 / ms, "floor_edge": edge / speed * 1e3 / ms}
            rows[provider] |= {"ms": ms, "ratio": ratio, **floors}
        yield from rows.values()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--no-contract", action="store_true", help="measure without checking first")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    device = "cuda"
    if not options.no_contract:
        begin = time.perf_counter()
        agreed = contract(device)
        repeats(device)
        captured(device)
        print(
            f"contract: {agreed} cases agree with the oracle, runs repeat bit by bit, CUDA graphs follow their inputs"
        )
        print(f"({time.perf_counter() - begin:.0f} s)", flush=True)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    origin = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    speed = bandwidth(device)
    print(f"{origin['device']}: {speed / 1e12:.2f} TB/s")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for name in options.case:
            make, shapes = CASES[name]
            case = make(device)
            for heads, dim, dtype in shapes:
                if case.graph is None and not case.features:
                    graph = SparseGraph.from_edge_index(
                        case.edge_index, size=(case.num_keys, case.num_queries)
                    )
                    share = share_in_windows(graph, dtype)
                    print(f"{name}: {share:.0%} of the edges in windows", flush=True)
                    if name == "reddit-like" and share == 0.0:
                        raise AssertionError("The Reddit-like graph must have windows.")
                    del graph
                for row in measure(name, heads, dim, dtype, case, speed):
                    numbers = {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()}
                    writer.writerow({**numbers, **origin})
                    file.flush()
                    shown = (numbers.get(key, "") for key in ("ms", "ratio", "floor_edge", "peak_mb", "note"))
                    print(name, heads, dim, row["dtype"], row["mode"], row["provider"], *shown, flush=True)
            del case
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
