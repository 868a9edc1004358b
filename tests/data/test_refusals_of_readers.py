"""What readers refuse by name, where pandas, NumPy or the interpreter spoke instead: found by `tests/fuzz.py`."""

from __future__ import annotations

import pytest
import torch

from crowdnal.data import Annotations

LONG = {"task": ["t"], "worker": ["w"], "label": ["b"]}


def test_a_quote_that_is_never_closed(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"task,worker,label\nt1,w1,a\nt1,w2,b\nt1,a\nt3,w3,c\n')
    with pytest.raises(ValueError, match="a.csv: its rows cannot be told apart .*close every quote"):
        Annotations.from_dense(str(path))


def test_numbers_of_ids_that_no_memory_holds() -> None:
    """They were counted out one by one, for hours."""
    with pytest.raises(ValueError, match=r"num_classes=\d+ is more than"):
        Annotations.from_dense([[0, 1]], num_classes=2**63 - 1)
    with pytest.raises(ValueError, match="items=.* must be 0 to"):
        Annotations.from_long(LONG, items=2**70)


def test_what_is_no_name_no_marker_no_number() -> None:
    for option in ("task", "label", "weight"):
        with pytest.raises(ValueError, match=rf"{option}=\[0, 1\] must be the name of a column"):
            Annotations.from_long(LONG, **{option: [0, 1]})
    with pytest.raises(ValueError, match="missing=.* is no label"):
        Annotations.from_dense([[0, 1]], missing=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"annotator\[1\] is \{\}"):
        Annotations([0, 1, 3], [0, {}, (1, 2)], [0, 1, 1], num_annotators=2, num_classes=2)
    with pytest.raises(ValueError, match="on meta"):
        Annotations.from_dense(torch.zeros(2, 2, device="meta"))
