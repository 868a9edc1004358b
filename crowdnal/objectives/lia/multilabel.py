"""LIA-ML: the multi-label form of LIA, Platanios et al. 2020, section 3.4."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from crowdnal.objectives.lia.pair_em import PairEM, PairEMOptions


class LIAML(PairEM):
    """LIA where an annotator gives an instance a set of tags: difficulty and competence know the tag, by its embedding.

    An item is an (instance, tag) pair, its label 1 where the annotator chose the tag, else 0:
    :func:`crowdnal.multilabel.from_label_sets` makes such annotations, and
    :class:`crowdnal.multilabel.TagClassifier` is a classifier of such items. Item ``i`` of the data set is tag
    ``i % num_tags`` of instance ``i // num_tags``: a batch may hold any items (annotations without ``item_id``: whole
    instances). Features are those of the items' instances. All else is as for :class:`crowdnal.objectives.LIA`.

    Args:
        num_classes: of each tag: 2, chosen or not.
        num_tags: tags that annotators choose from, 2 or more.
        tag_dim: length of a tag's embedding.
        num_items: N, (instance, tag) pairs, for embeddings of instances.
    """

    name = "lia-ml"

    def __init__(
        self, num_classes: int, num_annotators: int, *,
        num_tags: int, tag_dim: int = 16, **options: Unpack[PairEMOptions],
    ) -> None:  # fmt: skip
        if num_tags == 1:
            raise ValueError("num_tags=1 leaves nothing to share between tags: use LIA")
        super().__init__(num_classes, num_annotators, num_tags=num_tags, tag_dim=tag_dim, **options)

    def tag_confusion(self) -> Tensor:
        """``[R, tags, C, K]``, detached: an annotator's confusion for every tag, else as :meth:`confusion`."""
        return self._confusion()
