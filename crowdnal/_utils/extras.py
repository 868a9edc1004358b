"""Late import of optional libraries."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import an optional library at the moment it is needed.

    Args:
        module: Dotted name, as in an import statement.
        extra: The extra of this package that installs it.

    Returns:
        The module.

    Raises:
        ImportError: It cannot be imported; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{module} could not be imported ({error}). Install it with: pip install "crowdnal[{extra}]"', name=module
        ) from error
