"""What is compiled is kept, and gives the same bits with other registers and instructions."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import legato
from legato.kernels.vector import has_wide_registers

CHILD = """
import hashlib, torch
from legato.kernels.thread_pool import ThreadPool
from legato.models.projection import Norm
from legato.models.projection_cpu import CpuOps

torch.manual_seed(0)
threads, digest, hits = ThreadPool(2), hashlib.sha256(), []
for kind in ("w16", "w8"):
    ops = CpuOps(kind, threads)
    x, gain = torch.randn(29, 208), torch.randn(208)
    gated = ops.projection(torch.randn(192, 208), before=Norm(gain, 1e-6), after="silu")(x)
    ops.projection(torch.randn(208, 96), torch.randn(208), after=Norm(gain, 1e-6)).add_to(x, gated)
    heads, angles = x[:, :192].reshape(29, 3, 64), torch.randn(29, 32)
    turned = ops.rope(heads, 2, (angles.cos(), angles.sin()), Norm(torch.randn(2, 64), 1e-6))
    other = ops.projection(torch.randn(50, 208), before=Norm(gain, 1e-6))
    read = other.rows(torch.tensor([3, 49]), 2.5)
    for result in (gated, x, turned, other(x), read):
        digest.update(result.contiguous().numpy().tobytes())
    kernels = (ops.project, ops.pack, ops.read, ops._rope)
    hits.append(sum(kernel.num_cache_hits for kernel in kernels))
print(digest.hexdigest(), hits[0])
"""


def run(folder: Path, **environment: str) -> list[str]:
    """The digest and the number of kernels that were read from a cache, with a copy of the package and caches
    of its own below `folder`: a kernel is read from any cache that has it."""
    package = folder / "legato"
    if not package.exists():
        source = Path(legato.__file__).parent
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    own = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder), "NUMBA_CACHE_DIR": str(folder / "numba")}
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=os.environ | own | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return child.stdout.split()


WIDE: dict[str, str] = {}
NARROW = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
NO_AVX = {"NUMBA_ENABLE_AVX": "0"}


@pytest.mark.big
@pytest.mark.skipif(not has_wide_registers(), reason="this machine has narrow registers itself")
def test_other_registers_and_instructions_give_the_same_bits(tmp_path):
    """With a processor's best instructions, with those of ten years ago, and with none for integers."""
    digests = set()
    for name, settings in (("wide", WIDE), ("narrow", NARROW), ("none", NO_AVX)):
        digest, hits = run(tmp_path / name, **settings)
        assert hits == "0"
        digests.add(digest)
    assert len(digests) == 1


def test_the_second_start_compiles_nothing(tmp_path):
    """Four kernels; the work that threads share is another function of three of them."""
    digest, hits = run(tmp_path)
    assert hits == "0"
    assert run(tmp_path) == [digest, "7"]
