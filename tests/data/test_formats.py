"""Exports of tools by name: small made-up files in each tool's own layout."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from support.exports import (
    APPEN,
    ARGILLA_ROWS,
    CATS,
    COCO,
    EXPORTS,
    LISTS,
    MIN,
    MTURK,
    NAMES,
    Triples,
    archive,
    cvat,
    doccano,
    lines,
    prodigy,
    studio,
    zooniverse,
)

from crowdnal.data import Annotations
from crowdnal.data.formats import formats
from crowdnal.multilabel import from_label_sets


def triples(a: Annotations) -> Triples:
    long = a.to_long()
    return sorted(zip(long["task"].map(str), long["worker"].map(str), long["label"], strict=True), key=str)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], Path]:
    def call(content: str | bytes) -> Path:
        path = tmp_path / "export"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return call


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_by_name(write, name: str) -> None:
    format, content, columns = EXPORTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = triples(Annotations.read(write(content), format=format, **columns))
    assert [(Path(task).name, worker, label) for task, worker, label in found] == CATS


def test_every_format_is_tried() -> None:
    assert set(formats()) == {format for format, _, _ in EXPORTS.values()} | {"labelme", "snorkel"}


def test_exports_are_proposed_and_never_guessed(write) -> None:
    told = {"get-another-label", "cleanlab", "peerannot"}  # tables and matrices as any other
    for name, (format, content, _) in EXPORTS.items():
        if format in told or isinstance(content, bytes):
            continue
        with pytest.raises(ValueError, match=f"export of .*{format}.*: give format='"):
            Annotations.read(write(content))
        assert name
    with pytest.raises(ValueError, match="archive: .* give format= if it is an export"):
        Annotations.read(write(archive(a__xml="x")))


def test_folders_with_a_file_per_annotator(tmp_path: Path) -> None:
    for who, images in {"ann": [("a.jpg", "cat"), ("b.jpg", "dog")], "bob": [("a.jpg", "dog")]}.items():
        (tmp_path / f"{who}.zip").write_bytes(archive(annotations__xml=cvat(*images)))
    assert triples(Annotations.read(tmp_path, format="cvat")) == CATS
    (tmp_path / "one.xml").write_text(cvat(("a.jpg", "cat"), user="zoe"))
    assert triples(Annotations.read(tmp_path / "one.xml", format="cvat")) == [("a.jpg", "zoe", "cat")]


@pytest.mark.parametrize("format", ["labelme", "snorkel"])
def test_matrices_of_numbers(write, tmp_path: Path, format: str) -> None:
    matrix = np.array([[0, -1, 2], [-1, -1, -1], [1, 1, -1]])
    text = "\n".join(" ".join(map(str, row)) for row in matrix) + "\n"
    expected = Annotations.from_dense(matrix, num_classes=3)
    np.save(tmp_path / "L.npy", matrix)
    for path in [write(text)] + ([tmp_path / "L.npy"] if format == "snorkel" else []):
        a = Annotations.read(path, format=format, items=["a", "b", "c"])
        assert a.to_dense().tolist() == expected.to_dense().tolist() and a.vocabulary.items == ("a", "b", "c")


def test_cleanlab_without_an_index(write) -> None:
    a = Annotations.read(write("u,v\n0.0,1.0\n,1.0\n2.0,\n"), format="cleanlab")
    assert a.to_dense().tolist() == [[0, 1], [-1, 1], [2, -1]] and a.vocabulary.annotators == ("u", "v")


def test_what_is_left_out_is_said(write) -> None:
    for name, words in {
        "mturk": "2 of 5 answers are left out, because their assignments were rejected",
        "toloka": "1 of 4 answers are left out, because .* rejected, skipped",
        "appen": "1 of 4 answers are left out, because Appen calls them tainted",
        "label studio": "1 of 4 annotations were skipped",
        "argilla json": "1 responses are discarded",
    }.items():
        format, content, _ = EXPORTS[name]
        with pytest.warns(UserWarning, match=words):
            a = Annotations.read(write(content), format=format)
        assert "cow" not in a.vocabulary.classes and a.num_annotations == 3
    with pytest.warns(UserWarning, match="1 of 2 examples were ignored"):
        a = Annotations.read(
            write(lines(prodigy("a", "ann", ["cat"]), prodigy("b", "ann", [], "ignore"))), format="prodigy"
        )
    assert a.counts.tolist() == [1, 0]


def test_prodigy_says_yes_or_no_to_one_label(write) -> None:
    said = [("accept", "u"), ("reject", "v")]
    records = [{"text": "x", "label": "PET", "answer": a, "_input_hash": 5, "_session_id": u} for a, u in said]
    a = Annotations.read(write(lines(*records)), format="prodigy")
    assert triples(a) == [("5", "u", "accept"), ("5", "v", "reject")]
    other = dict(records[1], label="CAR")
    with pytest.raises(ValueError, match="line 2 accepts or rejects 'CAR', others another label"):
        Annotations.read(write(lines(records[0], other)), format="prodigy")


def test_several_questions_are_to_be_named(write) -> None:
    more = MTURK.replace('"Answer.kind"', '"Answer.kind","Answer.fur"').replace('"cat"', '"cat","red"')
    with pytest.raises(ValueError, match=r"no column 'label'.*Answer\.fur.*label='Answer.fur'"), pytest.warns():
        Annotations.read(write(more), format="mturk")
    with pytest.warns(UserWarning, match="left out"):
        a = Annotations.read(write(more), format="mturk", label="Answer.fur")
    assert ("a.jpg", "ann", "red") in triples(a)
    a = Annotations.read(write(APPEN.replace("true", "false")), format="appen", weight="_trust", task="image")
    assert a.weight.tolist() == pytest.approx([0.9, 0.8, 0.1, 0.9]) and a.vocabulary.items == ("x", "y")


def test_last_answers_go_by_the_times_of_the_export(write) -> None:
    again = '"H1","Sort, of two","S9","ann","Approved","Mon Mar 02 09:00:00 PST 2020","a.jpg","cow"\n'
    with pytest.warns(UserWarning, match="left out"):
        a = Annotations.read(write(MTURK + again), format="mturk", last=True)
    assert triples(a) == CATS


def test_several_choices_are_sets_of_tags(write) -> None:
    tasks = [studio(1, "a.jpg", ("ann", ["cat", "dog"], False), ("bob", ["dog"], False))]
    path = write(json.dumps(tasks))
    with pytest.raises(ValueError, match="record 1, column 'label' .*several labels, cat, dog: .*from_label_sets"):
        Annotations.read(path, format="label-studio")
    a = from_label_sets(path, format="label-studio")
    assert a.vocabulary.items == tuple(("/data/upload/1/a.jpg", tag) for tag in ("cat", "dog"))
    assert a.to_dense().tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("format", "content", "words"),
    [
        ("mturk", "task,worker,label\na,u,x\n", "no export of Mechanical Turk: it has no column 'HITId'"),
        ("doccano", lines(doccano("a.jpg", label=["cat"])), "line 1|record 1 does not say who annotated"),
        ("label-studio", json.dumps(MIN), "record 1 has no data: .*label-studio-min"),
        ("cvat", cvat(("a.jpg", "cat")), "does not say who annotated"),
        ("cvat", '<!DOCTYPE a [<!ENTITY b "c">]><annotations/>', "declares entities"),
        ("cvat", "<annotations><image>", "is not XML"),
        ("coco", json.dumps(COCO | {"categories": []}), "annotation 1: category_id 1 is not in the file"),
        ("coco", json.dumps(COCO), "no column 'worker', only .*'annotator'"),
        ("lewidi", json.dumps({"1": {"annotations": "0,1", "annotators": "a"}}), "item '1' has 2 annotations for 1"),
        ("datasets", json.dumps([LISTS[0], dict(LISTS[1], labels=["dog", "cat"])]),
         "record 2: 'annotators' has 1 .*'labels' 2"),
        ("zooniverse", zooniverse(*CATS).replace('"[{', '"[[{', 1), "line 2: JSON that no classification export has"),
        ("get-another-label", "u\ta\n", "2 columns by tabs"),
        ("snorkel", "a,b\n0,1\n", "starts with a, b: it must have"),
        ("prodigy", "not json", "it is not JSON"),
        ("peerannot", "[1]", "no answers.json"),
        ("nothing", "", "format='nothing' is unknown: use long, dense, appen, argilla"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_export_is_named(write, format: str, content: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Annotations.read(write(content), format=format, **(NAMES if format == "datasets" else {}))


def test_an_export_knows_how_it_is_written(write) -> None:
    with pytest.raises(ValueError, match="format='mturk' says how the file is written: leave out encoding="):
        Annotations.read(write(MTURK), format="mturk", encoding="latin-1")


def test_argilla_and_datasets_as_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pd.DataFrame(ARGILLA_ROWS).to_parquet(path)
    with pytest.warns(UserWarning, match="drafts"):
        assert triples(Annotations.read(path, format="argilla")) == CATS
    pd.DataFrame(LISTS).to_parquet(path)
    assert triples(Annotations.read(path, format="datasets", **NAMES)) == CATS


@pytest.mark.parametrize("wrap", [list, pd.DataFrame, pa.Table.from_pylist, pl.DataFrame])
def test_a_list_of_annotators_per_row_needs_no_format(write, wrap) -> None:
    assert triples(Annotations.from_long(wrap(LISTS), **NAMES)) == CATS
    assert triples(Annotations.read(write(lines(*LISTS)), **NAMES)) == CATS
    records = [{"annotations": [{"who": "ann", "y": "cat"}, {"who": "bob", "y": "dog"}]}, {"annotations": []}]
    records += [{"annotations": [{"who": "ann", "y": "dog"}]}]
    a = Annotations.read(
        write(lines(*records)), format="datasets", worker="annotations.who", label="annotations.y", missing=()
    )
    assert triples(a) == [("0", "ann", "cat"), ("0", "bob", "dog"), ("2", "ann", "dog")]
    with pytest.raises(ValueError, match="row 1: 'annotators' has 1 entries and 'labels' 2"):
        Annotations.from_long(wrap([LISTS[0], dict(LISTS[1], labels=["dog", "cat"])]), **NAMES)
