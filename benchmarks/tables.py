"""Writes the tables of the README from the committed results: `python -m benchmarks.tables`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean, stdev

from benchmarks.accuracy import ACCURACY_RESULTS, NAMES
from benchmarks.modules import MODULE_RESULTS
from benchmarks.run import ALONE, BASELINE, MODES, RESULTS, STRUCTURED_RESULTS, read_rows

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
ACCURACY_BEGIN, ACCURACY_END = "<!-- accuracy:begin -->", "<!-- accuracy:end -->"
PUBLISHED = ACCURACY_RESULTS.with_name("published_accuracy.csv")

# Column of a table and the providers it stands for; of several the fastest is shown.
PEERS = {
    "PyG": ["pyg"],
    "PyG compiled": ["pyg_compiled", "pyg_compiled_1t"],
    "torch.sparse": ["torch_sparse"],
    "DGL": ["dgl"],
}
STRUCTURED_PEERS = {
    "SDPA": ["sdpa"],
    "`nn.MultiheadAttention`": ["multihead"],
    "masked SDPA": ["masked_sdpa"],
    "chunked SDPA": ["chunked_half", "chunked", "chunked_double"],
    "local-attention": ["local_attention"],
    "compiled flex": ["flex"],
    "unfold": ["unfold"],
    "SDPA per size": ["per_size"],
    "dense batch": ["dense_batch"],
    "jagged": ["jagged"],
}
# What the name of a structured case begins with, and the title of its table.
FAMILIES = {
    "full": "Complete graphs",
    "window": "Windows of ± so many nodes",
    "grid": "Grids",
    "ragged": "Ragged batches of complete graphs",
}
# Both sides of each case of `benchmarks.modules`.
MODULES = {
    "encoder_ragged": (
        "`GraphTransformerLayer`, 256 graphs of 10 to 60 nodes",
        "`nn.TransformerEncoderLayer`, padded",
    ),
    "encoder_complete": ("`GraphTransformerLayer`, 8 complete graphs of 512", "`nn.TransformerEncoderLayer`"),
    "gps_molecules": ("`GPSConv`, 512 molecules", "PyG's `GPSConv`"),
}
TITLES = {
    "forward": "Operator, forward",
    "forward+backward": "Operator, forward and backward",
    "layer": "`TransformerConv`, training step",
    "layer+edges": "`TransformerConv` with 16 edge features, training step",
}
MAIN_SHAPE = ("8", "16")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--structured-results", type=Path, default=STRUCTURED_RESULTS)
    parser.add_argument("--module-results", type=Path, default=MODULE_RESULTS)
    parser.add_argument("--accuracy-results", type=Path, default=ACCURACY_RESULTS)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument(
        "--check", action="store_true", help="fail if the README is not what would be written"
    )
    options = parser.parse_args()

    text = options.readme.read_text()
    generated = [
        tables(read_rows(options.results)),
        structured_tables(read_rows(options.structured_results)),
        module_table(read_rows(options.module_results)),
    ]
    new = with_tables(text, "\n\n".join(part for part in generated if part))
    accuracy = accuracy_table(read_rows(options.accuracy_results), read_rows(PUBLISHED))
    new = with_tables(new, accuracy, ACCURACY_BEGIN, ACCURACY_END)
    if options.check:
        return int(new != text)
    options.readme.write_text(new)
    return 0


def with_tables(text: str, generated: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with what stands between the markers replaced."""
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"The text must hold `{begin}` and `{end}` once each.")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{generated}\n{end}{rest.split(end)[1]}"


def tables(rows: list[dict[str, str]]) -> str:
    """All tables, in Markdown, with a line that says where the numbers come from."""
    rows = [row for row in rows if row["ms"]]
    most = max((row["threads"] for row in rows), key=int, default="")
    main = [r for r in rows if r["threads"] == most and (r["heads"], r["dim"]) == MAIN_SHAPE]
    parts = [_origin(rows)]
    for mode in MODES:
        if chosen := [row for row in main if row["mode"] == mode]:
            title = f"**{TITLES[mode]}**, {MAIN_SHAPE[0]} heads of {MAIN_SHAPE[1]}, float32, {most} threads"
            parts.append(f"{title}\n\n{mode_table(chosen)}")
    title = "**Time over that of the strongest peer, every shape**: least and greatest over the graphs"
    parts.append(f"{title}\n\n{shape_table(rows)}")
    parts += [_alone(row) for row in rows if row["note"] == ALONE]
    return "\n\n".join(parts)


def mode_table(rows: list[dict[str, str]]) -> str:
    """One line per graph: milliseconds of each contender and by how much graphattn is faster, then memory."""
    peers = {t: names for t, names in PEERS.items() if any(row["provider"] in names for row in rows)}
    floor = any(row["floor_ms"] for row in rows)
    header = ["graph", "nodes", "edges", "graphattn ms", *(f"{title} ms" for title in peers)]
    header += ["time / strongest", *(["time / floor"] if floor else []), "graphattn MB", "PyG MB"]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        here = {row["provider"]: row for row in rows if row["case"] == case}
        ours = here[BASELINE]
        cells = [case, f"{int(ours['nodes']):,}", f"{int(ours['edges']):,}", _digits(ours["ms"])]
        cells += _peer_cells(here, peers)
        cells.append(_digits(strongest(here)))
        if floor:
            cells.append(_digits(float(ours["ms"]) / float(ours["floor_ms"])) if ours["floor_ms"] else "")
        cells += [_digits(ours["extra_mb"]), _digits(here["pyg"]["extra_mb"]) if "pyg" in here else ""]
        lines.append(cells)
    return _markdown(header, lines)


def _peer_cells(here: dict[str, dict[str, str]], peers: dict[str, list[str]]) -> list[str]:
    """Milliseconds of the fastest provider of each peer and by how much graphattn is faster."""
    cells = []
    for names in peers.values():
        found = [here[name] for name in names if name in here]
        best = max(found, key=lambda row: float(row["ratio"]), default=None)
        cells.append(f"{_digits(best['ms'])} ({1 / float(best['ratio']):.1f}×)" if best else "")
    return cells


def structured_tables(rows: list[dict[str, str]]) -> str:
    """Tables of the structured graphs, by family and mode, and how time grows; "" without rows."""
    rows = [row for row in rows if row["ms"]]
    if not rows:
        return ""
    parts = [_origin(rows)]
    for family, title in FAMILIES.items():
        for mode in MODES:
            chosen = [row for row in rows if row["case"].split("_")[0] == family and row["mode"] == mode]
            for threads in dict.fromkeys(row["threads"] for row in chosen):
                here = [row for row in chosen if row["threads"] == threads]
                what = f"{TITLES[mode].split(', ')[1]}, float32, {threads} threads"
                parts.append(f"**{title}**, {what}\n\n{structured_table(here)}")
    parts += [_growth(rows, row) for row in rows if row["note"].startswith("exponent")]
    return "\n\n".join(parts)


def structured_table(rows: list[dict[str, str]]) -> str:
    """One line per graph and shape; memory of graphattn and of the peer that takes the least time."""
    peers = {
        title: names
        for title, names in STRUCTURED_PEERS.items()
        if any(row["provider"] in names for row in rows)
    }
    header = ["graph", "heads × dim", "edges", "graphattn ms", *(f"{title} ms" for title in peers)]
    header += ["time / strongest", "graphattn MB", "strongest MB"]
    lines = []
    for case, heads, dim in dict.fromkeys((row["case"], row["heads"], row["dim"]) for row in rows):
        here = {
            row["provider"]: row
            for row in rows
            if (row["case"], row["heads"], row["dim"]) == (case, heads, dim)
        }
        ours = here[BASELINE]
        others = [row for name, row in here.items() if name != BASELINE]
        best = max(others, key=lambda row: float(row["ratio"]), default=None)
        cells = [case, f"{heads} × {dim}", f"{int(ours['edges']):,}", _digits(ours["ms"])]
        cells += [*_peer_cells(here, peers), _digits(strongest(here)), _digits(ours["extra_mb"])]
        lines.append([*cells, _digits(best["extra_mb"]) if best else ""])
    return _markdown(header, lines)


def module_table(rows: list[dict[str, str]]) -> str:
    """One line per pair of modules; "" without rows."""
    rows = [row for row in rows if row["ms"]]
    if not rows:
        return ""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        ours, peer = (row for row in rows if row["case"] == case)
        width = int(ours["heads"]) * int(ours["dim"])
        cells = [
            *MODULES[case],
            str(width),
            _digits(ours["ms"]),
            f"{_digits(peer['ms'])} ({1 / float(peer['ratio']):.2f}×)",
        ]
        lines.append([*cells, _digits(ours["extra_mb"]), _digits(peer["extra_mb"])])
    header = ["module", "beside", "width", "graphattn ms", "peer ms", "graphattn MB", "peer MB"]
    origin = _software(rows)
    return (
        f"**Modules, training step**, float32, {rows[0]['threads']} threads. {origin}. "
        f"Made by `python -m benchmarks.modules`.\n\n{_markdown(header, lines)}"
    )


def _growth(rows: list[dict[str, str]], last: dict[str, str]) -> str:
    """A sentence on how the time of a window grows with the length, and a line for each length."""
    radius = last["case"].split("_")[2]
    columns = ("mode", "threads", "heads", "dim")
    taken = [
        row
        for row in rows
        if row["case"].startswith("growth_")
        and row["case"].endswith(f"_{radius}")
        and all(row[column] == last[column] for column in columns)
    ]
    lines = [[f"{int(row['nodes']):,}", _digits(row["ms"]), _digits(row["extra_mb"])] for row in taken]
    what = TITLES[last["mode"]].split(", ")[1]
    return (
        f"**Growth of a window of ±{radius}**, {what}, {last['heads']} heads of {last['dim']},"
        f" {last['threads']} threads: time grows with the length to the power of"
        f" {float(last['note'].split()[1]):.2f}.\n\n{_markdown(['nodes', 'ms', 'MB'], lines)}"
    )


def shape_table(rows: list[dict[str, str]]) -> str:
    """One line per number of threads and shape; on one thread the CPU time is compared."""
    lines = []
    compared = [row for row in rows if row["note"] != ALONE]
    for threads, heads, dim in dict.fromkeys((r["threads"], r["heads"], r["dim"]) for r in compared):
        cells = [f"{threads} (CPU time)" if threads == "1" else threads, f"{heads} × {dim}"]
        for mode in MODES:
            ratios = []
            chosen = [
                r
                for r in compared
                if (r["threads"], r["heads"], r["dim"], r["mode"]) == (threads, heads, dim, mode)
            ]
            for case in dict.fromkeys(row["case"] for row in chosen):
                here = {row["provider"]: row for row in chosen if row["case"] == case}
                if ratio := strongest(here, "cpu_ratio" if threads == "1" else "ratio"):
                    ratios.append(ratio)
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "")
        lines.append(cells)
    return _markdown(["threads", "heads × dim", *MODES], lines)


def _alone(row: dict[str, str]) -> str:
    """A sentence on what no peer could hold in memory."""
    return (
        f"**{TITLES[row['mode']]}** on {int(row['nodes']):,} nodes and {int(row['edges']):,} edges, "
        f"{row['heads']} heads of {row['dim']}, {row['threads']} threads: "
        f"{float(row['ms']) / 1e3:.1f} s a call; the whole process peaks at "
        f"{float(row['peak_mb']) / 1e3:.1f} GB, graph building included. No peer fits in memory."
    )


def strongest(rows: dict[str, dict[str, str]], column: str = "ratio") -> float | None:
    """graphattn's time over that of the fastest peer; None without a peer."""
    ratios = [float(row[column]) for name, row in rows.items() if name != BASELINE]
    return max(ratios, default=None)


def accuracy_table(rows: list[dict[str, str]], published: list[dict[str, str]]) -> str:
    """One line per model, graphattn's runs first, and a column per data set; "" without rows.

    Of a data set only the runs with the settings of its last row count.
    """
    if not rows:
        return ""
    settings = {row["dataset"]: row["settings"] for row in rows}
    rows = [row for row in rows if row["settings"] == settings[row["dataset"]]]
    names = [name for name in NAMES if name in settings]
    tests = {name: [100 * float(row["test"]) for row in rows if row["dataset"] == name] for name in names}
    metrics = {row["dataset"]: row["metric"] for row in rows}
    header = ["model", *(f"{n} (AUC)" if metrics[n] == "ROC AUC" else n for n in names), "source"]
    lines = [
        ["graphattn", *(_spread(tests[name]) for name in names), "measured"],
        ["runs of it", *(str(len(tests[name])) for name in names), ""],
    ]
    for model, source in dict.fromkeys((row["model"], row["source"]) for row in published):
        here = {r["dataset"]: r for r in published if (r["model"], r["source"]) == (model, source)}
        cells = [
            f"{here[n]['mean']} ± {here[n]['std']}".removesuffix(" ± ") if n in here else "" for n in names
        ]
        if any(cells):
            lines.append([model, *cells, source])
    minutes = sum(float(row["seconds"]) for row in rows) / 60
    return (
        "Test accuracy in %, ROC AUC where it says so, mean ± standard deviation over the runs. "
        f"{_software(rows)}, {minutes:,.0f} minutes in all. "
        "Made by `python -m benchmarks.accuracy` and `python -m benchmarks.tables`; do not edit.\n\n"
        f"{_markdown(header, lines)}"
    )


def _spread(scores: list[float]) -> str:
    return f"{mean(scores):.2f} ± {stdev(scores):.2f}" if len(scores) > 1 else f"{scores[0]:.2f}"


def _software(rows: list[dict[str, str]]) -> str:
    def all_of(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows))

    return (
        f"Measured on {all_of('cores')} cores of {all_of('cpu')} with torch {all_of('torch')}, "
        f"PyG {all_of('pyg')} and Numba {all_of('numba')}, at commit {all_of('commit')} on {all_of('date')}"
    )


def _origin(rows: list[dict[str, str]]) -> str:
    return (
        f"{_software(rows)}; "
        "medians, with graphattn's speed-up in brackets. MB is what one call adds to resident memory at its "
        "peak. The floor is the time a bare gather takes to read the same bytes. Made by "
        "`python -m benchmarks.run` and `python -m benchmarks.tables`; do not edit."
    )


def _digits(number: str | float | None) -> str:
    """Three significant digits, without an exponent."""
    if number is None or number == "":
        return ""
    value = float(number)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])


if __name__ == "__main__":
    sys.exit(main())
