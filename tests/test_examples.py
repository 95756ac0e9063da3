"""The examples run as programs do, only smaller."""

import gzip
import importlib
import os
import pkgutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics
import torch
from matplotlib import image

import datasets
import examples
from examples import (
    convolution,
    node_classification,
    positional_encodings,
    recurrence,
    structured_attention,
    vision_transformer,
)
from graphattn.plot import attention_matrix

# What makes them tiny; none downloads anything.
TINY = {
    "character_language_model": ["--radii", "1", "--sample", "5"],
    "convolution": ["--images", "10", "--tests", "20"],
    "huggingface": ["--length", "40", "--batch", "1"],
    "molecules": ["--pairs", "4", "--folds", "2", "--encodings", "none"],
    "node_classification": ["--seeds", "1"],
    "positional_encodings": [],
    "recurrence": ["--length", "4", "--longest", "64"],
    "structured_attention": [],
    "truncated_speech": ["--radii", "1", "--longest", "256"],
    "vision_transformer": [],
}


@pytest.fixture(autouse=True)
def one_thread():
    """Hundreds of small steps: a second thread only waits for its turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def program(name):
    if name == "huggingface":
        pytest.importorskip("transformers")
    return importlib.import_module(f"examples.{name}").main


def test_every_example_is_run():
    assert {module.name for module in pkgutil.iter_modules(examples.__path__)} == {*TINY, "long_training"}


@pytest.mark.parametrize("name", TINY)
def test_every_example_says_what_it_takes(name, tmp_path, capsys):
    main = program(name)
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for option in ("--epochs EPOCHS", "--seed SEED", "--root ROOT", "--out OUT"):
        assert printed.count(option) == 2, option  # in the usage and, with what it means, in the list
    for wrong in (["--epochs", "0"], ["--out", str(tmp_path / "figure.unknown")]):
        with pytest.raises(SystemExit) as stopped:
            main(wrong)
        assert stopped.value.code == 2 and wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", TINY)
def test_every_example_draws_one_figure(name, tmp_path, monkeypatch, capsys):
    main = program(name)
    monkeypatch.chdir(tmp_path)
    arguments = [*TINY[name], "--epochs", "1", "--seed", "3"]
    if name == "character_language_model":
        Path("input.txt").write_text("All happy families are alike. " * 100)
        arguments += ["--root", "."]
    assert main([*arguments, "--out", "new/figure.png"])
    assert f"Figure: {Path('new', 'figure.png')}" in capsys.readouterr().out
    pixels = image.imread("new/figure.png")
    assert pixels.shape[0] > 400 and pixels.shape[1] > 1000 and pixels.std() > 0.05
    assert [path.suffix for path in tmp_path.rglob("*.*")].count(".png") == 1


def test_digits_by_default(tmp_path, capsys):
    figure = tmp_path / "new" / "digits.png"
    (result,) = node_classification.main(["--epochs", "25", "--seeds", "2", "--out", str(figure)])
    assert result.layer == "graphattn"
    assert len(result.val) == len(result.test) == 2 and result.val[0] != result.val[1]
    assert np.mean(result.test) > 0.93  # a tenth by guessing
    assert result.seconds > 0
    printed = capsys.readouterr().out
    assert f"{100 * np.mean(result.test):.2f} ± {100 * np.std(result.test):.2f}" in printed
    assert f"{100 * np.mean(result.val):.2f} ± {100 * np.std(result.val):.2f}" in printed
    pixels = image.imread(figure)
    assert pixels.shape[:2] == (540, 1320) and pixels.std() > 0.1


def test_compare_runs_both_layers_on_the_same_seeds(tmp_path, capsys):
    arguments = ["--epochs", "3", "--seed", "5", "--seeds", "1", "--out", str(tmp_path / "digits.png")]
    ours, peer = node_classification.main([*arguments, "--compare"])
    assert (ours.layer, peer.layer) == ("graphattn", "pyg")
    assert ours.seconds > 0 and peer.seconds > 0
    # Both layers start from the same parameters, only the dropped edges differ.
    assert ours.test[0] == pytest.approx(peer.test[0], abs=0.1)
    if os.path.exists("/proc/self/status"):
        # PyG's layer holds at least a key and a value per edge in each of its two layers: 64 and 10 floats.
        edges = datasets.digits().num_edges + 1797
        assert peer.memory > 2 * edges * 74 * 4 / 2**20
        assert 0 < ours.memory < peer.memory
    printed = capsys.readouterr().out
    assert "graphattn" in printed and "times as long" in printed

    (alone,) = node_classification.main([*arguments, "--layer", "pyg"])
    assert (alone.val, alone.test) == (peer.val, peer.test)


@pytest.mark.parametrize("name", ["Cora", "Minesweeper", "Photo"])
def test_real_data(name, tmp_path, capsys):
    root = os.environ.get("GRAPHATTN_DATA")
    if root is None:
        pytest.skip("set GRAPHATTN_DATA to a folder with the real data")
    epochs = {"Cora": "25", "Minesweeper": "5", "Photo": "10"}[name]
    arguments = ["--dataset", name, "--root", root, "--epochs", epochs, "--seeds", "1"]
    (result,) = node_classification.main([*arguments, "--out", str(tmp_path / "figure.png")])
    chance = {"Cora": 0.302, "Minesweeper": 0.5, "Photo": 0.254}[name]  # the largest class; ROC AUC at random
    assert chance < result.test[0] <= 1
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert f"{100 * result.test[0]:.2f} ± 0.00" in capsys.readouterr().out


def test_early_stopping_keeps_the_best_epoch():
    settings = node_classification.Settings(channels=2, heads=2, lr=0.05, epochs=80, patience=4)
    data = node_classification.prepare(datasets.digits(), settings)
    run = node_classification.train("pyg", data, settings, seed=0)
    assert 5 < len(run.history) < 80
    losses = [row["val_loss"] for row in run.history]
    best = losses.index(min(losses))
    assert best == len(losses) - 5  # four epochs of patience after it
    assert (run.val, run.test) == (run.history[best]["val"], run.history[best]["test"])
    run.model.eval()
    with torch.no_grad():
        right = run.model(data.x, data.edge_index).argmax(1) == data.y
    assert right[data.val_mask].float().mean().item() == run.val
    assert right[data.test_mask].float().mean().item() == run.test


def test_the_score_chooses_among_the_epochs_that_are_looked_at(monkeypatch):
    settings = node_classification.Settings(
        channels=2,
        heads=2,
        lr=0.05,
        epochs=10,
        patience=None,
        choose_by="score",
        one_cycle=True,
        evaluate_every=4,
    )
    data = node_classification.prepare(datasets.digits(), settings)
    rates, step = [], node_classification.one_epoch

    def watched(model, optimizer, data):
        rates.append(optimizer.param_groups[0]["lr"])
        return step(model, optimizer, data)

    monkeypatch.setattr(node_classification, "one_epoch", watched)
    run = node_classification.train("graphattn", data, settings, seed=0)
    assert [row["epoch"] for row in run.history] == [4, 8, 10]
    best = max(run.history, key=lambda row: row["val"])
    assert (run.val, run.test, run.epoch) == (best["val"], best["test"], best["epoch"])
    # up to the learning rate of the settings in the third of ten steps, then down to nothing
    assert len(rates) == 10 and rates.index(max(rates)) == 2 and max(rates) == pytest.approx(0.05)
    assert rates[3:] == sorted(rates[3:], reverse=True) and rates[-1] < 1e-6


def test_the_degree_is_a_feature():
    star = torch.tensor([[1, 2, 3, 0], [0, 0, 0, 1]])  # degrees 3, 1, 0, 0
    data = node_classification.Data(x=torch.ones(4, 2), edge_index=star)
    prepared = node_classification.prepare(data, node_classification.Settings(degree=True))
    log_degree = np.log([4, 2, 1, 1])
    expected = (log_degree - log_degree.mean()) / log_degree.std(ddof=1)
    np.testing.assert_allclose(prepared.x[:, 2], expected, rtol=1e-6)
    assert prepared.x.shape == (4, 3) and data.x.shape == (4, 2) and data.num_edges == 4


@pytest.mark.parametrize("layer", ["graphattn", "pyg"])
def test_diffusion_is_ten_steps_of_one_attention_matrix(layer):
    settings = replace(node_classification.SETTINGS["PubMed"], normalize_features=False)
    data = node_classification.prepare(datasets.digits(), settings)
    model, _ = node_classification.new_model(layer, data, settings, seed=0)
    model = model.double().eval()
    torch.nn.init.normal_(model.lin_query.weight)
    x, (source, target) = data.x.double(), data.edge_index
    hidden = torch.nn.functional.elu(model.lin_in(x))
    query, key = (lin(hidden).view(-1, 8, 8).transpose(0, 1) for lin in (model.lin_query, model.lin_key))
    edges = torch.zeros(len(x), len(x), dtype=torch.bool).index_put_((target, source), torch.tensor(True))
    weights = (query @ key.mT / 8**0.5).masked_fill(~edges, -torch.inf).softmax(-1)
    first = scores = model.lin_scores(hidden).expand(8, -1, -1)
    for _ in range(10):
        scores = 0.9 * weights @ scores + 0.1 * first
    out = model(x, data.edge_index)
    torch.testing.assert_close(out, scores.mean(0))
    torch.testing.assert_close(model.attention(x, data.edge_index), weights[:, target, source].T)
    parameters = list(model.parameters())
    for ours, exact in zip(
        torch.autograd.grad(out.square().sum(), parameters),
        torch.autograd.grad(scores.mean(0).square().sum(), parameters),
    ):
        torch.testing.assert_close(ours, exact)


def test_both_layers_give_the_same_scores():
    settings = node_classification.SETTINGS["digits"]
    data = node_classification.prepare(datasets.digits(), settings)
    models = [
        node_classification.new_model(layer, data, settings, seed=3)[0] for layer in ("graphattn", "pyg")
    ]
    with torch.no_grad():
        for model in models:
            for conv in model.convs:  # attention that is no plain mean
                torch.nn.init.normal_(conv.lin_query.weight, generator=torch.Generator().manual_seed(0))
        ours, peer = (model.eval()(data.x, data.edge_index) for model in models)
    torch.testing.assert_close(ours, peer)


def test_score():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (500,), generator=generator)
    logits = torch.randn(500, 2, generator=generator).mul(4).round()  # with ties
    margin = (logits[:, 1] - logits[:, 0]).numpy()
    assert node_classification.score(logits, y, "ROC AUC") == pytest.approx(
        sklearn.metrics.roc_auc_score(y.numpy(), margin), abs=1e-12
    )
    three = torch.tensor([[1.0, 0, 0], [0, 2, 1], [3, 0, 4], [0, 1, 0]])
    assert node_classification.score(three, torch.tensor([0, 1, 2, 0]), "accuracy") == 0.75


def test_splits_are_picked_by_number():
    masks = torch.eye(4, dtype=torch.bool)[:, :3]
    data = node_classification.Data(train_mask=masks, val_mask=masks.flip(1), test_mask=masks[:, 0])
    picked = node_classification.with_split(data, 4)
    assert torch.equal(picked.train_mask, masks[:, 1]) and torch.equal(picked.test_mask, masks[:, 0])
    assert data.train_mask.shape == (4, 3)


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--dataset", "cora"]])
def test_wrong_arguments(wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        node_classification.main(wrong)
    assert stopped.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["file/figure.png", "figure", "figure.unknown"])
def test_a_figure_that_cannot_be_saved_is_found_before_training(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.delattr(node_classification, "train")
    with pytest.raises(SystemExit) as stopped:
        node_classification.main(["--out", str(tmp_path / name)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "--out" in error and str(tmp_path) in error


def test_missing_data_ends_with_one_line(tmp_path, monkeypatch, capsys):
    raw = tmp_path / "planetoid/Cora/raw"
    raw.mkdir(parents=True)
    (raw / "ind.cora.x").touch()
    with pytest.raises(SystemExit) as stopped:
        node_classification.main(["--dataset", "Cora", "--root", str(tmp_path)])
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert "ind.cora.tx" in error and str(raw) in error and "Traceback" not in error


def test_one_layer_on_five_graphs(tmp_path, capsys):
    figure = tmp_path / "new" / "five.png"
    results = structured_attention.main(["--epochs", "2", "--out", str(figure)])
    edges = {row.graph: row.edges for row in results}
    # 64²; 64 · 65 / 2; 17 a row less what falls off both ends; (8 · 5 - 6)² in the image
    assert edges.pop("random") in range(64 + 10 * 64, 64 + 16 * 64 + 1)
    assert edges == {"complete": 4096, "causal": 2080, "window": 64 * 17 - 8 * 9, "grid": 34**2}
    printed = capsys.readouterr().out
    for row in results:
        assert row.milliseconds > 0 and 0.3 < row.accuracy <= 1  # a tenth by guessing
        assert f"{row.milliseconds:.1f}" in printed and f"{100 * row.accuracy:.2f}" in printed
    pixels = image.imread(figure)
    assert pixels.shape[:2] == (715, 1650) and pixels.std() > 0.1


def test_mnist_at_the_size_of_the_digits(tmp_path):
    train, train_labels, test, test_labels = idx_files(tmp_path / "mnist", compress=True)
    data = structured_attention.load(tmp_path)
    assert data.train.shape == (40, 1, 8, 8) and data.test.shape == (10, 1, 8, 8)
    assert data.train[:, 0, 0, 0].sort().values.tolist() == pytest.approx(
        sorted(train[:, :4, :4].mean((1, 2)) / 255), abs=1e-5
    )
    assert data.test[:, 0, 7, 7].tolist() == pytest.approx(test[:, 24:, 24:].mean((1, 2)) / 255, abs=1e-5)
    assert data.test_labels.tolist() == test_labels.tolist()
    assert sorted(data.train_labels.tolist()) == sorted(train_labels.tolist())


@torch.no_grad()
def test_attention_matrices_are_softmax_over_the_edges():
    model, picture = structured_attention.Reader(), torch.rand(64)
    x = model.nodes(picture)[0]
    query, key = (model.heads_of(linear, x).transpose(0, 1) for linear in (model.query, model.key))
    scores = query @ key.transpose(1, 2) / query.size(-1) ** 0.5
    for graph in structured_attention.graphs(seed=3).values():
        mask = graph.to_mask()
        expected = scores.masked_fill(~mask, -torch.inf).softmax(-1).mean(0)
        matrix = attention_matrix(graph, model.weights(picture, graph)).mean(-1)
        assert torch.equal(matrix.isnan(), ~mask) and mask.diagonal().all()
        torch.testing.assert_close(matrix[mask], expected[mask])


@pytest.mark.parametrize("wrong", [["--image", "500"], ["--image", "-1"]])
def test_wrong_arguments_of_the_five_graphs(wrong, monkeypatch, capsys):
    monkeypatch.delattr(structured_attention, "train")
    with pytest.raises(SystemExit) as stopped:
        structured_attention.main(wrong)
    assert stopped.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def assert_drawn(path):
    pixels = image.imread(path)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 1000 and pixels.std() > 0.1


def test_positional_encodings(tmp_path, capsys):
    figure = tmp_path / "new" / "encodings.png"
    scores = positional_encodings.main(["--epochs", "1", "--out", str(figure)])
    assert set(scores) == {
        "none",
        "sinusoidal",
        "Laplacian",
        "random walk",
        "learned",
        "rotary",
        "relative bias",
        "ALiBi",
    }
    assert_drawn(figure)
    printed = capsys.readouterr().out
    assert all(f"{100 * score:5.1f} %" in printed for score in scores.values())
    without, added = positional_encodings.permutation_differences(seed=0)
    assert without < 1e-5 and added > 0.05
    assert f"{without:.1e}" in printed and f"{added:.1e}" in printed


def test_the_order_task_is_what_it_says():
    tokens, answer = positional_encodings.sequences(200)
    for row, first in zip(tokens.tolist(), answer.tolist()):
        assert row.count(0) == row.count(1) == 1
        assert (row.index(0) < row.index(1)) == bool(first)
    # Without positions no training can help: the answers for a sequence and its reverse are the same.
    model = positional_encodings.Reader("none")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), model(tokens.flip(1)), atol=1e-4, rtol=0)
        seeing = positional_encodings.Reader("sinusoidal")
        assert (seeing(tokens) - seeing(tokens.flip(1))).abs().max() > 1e-3


def test_recurrence(tmp_path, capsys):
    figure = tmp_path / "recurrence.png"
    arguments = ["--length", "6", "--radius", "2", "--epochs", "6", "--longest", "256", "--out", str(figure)]
    recall = recurrence.main(arguments)
    assert recall["causal attention"].shape == (5,)
    assert recall["causal attention"].mean() > 0.9
    assert recall["window attention"][:2].mean() > 0.9
    assert recall["window attention"][2:].mean() < 0.3  # an eighth by guessing
    assert_drawn(figure)
    assert "forward pass, ms" in capsys.readouterr().out


def test_the_recall_task_is_what_it_says():
    key, value, answer, ago = recurrence.pairs(100, 7, 14, 8)
    for k, v, a, d in zip(key.tolist(), value.tolist(), answer.tolist(), ago.tolist()):
        assert v[-1] == 8 and 1 <= d <= 6
        assert [v[i] for i in range(6) if k[i] == k[-1]] == [a] and k.index(k[-1]) == 6 - d


def test_what_is_recalled_may_be_a_text(tmp_path, capsys):
    text = recurrence.numbered("abcabd" * 3, 7)
    assert text[:6].tolist() == [0, 1, 2, 0, 1, 3] and len(text) == 18
    for v in recurrence.pairs(50, 7, 14, 4, text)[1].tolist():
        assert v[-1] == 4 and "".join("abcd"[i] for i in v[:-1]) in "abcabd" * 3
    (tmp_path / "input.txt").write_text("short")
    for root, words in ((tmp_path, "at least --length=24"), (tmp_path / "none", "is no text file")):
        with pytest.raises(SystemExit) as stopped:
            recurrence.main(["--root", str(root), "--out", str(tmp_path / "a.png")])
        assert stopped.value.code == 1 and words in capsys.readouterr().err
    (tmp_path / "input.txt").write_text("ab" * 20)
    arguments = ["--root", str(tmp_path), "--length", "4", "--longest", "64", "--epochs", "1"]
    assert recurrence.main([*arguments, "--out", str(tmp_path / "a.png")])["LSTM"].shape == (3,)


def test_a_molecule_is_drawn(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        (tmp_path / "tudataset/MUTAG/raw").mkdir(parents=True)
        (tmp_path / "tudataset/MUTAG/raw/MUTAG_A.txt").touch()
        positional_encodings.main(["--root", str(tmp_path), "--out", str(tmp_path / "a.png")])
    assert stopped.value.code == 1 and "MUTAG_graph_labels.txt" in capsys.readouterr().err
    root = os.environ.get("GRAPHATTN_DATA")
    if root is None:
        pytest.skip("set GRAPHATTN_DATA to a folder with the real data")
    G, place = positional_encodings.largest_molecule(Path(root))
    assert (len(G), G.number_of_edges()) == (28, 33) and len(place) == 28


def test_convolution(tmp_path, capsys):
    figure = tmp_path / "convolution.png"
    scores = convolution.main(
        ["--images", "10", "100", "--epochs", "6", "--tests", "100", "--out", str(figure)]
    )
    assert list(scores) == ["CNN", "ViT", "ViT on windows"]
    assert all(len(row) == 2 and row[1] > 0.5 for row in scores.values())  # a tenth by guessing
    assert_drawn(figure)
    assert "differ by at most" in capsys.readouterr().out
    picture, exact, ours = convolution.equality(torch.rand(1, 1, 28, 28), seed=0)
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=0)
    assert picture.shape == exact.shape == (28, 28)


def test_convolution_reads_mnist_files(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
    labels = np.arange(40, dtype=np.uint8) % 10
    for part, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
        (tmp_path / f"train-{part}-ubyte").write_bytes(header + array.tobytes())
    read, of = convolution.load(tmp_path)
    assert read.shape == (40, 1, 28, 28) and of.bincount().tolist() == [4] * 10
    first = int(np.flatnonzero((images == (read[0, 0] * 255).round().byte().numpy()).all((1, 2)))[0])
    assert labels[first] == of[0]
    model = convolution.new_model("ViT on windows", 28)
    assert model(read[:2]).shape == (2, 10) and convolution.new_model("CNN", 28)(read[:2]).shape == (2, 10)


def test_missing_mnist_ends_with_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        convolution.main(["--root", str(tmp_path)])
    assert stopped.value.code == 1
    assert "train-images-idx3-ubyte" in capsys.readouterr().err


# --- vision_transformer ---------------------------------------------------------------------------------


def test_vision_transformer_on_digits(tmp_path, capsys):
    figure = tmp_path / "new" / "digits.png"
    complete, local = vision_transformer.main(["--epochs", "8", "--out", str(figure)])
    assert (complete.edges, local.edges) == (17 * 17, 100 + 33)  # 4 x 4 patches and the class token
    assert min(complete.accuracy, local.accuracy) > 0.8  # a tenth by guessing
    printed = capsys.readouterr().out
    assert f"{100 * complete.accuracy:.2f}%" in printed and f"{100 * local.accuracy:.2f}%" in printed
    pixels = image.imread(figure)
    assert pixels.shape[:2] == (468, 1440) and pixels.std() > 0.1


def test_held_out_images_are_training_images():
    data = vision_transformer.digits()
    held = vision_transformer.held_out(data)
    assert len(held.train) == 1038 and len(held.test) == 259
    assert torch.equal(torch.cat([held.train, held.test]), data.train)
    assert torch.equal(torch.cat([held.train_labels, held.test_labels]), data.train_labels)


def idx_files(folder, compress):
    """40 training and 10 test images that are no digits, in MNIST's own format; also what they hold."""
    folder.mkdir(parents=True)
    rng, held = np.random.default_rng(0), []
    for name, count in (("train", 40), ("t10k", 10)):
        pixels, labels = (
            rng.integers(256, size=(count, 28, 28), dtype=np.uint8),
            np.arange(count, dtype=np.uint8) % 10,
        )
        for what, sizes, array in (
            ("images-idx3", (count, 28, 28), pixels),
            ("labels-idx1", (count,), labels),
        ):
            head = bytes([0, 0, 8, len(sizes)]) + b"".join(n.to_bytes(4, "big") for n in sizes)
            raw = head + array.tobytes()
            end = ".gz" if compress else ""
            (folder / f"{name}-{what}-ubyte{end}").write_bytes(gzip.compress(raw) if compress else raw)
        held += [pixels, labels]
    return held


@pytest.mark.parametrize("compress", [True, False])
def test_vision_transformer_on_idx_files(compress, tmp_path):
    _, _, pixels, labels = idx_files(tmp_path / "MNIST/raw", compress)
    data = vision_transformer.mnist(tmp_path, train_images=30)
    assert data.train.shape == (30, 1, 28, 28) and data.test.shape == (10, 1, 28, 28)
    np.testing.assert_allclose(data.test[:, 0].numpy() * 255, pixels, atol=1e-4)
    assert data.test_labels.tolist() == labels.tolist()
    arguments = [
        "--root",
        str(tmp_path),
        "--epochs",
        "1",
        "--radius",
        "2",
        "--out",
        str(tmp_path / "figure.png"),
    ]
    complete, local = vision_transformer.main(arguments)
    assert (complete.edges, local.edges) == (50 * 50, 29 * 29 + 99)  # 29 = 3 + 4 + 5 + 5 + 5 + 4 + 3


@pytest.mark.parametrize("images", [1, 320])
def test_vision_transformer_trains_for_few_steps(images):
    """Of ten steps the learning rate rises in one."""
    data = vision_transformer.digits()
    few = replace(data, train=data.train[:images], train_labels=data.train_labels[:images])
    settings = replace(vision_transformer.DIGITS, epochs=1)
    model = vision_transformer.train("complete", few, settings, None, seed=0).model
    before = vision_transformer.new_model(few, settings, None, seed=0)
    moved = (model.position_embedding - before.position_embedding).abs().max().item()
    assert 0 < moved < 0.1 and all(parameter.isfinite().all() for parameter in model.parameters())


def test_mnist_is_read():
    root = os.environ.get("GRAPHATTN_DATA")
    if root is None:
        pytest.skip("set GRAPHATTN_DATA to a folder with the real data")
    for folder in (Path(root), Path(root, "mnist")):
        data = vision_transformer.mnist(folder, train_images=5000)
        assert data.train.shape == (5000, 1, 28, 28) and data.test.shape == (10000, 1, 28, 28)
        assert data.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
        assert data.train_labels.bincount().tolist() == [500] * 10
        assert data.train.max() == 1 and data.train.min() == 0


def test_class_attention():
    data = vision_transformer.digits()
    models = [
        vision_transformer.new_model(data, vision_transformer.DIGITS, radius, seed=0) for radius in (None, 3)
    ]
    # A radius as large as the grid is the complete graph, listed edge by edge.
    complete, listed = (vision_transformer.class_attention(model, data.test[:2]) for model in models)
    assert complete.shape == (3, 2, 4, 4)
    torch.testing.assert_close(listed, complete)
    _, weights = models[0](data.test[:2], return_attention_weights=True)
    torch.testing.assert_close(complete[1, 1].flatten(), weights[1][1, 0, 1:].mean(1))


def test_distortions():
    images = torch.zeros(1, 1, 9, 9)
    images[0, 0, 2, 6] = 1
    still = replace(vision_transformer.DIGITS, rotation=0, shift=0, scale=0)
    torch.testing.assert_close(vision_transformer.distorted(images, still), images)
    moved = vision_transformer.distorted(images.expand(50, -1, -1, -1), replace(still, shift=2))
    row, column = (moved.sum(axis).squeeze(1) @ torch.arange(9.0) for axis in (3, 2))
    assert (row - 2).abs().max() <= 2.001 and (column - 6).abs().max() <= 2.001
    assert (row - 2).abs().max() > 1 and (row - 2).abs().min() < 0.5
    torch.testing.assert_close(moved.sum((1, 2, 3)), torch.ones(50))
    turned = vision_transformer.distorted(images.expand(50, -1, -1, -1), replace(still, rotation=30))
    row, column = (turned.sum(axis).squeeze(1) @ torch.arange(9.0) for axis in (3, 2))
    total = turned.sum((1, 2, 3))
    distance = ((row / total - 4) ** 2 + (column / total - 4) ** 2).sqrt()
    assert (distance - 8**0.5).abs().max() < 0.4  # from the centre, which stays


@pytest.mark.parametrize("wrong", [["--radius", "-1"], ["--train-images", "0"]])
def test_vision_transformer_wrong_arguments(wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        vision_transformer.main(wrong)
    assert stopped.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_vision_transformer_without_files(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        vision_transformer.main(["--root", str(tmp_path), "--out", str(tmp_path / "figure.png")])
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert "mnist_mlxtend5k.npz" in error and "train-images-idx3-ubyte" in error and "Traceback" not in error
