"""A table in whatever dialect gives the API and the command the same annotations, those that were written."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.crowds import assert_equal
from support.small_run import config

from crowdnal.data import Annotations
from crowdnal.train import InputError, data

TASKS = ["001", "1", "a,b", "x;y", "tab\there", 'quote"d', "café", "nan", "2.0", "10", "9", "two words"]
WORKERS = ["w10", "w9", "NA", "007", "7", "null", "Zoë", "a,b", "1e3", "-1", "None"]
LABELS = [
    ["0", "1", "10", "2"], ["1.0", "2", "3.0"], ["-1", "0", "1"], ["cat", "dog", "a10", "a9"], ["007", "7", "x"],
    ["900000000000207008", "900000000000207001"], ["1E3", "1000", "1_000"], ["yes", "no", "it's, so"], ["0.5", "1.5"],
]  # fmt: skip
EMPTY = ["", "NaN", "nan", "<NA>"]
Row = tuple[str, str, str]


class Dialect(NamedTuple):
    """How a table is written."""

    kind: str
    separator: str
    quoting: int
    encoding: str
    end: str
    order: list[int]
    extra: bool
    header_again: bool
    short: bool
    trailing: bool
    blanks: bool
    packed: bool

    def write(self, rows: list[Row]) -> bytes:
        """The bytes of the file."""
        names = ["task", "worker", "label", *(["note"] if self.extra else [])]
        full = [[*row, *(['say "so",\nwell;\t'] if self.extra else [])] for row in rows]
        if self.kind in ("json", "jsonl"):
            found = [dict(zip(names, row, strict=True)) for row in full]
            text = json.dumps(found) if self.kind == "json" else "\n".join(map(json.dumps, found))
            return text.encode()
        if self.kind == "parquet":
            stream = io.BytesIO()
            pd.DataFrame(full, columns=names, dtype=str).to_parquet(stream)
            return stream.getvalue()
        order = [c for c in self.order if c < len(names)]
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self.separator, quoting=self.quoting, lineterminator=self.end)
        for n, row in enumerate([names, *full]):
            cells = [row[c] for c in order]
            if self.short and n and not cells[-1] and names[order[-1]] == "label":
                cells = cells[:-1]
            writer.writerow(cells + ([""] if self.trailing and n else []))
            if self.header_again and n == len(full) // 2 and n:
                writer.writerow([names[c] for c in order])
            if self.blanks and n == 1:
                text.write(self.end)
        raw = text.getvalue().encode(self.encoding)
        return gzip.compress(raw) if self.packed else raw


dialects = st.builds(
    Dialect,
    st.sampled_from(["text", "text", "text", "text", "parquet", "json", "jsonl"]),
    st.sampled_from(",;\t|"),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"]),
    st.sampled_from(["\n", "\r\n"]),
    st.permutations(range(4)),
    *[st.booleans()] * 6,
)


@st.composite
def tables(draw: st.DrawFn) -> list[Row]:
    classes = draw(st.sampled_from(LABELS))
    cell = st.sampled_from(classes) | st.sampled_from(EMPTY) if draw(st.booleans()) else st.sampled_from(classes)
    pair = st.tuples(st.sampled_from(TASKS), st.sampled_from(WORKERS), cell)
    rows = draw(st.lists(pair, min_size=1, max_size=12))
    return [*rows, *((TASKS[0], WORKERS[0], label) for label in classes[:2])]  # two classes at least


def spelled(value: Any) -> str:
    """A label as it was written, ``1.0`` being ``1``."""
    return re.sub(r"^(-?\d+)\.0$", r"\1", str(value))


@given(tables(), dialects)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_a_table_is_the_same_in_every_dialect_for_the_api_and_the_command(rows: list[Row], dialect: Dialect) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        root = Path(folder)
        (root / "train").mkdir()
        # the command needs a file per task, and a name of a file can be no separator
        images = {task: re.sub(r"\W", "_", task) + f"{i}.png" for i, task in enumerate(TASKS)}
        for name in images.values():
            (root / "train" / name).touch()
        rows = [(images[task] if dialect.quoting == csv.QUOTE_ALL else task, worker, y) for task, worker, y in rows]
        path = root / "answers"
        path.write_bytes(dialect.write(rows))
        a = Annotations.read(path)
        assert_equal(Annotations.from_long(path), a)

        written = [(task, worker, spelled(label)) for task, worker, label in rows if label not in EMPTY]
        order = list(dict.fromkeys(task for task, _, _ in rows))
        expected = sorted(written, key=lambda row: order.index(row[0]))
        long = a.to_long()
        found = list(zip(long["task"], long["worker"], map(spelled, long["label"]), strict=True))
        assert found == expected
        assert list(a.vocabulary.items) == order
        assert set(a.vocabulary.annotators) == {worker for _, worker, _ in rows}
        assert [w for w in a.vocabulary.annotators if w in ("w9", "w10")] in ([], ["w9"], ["w10"], ["w9", "w10"])

        if dialect.quoting == csv.QUOTE_ALL:
            settings = config(root, root / "out", annotations=path, truth=None, test_images=None, test_labels=None)
            loaded = data.load(settings).annotations
            assert loaded.vocabulary.annotators == a.vocabulary.annotators
            assert loaded.vocabulary.classes == a.vocabulary.classes
            by_task = sorted(range(len(order)), key=order.__getitem__)
            places = [loaded.vocabulary.items.index(order[i]) for i in by_task]
            assert loaded.num_annotations == a.num_annotations
            for i, place in zip(by_task, places, strict=True):
                assert loaded[place].annotator.tolist() == a[i].annotator.tolist()
                assert loaded[place].label.tolist() == a[i].label.tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "train" / name).touch()
    return tmp_path


def load(folder: Path, text: str | bytes, **options) -> data.TrainingData:
    path = folder / "answers.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    none = {"truth": None, "test_images": None, "test_labels": None}
    return data.load(config(folder, folder / "out", annotations=path, **none, **options))


def test_the_command_reads_files_without_header_and_other_encodings(folder: Path) -> None:
    text = "Zoë,a.png,1\nw9,b.png,0\nw10,b.png,skip\n"
    loaded = load(
        folder, text.encode("latin-1"), columns=("worker", "task", "label"), encoding="latin-1", missing=("skip",)
    )  # fmt: skip
    assert loaded.annotations.vocabulary.annotators == ("Zoë", "w9", "w10") and loaded.classes == ("0", "1")
    assert loaded.annotations.to_long().values.tolist() == [["a.png", "Zoë", 1], ["b.png", "w9", 0]]


def test_the_command_finds_na_a_class_if_told(folder: Path) -> None:
    text = "task,worker,label\na,u,NA\nb,u,EU\na,v,\n"
    with pytest.warns(UserWarning, match="'NA' mean no label"), pytest.raises(InputError, match="all labels are 'EU'"):
        load(folder, text)
    assert load(folder, text, missing=("",)).classes == ("EU", "NA")
    assert load(folder, text, classes=("NA", "EU")).annotations.label.tolist() == [0, 1]


def test_the_command_takes_what_the_reader_takes(folder: Path) -> None:
    text = "task,worker,label,sure,when\na,u,x,0.5,3\nb,u,y,1,1\na,u,y,0.25,2\nb,v,no idea,1,1\n"
    loaded = load(folder, text, weight_column="sure", last="when", unsure=("no idea",))
    assert loaded.classes == ("x", "y") and loaded.labels == ("x", "y", "no idea")
    assert loaded.annotations.to_long().values.tolist() == [
        ["a", "u", "x", 0.5], ["b", "u", "y", 1.0], ["b", "v", "no idea", 1.0]
    ]  # fmt: skip
    assert load(folder, text, last="row", unsure=("no idea",)).annotations.label.tolist() == [1, 1, 2]
    soft = load(folder, "task;worker;p_x;p_y\na;u;0.25;0.75\nb;u;1;0\n", probabilities=("p_x", "p_y"), separator=";")
    assert soft.classes == ("p_x", "p_y") and soft.annotations.weight.tolist() == [0.25, 0.75, 1.0]
    export = "_unit_id,_worker_id,kind,kind_gold,image\n1,u,x,,a.png\n2,u,y,,b.png\n"
    assert load(folder, export, format="appen", task_column="image").annotations.label.tolist() == [0, 1]
    with pytest.raises(InputError, match="give --format 'appen'"):
        load(folder, export)
    with pytest.raises(InputError, match="--last needs the time of every answer"):
        load(folder, "task,worker,label,when\na,u,x,\n", last="when")


@pytest.mark.parametrize(
    ("text", "words", "options"),
    [
        ("0 1\n1 0\n", "give --items, an id per row", {"format": "dense"}),
        ("image,annotator,label,created_at\na,u,x,1\n",
         "no column 'worker'.*name yours with --task-column, .*--worker-column 'annotator'", {"task_column": "image"}),
        ("task,worker,label\na,u,x\n", r"answers\.csv, line 2, column 'label' .*: 'x' is not in --classes; add it",
         {"classes": ("y", "z")}),
        ("task,worker,label\na,u,\n", "has no labels at all: check --format and --missing", {}),
        ("task,worker,label\na,u,x\nc,u,y\n", r"line 3, column 'task' .*: no image 'c' in", {}),
        ("u\ta\tx\nv\tb\ty\n", "give --columns if the file has no header, or --format", {}),
        ("task,worker,label\na,Zo\xeb,x\n".encode("latin-1"), "line 2 is not UTF-8.*give --encoding", {}),
    ],
)  # fmt: skip
def test_the_command_says_it_in_its_own_options(folder: Path, text, words: str, options) -> None:
    with pytest.raises(InputError, match=words):
        load(folder, text, **options)
