"""``--objective auto``: objectives are compared on features before training, and one of them is taken."""

from __future__ import annotations

import copy

from crowdnal.train.config import AUTO, InputError
from crowdnal.train.files import write_json
from crowdnal.train.record import RUN
from crowdnal.train.session import Session
from crowdnal.training import CANDIDATES, Comparison, compare

_EPOCHS, _RATE = 40, 1e-3  # of a linear head on features, where the whole network is to be trained


def choose_objective(session: Session) -> Session:
    """The session of the objective that is given, or of the one that a comparison chooses; which is recorded.

    Raises:
        InputError: there are no features to compare on.
    """
    if session.config.objective != AUTO:
        return session
    session.prepare()
    found = session.processes.from_first(_compare, session)
    rows = [
        [name, f"{value:.4f}", f"{found.standard_errors[name]:+.1f}"]
        for name, value in sorted(found.log_likelihood.items(), key=lambda entry: -entry[1])
    ]
    session.reporter.table(["objective", "held-out log-likelihood", "standard errors ahead of the votes"], rows)
    session.reporter.say(f"{AUTO} takes {found.method}: {found.why}")
    session.record["chosen"] = {
        "method": found.method,
        "why": found.why,
        "log_likelihood": found.log_likelihood,
        "standard_errors": found.standard_errors,
    }
    session.processes.from_first(write_json, session.config.out / RUN, session.record)
    return session.with_objective(found.method)


def _compare(session: Session) -> Comparison:
    config, features = session.config, session.item_features
    if features is None:
        raise InputError(
            f"--objective {AUTO} compares objectives on features, and {session.origin} make none that say something: "
            "give --weights or --pretrained, or name an objective"
        )
    frozen = config.freeze_backbone
    with session.watch("comparison"), session.reporter.track("comparing", len(CANDIDATES)) as track:
        try:
            return compare(
                features.to(str(config.device)),
                session.parts[0],
                num_classes=len(session.data.classes),
                head=(lambda: copy.deepcopy(session.heads[0])) if frozen else None,
                gold=session.data.gold if config.gold is not None else None,
                epochs=config.epochs or _EPOCHS if frozen else _EPOCHS,
                batch_size=config.batch_size or 1,
                lr=config.lr or _RATE if frozen else _RATE,
                seed=config.seed,
                progress=lambda name: track.advance(1, name),
            )
        except ValueError as error:
            raise InputError(str(error)) from error
