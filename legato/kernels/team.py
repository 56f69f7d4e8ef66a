"""Threads that share the work of compiled code, and never wait for one that does not come.

The caller works too: it takes items like everyone else, and at the end it waits only for those that have
taken one. So a thread that the machine is using for something else delays nobody, unlike at a barrier.
Between two pieces of work, microseconds apart, threads watch a number change; a little later they let others
run each time they look, and then they sleep until they are woken.
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
from legato.kernels.vector import INT64, has

_compiled: Any = numba.njit

_NUMBER, _BUSY, _WORK, _CONTEXT, _WORKERS, _CALLERS, _SIZE = 0, 64, 128, 136, 144, 192, 256
"""Where things are in a team's state, in bytes: the number of the task, odd while it is open, and how many
threads besides the caller are at it; what to call, with what, and how many threads may; how many callers
there are."""
_WATCH, _PATIENCE = 300, 10_000
"""How often a thread looks for work before it lets others run each time, and before it sleeps."""


class Team(NamedTuple):
    """What compiled code knows of it."""

    state: int  # address
    workers: int  # the caller among them


class Threads:
    """`count` threads, of which one is the caller. They end when nobody holds this object any more.

    A second caller at the same time works alone. Not for a forked process, in which they are missing.
    """

    def __init__(self, count: int, *, progress: Callable[[str], None] = lambda _: None) -> None:
        memory = np.zeros(_SIZE // 8 + 8, np.int64)
        # Its own cache lines: two numbers in one would make threads wait for each other.
        state = memory[-memory.ctypes.data % 64 // 8 :]
        self.count = count
        self._address: int = state.ctypes.data
        self._memory = memory
        self._sleepers: list[_Sleeper] = []
        watch = Kernel(_build_watch(source_version()), None)
        watch(self.team(1), 0, 0)
        if watch.problem is not None:
            progress(f"compiled kernels cannot be kept, every start compiles them: {watch.problem}")
        self._sleepers = [_Sleeper() for _ in range(1, count)]
        for worker, sleeper in enumerate(self._sleepers, start=1):
            # A thread holds what it needs of this object, and not the object.
            arguments = (watch, memory, self.team(count), worker, sleeper)
            threading.Thread(target=_live, args=arguments, name=f"legato-{worker}", daemon=True).start()
        weakref.finalize(self, _dismiss, self._sleepers)

    def team(self, workers: int) -> Team:
        """For the next call, with up to so many threads; wakes those that sleep."""
        for sleeper in self._sleepers:
            if sleeper.sleeps:
                sleeper.alarm.set()
        return Team(self._address, min(workers, self.count))


class _Sleeper:
    """A thread's bed."""

    def __init__(self) -> None:
        self.alarm = threading.Event()
        self.sleeps = False
        self.ends = False


def _live(watch: Kernel, memory: Any, team: Team, worker: int, sleeper: _Sleeper) -> None:  # noqa: ARG001
    """A thread's life. It holds `memory` so that the address in `team` stays good."""
    while not sleeper.ends:
        watch(team, worker, _PATIENCE)
        sleeper.alarm.clear()
        sleeper.sleeps = True
        # Whoever called just before this line woke nobody, and works alone until the next call.
        if not sleeper.ends:
            sleeper.alarm.wait()
        sleeper.sleeps = False


def _dismiss(sleepers: list[_Sleeper]) -> None:
    for sleeper in sleepers:
        sleeper.ends = True
        sleeper.alarm.set()


def _atomic(write: Callable[..., Any], returns: Any, count: int) -> Any:
    """An operation on an int64 at an address, in one order for all threads."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
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
    """Tells the processor that this thread waits."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if has("sse2"):
            pause = builder.module.declare_intrinsic(
                "llvm.x86.sse2.pause", fnty=ir.FunctionType(ir.VoidType(), [])
            )
            builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), generate


_pause: Any = intrinsic(_pause_code)
_let_others_run: Any = types.ExternalFunction("sched_yield", types.int32())


def _call_code(_: Any, _work: Any, _context: Any, _worker: Any) -> Any:
    """Call the function at an address with two numbers."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [INT64, INT64])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_call: Any = intrinsic(_call_code)


def _build_watch(version: int) -> Any:
    @_compiled(nogil=True)
    def watch(team: Team, _work: int, worker: int, patience: int) -> int:
        """Take part in tasks until there has been none for a while."""
        state = team.state
        looked = done = 0
        while looked < patience:
            number = _read(state + _NUMBER)
            if number & 1 and number != done:
                done, looked = number, 0
                _add(state + _BUSY, 1)
                # Only now is it sure that the caller waits, if the task is still open.
                if _read(state + _NUMBER) == number and worker < _read(state + _WORKERS):
                    _call(_read(state + _WORK), _read(state + _CONTEXT), worker)
                _add(state + _BUSY, -1)
            else:
                looked += 1
                _wait(looked)
        return version

    return watch


@_compiled
def _wait(looked: int) -> None:
    if looked < _WATCH:
        _pause()
    else:
        _let_others_run()


@_compiled
def share(team: Team, work: int, context: int) -> None:
    """Have `work(context, worker)` done by everyone who comes; returns when all who came are through."""
    state = team.state
    if team.workers == 1 or _add(state + _CALLERS, 1) > 0:
        _call(work, context, 0)
        if team.workers > 1:
            _add(state + _CALLERS, -1)
        return
    _write(state + _WORK, work)
    _write(state + _CONTEXT, context)
    _write(state + _WORKERS, team.workers)
    _add(state + _NUMBER, 1)
    _call(work, context, 0)
    _add(state + _NUMBER, 1)
    looked = 0
    while _read(state + _BUSY) != 0:
        looked += 1
        _wait(looked)
    _add(state + _CALLERS, -1)


def sharing(context: Any) -> tuple[Any, Any]:
    """share(team, work, value), and get(address) -> that value, for `work`: both in compiled code.

    `context`: the numba type of the value.
    """

    def put_code(_: Any, given: Any) -> Any:
        def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            place = alloca(builder, target.get_value_type(context))
            builder.store(arguments[0], place)
            return builder.ptrtoint(place, INT64)

        if given != context:
            raise errors.TypingError(f"this is {given}, not {context}")
        return types.int64(context), generate

    def get_code(_: Any, _address: Any) -> Any:
        def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind = target.get_value_type(context)
            value = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()))
            target.nrt.incref(builder, context, value)
            return value

        return context(types.int64), generate

    alloca: Any = cgutils.alloca_once
    put: Any = intrinsic(put_code)

    @_compiled
    def share_value(team: Team, work: int, value: Any) -> None:
        # numba frees what it sees no more use of, and sees none in an address. An argument is safe, for the
        # caller holds it as long as the call takes.
        share(team, work, put(value))

    return share_value, intrinsic(get_code)


def tuple_type(kind: Any, **others: Any) -> Any:
    """The numba type of a NamedTuple of numbers, and of others that are given by name."""
    numbers = {int: types.int64, float: types.float64, bool: types.boolean}
    fields = [others.get(name) or numbers[hint] for name, hint in get_type_hints(kind).items()]
    named: Any = types
    if len(set(fields)) == 1:
        return named.NamedUniTuple(fields[0], len(fields), kind)
    return named.NamedTuple(fields, kind)
