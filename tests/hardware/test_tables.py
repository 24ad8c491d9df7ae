"""Small tables as text and HTML."""

from halfstep.hardware.tables import html_table, plain_table


def test_columns_line_up():
    """Every column starts at the same offset, and no line ends with spaces."""
    lines = plain_table(("a", "long heading", "c"), [("1", "2", "3"), ("wide cell", "x", "")]).splitlines()
    assert [line.find("long") for line in lines[:1]] == [lines[1].find("2")] == [lines[2].find("x")]
    assert all(line == line.rstrip() for line in lines)


def test_html_is_escaped_and_has_every_cell():
    """Text of the user cannot become markup; the empty heading row of a list of values is left out."""
    page = html_table(("a", "b"), [("x<y", "1 & 2")], below=["<script>"])
    assert "x&lt;y" in page
    assert "1 &amp; 2" in page
    assert "<script>" not in page
    assert page.count("<tr>") == 2
    assert "<thead>" not in html_table(("", ""), [("name", "value")])
