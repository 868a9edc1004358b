"""The model of a run: timm's, with weights from a checkpoint, an installed package, timm's own download, or none."""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib.metadata
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crowdnal._utils.extras import require
from crowdnal.train.config import InputError, TrainConfig
from crowdnal.train.data import derive_seed, seed_everything

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_COUNTER = "num_batches_tracked"
_WRAPPERS = ("state_dict", "model", "model_state_dict", "module")


def create_model(config: TrainConfig, num_classes: int) -> tuple[nn.Module, str]:
    """The backbone with a classifier of ``num_classes``, and where its weights come from, in words.

    Raises:
        InputError: unknown model or checkpoint, or weights that do not fit, naming the first tensor that differs.
    """
    timm = require("timm", extra="train")
    _check_name(timm, config.model)
    seed_everything(derive_seed(config.seed, "model"))
    arguments: dict[str, Any] = {}
    if config.drop_rate and not config.freeze_backbone:
        arguments["drop_rate"] = config.drop_rate
    if config.image_size is not None and _has_fixed_size(timm, config.model):
        arguments["img_size"] = config.image_size
    if config.weights is not None:
        path = find_checkpoint(config.weights)
        model = _load(timm, config.model, arguments, path)
        origin = f"{path.name} of {config.weights}" if path.name != Path(config.weights).name else str(path)
    else:
        model = _create(timm, config.model, pretrained=config.pretrained, **arguments)
        origin = "timm's pretrained weights" if config.pretrained else "random weights"
    if not hasattr(model, "reset_classifier") or not hasattr(model, "num_classes"):
        raise InputError(f"--model {config.model} has no classifier to train: choose an image classification model")
    if model.num_classes != num_classes:
        model.reset_classifier(num_classes)
    return model, origin


def another_model(model: Any, config: TrainConfig, num_classes: int) -> nn.Module:
    """A second network of the same kind: given weights and those of a frozen backbone are the same, the rest is not."""
    other = replace(config, seed=derive_seed(config.seed, "second"))
    if not (config.has_weights or config.freeze_backbone):
        return create_model(other, num_classes)[0]
    second = copy.deepcopy(model)
    seed_everything(derive_seed(other.seed, "model"))
    second.reset_classifier(num_classes)
    return second


def _create(timm: Any, name: str, **arguments: Any) -> Any:
    # what the hub's client raises is its own family of errors, which are OSErrors only in part
    try:
        return timm.create_model(name, **arguments)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if arguments.get("pretrained"):
            raise InputError(
                f"--pretrained: timm could not get weights for {name} ({reason}): check the connection, or give a "
                "checkpoint with --weights"
            ) from None
        raise InputError(f"--model {name} could not be created: {reason}") from None


def _check_name(timm: Any, name: str) -> None:
    if ":" in name:
        return
    bare = name.split(".")[0]
    if not timm.is_model(bare):
        near = difflib.get_close_matches(bare, timm.list_models(), n=5, cutoff=0.5)
        hint = f"near matches: {', '.join(near)}" if near else "timm.list_models() lists all"
        raise InputError(f"--model {name!r} is unknown to timm {timm.__version__}; {hint}")


def _has_fixed_size(timm: Any, name: str) -> bool:
    if ":" in name:
        return False
    cfg = timm.get_pretrained_cfg(name)
    return bool(cfg is not None and cfg.fixed_input_size)


def find_checkpoint(weights: str) -> Path:
    """The checkpoint file that ``--weights`` names: a path, or the one such file of an installed package."""
    path = Path(weights)
    if path.is_file():
        return path
    if path.suffix in SUFFIXES or "/" in weights:
        raise InputError(f"--weights {weights}: there is no such file")
    try:
        distribution = importlib.metadata.distribution(weights)
    except importlib.metadata.PackageNotFoundError:
        names = {d.metadata["Name"] for d in importlib.metadata.distributions() if d.metadata["Name"]}
        near = difflib.get_close_matches(weights, names, n=3)
        hint = f"near matches: {', '.join(near)}" if near else "install it, or give the path of a checkpoint"
        raise InputError(f"--weights {weights!r} is neither a file nor an installed package; {hint}") from None
    found = [Path(str(distribution.locate_file(file))) for file in distribution.files or []]
    found = [file for file in found if file.suffix in SUFFIXES and file.is_file()]
    if len(found) != 1:
        names_found = ", ".join(str(file) for file in found) or "none"
        raise InputError(
            f"--weights {weights}: the package must hold one checkpoint ({', '.join(SUFFIXES)}), it holds "
            f"{names_found}: give the path of the file"
        )
    return found[0]


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint by name, wrappers such as ``{"state_dict": ...}`` and ``module.`` taken off."""
    try:
        if path.suffix == ".safetensors":
            state: Any = require("safetensors.torch", extra="train").load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, LookupError, pickle.UnpicklingError, ValueError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise InputError(f"--weights {path} cannot be read as tensors only ({reason}): save a state_dict") from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise InputError(f"--weights {path} is not a safetensors file ({error})") from None
    while isinstance(state, Mapping):
        inner = next((state[key] for key in _WRAPPERS if isinstance(state.get(key), Mapping)), None)
        if inner is None:
            break
        state = inner
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()) or not state:
        raise InputError(f"--weights {path} holds no state_dict: save model.state_dict()")
    tensors = {str(key): value for key, value in state.items()}
    for prefix in ("module.", "_orig_mod.", "model.", "backbone."):
        if all(key.startswith(prefix) for key in tensors):
            tensors = {key[len(prefix) :]: value for key, value in tensors.items()}
    return tensors


def _load(timm: Any, name: str, arguments: dict[str, Any], path: Path) -> Any:
    tensors = read_checkpoint(path)
    model = _create(timm, name, **arguments)
    state = model.state_dict()
    counters = {key: value for key, value in state.items() if key.endswith(_COUNTER)}
    classifier = _classifier_name(model)
    if set(tensors) | set(counters) != set(state):
        tensors = _by_order(tensors, state, classifier, path, name)
    tensors = {**counters, **tensors}  # checkpoints of old torch count no batches
    weight = tensors.get(f"{classifier}.weight")
    if weight is not None and weight.shape[0] != model.num_classes:
        model = _create(timm, name, num_classes=weight.shape[0], **arguments)
    for key, value in model.state_dict().items():
        if tensors[key].shape != value.shape:
            raise InputError(
                f"--weights {path} does not fit {name}: {key} is {list(tensors[key].shape)} in the file, "
                f"{list(value.shape)} in the model"
            )
    model.load_state_dict(tensors, strict=True)
    return model


def _by_order(
    tensors: dict[str, Tensor], state: dict[str, Tensor], classifier: str, path: Path, name: str
) -> dict[str, Tensor]:
    """The same tensors under the model's names, where only the names differ.

    The last part of a name (weight, bias, running_mean ...) must agree too: tensors of one layer have equal shapes.
    """
    theirs = [key for key in tensors if not key.endswith(_COUNTER)]
    ours = [key for key in state if not key.endswith(_COUNTER)]
    for their, our in zip(theirs, ours, strict=False):
        value, like = tensors[their], state[our]
        fits = value.shape == like.shape or (our.startswith(f"{classifier}.") and value.shape[1:] == like.shape[1:])
        if not fits or their.split(".")[-1] != our.split(".")[-1]:
            raise InputError(
                f"--weights {path} does not fit {name}: first difference at {their} {list(value.shape)} in the file, "
                f"{our} {list(like.shape)} in the model"
            )
    if len(theirs) != len(ours):
        extra = (theirs[len(ours) :] or ours[len(theirs) :])[0]
        raise InputError(
            f"--weights {path} does not fit {name}: {len(theirs)} tensors in the file, {len(ours)} in the model; "
            f"first difference at {extra}"
        )
    return {our: tensors[their] for our, their in zip(ours, theirs, strict=True)}


def _classifier_name(model: Any) -> str:
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ""
    return classifier if isinstance(classifier, str) else classifier[0]


def weights_digest(model: nn.Module) -> str:
    """Digest of all weights but the classifier's: what features depend on."""
    classifier = model.get_classifier()  # type: ignore[operator]
    own = {id(p) for p in classifier.parameters()} if isinstance(classifier, nn.Module) else set()
    digest = hashlib.sha256()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in own:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
