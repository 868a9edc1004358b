"""DL-EM, MBEM and what aggregates first, then trains: crowds recovered, and the train command."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_run
from support.planted import annotate, blobs, planted
from support.small_crowd import C
from torch import Tensor, nn

import crowdnal
from crowdnal import DLDS, DLEM, DLWC, MBEM, Annotations, DLAggregate, metrics
from crowdnal.objectives import Objective
from crowdnal.train import Interrupted


class Loader:
    """Shuffled batches of (x, annotations), anew every time."""

    def __init__(self, x: Tensor, annotations: Annotations, size: int = 100) -> None:
        self.x, self.annotations, self.size = x, annotations, size

    def __iter__(self) -> Iterator[tuple[Tensor, Annotations]]:
        for rows in torch.randperm(len(self.x)).split(self.size):
            yield self.x[rows], self.annotations[rows]


LEARN = {
    "dl-em": DLEM,
    "dl-em incremental": partial(DLEM, incremental=True),
    "mbem": partial(MBEM, epochs_per_round=5, soft=False, confusion_prior=None),
    "dl-ds": DLDS,
    "dl-wc": partial(DLWC, num_clusters=5),
    "dl-aggregate": partial(DLAggregate, method="mmce", method_options={"strength": 0.25}),
}


@pytest.mark.parametrize("name", LEARN)
def test_recovers_planted_confusions_and_beats_majority_vote(name: str) -> None:
    x, truth = blobs()
    # MBEM counts against predictions, which must be worth it: nobody who always says 0, but one label an item
    single = name == "mbem"
    confusion = planted()[:5] if single else planted()
    annotations = annotate(truth, confusion, 1 if single else 5)
    test_x, test_truth = blobs(seed=5)

    def learn(objective: Objective) -> nn.Module:
        torch.manual_seed(0)
        model = crowdnal.attach(nn.Linear(x.shape[1], C), objective)
        loader = Loader(x, annotations)
        callback = crowdnal.ObjectiveCallback(model, loader, annotations)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for epoch in range(15):
            callback.on_epoch_start(epoch)
            for inputs, targets in loader:
                optimizer.zero_grad()
                model(inputs, targets).loss.backward()
                optimizer.step()
            callback.on_epoch_end(epoch)
        return model.backbone

    def accuracy(model: nn.Module) -> float:
        return metrics.accuracy(model(test_x).detach(), test_truth)

    objective = LEARN[name](C, len(confusion))
    classifier = learn(objective)
    assert accuracy(classifier) > 0.95
    assert single or accuracy(classifier) > accuracy(learn(crowdnal.MajorityVote(C, len(confusion)))) + 0.1
    estimate = objective.confusion()
    assert metrics.confusion_error(confusion, estimate) < 0.02
    assert metrics.confusion_error(confusion, estimate.transpose(1, 2).contiguous().softmax(2)) > 0.04
    assert metrics.reliability_correlation(confusion, estimate) > 0.97
    posterior = objective.posterior(classifier(x).detach(), annotations)
    assert metrics.accuracy(posterior, truth) > (metrics.accuracy(annotations.votes(), truth) + 0.2 if single else 0.95)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.write(tmp_path_factory.mktemp("small"))


def given(name: str, root: Path) -> dict[str, Any]:
    options = {"mbem": ("epochs_per_round=2",), "dl-ds": ("one_coin=true",), "dl-wc": ("num_clusters=2",)}
    shared = {"epochs": 5, "feature_cache": root / "features", "augment": "none"}
    return {"objective": name, "options": options.get(name, ()), **shared}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mbem", "dl-ds", "dl-wc", "dl-aggregate"])
def test_the_train_command(name: str, root: Path, tmp_path: Path) -> None:
    whole = small_run.go(small_run.frozen(root, tmp_path / "whole", **given(name, root)))
    likelihoods = list(small_run.read(whole.out / "history.csv").round_log_likelihood)
    rounds = {"mbem": [2, 4], "dl-ds": [0], "dl-wc": [0]}.get(name, [])
    assert [epoch for epoch, value in enumerate(likelihoods) if value != ""] == rounds


@pytest.mark.slow
def test_the_train_command_resumes_em(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small_run.go(small_run.frozen(root, tmp_path / "whole", **given("dl-em", root)))
    assert whole.metrics["truth"]["label_accuracy"] > 0.9
    settings = small_run.frozen(root, tmp_path / "run", **given("dl-em", root))
    with monkeypatch.context() as patch:

        def stop(self: Objective, epoch: int) -> None:
            if epoch == 3:
                raise KeyboardInterrupt

        patch.setattr(Objective, "on_epoch_end", stop)
        with pytest.raises(Interrupted):
            small_run.go(settings)
    small_run.go(settings, resume=True)
    assert small_run.same_weights(settings.out, whole.out)
