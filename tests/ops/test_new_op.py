"""docs/adding-an-op.md, carried out: its blocks are put into a copy of the package, compiled, and the op is checked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
BLOCK = re.compile(r"```(?:python|cpp)\n(?:#|//) (\S+)( \(add\))?\n(.*?)```", re.DOTALL)

CHECKS = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import crowdnal
import crowdnal.functional as F
from crowdnal import reference
from crowdnal.data import Annotations

for library in sys.argv[1:]:
    torch.ops.load_library(library)
op = torch.ops.crowdnal.annotator_shift
assert bool(sys.argv[1:]) == torch._C._dispatch_has_kernel_for_dispatch_key("crowdnal::annotator_shift", "CPU")


def annotations(nnz):
    generator = torch.Generator().manual_seed(nnz)
    annotator = torch.randint(4, (nnz,), generator=generator)
    ends = torch.randint(nnz + 1, (4,), generator=generator).sort().values
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), ends, torch.tensor([nnz])])
    return Annotations(indptr, annotator, annotator % 3, num_annotators=4, num_classes=3)


a = annotations(9)
index = (a.indptr, a.item, a.annotator, a.order, None)
scores, shift = torch.randn(5, 3).double().requires_grad_(), torch.randn(4, 3).double().requires_grad_()
shifted = lambda z, s: F.annotator_shift(z, s, a)
wanted = torch.stack([scores[i] + shift[r] for i, r in zip(a.item, a.annotator)])
assert torch.equal(shifted(scores, shift), wanted)
assert torch.equal(reference.annotator_shift(scores, shift, *index), wanted)
assert annotations(0).item.shape == F.annotator_shift(scores, shift, annotations(0)).shape[:1] == (0,)

# the fake, the raw op's derivatives, derivatives of both orders, forward mode, vmap
assert set(torch.library.opcheck(op.default, (scores, shift, *index)).values()) == {"SUCCESS"}
assert torch.autograd.gradcheck(shifted, (scores, shift), check_forward_ad=True, check_batched_grad=True)
assert torch.autograd.gradgradcheck(lambda z, s: shifted(z, s).square(), (scores, shift), check_fwd_over_rev=True)
several = torch.randn(2, 4, 3).double()
for scores_, dim in ((scores.expand(2, 5, 3), 0), (scores, None)):
    ours = torch.vmap(shifted, in_dims=(dim, 0))(scores_, several)
    assert torch.equal(ours, torch.stack([shifted(scores, s) for s in several]))

# stored in half precision, also under autocast, which leaves the matrices as they are
for dtype in (torch.float16, torch.bfloat16):
    half = shift.detach().to(dtype)
    ours = F.annotator_shift(scores.float(), half, a)
    assert ours.dtype == torch.float32 and torch.equal(ours, F.annotator_shift(scores.float(), half.float(), a))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(op(scores.float(), half, *index), ours)
        assert op(scores.bfloat16(), shift.float(), *index).dtype == torch.float32

# compiled, without a recompile when the number of annotations changes
frames = []
compiled = torch.compile(
    lambda z, s, a: F.annotator_shift(z, s, a).square().sum(), fullgraph=True, dynamic=True,
    backend=lambda graph, inputs: frames.append(1) or graph.forward,
)
for nnz in (9, 5, 7):
    b = annotations(nnz)
    total = F.annotator_shift(scores, shift, b).square().sum()
    assert torch.allclose(compiled(scores, shift, b), total)
assert len(frames) == 1
print("done")
"""


@pytest.fixture(scope="module")
def blocks() -> dict[str, tuple[bool, str]]:
    """Code by file, and whether it is added to one that is there."""
    text = (ROOT / "docs" / "adding-an-op.md").read_text(encoding="utf-8")
    found = BLOCK.findall(re.sub(r"^   ", "", text, flags=re.MULTILINE))
    return {name: (bool(add), code) for name, add, code in found}


@pytest.fixture(scope="module")
def tree(blocks: dict[str, tuple[bool, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in which the steps of the page are done."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("crowdnal", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (add, code) in blocks.items():
        path = folder / name
        assert path.exists() == add, name
        path.write_text((path.read_text(encoding="utf-8") if add else "") + code, encoding="utf-8")
    return folder


def run_checks(tree: Path, *libraries: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHECKS), *libraries],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr[-3000:]


def test_an_op_touches_at_most_eight_files(blocks: dict[str, tuple[bool, str]]) -> None:
    assert 5 < len(blocks) <= 8
    steps = (ROOT / "docs" / "adding-an-op.md").read_text(encoding="utf-8").count("```") // 2
    assert steps == len(blocks), "a block does not say its file"


def test_nor_do_the_ops_that_are_there() -> None:
    """One with a backward, in all layers: who else names it is its test."""
    folders = [ROOT / "crowdnal" / name for name in ("reference", "ops", "functional")] + [ROOT / "csrc"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".cu", ".cuh")]
    naming = {path for path in files if re.search(r"\bpair_confusion\b", path.read_text(encoding="utf-8"))}
    assert {path.suffix for path in naming} == {".py", ".cpp", ".cu", ".cuh"} and len(naming) <= 8


@pytest.mark.slow
def test_the_new_op_on_its_definition(tree: Path) -> None:
    run_checks(tree)


def compile_with(tree: Path, *arguments: str | Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    torch_folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O1", "-fPIC", "-Wno-psabi", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    folders = [f"-I{tree / 'csrc'}", f"-isystem{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    done = subprocess.run(["c++", *flags, *arguments, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_new_op_on_its_native_kernel(tree: Path) -> None:
    library, cpu = tree / "shift.so", tree / "csrc" / "cpu"
    sources = [cpu / "annotator_shift.cpp", cpu / "detail" / "tensors.cpp"]
    compile_with(tree, "-shared", *sources, "-o", library, "-lc10", "-ltorch_cpu", "-ltorch")
    run_checks(tree, library)


@pytest.mark.slow
def test_the_cuda_half_of_the_new_op_compiles(tree: Path) -> None:
    """For the emulator, whose tests are where its values would be checked."""
    emulator = ROOT / "tests" / "emulation"
    source = tree / "csrc" / "cuda" / "annotator_shift.cu"
    compile_with(tree, "-DCROWDNAL_EMULATOR", f"-I{emulator}", "-fsyntax-only", "-x", "c++", source)
