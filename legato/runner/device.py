"""What the runner computes on: the element type that suits a device, and a device in words."""

import os

import torch


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


def describe_device(device: torch.device) -> str:
    """One line: the device, and how much of it torch will use."""
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu, {capability}, {torch.get_num_threads()} of {os.cpu_count()} threads"
