"""Seen against unseen documents: the curve of rankings made by hand, its ends, and its files."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nci.evaluate import evaluate
from nci.records import Qrels, Run
from nci.tradeoff import Curve, as_json, curve, draw, window

TRAINED = {"old", "older"}
# (score of the best trained document, of the best new one): the second is first from their difference on
SEEN: Run = {"q1": {"old": 3.0, "new": 2.0}, "q2": {"old": 5.0, "newer": 1.0}, "q3": {"older": 1.0, "new": 2.0}}
SEEN_QRELS: Qrels = {"q1": {"old": 1}, "q2": {"old": 1}, "q3": {"older": 1}}
UNSEEN: Run = {"u1": {"old": 2.5, "new": 2.0}, "u2": {"older": 4.0, "new": 1.0, "newer": 0.0}}
UNSEEN_QRELS: Qrels = {"u1": {"new": 1}, "u2": {"newer": 1}}


def at(found: Curve, constant: float) -> tuple[float, float]:
    """Both values at the last constant that is not above, or at the first of all."""
    place = max(int(np.searchsorted(found.constants, constant, side="right")) - 1, 0)
    return found.seen[place], found.unseen[place]


def test_a_curve_that_is_known() -> None:
    found = curve([SEEN], SEEN_QRELS, [UNSEEN], UNSEEN_QRELS, TRAINED)
    # seen queries are lost from 1, 4 and -1 on; of the unseen, u1 is found from 0.5 on, u2 never: its best new is wrong
    assert at(found, found.constants[0]) == (1, 0)
    for constant, seen, unseen in ((-0.9, 2, 0), (0.1, 2, 0), (0.6, 2, 1), (1.1, 1, 1), (3.9, 1, 1), (9, 0, 1)):
        assert at(found, constant) == pytest.approx((seen / 3, unseen / 2)), constant
    assert found.operating == pytest.approx((2 / 3, 0))
    assert found.constants[0] < -1
    assert found.constants[-1] > 4, "both ends are reached"
    assert found.constants == sorted(found.constants)


def test_seeds_are_averaged_at_the_same_constants() -> None:
    other = {query: {doc_id: 10 * score for doc_id, score in found.items()} for query, found in SEEN.items()}
    one, two = (curve([run], SEEN_QRELS, [UNSEEN], UNSEEN_QRELS, TRAINED) for run in (SEEN, other))
    both = curve([SEEN, other], SEEN_QRELS, [UNSEEN, UNSEEN], UNSEEN_QRELS, TRAINED)
    for constant in (-30.0, -5.0, 0.7, 2.0, 20.0, 60.0):
        wanted = (np.array(at(one, constant)) + at(two, constant)) / 2
        assert at(both, constant) == pytest.approx(tuple(wanted)), constant


def test_what_never_changes_is_a_point() -> None:
    run: Run = {"q1": {"old": 1.0}, "q2": {}}
    qrels: Qrels = {"q1": {"old": 1}, "q2": {"old": 1}, "q3": {"old": 1}}
    found = curve([run], qrels, [{"u1": {"old": 1.0}}], {"u1": {"new": 1}}, TRAINED)
    assert found == Curve([0.0], [pytest.approx(1 / 3)], [0.0])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_point_is_what_the_metric_says(data: st.DataObject) -> None:
    """Also with equal scores, several relevant documents, and grades of 0."""
    documents = ["a", "b", "c", "d", "e"]
    trained = data.draw(st.sets(st.sampled_from(documents)))
    rankings = st.dictionaries(st.sampled_from(documents), st.integers(-3, 3).map(float), max_size=5)
    grades = st.dictionaries(st.sampled_from(documents), st.integers(0, 2), min_size=1).filter(
        lambda g: any(g.values())
    )
    run: Run = {f"q{n}": data.draw(rankings) for n in range(4)}
    qrels: Qrels = {f"q{n}": data.draw(grades) for n in range(4)}
    found = curve([run], qrels, [run], qrels, trained)
    assert found.seen == found.unseen
    for constant, value in zip(found.constants, found.seen, strict=True):
        moved = {q: {d: s + constant * (d not in trained) for d, s in each.items()} for q, each in run.items()}
        assert value == pytest.approx(evaluate(moved, qrels, ["R@1"])["R@1"]), constant


def test_the_picture_and_the_numbers(tmp_path: Path) -> None:
    found = {f"row {n}": curve([SEEN], SEEN_QRELS, [UNSEEN], UNSEEN_QRELS, TRAINED) for n in range(9)}
    files = draw(found, ("test", "test-unseen"), tmp_path / "t.png", "tiny")
    assert files == [tmp_path / "t.png", tmp_path / "t.svg"]
    assert (tmp_path / "t.png").stat().st_size > 1000
    ElementTree.parse(tmp_path / "t.svg")
    numbers = json.loads(json.dumps(as_json(found, ("test", "test-unseen")), allow_nan=False))
    assert (numbers["seen"], numbers["unseen"]) == ("test", "test-unseen")
    one = numbers["systems"]["row 8"]
    assert len(one["constants"]) == len(one["seen"]) == len(one["unseen"]) > 5
    assert one["operating"] == {"seen": pytest.approx(2 / 3), "unseen": 0}


def test_the_picture_shows_where_good_curves_bend() -> None:
    good = Curve([-1.0, 0.0, 1.0], [0.9, 0.88, 0.1], [0.1, 0.86, 0.92])
    fair = Curve([-1.0, 0.0, 1.0], [0.8, 0.78, 0.1], [0.1, 0.60, 0.82])
    (left, right), (bottom, top) = window([good, fair])
    assert 0.7 < left < 0.78 < 0.88 < right < 0.95, "neither end of a curve"
    assert 0.5 < bottom < 0.60 < 0.86 < top < 0.92
    far = Curve([0.0], [0.85], [0.0])  # finds nothing that has no training queries
    assert window([good, fair, far]) == ((left, right), (bottom, top)), (
        "what is far behind does not make the rest small"
    )


def test_a_picture_of_nothing_found_has_limits() -> None:
    nothing = Curve([0.0], [0.0], [0.0])
    for (left, right), (bottom, top) in (window([nothing]), window([Curve([0.0], [1.0], [1.0])])):
        assert 0 <= left < right <= 1
        assert 0 <= bottom < top <= 1
    assert window([]) == ((0, 1), (0, 1))


def test_the_legend_says_where_a_system_beyond_the_edge_stands(tmp_path: Path) -> None:
    good = Curve([-1.0, 0.0, 1.0], [0.9, 0.88, 0.1], [0.1, 0.86, 0.92])
    draw({"good": good, "far": Curve([0.0], [0.85], [0.0])}, ("test", "test-unseen"), tmp_path / "t.png", "tiny")
    picture = (tmp_path / "t.svg").read_text(encoding="utf-8")
    assert "<!-- far, at 85 / 0 -->" in picture
    assert "<!-- good -->" in picture
