"""One model in one GGUF file, or in the parts of a split one.

It knows the `split.*` keys; what one file holds is read by `gguf_file`.
"""

from pathlib import Path

from legato.errors import ModelError
from legato.models.gguf_file import GgufFile
from legato.models.split_name import first_part, split_name

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def open_gguf(path: Path) -> GgufFile:
    """The model in the file at `path`, with the tensors of all parts if it is a part of a split one.

    The metadata is the first part's. Raises ModelError: a part is missing, damaged or not of this model.
    """
    split = split_name(path.name)
    if split is None:
        file = GgufFile(path)
        if (count := file.get(_COUNT, int, 1)) != 1:
            number = file.get(_NUMBER, int, 0) + 1
            raise ModelError(
                f"{path}: is part {number} of {count} of a split model; "
                f"its name must end in -{number:05}-of-{count:05}.gguf, beside the other parts"
            )
        return file
    first = first_part(path.parent, split)
    whole = GgufFile(first)
    _check_part(whole, whole, 1, split.count)
    for number, name in enumerate(split.parts[1:], start=2):
        part = GgufFile(first.with_name(name))
        _check_part(part, whole, number, split.count)
        if twice := part.tensors.keys() & whole.tensors.keys():
            raise ModelError(f"{part.path}: tensor {min(twice)[:80]!r} is also in an earlier part")
        whole.tensors.update(part.tensors)
    expected = whole.get(_TENSORS, int, len(whole.tensors))
    if expected != len(whole.tensors):
        raise ModelError(
            f"{whole.path}: {_TENSORS} is {expected}, "
            f"but the {split.count} parts hold {len(whole.tensors)} tensors"
        )
    return whole


def _check_part(part: GgufFile, first: GgufFile, number: int, count: int) -> None:
    """Refuse a part that says of itself that it is another one, or that belongs to another model."""
    # A model that was never split may have the name of one part of one.
    default = {_NUMBER: 0, _COUNT: 1} if count == 1 else {}
    for key, expected in ((_NUMBER, number - 1), (_COUNT, count)):
        found = part.get(key, int, default.get(key))
        if found != expected:
            raise ModelError(f"{part.path}: {key} is {found}; by its name it must be {expected}")
    for key, value in part.metadata.items():
        if key != _NUMBER and (key not in first.metadata or first.metadata[key] != value):
            raise ModelError(
                f"{part.path}: {key[:80]!r} differs from that of {first.path.name}: not one model"
            )
