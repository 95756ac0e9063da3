"""The harness itself: what it counts, what it refuses to print, what it writes."""

import argparse
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks import gpu, growth, measure, modules, providers, run, tables
from benchmarks.cases import CASES, GROUPS, STRUCTURED, Case, power_law, ragged
from graphattn import CompleteGraph, GridGraph, WindowGraph
from graphattn.nn import GraphTransformerLayer

OPTIONS = argparse.Namespace(repeats=3, budget=0.0, threads=1)
LISTED = power_law(60, 500)
EDGES, NODES = LISTED


def rows_of(mode, names=("graphattn", "pyg", "torch_sparse"), heads=2, dim=4, graph=LISTED):
    rows = run.measure(graph, heads, dim, mode, list(names), OPTIONS)
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
        CASES["cora"].build()
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
    def without_scale(graph):
        attention = providers._pyg(graph)
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
    monkeypatch.setitem(CASES, "tiny", Case(lambda: LISTED))
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
    assert tuple(run.machine_and_versions()) == run.ORIGIN == run.COLUMNS[-8:]


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


FULL = ["sdpa", "multihead"]
CHUNKED = ["chunked_half", "chunked", "chunked_double"]
RAGGED = ["per_size", "dense_batch", "jagged"]
PEERS = {
    "complete": (CompleteGraph(50), FULL),
    "causal": (CompleteGraph(50, causal=True), []),
    "window": (WindowGraph(80, 16), ["masked_sdpa", "flex", *CHUNKED, "local_attention"]),
    "window with a rest": (WindowGraph(75, 9), ["masked_sdpa", "flex", *CHUNKED]),
    "window beyond the end": (WindowGraph(20, 30), ["masked_sdpa", "flex", *CHUNKED]),
    "wide window": (WindowGraph(150, 50), ["masked_sdpa", "flex", *CHUNKED, "local_attention"]),
    "one-sided window": (WindowGraph(30, (4, 0)), ["masked_sdpa"]),
    "dilated window": (WindowGraph(30, 4, dilation=2), ["masked_sdpa"]),
    "window at an offset": (WindowGraph(10, 2, num_keys=30, offset=15), ["masked_sdpa"]),
    "windows": (WindowGraph.from_ptr(torch.tensor([0, 9, 20]), 2), ["masked_sdpa"]),
    "grid": (GridGraph((9, 6), (2, 1)), ["masked_sdpa", "flex", "unfold"]),
    "shifted grid": (GridGraph((9, 6), 1, border="shift"), ["masked_sdpa"]),
    "volume": (GridGraph((3, 4, 5), 1), ["masked_sdpa"]),
    "ragged": (ragged(20, 0, 9), RAGGED),
    "ragged, unsorted": (CompleteGraph.from_batch(torch.tensor([1, 0, 1, 2])), []),
}


@pytest.mark.parametrize(("graph", "peers"), PEERS.values(), ids=PEERS)
def test_structured_peers_agree_where_they_can_compute_it(graph, peers):
    assert [name for name, peer in providers.PROVIDERS.items() if peer.takes(graph)] == ["graphattn", *peers]
    uncompiled = [name for name in peers if name != "flex"]
    rows = rows_of("forward+backward", ["graphattn", *uncompiled, "pyg"], graph=graph)
    assert list(rows) == ["graphattn", *uncompiled]
    for name, row in rows.items():
        if name == "local_attention" and row["note"].startswith("skipped: local_attention does not import"):
            continue
        assert float(row["ms"]) > 0 and float(row["error"]) < run.TOLERANCE
        assert row["note"] == ("" if peers else run.ALONE) and "floor_ms" not in row
    assert (rows["graphattn"]["nodes"], rows["graphattn"]["edges"]) == (graph.num_queries, graph.num_edges)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_flex_runs_forward_only():
    rows = rows_of("forward", ["graphattn", "flex"], graph=WindowGraph(300, 140), heads=1, dim=16)
    assert float(rows["flex"]["error"]) < run.TOLERANCE
    assert list(rows_of("forward+backward", ["graphattn", "flex"], graph=WindowGraph(9, 1))) == ["graphattn"]


@pytest.mark.parametrize(
    "graph", [WindowGraph(700, 200), WindowGraph(256, 5), GridGraph((20, 20), 3)], ids=repr
)
def test_block_masks_are_those_of_pytorch(graph):
    mask = graph.to_mask()

    def rule(batch, head, query, key):
        return mask[query, key]

    n = graph.num_queries
    if n % 128:  # PyTorch looks the padding of the last block up in the mask
        mask = torch.nn.functional.pad(mask, (0, -n % 128, 0, -n % 128))
    ours = providers._block_mask(graph, rule)
    theirs = create_block_mask(rule, None, None, n, n, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


def test_masks_of_all_pairs_are_not_tried_where_they_cannot_fit():
    memory = {
        name: providers.PROVIDERS[name].memory(WindowGraph(65_536, 64), 8, 64)
        for name in ("masked_sdpa", "chunked")
    }
    assert memory["masked_sdpa"] > 65_536**2 * 5  # a bool and a float of every pair
    assert memory["chunked"] == 65_536 * 3 * (5 * 64 + 16 * 8 * 64)  # slabs are three chunks long


def test_ragged_batches_have_every_size():
    sizes = ragged(1000, 5, 14, seed=1).ptr.diff()
    assert len(sizes) == 1000 and sizes.unique().tolist() == list(range(5, 15))
    assert not torch.equal(ragged(1000, 5, 14, seed=2).ptr, ragged(1000, 5, 14, seed=1).ptr)


def test_structured_cases_are_those_promised():
    graphs = {name: case.build() for name, case in STRUCTURED.items()}
    assert GROUPS["structured"] == list(graphs) and not set(GROUPS["sparse"]) & set(graphs)
    assert [graphs[f"full_{n}"].num_edges for n in (512, 1024, 2048, 4096)] == [2**18, 2**20, 2**22, 2**24]
    assert [(STRUCTURED[n].leading, graphs[n].num_edges) for n in ("full_128x50", "full_16x197")] == [
        ((128,), 50**2),
        ((16,), 197**2),
    ]
    for name in (name for name in graphs if name.startswith("window")):
        length, radius = map(int, name.split("_")[1:])
        assert graphs[name].num_edges == length * (2 * radius + 1) - radius * (radius + 1)
    assert graphs["grid_64x64_7"].num_edges == (64 * 7 - 12) ** 2
    for name, count, least, most in (("ragged_256_10-60", 256, 10, 60), ("ragged_1024_5-500", 1024, 5, 500)):
        sizes = graphs[name].ptr.diff()
        assert len(sizes) == count and sizes.min() >= least and sizes.max() <= most


def test_structured_rows_go_to_a_file_of_their_own(tmp_path, monkeypatch, capsys):
    tiny = Case(lambda: WindowGraph(40, 3), heads=3, dim=8)
    for cases in (CASES, STRUCTURED):
        monkeypatch.setitem(cases, "window_40_3", tiny)
    for results in ("RESULTS", "STRUCTURED_RESULTS"):
        monkeypatch.setattr(run, results, tmp_path / f"{results}.csv")
    command = ["--case", "window_40_3", "--provider", "chunked", "pyg", "--repeats", "3", "--budget", "0"]
    assert run.main([*command, "--threads", str(torch.get_num_threads())]) == 0
    assert not run.RESULTS.exists()
    rows = run.read_rows(run.STRUCTURED_RESULTS)
    assert [(r["mode"], r["provider"], r["heads"], r["dim"], r["edges"]) for r in rows] == [
        (mode, provider, "3", "8", str(40 * 7 - 12))
        for mode in ("forward", "forward+backward")
        for provider in ("graphattn", "chunked")
    ]
    assert "window_40_3  3x8" in capsys.readouterr().out


def test_leading_dims_are_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "full_3x20", Case(lambda: CompleteGraph(20), heads=2, dim=8, leading=(3,)))
    command = [
        "--case",
        "full_3x20",
        "--mode",
        "forward",
        "forward+backward",
        "--repeats",
        "3",
        "--budget",
        "0",
    ]
    command += ["--out", str(tmp_path / "out.csv")]
    assert run.main([*command, "--threads", str(torch.get_num_threads())]) == 0
    rows = run.read_rows(tmp_path / "out.csv")
    assert [r["provider"] for r in rows] == ["graphattn", "sdpa", "multihead"] * 2
    assert all(float(r["error"]) < run.TOLERANCE and float(r["ms"]) > 0 for r in rows)


def small_pair(wrong=False):
    torch.manual_seed(0)
    peer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layer = GraphTransformerLayer(8, 2, 16, dropout=0.0)
    layer.load_state_dict(peer.state_dict())
    if wrong:
        torch.nn.init.constant_(layer.norm2.bias, 0.1)
    graph = CompleteGraph(5)
    forwards = (lambda x: layer(x, graph), peer)
    return modules.Pair(5, 25, 2, torch.randn(3, 5, 8), (layer, peer), forwards)


def test_modules_are_measured_and_shown(tmp_path, monkeypatch):
    out = tmp_path / "modules.csv"
    monkeypatch.setattr(modules, "CASES", {"encoder_complete": small_pair})
    command = ["--case", "encoder_complete", "--repeats", "3", "--budget", "0", "--out", str(out)]
    assert modules.main([*command, "--threads", str(torch.get_num_threads())]) == 0
    rows = run.read_rows(out)
    assert [(r["provider"], r["nodes"], r["heads"], r["dim"]) for r in rows] == [
        ("graphattn", "5", "2", "4"),
        ("peer", "5", "2", "4"),
    ]
    assert float(rows[1]["error"]) < run.TOLERANCE
    speed_up = 1 / float(rows[1]["ratio"])
    assert "| `nn.TransformerEncoderLayer` | 8 | " in tables.module_table(rows)
    assert f" ({speed_up:.2f}×) |" in tables.module_table(rows)
    assert tables.module_table([]) == ""


def test_modules_that_disagree_get_no_number(tmp_path, monkeypatch):
    out = tmp_path / "modules.csv"
    monkeypatch.setattr(modules, "CASES", {"encoder_complete": lambda: small_pair(wrong=True)})
    assert modules.main(["--case", "encoder_complete", "--out", str(out)]) == 1
    rows = run.read_rows(out)
    assert {r["ms"] for r in rows} == {""} and all("disagrees with graphattn" in r["note"] for r in rows)


@pytest.mark.skipif("GRAPHATTN_DATA" not in os.environ, reason="GRAPHATTN_DATA is not set")
def test_modules_that_are_measured_agree():
    for name, build in modules.CASES.items():
        pair = build()
        ours, theirs = (forward(pair.x) for forward in pair.forwards)
        torch.testing.assert_close(ours, theirs, msg=name, atol=1e-5, rtol=1e-4)


def test_growth_exponent_is_the_slope_of_the_logarithms():
    sizes = [1000, 2000, 5000]
    rounds = [[c * n**1.5 for n in sizes] for c in (1e-6, 4e-6)]  # all of one round slow: the same slope
    odd = [[c * n**power for n in sizes] for c, power in ((1e-6, 1.0), (1e-6, 9.0))]
    assert measure.growth_exponent(sizes, list(zip(*rounds))) == pytest.approx(1.5)
    assert measure.growth_exponent(sizes, list(zip(*rounds, odd[0], odd[1], rounds[0]))) == pytest.approx(1.5)


def test_growth_is_measured_and_written(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.csv"
    run.add_rows(out, [row("window_8_1", "graphattn", "1", "1")])
    command = ["--lengths", "512", "64", "--radius", "4", "--heads", "2", "--dim", "8", "--repeats", "3"]
    command += ["--budget", "0", "--threads", str(torch.get_num_threads()), "--out", str(out)]
    assert growth.main(command) == 0
    rows = run.read_rows(out)
    cases = ["window_8_1", *["growth_64_4", "growth_512_4"] * 2]
    assert [r["case"] for r in rows] == cases and [r["nodes"] for r in rows[1:]] == ["64", "512"] * 2
    assert all(float(r["ms"]) > 0 and float(r["error"]) < run.TOLERANCE for r in rows[1:])
    (exponent,) = (r["note"] for r in rows if r["mode"] == "forward" and r["note"])
    assert rows[2]["note"] == exponent and exponent in capsys.readouterr().out
    assert f"the power of {float(exponent.split()[1]):.2f}" in tables.structured_tables(rows)

    wrong = replace(providers.PROVIDERS["chunked"], operator=lambda graph: lambda query, key, value: value)
    monkeypatch.setitem(providers.PROVIDERS, "chunked", wrong)
    assert growth.main([*command, "--mode", "forward"]) == 1
    rows = [r for r in run.read_rows(out) if r["case"].startswith("growth") and r["mode"] == "forward"]
    assert [r["ms"] for r in rows] == ["", ""] and rows[0]["note"].startswith("disagrees with chunked by")


def test_tables_of_structured_graphs():
    shape = {"heads": "8", "dim": "64", "edges": "130"}
    rows = [
        row("window_10_6", "graphattn", "10", "1", extra_mb="4", **shape),
        row("window_10_6", "chunked", "40", "0.250", extra_mb="9", **shape),
        row("window_10_6", "chunked_half", "20", "0.500", extra_mb="8", **shape),
        row("window_10_6", "masked_sdpa", "200", "0.050", extra_mb="90", **shape),
        row("window_9_3", "graphattn", "1", "1", **shape),
        row("window_9_3", "chunked", "", "", note="skipped: needs about 9 GB", **shape),
        row("full_7", "graphattn", "3", "1", mode="forward+backward"),
        row("full_7", "sdpa", "3", "1.02", mode="forward+backward", extra_mb="5"),
    ]
    text = tables.structured_tables(rows)
    assert "| window_10_6 | 8 × 64 | 130 | 10.0 | 200 (20.0×) | 20.0 (2.0×) | 0.50 | 4.00 | 8.00 |" in text
    assert "| window_9_3 | 8 × 64 | 130 | 1.00 |  |  |  | 4.00 |  |" in text
    assert "| full_7 | 8 × 16 | 20,000 | 3.00 | 3.00 (1.0×) | 1.02 | 4.00 | 5.00 |" in text
    assert "**Windows of ± so many nodes**, forward, float32, 2 threads" in text
    assert "**Complete graphs**, forward and backward, float32, 2 threads" in text
    assert tables.structured_tables([]) == "" and tables.structured_tables(rows[5:6]) == ""


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
        graph = power_law(2000, 40_000)
        inputs = [torch.randn(graph.num_nodes, 2, 8) for _ in range(3)]
        expected = providers._pyg(graph)(*inputs)
        parallel = {}
        for name in ("pyg_compiled", "pyg_compiled_1t"):
            torch._dynamo.reset()
            attention = providers.PROVIDERS[name].operator(graph)
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
        "grid": gpu.grid("cpu", 7, 1),
        "complete": gpu.complete("cpu", 20),
        "cliques": gpu.cliques("cpu", 2),
    }
    for case in cases.values():
        shapes = [(case.num_queries, 2, 4), *[(case.num_keys, 2, 4)] * 2]
        if case.features:
            shapes += [(case.edge_index.size(1), case.features), (2, case.features, 4)]
        inputs = [torch.randn(shape) for shape in shapes]
        results = {}
        for provider, (make, _) in gpu.PROVIDERS.items():
            try:
                results[provider] = make(case, inputs, lambda function: function)()
            except NotImplementedError:
                assert case.graph is None and provider in ("flex", "sdpa")
        assert results.keys() >= {"graphattn", "graphattn_listed", "pyg", "pyg_compiled"}
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
