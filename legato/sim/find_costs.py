"""Finds what steps cost: in a file, or in one of those that come with Legato."""

from importlib.resources import files
from pathlib import Path

from legato.engine.cost_file import CostFile, read_cost_file
from legato.errors import ConfigError

DEFAULT = "gemma3-270m"
"""The demo model on two cores."""


def find_costs(name_or_path: str) -> CostFile:
    """A packaged name, or a .json file. Raises `ConfigError` if it is neither, or the file is damaged."""
    if name_or_path.endswith(".json"):
        return read_cost_file(Path(name_or_path))
    folder = Path(str(files("legato.sim.costs")))
    names = sorted(path.stem for path in folder.glob("*.json"))
    if name_or_path not in names:
        raise ConfigError(f"no costs {name_or_path!r}; give one of {', '.join(names)}, or a .json file")
    return read_cost_file(folder / f"{name_or_path}.json")


def in_words(costs: CostFile) -> str:
    """Whose steps these are."""
    return f"{costs.model} on {costs.measured_on.get('machine', 'a machine that is not named')}"
