"""`python -m graphattn` prints what a bug report should say about an installation."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphattn import CompleteGraph, Graph, GridGraph, SparseGraph, WindowGraph, graph_attention

_PACKAGES = (
    "graphattn", "torch", "torch-geometric", "numba", "numpy", "scipy", "networkx", "triton", "transformers",
    "torchdiffeq", "matplotlib",
)  # fmt: skip
_CACHED: dict[str, Callable[[Any], Any]] = {  # what Numba compiles, and one function of each file
    "graphattn.graph": lambda module: module._counting_sort,
    "graphattn.kernels.sparse_cpu": lambda module: module._edge_kernel,
    "graphattn.kernels.blocks_cpu": lambda module: module._kernels(*module.LANES[torch.float32])[0],
    "graphattn.kernels.product_cpu": lambda module: module._kernel(*module.LANES[torch.float32]),
}


def report() -> str:
    """Versions, devices, threads, which kernel serves which graph, and the state of the kernel cache.

    What is missing is said in its place; nothing is compiled or downloaded.
    """
    sections = {
        "Versions": _versions,
        "Devices and threads": _devices,
        "Kernels": _kernels,
        "Kernel cache": _cache,
    }
    lines = []
    for title, section in sections.items():
        lines += [title, *(f"  {line}" for line in _tried(section)), ""]
    return "\n".join(lines)


def _tried(section: Callable[[], list[str]]) -> list[str]:
    """A part of the report that cannot be made must not take the others with it."""
    try:
        return section()
    except Exception as error:
        return [f"unknown: {type(error).__name__}: {' '.join(str(error).split())}"]


def _versions() -> list[str]:
    lines = [f"{'python':<16} {platform.python_version()} on {platform.platform()}"]
    for name in _PACKAGES:
        try:
            lines.append(f"{name:<16} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name:<16} not installed")
    return [*lines, f"{'this package':<16} {Path(__file__).parent}"]


def _devices() -> list[str]:
    lines = [f"cpu: {_cores()} cores, {torch.get_num_threads()} threads of PyTorch"]
    if "OMP_NUM_THREADS" in os.environ:
        lines[0] += f", OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    for device in _accelerators():
        lines += _tried(lambda device=device: [f"{device}: {_described(device)}"])
    return lines if len(lines) > 1 else [*lines, "no accelerator that PyTorch can use"]


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _accelerators() -> list[str]:
    found = torch.accelerator.current_accelerator(check_available=True)
    return [] if found is None else [f"{found.type}:{n}" for n in range(torch.accelerator.device_count())]


def _described(device: str) -> str:
    if not device.startswith("cuda"):
        return "an accelerator without kernels of graphattn"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor},"
        f" {properties.total_memory / 2**30:.0f} GiB"
    )


def _graphs() -> dict[str, Graph]:
    """One graph for each kernel that a kind may go to. The edges of the first are not sorted, which would compile."""
    ptr, ids = torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int32)
    return {
        "SparseGraph": SparseGraph(rowptr=ptr, colptr=ptr, col=ids, row=ids, edge_id_t=ids, edge_id=ids),
        "CompleteGraph": CompleteGraph(200),
        "CompleteGraph, cliques of 200": CompleteGraph.from_ptr(torch.tensor([0, 200, 400])),
        "CompleteGraph, cliques of 8": CompleteGraph.from_ptr(torch.arange(0, 201, 8)),
        "WindowGraph, radius 64": WindowGraph(200, 64),
        "WindowGraph, radius 8": WindowGraph(200, 8),
        "GridGraph": GridGraph((10, 20), 2),
    }


class _Operators(TorchDispatchMode):
    """The operators of graphattn that are called meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "graphattn":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _kernels() -> list[str]:
    lines = []
    for kind in ["cpu", *sorted({device.split(":")[0] for device in _accelerators()})]:
        for name, graph in _graphs().items():
            lines += [
                f"{kind:<5} {name:<30} {line}" for line in _tried(lambda k=kind, g=graph: [_kernel(k, g)])
            ]
    from graphattn.kernels.product_cpu import FASTER

    product = "graphattn.kernels.product_cpu" if FASTER else "torch.nn.functional.linear"
    return [*lines, f"{'cpu':<5} {'linear maps of layers':<30} {product}"]


def _kernel(kind: str, graph: Graph) -> str:
    """The operator that `graph_attention` calls, asked with tensors that hold no numbers."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Operators() as called:
        query: Tensor = torch.empty(graph.num_queries, 1, 8, device=kind)
        try:
            graph_attention(query, query, query, graph.to(kind))
        except NotImplementedError as error:
            return f"none: {error}"
    name = called.names[-1]
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, kind.upper()):
        return f"none: {name} has no body there"
    if kind == "cuda":
        import_module("graphattn.kernels.sparse_triton")  # which needs Triton
    return name


def _cache() -> list[str]:
    return [f"{name:<29} {line}" for name in _CACHED for line in _tried(lambda n=name: [_cached(n)])]


def _cached(name: str) -> str:
    kernel = _CACHED[name](import_module(name))
    if not kernel.stats.cache_path:
        return "none: no folder can be written, every process compiles anew. Set NUMBA_CACHE_DIR to one that can be."
    folder = Path(kernel.stats.cache_path)
    return f"{folder}, {'writable' if _is_writable(folder) else 'not writable'}, {_compiled(folder, kernel)}"


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _compiled(folder: Path, kernel: Any) -> str:
    """For how many kinds of arguments the cache holds each function of the file that `kernel` is in, as it is now."""
    source, files = kernel._cache._impl, kernel._cache._cache_file
    stem, tag = source.filename_base.split(".")[0], source.filename_base.rpartition(".")[2]
    counts = {}
    for file in sorted(folder.glob(f"{stem}.*.{tag}.nbi")):
        index = type(files)(folder, file.stem, files._source_stamp)._load_index()
        if index:
            counts[file.name.split("-")[0].rpartition(".")[2]] = len(index)
    return (
        "compiled: " + ", ".join(f"{name} {n}" for name, n in counts.items())
        if counts
        else "nothing compiled"
    )


if __name__ == "__main__":
    sys.stdout.write(report())
