"""What a training run finds, in sizes of its training set: targets by item, history."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from crowdnal.objectives._bases.history import Round


class RunState:
    """Tensors by name, empty (or None) until a run sets them, and the history of its rounds.

    No buffers: an average of weights (EMA, SWA) pairs buffers, or all of a state, by order and shape, and these come
    and change shape in training. For the same reason a copy follows the original in what is empty when it is made,
    until it begins a run (or loads a state) of its own: an average made before training has what the run finds.

    Args:
        targets: the first of the tensors, empty, whose device is that of all.
    """

    def __init__(self, targets: Tensor) -> None:
        self.own: dict[str, Tensor | None] = {"targets": targets}
        self._history: list[Round] = []
        self._origin: RunState | None = None

    def __getitem__(self, name: str) -> Any:
        own = self.own[name]
        if self._origin is None or _filled(own):
            return own
        found = self._origin[name]
        if own is not None:
            return found.to(own)
        return found if found is None else found.to(self.own["targets"].device)  # type: ignore[union-attr]

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        self.begin()
        self.own[name] = value

    @property
    def history(self) -> list[Round]:
        """Of the rounds."""
        follows = self._origin is not None and not _filled(self.own["targets"])
        return self._origin.history if follows else self._history  # type: ignore[union-attr]

    @history.setter
    def history(self, history: list[Round]) -> None:
        self.begin()
        self._history = history

    def begin(self) -> None:
        """Follows no other any more."""
        self._origin = None

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """To another device or type, as ``torch.nn.Module._apply`` does it with buffers."""
        self.own = {name: None if tensor is None else function(tensor) for name, tensor in self.own.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = self._alone()
        new.own = copy.deepcopy(new.own, memo)
        new._origin = self
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        alone = self._alone()  # a pickle follows nobody
        return _restored, (type(self), alone.own, alone._history)

    def _alone(self) -> Self:
        """What this one has now, by itself."""
        return _restored(type(self), {name: self[name] for name in self.own}, list(self.history))


def _restored(cls: Any, own: dict[str, Tensor | None], history: list[Round]) -> Any:
    new = cls(own["targets"])
    new.own, new._history = own, history
    return new


def _filled(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0


def of_run(name: str) -> Any:
    """An attribute of an objective that is a tensor of its run."""

    def get(objective: Any) -> Any:
        return objective._run[name]

    def put(objective: Any, value: Tensor | None) -> None:
        objective._run[name] = value

    return property(get, put)
