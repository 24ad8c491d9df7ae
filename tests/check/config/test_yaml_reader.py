"""The YAML reader: PyYAML's own values, with places, and bombs that stay small."""

import contextlib
from itertools import pairwise

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.config.yaml_reader import parse_yaml
from halfstep.errors import SettingError
from halfstep.precision.node import UNKNOWN, Block, Items, Scalar, is_placeholder, walk

KEYS = st.text(alphabet="abcdefgh_", min_size=1, max_size=6).filter(
    lambda key: yaml.safe_load(key) == key and not is_placeholder(key)  # a template's `__name__` is no key
)
WORDS = st.text(alphabet="abc 0123\u00e9\u4e2d\U0001f600", max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def plain(node):
    if isinstance(node, Block):
        return {entry.key: plain(entry.value) for entry in node.entries}
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return node.value


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.booleans())
def test_reads_what_pyyaml_reads(value, flow):
    """Every document gives PyYAML's values, in block and in flow style."""
    (root,) = parse_yaml(yaml.safe_dump(value, default_flow_style=flow), "x")
    assert plain(root) == value


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_every_scalar_stands_at_its_place(value):
    """The characters of a scalar's span load as its value."""
    text = yaml.safe_dump(value, allow_unicode=True)
    (root,) = parse_yaml(text, "x")
    for node in walk(root):
        if isinstance(node, Scalar) and not isinstance(node.value, str):
            assert yaml.safe_load(text[node.span.start : node.span.end]) == node.value
        for entry in node.entries if isinstance(node, Block) else ():
            assert text[entry.key_span.start : entry.key_span.end].strip("'\"") == entry.key


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.booleans())
def test_both_parsers_of_pyyaml_give_the_same_places(value, flow):
    """Where PyYAML was built without libyaml, nothing differs but the time."""
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    fast = parse_yaml(text, "x")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(yaml, "CSafeLoader", raising=False)
        slow = parse_yaml(text, "x")
    assert [n.span for root in fast for n in walk(root)] == [n.span for root in slow for n in walk(root)]


def test_yaml_1_1_traps_are_read_as_pyyaml_does():
    """`no` is false, 1e-5 is a text, and quotes keep a word a word."""
    (root,) = parse_yaml("a: no\nb: 1e-5\nc: 'no'\nd: 0x10\ne: ${x}\n", "x")
    assert [plain(root)[key] for key in "abcd"] == [False, "1e-5", "no", 16]
    assert root.entry("e").value.value is UNKNOWN
    assert is_placeholder("${x}")


def test_merges_and_anchors():
    """A merge brings keys that the block's own replace, and no duplicate is made of it."""
    (root,) = parse_yaml("base: &b {a: 1, b: 2}\nmine:\n  <<: *b\n  b: 3\nagain: *b\n", "x")
    assert plain(root.entry("mine").value) == {"a": 1, "b": 3}
    assert plain(root.entry("again").value) == {"a": 1, "b": 2}
    assert len(root.entry("mine").value.entries) == 2


def test_an_alias_bomb_stays_as_small_as_it_is_written():
    """Nine levels of nine aliases each are walked in as many nodes as the file has."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [" + ", ".join([f"*{old}"] * 9) + "]" for old, new in pairwise("abcdefghi")]
    (root,) = parse_yaml("\n".join(lines), "x")
    assert sum(1 for _ in walk(root)) < 500


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 5_000 + "x", "{a: " * 5_000])
def test_deep_nesting_is_rejected_at_once(text):
    """A bomb of brackets or dashes ends at the limit, not at the stack's."""
    with pytest.raises(SettingError, match="nested more than"):
        parse_yaml(text, "x.yaml")


def test_a_bomb_of_merges_is_rejected():
    """Merges copy keys, and there is an end to how many."""
    lines = ["k0: &k0 {" + ", ".join(f"x{i}: 1" for i in range(200)) + "}"]
    lines += [f"k{i}: &k{i} {{<<: [" + ", ".join([f"*k{i - 1}"] * 50) + f"], y{i}: 1}}" for i in range(1, 12)]
    with pytest.raises(SettingError, match=r"^x\.yaml, line \d+, column \d+: more than 50000 nodes"):
        parse_yaml("\n".join(lines), "x.yaml")


def test_an_alias_to_what_it_stands_in_is_unknown():
    """A list that contains itself is a value nobody knows, and no endless walk."""
    (root,) = parse_yaml("a: &a [1, *a]\n", "x")
    assert root.entry("a").value.items[1].value is UNKNOWN


@pytest.mark.parametrize(
    "text", ["a: [1, 2", "a: b: c", "\tkey: 1", "a: *missing", "a: 'x", "%YAML 9.9\n---\na: 1", "a: \x00"]
)
def test_an_error_has_line_and_column(text):
    """Broken YAML is a SettingError that names the file."""
    with pytest.raises(SettingError, match=r"x\.yaml"):
        parse_yaml(text, "x.yaml")


def test_nothing_is_constructed():
    """Tags that would make objects are values nobody knows, and nothing is run."""
    (root,) = parse_yaml("a: !!python/object/apply:os.system ['exit 1']\nb: !custom 3\nc: 2\n", "x")
    assert root.entry("b").value.value is UNKNOWN
    assert root.entry("c").value.value == 2


def test_several_documents():
    """Each document of a file is a separate tree."""
    assert [plain(root) for root in parse_yaml("a: 1\n---\na: 2\n", "x")] == [{"a": 1}, {"a": 2}]


@given(st.text(alphabet="ab:-[]{}&*!|>'\"#%@ \n\t,?0", max_size=40))
def test_no_text_crashes_the_reader(text):
    """Whatever the text, the answer is trees or a SettingError."""
    with contextlib.suppress(SettingError):
        parse_yaml(text, "x")
