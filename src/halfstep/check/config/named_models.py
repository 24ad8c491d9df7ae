"""The model that a file of training arguments names, in its own section or in the one next to it."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.precision.node import Block, Scalar

__all__ = ["model_names"]

_KEYS = ("model_name_or_path", "model_name", "model_id", "model", "base_model")
_SECTIONS = ("model", "model_args", "model_config", "model_arguments")
_IN_SECTION = (*_KEYS, "name_or_path", "pretrained_model_name_or_path", "name", "path", "id")


def model_names(config: Config) -> Iterator[str]:
    """The names in the arguments themselves; without any, those at the top of the file and in its section about the model."""
    names = list(_texts(config.root, _KEYS))
    document = config.document
    is_section = isinstance(document, Block) and any(entry.value is config.root for entry in document.entries)
    if not names and isinstance(document, Block) and is_section:
        names += _texts(document, _KEYS)
        sections = (entry.value for entry in document.entries if entry.key in _SECTIONS)
        names += [name for part in sections if isinstance(part, Block) for name in _texts(part, _IN_SECTION)]
    yield from names


def _texts(block: Block, keys: tuple[str, ...]) -> Iterator[str]:
    """The strings that a block has under these keys."""
    for key in keys:
        entry = block.entry(key)
        if entry is not None and isinstance(entry.value, Scalar) and isinstance(entry.value.value, str):
            yield entry.value.value
