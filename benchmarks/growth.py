"""How the time of a window grows with the length of its sequence: linear time has the exponent 1.

    python -m benchmarks.growth                 ±64, 4,096 to 262,144 nodes, 8 heads of 64; 10 GB of memory

Every length must first agree with chunked SDPA. The lengths take their turns within a round, so that a slow
moment hits all of them; each round gives one exponent, the slope of log time over log length, and the median
counts. The rows go beside those of `benchmarks.run`, one for each length.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from benchmarks.measure import growth_exponent, interleaved_times, largest_error, peak_extra_memory
from benchmarks.providers import PROVIDERS
from benchmarks.run import (
    BASELINE,
    STRUCTURED_RESULTS,
    TOLERANCE,
    add_rows,
    machine_and_versions,
    operator_steps,
)
from graphattn import WindowGraph

if TYPE_CHECKING:
    from collections.abc import Callable

PEER = "chunked"  # to agree with; not timed
MODES = ("forward", "forward+backward")
LENGTHS = [2**k for k in range(12, 19)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="L", help="two at least")
    parser.add_argument("--radius", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--repeats", type=int, default=7, help="rounds, at most")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, three rounds at least")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=STRUCTURED_RESULTS)
    options = parser.parse_args(arguments)
    lengths = sorted(set(options.lengths))
    if len(lengths) < 2:
        parser.error("--lengths must name two different lengths at least")

    torch.set_num_threads(options.threads)
    for mode in options.mode:
        rows = measure(lengths, mode, options)
        fixed = {"heads": options.heads, "dim": options.dim, "mode": mode, "threads": options.threads}
        rows = add_rows(options.out, [{**machine_and_versions(), **fixed, **row} for row in rows])
        for row in rows:
            print(
                f"{row['case']:22}{row['mode']:17}{row['ms']:>12} ms {row['extra_mb']:>10} MB  {row['note']}"
            )
        if any(row["note"].startswith("disagrees") for row in rows):
            return 1
    return 0


def measure(lengths: list[int], mode: str, options: argparse.Namespace) -> list[dict]:
    """One row for each length, the exponent in the note of the last; no times if one disagrees."""
    steps: dict[str, Callable] = {}
    rows = []
    for length in lengths:
        graph = WindowGraph(length, options.radius)
        step_of = operator_steps(graph, options.heads, options.dim, mode)
        case = f"growth_{length}_{options.radius}"
        steps[case] = step_of(PROVIDERS[BASELINE])
        error = largest_error(steps[case](), step_of(PROVIDERS[PEER])())
        row = {"case": case, "nodes": length, "edges": graph.num_edges, "provider": BASELINE}
        note = "" if error <= TOLERANCE else f"disagrees with {PEER} by {error:.1e}"
        rows.append({**row, "error": f"{error:.1e}", "note": note})
    if any(row["note"] for row in rows):
        return rows

    for row in rows:
        row["extra_mb"] = f"{peak_extra_memory(steps[row['case']]) / 1e6:.2f}"
    samples = interleaved_times(steps, repeats=options.repeats, budget=options.budget)
    walls = [[wall for wall, _ in samples[row["case"]]] for row in rows]
    for row, wall in zip(rows, walls):
        cpu = median(seconds for _, seconds in samples[row["case"]])
        row |= {"ms": f"{median(wall) * 1e3:.3f}", "cpu_ms": f"{cpu * 1e3:.3f}", "rounds": len(wall)}
    rows[-1]["note"] = f"exponent {growth_exponent(lengths, walls):.3f} from {lengths[0]} nodes"
    return rows


if __name__ == "__main__":
    sys.exit(main())
