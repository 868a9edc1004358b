"""JSON and JSON lines, told apart by trying."""

from __future__ import annotations

import json
from typing import Any


def parse_json(content: str, source: str) -> tuple[Any, str]:
    """The value, a list of records for JSON lines, and what one of them is called; None where it is no JSON.

    Args:
        content: of a file.
        source: what the file is called in messages.

    Raises:
        ValueError: it begins as JSON and does not go on so, naming the line.
    """
    content = content.lstrip("\ufeff")
    start = content.lstrip()[:1]
    if start not in ("{", "["):
        return None, ""
    try:
        return json.loads(content), "record"
    except RecursionError:
        raise ValueError(f"{source} is JSON nested too deep to be read") from None
    except json.JSONDecodeError as whole:
        try:
            json.loads(content.lstrip().split("\n", 1)[0])
        except (json.JSONDecodeError, RecursionError):
            if start == "{":
                raise ValueError(f"{source}, line {whole.lineno} is not JSON ({whole.msg})") from None
            return None, ""
    found = []
    for number, line in enumerate(content.split("\n"), 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}, line {number} is not JSON ({error.msg})") from None
        except RecursionError:
            raise ValueError(f"{source}, line {number} is JSON nested too deep to be read") from None
    return found, "line"
