"""One tensor of a GGUF file: its shape and type checked, its numbers as float32 by the `gguf` library."""

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from legato.errors import ModelError
from legato.models.gguf_file import GgufTensor

# A multiple of every block size; rows of this length are what numpy handles fastest in the gguf library.
ROW_ELEMENTS = 8192


def check_tensor(tensor: GgufTensor, shape: tuple[int, ...]) -> None:
    """Refuse another shape than `shape`, and a type that cannot be dequantized."""
    if tensor.shape != shape:
        raise ModelError(
            f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(shape)}"
        )
    try:
        _, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        dequantize(np.zeros((1, block_bytes), np.uint8), tensor.kind)
    except NotImplementedError:
        raise ModelError(
            f"{tensor.path}: tensor {tensor.name} has type {tensor.kind.name}, which cannot be read"
        ) from None


def dequantize_piece(tensor: GgufTensor, start: int, end: int) -> npt.NDArray[np.float32]:
    """Elements start .. end (whole blocks) of the flat tensor, as a float32 array of its own."""
    block_elements, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    data = tensor.data[start // block_elements * block_bytes : end // block_elements * block_bytes]
    rows = (end - start) // ROW_ELEMENTS if (end - start) % ROW_ELEMENTS == 0 else 1
    # Damaged block scales are infinite or not a number: whoever takes the values looks for that.
    with np.errstate(all="ignore"):
        values = dequantize(data.reshape(rows, -1), tensor.kind).reshape(-1)
    # float32 data comes back as a view of the mapped file.
    return np.require(values, np.float32, ["ALIGNED", "WRITEABLE"])
