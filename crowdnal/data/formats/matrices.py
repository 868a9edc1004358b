"""Matrices of labels that libraries write: LabelMe's answers, snorkel's label matrix, cleanlab's wide table."""

from __future__ import annotations

from pathlib import Path

from crowdnal.data._binary import NUMPY, magic_of, read_npy
from crowdnal.data._csv import read_delimited
from crowdnal.data._dense import Matrix, of_columns
from crowdnal.data._matrix import each_row_once, is_headless, read_matrix_of
from crowdnal.data._text import read_dialect, read_head
from crowdnal.data.formats import register


@register("labelme")
def read_answers(path: Path) -> Matrix:
    """LabelMe's ``answers.txt`` (Rodrigues and Pereira, 2018): an image a row, an annotator a column, -1 none."""
    return _numbers(path, "a row of class numbers per image")


@register("snorkel")
def read_label_matrix(path: Path) -> Matrix:
    """Snorkel's label matrix, ``.npy`` or text: a data point a row, a labelling function a column, -1 abstains."""
    if magic_of(path) == NUMPY:
        return read_npy(path)
    return _numbers(path, "a row of class numbers per data point (numpy.save writes it)")


@register("cleanlab")
def read_wide(path: Path) -> Matrix:
    """Cleanlab's ``labels_multiannotator`` by ``DataFrame.to_csv``: an example a row, an annotator a column.

    The first column is the index where it has no name, or where its cells are no labels: all differ, and none stands
    in another column. Without an index rows are numbered.
    """
    text = read_head(path, None)
    dialect = read_dialect(text, [], None, blanks=False)
    if is_headless(dialect.header):
        raise ValueError(f"{path} starts with a row of labels: cleanlab's table has a header of annotators")
    names = dialect.header
    table = read_delimited(text, dialect, range(len(names)), range(len(names)), headed=True)
    first, *others = table.columns.values()
    labels = {value for column in others for value in column.values}
    distinct = len(first.values) == len(first.codes) and not labels & set(first.values)
    if distinct or not names[0]:
        return each_row_once(read_matrix_of(text, dialect, None))
    return of_columns([first, *others], None, names, table.place)


def _numbers(path: Path, what: str) -> Matrix:
    text = read_head(path, None)
    dialect = read_dialect(text, [], None, blanks=True)
    if not is_headless(dialect.header):
        raise ValueError(f"{path} starts with {', '.join(dialect.header[:5])}: it must have {what}")
    return read_matrix_of(text, dialect, None)
