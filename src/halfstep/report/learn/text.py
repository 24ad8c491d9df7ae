"""The course as text of at most 80 columns and as plain data: units, proofs, the quiz, progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from halfstep.events import fold
from halfstep.hardware.units import count_text
from halfstep.learning.course import UnitResult
from halfstep.learning.experiment import Proof
from halfstep.learning.progress import NUM_PRACTICES, BoxState, Progress
from halfstep.learning.questions import QUESTIONS, Question
from halfstep.learning.quiz import Grade
from halfstep.learning.units import UNITS, Unit
from halfstep.report.theme import BAD, GOOD, STRONG, paint

__all__ = ["Page", "boxes_data", "grades_data", "proof_data", "question_data", "unit_data", "units_data"]

WIDTH = 80
_LABEL = 44  # a longer label gets its own line
_CONFIRMED = {"measured": "true here", "predicted": "true by prediction", "recorded": "true by recorded facts"}


class Page:
    """Renders the parts of the course for a terminal of `width` columns, with or without colour."""

    def __init__(self, width: int = WIDTH, *, colour: bool = False) -> None:
        self.width, self.colour = max(40, min(width, WIDTH)), colour

    def units(self, progress: Progress) -> str:
        """The list of units, with what was run."""
        lines = [self.bold("Units of the course (halfstep learn UNIT)"), ""]
        for number, unit in enumerate(UNITS.values(), start=1):
            lines += [
                self.fill(f"{number} {self._mark(progress.units.get(unit.name))} {unit.name:14} {unit.title}", 22, "  ")
            ]
        right = sum(progress.answers.values())
        passed = sum(progress.practices.values())
        lines += [
            "",
            f"  quiz: {right} of {len(QUESTIONS)} questions right (halfstep learn quiz)",
            f"  practice: {passed} of {NUM_PRACTICES} tasks passed (halfstep learn practice N)",
            "",
            self.fill(
                "[x]: run, and every claim was true. [!]: run, and a claim was not true. `halfstep learn progress` shows the checkpoint."
            ),
        ]
        return "\n".join(lines)

    def opening(self, unit: Unit) -> str:
        """Title, objectives and text of a unit."""
        parts = [self.bold(unit.title) + "\n" + "=" * len(unit.title)]
        parts.append("\n".join(["Objectives:", *(self.fill(f"- {o}", 4, "  ") for o in unit.objectives)]))
        parts += [self.paragraph(paragraph) for paragraph in unit.text]
        parts.append(f"Running {count_text(len(unit.experiments), 'experiment')} on this machine:")
        return "\n\n".join(parts)

    def proof(self, proof: Proof) -> str:
        """An experiment: claim, measured values, verdict, meaning."""
        lines = ["", self.fill(f"Claim: {proof.claim}", 7)]
        for reading in proof.readings:
            if len(reading.label) > _LABEL or len(str(reading)) > self.width - _LABEL - 4:
                lines += [self.fill(f"{reading.label}:", 4, "  "), self.fill(str(reading), 6, "      ")]
            else:
                lines.append(f"  {reading.label:{_LABEL}}  {reading}")
        word, code = (_CONFIRMED[proof.basis], GOOD) if proof.holds else (f"NOT {_CONFIRMED[proof.basis]}", BAD)
        lines.append(f"  -> {self.paint(word, code)} ({proof.experiment}, {proof.seconds:.1f} s)")
        lines.append(self.fill(proof.meaning, 2, "  "))
        return "\n".join(lines)

    def closing(self, result: UnitResult) -> str:
        """Corrections of the lesson, further reading, verdict of the unit."""
        unit, parts = result.unit, []
        if unit.corrections:
            parts.append(
                "\n".join(
                    [self.bold("Where the lesson is imprecise"), *(self.fill(f"- {c}", 2) for c in unit.corrections)]
                )
            )
        parts.append(self.fill("See also: " + "; ".join(unit.see)))
        num_true = sum(proof.holds for proof in result.proofs)
        seconds = sum(proof.seconds for proof in result.proofs)
        parts.append(f"{num_true} of {count_text(len(result.proofs), 'claim')} confirmed, in {seconds:.1f} s.")
        return "\n" + "\n\n".join(parts)

    def question(self, question: Question) -> str:
        """A question with its options."""
        lines = ["", self.fill(f"{question.number}. {question.text}", 3)]
        options = zip(question.letters, question.options, strict=True)
        return "\n".join([*lines, *(self.fill(f"{letter}) {text}", 6, "   ") for letter, text in options)])

    def grade(self, grade: Grade) -> str:
        """Whether an answer is right, and the reason."""
        question = grade.question
        verdict = self.paint("right", GOOD) if grade.right else f"{self.paint('wrong', BAD)}, it is {question.answer}"
        head = f"{question.number}{grade.letter}: {verdict}"
        return head + "\n" + self.fill(f"{question.reason} (halfstep learn quiz --show {question.number})", 3, "   ")

    def score(self, grades: Sequence[Grade]) -> str:
        """The number of right answers."""
        right = sum(grade.right for grade in grades)
        left = len(QUESTIONS) - len(grades)
        more = f" {count_text(left, 'question')} not answered." if left else ""
        return f"\n{right} of {count_text(len(grades), 'answer')} right.{more}"

    def progress(self, boxes: Sequence[BoxState], progress: Progress, file: str) -> str:
        """The checkpoint, with what is missing for each box."""
        lines = [self.bold("Checkpoint"), ""]
        for state in boxes:
            lines.append(self.fill(f"{self._mark(state.ticked or None)} {state.box.text}", 6, "  "))
            lines += [self.fill(f"to do: {command}", 13, "      ") for command in state.missing]
        ticked = sum(state.ticked for state in boxes)
        lines += ["", f"{ticked} of {count_text(len(boxes), 'box', 'boxes')} ticked."]
        if progress.num_damaged:
            lines.append(
                self.fill(
                    f"{count_text(progress.num_damaged, 'line')} of {file} could not be read and {'was' if progress.num_damaged == 1 else 'were'} skipped."
                )
            )
        return "\n".join(lines)

    def _mark(self, done: bool | None) -> str:
        """[x] done, [!] run with a claim that was not true, [ ] not run."""
        if done is None:
            return "[ ]"
        return self.paint("[x]", GOOD) if done else self.paint("[!]", BAD)

    def paragraph(self, text: str) -> str:
        """Prose is wrapped, code is not."""
        return text if "\n" in text else self.fill(text)

    def fill(self, text: str, hang: int = 0, first: str = "") -> str:
        """Wrap at spaces only, so that commands can be copied; following lines are indented by `hang`."""
        width = self.width + text.count("\033") // 2 * 9  # escape codes of one painted word have no width
        return fold(text, width, hang, first)

    def bold(self, text: str) -> str:
        """Text in bold, where colour is on."""
        return self.paint(text, STRONG)

    def paint(self, text: str, style: str) -> str:
        """Text in a style of the theme, where colour is on."""
        return paint(text, style, colour=self.colour)


def proof_data(proof: Proof) -> dict[str, Any]:
    """A proof as values that JSON can represent."""
    return asdict(proof) | {"readings": [asdict(r) | {"text": str(r)} for r in proof.readings]}


def unit_data(result: UnitResult) -> dict[str, Any]:
    """A unit that was run."""
    return asdict(result.unit) | {"holds": result.holds, "proofs": [proof_data(proof) for proof in result.proofs]}


def units_data(progress: Progress) -> list[dict[str, Any]]:
    """The list of units, with what was run."""
    return [
        {"number": number, "name": unit.name, "title": unit.title, "objectives": list(unit.objectives),
         "run": unit.name in progress.units, "holds": progress.units.get(unit.name)}
        for number, unit in enumerate(UNITS.values(), start=1)
    ]  # fmt: skip


def question_data(question: Question) -> dict[str, Any]:
    """A question without its answer."""
    options = dict(zip(question.letters, question.options, strict=True))
    return {"number": question.number, "text": question.text, "options": options, "experiment": question.experiment}


def grades_data(grades: Sequence[Grade]) -> dict[str, Any]:
    """The graded answers and the score."""
    return {
        "right": sum(grade.right for grade in grades),
        "answered": len(grades),
        "questions": len(QUESTIONS),
        "answers": [
            {"number": g.question.number, "answer": g.letter, "right": g.right, "correct": g.question.answer,
             "reason": g.question.reason, "experiment": g.question.experiment}
            for g in grades
        ],
    }  # fmt: skip


def boxes_data(boxes: Sequence[BoxState], progress: Progress, file: str) -> dict[str, Any]:
    """The checkpoint and what it is ticked from."""
    return {
        "boxes": [{"text": s.box.text, "ticked": s.ticked, "missing": list(s.missing)} for s in boxes],
        "units": dict(progress.units),
        "answers": {str(number): right for number, right in progress.answers.items()},
        "practices": {str(number): passed for number, passed in progress.practices.items()},
        "damaged_lines": progress.num_damaged,
        "file": file,
    }
