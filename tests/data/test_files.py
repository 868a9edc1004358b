"""Files of annotations as people have them; inputs are made here, in the shapes that were reported."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.crowds import assert_equal, to_rows

from crowdnal.data import Annotations, Vocabulary, read_labels
from crowdnal.multilabel import from_label_sets

Triples = list[tuple[object, object, object]]
THREE: Triples = [("a", "w1", 0), ("b", "w1", 1), ("a", "w2", 0)]


def triples(a: Annotations) -> Triples:
    return sorted(map(tuple, a.to_long()[["task", "worker", "label"]].values.tolist()), key=str)


@pytest.fixture
def read(tmp_path: Path):
    """Write a file and read it."""

    def call(content: str | bytes, name: str = "answers.csv", **options) -> Annotations:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return Annotations.read(path, **options)

    return call


# Rows


@pytest.mark.parametrize(
    "text",
    [
        "task,worker,label\na,w1,0\nb,w1,1\na,w2,0\n",
        "task,worker,label\na,w1,0,\nb,w1,1,\na,w2,0,\n",  # a delimiter too many
        "task,worker,label\na,w1,0,,,\nb,w1,1\na,w2,0,\n",
        "task,worker,label,note,ok\na,w1,0\nb,w1,1,\na,w2,0,,\n",  # rows end early
        "\ufefftask,worker,label\r\na,w1,0\r\nb,w1,1\r\na,w2,0",
        "task;worker;label\na;w1;0\nb;w1;1\na;w2;0\n",
        "note\tworker\tlabel\ttask\nx, y\tw1\t0\ta\n\tw1\t1\tb\n\tw2\t0\ta\n",
        'a,b\tworker\tlabel\ttask\nx, y\tw1\t0\ta\n5" long\tw1\t1\tb\n\tw2\t0\ta\n',
        'note\tworker\tlabel\ttask\n"bare\tw1\t0\ta\n\tw1\t1\tb\n\tw2\t0\ta\n',  # a quote that is none
        'note\tworker\tlabel\ttask\n"bare\tw1\t0\ta\nx\tw1\t1\tb\n"too\tw2\t0\ta\n',
        '"task","worker","label"\n"a","w1","0"\n"b","w1","1"\n"a","w2","0"\n',
        'task,note,worker,label\na,"two\nlines, ""really""",w1,0\nb,,w1,1\na,,w2,0\n',
        "task, worker, label\na, w1, 0\nb, w1 , 1\n a, w2, 0\n",
        "sep=;\ntask;worker;label\na;w1;0\nb;w1;1\na;w2;0\n",
        "\n\ntask,worker,label\na,w1,0\n\nb,w1,1\n,,\n   \na,w2,0\n,,\n",
        "task,worker,label\na,w1,0\ntask,worker,label\nb,w1,1\ntask,worker,label\na,w2,0\n",  # files put together
        "task worker label\na w1 0\nb w1 1\na w2 0\n",
        "task|worker|label\na|w1|0\nb|w1|1\na|w2|0\n",
    ],
)
def test_one_table_in_many_dialects(read, text: str) -> None:
    for name in ("answers.csv", "answers.txt"):
        assert triples(read(text, name)) == sorted(THREE, key=str)
    assert_equal(read(text), read("task,worker,label\na,w1,0\nb,w1,1\na,w2,0\n"))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, bytes])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["answers.csv", "answers.csv.gz"])
def test_packing_and_encoding_are_seen_from_the_content(read, pack, encoding: str, name: str) -> None:
    text = "task,worker,label\ncafé.jpg,wörk,日本\ncafé.jpg,w2,no\n"
    a = read(pack(text.encode(encoding)), name)
    assert a.vocabulary == Vocabulary(("café.jpg",), ("w2", "wörk"), ("no", "日本"))


def test_other_encodings_are_named_and_can_be_given(read) -> None:
    latin = "task,worker,label\na,w1,yes\na,Zoë,no\n".encode("latin-1")
    with pytest.raises(ValueError, match=r"answers\.csv, line 3 is not UTF-8 \(byte 0xeb\): .* give encoding="):
        read(latin)
    with pytest.raises(ValueError, match="line 80002 is not UTF-8"):
        read(b"task,worker,label\n" + b"a,w1,yes\n" * 80_000 + latin.splitlines()[2])
    assert read(latin, encoding="latin-1").vocabulary.annotators == ("Zoë", "w1")
    with pytest.raises(ValueError, match="encoding='klingon' is unknown"):
        read(latin, encoding="klingon")


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (b"", "a.csv", "is empty"),
        (b"\n\n", "a.csv", "is empty"),
        (b"\xef\xbb\xbf", "a.csv", "is empty"),
        (
            gzip.compress(b"task,worker,label\na,b,c\n" * 999, mtime=0)[:-30],
            "a.csv.gz",
            r"a\.csv\.gz is damaged or cut off",
        ),
        (b"\x1f\x8bnothing that follows", "a.csv.gz", "is damaged or cut off"),
        (b"task,worker,label\na,b\0,c\n", "a.csv", "is not a text file"),
        (b"PK\x03\x04 and so on", "a.xlsx", "is a spreadsheet or an archive: save it as CSV"),
        (b'task,worker,label\na,w,0\nb,"w,1\nc,w,1\n', "a.csv", r'line \d or later: a cell starts with "'),
        (b"task,worker,label\na,w,0\nb,w,1,x\n", "a.csv", "line 3: 4 columns where there are names for 3"),
        (b"task,worker,label\na,w,0,x\n", "a.csv", "line 2: 4 columns where there are names for 3"),
        (b"task,note,worker,label\na,,w,0\n\nb,x, y,w,1\n", "a.csv", "line 4: 5 columns where there are names for 4"),
        (b'task,note,worker,label\na,"1\n2",w,0\nb,"1\n2",,1\n', "a.csv", r"line 4, column 'worker' .* is missing"),
        (b"task,worker,label\na,w,0\nb", "a.csv", r"line 3, column 'worker' \(task 'b', worker None\) is missing"),
        (b"task,worker,worker,label\na,w,v,0\n", "a.csv", "two columns 'worker'"),
        (b'{"task": 1, "worker": 2\n', "a.json", r"a\.json, line 2 is not JSON"),
        (b'{"task": 1, "worker": 2, "label": 3}\n{"task": 1,\n', "a.jsonl", r"a\.jsonl, line 2 is not JSON"),
        (b'{"version": 5, "shapes": [1]}', "a.json", "is JSON of another shape; give records"),
        (
            b'{"1": {"text": "a, b", "annotations": "0,1", "annotators": "x,y"}}',
            "a.json",
            "not of tasks with a label per",
        ),
        (b'[{"task": 1, "worker": 2}]', "a.json", r"no column 'label', only \['task', 'worker'\]"),
    ],
)
def test_what_cannot_be_read_is_named(read, content: bytes, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(content, name)


@pytest.mark.slow
def test_huge_cells_and_many_columns(read) -> None:
    text = "task,worker,note,label\na,w1," + "x" * 200_000 + ",0\nb,w1,,1\na,w2,,0\n"
    assert triples(read(text)) == sorted(THREE, key=str)
    with pytest.raises(ValueError, match=r"line 4: 5 columns"):
        read(text.replace("a,w2,,0", "a,w2,y,,0"))
    wide = [f"w{r}" for r in range(9000)]
    a = read("item," + ",".join(wide) + "\nx.png," + ",".join("01"[r % 2] for r in range(9000)) + "\n")
    assert a.num_annotators == a.num_annotations == 9000 and a.num_classes == 2


# Which kind of table


def test_a_long_table_without_its_column_is_no_matrix(read) -> None:
    rows = [
        (f"{i}.png", f"ann{r}", "cat dog".split()[(i + r) % 2], f"2024-01-0{i + 1}T10:0{r}:00", 3.5 + i * r)
        for i in range(6)
        for r in range(4)
    ]
    header = "image,annotator,label,created_at,lead_time"
    text = "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n"
    with pytest.raises(ValueError, match="has no column 'worker', only .*perhaps .*worker='annotator'"):
        read(text, task="image")
    with pytest.raises(ValueError, match="has no column 'task'"):
        read(text)
    other = text.replace("label,", "verdict,").replace("annotator,", "by,")
    with pytest.raises(ValueError, match="neither task, worker, label .* nor clearly one column of labels per worker"):
        read(other)
    assert triples(read(text, task="image", worker="annotator")) == sorted([row[:3] for row in rows], key=str)
    with pytest.raises(ValueError, match="neither image, worker, answer"):
        read("image,person,answer\nx,a,1\n".replace("answer", "reply"), task="image", label="answer")


def test_files_without_a_header(read) -> None:
    get_another_label = "worker1\thttp://x.example/1\tporn\nworker2\thttp://x.example/1\tnotporn\n"
    with pytest.raises(
        ValueError, match=r"give columns= .*if it has no header|give columns= if the file has no header"
    ):
        read(get_another_label)
    a = read(get_another_label, columns=("worker", "task", "label"))
    assert a.vocabulary == Vocabulary(("http://x.example/1",), ("worker1", "worker2"), ("notporn", "porn"))
    weather = "".join(f"{r},{i},{(i + r) % 5}\n" for i in range(8) for r in range(3))
    with pytest.raises(ValueError, match="nor clearly one column of labels per worker.*columns="):
        read(weather)
    b = read(weather, columns=("worker", "task", "label"))
    assert (b.num_items, b.num_annotators, b.num_classes) == (8, 3, 5)
    assert_equal(read("worker,task,label\n" + weather, columns=("worker", "task", "label")), b)
    with pytest.raises(ValueError, match="columns names 2 columns and .* has 3"):
        read(weather, columns=("worker", "task"))


def test_dense_files(read, tmp_path: Path) -> None:
    expected = [[(1, 2)], [(0, 0), (2, 1)]]
    for text in ("-1 2 -1\n0 -1 1\n", "nan 2.0 nan\n0.0 nan 1.0\n", "-1\t2\t-1\n0\t-1\t1", ",2,\n0,,1\n"):
        a = read(text, "a.txt", format="dense")
        assert to_rows(a) == expected and a.vocabulary == Vocabulary((0, 1), (0, 1, 2), (0, 1, 2))
        assert read(text, "a.txt", format="dense", items=["p", "q"]).vocabulary.items == ("p", "q")
        assert_equal(Annotations.from_dense(tmp_path / "a.txt"), a)
    header = read("item,ann,bob\nx.png,cat,\ny.png,-1,dog\n", format="dense", missing=-1)
    assert triples(header) == [("x.png", "ann", "cat"), ("y.png", "bob", "dog")]
    assert header.vocabulary.annotators == ("ann", "bob")
    index = read(",0,1,2,3\nx,,9,1,\n", missing="9")  # as DataFrame.to_csv writes it
    assert triples(index) == [("x", "2", 1)]
    scale = read("item,a,b,c,d\nx,-1,3,7,7\n", missing=7)  # another number marks: -1 is a label
    assert triples(scale) == [("x", "a", -1), ("x", "b", 3)]
    words = read("item,a,b,c,d\nx,-1,3,unsure,3\n", missing=["unsure", "skip"])  # a word does not replace -1
    assert triples(words) == [("x", "b", 3), ("x", "d", 3)]
    with pytest.warns(UserWarning, match="-1 is read as a class"):
        assert read("item,a,b\nx,-1,\ny,0,1\n", format="dense").vocabulary.classes == (-1, 0, 1)
    assert triples(read("task,w1,w2,w3,w4\na,0,1,1,1\nb,0,0,,1\n"))[0] == ("a", "w1", 0)
    savetxt = read("1.000000000000000000e+00 0.000000000000000000e+00\n", "a.txt", format="dense")
    assert savetxt.vocabulary.classes == (0, 1) and savetxt.label.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "words", "options"),
    [
        ("0 1\n1\n", "line 2: 1 columns where line 1 has 2", {"format": "dense"}),
        ("0 1\n1 0\n1 1\n", "items has 2 ids for 3 rows", {"format": "dense", "items": ["p", "q"]}),
        ("i,a,a,b,c\nx,1,1,1,1\n", "line 1: column 'a' occurs twice", {}),
        ("x 1 -1 0 2\ny 1 -1 0 2\n", "line 1: column '-1' is no name of a worker: the first line must", {}),
        ("i,a,b\nx,1,1\nx,1,0\n", "line 3: task 'x' has a row already", {"format": "dense"}),
        ("i,a,b\n,1,1\n", "line 2, column 'i' is missing", {"format": "dense"}),
        (
            "i,a,b\nx,1,q\n",
            r"line 2 \(item 'x', annotator 'b'\): 'q' is not in classes",
            {"format": "dense", "classes": [1]},
        ),
    ],
)
def test_dense_files_that_are_wrong(read, text: str, words: str, options) -> None:
    with pytest.raises(ValueError, match=words):
        read(text, **options)


# Labels


def labels(*cells: str) -> str:
    return "task,worker,label\n" + "".join(f"t{n},w,{cell}\n" for n, cell in enumerate(cells))


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        (["900000000000207008", "900000000000207001"], (900000000000207001, 900000000000207008)),
        ([str(2**70), str(2**70 + 1)], (2**70, 2**70 + 1)),
        (["1_2", "12"], ("12", "1_2")),
        (["1E3", "1000"], ("1000", "1E3")),
        (["007", "7"], ("007", "7")),
        (["7", "1", "10", "2"], (1, 2, 7, 10)),
        (["2.0", "1", "10.0"], (1, 2, 10)),
        (["1", "1.0", "x"], ("1", "x")),
        (["1.0", "1.5", "2.0"], (1.0, 1.5, 2.0)),
        (["1.0", "1.10", "1.1"], ("1.0", "1.1", "1.10")),
        (["-1", "-3", "1", "0"], (-3, -1, 0, 1)),
        (["0", "00", "-0"], ("-0", "0", "00")),
        ([" yes", "yes", '" yes "'], ("yes",)),
        (["1", "NAN", "-nan", "10", "3"], (1, 3, 10)),
        (["a10", "a9", "b"], ("a9", "a10", "b")),
        (["True", "False"], ("False", "True")),
    ],
)
def test_labels_are_numbers_only_where_nothing_is_lost(read, cells, classes) -> None:
    found = read(labels(*cells)).vocabulary.classes
    assert found == classes and list(map(type, found)) == list(map(type, classes))


def test_markers(read) -> None:
    ratings = labels(*map(str, range(1, 11)), "unsure", "skip")
    assert read(ratings, missing=["unsure", "skip"]).vocabulary.classes == tuple(range(1, 11))
    with pytest.warns(UserWarning, match="'skip', 'unsure' are read as classes"):
        assert read(ratings).vocabulary.classes == (*map(str, range(1, 11)), "skip", "unsure")
    unsure = read(ratings, missing="skip", unsure="unsure")
    assert unsure.vocabulary.classes == (*range(1, 11), "unsure") and unsure.num_classes == 11
    assert unsure.label.tolist() == list(range(11))
    for marker in (-1, "-1", "-1.0", -1.0):
        assert read(labels("-1", "0", "-1.0", "2"), missing=marker).vocabulary.classes == (0, 2)
        column = {"task": range(3), "worker": [0] * 3, "label": [-1, 0, 2]}
        assert Annotations.from_long(column, missing=marker).vocabulary.classes == (0, 2)
    assert read(labels("-1", "0")).vocabulary.classes == (-1, 0)  # in a long table a number is a label
    words = labels("N/A", "null", "None", "nan", "", "<NA>", "NA", "cat", "dog")
    with pytest.warns(UserWarning, match="'N/A', 'NA', 'None', 'null' mean no label here"):
        assert read(words).vocabulary.classes == ("cat", "dog")
    assert read(labels("NA", "1", "nan")).vocabulary.classes == (1,)
    assert read(labels("NA", "EU", "", "None"), missing=()).vocabulary.classes == ("EU", "NA", "None")
    assert read(labels("NA", "EU", "", "None"), classes=["NA", "EU"]).label.tolist() == [0, 1]


def test_ids_keep_what_was_written(read) -> None:
    a = read("task,worker,label\nnan,NA,1\n007,null,0\n7,1.0,1\n7.0,1,1\n")
    assert a.vocabulary == Vocabulary(("nan", "007", "7", "7.0"), ("1", "1.0", "NA", "null"), (0, 1))
    b = read("task,worker,label\nx,w10,1\nx,w9,0\nx,2,1\nx,10,1\n")
    assert b.vocabulary.annotators == ("2", "10", "w9", "w10")
    given = read("task,worker,label\n1,0,1\n0,2,0\n", items=3, annotators=[0, 1, 2], classes=["0", "1"])
    assert given.vocabulary == Vocabulary((0, 1, 2), (0, 1, 2), ("0", "1")) and to_rows(given) == [
        [(2, 0)],
        [(0, 1)],
        [],
    ]
    named = read(labels("1", "0", "dog"), classes=["cat", "dog"])
    assert named.label.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match=r"line 3, column 'label' \(task 't1', worker 'w'\): '2' is not in classes"):
        read(labels("1", "2", "dog"), classes=["cat", "dog"])


def test_columns_that_another_tool_would_merge(read) -> None:
    batch = (
        '"HITId","WorkerId","Input.image","Answer.category","Approve","Reject"\n'
        '"3AB","A1","img_1.jpg","coast"\n"3AB","A2","img_1.jpg","street"\n"3AC","A1","img_2.jpg","street","x"\n'
    )
    a = read(batch, task="Input.image", worker="WorkerId", label="Answer.category")
    assert triples(a) == [
        ("img_1.jpg", "A1", "coast"), ("img_1.jpg", "A2", "street"), ("img_2.jpg", "A1", "street"),
    ]  # fmt: skip


# Other kinds of files


def test_parquet_arrow_json_and_npy(read, tmp_path: Path) -> None:
    frame = pd.DataFrame(THREE, columns=["task", "worker", "label"])
    expected = Annotations.from_long(frame)
    frame.assign(note="x").to_parquet(tmp_path / "a.parquet")
    frame.to_feather(tmp_path / "a.feather")
    frame.to_json(tmp_path / "a.json", orient="records")
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    frame.to_json(tmp_path / "a.columns", orient="columns")
    (tmp_path / "lists.json").write_text(json.dumps(frame.to_dict("list")))
    (tmp_path / "nested.json").write_text('{"a": {"w1": 0, "w2": 0}, "b": {"w1": 1}}')
    for name in ("a.parquet", "a.feather", "a.json", "a.jsonl", "lists.json", "nested.json"):
        a = Annotations.read(tmp_path / name)
        assert_equal(a, expected) if name != "nested.json" else None
        assert a.vocabulary == expected.vocabulary and triples(a) == triples(expected), name
    renamed = frame.rename(columns={"worker": "who"})
    renamed.to_parquet(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="no column 'worker', only .*'who'"):
        Annotations.read(tmp_path / "b.parquet")
    frame["label"] = ["NA", "x", "1"]
    frame.to_parquet(tmp_path / "c.parquet")
    with pytest.warns(UserWarning, match="'NA' mean no label"):
        assert Annotations.read(tmp_path / "c.parquet").vocabulary.classes == ("1", "x")
    matrix = np.array([[0, -1], [1, 1]])
    np.save(tmp_path / "m.npy", matrix)
    assert_equal(Annotations.read(tmp_path / "m.npy"), Annotations.from_dense(matrix))
    (tmp_path / "m.json").write_text("[[0, -1], [1, 1]]")
    assert_equal(Annotations.read(tmp_path / "m.json", format="dense"), Annotations.from_dense(matrix))


def test_sets_of_tags_are_the_same_whatever_other_rows_hold(tmp_path: Path) -> None:
    path = tmp_path / "tags.csv"
    found = []
    for first in ("1", "1|2", '"[""1"", ""2""]"'):
        path.write_text(f"task,worker,label\na,w,{first}\nb,w,2\n")
        found.append(from_label_sets(path).vocabulary.items)
    assert found == [(("a", "1"), ("a", "2"), ("b", "1"), ("b", "2"))] * 3
    with pytest.raises(ValueError, match=r"column 'label' of row 0 .*no set of tags: tags must be hashable"):
        from_label_sets({"task": [1], "worker": [1], "label": [[{}]]})


def test_label_files(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"

    def truth(text: str, items=None, classes=None) -> tuple[list[str], list[object]]:
        path.write_text(text)
        found = read_labels(path, items=items)
        return found.items, [found.label.values[code] for code in found.label.codes]

    assert truth("3\n0.0\n", ["p", "q"]) == (["p", "q"], [3, 0])
    assert truth("tall building\nforest\n", ["p", "q"]) == (["p", "q"], ["tall building", "forest"])
    assert truth("id,task,label\n1,p.png,a\n2,q.png,\n") == (["p.png"], ["a"])
    assert truth("file,class\np.png,a\n") == (["p.png"], ["a"])
    assert truth('[{"task": "p", "label": 1}]') == (["p"], [1])
    for text, words, items in (
        ("1\n2\n", "one label a line, so nothing says which item", None),
        ("1\n2\n3\n", "items= has 2 names for 3 labels", ["p", "q"]),
        ("p.png,1\nq.png,2\n", "must have a header", None),
        ("task,label\np,1\n,2\n", "line 3, column 'task' is missing", None),
    ):
        with pytest.raises(ValueError, match=words):
            truth(text, items)
    path.write_text("task,label\np,cat\nq,0\nr,cow\n")
    with pytest.raises(ValueError, match=r"labels\.txt, line 4: 'cow' is not in classes"):
        read_labels(path).codes(["cat", "dog"])
    path.write_text("task,label\np,dog\nq,0\n")
    assert torch.equal(read_labels(path).codes(["cat", "dog"]), torch.tensor([1, 0]))


def test_progress_is_told(read) -> None:
    seen: list[int] = []
    text = labels(*"01" * 99_999)
    read(text, progress=seen.append)
    assert seen[-1] == len(text) and seen == sorted(seen) and len(seen) > 2
