"""Measures the operator and the layer beside their peers and appends the rows to a CSV.

    python -m benchmarks.run                              every case, 8 heads of 16, all modes: 25 minutes
    python -m benchmarks.run --dims 8x8 4x64 1x128 --mode forward forward+backward               35 minutes
    python -m benchmarks.run --threads 1 --provider graphattn pyg_compiled_1t   time per core, 15 minutes
    python -m benchmarks.run --case large --dims 4x16 --mode layer              100 million edges, 5 minutes
    python -m benchmarks.run --case structured      complete graphs, windows, grids, ragged batches

(estimates for two otherwise idle cores; most of it is compiling and waiting for the peers). Structured graphs
have a file of their own, and more peers with `pip install local-attention`.
A configuration is a case, a shape, a mode and a number of threads. Its providers run in one process and must
first agree with graphattn in the output and in every gradient; if one does not, the configuration gets no
number and the command fails. Ratios are graphattn's time over the provider's, the median over rounds in which
each takes its turn: below 1 graphattn is faster. A configuration that is in the file already is left alone
unless `--overwrite` is given, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import math
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numba
import torch
import torch_geometric
from torch import Tensor
from tqdm import tqdm

from benchmarks.cases import CASES, GROUPS, STRUCTURED, EdgeList
from benchmarks.measure import (
    available_memory,
    bytes_moved,
    gather_bandwidth,
    interleaved_times,
    largest_error,
    paired_ratio,
    peak_extra_memory,
    peak_memory,
    reset_peak_memory,
)
from benchmarks.providers import PROVIDERS, Provider

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphattn import Graph

    # One call of what is measured, returning (output, *gradients).
    Step = Callable[[], tuple[Tensor, ...]]

MODES = ("forward", "forward+backward", "layer", "layer+edges")  # layers are for listed edges
EDGE_FEATURES = 16
# Float32 sums over thousands of terms in different orders, relative to the largest entry.
TOLERANCE = 5e-5
RESULTS = Path(__file__).parent / "results" / "sparse_cpu.csv"
STRUCTURED_RESULTS = RESULTS.with_name("structured_cpu.csv")
BASELINE = next(iter(PROVIDERS))
ALONE = "no peer to agree with"

# Where, with what and when a row was measured: `machine_and_versions`.
ORIGIN = ("cpu", "cores", "torch", "pyg", "numba", "python", "commit", "date")

COLUMNS = (
    "case",
    "nodes",
    "edges",
    "heads",
    "dim",
    "mode",
    "threads",
    "provider",
    "ms",  # wall time of one call, median
    "cpu_ms",  # CPU time of all threads, median
    "ratio",  # graphattn's wall time over the provider's, median over rounds
    "cpu_ratio",
    "extra_mb",  # resident memory that a call adds at its peak, in 1e6 bytes
    "peak_mb",  # resident memory of the whole process at the peak of the first call, graph building included
    "floor_ms",  # bytes that must be read over the bandwidth of a bare gather
    "rounds",
    "error",  # largest difference from graphattn
    "note",  # why there is no number, or what to know about it
    *ORIGIN,
)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    providers = list(dict.fromkeys([BASELINE, *options.provider]))
    cases = list(dict.fromkeys(name for case in options.case for name in GROUPS.get(case, [case])))
    shapes = {name: options.dims or [(CASES[name].heads, CASES[name].dim)] for name in cases}
    modes = {
        name: [mode for mode in options.mode if name not in STRUCTURED or not mode.startswith("layer")]
        for name in cases
    }

    origin = machine_and_versions()
    failed = False
    total = sum(len(shapes[name]) * len(modes[name]) for name in cases)
    progress = tqdm(total=total, unit="configuration", disable=None)
    for case in cases:
        graph = None
        out = options.out or (STRUCTURED_RESULTS if case in STRUCTURED else RESULTS)
        done = set() if options.overwrite else {_configuration(row) for row in read_rows(out)}
        for (heads, dim), mode in itertools.product(shapes[case], modes[case]):
            progress.set_description(f"{case} {heads}x{dim} {mode}")
            progress.update()
            fixed = {"case": case, "heads": heads, "dim": dim, "mode": mode, "threads": options.threads}
            if _configuration(fixed) in done:
                tqdm.write(f"{case} {heads}x{dim} {mode} is in {out} already")
                continue
            if graph is None:
                try:
                    graph = CASES[case].build()
                except FileNotFoundError as error:
                    tqdm.write(f"{case} skipped: {error}")
                    break
            measured = measure(graph, heads, dim, mode, providers, options, CASES[case].leading)
            new = add_rows(out, [{**origin, **fixed, **row} for row in measured])
            for row in new:
                tqdm.write(_line(row))
            failed |= any(row["note"].startswith("disagree") for row in new)
    return int(failed)


def measure(
    graph: EdgeList | Graph,
    heads: int,
    dim: int,
    mode: str,
    providers: list[str],
    options: argparse.Namespace,
    leading: tuple[int, ...] = (),
) -> list[dict]:
    """The rows of one configuration, one per provider that can do it, the baseline first."""
    torch._dynamo.reset()
    rows: dict[str, dict] = {
        name: {"nodes": graph.num_queries, "edges": graph.num_edges, "provider": name, "note": ""}
        for name in providers
        if PROVIDERS[name].takes(graph) and _has(PROVIDERS[name], mode)
    }
    is_layer = mode.startswith("layer")
    step_of = (
        _layer_steps(graph, heads, dim, mode)
        if is_layer
        else operator_steps(graph, heads, dim, mode, leading)
    )

    steps: dict[str, Step] = {}
    reference: tuple[Tensor, ...] = ()
    for name, row in rows.items():
        provider = PROVIDERS[name]
        # and about eight tensors of the nodes: output, gradients, in a layer also the projections
        needed = provider.memory(graph, heads, dim) + 8 * graph.num_queries * heads * dim * 4
        needed *= math.prod(leading)
        if needed > available_memory():
            row["note"] = f"skipped: needs about {needed / 1e9:.0f} GB"
            continue
        reset_peak_memory()
        try:
            step = step_of(provider)
        except ImportError as error:
            row["note"] = f"skipped: {error}"
            continue
        result = step()  # also the warm-up: compilation happens here
        row["peak_mb"] = f"{peak_memory() / 1e6:.0f}"
        reference = reference or result
        row["error"] = f"{largest_error(result, reference):.1e}"
        del result
        if not float(row["error"]) <= TOLERANCE:
            row["note"] = f"disagrees with {BASELINE} by {row['error']}"
        steps[name] = step
    if BASELINE not in steps:
        return list(rows.values())

    if wrong := [name for name in steps if rows[name]["note"]]:
        for name in steps:
            rows[name]["note"] = rows[name]["note"] or f"disagreement: see {', '.join(wrong)}"
        return list(rows.values())
    if len(steps) == 1:
        rows[BASELINE]["note"] = ALONE

    reference = ()
    for name, step in steps.items():
        rows[name]["extra_mb"] = f"{peak_extra_memory(step) / 1e6:.2f}"
    if not is_layer and isinstance(graph, EdgeList):
        bandwidth = gather_bandwidth(*graph, heads * dim, threads=options.threads)
        rows[BASELINE]["floor_ms"] = f"{bytes_moved(graph.num_edges, heads, dim, mode) / bandwidth * 1e3:.3f}"
    samples = interleaved_times(steps, repeats=options.repeats, budget=options.budget)
    for name, taken in samples.items():
        wall, cpu = zip(*taken)
        our_wall, our_cpu = zip(*samples[BASELINE])
        rows[name] |= {
            "ms": f"{median(wall) * 1e3:.3f}",
            "cpu_ms": f"{median(cpu) * 1e3:.3f}",
            "ratio": f"{paired_ratio(our_wall, wall):.3f}",
            "cpu_ratio": f"{paired_ratio(our_cpu, cpu):.3f}",
            "rounds": len(taken),
        }
    return list(rows.values())


def _has(provider: Provider, mode: str) -> bool:
    if mode.startswith("layer"):
        return provider.layer is not None
    return mode == "forward" or provider.backward


def operator_steps(
    graph: EdgeList | Graph, heads: int, dim: int, mode: str, leading: tuple[int, ...] = ()
) -> Callable[[Provider], Step]:
    """From a provider to one call of its operator, in all of them on the same normal operands."""
    generator = torch.Generator().manual_seed(0)
    nodes = graph.num_queries, graph.num_keys, graph.num_keys, graph.num_queries
    query, key, value, grad = (torch.randn(*leading, n, heads, dim, generator=generator) for n in nodes)
    inputs = tuple(x.requires_grad_(mode == "forward+backward") for x in (query, key, value))

    def step_of(provider: Provider) -> Step:
        attention = provider.operator(graph)

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (attention(*inputs),)

        def forward_and_backward() -> tuple[Tensor, ...]:
            out = attention(*inputs)
            return (out.detach(), *torch.autograd.grad(out, inputs, grad))

        return forward if mode == "forward" else forward_and_backward

    return step_of


def _layer_steps(graph: EdgeList, heads: int, dim: int, mode: str) -> Callable[[Provider], Step]:
    """Training steps of one layer on features as wide as its output: forward, loss, backward, SGD."""
    edge_index, num_nodes = graph
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(num_nodes, heads * dim, generator=generator) for _ in range(2))
    edge_dim = EDGE_FEATURES if mode == "layer+edges" else None
    edge_attr = torch.randn(edge_index.size(1), edge_dim, generator=generator) if edge_dim else None

    def step_of(provider: Provider) -> Step:
        torch.manual_seed(0)  # the same parameters for every provider
        layer = provider.layer(heads * dim, dim, heads=heads, edge_dim=edge_dim)
        parameters = list(layer.parameters())
        optimizer = torch.optim.SGD(parameters, lr=1e-3)

        def training_step() -> tuple[Tensor, ...]:
            optimizer.zero_grad()
            out = layer(x, edge_index, edge_attr)
            torch.nn.functional.mse_loss(out, target).backward()
            optimizer.step()
            return (out.detach(), *(p.grad for p in parameters))

        return training_step

    return step_of


def _configuration(row: dict) -> tuple[str, ...]:
    return tuple(str(row[column]) for column in ("case", "heads", "dim", "mode", "threads"))


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a results file; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add_rows(path: Path, rows: list[dict]) -> list[dict]:
    """Writes rows to a file in place of those of the same configurations; returns them as written."""
    new = [{column: str(row.get(column, "")) for column in COLUMNS} for row in rows]
    replaced = {_configuration(row) for row in new}
    write_rows(path, [row for row in read_rows(path) if _configuration(row) not in replaced] + new)
    return new


def write_rows(path: Path, rows: list[dict[str, str]], columns: Sequence[str] = COLUMNS) -> None:
    """Replaces the file in one move, so that an interruption leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".partial")
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(new, path)


def _line(row: dict) -> str:
    name = f"{row['case']:12} {row['heads']}x{row['dim']:<4}{row['mode']:17}{row['provider']:16}"
    if not row["ms"]:
        return f"{name} {row['note']}"
    ratios = f"ratio {row['ratio']}  cpu {row['cpu_ratio']}"
    return f"{name}{row['ms']:>11} ms  {ratios}  {row['extra_mb']} MB  {row['note']}"


def machine_and_versions(sources: Sequence[str] = ("../graphattn", ".")) -> dict[str, str | int]:
    """The columns that say where and with what a row was measured; changes to the sources are told."""
    cpuinfo = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if cpuinfo.exists():
        names = [
            s.split(":")[1].strip() for s in cpuinfo.read_text().splitlines() if s.startswith("model name")
        ]
        model = names[0] if names else model
    changes = _git("status", "--porcelain", "--", *sources, ":!results")
    return {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "torch": torch.__version__,
        "pyg": torch_geometric.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if changes else ""),
        "date": datetime.date.today().isoformat(),
    }


def _git(*arguments: str) -> str:
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _options(arguments: list[str] | None) -> argparse.Namespace:
    def dims(text: str) -> tuple[int, int]:
        heads, dim = text.split("x")
        return int(heads), int(dim)

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    cases = [*GROUPS, *CASES]
    parser.add_argument(
        "--case", nargs="+", choices=cases, default=["sparse"], metavar="CASE", help=", ".join(cases)
    )
    parser.add_argument(
        "--provider",
        nargs="+",
        choices=PROVIDERS,
        default=list(PROVIDERS),
        metavar="PROVIDER",
        help=", ".join(PROVIDERS),
    )
    parser.add_argument(
        "--dims",
        nargs="+",
        type=dims,
        metavar="HxD",
        help="heads and dim of a head, by default the case's own",
    )
    parser.add_argument(
        "--mode", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=", ".join(MODES)
    )
    parser.add_argument("--repeats", type=int, default=15, help="rounds per configuration, at most")
    parser.add_argument(
        "--budget", type=float, default=10.0, help="seconds per configuration, three rounds at least"
    )
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--out", type=Path, help=f"by default {RESULTS.name} or {STRUCTURED_RESULTS.name} in {RESULTS.parent}"
    )
    parser.add_argument("--overwrite", action="store_true", help="measure again what the file has")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # torch.compile says that its own defaults could be better, sparse CSR that it is in beta
    warnings.filterwarnings("ignore")
    sys.exit(main())
