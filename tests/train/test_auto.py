"""``crowdnal train --objective auto``: a comparison on features chooses the objective."""

from __future__ import annotations

import json

import pytest
from support import small_run
from support.small_run import config, frozen, go, same_weights

from crowdnal import cli
from crowdnal.train import InputError, Interrupted, choosing, plan, run
from crowdnal.train.progress import Reporter
from crowdnal.train.steps import OneNetwork
from crowdnal.training import CANDIDATES

AUTO = {"objective": "auto", "epochs": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def chosen(root, tmp_path_factory):
    return go(frozen(root, tmp_path_factory.mktemp("auto") / "run", **AUTO))


def test_the_choice_is_told_and_trained_as_if_it_had_been_named(chosen, root, tmp_path):
    told = chosen.metrics["comparison"]
    assert set(told["log_likelihood"]) == set(told["standard_errors"]) == set(CANDIDATES)
    assert told["method"] == chosen.metrics["arguments"]["objective"] in CANDIDATES and told["why"]
    named = go(frozen(root, tmp_path / "named", objective=told["method"], epochs=2))
    assert same_weights(chosen.out, named.out)
    assert "--objective auto" in chosen.metrics["command"]
    page = (chosen.out / "report.html").read_text()
    assert told["why"] in page and all(name in page for name in CANDIDATES)


def test_resumed_it_is_not_chosen_again(chosen, root, tmp_path, monkeypatch):
    out, real = tmp_path / "run", OneNetwork.on_epoch_start

    def stop(steps, epoch):
        if epoch == 1:
            raise KeyboardInterrupt
        real(steps, epoch)

    monkeypatch.setattr(OneNetwork, "on_epoch_start", stop)
    with pytest.raises(Interrupted, match="--objective auto .*--resume"):
        go(frozen(root, out, **AUTO))
    monkeypatch.undo()
    monkeypatch.setattr(choosing, "compare", lambda *_, **__: pytest.fail("compared again"))
    go(frozen(root, out, **AUTO), resume=True)
    assert same_weights(out, chosen.out)
    assert json.loads((out / "run.json").read_text())["comparison"]["method"] == chosen.metrics["comparison"]["method"]


def test_a_named_objective_meets_the_votes(root, tmp_path, monkeypatch, capsys):
    alone = go(frozen(root, tmp_path / "alone", objective="crowd-layer", epochs=2))
    met = go(frozen(root, tmp_path / "met", objective="crowd-layer", epochs=2, compare="votes"))
    assert same_weights(alone.out, met.out) and alone.metrics["comparison"] is None
    told = met.metrics["comparison"]
    assert set(told["log_likelihood"]) == {"crowd-layer", "majority-vote"} and told["method"] == "crowd-layer"
    assert "as well as majority votes do" in told["why"] and told["why"] in (met.out / "report.html").read_text()
    assert (
        go(frozen(root, tmp_path / "votes", objective="majority-vote", epochs=2, compare="votes")).metrics["comparison"]
        is None
    )
    real = choosing.compare

    def worse(*given, **options):
        assert options["options"] == {"crowd-layer": {}} and options["epochs"] == 2
        found = real(*given, **options)
        found.standard_errors["crowd-layer"] = -2.1
        return found

    monkeypatch.setattr(choosing, "compare", worse)
    run(frozen(root, tmp_path / "worse", objective="crowd-layer", epochs=2, compare="votes"), reporter=Reporter())
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(said) == 1 and "crowd-layer foresees labels of unseen items worse than majority votes do" in said[0]
    assert "2.1 standard errors): use --objective majority-vote, or auto" in said[0]


def test_what_cannot_be_compared_is_said_and_trained(root, tmp_path, monkeypatch, capsys):
    real = choosing.compare
    monkeypatch.setattr(choosing, "compare", lambda *given, **options: real(*given, **{**options, "folds": 30}))
    given = frozen(root, tmp_path / "run", objective="crowd-layer", epochs=1, compare="votes")
    assert run(given, reporter=Reporter()).metrics["comparison"] is None
    assert "note: not compared with majority votes: annotations has 36 items with labels, too few" in (
        capsys.readouterr().out
    )


def test_what_it_cannot_do_is_said_before_anything_is_trained(root, tmp_path):
    with pytest.raises(InputError, match="--option a=1 is of one objective"):
        go(frozen(root, tmp_path / "a", options=("a=1",), **AUTO))
    with pytest.raises(InputError, match="random weights make none that say something: give --weights"):
        go(config(root, tmp_path / "b", **AUTO))
    assert not (tmp_path / "a").exists() and not (tmp_path / "b" / "run.json").exists()


def test_a_dry_run_and_the_help_know_it(root, tmp_path, capsys):
    plan(frozen(root, tmp_path / "run", **AUTO), reporter=Reporter())
    assert "nothing was written" in capsys.readouterr().out and not (tmp_path / "run").exists()
    with pytest.raises(SystemExit):
        cli.main(["train", "--objective", "auto", "--help"])
    assert "options of auto" in capsys.readouterr().out
