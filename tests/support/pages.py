"""The pages that people read (README, docs, benchmarks), and their code run as it stands there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.compare import assert_close

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("[!.]*/README.md")])
"""Every page of the project."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    """The Python on a page, block by block; blocks within a list (``docs/adding-an-op.md``) have their own test."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)


def run(code: str, scope: dict[str, Any], swap: Mapping[str, str] | None = None) -> int:
    """Executes code and holds it to its comments: ``expression  # value`` or ``# value: words``.

    Args:
        code: of a block.
        scope: names it finds; it adds its own.
        swap: what is another text in a test, so that nothing is downloaded and few epochs are run. All must occur.

    Returns:
        Number of values compared.
    """
    for said, done in (swap or {}).items():
        assert said in code, f"{said!r} does not stand there"
        code = code.replace(said, done)
    lines, compared = code.splitlines(), 0
    for statement in ast.parse(code).body:
        if not isinstance(statement, ast.Expr):
            exec(compile(ast.Module([statement], []), "<page>", "exec"), scope)
            continue
        value = eval(compile(ast.Expression(statement.value), "<page>", "eval"), scope)
        comment = lines[statement.end_lineno - 1].partition("  # ")[2]
        told = next(literals([comment, comment.partition(": ")[0]]), None)
        if told is not None:
            compare(ast.unparse(statement), value, told[0])
            compared += 1
    return compared


def literals(texts: Iterable[str]) -> Iterable[tuple[Any]]:
    """Those that are Python values."""
    for text in texts:
        try:
            yield (ast.literal_eval(text.strip()),)
        except (ValueError, SyntaxError):
            continue


def compare(source: str, value: Any, told: Any) -> None:
    """A value against what its comment says: tensors to the digits that are shown."""
    if isinstance(value, Tensor):
        expected = torch.tensor(told, dtype=value.dtype)
        assert_close(value.detach(), expected, atol=1e-3, rtol=0.0, where=source)
    else:
        assert value == told, source
