"""The accuracy benchmark: what it writes, when it is interrupted, and the table beside published scores."""

import json
import shutil

import pytest
import torch
from torch_geometric.data import Data

import datasets
from benchmarks import accuracy, tables
from benchmarks.run import read_rows
from examples import node_classification

MEASURED = ("dataset", "split", "seed", "metric", "val", "test", "epoch", "epochs", "settings")


@pytest.fixture(autouse=True)
def generated(monkeypatch):
    """Two classes whose features differ a little, with ten splits as Minesweeper or one as Cora."""

    def load(name, root=None):
        generator = torch.Generator().manual_seed(0)
        y = torch.arange(60) % 2
        x = torch.rand(60, 5, generator=generator) + 0.3 * y[:, None]
        edge_index = torch.randint(60, (2, 200), generator=generator)
        parts = torch.rand(60, 10, generator=generator)
        masks = parts < 0.4, (parts >= 0.4) & (parts < 0.7), parts >= 0.7
        if name != "Minesweeper":
            masks = tuple(mask[:, 0] for mask in masks)
        return Data(x, edge_index, y=y, **dict(zip(("train_mask", "val_mask", "test_mask"), masks)))

    monkeypatch.setattr(datasets, "load", load)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def measured(path):
    return [tuple(row[column] for column in MEASURED) for row in read_rows(path)]


def run(out, *more):
    small = ["--splits", "2", "--epochs", "3", "--threads", "1", "--seed", "7"]
    return accuracy.main(["--dataset", "Minesweeper", "Cora", *small, "--out", str(out), *more])


def test_a_row_for_every_run(tmp_path, capsys):
    out = tmp_path / "new" / "accuracy.csv"
    assert run(out) == 0
    rows = read_rows(out)
    runs = [(row["dataset"], row["split"], row["seed"]) for row in rows]
    assert runs == [
        ("Minesweeper", "0", "7"),
        ("Minesweeper", "1", "8"),
        ("Cora", "0", "7"),
        ("Cora", "0", "8"),
    ]
    assert [row["metric"] for row in rows] == ["ROC AUC", "ROC AUC", "accuracy", "accuracy"]
    assert all(row["epochs"] == "3" and 1 <= int(row["epoch"]) <= 3 for row in rows)
    assert all(float(row["seconds"]) > 0 and row["torch"] == torch.__version__ for row in rows)

    settings = node_classification.Settings(**json.loads(rows[1]["settings"]))
    assert settings.epochs == 3 and settings.layers == node_classification.SETTINGS["Minesweeper"].layers
    data = node_classification.prepare(datasets.load("Minesweeper"), settings)
    assert rows[0]["val"] != rows[1]["val"]
    again = node_classification.train("graphattn", node_classification.with_split(data, 1), settings, 8)
    assert (rows[1]["val"], rows[1]["test"]) == (f"{again.val:.6f}", f"{again.test:.6f}")
    assert int(rows[1]["epoch"]) == again.epoch
    assert rows[1]["test"] in capsys.readouterr().out


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, capsys):
    whole, out = tmp_path / "whole.csv", tmp_path / "interrupted.csv"
    run(whole)
    calls = []

    def interrupted(layer, data, settings, seed):
        calls.append(seed)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return node_classification.train(layer, data, settings, seed)

    monkeypatch.setattr(accuracy, "train", interrupted)
    assert run(out) == 130
    assert f"the runs that ended are in {out}, --resume goes on" in capsys.readouterr().err
    assert measured(out) == measured(whole)[:2]
    assert [path.name for path in tmp_path.glob("interrupted*")] == ["interrupted.csv"]
    finished = read_rows(out)

    assert run(out, "--resume") == 0
    assert calls == [7, 8, 7, 7, 8]  # the third was started again, the first two were not
    assert measured(out) == measured(whole)
    assert read_rows(out)[:2] == finished


def test_runs_are_replaced_and_not_mixed_with_those_of_other_settings(tmp_path, monkeypatch):
    out = tmp_path / "accuracy.csv"
    run(out)
    first = measured(out)
    run(out)
    assert sorted(measured(out)) == sorted(first)
    run(out, "--resume", "--epochs", "2")
    assert [row["epochs"] for row in read_rows(out)] == ["2"] * 4
    monkeypatch.delattr(accuracy, "train")
    run(out, "--resume", "--epochs", "2")


@pytest.mark.parametrize(
    "wrong, named",
    [
        (["--splits", "0"], "--splits must be at least 1, got 0"),
        (["--splits", "-3"], "--splits must be at least 1, got -3"),
        (["--seed", "-1"], "--seed must be in"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--dataset", "cora"], "invalid choice: 'cora'"),
        (["--dataset", "digits"], "invalid choice: 'digits'"),
        (["--root", "nowhere"], "--root must be a folder with the data, nowhere is none"),
        (["--out", "tests"], "--out tests cannot be read and written"),
        (["--out", "tests/conftest.py/accuracy.csv"], "cannot be read and written"),
        (["--out", "benchmarks/results/sparse_cpu.csv"], "holds other results"),
    ],
)
def test_wrong_arguments(wrong, named, monkeypatch, capsys, request):
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.delattr(accuracy, "train")
    with pytest.raises(SystemExit) as stopped:
        accuracy.main(wrong)
    assert stopped.value.code == 2 and named in capsys.readouterr().err


def test_more_splits_than_there_are(tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(accuracy, "train")
    assert (
        accuracy.main(["--dataset", "Minesweeper", "--splits", "11", "--out", str(tmp_path / "a.csv")]) == 1
    )
    assert "Minesweeper has 10 splits, --splits asks for 11" in capsys.readouterr().err


def test_missing_files_end_with_one_line(tmp_path, monkeypatch, capsys):
    def load(name, root):
        raise FileNotFoundError(f"{root} lacks x")

    monkeypatch.setattr(datasets, "load", load)
    arguments = ["--dataset", "Cora", "--root", str(tmp_path), "--out", str(tmp_path / "a.csv")]
    assert accuracy.main(arguments) == 1
    assert f"{tmp_path} lacks x" in capsys.readouterr().err and not (tmp_path / "a.csv").exists()


def row(dataset, test, settings="{}", metric="accuracy"):
    fixed = {"seconds": "1800", "cores": "2", "cpu": "C", "torch": "2", "pyg": "2", "numba": "0"}
    return {**fixed, "dataset": dataset, "test": test, "settings": settings, "metric": metric} | {
        "commit": "abc",
        "date": "today",
    }


def test_the_table():
    rows = [row("Tolokers", "0.84", metric="ROC AUC"), row("Cora", "0.1", "old")]
    rows += [row("Cora", test, "new") for test in ("0.80", "0.83", "0.86")]
    published = [
        {"model": "GAT", "source": "here", "dataset": "Cora", "mean": "83.0", "std": "0.7"},
        {"model": "GAT", "source": "there", "dataset": "Tolokers", "mean": "83.70", "std": ""},
        {"model": "GAT", "source": "elsewhere", "dataset": "Photo", "mean": "96", "std": ""},
    ]
    text = tables.accuracy_table(rows, published)
    assert "120 minutes" in text and "commit abc" in text
    assert text.split("\n\n")[1].splitlines() == [
        "| model | Cora | Tolokers (AUC) | source |",
        "| --- | ---: | ---: | ---: |",
        "| graphattn | 83.00 ± 3.00 | 84.00 | measured |",
        "| runs of it | 3 | 1 |  |",
        "| GAT | 83.0 ± 0.7 |  | here |",
        "| GAT |  | 83.70 | there |",
    ]
    assert tables.accuracy_table([], published) == ""


def test_the_published_rows_are_whole():
    rows = read_rows(tables.PUBLISHED)
    assert {r["dataset"] for r in rows} == set(accuracy.NAMES)
    assert all(50 < float(r["mean"]) < 100 and float(r["std"] or 0) < 2 for r in rows)
    keys = [(r["model"], r["source"], r["dataset"]) for r in rows]
    assert len(set(keys)) == len(keys) and all(source.startswith("[") for _, source, _ in keys)


def test_the_readme_holds_the_tables(tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    shutil.copy(tables.README, readme)
    monkeypatch.setattr("sys.argv", ["tables", "--check", "--readme", str(readme)])
    assert tables.main() == 0
    before, after = readme.read_text().split(tables.ACCURACY_END)
    readme.write_text(f"{before}| by hand |\n{tables.ACCURACY_END}{after}")
    assert tables.main() == 1
    monkeypatch.setattr("sys.argv", ["tables", "--readme", str(readme)])
    assert tables.main() == 0 and readme.read_text() == tables.README.read_text()
