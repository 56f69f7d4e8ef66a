"""The arithmetic of integer products, as vector code. Knows addresses only.

A row of numbers becomes integers group by group: some consecutive inputs share one scale, the largest size
among them over the largest integer. A product of two rows is then, group by group, a sum of integer products,
times both scales, added to what the groups before gave. Integer sums are exact, in whatever order and by
whatever instruction; groups are added first to last. So no bit of a product depends on anything but its two
rows.

Integers lie in units of 4 bytes, as the instructions want them: pairs of 16 bits or quads of 8 bits of
consecutive inputs. Rows lie in tiles, outputs in panels; each of both lies group after group, and a group as
[unit][row or output] and then one scale for each, as a float for rows and in 16 bits for outputs.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from legato.kernels.vector import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF,
    HALVES,
    INT,
    INTS,
    LANES,
    ROUND,
    SHORT,
    VECTOR_BYTES,
    Value,
    absolute,
    has_features,
    has_wide_registers,
    intrinsic_from,
)

_AHEAD = 8192
"""How far ahead weights are fetched, in bytes: a few rows alone cannot hide the memory's delay."""
_HALF_VECTOR = ir.VectorType(INT, LANES // 2)
_TINY = 1e-30
"""A group in which nothing is larger counts as zeros."""
_SHRUNK = 2.0**-10
"""Rows' scales are stored times this, those of weights divided by it: 16 bits would cut small ones short."""

INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "quads512": ("avx512vnni",),
    "quads256": ("avxvnni",),
    "pairs512": ("avx512vnni",),
    "pairs256": ("avxvnni",),
    "add512": ("avx512bw",),
    "add256": ("avx2",),
    "plain": (),
}
"""What multiplies integers and adds them up, and what the processor must have for it; best first.

The first two take quads, the others pairs. `add` adds in an instruction of its own; "plain" works anywhere.
"""


def instructions() -> list[str]:
    """Those that work here, best first."""
    return [name for name, features in INSTRUCTIONS.items() if has_features(*features)]


@dataclass(frozen=True, slots=True)
class Format:
    """How rows of weights and of inputs become integers, and how they lie in memory on this machine."""

    group: int
    """Inputs that share a scale, a multiple of 16."""
    weight_max: int
    """Weights are -weight_max .. weight_max."""
    input_max: int
    instruction: str

    @property
    def weight_limit(self) -> float:
        """Weights must be smaller: their scales are kept in 16 bits."""
        return 65504 * _SHRUNK * self.weight_max

    @property
    def is_quads(self) -> bool:
        """Weights have 128 added then, for the instruction takes one side unsigned."""
        return self.instruction.startswith("quads")

    @property
    def units(self) -> int:
        """In a group."""
        return self.group // (4 if self.is_quads else 2)

    @property
    def weight_unit(self) -> int:
        """Bytes of a unit of weights: pairs of small integers are widened when they are read."""
        return 4 if self.is_quads or self.weight_max > 127 else 2

    @property
    def panel_vectors(self) -> int:
        return 2 if has_wide_registers() else 1

    @property
    def panel(self) -> int:
        """Outputs in a panel: as many as a tile can sum in registers."""
        return self.panel_vectors * LANES

    @property
    def tiles(self) -> tuple[int, ...]:
        """How many rows a tile may have, most first: as measured, with groups of quads ending so often."""
        if not has_wide_registers():
            return (6, 4, 2, 1)
        return (8, 4, 2, 1) if self.is_quads else (12, 8, 4, 2, 1)

    @property
    def weight_group(self) -> int:
        """Bytes of a panel's group."""
        return self.units * self.panel * self.weight_unit + 2 * self.panel

    @property
    def row_group(self) -> int:
        """Bytes of a row's group in a tile. With quads it ends with what takes the added 128 out again."""
        return 4 * (self.units + 1 + self.is_quads)


def w16(instruction: str | None = None) -> Format:
    """12-bit weights and 14-bit inputs: the most whose products, 128 of them, add up in 32 bits."""
    usable = [name for name in instructions() if not name.startswith("quads")]
    return Format(128, 2047, 8191, instruction or usable[0])


def w8(instruction: str | None = None) -> Format:
    """8-bit weights and inputs. The groups are those of GGUF's Q8_0, whose weights stay as they are."""
    return Format(32, 127, 127, instruction or instructions()[0])


def _halves(name: str, acc: Value, kind: ir.Type, *others: Value) -> Value:
    """An instruction for half of the lanes, twice."""
    half = LANES // 2
    low, high = (
        tuple(value.lanes(*range(first, first + half)) for value in (acc, *others)) for first in (0, half)
    )
    return _one(name, low, kind).concat(_one(name, high, kind))


def _one(name: str, values: tuple[Value, ...], kind: ir.Type) -> Value:
    acc, weights, inputs = values
    if kind is None:  # adds by itself
        return acc.call(name, weights, inputs)
    return acc + weights.bitcast(kind).call(name, inputs.bitcast(kind), returns=acc.code.type)


def _dot(instruction: str, acc: Value, weights: Value, inputs: Value) -> Value:
    """acc + the products of units, added up within each lane."""
    values = (acc, weights, inputs)
    match instruction:
        case "quads512":
            return _one("llvm.x86.avx512.vpdpbusd.512", values, None)
        case "quads256":
            return _halves("llvm.x86.avx512.vpdpbusd.256", acc, None, weights, inputs)
        case "pairs512":
            return _one("llvm.x86.avx512.vpdpwssd.512", values, None)
        case "pairs256":
            return _halves("llvm.x86.avx512.vpdpwssd.256", acc, None, weights, inputs)
        case "add512":
            return _one("llvm.x86.avx512.pmaddw.d.512", values, ir.VectorType(SHORT, 2 * LANES))
        case "add256":
            return _halves("llvm.x86.avx2.pmadd.wd", acc, ir.VectorType(SHORT, LANES), weights, inputs)
        case _:
            low = ((weights << 16) >> 16) * ((inputs << 16) >> 16)
            return acc + low + (weights >> 16) * (inputs >> 16)


def multiplier(fmt: Format) -> Any:
    """The function that adds a tile of `rows` rows times a panel to sums [rows][panel] floats."""

    @intrinsic_from
    def multiply(rows: Value, sums: Value, tile: Value, weights: Value, num_groups: Value) -> None:
        rows.switch(
            {
                count: lambda count=count: num_groups.for_each(  # type: ignore[misc]
                    1,
                    lambda group: _add_group(
                        fmt,
                        count,
                        sums,
                        tile + group * (count * fmt.row_group),
                        weights + group * fmt.weight_group,
                    ),
                )
                for count in fmt.tiles
            }
        )

    return multiply


def _add_group(fmt: Format, rows: int, sums: Value, tile: Value, weights: Value) -> None:
    """One group's part of sums."""
    vectors = range(fmt.panel_vectors)
    scales = tile + fmt.units * rows * 4
    starts = [
        (scales + 4 * (rows + row)).load(INT).splat() if fmt.is_quads else sums.like(0, INTS)
        for row in range(rows)
        for _ in vectors
    ]

    def add(first: Value, *dots: Value) -> list[Value]:
        return _add_units(fmt, rows, first, tile, weights, list(dots))

    dots = tile.like(0).range_loop(tile.like(fmt.units), _units_at_once(rows), add, *starts)
    ends = weights + fmt.units * fmt.panel * fmt.weight_unit
    factors = [(ends + 2 * LANES * v).load(HALVES).cast("fpext", FLOATS) for v in vectors]
    for row in range(rows):
        scale = (scales + 4 * row).load(FLOAT).splat()
        for v in vectors:
            place = sums + (row * fmt.panel + v * LANES) * 4
            dot = dots[row * len(vectors) + v].cast("sitofp", FLOATS)
            place.store((dot * scale).fma(factors[v], place.load()))


def _units_at_once(rows: int) -> int:
    return 4 if rows <= 4 else 2


def _add_units(
    fmt: Format, rows: int, first: Value, tile: Value, weights: Value, dots: list[Value]
) -> list[Value]:
    vectors, line = range(fmt.panel_vectors), fmt.panel * fmt.weight_unit
    for unit in range(_units_at_once(rows)):
        places = [weights + first * line + (unit * line + v * LANES * fmt.weight_unit) for v in vectors]
        for place in places:
            (place + _AHEAD).prefetch()
        columns = [_load_weights(fmt, place) for place in places]
        for row in range(rows):
            inputs = (tile + first * (4 * rows) + (unit * rows + row) * 4).load(INT).splat()
            for v in vectors:
                i = row * len(vectors) + v
                dots[i] = _dot(fmt.instruction, dots[i], columns[v], inputs)
    return dots


def _load_weights(fmt: Format, address: Value) -> Value:
    if fmt.weight_unit == 4:
        return address.load(INTS)
    small = address.load(ir.VectorType(BYTE, 2 * LANES))
    return small.cast("sext", ir.VectorType(SHORT, 2 * LANES)).bitcast(INTS)


def _largest(source: Value, count: int) -> Value:
    """The largest size among `count` floats; NaN if there is one, for its bits are above infinity's."""
    largest = source.like(0, INTS)
    for i in range(count // LANES):
        size = absolute((source + i * VECTOR_BYTES).load()).bitcast(INTS)
        largest = size.select(largest < size, largest)
    return largest.call(f"llvm.vector.reduce.smax.v{LANES}i32", returns=INT).bitcast(FLOAT)


def _store_integers(
    to: Value, stride: Value, source: Value, inverse: Value, fmt: Format, *, is_weight: bool
) -> Value:
    """A group as units at `to`, to + stride, ..; returns the integers' sums by lane."""
    total = to.like(0, INTS)
    narrow, unit = SHORT, INT
    if fmt.is_quads or (is_weight and fmt.weight_unit == 2):
        narrow = BYTE
        unit = INT if fmt.is_quads else SHORT
    per_vector = LANES // (4 if fmt.is_quads else 2)
    for i in range(fmt.group // LANES):
        scaled = (source + i * VECTOR_BYTES).load() * inverse.splat()
        whole = (scaled + ROUND).bitcast(INTS) - scaled.floats(ROUND).bitcast(INTS)
        total = total + whole
        if is_weight and fmt.is_quads:
            whole = whole + 128
        units = whole.cast("trunc", ir.VectorType(narrow, LANES)).bitcast(ir.VectorType(unit, per_vector))
        for j in range(per_vector):
            (to + stride * (i * per_vector + j)).store(units.lane(j))
    return total


def row_packer(fmt: Format) -> Any:
    """The function that makes integers of a row's group: of floats at `source`, for row `row` of a tile."""

    @intrinsic_from
    def pack_row(to: Value, row: Value, rows: Value, source: Value) -> None:
        largest = _largest(source, fmt.group)
        is_zero = largest < _TINY
        scale = largest.like(0.0).select(is_zero, largest / largest.like(float(fmt.input_max)))
        inverse = largest.like(0.0).select(is_zero, largest.like(float(fmt.input_max)) / largest)
        total = _store_integers(to + row * 4, rows * 4, source, inverse, fmt, is_weight=False)
        place = to + (rows * fmt.units + row) * 4
        place.store(scale * _SHRUNK)
        if fmt.is_quads:
            whole = total.call(f"llvm.vector.reduce.add.v{LANES}i32", returns=INT)
            (place + rows * 4).store(whole * -128)

    return pack_row


def weight_packer(fmt: Format) -> Any:
    """The function that makes integers of a group of an output's weights: of floats, for a panel's output."""

    @intrinsic_from
    def pack_weights(to: Value, output: Value, source: Value) -> None:
        largest = _largest(source, fmt.group)
        top = largest.like(fmt.weight_max * _SHRUNK)
        scale = (largest / top).cast("fptrunc", HALF)
        # Rounded up: or else the largest would not fit.
        next_up = (scale.bitcast(SHORT) + 1).bitcast(HALF)
        is_small = (scale.cast("fpext", FLOAT) * top) < largest
        scale = next_up.select(is_small, scale)
        wide = scale.cast("fpext", FLOAT) * _SHRUNK
        inverse = largest.like(0.0).select(largest < _TINY, largest.like(1.0) / wide)
        stride = to.like(fmt.panel * fmt.weight_unit)
        place = to + output * fmt.weight_unit
        _store_integers(place, stride, source, inverse, fmt, is_weight=True)
        (to + fmt.units * fmt.panel * fmt.weight_unit + output * 2).store(scale)

    return pack_weights


def weight_reader(fmt: Format) -> Any:
    """The function that makes floats of a group of an output's weights."""
    per_unit = fmt.group // fmt.units
    size = fmt.weight_unit // per_unit

    @intrinsic_from
    def read_weights(to: Value, output: Value, source: Value) -> None:
        place = source + fmt.units * fmt.panel * fmt.weight_unit + output * 2
        scale = place.load(HALF).cast("fpext", FLOAT) * _SHRUNK

        def read(unit: Value) -> None:
            at = source + unit * (fmt.panel * fmt.weight_unit) + output * fmt.weight_unit
            for i in range(per_unit):
                small = (at + i * size).load(SHORT if size == 2 else BYTE)
                whole = small.cast("zext", INT) - 128 if fmt.is_quads else small.cast("sext", INT)
                (to + unit * (4 * per_unit) + 4 * i).store(whole.cast("sitofp", FLOAT) * scale)

        to.like(fmt.units).for_each(1, read)

    return read_weights


W16, W8 = w16(), w8()
multiply_w16, multiply_w8 = multiplier(W16), multiplier(W8)
pack_row_w16, pack_row_w8 = row_packer(W16), row_packer(W8)
pack_weights_w16, pack_weights_w8 = weight_packer(W16), weight_packer(W8)
read_weights_w16, read_weights_w8 = weight_reader(W16), weight_reader(W8)
