"""The losses and primitives on `Annotations`, differentiable to any order, native where the library was built."""

from crowdnal.functional import losses, primitives
from crowdnal.functional._autograd._function import Normalization
from crowdnal.functional.losses import *  # noqa: F403
from crowdnal.functional.primitives import *  # noqa: F403
from crowdnal.functional.reduction import Reduction

__all__ = ["Normalization", "Reduction"]
__all__ += losses.__all__
__all__ += primitives.__all__
