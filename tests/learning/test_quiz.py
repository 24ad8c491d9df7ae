"""The quiz: its questions, answers as people type them, and grading."""

import pytest

from halfstep.errors import SettingError
from halfstep.learning.questions import QUESTIONS
from halfstep.learning.quiz import find_question, grade, parse_answers, parse_letter


def test_questions_are_complete():
    """Numbers run from 1, the answer is one of the options, options differ, and each letter is right somewhere."""
    assert [q.number for q in QUESTIONS] == list(range(1, len(QUESTIONS) + 1))
    assert len(QUESTIONS) >= 18
    for question in QUESTIONS:
        assert question.answer in question.letters
        assert len(set(question.options)) == len(question.options) == 4
        assert question.reason
    assert {q.answer for q in QUESTIONS} == set("abcd")


def test_the_first_three_are_the_lessons():
    """Their answers are b."""
    assert [q.answer for q in QUESTIONS[:3]] == ["b", "b", "b"]
    assert "main benefit" in QUESTIONS[0].text
    assert "GradScaler" in QUESTIONS[1].text


@pytest.mark.parametrize("text", ["1b,2a", "1B, 2A", "1b 2a", "2a;1b", "1b),2a)", "1=b,2:a"])
def test_answers_are_read_as_people_type_them(text):
    """Case, separators and order do not matter."""
    assert parse_answers(text) == {1: "b", 2: "a"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no answer"),
        (",,", "no answer"),
        ("b", "'b' in --answers is not a question and a letter"),
        ("1", "'1' in --answers"),
        ("1bb", "'1bb' in --answers"),
        ("0a", "Question 0 does not exist"),
        ("99a", "questions 1 to"),
        ("99999999a", "in --answers"),
        ("1z", "'z' is not an answer to question 1. Answer with one of a, b, c, d"),
        ("1a,1b", "answered twice"),
    ],
)
def test_bad_answers_are_errors_with_the_remedy(text, message):
    """Each raises a SettingError that quotes the answer."""
    with pytest.raises(SettingError, match=message):
        parse_answers(text)


def test_letters_are_checked_against_the_question():
    """A letter may have a bracket and spaces; others are rejected."""
    question = find_question(1)
    assert parse_letter(question, " B) ") == "b"
    for text in ("", "e", "ab", "1"):
        with pytest.raises(SettingError, match="Answer with one of"):
            parse_letter(question, text)


def test_grading_counts_the_answered_questions():
    """Right and wrong answers are told apart; what was left out is not graded."""
    grades = grade({2: "a", 1: "b"})
    assert [(g.question.number, g.right) for g in grades] == [(1, True), (2, False)]
    assert all(g.right for g in grade({q.number: q.answer for q in QUESTIONS}))
