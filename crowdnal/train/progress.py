"""What a run says while it works: a live bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from crowdnal._utils.extras import require
from crowdnal.train.files import ERRORS


class Reporter:
    """Prints lines and progress to standard output; ``quiet`` prints nothing."""

    def __init__(self, quiet: bool = False, console: Any = None) -> None:
        self.quiet = quiet
        self.board: Any = None  # TensorBoard's writer, while a run logs to it
        self.console: Any = console or require("rich.console", extra="train").Console(
            highlight=False, quiet=quiet, soft_wrap=True
        )

    def say(self, text: str) -> None:
        """One line; square brackets are text, not markup."""
        self.console.print(text.encode("utf-8", ERRORS).decode(), markup=False)

    def table(self, columns: list[str], rows: list[list[str]], title: str | None = None) -> None:
        """A small table, the first column left-aligned and the others right-aligned."""
        table = require("rich.table", extra="train").Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
        escape = require("rich.markup", extra="train").escape
        for row in rows:
            table.add_row(*map(escape, row))
        self.console.print(table)

    def log(self, row: Mapping[str, float | None]) -> None:
        """The numbers of an epoch, to TensorBoard if a run logs to it."""
        for name, value in row.items():
            if self.board is not None and value is not None and name != "epoch":
                self.board.add_scalar(name, value, row["epoch"])

    @contextmanager
    def logging(self, folder: Path | None, epochs_done: int) -> Iterator[None]:
        """Meanwhile :meth:`log` writes to TensorBoard's files in ``folder``, where later epochs are purged."""
        if folder is None:
            yield
            return
        require("tensorboard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(folder), purge_step=epochs_done + 1)
        try:
            yield
        finally:
            self.board.close()
            self.board = None

    @contextmanager
    def track(self, what: str, total: int, done: int = 0) -> Iterator[Track]:
        """Progress of ``total`` steps; the yielded object's ``advance`` counts them."""
        if self.quiet or not self.console.is_terminal:
            yield Track(self, what, total, done)
            return
        rich = require("rich.progress", extra="train")
        columns = (
            rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(),
            rich.TimeRemainingColumn(), rich.TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        with rich.Progress(*columns, console=self.console) as bar:
            task = bar.add_task(what, total=total, completed=done, note="")
            yield Track(self, what, total, done, bar, task)


class Track:
    """Counts steps of one piece of work; see :meth:`Reporter.track`."""

    def __init__(self, reporter: Reporter, what: str, total: int, done: int, bar: Any = None, task: Any = None) -> None:
        self.reporter, self.what, self.total, self.done = reporter, what, total, done
        self.bar, self.task = bar, task
        self.start = time.monotonic()
        self.said = 10 * done // max(total, 1)

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count steps; the note is shown beside the bar or in the line."""
        self.done += steps
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, note=note)
            return
        tenth = 10 * self.done // max(self.total, 1)
        if tenth > self.said or self.done == self.total:
            self.said = tenth
            seconds = time.monotonic() - self.start
            self.reporter.say(f"{self.what} {self.done}/{self.total}  {note}{'  ' if note else ''}{seconds:.0f} s")


class Stopwatch:
    """Wall-clock seconds of the phases of a run: ``with watch("training"): ...``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[tuple[str, float]] = []

    def __call__(self, phase: str) -> Stopwatch:
        """Name the phase that the following ``with`` block measures."""
        self._open.append((phase, time.monotonic()))
        return self

    def __enter__(self) -> None:
        """Start."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and add to the phase."""
        phase, start = self._open.pop()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start
