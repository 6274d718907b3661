"""`nci plot`: the numbers behind every figure against plain counts, the files, and mistakes as one line."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer, ErrorbarContainer
from tiny import POSITION, tiny_config

import nci
from nci import cli
from nci.corpus import open_dataset
from nci.errors import ConfigError, DataError
from nci.evaluate import evaluate
from nci.figures import FIGURES, beam, curve, frequency, style
from nci.figures.frequency import bin_of
from nci.figures.prefixes import prefix_mass
from nci.figures.scene import CannotDrawError, Scene, similar_pairs
from nci.figures.style import COLOURS, canvas, save, short, styled
from nci.index import Index
from nci.plots import learning_curve, systems_plot
from nci.records import Hit

Nci = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, as_before: None) -> None:
    """Times are taken in no time."""
    monkeypatch.setattr(beam, "SECONDS", 0.001)
    monkeypatch.setattr(beam, "ROUNDS", 1)
    monkeypatch.setattr(beam, "BEAMS", (1, 4, 100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Path:
    out = tmp_path_factory.mktemp("index") / "my.index"
    nci.build(beir, out, tiny_config(encoder, train={"evaluations": 2}), device="cpu")
    return out


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Path:
    out = tmp_path_factory.mktemp("index") / "untrained.index"
    nci.build(beir, out, tiny_config(encoder, train={"epochs": 0}), device="cpu")
    return out


@pytest.fixture(scope="module")
def index(folder: Path) -> Index:
    return nci.load(folder)


def is_picture(path: Path) -> bool:
    if path.suffix == ".png":
        return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    return ElementTree.parse(path).getroot().tag.endswith("svg") and path.stat().st_size > 5000


# All at once


@pytest.fixture(scope="module")
def drawn(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, untrained: Path, beir: Path
) -> tuple[Path, dict[str, Any]]:
    """Everything drawn once, and the numbers; the second index has no learning curve."""
    out = tmp_path_factory.mktemp("drawn")
    patch = pytest.MonkeyPatch()
    patch.setattr(beam, "SECONDS", 0.001)
    patch.setattr(beam, "BEAMS", (1, 4, 100))
    argv = ["plot", folder, untrained, "--data", beir, "--split", "test,dev", "-o", out / "new" / "pictures"]
    assert cli.main([str(word) for word in [*argv, "--json", out / "numbers.json", "--quiet"]]) == 0
    patch.undo()
    return out / "new" / "pictures", json.loads((out / "numbers.json").read_text())


@pytest.mark.slow
def test_every_figure_is_two_files(drawn: tuple[Path, dict[str, Any]]) -> None:
    out, numbers = drawn
    assert {path.name for path in out.iterdir()} == {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert all(is_picture(path) for path in out.iterdir())
    assert set(numbers["figures"]) == set(FIGURES)
    assert numbers["split"] == "test,dev"


@pytest.mark.slow
def test_the_tree(drawn: tuple[Path, dict[str, Any]], index: Index) -> None:
    found = drawn[1]["figures"]["tree"]
    ids = [index.trie.semantic_id(number) for number in range(len(index))]
    assert found["documents_by_depth"] == {str(depth): count for depth, count in Counter(map(len, ids)).items()}
    prefixes = {path[:n] for path in ids for n in range(len(path) + 1)}
    children = Counter(prefix[:-1] for prefix in prefixes if prefix)
    levels = [Counter(str(count) for prefix, count in children.items() if len(prefix) == n) for n in range(9)]
    assert found["clusters_by_fanout"] == [dict(level) for level in levels if level]


@pytest.mark.slow
def test_the_beam(drawn: tuple[Path, dict[str, Any]], index: Index, beir: Path) -> None:
    found = drawn[1]["figures"]["beam"]
    dataset = open_dataset(beir)
    assert dataset is not None
    parts = [dataset.split(name) for name in ("test", "dev")]
    queries, qrels = [q for part in parts for q in part[0]], parts[0][1] | parts[1][1]
    assert found["queries"] == len(queries) == 24
    assert [point["beam"] for point in found["points"]] == [1, 4, 100]
    for point in found["points"]:
        wanted = evaluate(index.run(queries, 100, beam=point["beam"]), qrels, ("R@1", "R@10", "R@100"))
        assert {name: point[name] for name in wanted} == pytest.approx(wanted)
        assert 0 < point["ms"] < 10_000
    assert found["points"][0]["R@100"] < found["points"][2]["R@100"] == 1


@pytest.mark.slow
def test_the_frequency(drawn: tuple[Path, dict[str, Any]], index: Index, beir: Path) -> None:
    bins = {each["training_queries"]: each for each in drawn[1]["figures"]["frequency"]["bins"]}
    dataset = open_dataset(beir)
    assert dataset is not None
    trained = Counter(doc_id for grades in dataset.qrels("train").values() for doc_id in grades)
    assert set(trained.values()) == {2}, "every second document has two training queries"
    assert list(bins) == ["0 (unseen)", "2"]
    ranks: dict[str, list[int]] = {name: [] for name in bins}
    for split in ("test", "dev"):
        queries, qrels = dataset.split(split)
        for query in queries:
            (doc_id,) = qrels[query.query_id]
            hits = [hit.doc_id for hit in index.search(query.text, 10)]
            ranks["2" if trained[doc_id] else "0 (unseen)"].append(hits.index(doc_id) if doc_id in hits else 10)
    for name, each in bins.items():
        assert each["pairs"] == len(ranks[name]) == 12
        for k in (1, 10):
            share = sum(rank < k for rank in ranks[name]) / len(ranks[name])
            assert each[f"found@{k}"] == pytest.approx(share)
            assert each[f"low@{k}"] <= share <= each[f"high@{k}"]
    assert bins["2"]["low@1"] < bins["2"]["found@1"] < bins["2"]["high@1"]


@pytest.mark.slow
def test_the_prefixes(drawn: tuple[Path, dict[str, Any]], index: Index) -> None:
    found = drawn[1]["figures"]["prefixes"]
    assert [list(group) for group in found["queries"]] == [["A-1", "A-2"], ["B-1", "B-2"]]
    texts = {name: text for group in found["queries"] for name, text in group.items()}
    assert len(set(texts.values())) == 4
    for name, text in texts.items():
        wanted: dict[str, float] = {}
        for hit in index.search(text, 50, length_penalty=0.0):
            prefix = "-".join(map(str, hit.semantic_id[:4]))
            wanted[prefix] = wanted.get(prefix, 0) + math.exp(hit.score)
        assert found["probability"][name] == pytest.approx(wanted, rel=1e-4)
        assert 0.9 < sum(found["probability"][name].values()) <= 1 + 1e-4, "50 of 60 documents hold nearly all of it"


@pytest.mark.slow
def test_the_map(drawn: tuple[Path, dict[str, Any]], index: Index) -> None:
    found = drawn[1]["figures"]["tsne"]
    texts = {name: text for group in found["queries"] for name, text in group.items()}
    scores = {name: {hit.doc_id: hit.score for hit in index.search(text, 50)} for name, text in texts.items()}
    assert {each["doc_id"] for each in found["documents"]} == {doc_id for hits in scores.values() for doc_id in hits}
    number = {doc_id: n for n, doc_id in enumerate(index.doc_ids)}
    for each in found["documents"]:
        best = max(hits.get(each["doc_id"], -math.inf) for hits in scores.values())
        assert scores[each["query"]][each["doc_id"]] == pytest.approx(best)
        assert each["digit"] == index.trie.semantic_id(number[each["doc_id"]])[0]
        assert math.isfinite(each["x"] + each["y"])
    assert len({(each["x"], each["y"]) for each in found["documents"]}) > 10


@pytest.mark.slow
def test_learning_curves_of_indexes_that_have_one(drawn: tuple[Path, dict[str, Any]], folder: Path) -> None:
    curves = drawn[1]["figures"]["curve"]["curves"]
    ((label, points),) = curves.items()
    weights = sum(p.numel() for p in nci.load(folder).engine.model.parameters())
    assert label.startswith("my.index (")
    assert f"{weights / 1e6:.3g} M" in label
    epochs = [epoch for epoch, _ in points["dev"]["R@1"]]
    assert epochs == pytest.approx([0.5, 1.0], abs=0.05), "two searches of dev in one epoch"
    assert points["loss"]


# Parts


def test_groups_are_similar_inside_and_different_outside() -> None:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((40, 32))
    vectors[7] = vectors[3] + 0.05 * generator.standard_normal(32)
    vectors[20] = vectors[30] + 0.1 * generator.standard_normal(32)
    vectors[25] = vectors[3] + 0.08 * generator.standard_normal(32)  # close to the first pair, so in neither group
    vectors[39] = 3 * vectors[38]  # the closest of all, but about the same document
    keys = [{str(row)} for row in range(38)] + [{"one"}, {"one"}]
    assert similar_pairs(vectors, keys) == [(3, 7), (20, 30)]


def test_groups_need_two_pairs() -> None:
    with pytest.raises(CannotDrawError, match="too few"):
        similar_pairs(np.eye(3), [{"a"}, {"b"}, {"c"}])
    with pytest.raises(CannotDrawError, match="too few"):
        similar_pairs(np.eye(5), [{"a"}] * 5)


@given(st.integers(0, 10_000))
def test_bins_double(count: int) -> None:
    name, first = bin_of(count)
    numbers = [int(part) for part in name.removesuffix(" (unseen)").split("-")]
    assert numbers[0] == first <= count <= numbers[-1]
    if count:
        assert (numbers[-1] & (numbers[-1] - 1)) == 0
        assert bin_of(numbers[-1] + 1)[1] == numbers[-1] + 1, "the next bin begins where this one ends"


def test_documents_of_a_prefix_share_its_bar() -> None:
    ids = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (0, 1), (1, 2, 3)]
    shares = (0.4, 0.2, 0.1, 0.3)
    hits = [Hit(1, str(i), math.log(p), semantic_id=i) for i, p in zip(ids, shares, strict=True)]
    mass = prefix_mass(hits)
    assert list(mass) == [(0, 1), (1, 2, 3), (1, 2, 3, 4)], "in the order of the tree"
    assert list(mass.values()) == pytest.approx([0.1, 0.3, 0.6])


def test_an_interval_counts_documents_not_queries() -> None:
    apart = {(f"q{n}", f"d{n}"): n % 2 for n in range(20)}
    together = {(f"q{n}", f"d{n % 2}"): n % 2 for n in range(20)}
    narrow, wide = frequency._summary(apart), frequency._summary(together)
    assert narrow["found@1"] == wide["found@1"] == 0.5
    assert 0.2 < narrow["low@1"] < narrow["high@1"] < 0.8
    assert (wide["low@1"], wide["high@1"]) == (0, 1), "two documents, found always or never"


def test_a_picture_is_the_same_file_again_and_nothing_else_is_left(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with styled():
            figure, (axes,) = canvas("costs $5 or $10, ünïcode 検索")
            axes.bar([1, 2], [3, 4], color=COLOURS[0], label="from $x_1$ to $")
            assert [path.name for path in save(figure, tmp_path / name)] == [f"{name}.png", f"{name}.svg"]
    assert len(list(tmp_path.iterdir())) == 4
    for kind in ("png", "svg"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()


def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    with styled():
        figure, _ = canvas("good")
        save(figure, tmp_path / "it")
        before = (tmp_path / "it.png").read_bytes()
        figure.savefig = lambda path, **_: (Path(path).write_bytes(b"half"), 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save(figure, tmp_path / "it")
    assert (tmp_path / "it.png").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_long_texts_are_cut_between_words() -> None:
    assert short("a  b\nc") == "a b c"
    assert short("one two three four", 13) == "one two …"


def test_a_foreign_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "curve.csv").write_text("step,loss\none,2\n")
    with pytest.raises(DataError, match=r"curve\.csv is no learning curve"):
        curve.read_curve(tmp_path / "curve.csv")


@pytest.mark.slow
def test_other_commands_draw_on_the_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    systems = {"bm25": {"R@1": 0.4}, "nci": {"R@1": 0.5}}
    times = {"bm25": 0.0, "nci": 12.0}
    assert systems_plot(systems, times, tmp_path / "systems.svg", title="data, test")
    assert "data, test" in (tmp_path / "systems.svg").read_text()
    assert learning_curve(folder / "reports" / "curve.csv", tmp_path / "curve.png")
    assert all(is_picture(path) for path in tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not systems_plot(systems, times, tmp_path / "more.png", title="")
    assert not learning_curve(folder / "reports" / "curve.csv", tmp_path / "more.png")
    assert not (tmp_path / "more.png").exists()


def test_names_beside_points_cover_nothing() -> None:
    """Points that are close together, and some in the corners."""
    spots = [(4.0 + n / 100, 50.0 + n / 50) for n in range(8)] + [(0.5, 0.0), (100.0, 100.0), (100.0, 0.0)]
    with styled():
        figure, (axes,) = canvas("close")
        axes.scatter(*zip(*spots, strict=True))
        axes.set(xscale="log")
        style.round_values(axes.xaxis, [x for x, _ in spots])
        style.label_points(axes, [(f"system:number+{n}", spot) for n, spot in enumerate(spots)], size=8)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        frame = axes.get_window_extent(renderer).padded(1)
        boxes = [text.get_window_extent(renderer) for text in axes.texts if text.get_text()]
        assert len(boxes) == len(spots)
        for number, box in enumerate(boxes):
            assert frame.x0 <= box.x0 < box.x1 <= frame.x1
            assert frame.y0 <= box.y0 < box.y1 <= frame.y1
            assert not any(box.padded(-0.5).overlaps(other.padded(-0.5)) for other in boxes[:number])
            assert not any(box.contains(*axes.transData.transform(spot)) for spot in spots)


@pytest.mark.parametrize("values", [(9.2, 9.3, 13.5), (3, 14), (1, 900), (7, 7)])
def test_ticks_are_round_and_enough(values: tuple[float, ...]) -> None:
    with styled():
        _, (axes,) = canvas("")
        axes.set(xscale="log")
        style.round_values(axes.xaxis, values)
        ticks = [float(label.get_text()) for label in axes.get_xticklabels()]
    assert ticks == sorted(set(ticks))
    assert min(ticks) <= min(values) <= max(values) <= max(ticks)
    assert len(ticks) <= 15
    assert len(ticks) >= 4 or min(values) == max(values)


def test_few_pairs_have_no_interval_and_are_lighter(index: Index, beir: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(beir, tmp_path / "data"))
    for name, keep in (("train", range(9, 60)), ("test", range(60))):
        lines = (data / "qrels" / f"{name}.tsv").read_text().splitlines()
        (data / "qrels" / f"{name}.tsv").write_text(
            "\n".join([lines[0], *(lines[1:][n] for n in keep if n + 1 < len(lines))])
        )
    with styled():
        drawing = frequency.draw(Scene([str(index.folder)], open_dataset(data), ["test"]))
        bins, (axes,) = drawing.numbers["bins"], drawing.figure.axes
        bars = [container for container in axes.containers if isinstance(container, BarContainer)]
        few = [each["pairs"] < 10 for each in bins]
        assert True in few
        for container in bars:
            assert [bar.get_alpha() is not None for bar in container] == few
        intervals = [c for c in axes.containers if isinstance(c, ErrorbarContainer)]
        assert len(intervals) == len(bars) * few.count(False)


# The command


@pytest.mark.slow
def test_two_files_are_two_groups(run: Nci, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("apple pear\nripe plum juice\n")
    (tmp_path / "b.txt").write_text("violin $100 and $200\n")
    groups = [tmp_path / "a.txt", tmp_path / "b.txt"]
    code, out, err = run(
        "plot", folder, "--figures", "prefixes,tsne", "--queries", *groups, "-o", tmp_path / "out", "--json", "-"
    )
    assert code == 0, err
    found = json.loads(out)["figures"]["prefixes"]["queries"]
    assert found == [{"A-1": "apple pear", "A-2": "ripe plum juice"}, {"B-1": "violin $100 and $200"}]
    assert "query B-1: violin $100 and $200" in err
    assert all(is_picture(path) for path in (tmp_path / "out").iterdir())


@pytest.mark.slow
def test_an_index_as_in_the_paper(run: Nci, encoder: Path, beir: Path, tmp_path: Path) -> None:
    """No anchor, no folded search; groups chosen from one file."""
    nci.build(beir, tmp_path / "my.index", tiny_config(encoder, model=POSITION), device="cpu")
    texts = ["apple pear plum", "court judge jury", "plum pear cherry", "jury court trial", "oven bread soup"]
    (tmp_path / "q.txt").write_text("\n".join(texts) + "\n")
    argv = ["plot", tmp_path / "my.index", "--data", beir, "--queries", tmp_path / "q.txt", "-o", tmp_path / "out"]
    code, out, err = run(*argv, "--json", "-")
    assert code == 0, err
    found = json.loads(out)["figures"]
    assert set(found) == set(FIGURES)
    chosen = [text for group in found["tsne"]["queries"] for text in group.values()]
    assert len(set(chosen)) == 4
    assert set(chosen) <= set(texts)
    assert all(0 < sum(mass.values()) <= 1 + 1e-4 for mass in found["prefixes"]["probability"].values())


@pytest.mark.slow
def test_without_data_the_others_are_drawn(run: Nci, folder: Path, tmp_path: Path) -> None:
    code, out, err = run("plot", folder, "-o", tmp_path)
    assert code == 0
    names = ["curve.png", "curve.svg", "tree.png", "tree.svg"]
    assert out.splitlines() == [str(tmp_path / name) for name in names]
    lines = err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["no prefixes", "no tsne", "no beam", "no frequency"]
    assert all("--data DATA" in line for line in lines)


def test_an_untrained_index_has_no_learning_curve(run: Nci, untrained: Path, tmp_path: Path) -> None:
    code, out, err = run("plot", untrained, "--figures", "curve,tree", "-o", tmp_path)
    assert (code, len(out.splitlines())) == (0, 2)
    assert "was not trained" in err
    code, out, err = run("plot", untrained, "--figures", "curve", "-o", tmp_path / "new", "--quiet")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "nothing could be drawn; curve: " in err
    assert not (tmp_path / "new").exists()


def test_a_generation_alone_has_no_learning_curve(run: Nci, folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder / "generation-000001", tmp_path / "elsewhere" / "generation-000001")
    code, _, err = run("plot", moved, "--figures", "curve", "-o", tmp_path / "out", "--quiet")
    assert code == 1
    assert "stays in the folder where an index was built" in err


def test_without_training_queries_there_is_no_frequency(beir: Path, folder: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(beir, tmp_path / "data"))
    (data / "qrels" / "train.tsv").unlink()
    with pytest.raises(CannotDrawError, match=r"needs qrels/train\.tsv"):
        Scene([str(folder)], open_dataset(data)).trained_on()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--figures", "beam,pie"], "--figures are out of curve, prefixes"),
        (["--figures", ","], "--figures are out of"),
        (["--data", "nowhere"], "nowhere is no BEIR folder"),
        (["--split", "tomorrow"], 'no split "tomorrow"'),
        (["--split", "empty"], "no query of empty has a relevant document"),
        (["--queries", "nowhere.txt"], "nowhere.txt"),
        (["--queries", "a.txt", "b.txt", "c.txt"], "--queries are one or two files, not 3"),
        (["-o", "taken"], "-o taken: is a file"),
        (["-o", "taken/deeper"], "-o taken/deeper: cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    run: Nci, folder: Path, beir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    data = Path(shutil.copytree(beir, tmp_path / "data"))
    (data / "qrels" / "empty.tsv").write_text("query-id\tcorpus-id\tscore\ntest0\td12\t0\n")
    (tmp_path / "taken").write_text("mine")
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("apple\n")
    monkeypatch.chdir(tmp_path)
    code, out, err = run("plot", folder, "--figures", "tree", "--data", data, *words)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert said in err
    assert (tmp_path / "taken").read_text() == "mine"
    assert not (tmp_path / "figures").exists()


def test_an_index_that_is_none(run: Nci, folder: Path, tmp_path: Path) -> None:
    code, _, err = run("plot", folder, tmp_path, "-o", tmp_path / "out")
    assert code == 1
    assert "is not an index" in err
    broken = Path(shutil.copytree(folder, tmp_path / "broken.index"))
    (broken / "generation-000001" / "model.safetensors").unlink()
    code, _, err = run("plot", broken, "--figures", "tree", "-o", tmp_path / "out")
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "model.safetensors" in err


def test_matplotlib_is_an_extra(run: Nci, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run("plot", folder, "--figures", "tree", "-o", tmp_path / "out")
    assert code == 1
    assert err == 'nci plot: figures need matplotlib: pip install "nci[plot]"\n'


def test_too_many_files_are_a_mistake_in_python_too(folder: Path) -> None:
    with pytest.raises(ConfigError, match="one or two"):
        Scene([str(folder)], files=["a", "b", "c"])
