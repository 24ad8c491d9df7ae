"""Options that several commands have, with the same name, type and help in each."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["data_option"]

data_option = click.option(
    "--data",
    "data_dir",
    type=click.Path(path_type=Path),
    metavar="DIR|SHARDS",
    help="ImageNet-style folder or WebDataset shards for the ViT targets.",
)
