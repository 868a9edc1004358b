"""The pictures of a report, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

import numpy as np
from torch import Tensor

from crowdnal._utils.extras import require

INK, GRID, BLUE, ORANGE, GREEN, VIOLET = "#1f2933", "#e4e7eb", "#2563a8", "#d9730d", "#2f855a", "#6b46a8"
_STYLE = {
    "font.size": 9.0, "axes.edgecolor": "#9aa5b1", "axes.labelcolor": INK, "axes.titlesize": 10.0,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "text.color": INK, "xtick.color": INK,
    "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white",
    "axes.facecolor": "white", "figure.constrained_layout.use": True,
    "text.parse_math": False,  # a name may hold a dollar sign
}  # fmt: skip
_MAX_TICKS, _MAX_SMALL_TICKS = 24, 11
_MAX_NUMBERS = 12
DPI = 150


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
    """Training loss, and where they exist held-out log-likelihood, test accuracy and log-likelihood of rounds."""
    panels = [("train_loss", "training loss", BLUE)]
    if history[-1]["heldout_log_likelihood"] is not None:
        panels.append(("heldout_log_likelihood", "log-likelihood of held-out labels", ORANGE))
    if history[-1]["test_accuracy"] is not None:
        panels.append(("test_accuracy", "test accuracy", GREEN))
    if any(row.get("round_log_likelihood") is not None for row in history):
        panels.append(("round_log_likelihood", "log-likelihood, by rounds", VIOLET))
    figure, axes = _figure(len(panels), (3.6 * len(panels), 2.7))
    for ax, (name, title, colour) in zip(axes, panels, strict=True):
        measured = [row for row in history if row[name] is not None]
        epochs, values = ([row[key] for row in measured] for key in ("epoch", name))
        ax.plot(epochs, values, color=colour, linewidth=1.8, marker="o" if len(epochs) < 3 else None)
        if selected_epoch is not None:
            ax.axvline(selected_epoch, color="#9aa5b1", linewidth=1, linestyle="--")
        ax.set_title(f"{title}: {values[-1]:.3f}")
        ax.set_xlabel("epoch" if selected_epoch is None else f"epoch (dashed: {selected_epoch}, by held-out labels)")
        ax.grid(color=GRID, linewidth=0.8)
        ax.xaxis.get_major_locator().set_params(integer=True)
    return figure


@_styled
def confusion(matrix: Tensor, classes: Sequence[str], labels: Sequence[str] = ()) -> Any:
    """One confusion matrix ``[C, K]``, rows = true class, with numbers where they fit."""
    size = len(classes)
    side = min(3.2 + 0.32 * size, 9.0)
    figure, (ax,) = _figure(1, (side + 1.0, side))
    image = _heatmap(ax, matrix)
    _ticks(ax, classes, labels or classes, x=True, y=True)
    ax.set_xlabel("label given")
    ax.set_ylabel("true class")
    if size <= _MAX_NUMBERS:
        for (row, column), value in np.ndenumerate(matrix.numpy()):
            colour = "white" if value > 0.55 else INK
            ax.text(column, row, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=ax, shrink=0.7, label="probability")
    return figure


@_styled
def confusions(
    matrices: Tensor, titles: Sequence[str], classes: Sequence[str], labels: Sequence[str] = (), columns: int = 4
) -> Any:
    """Small multiples of confusion matrices ``[n, C, K]``; class names at the outer edges only."""
    count = len(titles)
    columns = min(columns, count)
    rows = -(-count // columns)
    # placed in inches: automatic layouts do not settle on square axes beside a colour bar
    names = 0.2 + 0.075 * max(len(short(name)) for name in classes)
    side, across, down, left, bottom, top, right = 1.95, 0.16, 0.5, 0.3 + names, 0.3 + names, 0.5, 1.1
    width, height = left + columns * (side + across) + right, bottom + rows * side + (rows - 1) * down + top
    figure = _empty_figure((width, height))
    figure.set_layout_engine("none")

    def place(x: float, y: float, w: float, h: float) -> Any:
        return figure.add_axes((x / width, y / height, w / width, h / height))

    for i, title in enumerate(titles):
        x, y = left + (i % columns) * (side + across), bottom + (rows - 1 - i // columns) * (side + down)
        ax = place(x, y, side, side)
        image = _heatmap(ax, matrices[i])
        ax.set_title(title, fontsize=8.5, fontweight="normal")
        _ticks(ax, classes, labels or classes, x=i + columns >= count, y=i % columns == 0, most=_MAX_SMALL_TICKS)
    middle = bottom + (height - bottom - top) / 2
    figure.colorbar(image, cax=place(width - right + 0.2, middle - 0.9, 0.13, 1.8), label="probability")
    figure.text((left + (width - left - right) / 2) / width, 0.08 / height, "label given", ha="center")
    figure.text(0.08 / width, middle / height, "true class", va="center", rotation=90)
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
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.xaxis.set_minor_formatter("")
    mean = float((values * num_labels).sum() / num_labels.sum())
    ax.axhline(mean, color=ORANGE, linewidth=1.2, linestyle="--", label=f"mean over labels: {mean:.2f}")
    ax.set_ylim(-0.03, 1.03)
    ax.set_xlabel("number of labels")
    ax.set_ylabel("reliability (share of right labels)")
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, borderaxespad=0.2)
    figure.colorbar(points, ax=ax, label="spammer score (0 spammer, 1 perfect)")
    return figure


@_styled
def crowd(items: Mapping[int, int], annotators: Mapping[int, int], classes: Mapping[Any, int]) -> Any:
    """Items by their number of labels, annotators by theirs, and the labels of each class, the first of many."""
    figure, axes = _figure(3, (10.2, 2.8))
    panels = [(axes[0], items, "items", BLUE), (axes[1], annotators, "annotators", ORANGE)]
    for ax, by_labels, what, colour in panels:
        numbers, heights = np.array(list(by_labels)), np.array(list(by_labels.values()), dtype=float)
        if len(numbers) and numbers.max() > 40:
            edges = np.unique(np.geomspace(1, numbers.max() + 1, 25).round())
            heights, edges = np.histogram(numbers, bins=edges, weights=heights)
            ax.bar(edges[:-1], heights, np.diff(edges), align="edge", color=colour, edgecolor="white", linewidth=0.4)
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:,.0f}")
            ax.xaxis.set_minor_formatter("")
        else:
            ax.bar(numbers, heights, 0.8, color=colour)
            ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_title(f"{what} by number of labels")
        ax.set_xlabel("number of labels")
    shown = list(classes.items())[:_MAX_TICKS]
    places = range(len(shown))
    axes[2].barh(places, [number for _, number in shown], color=GREEN)
    axes[2].set_yticks(places, [short(name) for name, _ in shown])
    axes[2].invert_yaxis()
    axes[2].set_title("labels by class" + (f", the first {_MAX_TICKS}" if len(classes) > _MAX_TICKS else ""))
    for ax in axes:
        ax.grid(axis="x" if ax is axes[2] else "y", color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
    return figure


def _figure(count: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    figure = _empty_figure(size)
    return figure, figure.subplots(1, count, squeeze=False).ravel().tolist()


def _empty_figure(size: tuple[float, float]) -> Any:
    # an object of its own, not pyplot's: nothing global changes, and no display is looked for
    figure = require("matplotlib.figure", extra="train").Figure(figsize=size, dpi=DPI)
    require("matplotlib.backends.backend_agg", extra="train").FigureCanvasAgg(figure)
    return figure


def _heatmap(ax: Any, matrix: Tensor) -> Any:
    return ax.imshow(matrix.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="equal", interpolation="nearest")


def _ticks(ax: Any, classes: Sequence[str], labels: Sequence[str], *, x: bool, y: bool, most: int = _MAX_TICKS) -> None:
    """Classes down, labels across."""
    down, across = (
        [(i, short(words[i])) for i in range(0, len(words), -(-len(words) // most))] for words in (classes, labels)
    )
    places, names = zip(*across, strict=True)
    ax.set_xticks(places if x else [], names if x else [], rotation=90 if max(map(len, names)) > 3 else 0)
    places, names = zip(*down, strict=True)
    ax.set_yticks(places if y else [], names if y else [])
    ax.tick_params(length=2, labelsize=8)
    for spine in ax.spines.values():
        spine.set_visible(False)
