"""What a run says of itself in its folder, so that it can be resumed and nothing is overwritten."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crowdnal.train import outputs
from crowdnal.train.config import InputError, TrainConfig
from crowdnal.train.files import reading
from crowdnal.train.loop import CHECKPOINT

RUN = "run.json"


def check_out(config: TrainConfig, resume: bool) -> Mapping[str, Any] | None:
    """The record of the run in ``out`` if it is to be resumed; refuses to touch what is there otherwise."""
    out, path = config.out, config.out / RUN
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: give a folder")
    if resume:
        if not path.is_file():
            raise InputError(f"--resume: {out} holds no run; leave --resume out to begin one")
        with reading(path, "begin again in another folder"):
            read = json.loads(path.read_text(encoding="utf-8"))
            recorded = {name: read[name] for name in ("data", "images", "weights")} | {
                "arguments": {**read["arguments"]},
                "comparison": read.get("comparison"),
            }
        difference = config.difference(recorded["arguments"])
        if difference is not None:
            raise InputError(f"--resume: {out} was begun with other arguments. {difference}")
        return recorded
    if path.exists():
        raise InputError(f"--out {out} holds a run already: add --resume to go on with it, or give another folder")
    taken = [name for name in (*outputs.MODEL_FILES, *outputs.TABLE_FILES, CHECKPOINT) if (out / name).exists()]
    if taken:
        raise InputError(f"--out {out} has a {taken[0]} that would be overwritten: give another folder")
    return None
