"""Threads of the kernels: PyTorch's own where its OpenMP can be called, others where it cannot."""

import ctypes
import threading

import pytest
import torch

from graphattn import SparseGraph, WindowGraph, graph_attention
from graphattn.kernels import threads


@pytest.fixture(params=["of PyTorch", "of ours"])
def four_threads(request, monkeypatch):
    if request.param == "of ours":
        monkeypatch.setattr(threads, "_runtime", None)
    elif threads._runtime is None:
        pytest.skip("this build of PyTorch has no OpenMP runtime that takes calls")
    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(usual)


def test_a_c_function_runs_on_each_thread(four_threads):
    given = []
    everyone = threading.Barrier(3, timeout=60)  # which one thread after the other would never pass

    def call(address: int | None) -> None:
        everyone.wait()
        given.append(address)

    argument = ctypes.c_long()
    threads.in_parallel(threads.C_FUNCTION(call), ctypes.addressof(argument), 3)
    assert given == [ctypes.addressof(argument)] * 3


@pytest.mark.parametrize(
    "graph", [SparseGraph.from_edge_index(torch.randint(999, (2, 30_000)), 999), WindowGraph(999, 99)]
)
def test_same_bits_on_either_kind_of_threads(graph, monkeypatch):
    query = torch.randn(999, 4, 16, requires_grad=True)

    def run() -> tuple[torch.Tensor, ...]:
        out = graph_attention(query, query, query, graph)
        return out, *torch.autograd.grad(out.square().sum(), query)

    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        runs = [run()]
        monkeypatch.setattr(threads, "_runtime", None)
        runs.append(run())
    finally:
        torch.set_num_threads(usual)
    assert all(torch.equal(x, y) for x, y in zip(*runs))
