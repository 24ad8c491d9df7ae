"""Pages of the site that are made from other files: the README, records, examples, the command line, the public names.

A hook of MkDocs (`hooks` in mkdocs.yml). Pages under docs/ link to files of the repository as GitHub shows them
(`../examples/job.py`); here each linked file becomes a page of the site and the link is rewritten, so that the site is complete
without a repository next to it.
"""

from __future__ import annotations

import ast
import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(r"^<!-- .* -->\n", re.MULTILINE)  # notes to the tests
# File of the repository -> page of the site.
NAMED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
SOURCES = (".py", ".sh", ".toml", ".yaml", ".json")
# Page of the API -> its title and what it has; every public name must be on one of them.
API = {
    "engine": ("Engine and Job", ("Engine", "StepResult", "Job")),
    "precision": (
        "Precision",
        ("Policy", "LossScale", "probe", "Hardware", "choose", "Choice", "Format", "get_format", "set_tf32"),
    ),
    "optim": ("Optimizers", ("optim",)),
    "scaling": ("Loss scaling", ("LossScaler", "StaticScaler", "NoScaler", "GradScaler")),
    "observe": (
        "Compare, rehearse, watch, inspect",
        ("compare", "Comparison", "rehearse", "Rehearsal", "Watch", "Guard", "inspect"),
    ),
    "plan": ("Plan and check", ("plan", "find_batch_size", "check_path")),
    "data": ("Data and models", ("data", "models")),
    "errors": ("Errors", ("HalfstepError", "ExpectationError", "OverflowStop")),
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that no file under docs/ has."""
    pages = dict(api_pages())
    pages["commands.md"] = commands_page()
    pages["examples.md"] = examples_page()
    wanted = [*NAMED, *(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py"))]
    seen = set()
    texts = {path: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    for path, text in texts.items():
        wanted += [link for _, link in outside_links(text, path.parent)]
    while wanted:  # a record may link to another file
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        path = ROOT / name
        if path.suffix == ".md":
            text = path.read_text()
            wanted += [link for _, link in outside_links(text, path.parent)]
            pages[page_of(name)] = text
        elif path.suffix in SOURCES:
            language = {".py": "python", ".sh": "bash"}.get(path.suffix, path.suffix[1:])
            pages[page_of(name)] = f"# {name}\n\n````{language}\n{path.read_text()}````\n"
        else:  # data: as it is
            pages[name] = path.read_text()
    listed = set(nav_pages(config.nav or []))
    for uri, text in pages.items():
        page = File.generated(config, uri, content=text)
        if uri not in listed:
            page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site, and drop the notes to the tests."""
    source = {page_of(name): name for name in NAMED}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if page.file.src_uri.startswith(("benchmarks/", "examples/")):
        source = page.file.src_uri
    folder, here = (ROOT / source).parent, posixpath.dirname(page.file.src_uri)

    def relink(match: re.Match[str]) -> str:
        start, link, anchor, end = match.groups()
        target = name_in_repository(link, folder)
        if target is None or not (ROOT / target).exists():
            return match.group()
        if (ROOT / target).is_dir():
            return (
                f"{start[:-2]}]({posixpath.relpath('examples.md', here or '.')})"
                if target == "examples"
                else match.group()
            )
        uri = posixpath.relpath(page_of(target), here or ".")
        return f"{start}{uri}{anchor or ''}{end}"

    return outside_fences(DIRECTIVE.sub("", markdown), lambda text: LINK.sub(relink, text))


def outside_fences(text: str, change) -> str:
    """The text with a change made to what is not in a code block."""
    parts, end = [], 0
    for match in FENCE.finditer(text):
        parts += [change(text[end : match.start()]), match.group()]
        end = match.end()
    return "".join([*parts, change(text[end:])])


def name_in_repository(link: str, folder: Path) -> str | None:
    """The file that a relative link means, relative to the root of the repository."""
    if re.match(r"[a-z]+:", link):
        return None
    path = (folder / link).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None


def outside_links(text: str, folder: Path) -> list[tuple[str, str]]:
    """The links of a page to files that are not under docs/."""
    names = [
        (match.group(2), name_in_repository(match.group(2), folder)) for match in LINK.finditer(FENCE.sub("", text))
    ]
    return [(link, name) for link, name in names if name and not name.startswith("docs/") and (ROOT / name).is_file()]


def page_of(name: str) -> str:
    """The page of the site for a file of the repository."""
    if name in NAMED:
        return NAMED[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"{name}.md" if name.endswith(SOURCES) else name


def nav_pages(nav: list) -> list[str]:
    """Every page that the navigation of mkdocs.yml names."""
    pages = []
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        pages += nav_pages(value) if isinstance(value, list) else [value]
    return pages


def public_names() -> list[str]:
    """The names of `halfstep`, read from its source."""
    tree = ast.parse((ROOT / "src/halfstep/__init__.py").read_text())
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return [*ast.literal_eval(values["_HOME"]), *ast.literal_eval(values["_SUBMODULES"])]


def exported(module: str) -> list[str]:
    """The names in `__all__` of a module, read from its source."""
    folder = ROOT / "src" / module.replace(".", "/")
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    raise PluginError(f"{path} has no __all__")


def api_pages() -> dict[str, str]:
    """The reference from docstrings, one page per group of public names."""
    grouped = [name for _, names in API.values() for name in names]
    if sorted(grouped) != sorted(public_names()):
        raise PluginError(
            f"API of docs/site_pages.py differs from halfstep: {sorted(set(grouped) ^ set(public_names()))}"
        )
    pages, index = (
        {},
        [
            "# API",
            "",
            "The public names of `halfstep`. Everything else may change without notice.",
            "",
            "| page | names |",
            "|---|---|",
        ],
    )
    for slug, (title, names) in API.items():
        dotted = []
        for name in names:
            inside = exported(f"halfstep.{name}") if name in {"data", "models", "optim"} else []
            dotted += [f"halfstep.{name}.{member}" for member in inside] or [f"halfstep.{name}"]
        # The Engine is one class in two files; optimizers would repeat their base class.
        options = {"halfstep.Engine": "\n    options:\n      inherited_members: true"}
        pages[f"api/{slug}.md"] = "\n\n".join(
            [f"# {title}", *(f"::: {name}{options.get(name, '')}" for name in dotted)]
        )
        links = ", ".join(f"[`{name.removeprefix('halfstep.')}`]({slug}.md#{name})" for name in dotted)
        index.append(f"| [{title}]({slug}.md) | {links} |")
    pages["api/index.md"] = "\n".join(index)
    return pages


def commands_page() -> str:
    """What `halfstep COMMAND --help` prints, for every command."""
    commands = re.findall(r'^    "(\w+)": "', (ROOT / "src/halfstep/cli/__init__.py").read_text(), re.MULTILINE)
    parts = [
        "# Commands",
        "Every command prints this with `--help`. Exit codes: 0 success, 1 error, 2 wrong usage, 3 findings or a failed gate, 130 and 143 stopped by a signal after saving.",
    ]
    for command in commands:
        run = [sys.executable, "-m", "halfstep", command, "--help"]
        text = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT / "src").stdout  # noqa: S603
        parts += [f"## halfstep {command}", f"```text\n{text.rstrip()}\n```"]
    return "\n\n".join(parts)


def examples_page() -> str:
    """Each example with the first sentence of its docstring."""
    rows = [
        "# Examples",
        "",
        "Each is a complete program that runs on a CPU; a test runs them all.",
        "",
        "| program | |",
        "|---|---|",
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        first = (
            (ast.get_docstring(ast.parse(path.read_text())) or "")
            .split("\n\n")[0]
            .replace("\n", " ")
            .replace("|", "\\|")
        )
        rows.append(f"| [{path.name}](examples/{path.name}.md) | {first} |")
    return "\n".join(rows)
