"""Patterns over module names: the values of a policy's `keep_fp32` and `compute_fp32`.

A pattern is a case-sensitive glob over the whole dotted name of a module, and covers everything inside a module that it
matches. In text, patterns are separated by `|`; as a value they are a sorted tuple without repeats.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from halfstep.errors import SettingError

__all__ = ["canonical_patterns", "covers"]


def canonical_patterns(key: str, value: object) -> tuple[str, ...]:
    """The patterns of a key, given as text or as a list; raises for what can match no module or matches all."""
    parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple | set | frozenset) or not all(isinstance(p, str) for p in parts):
        raise SettingError(f"{key}={value!r} is not a list of module name patterns, such as ['head', '*.norm'].")
    patterns = {pattern.strip() for part in parts for pattern in part.split("|")}
    for pattern in patterns:
        _check_pattern(key, pattern)
    return tuple(sorted(patterns))


def _check_pattern(key: str, pattern: str) -> None:
    if not pattern:
        raise SettingError(f"{key} has an empty pattern; name a module, such as {key}=head, or omit it.")
    if not pattern.isprintable() or set(pattern) & set(" ,()"):
        raise SettingError(
            f"{key} pattern {pattern!r} has a blank, comma or parenthesis, which the text of a policy cannot contain."
        )
    if "" in pattern.split("."):
        raise SettingError(
            f"{key} pattern {pattern!r} matches no module: names look like blocks.0.norm. Drop the extra dot."
        )
    if not pattern.strip("*"):
        effect = "keeps every module in fp32" if key == "keep_fp32" else "makes every module compute in fp32"
        raise SettingError(f"{key}={pattern} {effect}, so compute has no effect. Use the preset fp32.")


def covers(pattern: str, module_name: str) -> bool:
    """Whether a pattern matches a module or one around it; nothing matches the root, whose name is empty."""
    parts = module_name.split(".")
    return bool(module_name) and any(fnmatchcase(".".join(parts[:i]), pattern) for i in range(1, len(parts) + 1))
