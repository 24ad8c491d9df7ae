"""HTML pages from the jinja2 templates in report/templates: one stylesheet, every value escaped, no network.

Values are computed in Python and tested as data; the templates only lay them out.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from halfstep.hardware.torch_build import require

__all__ = ["asset", "render_html", "script_json", "script_source"]


def render_html(template: str, values: dict[str, Any]) -> str:
    """The page that `template` makes of `values`; autoescape is on, and an undefined name raises."""
    jinja2 = _jinja2()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("halfstep.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["style"] = _markup(asset("style.css"))
    page: str = environment.get_template(template).render(values)
    return page


def asset(name: str) -> str:
    """The text of a file next to the templates."""
    return resources.files("halfstep.report").joinpath("templates", name).read_text(encoding="ascii")


def script_json(value: Any) -> Any:
    """`value` as JSON for a script element; no `<` remains, so that no text can close the element or open a comment."""
    dumps = _jinja2().utils.htmlsafe_json_dumps
    return dumps(value, dumps=json.dumps, allow_nan=False, separators=(",", ":"))


def script_source(text: str) -> Any:
    """JavaScript source for a script element; `</script` in its strings is escaped."""
    return _markup(text.replace("</script", "<\\/script"))


def _markup(text: str) -> Any:
    """Text that is already HTML, CSS or JavaScript and must not be escaped."""
    return _jinja2().utils.markupsafe.Markup(text)


def _jinja2() -> Any:
    return require("jinja2", "An HTML page", "train")
