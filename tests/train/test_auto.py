"""``crowdnal train --objective auto``: a comparison on features chooses the objective."""

from __future__ import annotations

import json

import pytest
from support import small_run
from support.small_run import config, frozen, go, same_weights

from crowdnal import cli
from crowdnal.train import InputError, Interrupted, choosing, plan
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
    told = chosen.metrics["chosen"]
    assert set(told["log_likelihood"]) == set(told["standard_errors"]) == set(CANDIDATES)
    assert told["method"] == chosen.metrics["arguments"]["objective"] in CANDIDATES and told["why"]
    named = go(frozen(root, tmp_path / "named", objective=told["method"], epochs=2))
    assert same_weights(chosen.out, named.out)
    assert "--objective auto" in chosen.metrics["command"] and named.metrics["chosen"] is None
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
    assert json.loads((out / "run.json").read_text())["chosen"]["method"] == chosen.metrics["chosen"]["method"]


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
