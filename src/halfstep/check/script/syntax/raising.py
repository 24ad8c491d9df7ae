"""Lines that a test expects to raise: `with pytest.raises(...)`, `with self.assertRaises(...)`.

What is written there is wrong on purpose, so no rule over scripts reports it.
"""

from __future__ import annotations

import ast

from halfstep.check.script.syntax.children import all_nodes

__all__ = ["lines_that_raise"]

_EXPECT = {"raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp"}


def lines_that_raise(tree: ast.Module, text: str) -> list[range]:
    """The lines of every block whose exception is expected; the text decides quickly that there is none."""
    if ".raises(" not in text and "assertRaises" not in text and " raises(" not in text:
        return []
    return [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in all_nodes(tree)
        if isinstance(node, (ast.With, ast.AsyncWith)) and any(map(_expects, node.items))
    ]


def _expects(item: ast.withitem) -> bool:
    func = item.context_expr.func if isinstance(item.context_expr, ast.Call) else None
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    return name in _EXPECT
