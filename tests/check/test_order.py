"""The parts of `halfstep.check` import each other in one direction, the one its docstring shows."""

import re

import halfstep.check
from test_architecture import graph

# One line per layer, top first, as in the docstring of the package.
LAYERS = [
    line.split("  ")
    for line in re.findall(r"^    ((?:[a-z]+/?(?:  |(?= )))*[a-z]+/?) {2,}\S.*$", halfstep.check.__doc__, re.MULTILINE)
]
LEVEL = {part.rstrip("/"): level for level, parts in enumerate(LAYERS) for part in parts}


def part_of(module):
    """The module or sub-package directly in `halfstep.check`."""
    return module.split(".")[2]


def edges():
    """Pairs of modules of the package, importer first; hidden imports and importlib count."""
    inside = graph("halfstep.check.").items()
    return [(a, b) for a, others in inside for b in others if b.startswith("halfstep.check.")]


def test_the_docstring_names_every_part():
    """The map of the package is complete."""
    assert set(LEVEL) == {part_of(module) for module in graph("halfstep.check.")}


def test_parts_import_only_from_the_layers_below():
    """Rules import facts, facts import files, files import the base; nothing imports upwards or sideways."""
    assert not [
        f"{a} imports {b}" for a, b in edges() if part_of(a) != part_of(b) and LEVEL[part_of(a)] >= LEVEL[part_of(b)]
    ]
