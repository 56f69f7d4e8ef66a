"""A thread pool for compiled code. Nothing ever waits for a thread that has not started on the task.

The caller works too. It takes items like all other threads, and at the end it waits only for threads that
have taken an item. So a thread whose core the machine uses for something else delays no other thread, unlike
at a barrier. Tasks are microseconds apart. In between, threads first poll, then yield their core at each
poll, and then sleep until they are woken.
"""

# numba's types describe only some of its uses.
# mypy: disallow-untyped-decorators=False, warn-return-any=False

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, errors
from numba.extending import intrinsic

from legato.kernels.cache import Kernel, source_version
from legato.kernels.vector import INT64, has_features

_compiled: Any = numba.njit

_NUMBER, _BUSY, _WORK, _CONTEXT, _WORKERS, _CALLERS, _SIZE = 0, 64, 128, 136, 144, 192, 256
"""Offsets of the pool's shared state, in bytes: the number of the task (odd while it is open), the number of
threads that work on it besides the caller, the function, its argument, the maximum of threads, and the
number of callers."""
_SPINS, _YIELDS = 300, 10_000
"""The number of polls before a thread yields its core at each poll, and before it sleeps."""


class PoolHandle(NamedTuple):
    """A thread pool, as compiled code sees it."""

    state: int  # address of the shared state
    workers: int  # the most threads, including the caller


class ThreadPool:
    """`count` threads including the caller. They end when the pool has no references any more.

    A second caller at the same time works alone. A forked process must not use the pool, because the threads
    do not exist there.
    """

    def __init__(self, count: int, *, progress: Callable[[str], None] = lambda _: None) -> None:
        memory = np.zeros(_SIZE // 8 + 8, np.int64)
        # Aligned to cache lines, so that threads do not slow each other down by false sharing.
        state = memory[-memory.ctypes.data % 64 // 8 :]
        self.count = count
        self._address: int = state.ctypes.data
        self._memory = memory
        self._workers: list[_Worker] = []
        watch = Kernel(_build_watch(source_version()), None)
        watch(self.handle(1), 0, 0)
        if watch.problem is not None:
            progress(f"compiled kernels cannot be kept, every start compiles them: {watch.problem}")
        self._workers = [_Worker() for _ in range(1, count)]
        for index, worker in enumerate(self._workers, start=1):
            # The threads hold no reference to the pool itself, so that it can be collected.
            arguments = (watch, memory, self.handle(count), index, worker)
            threading.Thread(target=_run, args=arguments, name=f"legato-{index}", daemon=True).start()
        weakref.finalize(self, _stop, self._workers)

    def handle(self, workers: int) -> PoolHandle:
        """A handle for the next call, which may use up to `workers` threads. Wakes threads that sleep."""
        for worker in self._workers:
            if worker.is_asleep:
                worker.wake_up.set()
        return PoolHandle(self._address, min(workers, self.count))


class _Worker:
    """The state of one thread between tasks."""

    def __init__(self) -> None:
        self.wake_up = threading.Event()
        self.is_asleep = False
        self.must_end = False


def _run(watch: Kernel, memory: Any, threads: PoolHandle, index: int, worker: _Worker) -> None:  # noqa: ARG001
    """The main function of a thread. It holds `memory`, so that the address in `threads` stays valid."""
    while not worker.must_end:
        watch(threads, index, _YIELDS)
        worker.wake_up.clear()
        worker.is_asleep = True
        # A call just before this line does not wake the thread. Then the caller works without it.
        if not worker.must_end:
            worker.wake_up.wait()
        worker.is_asleep = False


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.must_end = True
        worker.wake_up.set()


def _atomic(write: Callable[..., Any], returns: Any, count: int) -> Any:
    """A sequentially consistent operation on the int64 at an address."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        address, *others = arguments
        result = write(builder, builder.inttoptr(address, INT64.as_pointer()), *others)
        return _context.get_dummy_value() if returns is types.void else result

    signature: Any = returns(*[types.int64] * count)
    if count == 1:
        return intrinsic(lambda _, address: (signature, generate))  # noqa: ARG005
    return intrinsic(lambda _, address, number: (signature, generate))  # noqa: ARG005


_read = _atomic(lambda b, place: b.load_atomic(place, "seq_cst", 8), types.int64, 1)
_write = _atomic(lambda b, place, number: b.store_atomic(number, place, "seq_cst", 8), types.void, 2)
_add = _atomic(lambda b, place, number: b.atomic_rmw("add", place, number, "seq_cst"), types.int64, 2)


def _pause_code(_: Any) -> Any:
    """Tell the processor that this thread polls."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, _arguments: Any) -> Any:
        if has_features("sse2"):
            pause = builder.module.declare_intrinsic(
                "llvm.x86.sse2.pause", fnty=ir.FunctionType(ir.VoidType(), [])
            )
            builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), generate


_pause: Any = intrinsic(_pause_code)
_yield_core: Any = types.ExternalFunction("sched_yield", types.int32())


def _call_code(_: Any, _work: Any, _context: Any, _worker: Any) -> Any:
    """Call the function at an address with two integers."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [INT64, INT64])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_call: Any = intrinsic(_call_code)


def _build_watch(version: int) -> Any:
    @_compiled(nogil=True)
    def watch(threads: PoolHandle, _work: int, worker: int, max_polls: int) -> int:
        """Take part in tasks until `max_polls` polls have found none."""
        state = threads.state
        polls = done = 0
        while polls < max_polls:
            number = _read(state + _NUMBER)
            if number & 1 and number != done:
                done, polls = number, 0
                _add(state + _BUSY, 1)
                # The caller waits for this thread from here on, if the task is still open.
                if _read(state + _NUMBER) == number and worker < _read(state + _WORKERS):
                    _call(_read(state + _WORK), _read(state + _CONTEXT), worker)
                _add(state + _BUSY, -1)
            else:
                polls += 1
                _pause_or_yield(polls)
        return version

    return watch


@_compiled
def _pause_or_yield(polls: int) -> None:
    if polls < _SPINS:
        _pause()
    else:
        _yield_core()


@_compiled
def share(threads: PoolHandle, work: int, context: int) -> None:
    """Run `work(context, worker)` in the caller and in all threads that start on it. Returns when they are
    done."""
    state = threads.state
    if threads.workers == 1 or _add(state + _CALLERS, 1) > 0:
        _call(work, context, 0)
        if threads.workers > 1:
            _add(state + _CALLERS, -1)
        return
    _write(state + _WORK, work)
    _write(state + _CONTEXT, context)
    _write(state + _WORKERS, threads.workers)
    _add(state + _NUMBER, 1)
    _call(work, context, 0)
    _add(state + _NUMBER, 1)
    polls = 0
    while _read(state + _BUSY) != 0:
        polls += 1
        _pause_or_yield(polls)
    _add(state + _CALLERS, -1)


def sharing(context: Any) -> tuple[Any, Any]:
    """share(threads, work, value), and get(address) -> that value, for `work`: both in compiled code.

    `context`: the numba type of the value.
    """

    def put_code(_: Any, given: Any) -> Any:
        def generate(target: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
            place = alloca(builder, target.get_value_type(context))
            builder.store(arguments[0], place)
            return builder.ptrtoint(place, INT64)

        if given != context:
            raise errors.TypingError(f"this is {given}, not {context}")
        return types.int64(context), generate

    def get_code(_: Any, _address: Any) -> Any:
        def generate(target: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
            kind = target.get_value_type(context)
            value = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()))
            target.nrt.incref(builder, context, value)
            return value

        return context(types.int64), generate

    alloca: Any = cgutils.alloca_once
    put: Any = intrinsic(put_code)

    @_compiled
    def share_value(threads: PoolHandle, work: int, value: Any) -> None:
        # numba releases a value after its last use, and does not count an address as a use. An argument is
        # safe, because the caller holds it during the call.
        share(threads, work, put(value))

    return share_value, intrinsic(get_code)


def tuple_type(kind: ir.Type, **others: Any) -> Any:
    """The numba type of a NamedTuple of numbers. `others` are the types of its other fields, by name."""
    numbers = {int: types.int64, float: types.float64, bool: types.boolean}
    fields = [others.get(name) or numbers[hint] for name, hint in get_type_hints(kind).items()]
    named: Any = types
    if len(set(fields)) == 1:
        return named.NamedUniTuple(fields[0], len(fields), kind)
    return named.NamedTuple(fields, kind)
