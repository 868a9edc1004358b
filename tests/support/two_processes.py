"""Two processes of a run of ``crowdnal train``: as torchrun starts them, or with what a test needs in them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def torchrun(*words: str, **options: Any) -> subprocess.Popen[str]:
    """``torchrun --nproc-per-node 2 -m crowdnal ...``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    return subprocess.Popen(
        [*launch, "--rdzv-endpoint", "localhost:0", "-m", "crowdnal", *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def in_two(job: Callable[[Any], None], tasks: Sequence[Any], folder: Path, method: str = "spawn") -> list[list[str]]:
    """Both processes do the job of every task together; what each of them raised (or ``""``), per task."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = [free_port() for _ in tasks]
    context: Any = multiprocessing.get_context(method)
    ranks = [context.Process(target=_work, args=(job, tasks, ports, rank, folder)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=300)
        rank.kill()
    return [
        [(folder / f"{i}.{rank}").read_text() if (folder / f"{i}.{rank}").exists() else "died" for rank in range(2)]
        for i in range(len(tasks))
    ]


def _work(job: Callable[[Any], None], tasks: Sequence[Any], ports: Sequence[int], rank: int, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    for i, (task, port) in enumerate(zip(tasks, ports, strict=True)):
        known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in known.items()} | {"MASTER_ADDR": "127.0.0.1"})
        try:
            job(task)
            told = ""
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        (folder / f"{i}.{rank}").write_text(told)
