"""What the runner computes on: the element type that suits a device, and a device in words."""

import logging

import torch

from legato.errors import ConfigError
from legato.machine import Memory, memory, processors

logger = logging.getLogger(__name__)

UNTESTED = "the CUDA path was never tried"


def choose_device(name: str) -> torch.device:
    """The device for "auto" (the CPU), "cpu", "cuda" or "cuda:N".

    A path that was never tried is taken only by name, with a warning. Raises ConfigError for any other name
    and for a CUDA device that is not there.
    """
    if name in ("auto", "cpu"):
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (name != "cuda" and not (index.isascii() and index.isdigit())):
        raise ConfigError(f'device: {name!r} is not one of "auto", "cpu", "cuda", "cuda:N"', param="device")
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        raise ConfigError(
            f"device: {name!r} asked for, this machine has {count} CUDA devices", param="device"
        )
    logger.warning("device: %s, so answers may be wrong; --device cpu is the tested one", UNTESTED)
    return torch.device(name)


def set_threads(asked: int | None) -> None:
    """Let torch, and the compiled kernels with it, use `asked` threads on a CPU.

    None: as many as torch would (OMP_NUM_THREADS, else one for each core), and no more than this process may
    keep busy. In a container with a CPU quota, more threads would use it up early in each period, and then
    all of them would stand still until the next.
    """
    torch.set_num_threads(asked or min(torch.get_num_threads(), processors().count))


def device_memory(device: torch.device) -> Memory:
    """What can be taken on `device` now."""
    if device.type == "cuda":
        return Memory(torch.cuda.mem_get_info(device)[0], f"free on {device}")
    return memory()


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch type for "auto", "float32", "float16" or "bfloat16".

    auto is float32 on a CPU, whose arithmetic on 16-bit floats is emulated or worse, bfloat16 on a GPU that
    has it and float32 on an older one: the numbers of some models do not fit in float16.
    """
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" and _has_bfloat16(device) else "float32"
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return dtypes[name]


def _has_bfloat16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def describe_device(device: torch.device, asked: str) -> str:
    """One line: the device, how much of it torch will use, and why it is this one."""
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)} ({asked}; {UNTESTED})"
    why = asked
    if asked == "auto" and torch.cuda.is_available():
        why = f"auto; there is a CUDA device, --device cuda takes it, but {UNTESTED}"
    usable = processors()
    why += f"; {usable.limit}" if usable.limit else ""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu, {capability}, {torch.get_num_threads()} of {usable.count} threads ({why})"
