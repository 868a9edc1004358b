"""``report.html``: one self-contained file with the pictures, the numbers and the command of a run."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from crowdnal.data.summary import summarize
from crowdnal.train import figures
from crowdnal.train.config import NOT_GIVEN, OPTIONS, in_words
from crowdnal.train.data import TrainingData
from crowdnal.train.images import read_image
from crowdnal.train.inspection import facts, picture
from crowdnal.train.outputs import TABLE_FILES, Estimates, majority

_CONFUSIONS = 12
_RANKED = 8
_GALLERY = 12
_DECIDING = ("model", "objective", "training")  # groups of options that say what was trained, and how
_PIXELS_PER_INCH = 94  # letters of all figures are as large as the text around them

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7fa; color: #1f2933; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 10px; }
.sub { color: #52606d; margin: 0 0 20px; overflow-wrap: anywhere; }
section { background: #fff; border: 1px solid #e4e7eb; border-radius: 10px; padding: 18px 20px; margin: 18px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px; }
.tile { background: #fff; border: 1px solid #e4e7eb; border-radius: 10px; padding: 12px 16px; }
.tile b { display: block; font-size: 24px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: #52606d; font-size: 13px; }
img.figure { max-width: 100%; height: auto; display: block; }
.note { color: #52606d; font-size: 13.5px; margin: 6px 0 0; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 24px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 5px 8px; border-bottom: 1px solid #e4e7eb; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
th { color: #52606d; font-weight: 600; }
.bar, .bar i { border-radius: 3px; height: 8px; display: inline-block; }
.bar { background: #e4e7eb; width: 90px; vertical-align: middle; margin-left: 8px; }
.bar i { background: #2563a8; display: block; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 14px; }
.gallery figure { margin: 0; font-size: 13px; } .gallery img { width: 100%; border-radius: 6px; display: block; }
.gallery figcaption { margin-top: 4px; overflow-wrap: anywhere; } .gallery s { color: #829ab1; }
code { display: block; background: #f0f4f8; border-radius: 6px; padding: 10px 12px; font-size: 13px; }
code { overflow-wrap: anywhere; white-space: pre-wrap; }
"""


def render(found: dict[str, Any], data: TrainingData, estimates: Estimates, history: Sequence[dict[str, Any]]) -> str:
    """The report of a run as HTML.

    Args:
        found: content of ``metrics.json``.
        data: of the run.
        estimates: of the trained model.
        history: a row of numbers per epoch.
    """
    title = f"{found['model']} · {found['arguments']['objective']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(str(data.images.files[0].parent))} · {found["epochs"]} epochs · '
        f"{escape(found['weights'])} · crowdnal {escape(found['crowdnal'])}</p>",
        _tiles(found),
        _section("Learning curve", _image(figures.learning_curve(history, found["selected_epoch"]), "learning curve")),
        _comparison(found["comparison"]),
        _crowd(data),
        _annotators(found, data, estimates),
        _confusions(data, estimates),
        _changed(data, estimates),
        _section("Repeat", f"<code>{escape(found['command'])}</code>" + _numbers(found)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{escape(title)}</title><style>{_CSS}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def summary(found: dict[str, Any], out: Path) -> Iterator[str]:
    """What a run says at its end: the accuracies of ``metrics.json``, and where everything is."""
    if "test_accuracy" in found:
        yield f"test accuracy {found['test_accuracy']:.4f} (last epoch, {found['num_test']} images)"
    if found["selected_epoch"] is not None:
        accuracy = found["selected_test_accuracy"]
        reached = "" if accuracy is None else f", test accuracy {accuracy:.4f}"
        yield f"held-out annotations choose epoch {found['selected_epoch']}{reached}: {out / 'model_selected'}"
    if "truth" in found:
        truth = found["truth"]
        yield (
            f"accuracy on {truth['items']} annotated images: labels.csv {truth['label_accuracy']:.4f}, "
            f"classifier alone {truth['model_accuracy']:.4f}, majority vote {truth['majority_vote_accuracy']:.4f}"
        )
    yield f"model      {out / 'model.safetensors'}  timm.create_model('local-dir:{out}', pretrained=True)"
    for name in TABLE_FILES:
        yield f"{name.split('.')[0]:<10} {out / name}"


def _section(title: str, body: str, note: str = "") -> str:
    text = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{body}{text}</section>"


def _image(png: bytes, what: str) -> str:
    width = int.from_bytes(png[16:20], "big") * _PIXELS_PER_INCH // figures.DPI
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<img class="figure" width="{width}" alt="{escape(what)}" src="{source}">'


def _comparison(compared: dict[str, Any] | None) -> str:
    if compared is None:
        return ""
    best_first = sorted(compared["log_likelihood"].items(), key=lambda entry: -entry[1])
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{value:.4f}</td><td>{compared['standard_errors'][name]:+.1f}</td></tr>"
        for name, value in best_first
    )
    head = "<tr><th>objective</th><th>held-out log-likelihood</th><th>standard errors ahead of the votes</th></tr>"
    return _section("Compared with the votes", f"<table>{head}{rows}</table>", escape(compared["why"]))


def _tiles(found: dict[str, Any]) -> str:
    tiles = []
    if "test_accuracy" in found:
        tiles.append((f"{found['test_accuracy']:.3f}", f"accuracy on {found['num_test']:,} test images, last epoch"))
    if found["selected_epoch"] is not None:
        value = found["selected_test_accuracy"]
        shown = f"{value:.3f}" if value is not None else str(found["selected_epoch"])
        tiles.append((shown, f"epoch {found['selected_epoch']}, chosen by held-out labels"))
    if "truth" in found:
        truth = found["truth"]
        tiles.append((f"{truth['label_accuracy']:.3f}", f"accuracy of estimated labels, {truth['items']:,} known"))
        tiles.append((f"{truth['majority_vote_accuracy']:.3f}", "accuracy of the majority vote on the same"))
    tiles += [
        (f"{found['num_annotations']:,}", f"labels, {found['num_annotations'] / found['num_annotated']:.1f} per image"),
        (f"{found['num_annotated']:,}", f"annotated of {found['num_images']:,} images"),
        (f"{found['num_annotators']:,}", f"annotators, mean reliability {found['mean_reliability']:.2f}"),
    ]
    cells = "".join(f'<div class="tile"><b>{value}</b><span>{escape(text)}</span></div>' for value, text in tiles)
    return f'<div class="tiles">{cells}</div>'


def _crowd(data: TrainingData) -> str:
    """What was read, before anything was trained."""
    note = ""
    try:
        told = data.annotations.summary()
    except ImportError as error:
        told = summarize(data.annotations, measure_agreement=False)
        note = f"Without agreement: {escape(str(error))}"
    rows = "".join(f"<tr><td>{escape(what)}</td><td>{escape(value)}</td></tr>" for what, value in facts(told))
    advice = "".join(f'<p class="note">{escape(one.text)}</p>' for one in told.advice)
    body = _image(picture(told), "labels per item, annotator and class") + f"<table>{rows}</table>{advice}"
    return _section("Annotations", body, note)


def _annotators(found: dict[str, Any], data: TrainingData, estimates: Estimates) -> str:
    given = (estimates.num_labels > 0).nonzero()[:, 0]
    counts, values = estimates.num_labels[given], estimates.reliability[given]
    picture = figures.reliability(counts, values, estimates.spammer_score[given])
    note = (
        "Reliability is balanced accuracy, the mean diagonal of an annotator's confusion matrix. "
        + ("The matrices are the objective's own." if estimates.from_model else _EMPIRICAL)
        + " Few labels give a rough estimate; annotators.csv has all annotators."
    )
    least = min(10, int(counts.max()))
    enough = given[counts >= least]
    ranked = enough[torch.argsort(estimates.reliability[enough], descending=True, stable=True)]
    best, worst = ranked[:_RANKED], ranked[_RANKED:][-_RANKED:].flip(0)
    tables = _ranking(f"Most reliable ({least} labels or more)", best.tolist(), data, estimates)
    if len(worst):
        tables += _ranking(f"Least reliable ({least} labels or more)", worst.tolist(), data, estimates)
    body = _image(picture, "reliability against number of labels") + f'<div class="columns">{tables}</div>'
    return _section("Annotators", body, note)


_EMPIRICAL = (
    "This objective does not model annotators: the matrices are counted from their labels against the "
    "classifier's probabilities."
)


def _ranking(title: str, chosen: list[int], data: TrainingData, estimates: Estimates) -> str:
    rows = []
    for r in chosen:
        value = float(estimates.reliability[r])
        bar = f'<span class="bar"><i style="width:{100 * min(max(value, 0), 1):.0f}%"></i></span>'
        rows.append(
            f"<tr><td>{escape(_annotator(data, r))}</td><td>{int(estimates.num_labels[r])}</td>"
            f"<td>{value:.2f}{bar}</td><td>{float(estimates.spammer_score[r]):.2f}</td></tr>"
        )
    return (
        f"<table><caption class='note' style='text-align:left'>{escape(title)}</caption><tr><th>annotator</th>"
        f"<th>labels</th><th>reliability</th><th>spammer score</th></tr>{''.join(rows)}</table>"
    )


def _annotator(data: TrainingData, r: int) -> str:
    assert data.annotations.vocabulary is not None
    return str(data.annotations.vocabulary.annotators[r])


def _confusions(data: TrainingData, estimates: Estimates) -> str:
    counts = estimates.num_labels.double()
    mean = (estimates.confusion * counts[:, None, None]).sum(0) / counts.sum()
    top = torch.argsort(estimates.num_labels, descending=True, stable=True)[:_CONFUSIONS]
    top = top[estimates.num_labels[top] > 0]
    titles = [
        f"{figures.short(_annotator(data, r), 18)}\n{int(counts[r]):,} labels, {float(estimates.reliability[r]):.2f}"
        for r in top.tolist()
    ]
    body = (
        _image(figures.confusion(mean, data.classes, data.labels), "mean confusion matrix")
        + '<p class="note">Mean over all labels. Rows are true classes and sum to 1.</p><br>'
        + _image(figures.confusions(estimates.confusion[top], titles, data.classes, data.labels), "confusion matrices")
    )
    return _section("Confusion", body, "The annotators with most labels: name, number of labels, reliability.")


def _changed(data: TrainingData, estimates: Estimates) -> str:
    vote, estimate = majority(data.annotations, len(data.classes)), estimates.posterior.argmax(1)
    changed = ((vote >= 0) & (vote != estimate)).nonzero()[:, 0]
    if not len(changed):
        return ""
    sure = changed[torch.argsort(estimates.posterior[changed].max(1).values, descending=True, stable=True)]
    cells = []
    for i in sure[:_GALLERY].tolist():
        item = data.annotations[i]
        given = ", ".join(data.labels[k] for k in item.label.tolist()[:6]) + (" ..." if len(item.label) > 6 else "")
        truth = int(data.images.truth[i])
        known = f"<br>truth: {escape(data.classes[truth])}" if truth >= 0 else ""
        before, after = (escape(data.classes[int(k)]) for k in (vote[i], estimate[i]))
        cells.append(
            f'<figure><img alt="" src="{_thumbnail(data.images.files[i])}"><figcaption><s>{before}</s> '
            f"<b>{after}</b> {float(estimates.posterior[i].max()):.2f}<br>given: {escape(given)}{known}"
            "</figcaption></figure>"
        )
    note = (
        f"{len(changed)} of {int((vote >= 0).sum())} annotated images get another label than the majority vote (ties "
        f"counted as the first class); the {len(cells)} surest. labels.csv has all."
    )
    return _section("Where the estimate overrules the vote", f'<div class="gallery">{"".join(cells)}</div>', note)


def _thumbnail(path: Path) -> str:
    image = read_image(path, "RGB")
    image.thumbnail((180, 180))
    stream = io.BytesIO()
    image.save(stream, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _numbers(found: dict[str, Any]) -> str:
    values = {name: in_words(found["arguments"][name]) for name, option in OPTIONS.items() if option.group in _DECIDING}
    shown = [(name, text) for name, text in values.items() if text != NOT_GIVEN and not OPTIONS[name].free]
    shown += [("device", found["device"]), ("seconds", ", ".join(f"{k} {v}" for k, v in found["seconds"].items()))]
    if "test_calibration_error" in found:
        shown.append(("test calibration error", f"{found['test_calibration_error']:.4f}"))
    rows = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{escape(str(value))}</td></tr>" for name, value in shown
    )
    return f"<br><table>{rows}</table>"
