"""Simulated runs of small scripts in tests."""

import ast
import textwrap

from halfstep.check.script.syntax.names import read_names
from halfstep.check.simulation.simulate import mishaps

START = "import contextlib\nimport torch\nfrom functools import partial\n"


def codes(text: str) -> list[str]:
    """The rules that runs of a script break, each once."""
    return sorted(set(every_code(text)))


def every_code(text: str) -> list[str]:
    """The rules that runs of a script break, once for each place."""
    tree = ast.parse(START + textwrap.dedent(text))
    imports = [(node, False) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sorted(mishap.code for mishap in mishaps(tree, read_names(imports).table))
