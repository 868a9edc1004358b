"""Reports of others, one test for each, in the words of the report; details are tested in test_files.py.

Images and what tasks are called: tests/train/test_images.py. Known labels of every kind: test_gold.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from crowdnal.data import Annotations
from crowdnal.multilabel import from_label_sets
from crowdnal.train import InputError, TrainConfig, data

Read = Callable[..., Annotations]
BOTH = pytest.mark.parametrize("read", ["api", "command"], indirect=True)


@pytest.fixture
def read(request, tmp_path: Path) -> Read:
    """Read a text by the API, or as the command does, which has an image for each of some tasks."""

    def api(text: str, **options) -> Annotations:
        (tmp_path / "answers.csv").write_text(text, encoding="utf-8")
        return Annotations.read(tmp_path / "answers.csv", **options)

    def command(text: str, **options) -> Annotations:
        (tmp_path / "answers.csv").write_text(text, encoding="utf-8")
        (tmp_path / "images").mkdir(exist_ok=True)
        for name in ("a", "b", "img_001", "img_002", *(f"t{i}" for i in range(12))):
            (tmp_path / "images" / f"{name}.jpg").touch()
        options = {f"{n}_column" if n in ("task", "worker", "label") else n: v for n, v in options.items()}
        if isinstance(options.get("missing"), list):
            options["missing"] = tuple(options["missing"])
        folders = {"images": tmp_path / "images", "out": tmp_path / "out", "annotations": tmp_path / "answers.csv"}
        return data.load(TrainConfig(model="none", **folders, **options)).annotations

    return command if getattr(request, "param", "api") == "command" else api


def rows(a: Annotations) -> list[tuple]:
    return list(a.to_long()[["task", "worker", "label"]].itertuples(index=False, name=None))


def column(*labels: str) -> str:
    return "task,worker,label\n" + "".join(f"t{i},w,{label}\n" for i, label in enumerate(labels))


def classes(a: Annotations) -> tuple:
    assert a.vocabulary is not None
    return a.vocabulary.classes


@BOTH
def test_a1_a_long_table_whose_column_has_another_name_is_no_matrix(read: Read) -> None:
    text = "image,annotator,label,created_at,lead_time\n" + "".join(
        f"t{i},ann{r},{'cat dog'.split()[r % 2]},2024-01-0{i + 1},{3.5 + i}\n" for i in range(6) for r in range(4)
    )
    with pytest.raises((ValueError, InputError), match="has no column 'worker'"):
        read(text, task="image")


@BOTH
def test_a2_a_delimiter_too_many_shifts_nothing(read: Read) -> None:
    text = "task,worker,label\na,w1,0,\nb,w1,1,\na,w2,1,\n"
    assert sorted(rows(read(text))) == sorted(rows(read("task,worker,label\na,w1,0\nb,w1,1\na,w2,1\n")))
    assert read(text).vocabulary.annotators == ("w1", "w2") and read(text).num_annotations == 3
    with pytest.raises((ValueError, InputError), match="line 2: 4 columns where there are names for 3"):
        read(text.replace(",\n", ",ok\n"))


@BOTH
@pytest.mark.parametrize(
    "pair", [("900000000000207008", "900000000000207001"), ("1_2", "12"), ("1E3", "1000"), ("007", "7")]
)
def test_a3_labels_that_differ_as_text_differ(read: Read, pair: tuple[str, str]) -> None:
    assert {str(name) for name in classes(read(column(*pair)))} == set(pair)


def test_a4_nan_has_one_meaning_whatever_the_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(column("NAN", "1", "-nan", "10", "2", "3"))
    code = "import sys, crowdnal; print(crowdnal.Annotations.read(sys.argv[1]).vocabulary.classes)"
    found = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "a.csv")],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {"(1, 2, 3, 10)\n"}


@BOTH
def test_a6_rows_that_end_before_columns_nobody_filled_in(read: Read) -> None:
    text = (
        '"HITId","WorkerId","Input.image","Answer.category","Approve","Reject"\n'
        '"H1","u","img_001.jpg","coast"\n"H1","v","img_001.jpg","street"\n"H2","u","img_002.jpg","street","x",""\n'
    )
    names = {"task": "Input.image", "worker": "WorkerId", "label": "Answer.category"}
    assert sorted(rows(read(text, **names))) == [
        ("img_001.jpg", "u", "coast"), ("img_001.jpg", "v", "street"), ("img_002.jpg", "u", "street")
    ]  # fmt: skip
    with pytest.raises((ValueError, InputError), match="line 2: 7 columns"):
        read(text.replace('"coast"', '"coast","","","x"'), **names)


@BOTH
def test_a8_one_label_in_several_spellings(read: Read) -> None:
    assert classes(read(column("1", "1.0", "0"))) == (0, 1)
    assert classes(read(column("yes", " yes", "no"))) == ("no", "yes")
    assert classes(read("task, worker, label\nt0, w, yes\nt1, w, no\n")) == ("no", "yes")
    assert read("task,worker,label\na,007,x\nb,7,y\n").vocabulary.annotators in (("7", "007"), ("007", "7"))


@BOTH
def test_a9_ratings_are_numbers_when_the_markers_are_out(read: Read) -> None:
    text = column(*map(str, range(1, 11)), "unsure", "skip")
    assert classes(read(text, missing=["unsure", "skip"])) == tuple(range(1, 11))


@BOTH
def test_a10_a_marker_is_one_as_number_and_as_text(read: Read) -> None:
    assert classes(read(column("-1", "0", "1", "-1.0"), missing=["-1"])) == (0, 1)


def test_a10_a_marker_of_the_other_type_in_memory() -> None:
    for values, marker in (([-1, 0, 1], "-1"), (["-1", "0", "1"], -1), ([-1.0, 0.0, 1.0], "-1")):
        a = Annotations.from_long({"task": [0, 1, 2], "worker": [0, 0, 0], "label": values}, missing=marker)
        assert a.num_annotations == 2 and len(classes(a)) == 2


@BOTH
def test_a11_words_for_no_label(read: Read) -> None:
    with pytest.warns(UserWarning) as told:
        a = read(column("cat", "dog", "N/A", "null", "None", "unsure", "skip"))
    assert classes(a) == ("cat", "dog", "skip", "unsure")
    assert "'skip', 'unsure' are read as classes" in "".join(str(w.message) for w in told)
    assert classes(read('task,worker,label\nt0,w,cat\nt1,w,"a, b"\nt2,w,unsure\n', missing=["unsure"])) == (
        "a, b",
        "cat",
    )


@BOTH
def test_a12_ids_called_na_and_a_class_called_na(read: Read) -> None:
    a = read("task,worker,label\na,NA,x\nb,null,y\n")
    assert a.vocabulary.annotators == ("NA", "null")
    assert classes(read(column("NA", "EU"), classes=("NA", "EU"))) == ("NA", "EU")


def test_a14_a_tag_is_the_same_whatever_other_rows_hold(tmp_path: Path) -> None:
    found = []
    for text in ("task,worker,label\na,w,1\nb,w,2\n", "task,worker,label\na,w,1|2\nb,w,2\n",
                 'task,worker,label\na,w,"[""1"",""2""]"\nb,w,2\n'):  # fmt: skip
        (tmp_path / "tags.csv").write_text(text)
        found.append({tag for _, tag in from_label_sets(tmp_path / "tags.csv").vocabulary.items})
    assert found == [{"1", "2"}] * 3


@BOTH
def test_a15_files_without_a_header(read: Read) -> None:
    with pytest.raises((ValueError, InputError), match="columns"):
        read("u\ta\tx\nv\tb\ty\n")
    assert sorted(rows(read("u\ta\tx\nv\tb\ty\n", columns=("worker", "task", "label"))))[0][1:] == ("u", "x")
    three = "".join(f"{r},t{i},{(i + r) % 3}\n" for i in range(6) for r in range(3))
    assert read(three, columns=("worker", "task", "label")).num_annotations == 18


@BOTH
@pytest.mark.parametrize("mark", ["\t", ";", "|"])
def test_a17_the_separator_is_that_of_the_names(read: Read, mark: str) -> None:
    text = mark.join(["task", "a, b", "worker", "label"]) + "\n" + mark.join(["a", "1, 2", "u", "x"]) + "\n"
    text += mark.join(["b", "x", "v", "y"]) + "\n"
    assert [row[1:] for row in sorted(rows(read(text)))] == [("u", "x"), ("v", "y")]
    if mark == "\t":
        assert read(text.replace("1, 2", 'a 5" stick')).num_annotations == 2


def test_a18_exports_are_named_and_never_taken_for_something_else(tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    path.write_text(json.dumps([{"id": 1, "data": {"image": "a.jpg"}, "annotations": []}]))
    with pytest.raises(ValueError, match="looks like an export of label-studio: give format='label-studio'"):
        Annotations.read(path)
    path.write_text(json.dumps({"a": {"u": "x", "v": "y"}, "b": {"u": "y"}}))
    assert rows(Annotations.read(path)) == [("a", "u", "x"), ("a", "v", "y"), ("b", "u", "y")]


@pytest.mark.parametrize("dtype", ["Sparse[int64]", "Int8", "boolean", "category", "bool"])
def test_columns_of_pandas_that_are_no_plain_arrays(dtype: str) -> None:
    values = [1, 0, 0, 1]
    frame = pd.DataFrame({"task": list("abcd"), "worker": "w", "label": pd.Series(values).astype(dtype)})
    a = Annotations.from_long(frame)
    assert a.label.tolist() == values and [int(k) for k in classes(a)] == [0, 1]
