"""The quiz: answers as text, and their grading."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.errors import SettingError
from halfstep.learning.questions import QUESTIONS, Question

__all__ = ["Grade", "find_question", "grade", "parse_answers", "parse_letter"]


@dataclass(frozen=True)
class Grade:
    """One question with the letter that was answered."""

    question: Question
    letter: str

    @property
    def right(self) -> bool:
        """Whether the answer is right."""
        return self.letter == self.question.answer


def find_question(number: int) -> Question:
    """The question with this number."""
    if not 1 <= number <= len(QUESTIONS):
        raise SettingError(f"Question {number} does not exist. The quiz has questions 1 to {len(QUESTIONS)}.")
    return QUESTIONS[number - 1]


def parse_letter(question: Question, text: str) -> str:
    """The letter of an answer as people type it: "b", "B", "b)"."""
    letter = text.strip().casefold().removesuffix(")")
    if len(letter) != 1 or letter not in question.letters:
        raise SettingError(
            f"{text.strip()!r} is not an answer to question {question.number}. Answer with one of {', '.join(question.letters)}."
        )
    return letter


def parse_answers(text: str) -> dict[int, str]:
    """Question number -> letter, from "1b,2b,3b"; a number may occur once."""
    answers: dict[int, str] = {}
    for item in filter(None, re.split(r"[,;\s]+", text)):
        match = re.fullmatch(r"(\d{1,4})[:=]?([a-zA-Z])\)?", item)
        if match is None:
            raise SettingError(f"{item!r} in --answers is not a question and a letter. Write --answers 1b,2b,3b.")
        question = find_question(int(match.group(1)))
        if question.number in answers:
            raise SettingError(f"Question {question.number} is answered twice in --answers. Keep one answer.")
        answers[question.number] = parse_letter(question, match.group(2))
    if not answers:
        raise SettingError("--answers has no answer. Write --answers 1b,2b,3b.")
    return answers


def grade(answers: Mapping[int, str]) -> tuple[Grade, ...]:
    """The answered questions, in order; those that were left out are not graded."""
    return tuple(Grade(find_question(number), answers[number]) for number in sorted(answers))
