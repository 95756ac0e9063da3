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


def test_a_function_runs_on_several_threads_at_once(four_threads):
    everyone = threading.Barrier(4, timeout=60)  # which one thread after the other would never pass
    passed = []
    threads.serially_in_parallel(lambda: passed.append(everyone.wait()), 4)
    assert sorted(passed) == [0, 1, 2, 3]


def test_operators_compute_as_on_one_thread(four_threads):
    x, y = torch.randn(2, 128, 5, dtype=torch.float64), torch.randn(2, 5, 262, dtype=torch.float64)
    torch.set_num_threads(1)
    expected = x @ y  # on three threads it comes out otherwise
    torch.set_num_threads(4)
    products, numbers = [], []

    def work() -> None:
        products.append(x @ y)
        numbers.append(torch.get_num_threads())

    for number in (1, 3, 4):
        threads.serially_in_parallel(work, number)
    assert len(products) == 1 + 3 + 4 and set(numbers) == {1}
    assert all(torch.equal(product, expected) for product in products)
    assert torch.get_num_threads() == 4
    if threads._runtime is not None and hasattr(threads._runtime, "MKL_Get_Max_Threads"):
        assert threads._runtime.MKL_Get_Max_Threads() == 4


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, MemoryError])
def test_an_error_on_any_thread_is_raised(four_threads, error):
    everyone = threading.Barrier(3, timeout=60)

    def work() -> None:
        if everyone.wait() == 1:
            raise error("on this one")

    for _ in range(5):
        with pytest.raises(error, match="on this one"):
            threads.serially_in_parallel(work, 3)


def test_a_c_function_runs_on_each_thread(four_threads):
    given = []
    threads.in_parallel(threads.c_function(given.append), ctypes.addressof(ctypes.c_long()), 3)
    assert len(given) == 3 and len(set(given)) == 1 and given[0]


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
