"""The house rules of docs/house.md, held by reading the source: floors, lengths, imports, words."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "halfstep"
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Top floor first. A module may import from its own floor and from those below it, never upwards.
FLOORS = [
    ["__main__"],
    ["cli"],
    ["report"],
    ["comparison"],
    ["train", "export"],
    ["planning"],
    ["targets"],
    ["builtin_jobs"],
    ["target_files", "models", "data"],
    ["engine"],
    ["engine_state"],
    ["engine_checks"],
    ["job", "checkpoint_folder"],
    ["checkpoint"],
    ["checkpoint_files", "tree"],
    ["tensorfile"],
    ["release"],
    ["steps"],
    ["casting", "optim", "ema", "buffers", "backends", "window", "result", "compiling"],
    ["region", "truth"],
    ["gradscaler"],
    ["scaler"],
    ["scaler_state", "readback"],
    ["kernels"],
    ["check"],
    ["measure"],
    ["choice"],
    ["topics"],
    ["policy"],
    ["policy_deepspeed"],
    ["deepspeed_modes"],
    ["deepspeed_keys", "policy_names"],
    ["hardware"],
    ["runlog"],
    ["environment", "devices", "jsonc", "lossscale", "onednn", "tf32"],
    ["formats", "torch_build"],
    ["events"],
    ["errors"],
]
LEVEL = {name: len(FLOORS) - i for i, floor in enumerate(FLOORS) for name in floor}
NEEDS_TORCH = {
    "comparison", "planning", "train", "export", "builtin_jobs", "models", "data", "engine", "engine_state", "engine_checks", "checkpoint", "checkpoint_folder",
    "tree", "tensorfile", "release", "steps", "casting", "optim", "ema", "region", "buffers", "backends", "window", "compiling", "gradscaler", "scaler",
    "readback", "kernels",
}  # fmt: skip
NO_TORCH_AT_IMPORT = set(LEVEL) - NEEDS_TORCH | {"__init__"}
MAX_LINES = 400


def room(path):
    """The floor plan's name for a file: its top folder, or its own stem."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path, *, top_level_only=False):
    """Every module a file imports, as dotted names."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    # `if TYPE_CHECKING:` blocks are read by type checkers alone and bind no module to another.
    typing_only = {n for block in tree.body if _is_typing_block(block) for n in ast.walk(block)}
    for node in nodes:
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "halfstep":
                yield from (f"halfstep.{alias.name}" for alias in node.names)


def _is_typing_block(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def ids(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_file_is_short(path):
    """No file is longer than one idea needs."""
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", [f for f in FILES if f.name != "__init__.py" or f.parent != PACKAGE], ids=ids)
def test_imports_go_down(path):
    """A module imports only from its own floor and those below."""
    assert room(path) in LEVEL, f"{room(path)} has no floor: add it to FLOORS"
    for name in imports(path):
        if name.startswith("halfstep."):
            other = name.split(".")[1]
            if other in LEVEL:
                assert other == room(path) or LEVEL[other] < LEVEL[room(path)], f"{ids(path)} imports {name}"


@pytest.mark.parametrize("path", [f for f in FILES if room(f) in NO_TORCH_AT_IMPORT], ids=ids)
def test_no_torch_at_import(path):
    """These modules can be imported where torch is not installed."""
    heavy = {"torch", "rich", "numpy", "plotly"}
    assert not {name.split(".")[0] for name in imports(path, top_level_only=True)} & heavy


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_optional_packages_stay_in_their_file(path):
    """Only Triton files import triton, and only one file imports deepspeed."""
    roots = {name.split(".")[0] for name in imports(path)}
    assert "triton" not in roots or path.name.endswith("_triton.py")
    assert "deepspeed" not in roots or ids(path).endswith("backends/deepspeed.py")


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_only_reports_and_commands_write_to_the_screen(path):
    """Below report/ nothing prints; values have a good str and events go through one logger."""
    if room(path) in {"cli", "report"}:
        return
    calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [c for c in calls if isinstance(c, ast.Name) and c.id == "print"]


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_drawer_for_everything(path):
    """No module is called utils, common, helpers or misc."""
    assert not set(path.relative_to(PACKAGE).with_suffix("").parts) & {"utils", "common", "helpers", "misc"}


@pytest.mark.parametrize("path", FILES + TESTS, ids=ids)
def test_source_is_ascii(path):
    """Source files are plain ASCII."""
    path.read_text().encode("ascii")


@pytest.mark.parametrize("path", [t for t in TESTS if t.name.startswith("test_")], ids=ids)
def test_every_test_says_what_it_holds(path):
    """Every test has a docstring that states the property."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_public_names_are_what_the_package_exposes():
    """`__all__`, the lazy table and the names a type checker sees are the same set, and each one loads."""
    import halfstep

    typed = set()
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "halfstep":
            typed |= {alias.name for alias in node.names}
    assert set(halfstep.__all__) == typed | {"__version__"}
    for name in halfstep.__all__:
        assert getattr(halfstep, name) is not None


def test_version_is_written_once_for_everyone():
    """pyproject and the package agree on the version."""
    import halfstep

    assert (
        re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
        == halfstep.__version__
    )


def test_every_module_is_in_the_readme_tree():
    """The README's map of the source names every room of the house."""
    readme = (ROOT / "README.md").read_text()
    missing = {room(f) for f in FILES} - {"__init__"} - set(re.findall(r"[a-z0-9_]+", readme))
    assert not missing
