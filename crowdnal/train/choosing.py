"""Objectives are compared on features before training: ``--objective auto`` takes one, a named one meets the votes."""

from __future__ import annotations

import copy
from typing import Any

from crowdnal.train.config import AUTO, InputError
from crowdnal.train.files import write_json
from crowdnal.train.record import RUN
from crowdnal.train.session import Session
from crowdnal.training import CANDIDATES, VOTES, Comparison, compare

_EPOCHS, _RATE = 40, 1e-3  # of a linear head on features, where the whole network is to be trained
_STEPS = 5000  # of a head that is only to be compared with the votes
_CLEARLY = 2.0  # standard errors


def choose_objective(session: Session) -> Session:
    """The session of the objective that is given, or of the one that a comparison chooses; which is recorded.

    Raises:
        InputError: there are no features to compare on.
    """
    if session.config.objective != AUTO:
        return session
    session.prepare()
    found = session.processes.from_first(_choose, session)
    rows = [
        [name, f"{value:.4f}", f"{found.standard_errors[name]:+.1f}"]
        for name, value in sorted(found.log_likelihood.items(), key=lambda entry: -entry[1])
    ]
    session.reporter.table(["objective", "held-out log-likelihood", "standard errors ahead of the votes"], rows)
    session.reporter.say(f"{AUTO} takes {found.method}: {found.why}")
    _record(session, found.method, found.why, found)
    return session.with_objective(found.method)


def meet_votes(session: Session) -> None:
    """Say in one line, and record, if heads on the features foresee labels worse than those trained on votes do.

    Nothing is compared where there are no features of given weights, where a comparison is on record, or for CCC.
    """
    config = session.config
    compared = config.objective == VOTES or "comparison" in session.record or session.ccc is not None
    if compared or session.item_features is None or config.compare == "nothing":
        return
    found = session.processes.from_first(_meet, session)
    if found is None:
        return
    name, ahead = config.objective, found.standard_errors[config.objective]
    measure = f"{found.log_likelihood[name]:.3f} to {found.log_likelihood[VOTES]:.3f}, {abs(ahead):.1f} standard errors"
    if ahead < -_CLEARLY:
        why = (
            f"on these features {name} foresees labels of unseen items worse than majority votes do ({measure}): use "
            f"--objective {VOTES}, or {AUTO}, which compares {len(CANDIDATES)}"
        )
        session.reporter.say(f"warning: {why}")
        return _record(session, VOTES, why, found)
    than = "better than" if ahead > _CLEARLY else "as well as"
    _record(session, name, f"{name} foresees labels of unseen items {than} majority votes do ({measure})", found)


def _record(session: Session, method: str, why: str, found: Comparison) -> None:
    session.record["comparison"] = {
        "method": method,
        "why": why,
        "log_likelihood": found.log_likelihood,
        "standard_errors": found.standard_errors,
    }
    session.processes.from_first(write_json, session.config.out / RUN, session.record)


def _choose(session: Session) -> Comparison:
    if session.item_features is None:
        raise InputError(
            f"--objective {AUTO} compares objectives on features, and {session.origin} make none that say something: "
            "give --weights or --pretrained, or name an objective"
        )
    try:
        return _compare(session, CANDIDATES)
    except ValueError as error:
        raise InputError(str(error)) from error


def _meet(session: Session) -> Comparison | None:
    config, a = session.config, session.parts[0]
    steps = -(-int((a.counts > 0).sum()) // (config.batch_size or 1))
    try:
        return _compare(
            session,
            [config.objective],
            options={config.objective: session.options},
            epochs=max(1, min(config.epochs or _EPOCHS, _STEPS // max(steps, 1))),
        )
    except ValueError as error:  # such as too few items, on which one can train all the same
        session.reporter.say(f"note: not compared with majority votes: {error}")
        return None


def _compare(session: Session, methods: Any, **more: Any) -> Comparison:
    config, features = session.config, session.item_features
    assert features is not None
    frozen = config.freeze_backbone
    given: dict[str, Any] = {
        "epochs": config.epochs or _EPOCHS if frozen else _EPOCHS,
        "lr": config.lr or _RATE if frozen else _RATE,
        "objective_lr": config.objective_lr if frozen else _RATE,
        "head": (lambda: copy.deepcopy(session.heads[0])) if frozen else None,
        "gold": session.data.gold if config.gold is not None else None,
    }
    with session.watch("comparison"), session.reporter.track("comparing", len({VOTES, *methods})) as track:
        return compare(
            features.to(str(config.device)),
            session.parts[0],
            methods,
            num_classes=len(session.data.classes),
            batch_size=config.batch_size or 1,
            seed=config.seed,
            progress=lambda name: track.advance(1, name),
            **{**given, **more},
        )
