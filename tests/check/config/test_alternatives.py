"""The literals that an expression may be."""

import ast

import pytest

from halfstep.check.config.alternatives import Alternatives
from halfstep.check.script.syntax.children import all_nodes


def values(text):
    """The literals that the argument of `use(...)` may be."""
    nodes = all_nodes(ast.parse(text))
    call = next(n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "use")
    return [constant.value for constant in Alternatives(nodes).of(call.args[0])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("use(16 if amp else 32)", [16, 32]),
        ("p = 16 if amp else 32\nuse(p)", [16, 32]),
        ("if amp:\n    p = 16\nelse:\n    p = 32\nuse(p)", [16, 32]),
        ("use(args.p or 16)", [16]),
        ("parser.add_argument('-q', '--p', default=16)\nuse(args.p)", [16]),
        ("parser.add_argument('--q', dest='p', default='16')\nuse(int(args.p))", ["16"]),
        ("parser.set_defaults(p=16)\nuse(parser.parse_args().p)", [16]),
        ("class C:\n    p: int = 16\nuse(cfg.p)", [16]),
        ("class C:\n    p: int = field(default=16)\nuse(cfg.p)", [16]),
        ("def f(a, p=16):\n    use(p)", [16]),
        ("def f(*, p=16):\n    use(p)", [16]),
        ("class C:\n    def __init__(self, p=16):\n        self.p = p\n    def run(self):\n        use(self.p)", [16]),
        ("@click.option('--p', default=16)\ndef f(p):\n    use(p)", [16]),
        ("d = {'p': 16}\nuse(d['p'])", [16]),
        ("d = dict(p=16)\nuse(d['p'])", [16]),
        ("d: dict[str, int] = dict(p=16)\nuse(d['p'])", [16]),
        ("d = {'trainer': dict(p=16)}\nuse(d['trainer']['p'])", [16]),
        ("d = dict(p=16)\nparser.add_argument('--p', type=int, default=d['p'])\nuse(args.p)", [16]),
        ("d = dict(p=16)\nuse(d.get('p', 32))", [16]),
        ("d = dict(q=16)\nuse(d.get('p', 32))", [32]),
    ],
)
def test_literals_of_branches_and_defaults(text, expected):
    """Both arms of a choice and the default of an option, a field or a parameter are possible."""
    assert values(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "use(other())",
        "def f(p):\n    use(p)",
        "def f(p=16):\n    if p == 16:\n        p = '16-mixed'\n    use(p)",
        "p = 16\np = f'{p}-mixed'\nuse(p)",
        "parser.add_argument('--p', default=16)\nargs.p = convert(args.p)\nuse(args.p)",
        "class A:\n    p = 16\nclass B:\n    p = 32\nuse(cfg.p)",
        "def g():\n    p = 16\ndef f():\n    use(p)",
        "d = dict(q=16)\nuse(d['p'])",
        "d = load(p=16)\nuse(d['p'])",
        "d = dict(p=16)\nuse(other['p'])",
    ],
)
def test_nothing_where_the_text_does_not_decide(text):
    """A variable that is also computed, or belongs to another function, has no literal."""
    assert values(text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p = 'fp32' if full else 'fp16'\nuse(p)", ["fp32", "fp16"]),
        ("p = 'fp32' if full else 'fp16'\nuse('no' if p == 'fp32' else p)", ["no", "fp16"]),
        ("use('fp32' if name == 'fp32' else 'no')", ["fp32", "no"]),
    ],
)
def test_a_literal_that_the_script_tests_for_is_replaced_by_it(text, expected):
    """What is written in the argument itself stays: no test can come after it."""
    nodes = all_nodes(ast.parse(text))
    call = next(n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "use")
    assert [constant.value for constant in Alternatives(nodes).untested(call.args[0])] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("parser.add_argument('--p', choices=['a', 'b'])\nuse(args.p)", ["a", "b"]),
        ("parser.add_argument('--p', choices=['a', 'b'])\nuse(args.p)\nif args.p == 'c':\n    other()", ["a", "b"]),
        ("parser.add_argument('--p', choices=['a', 'b'])\nuse(args.p if args.p != 'a' else 'b')", []),
        ("parser.add_argument('--p', choices=['a', 'b'])\nif args.p == 'a':\n    args.p = 'b'\nuse(args.p)", []),
        ("use(cfg.p)\nif cfg.p == 'a':\n    x()\nelif cfg.p == 'b':\n    y()", ["a", "b"]),
        ("use(cfg.p)\nif cfg.p == 'a':\n    x()\nelif cfg.p == 'b':\n    y()\nelse:\n    z()", []),
        ("use(cfg.p)\nif cfg.p == 'a':\n    x()\nelse:\n    raise ValueError", ["a"]),
        ("use(cfg.p)\nif cfg.p == 'a':\n    raise ValueError", []),
        ("if cfg.p == 'a':\n    x()\nuse(cfg.p)", []),
        ("use(cfg.p)\nif cfg.p == 'a' or cfg.p == 'b':\n    x()", []),
        ("use(cfg.p)\nif other.p == 'a':\n    x()", []),
    ],
)
def test_strings_that_the_script_is_written_for(text, expected):
    """Choices that nothing replaces, and tests below the use that no other branch answers."""
    nodes = all_nodes(ast.parse(text))
    call = next(n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "use")
    assert sorted(constant.value for constant in Alternatives(nodes).offered(call.args[0])) == expected


def test_a_variable_and_an_attribute_that_are_copies_of_each_other():
    """Copies in a circle end: what the variable is depends on something else."""
    circle = "p = cfg.p\nwhile True:\n    use(p)\n    if p != cfg.p:\n        cfg.p = p\n    p = {last}\n"
    assert values(circle.format(last="fallback(p)")) == []
    assert values(circle.format(last="'no'")) == []
    assert values("p = q\nq = p\nuse(p)") == []
    assert values("p = 'fp16'\nif full:\n    p = 'no'\nuse(p)") == ["fp16", "no"]


ENUM = "class Precision(str, Enum):\n    HALF = 'fp16'\n    BRAIN = 'bfloat16'\n"


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("def f(p: Precision):\n    run(p.value)\n", {"fp16", "bfloat16"}),
        ("class C:\n    p: 'Precision'\ndef f(c):\n    run(c.p.value)\n", {"fp16", "bfloat16"}),
        ("run(Precision[name].value)\n", {"fp16", "bfloat16"}),
        ("run(Precision(name).value)\n", {"fp16", "bfloat16"}),
        ("def f(p: Precision):\n    run('bf16' if p is Precision.BRAIN else p.value)\n", {"bf16", "fp16"}),
        ("def f(p: Other):\n    run(p.value)\n", set()),
    ],
)
def test_the_values_of_an_enum(use, expected):
    """Any member may be chosen, except those that a test handles."""
    nodes = list(ast.walk(ast.parse(ENUM + use)))
    call = next(n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "run")
    assert {literal.value for literal in Alternatives(nodes).of(call.args[0])} == expected
