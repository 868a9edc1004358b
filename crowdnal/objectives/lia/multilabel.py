"""LIA-ML: the multi-label form of LIA, Platanios et al. 2020, section 3.4."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from crowdnal.functional import Reduction
from crowdnal.objectives.lia.modules import Instance, PairModel
from crowdnal.objectives.lia.pair_em import Finetune, PairEM


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
        epochs_per_round: here and below, see LIA.
        num_items: N, (instance, tag) pairs, for embeddings of instances.
    """

    name: ClassVar[str] = "lia-ml"
    needs_features = True

    def __init__(
        self,
        num_classes: int,
        num_annotators: int,
        *,
        num_tags: int,
        tag_dim: int = 16,
        num_labels: int | None = None,
        reduction: Reduction = "mean",
        epochs_per_round: int = 1,
        rounds: int = 10,
        finetune: Finetune = "item",
        use_prior: bool = True,
        prior: float = 0.0,
        instance: Instance = "features",
        num_items: int | None = None,
        num_latents: int = 4,
        hidden_dim: int = 16,
        num_layers: int = 4,
        competence_layers: int = 0,
        embedding_dim: int = 16,
        feature_dim: int | None = None,
        annotator_features: Tensor | None = None,
        start: float = 2.0,
    ) -> None:
        super().__init__(
            num_classes, num_annotators, num_labels=num_labels, reduction=reduction, epochs_per_round=epochs_per_round,
            rounds=rounds, finetune=finetune, use_prior=use_prior, prior=prior,
        )  # fmt: skip
        if num_tags == 1:
            raise ValueError("num_tags=1 leaves nothing to share between tags: use LIA")
        self.needs_features = instance == "features"
        self.pairs = PairModel(
            num_classes, self.num_labels, num_annotators, instance=instance, num_items=num_items,
            num_latents=num_latents, hidden_dim=hidden_dim, num_layers=num_layers, competence_layers=competence_layers,
            embedding_dim=embedding_dim, feature_dim=feature_dim, annotator_features=annotator_features, start=start,
            num_tags=num_tags, tag_dim=tag_dim,
        )  # fmt: skip

    def tag_confusion(self) -> Tensor:
        """``[R, tags, C, K]``, detached: an annotator's confusion for every tag, else as :meth:`confusion`."""
        return self._confusion()
