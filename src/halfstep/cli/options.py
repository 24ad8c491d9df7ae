"""Options that several commands have, with the same name, type and help in each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

__all__ = ["FilePath", "data_option"]


class FilePath(click.Path):
    """A path that is not empty: `--out "$OUT"` without the variable would mean the current directory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"path_type": Path, **options})

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or a usage error."""
        if not os.fspath(value):
            self.fail("The path is empty. Is a shell variable not set?", param, ctx)
        return super().convert(value, param, ctx)


data_option = click.option(
    "--data",
    "data_dir",
    type=FilePath(),
    metavar="DIR|SHARDS",
    help="ImageNet-style folder or WebDataset shards for the ViT targets.",
)
