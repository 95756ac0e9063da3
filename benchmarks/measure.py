"""Clock, memory and the floor: how one number is taken."""

from __future__ import annotations

import ctypes
import gc
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

_SAMPLE_SECONDS = 0.02  # shorter calls are repeated until one sample takes this long


def interleaved_times(
    steps: dict[str, Callable[[], object]], *, repeats: int, budget: float
) -> dict[str, list[tuple[float, float]]]:
    """(Wall, CPU) seconds of one call of each step, sampled in turn so that a slow moment hits all alike.

    Sample r of one step belongs with sample r of any other: compare them in pairs. Every second round runs
    backwards, so that no step always follows the same neighbour. CPU time is that of all threads of the
    process, which on one thread is the time per core.

    Args:
        steps: what to call, by name; each has run before.
        repeats: rounds at most.
        budget: seconds after which no further round begins; three rounds are always made.
    """
    calls = {}
    for name, step in steps.items():
        begin = time.perf_counter()
        step()
        calls[name] = max(1, math.ceil(_SAMPLE_SECONDS / (time.perf_counter() - begin)))

    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names, start = list(steps), time.perf_counter()
    for r in range(repeats):
        if r >= 3 and time.perf_counter() - start > budget:
            break
        for name in names if r % 2 == 0 else reversed(names):
            step, n = steps[name], calls[name]
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(n):
                step()
            samples[name].append(((time.perf_counter() - wall) / n, (time.process_time() - cpu) / n))
    return samples


def reset_peak_memory() -> int:
    """Starts a new high-water mark of this process's resident memory; bytes resident now.

    Linux keeps the mark, so no moment is missed and whatever allocates is seen: torch, NumPy, Numba, MKL.
    What the allocator holds in reserve goes back to the system first, or it would be used again unseen.
    Pages are counted lazily, so trust a difference to half a megabyte.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> int:
    """Most bytes that were resident since `reset_peak_memory`."""
    return _status("VmHWM")


def peak_extra_memory(step: Callable[[], object]) -> int:
    """Bytes by which resident memory rises at most while `step` runs, its result included.

    Run `step` once before: what only the first call allocates is not counted.
    """
    before = reset_peak_memory()
    result = step()
    extra = peak_memory() - before
    del result
    return max(0, extra)


def _status(field: str) -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(field))
    return int(line.split()[1]) * 1024


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(s for s in lines if s.startswith("MemAvailable")).split()[1]) * 1024


def bytes_moved(num_edges: int, heads: int, dim: int, mode: str) -> int:
    """Float32 bytes that the operator reads per call if every edge fetches its rows.

    Forward: a key row, a value row and an int32 id. Backward: the same again by query (dq), then by key a
    query row, an output-gradient row and an id (dk, dv) with the two softmax statistics of each head.
    """
    rows = 2 * heads * dim * 4 + 4
    return num_edges * (rows if mode == "forward" else 3 * rows + 8 * heads)


def gather_bandwidth(edge_index: Tensor, num_nodes: int, width: int, *, threads: int) -> float:
    """Bytes per second at which two rows of `width` float32 and an id can be read per edge, in query order.

    It does nothing but read: the edges are halved among the threads and a row is summed as it arrives. Best
    of five, for it stands for what the machine can do.
    """
    order = edge_index[1].argsort(stable=True)
    index = edge_index[0, order].int().numpy()
    first, second = torch.ones(2, num_nodes, width).numpy()  # torch's allocator: the same kind of pages
    ends = np.linspace(0, len(index), threads + 1).astype(np.int64)
    _sum_rows(index, first, second, 0, 1)

    best = math.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            list(pool.map(lambda a, b: _sum_rows(index, first, second, a, b), ends[:-1], ends[1:]))
            best = min(best, time.perf_counter() - begin)
    return len(index) * (2 * width * 4 + 4) / best


@numba.njit(nogil=True, fastmath=True, cache=True)
def _sum_rows(index, first, second, begin, end):
    total = np.float32(0.0)
    for e in range(begin, end):
        row = index[e]
        for c in range(first.shape[1]):
            total += first[row, c] + second[row, c]
    return total


def paired_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the rounds of our time divided by theirs."""
    return median(a / b for a, b in zip(ours, theirs))


def growth_exponent(sizes: list[int], seconds: list[list[float]]) -> float:
    """Exponent p of time ∝ size^p: in each round the least-squares slope of the logarithms, then the median.

    `seconds[s][r]` is the time of size s in round r.
    """
    x = np.log(sizes) - np.log(sizes).mean()
    return median(float(x @ np.log(taken) / (x @ x)) for taken in zip(*seconds))


def largest_error(results: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> float:
    """Largest difference between (output, *gradients) of two, relative to the largest entry of each tensor.

    A gradient's largest entry counts as at least a hundredth of that of all gradients: the gradient of a
    key's bias is zero in exact arithmetic, and rounding errors are not to be compared with themselves.
    Infinite for NaN or for a tensor that is missing.
    """
    if len(results) != len(reference):
        return math.inf
    difference = torch.stack([(a - b).abs().max() for a, b in zip(results, reference)])
    scale = torch.stack([b.abs().max() for b in reference])
    if len(scale) > 1:
        scale[1:] = scale[1:].clamp(min=scale[1:].max() / 100)
    error = float((difference / scale).max())
    return error if math.isfinite(error) else math.inf
