"""The examples that train for long: speech, text, molecules. They run as programs do, only smaller."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from matplotlib import image
from torch_geometric.data import Batch
from torch_geometric.utils import to_networkx

from datasets import make_spoken_digits
from examples import character_language_model, long_training, molecules, truncated_speech

ROOT = os.environ.get("GRAPHATTN_DATA")
needs_data = pytest.mark.skipif(ROOT is None, reason="set GRAPHATTN_DATA to a folder with the real data")


@pytest.fixture(autouse=True)
def one_thread():
    """Hundreds of small steps: a second thread only waits for its turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_drawn(path):
    pixels = image.imread(path)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 1000 and pixels.std() > 0.05


def assert_stops(main, arguments, code, *words, capsys):
    """The program ends with this code and says so in a line that has these words, without a traceback."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == code and "Traceback" not in error
    for word in words:
        assert word in error


# --- checkpoints ----------------------------------------------------------------------------------------


def speech():
    data = truncated_speech.load(truncated_speech.EMBEDDED)
    settings = replace(truncated_speech.EMBEDDED_SETTINGS, layers=1, epochs=3)
    return truncated_speech.training(truncated_speech.select(data, torch.arange(0, 480, 12)), settings, 2, 0)


def language():
    text = character_language_model.encode("to be, or not to be: " * 30, 16)
    settings = replace(
        character_language_model.SMALL, channels=16, layers=1, length=16, epochs=3, dropout=0.2
    )
    return character_language_model.training(text, settings, 2, 0)


def chemistry():
    data = molecules.encoded(molecules.generated(12, 0), "laplacian")
    settings = replace(
        molecules.SETTINGS["generated"], channels=8, epochs=3, dropout=0.2, attention_dropout=0.2
    )
    return molecules.training(data[:16], data[16:], 2, True, settings, 0)


@pytest.mark.parametrize("example", [speech, language, chemistry])
def test_what_is_resumed_ends_with_the_same_bits(example, tmp_path):
    def run(path, resume, stop_at=None):
        parts, one_epoch = example()
        done = 0

        def epoch():
            nonlocal done
            row, done = one_epoch(), done + 1
            if done == stop_at:
                raise KeyboardInterrupt
            return row

        return parts, long_training.train(
            long_training.Checkpoint(path, {"seed": 0}, resume), 3, parts, epoch
        )

    whole, history = run(tmp_path / "whole.pt", False)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken.pt", False, stop_at=2)
    torch.rand(7)  # whatever else has used the generator
    resumed, continued = run(tmp_path / "broken.pt", True)
    for row, other in zip(history, continued, strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}
    for name, value in whole["model"].state_dict().items():
        assert torch.equal(value, resumed["model"].state_dict()[name]), name
    _, again = run(tmp_path / "broken.pt", True, stop_at=1)  # nothing is left to do
    assert again == continued


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    parts, one_epoch = language()
    place = long_training.Checkpoint(tmp_path / "run.pt", {"seed": 0}, False)
    long_training.train(place, 1, parts, one_epoch)
    before = place.path.read_bytes()

    def full(state, file):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(long_training.CheckpointError, match=r"run\.pt cannot be written \(No space"):
        long_training.train(replace(place, resume=True), 2, parts, one_epoch)
    assert place.path.read_bytes() == before


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    parts, one_epoch = language()
    place = long_training.Checkpoint(tmp_path / "run.pt", {"seed": 0, "radius": 2}, True)
    long_training.train(place, 1, parts, one_epoch)
    with pytest.raises(long_training.CheckpointError, match="radius=2, not 3"):
        long_training.train(replace(place, settings={"seed": 0, "radius": 3}), 1, parts, one_epoch)
    place.path.write_bytes(place.path.read_bytes()[:1000])
    with pytest.raises(long_training.CheckpointError, match=r"run\.pt is no checkpoint"):
        long_training.train(place, 1, parts, one_epoch)
    assert long_training.train(replace(place, resume=False), 1, parts, one_epoch)[0]["bits"] > 0


def test_an_interrupted_program_goes_on(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike. " * 100)
    monkeypatch.setattr(
        character_language_model,
        "LARGE",
        replace(character_language_model.SMALL, channels=16, length=32, epochs=2),
    )
    arguments = ["--root", str(text), "--radii", "1", "3", "--sample", "10", "--out"]
    main = character_language_model.main
    expected = main([*arguments, str(tmp_path / "whole.png")])

    scored = character_language_model.bits_per_character
    monkeypatch.setattr(
        character_language_model, "bits_per_character", lambda *_: signal.default_int_handler(2, None)
    )
    arguments += [str(tmp_path / "broken.png"), "--resume"]
    assert_stops(main, arguments, 130, "Interrupted", "--resume", capsys=capsys)
    monkeypatch.setattr(character_language_model, "bits_per_character", scored)
    results = main(arguments)
    assert [replace(row, seconds=0) for row in results] == [replace(row, seconds=0) for row in expected]
    assert [row.radius for row in results] == [1, 3] and [row.reach for row in results] == [2, 6]
    assert_stops(main, [*arguments, "--seed", "1"], 1, "seed=0, not 1", capsys=capsys)


def test_a_killed_program_has_kept_its_epochs(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike. " * 100)
    script = (
        "import os; from examples import character_language_model as example\n"
        "from dataclasses import replace\n"
        "example.LARGE = replace(example.SMALL, channels=16, length=32, epochs=2)\n"
        "example.bits_per_character = lambda *_: os.kill(os.getpid(), 9)\n"
        f"example.main(['--root', {str(text)!r}, '--radii', '1', '--out', {str(tmp_path / 'a.png')!r}])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], capture_output=True)
    assert ended.returncode == -signal.SIGKILL
    kept = torch.load(tmp_path / "a" / "radius_1.pt", weights_only=True)
    assert len(kept["history"]) == 2
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["radius_1.pt"]


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 100])
def test_the_learning_rate_rises_and_falls(steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3.0)
    schedule, rates = long_training.rise_and_fall(optimizer, steps, 0.2), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    top = max(1, steps // 5)
    assert rates[:top] == pytest.approx([3.0 * (i + 1) / top for i in range(top)])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)
    assert all(a > b > 0 for a, b in zip(rates[top - 1 :], rates[top:]))
    if steps == 5:  # the first is the highest, a step of the cosine each
        assert rates == pytest.approx([3 * (1 + np.cos(np.pi * i / 5)) / 2 for i in range(5)])


# --- what all of them say -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "wrong", "words"),
    [
        (truncated_speech, ["--radii", "-1"], ["--radii", "-1"]),
        (truncated_speech, ["--radii", "2", "2"], ["--radii", "different"]),
        (truncated_speech, ["--longest", "0"], ["--longest"]),
        (truncated_speech, ["--validate", "--leave-one-speaker-out"], ["--validate"]),
        (character_language_model, ["--radii", "-1"], ["--radii", "-1"]),
        (character_language_model, ["--temperature", "0"], ["--temperature"]),
        (character_language_model, ["--temperature", "nan"], ["--temperature"]),
        (character_language_model, ["--prompt", ""], ["--prompt"]),
        (character_language_model, ["--prompt", "a\u2603"], ["--prompt", "\u2603"]),
        (molecules, ["--folds", "1"], ["--folds"]),
        (molecules, ["--folds", "2", "--validate"], ["--folds"]),
        (molecules, ["--pairs", "5"], ["--pairs"]),
        (molecules, ["--root", "."], ["--root", "--dataset"]),
    ],
)
def test_wrong_arguments(example, wrong, words, tmp_path, capsys):
    assert_stops(example.main, [*wrong, "--out", str(tmp_path / "a.png")], 2, *words, capsys=capsys)


# --- truncated_speech -----------------------------------------------------------------------------------


def test_truncated_speech(tmp_path, capsys):
    figure = tmp_path / "new" / "speech.png"
    window, complete = truncated_speech.main(
        ["--epochs", "3", "--radii", "4", "--longest", "300", "--out", str(figure)]
    )
    train, _ = truncated_speech.split(truncated_speech.load(truncated_speech.EMBEDDED), True, False)
    count = train.ptr.diff()
    # 9 a frame less 1 + 2 + 3 + 4 at both ends: every recording has more than 4 frames
    assert window.edges == int((9 * count - 20).sum()) and complete.edges == int((count**2).sum())
    for row in (window, complete):
        assert row.accuracy[0] > 0.5 and row.seconds > 0  # a tenth by guessing
    if os.path.exists("/proc/self/status"):
        assert 1 < window.memory < 200 and 1 < complete.memory < 200
    assert_drawn(figure)
    printed = capsys.readouterr().out
    assert f"{100 * window.accuracy[0]:.2f}" in printed and f"{complete.edges:,}" in printed


def test_leave_one_speaker_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(truncated_speech, "peak_memory", lambda *_: None)
    data = truncated_speech.load(truncated_speech.EMBEDDED)
    few = truncated_speech.select(data, (data.speaker < 3) & (data.index == 0))
    few = replace(few, speakers=few.speakers[:3])
    monkeypatch.setattr(truncated_speech, "load", lambda path: few)
    seen = []
    original = truncated_speech.training
    monkeypatch.setattr(
        truncated_speech,
        "training",
        lambda learn, *rest: (seen.append(learn.speaker.unique().tolist()), original(learn, *rest))[1],
    )
    arguments = ["--epochs", "1", "--radii", "1", "--leave-one-speaker-out", "--longest", "50"]
    results = truncated_speech.main([*arguments, "--out", str(tmp_path / "a.png")])
    assert seen == [[1, 2], [0, 2], [0, 1]] * 2
    assert all(len(row.accuracy) == 3 for row in results)
    assert f"without {data.speakers[2]}" in capsys.readouterr().out


def test_spoken_digits():
    data = truncated_speech.load(truncated_speech.EMBEDDED)
    assert len(data) == 480 and len(set(data.speakers)) == 24
    assert data.digit.bincount().tolist() == [48] * 10 and data.speaker.bincount().tolist() == [20] * 24
    assert data.frames.shape == (14937, 40) and data.frames.std().item() == pytest.approx(1)
    means = [data.frames[a:b].mean(0) for a, b in zip(data.ptr[:-1], data.ptr[1:])]
    assert torch.stack(means).abs().max() < 1e-5
    learn, test = truncated_speech.split(data, True, False)
    assert (len(learn), len(test)) == (360, 120)
    assert not set(learn.speaker.tolist()) & set(test.speaker.tolist())
    choose, validation = truncated_speech.split(data, True, True)
    assert (len(choose), len(validation)) == (240, 120)
    assert not set(test.speaker.tolist()) & {*choose.speaker.tolist(), *validation.speaker.tolist()}


@needs_data
def test_official_split_of_real_speech():
    data = truncated_speech.load(truncated_speech._find(Path(ROOT)))
    assert len(data) == 3000 and len(data.speakers) == 6
    learn, test = truncated_speech.split(data, False, False)
    assert (len(learn), len(test)) == (2700, 300)
    assert test.index.unique().tolist() == [0, 1, 2, 3, 4]
    choose, validation = truncated_speech.split(data, False, True)
    assert (len(choose), len(validation)) == (2400, 300)
    assert validation.index.unique().tolist() == [5, 6, 7, 8, 9] and choose.index.min() == 10


def test_log_mel_of_a_tone():
    second = np.arange(8000) / 8000
    for hertz in (300, 1000, 2500):
        frames = make_spoken_digits.log_mel(np.sin(2 * np.pi * hertz * second))
        assert frames.shape == (98, 40)  # 8000 = 97 · 80 + 200 and 40 left over
        # 41 equal steps of mel up to 4 kHz; the band with the middle nearest to the tone is the loudest.
        mel = 2595 * np.log10(1 + np.array([hertz, 4000]) / 700)
        assert set(frames.argmax(1)) == {round(41 * mel[0] / mel[1]) - 1}
    np.testing.assert_allclose(make_spoken_digits.log_mel(np.zeros(400)), np.log(1e-6))


def ragged():
    """Three recordings of 5, 3 and 9 frames, whose bins rise with the time."""
    ptr = torch.tensor([0, 5, 8, 17])
    time = torch.cat([torch.arange(n) / 1.0 for n in (5, 3, 9)])
    frames = time.unsqueeze(1) + torch.arange(4)
    return truncated_speech.Recordings(
        frames,
        ptr,
        torch.tensor([7, 8, 9]),
        torch.tensor([0, 1, 2]),
        torch.tensor([5, 6, 7]),
        ("a", "b", "c"),
    )


def test_select():
    data = ragged()
    picked = truncated_speech.select(data, torch.tensor([2, 0]))
    assert picked.ptr.tolist() == [0, 9, 14] and picked.digit.tolist() == [9, 7]
    assert torch.equal(picked.frames, torch.cat([data.frames[8:], data.frames[:5]]))
    masked = truncated_speech.select(data, torch.tensor([True, False, True]))
    assert masked.digit.tolist() == [7, 9] and torch.equal(masked.frames[:5], data.frames[:5])


def test_distortions():
    data, still = ragged(), replace(truncated_speech.EMBEDDED_SETTINGS, stretch=0.0, mask=0.0)
    same = truncated_speech.distorted(data, still)
    torch.testing.assert_close(same.frames, data.frames)
    assert torch.equal(same.ptr, data.ptr)
    lengths = set()
    for _ in range(20):
        moved = truncated_speech.distorted(data, replace(still, stretch=0.4))
        count, new = data.ptr.diff(), moved.ptr.diff()
        assert ((new / count - 1).abs() <= 0.4 + 0.5 / count).all() and moved.ptr[-1] == len(moved.frames)
        lengths.add(tuple(new.tolist()))
        for b in range(3):
            # Frames are samples in the middle of equal shares of the recording, held at both ends.
            n, m = int(count[b]), int(new[b])
            time = ((torch.arange(m) + 0.5) * n / m - 0.5).clamp(0, n - 1)
            frames = moved.frames[moved.ptr[b] : moved.ptr[b + 1]]
            torch.testing.assert_close(frames - frames[:1], (time - time[0]).unsqueeze(1).expand(-1, 4))
            assert frames[0, 1] - frames[0, 0] > 0.3  # the bins are stretched as well
    assert len(lengths) > 5
    blotted = truncated_speech.distorted(data, replace(still, mask=0.9)).frames
    hidden = blotted != data.frames
    assert hidden.any() and not hidden.all() and (blotted[hidden] == 0).all()


@pytest.mark.parametrize("radius", [0, 2, None])
def test_recordings_of_a_batch_do_not_hear_each_other(radius):
    torch.manual_seed(0)
    data = ragged()
    model = truncated_speech.Listener(4, truncated_speech.EMBEDDED_SETTINGS, radius).eval()
    with torch.no_grad():
        together = model(data.frames, data.ptr)
        alone = [truncated_speech.select(data, torch.tensor([b])) for b in range(3)]
        torch.testing.assert_close(together, torch.cat([model(one.frames, one.ptr) for one in alone]))


def test_speech_that_cannot_be_read(tmp_path, capsys):
    arguments = ["--root", str(tmp_path), "--out", str(tmp_path / "a.png")]
    assert_stops(
        truncated_speech.main, arguments, 1, truncated_speech.FILE, "does not exist", "--root", capsys=capsys
    )
    file = tmp_path / truncated_speech.FILE
    file.write_bytes(b"no archive")
    assert_stops(truncated_speech.main, arguments, 1, str(file), "log-mel", capsys=capsys)
    with np.load(truncated_speech.EMBEDDED) as embedded:
        held = dict(embedded)
    for wrong, word in (
        ({"offsets": held["offsets"][:-1]}, "offsets"),
        ({"frames": held["frames"][:-1]}, "offsets"),
        ({"frames": np.full_like(held["frames"], np.nan)}, "finite"),
        ({"label": held["label"] + 1}, "label"),
        ({"speakers": held["speakers"][:-1]}, "speaker"),
        ({"index": held["index"] + 9}, "none for the test"),
    ):
        np.savez(file, **{**held, **wrong})
        assert_stops(truncated_speech.main, arguments, 1, str(file), word, capsys=capsys)


# --- character_language_model ---------------------------------------------------------------------------


def test_character_language_model(tmp_path, monkeypatch, capsys):
    figure = tmp_path / "new" / "text.png"
    monkeypatch.setattr(character_language_model, "own_source", lambda: "if (a $ b) = c_d: ^e\n" * 400)
    arguments = [
        "--radii",
        "0",
        "3",
        "--sample",
        "40",
        "--prompt",
        "if",
        "--epochs",
        "4",
        "--out",
        str(figure),
    ]
    near, far = character_language_model.main(arguments)
    assert (near.reach, far.reach) == (0, 6)
    # Eight blanks and one of the other characters twice: what comes next is certain after two characters.
    assert far.test_bits < 0.3 < near.test_bits < 2.5
    assert far.sample.startswith("if") and len(far.sample) == 42
    assert_drawn(figure)
    assert f"{far.test_bits:.3f}" in capsys.readouterr().out


def writer():
    torch.manual_seed(0)
    settings = replace(character_language_model.SMALL, channels=16, layers=3)
    return character_language_model.Writer(11, settings, radius=4).eval()


@torch.no_grad()
def test_predictions_look_back_as_far_as_is_said():
    model, tokens = writer(), torch.randint(11, (60,))
    assert model.reach == 12
    scores = model(tokens)
    torch.testing.assert_close(model(tokens[-13:])[-1], scores[-1])
    for place, sees in ((59, True), (47, True), (46, False), (0, False)):
        changed = tokens.clone()
        changed[place] = (tokens[place] + 1) % 11
        assert torch.equal(model(changed)[-1], scores[-1]) is not sees, place
    torch.testing.assert_close(model(tokens.view(2, 30))[0], scores[:30])


def test_bits_per_character():
    model, tokens = writer(), torch.randint(11, (100,))
    with torch.no_grad():
        chance = model(tokens).log_softmax(-1)[torch.arange(99), tokens[1:]]
    expected = -chance.mean().item() / np.log(2)
    for piece in (1, 10, 99, 1000):
        assert character_language_model.bits_per_character(model, tokens, piece) == pytest.approx(expected)
    torch.nn.init.zeros_(model.next.weight)
    torch.nn.init.zeros_(model.next.bias)
    assert character_language_model.bits_per_character(model, tokens) == pytest.approx(np.log2(11))


def test_samples_follow_the_model():
    model, alphabet = writer(), "abcdefghijk"
    torch.nn.init.zeros_(model.next.weight)
    with torch.no_grad():
        model.next.bias.copy_(torch.tensor([0.5, 0.5] + [0.0] * 9).log())
    written = character_language_model.sample(model, alphabet, "kk", 200, 1.0, seed=0)
    assert written[:2] == "kk" and set(written[2:]) == {"a", "b"} and 70 < written.count("a") < 130
    assert character_language_model.sample(model, alphabet, "kk", 200, 1.0, seed=0) == written
    assert character_language_model.sample(model, alphabet, "kk", 200, 1.0, seed=1) != written


def test_encode():
    text = character_language_model.encode("abca" * 10, 3)
    assert (
        text.alphabet == "abc"
        and text.train.tolist() == [0, 1, 2, 0] * 9
        and text.test.tolist() == [0, 1, 2, 0]
    )
    with pytest.raises(ValueError, match=r"at least 50 characters.*it has 40"):
        character_language_model.encode("abca" * 10, 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["input.txt"]),
        (b"", ["at least 2570 characters", "it has 0"]),
        (b"short", ["at least 2570 characters", "it has 5"]),
        (b"\xff\xfe" * 9000, ["UTF-8", "input.txt"]),
    ],
)
def test_texts_that_cannot_be_learnt(content, words, tmp_path, capsys):
    if content is not None:
        (tmp_path / "input.txt").write_bytes(content)
    arguments = ["--root", str(tmp_path), "--out", str(tmp_path / "a.png")]
    assert_stops(character_language_model.main, arguments, 1, *words, capsys=capsys)


@needs_data
def test_tiny_shakespeare_is_read():
    text = character_language_model.read(Path(ROOT))
    assert len(text) == 1_115_394 and len(set(text)) == 65 and text.startswith("First Citizen:")
    assert character_language_model.read(Path(ROOT, "tinyshakespeare", "input.txt")) == text


# --- molecules ------------------------------------------------------------------------------------------


def test_molecules(tmp_path, monkeypatch, capsys):
    figure = tmp_path / "new" / "molecules.png"
    often = replace(molecules.SETTINGS["generated"], channels=16, batch=4)
    monkeypatch.setitem(molecules.SETTINGS, "generated", often)
    arguments = ["--pairs", "60", "--folds", "2", "--epochs", "8", "--encodings", "none", "random_walk"]
    none, walk = molecules.main([*arguments, "--out", str(figure)])
    # Twins get the same answer, so one of two is right.
    assert none.scores.shape == (2, 8) and (none.scores == 50).all()
    assert walk.last.mean() > 80
    assert_drawn(figure)
    printed = capsys.readouterr().out
    assert "50.0 ± 0.0" in printed and f"{walk.last.mean():.1f} ± {walk.last.std():.1f}" in printed


@torch.no_grad()
def test_twins_differ_in_rings_alone():
    data = molecules.generated(20, seed=3)
    graphs = []
    for molecule in data:
        graph = to_networkx(molecule, node_attrs=["x"], to_undirected=True)
        nx.set_node_attributes(graph, {i: str(x) for i, x in graph.nodes("x")}, "element")
        assert molecule.is_undirected() and nx.is_connected(graph)
        assert [len(ring) for ring in nx.cycle_basis(graph)] == [[6, 6], [5, 5]][int(molecule.y)]
        graphs.append(graph)
    assert len({graph.number_of_nodes() for graph in graphs}) > 3
    for one, other in zip(graphs[::2], graphs[1::2]):
        hashes = [
            nx.weisfeiler_lehman_graph_hash(g, node_attr="element", iterations=g.number_of_nodes())
            for g in (one, other)
        ]
        assert hashes[0] == hashes[1]
    torch.manual_seed(0)
    for encoding, differ in (("none", False), ("random_walk", True), ("laplacian", True)):
        held = molecules.encoded(data, encoding)
        settings = molecules.SETTINGS["generated"]
        model = molecules.Classifier(3, held[0].encoding.size(1), 2, settings).eval()
        scores = model(Batch.from_data_list(held))
        gap = (scores[::2] - scores[1::2]).abs().amax(1)
        assert (gap > 1e-4).all() if differ else (gap < 1e-6).all()
        assert (scores[0] - scores[2]).abs().max() > 1e-3  # other side chains are seen


def test_folds_are_stratified():
    y = torch.tensor([0] * 41 + [1] * 22 + [2] * 10)[torch.randperm(73)]
    fold = molecules.folds(y, 10, seed=1)
    assert torch.equal(fold, molecules.folds(y, 10, seed=1))
    assert not torch.equal(fold, molecules.folds(y, 10, seed=2))
    count = torch.stack([fold[y == label].bincount(minlength=10) for label in range(3)])
    assert (count.amax(1) - count.amin(1)).max() <= 1 and count.sum(0).tolist() == [8, 8, 8] + [7] * 7


def test_protocols():
    scores = np.array([[50.0, 90.0, 70.0], [60.0, 70.0, 80.0]])
    row = molecules.Result("none", scores, 1.0, None)
    assert row.last.tolist() == [70, 80] and row.best.tolist() == [90, 70]  # mean 80 after the second epoch
    lines = molecules.table("PROTEINS", [row]).splitlines()
    assert "75.0 ± 5.0" in lines[1] and "80.0 ± 10.0" in lines[1]
    assert "76.2 ± 2.8" in lines[2] and "Xu et al." in lines[2]


def test_validation_leaves_the_test_fold_out(tmp_path, monkeypatch):
    seen = []

    def stop(learn, test, *_):
        seen.append((len(learn), len(test)))
        raise KeyboardInterrupt

    monkeypatch.setattr(molecules, "training", stop)
    for arguments in ([], ["--validate"]):
        with pytest.raises(SystemExit):
            molecules.main([*arguments, "--pairs", "20", "--out", str(tmp_path / "a.png")])
    assert seen == [(36, 4), (32, 4)]


@needs_data
def test_real_molecules(tmp_path, capsys):
    arguments = ["--dataset", "MUTAG", "--root", ROOT, "--encodings", "random_walk", "--folds", "2"]
    (result,) = molecules.main([*arguments, "--epochs", "12", "--out", str(tmp_path / "a.png")])
    assert result.last.mean() > 66.5  # 125 of 188 belong to one class
    assert "89.4 ± 5.6" in capsys.readouterr().out


def test_missing_molecules_end_with_one_line(tmp_path, capsys):
    raw = tmp_path / "tudataset/MUTAG/raw"
    raw.mkdir(parents=True)
    (raw / "MUTAG_A.txt").touch()
    arguments = ["--dataset", "MUTAG", "--root", str(tmp_path), "--out", str(tmp_path / "a.png")]
    assert_stops(molecules.main, arguments, 1, "MUTAG_graph_labels.txt", str(raw), capsys=capsys)
