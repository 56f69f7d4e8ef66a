"""ThreadPool that share work: each item is done once, whoever comes, and no thread outlives its use."""

import gc
import threading
import time
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from numba import types

from legato.kernels.cache import Kernel, source_version
from legato.kernels.thread_pool import ThreadPool, sharing, tuple_type
from legato.kernels.vector import next_number

INTEGERS = types.Array(types.int64, 1, "C")
ITEMS = 1000


class Shared(NamedTuple):
    """A call's work."""

    done: Any  # [items]: how often each was
    items: Any  # [workers]: how many each did
    ones: Any  # which nobody holds but the call
    seen: Any  # [workers]: their sum as each found it
    counter: Any  # [1]


_share, _get = sharing(tuple_type(Shared, **dict.fromkeys(Shared._fields, INTEGERS)))


@numba.njit
def _do_some(shared, worker, _version):
    while True:
        item = next_number(shared.counter.ctypes.data)
        if item >= len(shared.done):
            break
        shared.done[item] += 1
        shared.items[worker] += 1
    # If what is shared had been freed, this would lie in its place.
    other = np.full(len(shared.ones), 2, np.int64)
    shared.seen[worker] = shared.ones.sum() + 0 * other.sum()


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    version = source_version()

    @numba.njit(nogil=True)
    def entry(team, work, done, items, num_ones, seen):
        shared = Shared(done, items, np.ones(num_ones, np.int64), seen, np.zeros(1, np.int64))
        other = np.full(num_ones, 2, np.int64)
        _share(team, work, shared)
        return version + other[0]

    def work(address, worker):
        _do_some(_get(address), worker, version)

    return Kernel(entry, work)


def call(kernel, threads, workers, num_ones=100):
    """How many items each worker did."""
    done, items, seen = np.zeros(ITEMS, np.int64), np.zeros(8, np.int64), np.zeros(8, np.int64)
    kernel(threads.handle(workers), done, items, num_ones, seen)
    assert (done == 1).all()
    assert set(seen.tolist()) <= {0, num_ones}, "what is shared lives as long as the call"
    assert seen[0] == num_ones, "the caller works too"
    assert not items[min(workers, threads.count) :].any()
    return items


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_item_is_done_once_while_threads_watch_and_after_they_slept(kernel, count):
    threads = ThreadPool(count)
    for i in range(3000):
        call(kernel, threads, 1 + i % 4)
        if i % 500 == 0:
            time.sleep(0.1)


def test_others_come_also_after_a_sleep(kernel):
    threads, came = ThreadPool(2), 0
    for _ in range(3):
        time.sleep(0.2)
        until = time.monotonic() + 60
        while not call(kernel, threads, 2)[1] and time.monotonic() < until:
            pass
        came += time.monotonic() < until
    assert came == 3


@pytest.mark.parametrize("num_ones", [10, 1000, 100_000, 5_000_000])
def test_what_is_shared_lives_as_long_as_the_call(kernel, num_ones):
    call(kernel, ThreadPool(2), 2, num_ones)


def test_threads_end_when_nobody_holds_them(kernel):
    before = set(threading.enumerate())
    threads = ThreadPool(3)
    call(kernel, threads, 3)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    time.sleep(0.2)
    del threads
    gc.collect()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_callers_at_the_same_time_get_all_their_work_done(kernel):
    threads, failed = ThreadPool(2), []

    def use():
        try:
            for _ in range(1000):
                call(kernel, threads, 2)
        except AssertionError as error:
            failed.append(error)

    users = [threading.Thread(target=use) for _ in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join(timeout=120)
        assert not user.is_alive()
    assert failed == []
