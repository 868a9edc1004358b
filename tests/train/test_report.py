"""The report: whole, self-contained, legible."""

from __future__ import annotations

import base64
import dataclasses
import io
import re

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from support.small_run import frozen, go, read, write

from crowdnal.train import figures, report

LABELME = ("highway", "insidecity", "tallbuilding", "street", "forest", "coast", "mountain", "opencountry")
LONG = tuple(f"a class with quite a long name, number {i}" for i in range(8))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    root = tmp_path_factory.mktemp("small")
    return go(frozen(write(root), root / "run", epochs=30, holdout=0.1))


def confusions(count: int, classes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (4 * torch.eye(classes) + 2 * torch.rand(count, classes, classes, generator=generator)).softmax(-1)


def drawn(function, *values):
    """The figure itself, laid out."""
    with matplotlib.rc_context(figures._STYLE):
        figure = function.__wrapped__(*values)
        figure.canvas.draw()
    return figure


def overlaps(figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other, and texts that leave the picture."""
    texts = [t for t in figure.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text().strip()]
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    every = [t for axis in axes for t in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
    ticks = {label for t in every for label in (t.label1, t.label2)}
    shown = {t.label1 for axis in axes for t in axis._update_ticks()}  # the others lie outside the axes
    texts = [t for t in texts if t not in ticks or t in shown]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
    found = [(text, "edge") for text, box in boxes if not figure.bbox.padded(1).fully_containsx(box.x0)
             or not figure.bbox.padded(1).fully_containsx(box.x1) or not figure.bbox.padded(1).fully_containsy(box.y0)
             or not figure.bbox.padded(1).fully_containsy(box.y1)]  # fmt: skip
    for i, (a, first) in enumerate(boxes):
        found += [(a, b) for b, second in boxes[i + 1 :] if first.padded(-1).overlaps(second.padded(-1))]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("names", [LABELME, LONG, ("a", "b"), tuple(f"class-{i:03d}-longer" for i in range(100))])
def test_confusions_are_legible(names):
    matrices = confusions(12, len(names))
    titles = [f"{figures.short('M' * 30, 18)}\n12,{345 - i} labels, 0.{i:02d}" for i in range(12)]
    assert overlaps(drawn(figures.confusion, matrices[0], names)) == []
    for count in (1, 3, 5, 12):
        assert overlaps(drawn(figures.confusions, matrices[:count], titles[:count], names)) == []


def test_confusion_is_drawn_with_a_true_class_per_row():
    """Not its transpose: the row of the axis called "true class", the column of "label given"."""
    figure = figures.confusion.__wrapped__(torch.tensor([[0.1, 0.9], [0.3, 0.7]]), ["a", "b"])
    ax = figure.axes[0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("label given", "true class")
    numbers = {text.get_position(): text.get_text() for text in ax.texts}
    assert numbers == {(0, 0): ".10", (1, 0): ".90", (0, 1): ".30", (1, 1): ".70"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("held", [None, -0.7])
@pytest.mark.parametrize("epochs", [1, 40])
def test_learning_curve_is_legible(held, epochs):
    history = [
        {"epoch": e + 1, "lr": 1e-3, "train_loss": 1 / (e + 1), "heldout_log_likelihood": held, "test_accuracy": 0.8}
        for e in range(epochs)
    ]
    assert overlaps(drawn(figures.learning_curve, history, None if held is None else 1)) == []


@pytest.mark.parametrize("count", [1, 59, 2000])
def test_reliability_is_legible(count):
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(count, generator=generator) * 7).exp().long() + 1
    values = torch.rand(count, generator=generator, dtype=torch.float64)
    assert overlaps(drawn(figures.reliability, labels, values, values)) == []


def test_style_stays_here():
    before = dict(matplotlib.rcParams)
    assert figures.confusion(confusions(1, 3)[0], ("a", "b", "c")).startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before


def test_names_are_cut_in_the_middle():
    assert figures.short("short") == "short"
    assert figures.short("abcdefghijklmnopqrstuvwxyz", 9) == "abcd…wxyz"
    assert len(figures.short("x" * 50, 16)) == 16


def test_report_is_one_file_with_the_numbers(result):
    html = (result.out / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert len(sources) >= 4 and all(source.startswith("data:image/") for source in sources)
    for source in sources:
        Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).verify()
    assert "<script" not in html and "http" not in html
    found = result.metrics
    assert f"<b>{found['test_accuracy']:.3f}</b>" in html
    assert f"<b>{found['truth']['label_accuracy']:.3f}</b>" in html
    assert f"epoch {found['selected_epoch']}, chosen by held-out labels" in html
    assert "crowdnal train --images" in html
    assert "<td>Krippendorff&#x27;s alpha</td>" in html
    for annotator in ("ann", "bob", "w 3", "w 10"):
        assert annotator in html


def test_overruled_votes_are_shown(result):
    labels = read(result.out / "labels.csv")
    changed = labels[(labels.majority_vote != "") & (labels.majority_vote != labels.label)]
    html = (result.out / "report.html").read_text()
    assert len(changed) > 0
    assert f"{len(changed)} of 36 annotated images get another label" in html
    assert html.count("<figure>") == min(len(changed), 12)


def test_names_cannot_break_the_page(result):
    classes = ("<script>alert(1)</script>", "b & c", '"d"')
    data = dataclasses.replace(result.data, classes=classes)
    history = [{"epoch": 1, "train_loss": 1.0, "heldout_log_likelihood": None, "test_accuracy": None}]
    html = report.render(result.metrics, data, result.estimates, history)
    assert "<script" not in html and "&lt;script&gt;" in html


def test_nothing_but_labels(result):
    """No test set, no truth, no held-out labels, nothing overruled."""
    unknown = ("test_accuracy", "truth", "test_calibration_error")
    found = {key: value for key, value in result.metrics.items() if key not in unknown} | {"selected_epoch": None}
    votes = result.data.annotations.votes().double() + 1e-3
    estimates = dataclasses.replace(result.estimates, posterior=votes / votes.sum(1, keepdim=True))
    history = [{"epoch": 1, "train_loss": 1.0, "heldout_log_likelihood": None, "test_accuracy": None}]
    html = report.render(found, result.data, estimates, history)
    assert "overrules" not in html and "test images" not in html
    assert np.count_nonzero(["Confusion" in html, "Annotators" in html, "Learning curve" in html]) == 3
