"""The trie: equals a Python set of prefixes, comes back from disk as it was, and refuses arrays that are no tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from nci.errors import DataError
from nci.records import SemanticId
from nci.trie import Trie

MakeTrie = Callable[[Iterable[SemanticId]], Trie]
digits = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


def prefix_free(ids: Iterable[SemanticId]) -> list[SemanticId]:
    """The ids without those that begin with another one."""
    kept = list(dict.fromkeys(ids))
    return [p for p in kept if not any(p[: len(q)] == q for q in kept if q != p)]


ids_strategy = st.lists(digits, min_size=1, max_size=25).map(prefix_free)


def table(ids: Iterable[SemanticId], extra: int = 0) -> NDArray[np.int32]:
    """Ids as rows, padded with -1, optionally wider than needed."""
    rows = list(ids)
    out = np.full((len(rows), max(map(len, rows)) + extra), -1, dtype=np.int32)
    for row, path in zip(out, rows, strict=True):
        row[: len(path)] = path
    return out


def breadth_first(ids: Iterable[SemanticId]) -> list[SemanticId]:
    """All prefixes, shorter first, then in the order of their digits: a node's number is its place in this list."""
    return sorted({path[:n] for path in ids for n in range(len(path) + 1)}, key=lambda p: (len(p), p))


@given(ids_strategy, st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_equals_a_set_of_prefixes(ids: list[SemanticId], extra: int) -> None:
    trie, order = Trie.from_paths(table(ids, extra))
    nodes = breadth_first(ids)
    number = {prefix: n for n, prefix in enumerate(nodes)}
    leaf_order = sorted(ids)

    assert trie.nodes == len(nodes)
    assert trie.documents == len(ids)
    assert trie.positions == max(map(len, ids))
    assert [ids[row] for row in order] == leaf_order
    assert trie.depth.tolist() == [len(p) for p in nodes]
    assert trie.value.tolist() == [-1] + [p[-1] for p in nodes[1:]]
    assert trie.parent.tolist() == [-1] + [number[p[:-1]] for p in nodes[1:]]
    assert trie.leaves.tolist() == [number[p] for p in leaf_order]
    widest = 0
    for prefix, node in number.items():
        children = [number[p] for p in nodes if len(p) == len(prefix) + 1 and p[:-1] == prefix]
        assert list(trie.children(node)) == children
        widest = max(widest, len(children))
        below = [n for n, path in enumerate(leaf_order) if path[: len(prefix)] == prefix]
        assert list(range(trie.first_document[node], trie.last_document[node])) == below
    assert trie.fanout == widest
    starts = [n for n in range(len(nodes)) if n == 0 or len(nodes[n]) != len(nodes[n - 1])]
    assert trie.level_start == [*starts, len(nodes)]
    for document, path in enumerate(leaf_order):
        assert trie.semantic_id(document) == path
        along = [number[path[:n]] for n in range(len(path) + 1)]
        assert [n for n in trie.path_nodes[document].tolist() if n >= 0] == along
        assert [v for v in trie.paths[document].tolist() if v >= 0] == list(path)
    trie.check()


def test_children_come_in_the_order_of_their_digits(make_trie: MakeTrie) -> None:
    trie = make_trie([(2, 7), (0, 5), (2, 1), (9, 0), (0, 3), (2, 4)])
    assert trie.value[list(trie.children(0))].tolist() == [0, 2, 9]
    assert trie.value[list(trie.children(2))].tolist() == [1, 4, 7]


@given(ids_strategy, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_order_of_documents_does_not_change_the_tree(ids: list[SemanticId], random: object) -> None:
    shuffled = list(ids)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, two = Trie.from_paths(table(ids))[0], Trie.from_paths(table(shuffled))[0]
    for field in fields(Trie):
        assert np.array_equal(getattr(one, field.name), getattr(two, field.name)), field.name


@given(ids_strategy, st.data())
@settings(max_examples=80, deadline=None)
def test_refuses_duplicates_and_prefixes_of_other_ids(ids: list[SemanticId], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(ids))
    length = data.draw(st.integers(1, len(path)), label="length of the intruder")
    place = data.draw(st.integers(0, len(ids)))
    bad = [*ids[:place], path[:length], *ids[place:]]
    with pytest.raises(DataError, match="prefix-free"):
        Trie.from_paths(table(bad))


@pytest.mark.parametrize("shape", [(0, 3), (4,), (2, 2, 2)])
def test_refuses_arrays_that_hold_no_ids(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="at least one"):
        Trie.from_paths(np.zeros(shape, dtype=np.int32))


@given(ids_strategy)
@settings(max_examples=60, deadline=None)
def test_end_token_is_one_more_step_below_each_leaf(ids: list[SemanticId]) -> None:
    trie = Trie.from_paths(table(ids))[0].with_end_token(4)
    trie.check()
    assert [trie.semantic_id(n) for n in range(trie.documents)] == [(*path, 4) for path in sorted(ids)]
    for node in range(trie.nodes):
        if trie.value[node] == 4:
            assert not trie.children(node)
            assert len(trie.children(int(trie.parent[node]))) == 1


@given(ids_strategy)
@settings(max_examples=20, deadline=None)
def test_save_and_load(tmp_path_factory: pytest.TempPathFactory, ids: list[SemanticId]) -> None:
    trie = Trie.from_paths(table(ids))[0]
    file = tmp_path_factory.mktemp("trie") / "trie.safetensors"
    trie.save(file)
    again = Trie.load(file)
    for field in fields(Trie):
        before, after = getattr(trie, field.name), getattr(again, field.name)
        assert np.array_equal(before, after), field.name
        assert after.dtype == np.int32


# ---- damage


@given(ids_strategy, st.data())
@settings(max_examples=200, deadline=None)
def test_check_refuses_any_changed_number(ids: list[SemanticId], data: st.DataObject) -> None:
    """In these arrays each number follows from the others, so that no single change can go unnoticed."""
    trie = Trie.from_paths(table(ids))[0]
    name = data.draw(st.sampled_from(["child_start", "parent", "first_document", "last_document", "leaves"]))
    array = getattr(trie, name).copy()
    place = data.draw(st.integers(0, len(array) - 1))
    other = data.draw(st.integers(-2, trie.nodes + 2))
    assume(other != array[place])
    array[place] = other
    with pytest.raises(DataError, match="damaged"):
        replace(trie, **{name: array}).check()


@given(ids_strategy, st.data())
@settings(max_examples=80, deadline=None)
def test_check_refuses_children_out_of_order(ids: list[SemanticId], data: st.DataObject) -> None:
    trie = Trie.from_paths(table(ids))[0]
    brothers = [n for n in range(2, trie.nodes) if trie.parent[n] == trie.parent[n - 1]]
    assume(brothers)
    node = data.draw(st.sampled_from(brothers))
    swapped = trie.value.copy()
    swapped[[node - 1, node]] = swapped[[node, node - 1]]
    twins = trie.value.copy()
    twins[node] = twins[node - 1]
    negative = trie.value.copy()
    negative[node - 1] = -1
    for value in (swapped, twins, negative):
        with pytest.raises(DataError, match="damaged"):
            replace(trie, value=value).check()


@pytest.mark.parametrize("name", [field.name for field in fields(Trie)])
@pytest.mark.parametrize("change", [-1, 1])
def test_check_refuses_arrays_of_another_length(trie: Trie, name: str, change: int) -> None:
    array = getattr(trie, name)
    other = array[:-1] if change < 0 else np.append(array, array[-1:])
    with pytest.raises(DataError, match="damaged"):
        replace(trie, **{name: other}).check()


def test_check_refuses_a_document_order_that_is_not_depth_first(make_trie: MakeTrie) -> None:
    """Two clusters whose documents are interleaved: the slice of a cluster would hold documents of the other."""
    trie = make_trie([(0, 0), (0, 1), (1, 0), (1, 1)])
    leaves = trie.leaves[[0, 2, 1, 3]]
    first, last = trie.first_document.copy(), trie.last_document.copy()
    first[leaves], last[leaves] = np.arange(4), np.arange(1, 5)
    for node in (1, 2, 0):  # as check() would find them from first and last children
        children = trie.children(node)
        first[node], last[node] = first[children[0]], last[children[-1]]
    with pytest.raises(DataError, match="damaged"):
        replace(trie, leaves=leaves, first_document=first, last_document=last).check()


def test_check_refuses_slices_that_do_not_cover_all_documents(make_trie: MakeTrie) -> None:
    trie = make_trie([(0,), (1,)])
    damaged = replace(
        trie,
        leaves=trie.leaves[::-1].copy(),
        first_document=np.array([1, 1, 0], dtype=np.int32),
        last_document=np.array([1, 2, 1], dtype=np.int32),
    )
    with pytest.raises(DataError, match="damaged"):
        damaged.check()


def test_load_refuses_missing_and_damaged_arrays(tmp_path: Path, trie: Trie) -> None:
    file = tmp_path / "trie.safetensors"
    trie.save(file)
    arrays = load_file(file)
    save_file({name: array for name, array in arrays.items() if name != "parent"}, file)
    with pytest.raises(DataError, match="parent"):
        Trie.load(file)
    save_file(arrays | {"leaves": arrays["leaves"][::-1].copy()}, file)
    with pytest.raises(DataError, match="damaged"):
        Trie.load(file)
