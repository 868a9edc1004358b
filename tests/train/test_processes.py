"""``torchrun -m crowdnal train``: two processes train as one does, one of them writes, and both end together."""

from __future__ import annotations

import re
import signal
import time

import pytest
import safetensors.torch
import torch
from support.compare import assert_close
from support.small_run import arguments, config, frozen, go, read, same_weights, write
from support.stopped_runs import going_on, resumed_after_a_stop, second_dies
from support.two_processes import in_two, torchrun

from crowdnal import cli
from crowdnal.objectives import OBJECTIVES
from crowdnal.train import InputError, loop
from crowdnal.train.processes import Processes

gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)
COMPARE_ITEMS = {"max-mig", "geocrowdnet"}  # of a batch with each other
METHODS = {  # of equal heads the weights have a gradient of rounding errors
    "weighted-doctor-net": {"objective": "weighted-doctor-net", "options": ("heads=separate",)}
}
ALIKE = {"epochs": 3, "batch_size": 12, "drop_rate": 1e-9, "holdout": 0.1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("small"))


def check_alike(one, two, tables: bool = True) -> None:
    """The same run up to rounding."""
    for name in ("model", "objective", *(["model_selected/model"] if tables else [])):
        a, b = (safetensors.torch.load_file(out / f"{name}.safetensors") for out in (one, two))
        assert a.keys() == b.keys()
        for key in a:
            assert_close(b[key], a[key], atol=2e-5, rtol=1e-4, where=f"{two.name} {name} {key}")
    if not tables:
        return
    a, b = (read(out / "history.csv").replace("", "nan").astype(float) for out in (one, two))
    assert (a.isna() == b.isna()).all(axis=None) and abs(a - b).max().max() < 1e-5
    a, b = (read(out / "labels.csv") for out in (one, two))
    assert (a.label == b.label).all() and (a.model_label == b.model_label).all()


@gloo
def test_two_processes_train_as_one(root, tmp_path):
    changes = {**ALIKE, "epochs": 2, "feature_cache": tmp_path / "features"}
    go(frozen(root, tmp_path / "one", **changes))
    assert in_two(go, [frozen(root, tmp_path / "two", **changes)], tmp_path / "said", "fork") == [["", ""]]
    check_alike(tmp_path / "one", tmp_path / "two")


@gloo
def test_the_two_networks_of_ccc_do(root, tmp_path):
    options = ("warmup_epochs=1", "num_groups=2", "meta_size=12", "meta_batch_size=6", "meta=exact")
    changes = {
        **ALIKE,
        "drop_rate": 0.0,
        "objective": "ccc",
        "options": options,
        "feature_cache": tmp_path / "features",
    }
    go(frozen(root, tmp_path / "one", **changes))
    assert in_two(go, [frozen(root, tmp_path / "two", **changes)], tmp_path / "said", "fork") == [["", ""]]
    check_alike(tmp_path / "one", tmp_path / "two")
    check_alike(*(tmp_path / name / "second" for name in ("one", "two")), tables=False)


@gloo
@pytest.mark.slow
def test_cross_fitting_is_of_one_process(root, tmp_path):
    (said,) = in_two(go, [frozen(root, tmp_path / "two", cross_fit=3)], tmp_path / "said", "fork")
    assert any("--cross-fit trains heads, which are small, in one process" in told for told in said) and all(said)
    assert not (tmp_path / "two").exists()


@gloo
@pytest.mark.slow
def test_every_objective_does(root, tmp_path):
    """Whose loss is a sum over labels or items; features are found in halves, rounds made of all predictions."""
    names = [name for name in OBJECTIVES if name not in COMPARE_ITEMS]
    cache = {n: tmp_path / f"features {n}" for n in (1, 2)}
    runs = {
        n: [
            frozen(
                root,
                tmp_path / f"{name} {n}",
                feature_cache=cache[n],
                **METHODS.get(name, {"objective": name}),
                **ALIKE,
            )
            for name in names
        ]
        for n in (1, 2)
    }
    for settings in runs[1]:
        go(settings)
    assert in_two(go, runs[2], tmp_path / "said") == [["", ""]] * len(names)
    for one, two in zip(runs[1], runs[2], strict=True):
        check_alike(one.out, two.out)
    files = [sorted(path.name for path in folder.iterdir()) for folder in cache.values()]
    assert files[0] == files[1]
    for name in files[0]:  # the same blocks, so the same bits
        assert (cache[1] / name).read_bytes() == (cache[2] / name).read_bytes()


@gloo
@pytest.mark.slow
@pytest.mark.parametrize("make", [frozen, config])
def test_a_resumed_run_of_two_has_the_same_bits(root, tmp_path, make):
    """With dropout, augmentation and batch normalisation, whose statistics are the mean of both processes'."""
    whole, stopped = (make(root, tmp_path / name, holdout=0.1) for name in ("whole", "stopped"))
    assert in_two(go, [whole], tmp_path / "a") == [["", ""]]
    assert in_two(resumed_after_a_stop, [stopped], tmp_path / "b") == [["", ""]]
    assert loop.load_state(stopped.out / "checkpoint.pt")["progress"]["epoch"] == 1
    assert in_two(going_on, [stopped], tmp_path / "c") == [["", ""]]
    assert same_weights(whole.out, stopped.out)
    assert whole.out.joinpath("metrics.json").read_text().count('"processes": 2') == 1


@gloo
@pytest.mark.slow
def test_torchrun_speaks_with_one_voice(root, tmp_path):
    run = torchrun(*arguments(frozen(root, tmp_path / "run", epochs=2)))
    said, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    assert said.count("epoch 2/2") == 1 and said.count("report ") == 1
    again = torchrun(*arguments(frozen(root, tmp_path / "run", epochs=2)))
    said, errors = again.communicate(timeout=300)
    assert (
        again.returncode != 0 and said == "" and len(re.findall("^crowdnal: error: .*holds a run", errors, re.M)) == 1
    )
    assert errors.count("crowdnal: error") == 1


@gloo
@pytest.mark.slow
def test_an_error_of_one_process_ends_both_and_leaves_nothing(tmp_path):
    """An image that the second process alone reads."""
    root = write(tmp_path / "data")
    bad = sorted((root / "train").rglob("*.png"))[-1]
    good = bad.read_bytes()
    bad.write_bytes(b"no image")
    settings = frozen(root, tmp_path / "run", epochs=1)
    run = torchrun(*arguments(settings))
    said, errors = run.communicate(timeout=300)
    told = re.findall("^crowdnal: .*", errors, re.M)
    assert run.returncode != 0 and len(told) == 1 and f"{bad.name} cannot be read as an image" in told[0], errors
    assert "epoch 1/1" not in said
    bad.write_bytes(good)
    assert cli.main([*arguments(settings), "--quiet"]) == 0


@gloo
@pytest.mark.slow
def test_terminated_and_resumed(root, tmp_path):
    settings = frozen(root, tmp_path / "run", epochs=4000)
    run = torchrun(*arguments(settings))
    for _ in range(600):
        if (settings.out / "checkpoint.pt").exists():
            break
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=120)
    assert run.returncode != 0
    told = re.findall("^crowdnal: .*", errors, re.M)
    assert len(told) == 1 and "go on with: torchrun --nproc-per-node 2 -m crowdnal train" in told[0], errors
    assert told[0].endswith("--resume") and not (settings.out / ".lock").exists()


@gloo
@pytest.mark.slow
def test_a_process_that_is_killed_is_noticed(root, tmp_path):
    settings = frozen(root, tmp_path / "run")
    ((first, second),) = in_two(second_dies, [settings], tmp_path / "said")
    assert second == "died" and first == "OSError: another process of this run has died: go on with --resume"
    assert in_two(going_on, [settings], tmp_path / "again") == [["", ""]]
    assert len(read(settings.out / "history.csv")) == 3


def test_parts_are_all_rows_once():
    for size in (1, 2, 3, 5):
        for length in (0, 1, 4, 5, 16, 17, 39):
            for block in (1, 8):
                parts = [Processes(rank, size).part(length, block) for rank in range(size)]
                rows = [list(range(length))[part] for part in parts]
                if -(-length // block) < size:
                    assert all(own == list(range(length)) for own in rows)
                else:
                    assert sum(rows, []) == list(range(length)) and all(own for own in rows)
                    assert all(part.start % block == 0 for part in parts)


def test_a_batch_has_an_item_for_each_process():
    with pytest.raises(InputError, match="each of 3 processes needs one of every batch"):
        loop._batches(torch.arange(9), 2, 3)
    assert [len(rows) for rows in loop._batches(torch.arange(11), 4, 2)] == [4, 7]


def test_the_variables_of_torchrun_alone_are_not_enough(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(arguments(frozen(root, tmp_path / "run"))) == 2
    assert "WORLD_SIZE=2, but RANK is not set" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
