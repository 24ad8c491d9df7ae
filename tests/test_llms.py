"""llms.txt, the map of the documentation for language models (llmstxt.org), against the pages that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "llms.txt").read_text()
LINKS = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", TEXT, re.MULTILINE)


def test_it_has_the_form_of_the_convention():
    """A title, a summary as a quote, and under each heading only links with one line each."""
    lines = TEXT.splitlines()
    assert lines[0] == "# Halfstep"
    assert lines[2].startswith("> ")
    lists = TEXT.split("\n## ")[1:]
    assert len(lists) >= 4
    assert sum(part.count("\n- ") for part in lists) == len(LINKS)
    assert TEXT.isascii()


def test_every_link_exists_and_every_page_is_listed_once():
    """A page that is added, renamed or removed is added, renamed or removed here."""
    assert not [link for link in LINKS if not (ROOT / link).is_file()]
    pages = [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").glob("*.md"))]
    assert sorted(link for link in LINKS if link.startswith("docs/")) == pages
