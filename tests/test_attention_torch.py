"""The operator inside PyTorch: opcheck, compile, export, autocast, checkpoint, vmap, threads, processes."""

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

from graphattn import SparseGraph, attention_weights, graph_attention
from tests import oracle

ROOT = Path(__file__).parent.parent


def random_edges(num_nodes: int, num_edges: int) -> Tensor:
    return torch.randint(num_nodes, (2, num_edges))


def random_operands(num_nodes: int, num_edges: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    operands = {name: torch.randn(num_nodes, 4, 8) for name in ("query", "key", "value")}
    operands["bias"] = torch.randn(num_edges, 4)
    operands["edge_attr"] = torch.randn(num_edges, 3)
    operands["edge_projection"] = torch.randn(4, 3, 8)
    return {name: x.to(dtype).requires_grad_() for name, x in operands.items()}


def attend(operands: dict[str, Tensor], edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Builds the graph, attends and explains: all of it is compiled and exported."""
    num_nodes = operands["query"].shape[0]
    graph = SparseGraph.from_edge_index(edge_index, num_nodes)
    return attend_on(operands, graph)


def attend_on(operands: dict[str, Tensor], graph: SparseGraph) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = graph_attention(**operands, graph=graph, softcap=5.0, return_lse=True)
    without_value = {name: x for name, x in operands.items() if name != "value"}
    return out, lse, attention_weights(**without_value, graph=graph, softcap=5.0)


def with_gradients(function, operands: dict[str, Tensor], graph) -> list[Tensor]:
    outputs = function(operands, graph)
    finite = [x.masked_fill(x == -torch.inf, 0.0) for x in outputs]
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in finite)
    return [*(x.detach() for x in outputs), *torch.autograd.grad(loss, tuple(operands.values()))]


SIZES = [(20, 70), (31, 200), (57, 41), (100, 1000), (8, 9)]


@pytest.mark.field_report("B80")
@pytest.mark.parametrize("graph_from_outside", [False, True])
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compile_once_for_all_sizes(graph_from_outside):
    """No graph break, no recompilation from one batch to the next, the same numbers."""
    torch._dynamo.reset()
    function = attend_on if graph_from_outside else attend
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_nodes, num_edges in SIZES:
        operands, edge_index = random_operands(num_nodes, num_edges), random_edges(num_nodes, num_edges)
        graph = SparseGraph.from_edge_index(edge_index, num_nodes) if graph_from_outside else edge_index
        for actual, expected in zip(
            with_gradients(compiled, operands, graph), with_gradients(function, operands, graph)
        ):
            torch.testing.assert_close(actual, expected)


@torch._inductor.config.patch(fallback_random=True)  # draw as eager code does
def test_compile_with_inductor_and_dropout():
    torch._dynamo.reset()

    def step(x, graph):
        return graph_attention(x, x.sin(), x, graph, dropout_p=0.5).relu().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for num_nodes in (30, 50):
        graph = SparseGraph.from_edge_index(random_edges(num_nodes, 300), num_nodes)
        x = torch.randn(num_nodes, 2, 8, requires_grad=True)
        results = []
        for function in (compiled, step):
            torch.manual_seed(1)
            loss = function(x, graph)
            results.append((loss, *torch.autograd.grad(loss, x)))
        for actual, expected in zip(*results):
            torch.testing.assert_close(actual, expected)


def test_compiled_code_checks_node_ids():
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    edge_index = random_edges(20, 70)
    operands = random_operands(20, 70)
    compiled(operands, edge_index)
    edge_index[0, 3] = 20
    with pytest.raises(IndexError, match="20"):
        compiled(operands, edge_index)


class Attention(torch.nn.Module):
    def forward(self, operands: dict[str, Tensor], graph) -> tuple[Tensor, Tensor, Tensor]:
        return (attend_on if isinstance(graph, SparseGraph) else attend)(operands, graph)


@pytest.mark.field_report("B81")
def test_export_with_dynamic_sizes():
    operands, edge_index = random_operands(20, 70), random_edges(20, 70)
    nodes, edges = Dim("nodes"), Dim("edges")
    per_operand = {
        **{name: {0: nodes} for name in ("query", "key", "value")},
        **{name: {0: edges} for name in ("bias", "edge_attr")},
        "edge_projection": {},
    }
    program = torch.export.export(
        Attention(), (operands, edge_index), dynamic_shapes=(per_operand, {1: edges})
    )
    for num_nodes, num_edges in SIZES:
        operands, edge_index = random_operands(num_nodes, num_edges), random_edges(num_nodes, num_edges)
        for actual, expected in zip(program.module()(operands, edge_index), attend(operands, edge_index)):
            torch.testing.assert_close(actual, expected)


def test_export_takes_a_graph():
    operands, edge_index = random_operands(20, 70), random_edges(20, 70)
    graph = SparseGraph.from_edge_index(edge_index, 20)
    program = torch.export.export(Attention(), (operands, graph))
    other = SparseGraph.from_edge_index(random_edges(20, 70), 20)
    for actual, expected in zip(program.module()(operands, other), attend_on(operands, other)):
        torch.testing.assert_close(actual, expected)


def operator_arguments(everything: bool, return_weights: bool, dtype: torch.dtype) -> tuple:
    operands = random_operands(20, 70, dtype)
    graph = SparseGraph.from_edge_index(random_edges(20, 70), 20)
    indices = (graph.rowptr, graph.col, graph.edge_id, graph.colptr, graph.row, graph.edge_id_t)
    nodes = [operands[name].detach().unsqueeze(0).requires_grad_() for name in ("query", "key", "value")]
    if not everything:
        return (*nodes, *indices, None, None, None, None, 0.5, 0.0, 0.0, return_weights)
    options = (*(operands[name] for name in ("bias", "edge_attr", "edge_projection")), torch.tensor([5]))
    return (*nodes, *indices, *options, 0.5, 2.0, 0.25, return_weights)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of opcheck itself
@pytest.mark.parametrize("return_weights", [False, True])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck(everything, return_weights, dtype):
    """Schema, fake tensors, autograd registration and tracing of the custom operators."""
    arguments = operator_arguments(everything, return_weights, dtype)
    torch.library.opcheck(torch.ops.graphattn.sparse_attention.default, arguments)
    outputs = [x.detach() for x in torch.ops.graphattn.sparse_attention.default(*arguments)]
    detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    grads = [torch.randn_like(outputs[i]) for i in (0, 1, 4)]  # of all that has one
    for with_edge_attr in (False, True):
        backward = (*grads, *outputs, *detached, with_edge_attr)
        torch.library.opcheck(torch.ops.graphattn.sparse_attention_backward.default, backward)


def test_opcheck_of_the_graph():
    torch.library.opcheck(torch.ops.graphattn.build_csr.default, (random_edges(20, 70), 20, 20))
    torch.library.opcheck(torch.ops.graphattn.build_csr.default, (random_edges(5, 0), 3, 7))


@pytest.mark.field_report("B107")
def test_shapes_on_the_meta_device():
    query, key, value = (torch.empty(2, n, h, 8, device="meta") for n, h in ((3, 4), (5, 2), (5, 2)))
    graph = SparseGraph.from_edge_index(torch.tensor([[4, 1], [0, 2]]), size=(5, 3)).to("meta")
    features = {
        "edge_attr": torch.empty(2, 6, device="meta"),
        "edge_projection": torch.empty(4, 6, 8, device="meta"),
    }
    for options in ({}, features):
        out, lse = graph_attention(query, key, value, graph, dropout_p=0.5, return_lse=True, **options)
        assert (out.shape, lse.shape, out.device.type) == ((2, 3, 4, 8), (2, 3, 4), "meta")
        assert attention_weights(query, key, graph, **options).shape == (2, 2, 4)


def test_autocast():
    """Every operand is cast, float64 excepted; gradients have the dtype of the operands."""
    operands, edge_index = random_operands(100, 700), random_edges(100, 700)
    operands["key"] = operands["key"].detach().bfloat16().requires_grad_()
    graph = SparseGraph.from_edge_index(edge_index, 100)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = graph_attention(**operands, graph=graph, return_lse=True)
        weights = attention_weights(operands["query"], operands["key"], graph)
    assert (out.dtype, lse.dtype, weights.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    rounded = {name: x.detach().bfloat16().requires_grad_() for name, x in operands.items()}
    expected, expected_lse = graph_attention(**rounded, graph=graph, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    flowing = torch.randn_like(out)
    gradients = torch.autograd.grad(out, operands.values(), flowing)
    wanted = torch.autograd.grad(expected, rounded.values(), flowing)
    for operand, actual, exact in zip(operands.values(), gradients, wanted):
        assert actual.dtype == operand.dtype
        torch.testing.assert_close(actual.bfloat16(), exact, rtol=0, atol=0)


@pytest.mark.parametrize("num_edges", [0, 700])
def test_autocast_to_half_and_without_edges(num_edges):
    operands, edge_index = random_operands(100, num_edges), random_edges(100, num_edges)
    graph = SparseGraph.from_edge_index(edge_index, 100)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            out = graph_attention(**operands, graph=graph)
        assert out.dtype == dtype
        for gradient in torch.autograd.grad(out.float().square().sum(), operands.values()):
            assert gradient.dtype == torch.float32 and gradient.isfinite().all()


def test_autocast_leaves_float64_alone():
    operands, edge_index = random_operands(100, 700, torch.float64), random_edges(100, 700)
    graph = SparseGraph.from_edge_index(edge_index, 100)
    with torch.autocast("cpu", torch.bfloat16):
        out = graph_attention(**operands, graph=graph)
    assert torch.equal(out, graph_attention(**operands, graph=graph))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_with_dropout_is_exact(use_reentrant):
    operands, edge_index = random_operands(100, 700), random_edges(100, 700)
    graph = SparseGraph.from_edge_index(edge_index, 100)
    names = list(operands)

    def layers(*tensors):
        named = dict(zip(names, tensors))
        x = graph_attention(**named, graph=graph, dropout_p=0.5)
        return graph_attention(**{**named, "query": x}, graph=graph, dropout_p=0.5)

    results = []
    for run in (layers, lambda *tensors: checkpoint(layers, *tensors, use_reentrant=use_reentrant)):
        torch.manual_seed(7)
        copies = [x.detach().clone().requires_grad_() for x in operands.values()]
        out = run(*copies)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in copies)])
    for plain, checkpointed in zip(*results):
        assert torch.equal(plain, checkpointed)


def test_vmap_over_leading_dims():
    query, key, value = (torch.randn(3, 20, 2, 8) for _ in range(3))
    graph = SparseGraph.from_edge_index(random_edges(20, 70), 20)
    expected = graph_attention(query, key, value, graph)

    def attend_one(query, key, value):
        return graph_attention(query, key, value, graph)

    torch.testing.assert_close(torch.func.vmap(attend_one)(query, key, value), expected)
    shared = torch.func.vmap(attend_one, in_dims=(0, None, None))(query, key[0], value[0])
    torch.testing.assert_close(
        shared, graph_attention(query, key[:1].expand_as(key), value[:1].expand_as(value), graph)
    )


# Determinism: the same bits for any number of threads, in any thread and in any process.


def large_case(dtype: torch.dtype) -> oracle.Case:
    """Enough work to be divided, with a hub of 9000 edges on either side."""
    source = torch.cat((torch.randint(2000, (50_000,)), torch.zeros(9000, dtype=torch.int64)))
    target = torch.cat((torch.randint(2000, (41_000,)), torch.zeros(9000, dtype=torch.int64)))
    target = torch.cat((target, torch.randint(2000, (9000,))))
    graph = (torch.stack((source, target)), 2000, 2000)
    return oracle.draw_case(graph, dtype=dtype, heads=4, dim=16, edge_dim=8, bias=("E", "H"))


def seeded_results(case: oracle.Case, graph: SparseGraph, dropout_p: float) -> list[Tensor]:
    def operator(case, operands):
        torch.manual_seed(0)
        return graph_attention(**operands, graph=graph, dropout_p=dropout_p, return_lse=True)

    return list(oracle.results(operator, case).values())


@pytest.fixture
def restored_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.field_report("B84")
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_same_bits_for_any_number_of_threads(dtype, dropout_p, restored_threads, poisoned_memory):
    case = large_case(dtype)
    graph = SparseGraph.from_edge_index(case.edge_index, 2000)
    torch.set_num_threads(1)
    expected = seeded_results(case, graph, dropout_p)
    for threads in (1, 2, 3, 2, 5):
        torch.set_num_threads(threads)
        for actual, wanted in zip(seeded_results(case, graph, dropout_p), expected):
            assert torch.equal(actual, wanted)


def test_weights_have_the_same_bits_for_any_number_of_threads(restored_threads):
    case = large_case(torch.float32)
    graph = SparseGraph.from_edge_index(case.edge_index, 2000)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(attention_weights(case.operands["query"], case.operands["key"], graph))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_several_python_threads_at_once(restored_threads):
    torch.set_num_threads(2)
    case = large_case(torch.float32)
    graph = SparseGraph.from_edge_index(case.edge_index, 2000)

    def run(seed: int) -> dict[str, Tensor]:
        drawn = oracle.draw_case((case.edge_index, 2000, 2000), dtype=torch.float32, dim=16, seed=seed)
        return oracle.results(
            lambda case, operands: graph_attention(**operands, graph=graph, return_lse=True), drawn
        )

    expected = [run(seed) for seed in range(6)]
    with ThreadPoolExecutor(4) as pool:
        for actual, wanted in zip(pool.map(run, [*range(6)] * 2), expected * 2):
            for name in wanted:
                assert torch.equal(actual[name], wanted[name])


def run_script(folder: Path, script: str):
    """Runs a script in a process of its own, from a file, since spawned children import it again."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    with subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its children too, which may be what hangs
            raise
    assert process.returncode == 0, output


# PyTorch's own parallel loops do not survive a fork, so the script draws on one thread and adds nothing up.
STEP = """
    import os, sys, torch
    from graphattn import SparseGraph, graph_attention

    torch.set_num_threads(1)
    torch.manual_seed(0)
    operands = [torch.randn(3000, 4, 16, requires_grad=True) for _ in range(3)]
    flowing = torch.randn(3000, 4, 16)
    graph = SparseGraph.from_edge_index(torch.randint(3000, (2, 40000)), 3000)

    def step():
        torch.manual_seed(1)
        out = graph_attention(*operands, graph, dropout_p=0.1)
        return [out.detach(), *torch.autograd.grad(out, operands, flowing)]

    class Steps(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return step()

    torch.set_num_threads(2)
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_after_a_fork(threads, tmp_path):
    """A child of a process whose pool was in use gets the same bits, and so does its own child.

    Compared by NumPy: PyTorch's own threads (torch.equal) hang in a child that was forked after they ran.
    """
    script = f"""
    expected = step()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads({threads})
        ok = all((a.numpy() == b.numpy()).all() for a, b in zip(step(), expected))
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if all((a.numpy() == b.numpy()).all() for a, b in zip(step(), expected)) else 2)
        _, status = os.waitpid(grandchild, 0)
        os._exit((0 if ok else 3) or os.waitstatus_to_exitcode(status))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(step(), expected))
    """
    run_script(tmp_path, STEP + script)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_in_the_workers_of_a_data_loader(method, tmp_path):
    script = f"""
    if __name__ == "__main__":
        expected = step()
        loader = torch.utils.data.DataLoader(
            Steps(), batch_size=None, num_workers=2, multiprocessing_context="{method}"
        )
        results = list(loader)
        assert len(results) == 3
        for actual in results:
            assert all(torch.equal(a, b) for a, b in zip(actual, expected))
    """
    run_script(tmp_path, STEP + script)
