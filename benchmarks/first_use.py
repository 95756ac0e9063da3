"""What the first use costs: imports, the first call ever (kernels are compiled) and that of a later process.

    python -m benchmarks.first_use

Every number is taken in a process of its own; the first call ever has an empty Numba cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from statistics import median

from tqdm import tqdm

_IMPORT = """
import time
begin = time.perf_counter()
import {module}
print(time.perf_counter() - begin)
"""

_CALLS = """
import time
import torch
import torch_geometric  # whoever calls has it loaded
import graphattn
edge_index = torch.randint(1000, (2, 20_000))
query, key, value = (torch.randn(1000, {heads}, {dim}, requires_grad=True) for _ in range(3))
begin = time.perf_counter()
graph = graphattn.SparseGraph.from_edge_index(edge_index, 1000)
out = graphattn.graph_attention(query, key, value, graph)
forward = time.perf_counter()
out.sum().backward()
print(forward - begin, time.perf_counter() - forward)
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_use", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="processes per import")
    options = parser.parse_args()

    imports: dict[str, list[float]] = {"torch_geometric": [], "graphattn": []}
    for _ in tqdm(range(options.repeats), desc="imports", disable=None):
        for module, seconds in imports.items():
            seconds += numbers_printed(_IMPORT.format(module=module))
    for module, seconds in imports.items():
        print(f"import {module:26}{median(seconds):8.2f} s")

    for heads, dim in ((8, 16), (3, 24)):  # a dim that has a kernel of its own, and one that has not
        with tempfile.TemporaryDirectory() as cache:
            for which in ("first call ever", "later process"):
                source = _CALLS.format(heads=heads, dim=dim)
                forward, backward = numbers_printed(source, NUMBA_CACHE_DIR=cache)
                name = f"{which}, {heads}x{dim}"
                print(
                    f"{name:33}{forward + backward:8.2f} s ({forward:.2f} forward, {backward:.2f} backward)"
                )


def numbers_printed(source: str, **environment: str) -> list[float]:
    """The numbers that `source` prints when it runs in a fresh interpreter."""
    command = [sys.executable, "-c", source]
    result = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    return [float(word) for word in result.stdout.split()]


if __name__ == "__main__":
    main()
