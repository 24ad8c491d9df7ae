"""Files to break the checker with: random bytes, the rules' own cases mutated, random Python that parses.

Everything comes from one number, so that a failure is that number. `survive` is the property: a file, whatever it
contains, ends in findings with places inside it, in every format, with its fixes applied or rejected.
"""

import ast
import copy
import json
import random
from xml.etree import ElementTree as ET

from halfstep.check.cases import source_of_case
from halfstep.check.files.document import language_of, located_source, read_document
from halfstep.check.files.source import Settings
from halfstep.check.fixing import fix_document
from halfstep.check.options import find_device
from halfstep.check.registry import all_rules
from halfstep.check.runner import FileResult, check_document
from halfstep.check.select import Selection
from halfstep.check.session import Outcome
from halfstep.report.check_diff import as_diff
from halfstep.report.check_github import as_github
from halfstep.report.check_gitlab import as_gitlab
from halfstep.report.check_json import as_json
from halfstep.report.check_junit import as_junit
from halfstep.report.check_sarif import as_sarif
from halfstep.report.check_tables import statistics_as_text
from halfstep.report.check_text import as_concise, as_text

ENDINGS = {"python": "a.py", "notebook": "a.ipynb", "json": "a.json", "yaml": "a.yaml", "toml": "a.toml"}

ODD = [
    "\0", "\ufeff", "\u2028", "\x0c", "\r", "\t", "\\\n", "\udc80".encode("utf-8", "surrogatepass").decode("latin-1"),
    "\u00e9", "\U0001f600", "\u202e", "'''", '"', "{", "}", "[", "]", "(", ")", "#", "//", "/*", "*/", ":", ",", "=",
    "- ", "&a ", "*a", "<<: *a", "!!python/object/apply:os.system [ls]", "%YAML 9.9", "---\n", "? ", "| ", "{{ x }}",
    "${X}", "auto", "null", "NaN", "1e999", "9" * 5000, "-0", "0x", "true", "float16", "enabled", "# halfstep: ignore[",
    "# halfstep: ignore[HS1", "// halfstep: ignore-file[]", "halfstep: ignore", "import *", "from . import x", "lambda: ",
    "async ", "await ", "yield ", "match x:\n case _: pass", "global scaler", "nonlocal x", "del scaler", "*", "**", ":=",
    "while True:\n", "for i in scaler:\n", "with autocast():\n", "self.", "scaler", "GradScaler()", "optimizer.step()",
    "scaler.update()", "loss.backward()", "\n", "\n\n", "    ", "(" * 250, "[" * 2000, "-" * 3000, "a." * 3000, "{" * 500,
    "[[" * 60, "- " * 300, "{a: " * 120, 'f"{x["a"]}"', "f'{x['a']:>{w['b']}}'", 'f"{', "type A[T] = int\n", "lazy import torch\n",
    "try: pass\nexcept A, B: pass\n", "def f[T: (int, str)](x): pass\n", "t'{x}'", "a.b.c = {d = [1, {e = 2}]}\n", "[[a.b]]\n", '"""',
    "[fp16]\n", "when = 1979-05-27 07:32:00Z\n",
]  # fmt: skip


TOML = """
train_micro_batch_size_per_gpu = 4
optimizer.type = "AdamW"
optimizer.params = {lr = 1e-4, "betas" = [0.9, 0.999]} # halfstep: ignore[HS2]

[fp16]
enabled = true
loss_scale = 0
[zero_optimization]
stage = 2
[[callbacks]]
name = 'watch'
"""
NEWER = """
import torch
type Batch[T] = dict[str, T]
scaler = torch.amp.GradScaler("cuda")
def train[T](loader: list[T]) -> None:
    for batch in loader:
        try:
            scaler.scale(model(batch)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            print(f"{batch["loss"]:.3f} {'\\n'.join(batch)} {f"{batch['x']}"}")
        except KeyError, ValueError:
            raise
"""


def seeds(folder=None):
    """Every case of every rule with its language, some of them as notebooks, and the files of a folder."""
    files = [("toml", TOML), ("python", NEWER)]
    for path in sorted(folder.rglob("*")) if folder else ():
        language = language_of(path.name)
        if language and path.is_file() and path.stat().st_size < 60_000:
            files.append((language, path.read_text(encoding="utf-8", errors="replace")))
    for rule in all_rules():
        for text in (*rule.bad, *rule.good):
            language = source_of_case(rule, text).language
            files.append((language, text))
            if language == "python" and len(files) % 5 == 0:
                cut = text.find("\n", len(text) // 2) + 1
                cells = [
                    {"cell_type": "code", "source": part} for part in (text[:cut].splitlines(keepends=True), text[cut:])
                ]
                files.append(("notebook", json.dumps({"cells": cells, "nbformat": 4}, indent=1)))
    return files


def mutant(number, pool):
    """One file: its language and bytes."""
    rng = random.Random(number)
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(list(ENDINGS)), rng.randbytes(rng.choice([0, 1, 10, 200, 4000]))
    language, text = rng.choice(pool)
    if kind < 0.35 and language == "python":
        return language, _random_python(rng, text, pool).encode("utf-8", "surrogatepass")
    for _ in range(rng.choice([1, 1, 2, 3, 8, 30])):
        text = _mutate(rng, text, pool)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1 and data:
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(rng.choice([1, 2, 8])) + data[at + rng.choice([0, 1, 5]) :]
    if rng.random() < 0.05:
        data = data.replace(b"\n", rng.choice([b"\r\n", b"\r", b"\x0c"]))
    return language, data


def _mutate(rng, text, pool):
    size = len(text)
    a, b = sorted((rng.randint(0, size), rng.randint(0, size)))
    b = min(b, a + rng.choice([1, 3, 20, 200]))
    lines = text.split("\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    choice = rng.randrange(11)
    if choice == 0:
        return text[:a] + text[b:]
    if choice == 1:
        return text[:a] + text[a:b] * rng.choice([2, 3, 50]) + text[b:]
    if choice in {2, 3}:
        return text[:a] + rng.choice(ODD) + text[b:]
    if choice == 4:
        return text[:a]
    if choice == 5:
        other = rng.choice(pool)[1]
        return text[:a] + other[rng.randint(0, len(other)) :]
    if choice == 6:
        lines[i], lines[j] = lines[j], lines[i]
    elif choice == 7:
        del lines[i]
    elif choice == 8:
        lines.insert(i, lines[j])
    elif choice == 9:
        lines[i] = rng.choice(["    ", "\t", " ", ""]) + lines[i].lstrip()
    else:
        return text[:a] + rng.choice([text[b:] + text[a:b], text[a:b][::-1] + text[b:]])
    return "\n".join(lines)


def _random_python(rng, text, pool):
    """A script that parses: statements of one case dropped, repeated, moved, wrapped and mixed with another's."""
    try:
        tree = ast.parse(text)
        other = ast.parse(
            next((t for _ in range(20) if (c := rng.choice(pool))[0] == "python" for t in [c[1]]), "x = 1")
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
    for _ in range(rng.choice([1, 2, 5, 12])):
        bodies = [n for n in ast.walk(tree) if isinstance(getattr(n, "body", None), list) and n.body]
        body = rng.choice(bodies).body
        strangers = [n for n in ast.walk(other) if isinstance(n, ast.stmt)]
        index = rng.randrange(len(body))
        choice = rng.randrange(7)
        if choice == 0 and len(body) > 1:
            del body[index]
        elif choice == 1:
            body.insert(index, copy.deepcopy(rng.choice(strangers)))
        elif choice == 2:
            body.insert(rng.randrange(len(body)), body.pop(index))
        elif choice == 3:
            body[index] = _wrap(rng, body[index])
        elif choice == 4:
            _swap_expressions(rng, tree)
        elif choice == 5:
            body.insert(index, copy.deepcopy(body[index]))
        else:
            names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
            if len(names) > 1:
                rng.choice(names).id = rng.choice(names).id
    try:
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    except (ValueError, RecursionError, AttributeError, TypeError):
        return text


def _wrap(rng, statement):
    frame = rng.choice(
        [
            "if use_amp:\n    pass\nelse:\n    pass", "for i in range(3):\n    pass", "while x:\n    pass",
            "with torch.autocast('cuda'):\n    pass", "try:\n    pass\nexcept Exception:\n    raise\nfinally:\n    pass",
            "def helper(scaler, loss):\n    pass", "class Trainer:\n    pass", "async def f():\n    pass",
            "match x:\n    case 1:\n        pass", "with torch.no_grad(), ctx:\n    pass",
        ]
    )  # fmt: skip
    new = ast.parse(frame).body[0]
    (new.cases[0] if isinstance(new, ast.Match) else new).body = [statement]
    return new


def _swap_expressions(rng, tree):
    """Replace an argument of a call with another expression of the script."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and (n.args or n.keywords)]
    values = [n for n in ast.walk(tree) if isinstance(n, ast.expr) and not isinstance(n, ast.Starred | ast.Slice)]
    if calls and values:
        call = rng.choice(calls)
        value = copy.deepcopy(rng.choice(values))
        for name in ast.walk(value):
            if hasattr(name, "ctx"):
                name.ctx = ast.Load()
        if call.args:
            call.args[rng.randrange(len(call.args))] = value
        else:
            rng.choice(call.keywords).value = value


def survive(language, data, *, gpu=False, preview=True):
    """Raise if the checker fails on this file; otherwise return the number of findings."""
    path = ENDINGS[language]
    settings = Settings(gpu=find_device("t4") if gpu else None, gpu_origin="--gpu t4" if gpu else "")

    def check(document):
        return check_document(document, settings, Selection(preview=preview))

    document = read_document(path, data, language)
    findings = check(document)
    lines = document.source.text.split("\n")
    for finding in findings:
        assert finding.code != "HS006", finding.message
        assert finding.line >= 1
        assert finding.column >= 1
        if finding.cell is None and document.problem is None:
            assert finding.line <= len(lines), finding
            assert finding.column <= len(lines[finding.line - 1]) + 2, finding
    show(Outcome((FileResult(path, findings, located_source(document)),), 1), document)
    for unsafe in (False, True):
        done = fix_document(document, findings, check, unsafe=unsafe)
        show(Outcome((FileResult(path, done.findings, located_source(done.after)),), 1, (done,)), done.after)
        if not done.applied:
            assert done.after is document
    return len(findings)


def show(outcome, document):
    """Render an outcome in every format; those for machines must parse, with regions inside the file."""
    as_text(outcome).encode("utf-8", "backslashreplace")
    as_concise(outcome).encode("utf-8", "backslashreplace")
    json.loads(as_json(outcome))
    json.loads(as_gitlab(outcome))
    ET.fromstring(as_junit(outcome).encode("utf-8"))
    as_github(outcome)
    as_diff(outcome)
    statistics_as_text(outcome)
    lines = document.raw.split("\n")
    for result in json.loads(as_sarif(outcome))["runs"][0]["results"]:
        region = result["locations"][0]["physicalLocation"]["region"]
        assert region["startLine"] >= 1
        assert region["startColumn"] >= 1
        if document.notebook is not None:
            assert region["startLine"] <= len(lines), region
            assert region["startColumn"] <= len(lines[region["startLine"] - 1]) + 1, region
