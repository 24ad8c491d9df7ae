"""HTML pages from templates."""

import json
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import MissingError
from halfstep.report.html_page import asset, render_html, script_json, script_source


class Reader(HTMLParser):
    """Collects the elements, the attributes and the text of a page."""

    def __init__(self):
        super().__init__()
        self.elements, self.text, self.attributes = [], [], []

    def handle_starttag(self, name, attributes):
        self.elements.append(name)
        self.attributes += [value for _, value in attributes]

    def handle_data(self, data):
        self.text.append(data)


def read(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader


printable = st.text(st.characters(blacklist_categories=("Cs", "Cc")))


def plan_page(text):
    """A page with one text in every place a template has for texts."""
    part = {"percent": "50", "colour": "c0", "title": text}
    bar = {"label": text, "total": "1", "parts": [part]}
    values = {"title": text, "about": text, "bars": [bar], "legend": [], "tables": [], "notes": [text]}
    return render_html("plan.html.j2", values)


@given(printable)
def test_no_text_becomes_an_element(text):
    """Any text in a template's values is read back by a parser as the same text, in content and in attributes."""
    page, plain = read(plan_page(text)), read(plan_page("plain"))
    assert page.elements == plain.elements
    assert text in page.attributes
    assert "".join(page.text) == "".join(plain.text).replace("plain", text)


@given(st.recursive(printable | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(printable, x)))
def test_embedded_json_cannot_end_its_element(value):
    """No `<` is left in it, and it parses to the same value."""
    text = script_json(value)
    assert "<" not in text
    assert json.loads(text) == value


def test_embedded_json_has_only_what_json_has():
    """A NaN raises instead of making the page unreadable."""
    with pytest.raises(ValueError, match="JSON"):
        script_json({"loss": float("nan")})


def test_a_script_cannot_end_its_element():
    """`</script` in the strings of a script is escaped."""
    assert script_source("x = '</script>'") == "x = '<\\/script>'"


def test_an_undefined_value_raises():
    """A template that names a value it was not passed fails instead of leaving a hole in the page."""
    import jinja2

    with pytest.raises(jinja2.UndefinedError, match="title"):
        render_html("plan.html.j2", {})


def test_the_stylesheet_needs_no_network():
    """The one stylesheet loads nothing from outside the page."""
    style = asset("style.css")
    assert "url(" not in style
    assert "@import" not in style


def test_without_jinja2_the_error_has_the_line_that_installs_it(monkeypatch):
    """A missing jinja2 is a MissingError that names the extra."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingError, match=r'An HTML page needs jinja2.*pip install "halfstep\[train\]"'):
        render_html("plan.html.j2", {})
