"""The harness itself: what it counts, what it refuses to print, what it writes."""

import argparse
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import gpu, measure, providers, run, tables
from benchmarks.cases import CASES, power_law

OPTIONS = argparse.Namespace(repeats=3, budget=0.0, threads=1)
EDGES, NODES = power_law(60, 500)


def rows_of(mode, names=("graphattn", "pyg", "torch_sparse"), heads=2, dim=4):
    rows = run.measure(EDGES, NODES, heads, dim, mode, list(names), OPTIONS)
    return {row["provider"]: row for row in rows}


def test_power_law_is_symmetric_seeded_and_has_hubs():
    edge_index, num_nodes = power_law(10_000, 100_000, seed=3)
    assert edge_index.shape == (2, 100_000)
    assert edge_index.min() >= 0 and edge_index.max() < num_nodes
    forth, back = edge_index, edge_index.flip(0)
    numbers = [(e[0] * num_nodes + e[1]).sort().values for e in (forth, back)]
    assert torch.equal(*numbers)
    assert torch.equal(edge_index, power_law(10_000, 100_000, seed=3)[0])
    assert not torch.equal(edge_index, power_law(10_000, 100_000, seed=4)[0])
    degree = torch.bincount(edge_index[1], minlength=num_nodes)
    # the most cited of n nodes gets n^-0.4 of the citations, and is cited half as often as it has edges here
    assert degree.max() == pytest.approx(50_000 * 10_000**-0.4, rel=0.2)


def test_missing_data_is_named_and_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRAPHATTN_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"planetoid.*Cora.*GRAPHATTN_DATA"):
        CASES["cora"]()
    out = tmp_path / "out.csv"
    assert run.main(["--case", "cora", "--provider", "pyg", "--out", str(out), "--threads", "1"]) == 0
    assert "cora skipped" in capsys.readouterr().out
    assert not out.exists()


def test_bytes_of_a_call():
    # one edge, one head of 16: two rows of 64 bytes and an id; the backward twice that and lse and delta
    assert measure.bytes_moved(1, 1, 16, "forward") == 132
    assert measure.bytes_moved(1, 1, 16, "forward+backward") == 3 * 132 + 8
    assert measure.bytes_moved(10, 4, 16, "forward") == 10 * (8 * 64 + 4)


def test_the_gather_reads_every_row_once():
    index = np.array([2, 0, 2], dtype=np.int32)
    first = np.array([[1, 2], [10, 20], [100, 200]], dtype=np.float32)
    assert measure._sum_rows(index, first, 3 * first, 0, 3) == 4 * (300 + 3 + 300)
    assert measure._sum_rows(index, first, 3 * first, 1, 2) == 4 * 3
    assert measure.gather_bandwidth(EDGES, NODES, 8, threads=2) > 0


@pytest.mark.parametrize("megabytes", [8, 64])
def test_peak_memory_counts_what_is_freed_again(megabytes):
    def step():
        hidden = torch.ones(megabytes * 2**18)  # gone when the step returns
        return hidden.sum()

    step()
    assert measure.peak_extra_memory(step) == pytest.approx(megabytes * 2**20, abs=1.5e6)
    assert measure.peak_extra_memory(lambda: None) < 1.5e6


def test_rounds_take_turns_and_end_with_the_budget():
    order = []
    steps = {name: lambda name=name: order.append(name) or torch.ones(2**20).sum() for name in "ab"}
    samples = measure.interleaved_times(steps, repeats=9, budget=0.0)
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3}
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["a", "b", "a", "b", "a", "b"]  # warm-up, then forth, back, forth: b a meet twice
    assert all(wall > 0 and cpu > 0 for taken in samples.values() for wall, cpu in taken)


def test_ratios_are_of_pairs():
    # the second round is ten times slower for both: it says the same about them as the others
    assert measure.paired_ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == 0.5


@pytest.mark.parametrize("wrong", [1e-3, float("nan"), float("inf")])
def test_one_wrong_entry_is_an_error(wrong):
    out, grad = torch.ones(50, 4), torch.linspace(-1, 1, 50)
    bad = grad.clone()
    bad[7] += wrong
    assert measure.largest_error((out, grad), (out, grad)) == 0
    assert measure.largest_error((out, bad), (out, grad)) > run.TOLERANCE
    assert measure.largest_error((bad, out), (grad, out)) > run.TOLERANCE
    assert measure.largest_error((out,), (out, grad)) == float("inf")


def test_rounding_errors_are_not_compared_with_themselves():
    out, weight, bias = torch.ones(3), torch.ones(4, 4), torch.full((4,), 1e-9)
    assert measure.largest_error((out, weight, -bias), (out, weight, bias)) < 1e-6
    # but the output's size does not excuse a gradient
    assert measure.largest_error((1e6 * out, -bias), (1e6 * out, bias)) > 1


@pytest.mark.parametrize("mode", run.MODES)
def test_providers_agree_and_are_measured(mode):
    rows = rows_of(mode)
    assert float(rows["pyg"]["error"]) < run.TOLERANCE
    assert float(rows["pyg"]["ms"]) > 0 and float(rows["graphattn"]["ratio"]) == 1
    assert ("floor_ms" in rows["graphattn"]) == (not mode.startswith("layer"))
    if mode == "forward":
        assert float(rows["torch_sparse"]["error"]) < run.TOLERANCE
    else:  # it has no backward and no layer
        assert list(rows) == ["graphattn", "pyg"]


def test_no_number_on_disagreement(monkeypatch):
    def without_scale(edge_index, num_nodes):
        attention = providers._pyg(edge_index, num_nodes)
        return lambda query, key, value: attention(query * query.size(-1) ** 0.5, key, value)

    wrong = replace(providers.PROVIDERS["pyg"], operator=without_scale)
    monkeypatch.setitem(providers.PROVIDERS, "wrong", wrong)
    rows = rows_of("forward", ("graphattn", "pyg", "wrong"))
    assert rows["wrong"]["note"].startswith("disagrees with graphattn by")
    assert rows["graphattn"]["note"] == rows["pyg"]["note"] == "disagreement: see wrong"
    assert not any("ms" in row for row in rows.values())


def test_what_cannot_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(run, "available_memory", lambda: 8 * NODES * 2 * 4 * 4)  # the nodes alone
    rows = rows_of("forward", ("graphattn", "pyg"))
    assert rows["pyg"]["note"].startswith("skipped: needs about")
    assert rows["graphattn"]["note"] == "no peer to agree with"


def test_a_second_run_measures_nothing_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(CASES, "tiny", lambda: (EDGES, NODES))
    out = tmp_path / "results" / "out.csv"
    command = ["--case", "tiny", "--provider", "pyg", "--mode", "forward", "--repeats", "3", "--budget", "0"]
    command += ["--threads", str(torch.get_num_threads()), "--out", str(out)]
    assert run.main([*command, "--dims", "2x4"]) == 0
    first = out.read_text()
    assert run.main([*command, "--dims", "2x4"]) == 0
    assert out.read_text() == first and "already" in capsys.readouterr().out
    assert run.main([*command, "--dims", "2x4", "1x8", "--overwrite"]) == 0
    rows = run.read_rows(out)
    assert [(r["heads"], r["provider"]) for r in rows] == [
        ("2", "graphattn"),
        ("2", "pyg"),
        ("1", "graphattn"),
        ("1", "pyg"),
    ]
    assert list(rows[0]) == list(run.COLUMNS) and rows[0]["nodes"] == "60" and rows[0]["edges"] == "500"


def row(case, provider, ms, ratio, mode="forward", threads="2", **rest):
    empty = dict.fromkeys(run.COLUMNS, "")
    shape = {"nodes": "1000", "edges": "20000", "heads": "8", "dim": "16", "extra_mb": "4"}
    fixed = {"case": case, "provider": provider, "ms": ms, "ratio": ratio, "mode": mode, "threads": threads}
    return {**empty, **shape, **fixed, **rest}


def test_tables_show_the_stronger_compiled_peer_and_the_strongest_of_all():
    rows = [
        row("a", "graphattn", "10", "1.000", floor_ms="8"),
        row("a", "pyg", "100", "0.100", extra_mb="400"),
        row("a", "pyg_compiled", "50", "0.200"),
        row("a", "pyg_compiled_1t", "25", "0.400"),
        row("a", "torch_sparse", "", ""),
    ]
    lines = tables.mode_table(rows[:4]).splitlines()
    assert lines[2] == "| a | 1,000 | 20,000 | 10.0 | 100 (10.0×) | 25.0 (2.5×) | 0.40 | 1.25 | 4.00 | 400 |"
    text = tables.tables(rows)
    assert lines[2] in text and "torch.sparse" not in text
    one = [
        row("a", "graphattn", "9", "1", threads="1"),
        row("a", "pyg", "9", "1", threads="1", cpu_ratio="0.7"),
    ]
    alone = row("huge", "graphattn", "12345", "1", heads="4", peak_mb="15260", note=run.ALONE)
    assert "12.3 s a call; the whole process peaks at 15.3 GB" in tables.tables([*rows, alone])
    assert "4 × 16" not in tables.shape_table([*rows[:4], alone])
    assert "| 1 (CPU time) | 8 × 16 | 0.70 to 0.70 |" in tables.tables([*rows, *one])


def test_tables_go_between_the_markers_only():
    text = f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"
    new = tables.with_tables(text, "new")
    assert new == f"before\n{tables.BEGIN}\nnew\n{tables.END}\nafter\n"
    assert tables.with_tables(new, "new") == new
    with pytest.raises(ValueError, match="must hold"):
        tables.with_tables("no markers", "new")


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_code_has_the_threads_it_is_named_for():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        edge_index, num_nodes = power_law(2000, 40_000)
        inputs = [torch.randn(num_nodes, 2, 8) for _ in range(3)]
        expected = providers._pyg(edge_index, num_nodes)(*inputs)
        parallel = {}
        for name in ("pyg_compiled", "pyg_compiled_1t"):
            torch._dynamo.reset()
            attention = providers.PROVIDERS[name].operator(edge_index, num_nodes)
            out, code = torch._inductor.utils.run_and_get_code(attention, *inputs)
            torch.testing.assert_close(out, expected)
            parallel[name] = "omp parallel" in "".join(code)
        assert parallel == {"pyg_compiled": True, "pyg_compiled_1t": False}
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.reset()


# benchmarks.gpu, as far as it needs no GPU.


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_peers_of_the_gpu_agree():
    cases = {
        "power law": gpu.power_law(300, 2000, "cpu"),
        "mesh": gpu.mesh("cpu", 120, 20),
        "molecules": gpu.molecules("cpu", 5),
        "window": gpu.window("cpu", 50, 3),
    }
    for name, case in cases.items():
        shapes = [(case.num_queries, 2, 4), *[(case.num_keys, 2, 4)] * 2]
        if case.features:
            shapes += [(case.edge_index.size(1), case.features), (2, case.features, 4)]
        inputs = [torch.randn(shape) for shape in shapes]
        results = {}
        for provider, (make, _) in gpu.PROVIDERS.items():
            try:
                results[provider] = make(case, inputs, lambda function: function)()
            except NotImplementedError:
                assert name != "window" and provider in ("flex", "sdpa")
        assert results.keys() >= {"graphattn", "pyg", "pyg_compiled"}
        for result in results.values():
            torch.testing.assert_close(result, results["graphattn"], rtol=1e-4, atol=1e-4)


def test_the_floors_of_the_gpu():
    """3 rings of 18 atoms with 2 neighbours, rows of 256 bytes: 54 · 4 rows once, or 108 · 2 for edges, and ids."""
    case = gpu.molecules("cpu", 3)
    assert case.edge_index.size(1) == 108
    assert gpu.least_bytes(case, 256, 0, 8, "forward") == (54 * 4 * 256 + 108 * 4, 108 * (2 * 256 + 4))
    once, edge = gpu.least_bytes(case, 256, 0, 8, "forward+backward")
    assert (once, edge) == (3 * (54 * 4 * 256 + 108 * 4), 108 * (3 * (2 * 256 + 4) + 8 * 8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_measure(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "no CUDA device" in capsys.readouterr().err
