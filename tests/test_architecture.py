"""The rules of docs/architecture.md, checked by reading the source: layers, rings, lengths, imports, words."""

import ast
import functools
import importlib
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "halfstep"
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Top layer first. A module imports from its own package and from the layers below, never upwards.
LAYERS = (
    "__main__", "cli", "report", "learning", "integrations", "comparison", "rehearsal", "train", "planning", "inspection", "watching", "data", "models", "jobs", "engine", "checkpoint", "backends", "optim",
    "scaling", "kernels", "check", "precision", "hardware", "events", "errors",
)  # fmt: skip
LEVEL = {name: level for level, name in enumerate(LAYERS)}
# Packages whose every module can be imported without torch, numpy, plotly or rich.
LIGHT = {"cli", "report", "check", "precision", "hardware", "events", "errors", "__main__", "__init__"}
HEAVY = {"torch", "rich", "numpy", "plotly", "jinja2", "safetensors"}
MAX_LINES = {"default": 400, "engine/engine.py": 300}
MAX_ENTRIES = 24
MAX_FILES_IN_PACKAGE = 26
MAX_FOLDERS = 3


def name_of(path):
    """The dotted name of a module."""
    parts = ("halfstep", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def layer_of(name):
    """The top package, or top module, of a dotted name."""
    return name.split(".")[1] if "." in name else "__init__"


def shown(path):
    """A path as a person reads it."""
    return str(path.relative_to(ROOT))


def is_typing_block(node):
    """Whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def is_print(node):
    """Whether a node calls print."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def is_module_name(node):
    """Whether a node is a string that names a module of the package."""
    return isinstance(node, ast.Constant) and node.value in MODULES and node.value != "halfstep"


def is_binding(node):
    """Whether a node gives a value a name."""
    return isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


@functools.cache
def nodes(path):
    """The nodes of a file that the tests look at: one walk serves all of them."""
    return tuple(
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom) or is_print(node) or is_module_name(node) or is_binding(node)
    )


def imports(path, *, at_import=False):
    """Every module a file imports, as dotted names: hidden in functions, for type checkers, or named to importlib."""
    for node in ast.parse(path.read_text()).body if at_import else nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        elif not at_import and is_module_name(node):
            yield node.value


@functools.cache
def graph(prefix="halfstep."):
    """Module -> the other modules of the package that it imports in any way."""
    return {
        name: {other for other in imports(path) if other in MODULES and other not in {name, "halfstep"}}
        for name, path in MODULES.items()
        if name.startswith(prefix)  # not halfstep itself: its lazy table of public names points everywhere, by design
    }


def rings(edges):
    """Groups of modules that import each other in a ring (Tarjan's strongly connected components)."""
    index, low, stack, components = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                components.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return components


def test_the_ring_finder_finds_rings():
    """Two modules that import each other are a ring, a chain is none."""
    assert rings({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert rings({"a": {"b", "c"}, "b": {"c"}}) == []


def test_no_import_ring():
    """No modules import each other in a ring, imports in functions, for type checkers and by name included."""
    assert rings(graph()) == []


def test_imports_go_down():
    """A module imports only from its own package and the layers below."""
    upwards = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if layer_of(other) != layer_of(name) and LEVEL[layer_of(other)] <= LEVEL[layer_of(name)]
    ]
    assert not upwards


def test_every_package_has_a_layer_and_is_described():
    """The layers, the tree and docs/architecture.md name the same packages."""
    entries = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and list(p.glob("*.py")))}
    entries -= {"__init__"}
    assert entries == set(LAYERS)
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    named = set(re.findall(r"^(?:\| )?`?([a-z_]+)(?:/|\.py)", section, re.MULTILINE))
    assert named == entries - {"__main__"}


def test_the_top_of_the_package_is_small():
    """A newcomer sees few entries at the top, few files in a package, and few levels of folders."""
    entries = {path.relative_to(PACKAGE).parts[0] for path in FILES} - {"__init__.py", "__main__.py"}
    assert len(entries) <= MAX_ENTRIES
    counts = defaultdict(int)
    for path in FILES:
        counts[path.parent] += path.name != "__init__.py"
    assert not {shown(p): n for p, n in counts.items() if n > MAX_FILES_IN_PACKAGE}
    assert not [shown(p) for p in FILES if len(p.relative_to(PACKAGE).parent.parts) > MAX_FOLDERS]


def test_files_are_short():
    """No file is longer than one idea needs."""
    lengths = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in FILES}
    assert not {p: n for p, n in lengths.items() if n > MAX_LINES.get(p, MAX_LINES["default"])}


def test_light_packages_need_no_torch():
    """What the commands load before they run imports nothing heavy at the top of a module."""
    heavy = [
        f"{shown(p)} imports {name}"
        for p in FILES
        if p.relative_to(PACKAGE).parts[0].removesuffix(".py") in LIGHT
        for name in imports(p, at_import=True)
        if name.split(".")[0] in HEAVY
    ]
    assert not heavy


def test_optional_packages_stay_in_their_file():
    """Only Triton files import triton, and only one file imports deepspeed."""
    roots = {p: {name.split(".")[0] for name in imports(p)} for p in FILES}
    assert not [shown(p) for p in FILES if "triton" in roots[p] and not p.name.endswith("_triton.py")]
    library = "src/halfstep/backends/deepspeed/library.py"
    assert not [shown(p) for p in FILES if "deepspeed" in roots[p] and shown(p) != library]


def test_only_reports_and_commands_print():
    """Below report/ nothing prints; values have a good str and events go through one logger."""
    printing = [
        shown(p)
        for p in FILES
        if p.relative_to(PACKAGE).parts[0] not in {"cli", "report"}
        for node in nodes(p)
        if is_print(node)
    ]
    assert not printing


def test_no_drawer_for_everything():
    """No module is called utils, common, helpers or misc."""
    drawers = {"utils", "common", "helpers", "misc"}
    assert not [shown(p) for p in FILES if set(p.relative_to(PACKAGE).with_suffix("").parts) & drawers]


def test_source_is_ascii():
    """Source files are plain ASCII."""
    assert not [shown(p) for p in FILES + TESTS if not p.read_text().isascii()]


def test_values_are_named_after_what_they_are():
    """No variable or parameter is called `found`, `told`, `held` or the like, which say nothing about the value."""
    vague = {"found", "told", "said", "held", "kept", "seen", "given"}
    offenders = [
        f"{shown(p)}:{node.lineno}"
        for p in FILES
        for node in nodes(p)
        if is_binding(node) and (node.arg if isinstance(node, ast.arg) else node.id) in vague
    ]
    assert not offenders


def test_the_prose_uses_standard_terms():
    """User-visible text, docstrings and comments avoid words that a PyTorch engineer would not write."""
    words = re.compile(
        r"\b(mend(s|ed|ing)?|anew|beside|how-manieth|whole or absent|loud stop|fullest moment|of one's own|at the (most|least)|"
        r"refuse[sd]?|refusal|go(es|ing)? on (with|from|under|where)|is no (size|device|key|number))\b",
        re.IGNORECASE,
    )
    pages = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    pages += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py")), *FILES]
    offenders = [
        f"{shown(page)}:{number}: {match.group()}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), start=1)
        for match in words.finditer(line)
    ]
    assert not offenders


def test_every_test_states_its_property():
    """Every test has a docstring that states the property."""
    silent = [
        f"{shown(p)}::{node.name}"
        for p in TESTS
        if p.name.startswith("test_")
        for node in ast.parse(p.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not silent


def test_tests_mirror_the_source():
    """Every folder of tests is a package of the source."""
    folders = {p.parent.relative_to(ROOT / "tests") for p in TESTS if p.name.startswith("test_")} - {Path()}
    assert not [str(f) for f in folders if not (PACKAGE / f).is_dir()]


def test_public_names_are_what_the_package_exposes():
    """`__all__`, the lazy table and the names a type checker sees are the same set, and each one loads."""
    import halfstep

    typed = set()
    for node in nodes(PACKAGE / "__init__.py"):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "halfstep":
            typed |= {alias.name for alias in node.names}
    assert set(halfstep.__all__) == typed | {"__version__"}
    for name in halfstep.__all__:
        assert getattr(halfstep, name) is not None


def resolves(dotted):
    """Whether a dotted name is a module of the package, or something that can be reached from one."""
    module = dotted
    while module not in MODULES:
        module = module.rpartition(".")[0]
    if module.startswith("halfstep.integrations."):  # their libraries need not be installed
        exported = f'"{dotted[len(module) + 1 :].partition(".")[0]}"'
        return dotted == module or exported in re.search(r"__all__ = \[.*\]", MODULES[module].read_text())[0]
    value = importlib.import_module(module)
    for name in dotted[len(module) + 1 :].split(".") if dotted != module else ():
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def test_public_names_of_the_docs_import():
    """Every `halfstep.name` and `from halfstep... import name` in the README, the docs and the examples exists."""
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
    missing = []
    for page in texts:
        text = page.read_text()
        for module, names in re.findall(r"^\s*from (halfstep[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
            missing += [f"{page.name}: {module}.{n}" for n in names.split(", ") if not resolves(f"{module}.{n}")]
        for dotted in set(re.findall(r"(?<!tool\.)\bhalfstep(?:\.[A-Za-z_]\w*)+", text)):
            if not dotted.endswith((".py", ".git", ".toml", ".dtypes")) and not resolves(dotted):
                missing.append(f"{page.name}: {dotted}")
    assert not missing


def test_version_is_written_once_for_everyone():
    """pyproject and the package agree on the version."""
    import halfstep

    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    assert version == halfstep.__version__
