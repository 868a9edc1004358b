"""Crowds that change: annotators who come, leave, or are numbered otherwise, matched by id."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from crowdnal.data import Annotations, Ids, Vocabulary, distinct
from crowdnal.objectives._bases.base import Objective

Crowd = Annotations | Vocabulary | Ids
T = TypeVar("T", bound=Objective)


class Matched(NamedTuple):
    """What :func:`load_annotators` found.

    Attributes:
        kept: ids of both crowds, whose parameters were taken over.
        new: those that the state does not have: they are as constructed.
        dropped: those of the state that are no longer wanted.
    """

    kept: tuple[Hashable, ...]
    new: tuple[Hashable, ...]
    dropped: tuple[Hashable, ...]


def load_annotators(
    model: nn.Module, state: Mapping[str, Any], *, annotators: Crowd, known: Crowd, prefix: str | None = None
) -> Matched:
    """``load_state_dict`` from another crowd: what belongs to an annotator goes by id, all else as it is.

        objective = crowdnal.CrowdLayer(8, 61)
        crowdnal.load_annotators(objective, torch.load("old.pt"), annotators=new_ids, known=old_ids)

    Args:
        model: an objective, or what has one as ``objective`` (a CrowdModel).
        state: of one like it with other annotators.
        annotators: ids of this one's, in the order of their numbers; or Annotations or a Vocabulary that has them.
        known: those of the state.
        prefix: of the objective in the state; default none for an objective, ``"objective."`` otherwise.

    Returns:
        Which annotators are in both.

    Raises:
        ValueError: ids that are not as many as there are annotators, or a state that does not fit otherwise, before
            anything is changed.
    """
    objective = model if isinstance(model, Objective) else getattr(model, "objective", None)
    if not isinstance(objective, Objective):
        raise TypeError(f"model is {type(model).__name__} but must be an objective, or have one as model.objective")
    prefix = ("" if objective is model else "objective.") if prefix is None else prefix
    ids, old = _ids(annotators, "annotators"), _ids(known, "known")
    if len(ids) != objective.num_annotators:
        raise ValueError(f"annotators has {len(ids)} ids, but the objective {objective.num_annotators} annotators")
    place = {annotator: r for r, annotator in enumerate(old)}
    here = [r for r, annotator in enumerate(ids) if annotator in place]
    there = [place[ids[r]] for r in here]
    own, merged = objective.state_dict(), dict(state)
    for name in _of_annotators(objective):
        given = state.get(prefix + name)
        if not isinstance(given, Tensor):
            continue
        if given.shape[:1] != (len(old),) or given.shape[1:] != own[name].shape[1:]:
            raise ValueError(
                f"{prefix}{name} of the state is {list(given.shape)} but must be {[len(old), *own[name].shape[1:]]}: "
                f"known has {len(old)} ids, and classes and options must be the same"
            )
        merged[prefix + name] = own[name].clone()
        merged[prefix + name][here] = given[there].to(own[name])
    for name in objective.found_of_annotators:
        given = state.get(prefix + name)
        if isinstance(given, Tensor) and len(given):
            merged[prefix + name] = given.mean(0).repeat(len(ids), *[1] * (given.dim() - 1))
            merged[prefix + name][here] = given[there]
    kept = {prefix + name: own[name] for name in own if name.split(".")[-1] == "groups"}  # as this one was told
    model.load_state_dict({**merged, **{name: value for name, value in kept.items() if name in merged}})
    both = set(ids) & set(old)
    return Matched(
        tuple(a for a in ids if a in both),
        tuple(a for a in ids if a not in both),
        tuple(a for a in old if a not in both),
    )


def with_annotators(
    objective: T,
    annotators: Crowd,
    known: Crowd,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> T:
    """The same objective for another crowd: who is in both keeps their parameters, who is new is as constructed.

        model.objective = crowdnal.with_annotators(model.objective, new_ids, old_ids, optimizer=optimizer)

    Args:
        objective: is left as it is.
        annotators: ids of the new crowd, in the order of their numbers; or Annotations or a Vocabulary that has them.
        known: those of the objective.
        optimizer: trains the new parameters instead of the old ones from now on; its state goes with them.
        **options: of the constructor that depend on the crowd and were given: ``groups=``, ``annotator_features=``.

    Raises:
        ValueError: as :func:`load_annotators`, and for options that do not fit the new crowd.
    """
    ids, old = _ids(annotators, "annotators"), _ids(known, "known")
    if len(old) != objective.num_annotators:
        raise ValueError(f"known has {len(old)} ids, but the objective {objective.num_annotators} annotators")
    new = _made_alike(objective, len(ids), options)
    like = next((p for p in [*objective.parameters(), *objective.buffers()] if p.is_floating_point()), None)
    if like is not None:
        new.to(device=like.device, dtype=like.dtype)
    load_annotators(new, objective.state_dict(), annotators=ids, known=old)
    new.train(objective.training)
    trained = dict(objective.named_parameters())
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(trained[name].requires_grad)
    if optimizer is not None:
        place = {annotator: r for r, annotator in enumerate(old)}
        here = [r for r, annotator in enumerate(ids) if annotator in place]
        _hand_over(optimizer, objective, new, here, [place[ids[r]] for r in here])
    return new


def _hand_over(
    optimizer: torch.optim.Optimizer, old: Objective, new: Objective, here: list[int], there: list[int]
) -> None:
    after = dict(new.named_parameters())
    exchange = {parameter: after[name] for name, parameter in old.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [exchange.get(parameter, parameter) for parameter in group["params"]]
    for parameter, instead in exchange.items():
        if parameter not in optimizer.state:
            continue
        moved = {}
        for key, value in optimizer.state.pop(parameter).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape != instead.shape:
                rows = value.new_zeros(instead.shape)
                rows[here] = value[there]
                value = rows
            elif isinstance(value, Tensor) and value.shape == parameter.shape and _moves(old, parameter):
                rows = torch.zeros_like(value)
                rows[here] = value[there]
                value = rows
            moved[key] = value
        optimizer.state[instead] = moved


def _moves(objective: Objective, parameter: Tensor) -> bool:
    names = _of_annotators(objective)
    return any(own is parameter and name in names for name, own in objective.named_parameters())


def _of_annotators(objective: Objective) -> set[str]:
    """Entries of the state with a row per annotator: those that are longer in one with an annotator more."""
    own = objective.state_dict()
    options = {}
    for name, value in objective.made_with.items():  # those that have a row per annotator get another one
        rows = isinstance(value, (Tensor, list, tuple)) and len(value) == objective.num_annotators
        if rows and name in ("groups", "annotator_features"):
            options[name] = torch.cat([torch.as_tensor(value), torch.as_tensor(value)[-1:]])
        elif isinstance(value, Tensor) and value.dim() == 3:
            options[name] = torch.cat([value, value[-1:]])
    with torch.random.fork_rng(devices=[]):
        more = _made_alike(objective, objective.num_annotators + 1, options).state_dict()
    return {
        name
        for name, value in own.items()
        if isinstance(value, Tensor)
        and not nn.parameter.is_lazy(value)
        and value.dim() > 0
        and more[name].shape[:1] == (value.shape[0] + 1,)
        and name.split(".")[-1] != "groups"
    }


def _made_alike(objective: T, num_annotators: int, options: Mapping[str, Any]) -> T:
    cls = type(objective)
    known = inspect.signature(cls).parameters
    for name in options:
        if name not in known:
            raise ValueError(f"{cls.__name__} has no option {name!r}: it takes {', '.join(known)}")
    return cls(**{**objective.made_with, "num_annotators": num_annotators, **options})


def _ids(crowd: Crowd, name: str) -> tuple[Hashable, ...]:
    if isinstance(crowd, Annotations):
        return tuple(range(crowd.num_annotators)) if crowd.vocabulary is None else crowd.vocabulary.annotators
    return crowd.annotators if isinstance(crowd, Vocabulary) else distinct(crowd, name)
