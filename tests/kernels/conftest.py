"""Fixtures of the kernels' tests: compiled once, and the same number of threads afterwards."""

from collections.abc import Iterator

import pytest
import torch

from legato.kernels.thread_pool import ThreadPool
from legato.models.projection_cpu import CpuOps


@pytest.fixture(scope="session", params=["w16", "w8"])
def kind(request: pytest.FixtureRequest) -> str:
    """A format of integer products."""
    return str(request.param)


@pytest.fixture(scope="session")
def ops(kind: str) -> CpuOps:
    return CpuOps(kind, ThreadPool(2))


@pytest.fixture(autouse=True)
def _same_number_of_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
