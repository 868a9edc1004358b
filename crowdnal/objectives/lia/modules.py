"""What LIA's confusions are made of: difficulty of instances and competence of annotators (Platanios et al. 2020)."""

from __future__ import annotations

from typing import Literal, TypedDict

import torch
from torch import Tensor, nn

from crowdnal import functional
from crowdnal._utils.layers import MLP
from crowdnal._utils.options import check_choice, check_integer
from crowdnal.data import Annotations
from crowdnal.functional.segments import distinct, gather_rows
from crowdnal.objectives.conal.noise_source import checked_annotator_features

Instance = Literal["features", "embedding"]
BLOCK_NUMBERS = 1 << 22
"""About this many numbers are there at once where all annotators are gone through."""
REFERENCES = 128
"""Of so many instances a shown confusion is the mean."""
EPSILON = 1e-12  # the least weight of one of them, for classes that none has


class AnnotatorTable(nn.Module):
    """What stands for each annotator: given features, or embeddings that are learnt.

    Args:
        num_annotators: R.
        features: ``[R, F]``, kept as they are, or None.
        embedding_dim: of the embeddings, whose init is normal of deviation 0.1.
    """

    features: Tensor | None

    def __init__(self, num_annotators: int, features: Tensor | None, embedding_dim: int) -> None:
        super().__init__()
        if features is not None:
            features = checked_annotator_features(features, num_annotators)
        self.register_buffer("features", features)
        self.embedding: nn.Parameter | None = None
        if features is None:
            self.embedding = nn.Parameter(0.1 * torch.randn(num_annotators, embedding_dim))

    @property
    def values(self) -> Tensor:
        """``[R, F]``."""
        found = self.embedding if self.features is None else self.features
        assert found is not None
        return found

    @torch.no_grad()
    def extend(self, new: int | Tensor) -> int:
        """Adds annotators, by their features or (how many there are) with the mean embedding; returns their number."""
        values = self.values
        if self.features is None:
            if type(new) is not int or new < 1:
                raise ValueError(
                    f"new is {new if isinstance(new, int) else type(new).__name__} but annotators have learnt "
                    "embeddings here: give the number of new ones, 1 or more"
                )
            added = values.mean(0, keepdim=True).expand(new, -1)
            self.embedding = nn.Parameter(torch.cat([values, added]), requires_grad=values.requires_grad)
            return new
        if not isinstance(new, Tensor) or new.dim() != 2 or new.shape[1] != values.shape[1] or len(new) == 0:
            got = list(new.shape) if isinstance(new, Tensor) else new
            raise ValueError(f"new is {got} but must be features [M, {values.shape[1]}] like annotator_features")
        self.features = torch.cat([values, checked_annotator_features(new, len(new)).to(values)])
        return len(new)


class PairOptions(TypedDict, total=False):
    """Those of :class:`PairModel`, which the objectives hand on."""

    instance: Instance
    num_items: int | None
    num_latents: int
    hidden_dim: int
    num_layers: int
    competence_layers: int
    embedding_dim: int
    feature_dim: int | None
    annotator_features: Tensor | None
    init_diagonal: float


class PairModel(nn.Module):
    """log Q of every annotation: an MLP on the instance, one on the annotator, each with the tag if there are several.

    Item ``i`` of the data set is tag ``i % num_tags`` of instance ``i // num_tags``; with one tag, instances are items.
    The arguments are those of :class:`crowdnal.objectives.LIA` and :class:`crowdnal.objectives.LIAML`.
    """

    def __init__(
        self, num_classes: int, num_labels: int, num_annotators: int, *,
        instance: Instance = "features", num_items: int | None = None, num_latents: int = 4, hidden_dim: int = 16,
        num_layers: int = 4, competence_layers: int = 0, embedding_dim: int = 16, feature_dim: int | None = None,
        annotator_features: Tensor | None = None, init_diagonal: float = 2.0, num_tags: int = 1, tag_dim: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice(Instance, instance=instance)
        check_integer(1, num_latents=num_latents, hidden_dim=hidden_dim, embedding_dim=embedding_dim, num_tags=num_tags)
        check_integer(0, num_layers=num_layers, competence_layers=competence_layers)
        given = {"tag_dim": tag_dim if num_tags > 1 else None, "feature_dim": feature_dim, "num_items": num_items}
        check_integer(1, **{option: size for option, size in given.items() if size is not None})
        if (instance == "embedding") != (num_items is not None):
            raise ValueError(
                f"num_items={num_items} with instance={instance!r}: embeddings of items need N, features do not"
            )
        self.shape = num_classes, num_labels, num_latents
        self.num_tags = num_tags
        self.tags = nn.Parameter(torch.randn(num_tags, tag_dim)) if num_tags > 1 else None
        self.instances: nn.Parameter | None = None
        self.extra = 0 if self.tags is None else tag_dim
        if num_items is not None:
            if num_items % num_tags:
                raise ValueError(f"num_items={num_items} must be a multiple of num_tags={num_tags}")
            self.instances = nn.Parameter(0.1 * torch.randn(num_items // num_tags, embedding_dim))
            feature_dim = embedding_dim
        self.annotators = AnnotatorTable(num_annotators, annotator_features, embedding_dim)
        size = num_classes * num_labels * num_latents
        inputs = None if feature_dim is None else feature_dim + self.extra
        self.difficulty = MLP(inputs, [hidden_dim] * num_layers, size)
        self.competence = MLP(self.annotators.values.shape[1] + self.extra, [hidden_dim] * competence_layers, size)
        with torch.no_grad():
            diagonal = init_diagonal * torch.eye(num_classes, num_labels).unsqueeze(2).expand(self.shape)
            self.competence.output.bias.copy_(diagonal.flatten())

    def set_feature_dim(self, feature_dim: int) -> None:
        """Makes the parameters that depend on the length of an instance's features; an error if it is another one."""
        self.difficulty.set_input_size(feature_dim + self.extra)

    def forward(self, annotations: Annotations, features: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``log Q_n[k, y_n]`` ``[nnz, C]`` of every annotation."""
        tags = None if self.tags is None else self.item_ids(annotations) % self.num_tags
        difficulty = self._tensors(self.difficulty, self._instances(annotations, features, dtype), tags)
        people, owner_tags, given = self._people(annotations, tags, dtype)
        competence = self._tensors(self.competence, people, owner_tags)
        return functional.pair_confusion(difficulty, competence, given)

    def spread(self, annotations: Annotations, dtype: torch.dtype) -> Tensor:
        """``[nnz]`` squared distance of C from that of an annotator whose features (or embedding) are all 0."""
        tags = None if self.tags is None else self.item_ids(annotations) % self.num_tags
        people, owner_tags, given = self._people(annotations, tags, dtype)
        own = self._tensors(self.competence, people, owner_tags)
        usual = self._tensors(self.competence, torch.zeros_like(people), owner_tags)
        distance = (own - usual).flatten(1).square().sum(1, keepdim=True)
        return gather_rows(distance, given.annotator, given.order).squeeze(1)

    def size(self, annotations: Annotations, features: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``[B]`` square of D of each item."""
        tags = None if self.tags is None else self.item_ids(annotations) % self.num_tags
        own = self._tensors(self.difficulty, self._instances(annotations, features, dtype), tags)
        return own.flatten(1).square().sum(1)

    def _people(
        self, annotations: Annotations, tags: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Annotations]:
        """Representations ``[n, F]`` and tags ``[n]`` of each owner once, and the annotations as theirs."""
        owner, order = annotations.annotator, annotations.order
        if tags is not None:
            owner = owner * self.num_tags + tags[annotations.item]
            order = torch.argsort(owner, stable=True)
        owners, slot = distinct(owner, order, annotations.num_annotators * self.num_tags)
        given = annotations.given_by(slot, len(owners), order)
        return rows_of(self.annotators.values.to(dtype), owners // self.num_tags), owners % self.num_tags, given

    @torch.no_grad()
    def confusion(self, references: Tensor, targets: Tensor) -> Tensor:
        """``[R, tags, C, K]``: row k is the mean of Q's over up to 128 instances, as likely as they are of class k.

        The row is P(label | class k) then; what D says of a class that an instance does not have, no label has seen.

        Args:
            references: ``[M, D]`` features or embeddings of instances; where there are none, all embeddings, or
                features that are all 0.
            targets: ``[M, tags, C]`` distributions over their true class; not used where there are no references.
        """
        people = self.annotators.values.to(torch.promote_types(self.competence.output.weight.dtype, torch.float32))
        size = self.difficulty.input_size
        if len(references) == 0:
            if self.instances is not None:
                references = self.instances[spaced(len(self.instances), REFERENCES)]
            elif size is not None:
                references = people.new_zeros(1, size - self.extra)
            targets = people.new_ones(max(1, len(references)), self.num_tags, self.shape[0])
        references, weights, found = references.to(people), targets.to(people) + EPSILON, []
        weights = (weights / weights.sum(0)).unsqueeze(-1)  # [M, tags, C, 1]
        for tag in range(self.num_tags):
            difficulty = people.new_zeros(1, *self.shape)  # of features whose length is not known yet
            if size is not None:
                difficulty = self._of_tag(self.difficulty, references, tag)
            rows, parts = max(1, BLOCK_NUMBERS // difficulty.numel()), []
            for block in people.split(rows):
                q = (difficulty + self._of_tag(self.competence, block, tag).unsqueeze(1)).logsumexp(-1).softmax(-1)
                parts.append((weights[:, tag] * q).sum(1))
            found.append(torch.cat(parts))
        return torch.stack(found, 1)

    def _of_tag(self, mlp: MLP, representation: Tensor, tag: int) -> Tensor:
        return self._tensors(mlp, representation, torch.full_like(representation[:, 0], tag, dtype=torch.int64))

    def _tensors(self, mlp: MLP, representation: Tensor, tags: Tensor | None) -> Tensor:
        """``[n, C, K, L]``."""
        extra = None
        if self.tags is not None and tags is not None:
            extra = rows_of(self.tags.to(representation.dtype), tags)
        tensors: Tensor = mlp(representation, extra)
        return tensors.unflatten(1, self.shape)

    def _instances(self, annotations: Annotations, features: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self.instances is None:
            assert features is not None  # the base has seen to it
            # nothing of an item without labels counts, even if it is not finite
            return features.flatten(1).to(dtype).where((annotations.counts > 0).unsqueeze(1), 0.0)
        rows, size = self.item_ids(annotations) // self.num_tags, len(self.instances)
        if rows.device.type == "cpu" and not torch.compiler.is_compiling() and bool((rows >= size).any()):
            i = int((rows >= size).nonzero()[0, 0])
            raise ValueError(
                f"item_id of item {i} is {int(self.item_ids(annotations)[i])}, but there are embeddings of "
                f"num_items={size * self.num_tags} items: an item that was not there has none"
            )
        return rows_of(self.instances.to(dtype), rows)

    def item_ids(self, annotations: Annotations) -> Tensor:
        """``[B]``: an item is the tag ``id % num_tags`` of the instance ``id // num_tags``."""
        found = annotations.item_id
        if found is not None:
            return found
        if self.instances is not None and len(annotations) not in (0, len(self.instances) * self.num_tags):
            raise ValueError(
                f"annotations have no item_id and {len(annotations)} items: take batches of Annotations "
                "(annotations[rows], or a CrowdDataset), which know whose embeddings are theirs"
            )
        return torch.arange(len(annotations), device=annotations.device)


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]``, whose gradient is a sum in a fixed order."""
    return gather_rows(table, index, torch.argsort(index, stable=True))


def spaced(count: int, most: int) -> Tensor:
    """At most ``most`` of ``count`` rows, evenly spaced."""
    number = min(count, most)
    return torch.arange(number) * count // max(number, 1)
