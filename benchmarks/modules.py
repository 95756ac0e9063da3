"""Training steps of whole modules beside those whose weights they take: `python -m benchmarks.modules`.

    encoder_ragged     one GraphTransformerLayer of width 256 on 256 graphs of 10 to 60 nodes, beside
                       nn.TransformerEncoderLayer on the same, padded to the largest (which is timed) and masked
    encoder_complete   the same pair on 8 sequences of 512
    gps_molecules      one GPSConv on 512 molecules of MUTAG, width 64, beside PyG's

A step is forward, squared error and backward, gradients of the input included. Both modules of a pair have the same
weights and must first agree in the output and in every gradient. Two minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential, TransformerEncoderLayer
from torch_geometric.utils import to_dense_batch

import graphattn.nn
from benchmarks.cases import molecules, ragged
from benchmarks.measure import interleaved_times, largest_error, paired_ratio, peak_extra_memory
from benchmarks.run import BASELINE, RESULTS, TOLERANCE, add_rows, machine_and_versions
from graphattn import CompleteGraph

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE_RESULTS = RESULTS.with_name("modules_cpu.csv")
PEER = "peer"


class Pair(NamedTuple):
    """Two modules of the same weights, ours first, and what each makes of the features of the nodes."""

    nodes: int
    edges: int
    heads: int
    x: Tensor
    modules: tuple[Module, Module]
    forwards: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.modules",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--repeats", type=int, default=15, help="rounds, at most")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds a case, three rounds at least")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=MODULE_RESULTS)
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    failed = False
    for name in options.case:
        torch.manual_seed(0)
        rows = measure(CASES[name](), options)
        origin = {**machine_and_versions(), "case": name, "mode": "module", "threads": options.threads}
        for row in add_rows(options.out, [{**origin, **row} for row in rows]):
            print(f"{name:18}{row['provider']:10}{row['ms']:>10} ms  ratio {row['ratio']}  {row['note']}")
            failed |= row["note"] != ""
    return int(failed)


def measure(pair: Pair, options: argparse.Namespace) -> list[dict]:
    """A row for either module; no times if they disagree."""
    names = BASELINE, PEER
    modules, forwards = dict(zip(names, pair.modules)), dict(zip(names, pair.forwards))
    target = torch.randn_like(forwards[PEER](pair.x))

    def step_of(name: str) -> Callable[[], tuple[Tensor, ...]]:
        x = pair.x.clone().requires_grad_()
        parameters = [p for _, p in sorted(modules[name].named_parameters())]

        def step() -> tuple[Tensor, ...]:
            out = forwards[name](x)
            loss = torch.nn.functional.mse_loss(out, target)
            return (out.detach(), *torch.autograd.grad(loss, (x, *parameters)))

        return step

    steps = {name: step_of(name) for name in names}
    error = largest_error(steps[PEER](), steps[BASELINE]())
    shape = {"nodes": pair.nodes, "edges": pair.edges, "heads": pair.heads}
    shape["dim"] = pair.x.size(-1) // pair.heads
    note = "" if error <= TOLERANCE else f"disagrees with {BASELINE} by {error:.1e}"
    rows: list[dict[str, Any]] = [
        {**shape, "provider": BASELINE, "error": "0.0e+00", "note": note},
        {**shape, "provider": PEER, "error": f"{error:.1e}", "note": note},
    ]
    if note:
        return rows
    extra = {name: peak_extra_memory(step) for name, step in steps.items()}
    samples = interleaved_times(steps, repeats=options.repeats, budget=options.budget)
    our_wall, our_cpu = zip(*samples[BASELINE])
    for row in rows:
        wall, cpu = zip(*samples[row["provider"]])
        row |= {
            "ms": f"{median(wall) * 1e3:.3f}",
            "cpu_ms": f"{median(cpu) * 1e3:.3f}",
            "ratio": f"{paired_ratio(our_wall, wall):.3f}",
            "cpu_ratio": f"{paired_ratio(our_cpu, cpu):.3f}",
            "extra_mb": f"{extra[row['provider']] / 1e6:.2f}",
            "rounds": len(wall),
        }
    return rows


def _encoders() -> tuple[Module, TransformerEncoderLayer]:
    # A ReLU has no slope at 0: of millions of inputs one is so near that rounding decides, and gradients disagree.
    options = {"dim_feedforward": 1024, "dropout": 0.0, "activation": "gelu"}
    peer = TransformerEncoderLayer(256, 8, batch_first=True, **options)
    layer = graphattn.nn.GraphTransformerLayer(256, 8, **options)
    layer.load_state_dict(peer.state_dict())
    return layer, peer


def _encoder_ragged() -> Pair:
    graph = ragged(256, 10, 60)
    assert graph.ptr is not None
    layer, peer = _encoders()
    sizes = graph.ptr.diff()
    batch = torch.arange(len(sizes)).repeat_interleave(sizes)
    _, mask = to_dense_batch(torch.zeros(graph.num_queries), batch)

    def padded(x: Tensor) -> Tensor:
        dense = x.new_zeros(*mask.shape, x.size(-1)).index_put((mask,), x)
        return peer(dense, src_key_padding_mask=~mask)[mask]

    x = torch.randn(graph.num_queries, 256)
    forwards = (lambda x: layer(x, graph)), padded
    return Pair(graph.num_queries, graph.num_edges, 8, x, (layer, peer), forwards)


def _encoder_complete() -> Pair:
    graph = CompleteGraph(512)
    layer, peer = _encoders()
    x = torch.randn(8, 512, 256)
    return Pair(512, graph.num_edges, 8, x, (layer, peer), (lambda x: layer(x, graph), peer))


def _gps_molecules() -> Pair:
    batch = molecules(512)

    def local() -> Module:
        return pyg.GINConv(Sequential(Linear(64, 64), ReLU(), Linear(64, 64)))

    peer, layer = pyg.GPSConv(64, local(), heads=4), graphattn.nn.GPSConv(64, local(), heads=4)
    layer.load_state_dict(peer.state_dict())
    nodes, edges = int(batch.num_nodes), batch.edge_index.size(1)
    forwards = tuple(
        lambda x, module=module: module(x, batch.edge_index, batch.batch) for module in (layer, peer)
    )
    return Pair(nodes, edges, 4, torch.randn(nodes, 64), (layer, peer), forwards)


CASES: dict[str, Callable[[], Pair]] = {
    "encoder_ragged": _encoder_ragged,
    "encoder_complete": _encoder_complete,
    "gps_molecules": _gps_molecules,
}

if __name__ == "__main__":
    sys.exit(main())
