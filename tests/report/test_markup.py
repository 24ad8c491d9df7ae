"""HTML from values."""

import json
import re
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from halfstep.report.markup import Markup, embed_json, join, tag


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.attributes = [], "", {}

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes.update(attributes)

    def handle_data(self, data):
        self.text += data


printable = st.text(st.characters(blacklist_categories=("Cs", "Cc")))


@given(printable, printable)
def test_no_text_becomes_an_element(text, value):
    """Whatever a label says, a browser reads it back as text, in content and in attributes."""
    reader = Reader()
    reader.feed(tag("p", text, title=value))
    reader.close()
    assert reader.tags == ["p"]
    assert reader.text == text
    assert reader.attributes["title"] == value


@given(st.recursive(printable | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(printable, x)))
def test_embedded_json_cannot_end_its_element(value):
    """No `<` is left in it, and it parses to the same value."""
    text = embed_json("data", value)
    inner = re.fullmatch(r'<script type="application/json" id="data">(.*)</script>', text, re.DOTALL)[1]
    assert "<" not in inner
    assert json.loads(inner) == value


def test_attributes_are_spelt_as_html_has_them():
    """class_, aria_label, booleans and None."""
    assert (
        tag("a", "x", class_="c", aria_label="y", hidden=True, title=None) == '<a class="c" aria-label="y" hidden>x</a>'
    )
    assert tag("meta", charset="utf-8", name="n") == '<meta charset="utf-8" name="n">'
    assert join(["<", Markup("<b>")]) == "&lt;<b>"
