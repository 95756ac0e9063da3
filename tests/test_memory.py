"""Memory: nothing of size edges × heads, neither kept for backward nor for a moment."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphattn import SparseGraph, graph_attention

ROOT = Path(__file__).parent.parent

# Linux keeps the highest resident size of a process and lets it be reset.
PEAK = """
import sys, torch
from graphattn import SparseGraph, graph_attention

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

def step(num_nodes, num_edges, heads, dim, edge_dim):
    target, source = torch.arange(num_edges) % num_nodes, torch.randint(num_nodes, (num_edges,))
    graph = SparseGraph.from_edge_index(torch.stack((source, target)), num_nodes)
    del source, target
    nodes = (num_nodes, heads, dim)
    operands = {name: torch.randn(nodes, requires_grad=True) for name in ("query", "key", "value")}
    if edge_dim:
        operands["edge_attr"] = torch.randn(num_edges, edge_dim, requires_grad=True)
        operands["edge_projection"] = torch.randn(heads, edge_dim, dim, requires_grad=True)
    flowing = torch.randn(num_nodes, heads, dim)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    out = graph_attention(**operands, graph=graph, dropout_p=0.1)
    torch.autograd.grad(out, tuple(operands.values()), flowing)
    return status("VmHWM") - before

sizes = [int(x) for x in sys.argv[1:]]
step(1000, 20000, *sizes[2:])  # compiles the kernels
print(step(*sizes))
"""


@pytest.mark.field_report("B01", "B03")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    "num_nodes, num_edges, heads, dim, edge_dim",
    [(2000, 4_000_000, 4, 16, 0), (50_000, 500_000, 4, 16, 0), (10_000, 1_000_000, 8, 16, 16)],
    ids=["dense", "many nodes", "edge features"],
)
def test_peak_of_forward_and_backward(num_nodes, num_edges, heads, dim, edge_dim):
    """At most outputs and gradients plus 20 %, which an [E, H, D] tensor would break."""
    arguments = [str(x) for x in (num_nodes, num_edges, heads, dim, edge_dim)]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    outputs_and_gradients = 4 * (4 * num_nodes * heads * dim + num_edges * edge_dim)
    allowed = 1.2 * outputs_and_gradients + 4 * 2**20  # pages that the allocator and the threads hold
    assert allowed < outputs_and_gradients + 4 * num_edges * heads * dim
    assert int(done.stdout) <= allowed, f"{int(done.stdout) / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f}"


@pytest.mark.field_report("B03")
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("features", [False, True])
def test_nothing_of_size_edges_times_heads_is_saved(features, dropout_p):
    num_nodes, num_edges, heads, dim, edge_dim = 50, 5000, 8, 4, 3
    graph = SparseGraph.from_edge_index(torch.randint(num_nodes, (2, num_edges)), num_nodes)
    operands = {
        name: torch.randn(num_nodes, heads, dim, requires_grad=True) for name in ("query", "key", "value")
    }
    if features:
        operands["edge_attr"] = torch.randn(num_edges, edge_dim, requires_grad=True)
        operands["edge_projection"] = torch.randn(heads, edge_dim, dim, requires_grad=True)
    saved = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, lse = graph_attention(**operands, graph=graph, dropout_p=dropout_p, return_lse=True)
    assert saved, "the hook must have seen what is saved"
    assert max(saved) < 4 * num_edges * heads
    (out.sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    assert operands["key"].grad.abs().sum() > 0
