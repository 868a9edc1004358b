"""The pictures of a report, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import numpy as np
from torch import Tensor

from crowdnal._extras import require

INK, GRID, BLUE, ORANGE, GREEN = "#1f2933", "#e4e7eb", "#2563a8", "#d9730d", "#2f855a"
_STYLE = {
    "font.size": 9.0, "axes.edgecolor": "#9aa5b1", "axes.labelcolor": INK, "axes.titlesize": 10.0,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "text.color": INK, "xtick.color": INK,
    "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white",
    "axes.facecolor": "white", "figure.constrained_layout.use": True,
}  # fmt: skip
_MAX_TICKS = 24
_MAX_NUMBERS = 12


P = ParamSpec("P")


def _styled(draw: Callable[P, Any]) -> Callable[P, bytes]:
    """Draw in this module's style, whatever the user's is, and return a PNG."""

    @wraps(draw)
    def drawn(*arguments: P.args, **options: P.kwargs) -> bytes:
        stream = io.BytesIO()
        with require("matplotlib", extra="train").rc_context(_STYLE):
            draw(*arguments, **options).savefig(stream, format="png")
        return stream.getvalue()

    return drawn


def short(name: object, length: int = 16) -> str:
    """A name cut in its middle to fit."""
    text = str(name)
    if len(text) <= length:
        return text
    head = length // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


@_styled
def learning_curve(history: Sequence[dict[str, Any]], selected_epoch: int | None) -> Any:
    """Training loss, and where they exist held-out log-likelihood and test accuracy, by epoch."""
    panels = [("train_loss", "training loss", BLUE)]
    if history[-1]["heldout_log_likelihood"] is not None:
        panels.append(("heldout_log_likelihood", "log-likelihood of held-out labels", ORANGE))
    if history[-1]["test_accuracy"] is not None:
        panels.append(("test_accuracy", "test accuracy", GREEN))
    figure, axes = _figure(len(panels), (3.6 * len(panels), 2.7))
    epochs = [row["epoch"] for row in history]
    for ax, (name, title, colour) in zip(axes, panels, strict=True):
        values = [row[name] for row in history]
        ax.plot(epochs, values, color=colour, linewidth=1.8, marker="o" if len(epochs) < 3 else None)
        if selected_epoch is not None:
            ax.axvline(selected_epoch, color="#9aa5b1", linewidth=1, linestyle="--")
        ax.set_title(f"{title}: {values[-1]:.3f}")
        ax.set_xlabel("epoch" if selected_epoch is None else f"epoch (dashed: {selected_epoch}, by held-out labels)")
        ax.grid(color=GRID, linewidth=0.8)
        ax.xaxis.get_major_locator().set_params(integer=True)
    return figure


@_styled
def confusion(matrix: Tensor, classes: Sequence[str]) -> Any:
    """One confusion matrix ``[C, K]``, rows = true class, with numbers where they fit."""
    size = len(classes)
    side = min(3.2 + 0.32 * size, 9.0)
    figure, (ax,) = _figure(1, (side + 1.0, side))
    image = _heatmap(ax, matrix)
    _ticks(ax, classes, x=True, y=True)
    ax.set_xlabel("label given")
    ax.set_ylabel("true class")
    if size <= _MAX_NUMBERS:
        for (row, column), value in np.ndenumerate(matrix.numpy()):
            colour = "white" if value > 0.55 else INK
            ax.text(column, row, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=ax, shrink=0.7, label="probability")
    return figure


@_styled
def confusions(matrices: Tensor, titles: Sequence[str], classes: Sequence[str], columns: int = 4) -> Any:
    """Small multiples of confusion matrices ``[n, C, K]``; class names at the outer edges only."""
    count = len(titles)
    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = _figure(rows * columns, (2.45 * columns + 1.4, 2.55 * rows + 0.9), (rows, columns))
    image = None
    for i, ax in enumerate(axes):
        if i >= count:
            ax.set_axis_off()
            continue
        image = _heatmap(ax, matrices[i])
        ax.set_title(titles[i], fontsize=8.5, fontweight="normal")
        _ticks(ax, classes, x=i + columns >= count, y=i % columns == 0)
    if image is not None:
        figure.colorbar(image, ax=axes, shrink=min(1.0, 1.6 / rows), aspect=25, label="probability")
    figure.supxlabel("label given", fontsize=9)
    figure.supylabel("true class", fontsize=9)
    return figure


@_styled
def reliability(num_labels: Tensor, values: Tensor, spammer: Tensor) -> Any:
    """Reliability of each annotator against the number of labels, coloured by the spammer score."""
    figure, (ax,) = _figure(1, (6.4, 3.6))
    counts = num_labels.numpy()
    low, high = counts.min(), counts.max()
    points = ax.scatter(
        counts, values.numpy(), c=spammer.numpy(), cmap="viridis", vmin=0, vmax=1, s=34, alpha=0.85,
        edgecolors="white", linewidths=0.6,
    )  # fmt: skip
    if high > 20 * low:
        ax.set_xscale("log")
    mean = float((values * num_labels).sum() / num_labels.sum())
    ax.axhline(mean, color=ORANGE, linewidth=1.2, linestyle="--", label=f"mean over labels: {mean:.2f}")
    ax.set_ylim(-0.03, 1.03)
    ax.set_xlabel("number of labels")
    ax.set_ylabel("reliability (mean diagonal)")
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, borderaxespad=0.2)
    figure.colorbar(points, ax=ax, label="spammer score (0 spammer, 1 perfect)")
    return figure


def _figure(count: int, size: tuple[float, float], grid: tuple[int, int] | None = None) -> tuple[Any, list[Any]]:
    # an object of its own, not pyplot's: nothing global changes, and no display is looked for
    figure = require("matplotlib.figure", extra="train").Figure(figsize=size, dpi=130)
    require("matplotlib.backends.backend_agg", extra="train").FigureCanvasAgg(figure)
    rows, columns = grid or (1, count)
    return figure, figure.subplots(rows, columns, squeeze=False).ravel().tolist()


def _heatmap(ax: Any, matrix: Tensor) -> Any:
    return ax.imshow(matrix.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="equal", interpolation="nearest")


def _ticks(ax: Any, classes: Sequence[str], *, x: bool, y: bool) -> None:
    step = -(-len(classes) // _MAX_TICKS)
    places = list(range(0, len(classes), step))
    names = [short(classes[i]) for i in places]
    ax.set_xticks(places if x else [], names if x else [], rotation=90 if max(map(len, names)) > 3 else 0)
    ax.set_yticks(places if y else [], names if y else [])
    ax.tick_params(length=2, labelsize=8)
    for spine in ax.spines.values():
        spine.set_visible(False)

