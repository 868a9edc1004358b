"""Seeded cases of malformed and extreme input for `tests/fuzz.py`, and what counts as a fault of one.

A case is a description and a call. The call may give a right result or raise an exception of crowdnal's own: one
raised in its code or by its kernels, which name the argument or the row. Else it is a fault: a signal, a hang, somebody
else's exception, a result that the malformed argument changed, numbers that are not what they must be.
"""

from __future__ import annotations

import importlib
import random
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import crowdnal

LAYERS = ("ops", "functional", "objectives", "aggregators", "readers", "files")
WORDS = (
    "crowdnal:",  # a kernel's
    "crowdnal::",  # torch's, of the schema of an op
    "unexpected keyword argument",
    "can't allocate memory",  # of a tensor that was asked for
    "No such file or directory",
    "Is a directory",
    "surrogates not allowed",  # the same
    "embedded null byte",  # Python's, of a file name
)
HOME = str(Path(crowdnal.__file__).parent)


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        what: all that is needed to see what it is.
        call: gives None if the result is right, else what is wrong with it.
    """

    what: str
    call: Callable[[], str | None]


def fault(case: Case) -> str | None:
    """What is wrong with how crowdnal takes the case; None if nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = case.call()
    except MemoryError:
        return None
    except Exception as error:
        return None if ours(error) else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return wrong


def ours(error: BaseException) -> bool:
    """Whether crowdnal itself says what is wrong: a `raise` of its code, or a check of its kernels."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = last.filename.startswith(HOME) and (last.line or "").startswith("raise ")
    return raised or any(words in str(error) for words in WORDS)


def case_of(layer: str, seed: int, number: int) -> Case:
    """One case: the same wherever it is run."""
    cases = importlib.import_module(f"support.fuzz_{layer}")
    return cases.case(random.Random(f"{layer}/{seed}/{number}"))
