"""The text under check and the settings it is checked under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from halfstep.hardware.devices import Device  # 7 ms of a start that may take 300

__all__ = ["Cell", "Settings", "Source"]

Language = Literal["python", "notebook", "json", "yaml", "toml"]


@dataclass(frozen=True)
class Cell:
    """A code cell of a notebook: its number from 1, and where its lines stand in the joined text."""

    number: int
    first_line: int  # of the joined text, from 1
    num_lines: int


@dataclass(frozen=True)
class Source:
    """One file's text. A notebook's text is its code cells joined, with the magics blanked."""

    path: str
    text: str
    language: Language
    cells: tuple[Cell, ...] = ()

    def place(self, line: int) -> tuple[int | None, int]:
        """The cell and the line inside it, for a line of the text; no cell outside notebooks."""
        for cell in self.cells:
            if cell.first_line <= line < cell.first_line + cell.num_lines:
                return cell.number, line - cell.first_line + 1
        return None, line


@dataclass(frozen=True)
class Settings:
    """What rules may know beyond the text."""

    deepspeed: tuple[int, ...] | None = None  # the version to judge by; None: say what happens before and after
    gpu: Device | None = None  # the hardware the run is for
    gpu_origin: str = ""  # "--gpu t4", "nvidia-smi"
