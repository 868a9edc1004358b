"""Pre-logits features of a frozen backbone: computed once, on all cores, and kept in a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from crowdnal._utils.threads import threads
from crowdnal.data import Annotations
from crowdnal.train.config import InputError
from crowdnal.train.data import ImageDataset
from crowdnal.train.files import atomic
from crowdnal.train.processes import Processes
from crowdnal.training import CrossFit, classify, has_single_head, is_timm, pre_logits

# On a CPU a small batch stays in the cache: 8 images took 0.7 of the time of 32, and 0.4 of that of 64.
_CPU_BATCH = 8
_GPU_BATCH = 128


class FrozenHead(nn.Module):
    """A timm model's own classifier behind dropout, on pre-logits features ``[B, D]``."""

    def __init__(self, model: Any, drop_rate: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(drop_rate)
        self.classifier: nn.Module = model.get_classifier()

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, C]``."""
        return classify(self.classifier, self.drop(features))


def frozen_head(model: Any, drop_rate: float, name: str, image_shape: Sequence[int]) -> FrozenHead:
    """The trainable head of a frozen model, after checking that on features it gives the model's own logits.

    Raises:
        InputError: the model is not its pre-logits features followed by one classifier.
    """
    images = torch.randn(2, *image_shape, generator=torch.Generator().manual_seed(0))
    if not (is_timm(model) and has_single_head(model, images, dropout=False)):
        raise InputError(f"--freeze-backbone: {name} is not one classifier on pre-logits features; train without it")
    return FrozenHead(model, drop_rate).eval()


def head_per_fold(head: FrozenHead, annotations: Annotations, folds: int, seed: int, name: str) -> CrossFit:
    """Copies of the head, whose mean it can be afterwards.

    Raises:
        InputError: that is only so of linear ones.
    """
    if not isinstance(head.classifier, nn.Linear | nn.Conv2d):
        raise InputError(
            f"--cross-fit {folds} ends with the mean of linear heads; that of {name} is none: leave it out"
        )
    return CrossFit(head, annotations, folds=folds, seed=seed)


def cache_key(files: Sequence[Path], model_name: str, digest: str, transform: Any, device: str, amp: bool) -> str:
    """Key of the features of these files: changes when a file, the weights or the preprocessing does."""
    stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    description = (stats, model_name, digest, repr(transform), torch.device(device).type, amp)
    return hashlib.sha256(repr(description).encode()).hexdigest()[:32]


def cached_features(
    files: Sequence[Path],
    folder: Path,
    key: str,
    compute: Callable[[], Tensor],
    processes: Processes = Processes(),  # noqa: B008  (frozen)
) -> tuple[Tensor, bool]:
    """Features ``[N, D]`` from ``folder``, or computed and put there; and whether they were there."""
    path = folder / f"{key}.npy"
    features = processes.tensor_from_first(lambda: _read(path, len(files)))
    if features is not None:
        return features, True
    features = compute()
    processes.from_first(_keep, path, features)
    return features, False


def _read(path: Path, length: int) -> Tensor | None:
    if path.is_file():
        try:
            features = torch.from_numpy(np.load(path))
            if features.dim() == 2 and features.shape[0] == length:
                return features
        except (OSError, ValueError, EOFError):
            pass  # damaged: compute again
    return None


def _keep(path: Path, features: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary, open(temporary, "wb") as stream:
        np.save(stream, features.numpy())


def block_size(device: str) -> int:
    """Images that go through the model together."""
    return _CPU_BATCH if torch.device(device).type == "cpu" else _GPU_BATCH


def extract(
    model: nn.Module,
    files: Sequence[Path],
    transform: Callable[[Any], Tensor],
    mode: str,
    *,
    device: str,
    workers: int,
    amp: bool,
    advance: Callable[[int], None],
) -> Tensor:
    """Features ``[N, D]`` float32 of image files, in evaluation mode.

    On a CPU each worker process reads its images and runs the model on them with one thread: all cores are used, and
    the values do not depend on their number. On a GPU workers read and the device computes.

    Args:
        model: timm model.
        files: images.
        transform: evaluation transform.
        mode: PIL mode of the images.
        device: torch device.
        workers: processes, 0 for none.
        amp: bfloat16 autocast.
        advance: called with the number of images done.

    Raises:
        InputError: the model gives numbers that are not finite.
    """
    on_cpu = torch.device(device).type == "cpu"
    dataset = ImageDataset(files, transform, mode)
    size = block_size(device)
    model.eval()
    model.to(device)
    model.to(memory_format=torch.channels_last)
    blocks = []
    if on_cpu:
        batches = [range(i, min(i + size, len(files))) for i in range(0, len(files), size)]
        source: Dataset[Tensor] = _FeatureDataset(model, dataset, batches, amp)
        with threads(1):
            for block in DataLoader(source, batch_size=None, num_workers=min(workers, len(batches))):
                blocks.append(block.clone())  # frees the shared memory of the worker at once
                advance(len(block))
    else:
        loader = DataLoader(dataset, size, num_workers=workers, pin_memory=True)
        with torch.inference_mode(), torch.autocast(torch.device(device).type, torch.bfloat16, enabled=amp):
            for images, _ in loader:
                images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
                blocks.append(pre_logits(model, images).float())
                advance(len(images))
    model.to(memory_format=torch.contiguous_format)
    features = torch.cat(blocks).cpu()
    bad = ~features.isfinite().all(1)
    if bool(bad.any()):
        raise InputError(
            f"{files[int(bad.nonzero()[0, 0])]}: the model makes features of it that are not finite: its weights are "
            "damaged, give others (--weights)"
        )
    return features


class _FeatureDataset(Dataset[Tensor]):
    """Batch ``b`` of images as features: the model runs where the images are read."""

    def __init__(self, model: nn.Module, images: ImageDataset, batches: Sequence[range], amp: bool) -> None:
        self.model, self.images, self.batches, self.amp = model, images, batches, amp

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, b: int) -> Tensor:
        images = torch.stack([self.images[row][0] for row in self.batches[b]])
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
            return pre_logits(self.model, images).float()
