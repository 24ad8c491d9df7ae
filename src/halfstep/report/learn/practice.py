"""A practice task and its grade, as text of at most 80 columns and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from halfstep.hardware.units import count_text
from halfstep.learning.practice.record import Grade
from halfstep.learning.practice.tasks import Task
from halfstep.report.learn.text import Page
from halfstep.report.theme import BAD, GOOD

__all__ = ["grade_data", "render_grade", "render_task", "task_data"]


def render_task(page: Page, task: Task, file: str) -> str:
    """The task, and where its starter file is."""
    lines = [page.bold(f"Practice {task.number}: {task.title}"), ""]
    lines += [page.fill(paragraph) for paragraph in task.text]
    return "\n".join([*lines, "", f"Written: {file}", f"Grade it: halfstep learn practice {task.number} {file}"])


def render_grade(page: Page, grade: Grade, script: str) -> str:
    """The rows, those that failed with what to do."""
    lines = [page.bold(f"Practice {grade.number}: {grade.title}"), page.fill(f"graded: {script}"), ""]
    for row in grade.rows:
        mark = page.paint("[x]", GOOD) if row.passed else page.paint("[!]", BAD)
        lines.append(page.fill(f"{mark} {row.name}: {row.expected}", 4))
        lines.append(page.fill(f"measured: {row.measured}", 14, "    "))
        if row.to_do:
            lines.append(page.fill(f"to do: {row.to_do}", 11, "    "))
    failed = sum(not row.passed for row in grade.rows)
    verdict = (
        page.paint("passed", GOOD)
        if grade.passed
        else f"{page.paint('not passed', BAD)}: {failed} of {count_text(len(grade.rows), 'criterion', 'criteria')} not met"
    )
    return "\n".join([*lines, "", f"{verdict} ({grade.seconds:.1f} s)."])


def task_data(task: Task, file: str) -> dict[str, Any]:
    """A task, and where its starter file is."""
    return {"number": task.number, "title": task.title, "text": list(task.text), "file": file}


def grade_data(grade: Grade, script: str) -> dict[str, Any]:
    """A grade as values that JSON can represent."""
    return {
        "number": grade.number,
        "title": grade.title,
        "script": script,
        "passed": grade.passed,
        "rows": [asdict(row) for row in grade.rows],
        "findings": [
            {
                "code": f.code,
                "name": f.name,
                "severity": f.severity,
                "line": f.line,
                "message": f.message,
                "instead": f.instead,
            }
            for f in grade.findings
        ],
        "seconds": grade.seconds,
    }
