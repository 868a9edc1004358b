"""One posterior over true classes from annotations alone, by any of many methods: ours, crowd-kit's, snorkel's."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crowdnal._utils.extras import require
from crowdnal._utils.probability import proportions
from crowdnal.aggregation._bayesian import ebcc, ibcc
from crowdnal.aggregation._bwa import bwa
from crowdnal.aggregation._choice import choose
from crowdnal.aggregation._communities import cbcc
from crowdnal.aggregation._dawid_skene import dawid_skene
from crowdnal.aggregation._mmce import mmce
from crowdnal.aggregation._one_coin import one_coin
from crowdnal.aggregation._votes import vote_proportions
from crowdnal.aggregation._worker_clustering import worker_clustering
from crowdnal.data import Annotations
from crowdnal.functional.segments import scatter_rows

_CROWDKIT, _SNORKEL = ("crowdkit.aggregation", "crowd-kit"), ("snorkel.labeling.model", "snorkel")
_CLASSES = {"glad": "GLAD", "mace": "MACE", "mmsr": "MMSR", "wawa": "Wawa", "zero-based-skill": "ZeroBasedSkill"}
_CLASSES["kos"] = "KOS"
_LIBRARY = {**dict.fromkeys(_CLASSES, _CROWDKIT), "label-model": _SNORKEL}


def aggregate(annotations: Annotations, method: str = "auto", **options: Any) -> Tensor:
    """Posterior over the true class of every item, from labels alone.

    Args:
        annotations: the whole data set, any of its items without annotations.
        method: a key of ``AGGREGATORS``:

            - ``"auto"``: what :func:`crowdnal.aggregation.choose` chooses by held-out labels, and says why;
            - ``"majority-vote"``: the (weighted) vote proportions;
            - ``"dawid-skene"``, ``"one-coin"``, ``"ibcc"``, ``"ebcc"``, ``"cbcc"``, ``"bwa"``, ``"mmce"``,
              ``"worker-clustering"``: the functions of that name here;
            - of crowd-kit (``pip install "crowdnal[crowd-kit]"``): ``"glad"`` (Whitehill 2009), ``"mace"`` (Hovy 2013),
              ``"mmsr"`` (Ma & Olshevsky 2020; softmax of its log-odds weighted votes), ``"wawa"``,
              ``"zero-based-skill"``, ``"kos"`` (Karger 2014; two classes, gives labels and no probabilities);
            - of snorkel (``pip install "crowdnal[snorkel]"``): ``"label-model"`` (Ratner 2019).
        **options: of the function, the crowd-kit class, or for ``"label-model"`` of ``LabelModel.fit`` (``n_epochs``,
            ``seed``, ...).

    Returns:
        ``[N, C]`` float64, rows sum to 1. Uniform for an item without annotations, unless the method has a class prior.

    Raises:
        ValueError: unknown method, or annotations that it cannot take: only ours take weights.
        ImportError: naming the extra to install.
    """
    check_method(method)
    return AGGREGATORS[method](annotations, options).double()


def check_method(method: str) -> None:
    """Raises what :func:`aggregate` would, for an unknown method or a library that is not there."""
    if method not in AGGREGATORS:
        raise ValueError(f"method={method!r} is unknown: use one of {', '.join(AGGREGATORS)}")
    if method in _LIBRARY:
        require(*_LIBRARY[method])


def _votes(annotations: Annotations, options: dict[str, Any]) -> Tensor:
    if options:
        raise ValueError(f"'majority-vote' has no options, got {', '.join(options)}")
    return vote_proportions(annotations, annotations.num_classes)


def _own(function: Callable[..., Any]) -> Callable[[Annotations, dict[str, Any]], Tensor]:
    return lambda annotations, options: function(annotations, **options).posterior


def _refuse_weights(annotations: Annotations, method: str) -> None:
    if annotations.weight is not None:
        raise ValueError(f"annotations have weights, which {method!r} cannot use: leave them out")


def _crowdkit(name: str, method: str) -> Callable[[Annotations, dict[str, Any]], Tensor]:
    def run(annotations: Annotations, options: dict[str, Any]) -> Tensor:
        _refuse_weights(annotations, method)
        given = len(annotations.label.unique()) if method == "kos" else 0
        if given > 2:
            raise ValueError(f"'kos' (KOS) tells two classes apart, and these labels have {given}")
        cls = getattr(require(*_CROWDKIT), name)
        if annotations.num_annotations == 0:
            return vote_proportions(annotations, annotations.num_classes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries below, on every call
            return _READ.get(method, _probas)(cls(**options), _frame(annotations), annotations)

    return run


def _frame(annotations: Annotations) -> Any:
    """task, worker, label as numbers, so that ids of any kind come back in our order."""
    columns = {"task": annotations.item, "worker": annotations.annotator, "label": annotations.label}
    pandas = require("pandas", extra="crowd-kit")
    return pandas.DataFrame({name: column.cpu().numpy() for name, column in columns.items()})


def _probas(model: Any, frame: Any, annotations: Annotations) -> Tensor:
    sizes = {"index": range(len(annotations)), "columns": range(annotations.num_classes)}
    table = model.fit_predict_proba(frame).reindex(**sizes, fill_value=0.0)
    values = torch.from_numpy(table.to_numpy(dtype=float, na_value=0.0).copy())
    return proportions(values.clamp(min=0), 1).to(annotations.device)


def _weighted_votes(model: Any, frame: Any, annotations: Annotations) -> Tensor:
    weights = model.fit(frame).skills_.reindex(range(annotations.num_annotators)).to_numpy(dtype=float, na_value=0.0)
    weight = torch.from_numpy(weights.copy()).to(annotations.device)[annotations.annotator]
    cell = annotations.item * annotations.num_classes + annotations.label
    size = len(annotations) * annotations.num_classes
    votes = scatter_rows(weight.unsqueeze(1), cell, torch.argsort(cell, stable=True), size)
    return votes.view(len(annotations), -1)


def _vote_proportions(model: Any, frame: Any, annotations: Annotations) -> Tensor:
    """From the annotators' skills: crowd-kit 1.4.2 itself fails there beside today's scikit-learn."""
    return proportions(_weighted_votes(model, frame, annotations).clamp(min=0), 1)


def _log_odds(model: Any, frame: Any, annotations: Annotations) -> Tensor:
    """The skills are log-odds of being right: their sums are the one-coin model's log posterior."""
    return _weighted_votes(model, frame, annotations).softmax(1)


def _labels(model: Any, frame: Any, annotations: Annotations) -> Tensor:
    try:
        found = model.fit_predict(frame).reindex(range(len(annotations)))
    except KeyError as error:  # the sign of a sum of 0 or NaN, which crowd-kit looks up
        raise ValueError(
            f"'kos' finds no class for an item, whose messages add up to {error}: annotators need several labels "
            "each, and n_iter few enough that nothing overflows; or use another method"
        ) from error
    labels = torch.from_numpy(found.to_numpy(dtype=float, na_value=float("nan")).copy())
    known = labels.unsqueeze(1) == torch.arange(annotations.num_classes)  # NaN is no class: uniform
    return proportions(known.double(), 1).to(annotations.device)


_READ: dict[str, Callable[[Any, Any, Annotations], Tensor]]
_READ = {"mmsr": _log_odds, "wawa": _vote_proportions, "zero-based-skill": _vote_proportions, "kos": _labels}


def _label_model(annotations: Annotations, options: dict[str, Any]) -> Tensor:
    _refuse_weights(annotations, "label-model")
    model = require(*_SNORKEL).LabelModel(cardinality=annotations.num_classes, verbose=False)
    matrix = annotations.to_dense(missing=-1).cpu().numpy()
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        model.fit(matrix, **{"seed": 0, "progress_bar": False, **options})
    probs = torch.from_numpy(model.predict_proba(matrix).copy()).double().to(annotations.device)
    return torch.where((annotations.counts > 0).unsqueeze(1), probs, 1 / max(annotations.num_classes, 1))


AGGREGATORS: dict[str, Callable[[Annotations, dict[str, Any]], Tensor]] = {
    "auto": _own(choose),
    "majority-vote": _votes,
    "dawid-skene": _own(dawid_skene),
    "one-coin": _own(one_coin),
    "ibcc": _own(ibcc),
    "ebcc": _own(ebcc),
    "cbcc": _own(cbcc),
    "bwa": _own(bwa),
    "mmce": _own(mmce),
    "worker-clustering": _own(worker_clustering),
    **{method: _crowdkit(name, method) for method, name in _CLASSES.items()},
    "label-model": _label_model,
}
"""Every method of :func:`aggregate`."""
