"""`halfstep learn` at the command line."""

import json

import pytest
from click.testing import CliRunner

import practice_scripts
from halfstep.cli import cli
from halfstep.cli import learn as learn_command
from halfstep.learning.experiment import Outcome, Reading
from halfstep.learning.experiments import formats
from halfstep.learning.questions import QUESTIONS
from halfstep.learning.units import UNITS

RIGHT = ",".join(f"{q.number}{q.answer}" for q in QUESTIONS)


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """Progress goes to a directory of the test."""
    monkeypatch.setenv("HALFSTEP_STATE", str(tmp_path))
    return tmp_path / "learn.jsonl"


def run(*args, **kwargs):
    return CliRunner().invoke(cli, ["learn", *args], **kwargs)


def test_without_a_unit_it_lists_them():
    """Every unit is on the list, with what was run."""
    assert all(name in run().output for name in UNITS)
    assert [unit["run"] for unit in json.loads(run("--json").output)] == [False] * len(UNITS)
    assert run("formats").exit_code == 0
    assert "[x] formats" in run().output
    assert json.loads(run("--json").output)[1] | {"run": True, "holds": True} == json.loads(run("--json").output)[1]


@pytest.mark.parametrize(
    "args", [(), ("formats",), ("quiz", "--answers", "1b,2a"), ("progress",), ("quiz", "--show", "5")]
)
def test_text_fits_80_columns_without_escape_codes(args):
    """Output that is not a terminal's has no colour, and no line is longer than 80."""
    output = run(*args).output
    assert "\033" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_a_unit_shows_measured_numbers_and_json_has_them_all():
    """The values, the verdict and the meaning of each experiment."""
    output = run("formats").output
    assert all(text in output for text in ("Claim:", "70144", "true here", "3 of 3 claims confirmed"))
    data = json.loads(run("2", "--json").output)
    assert data["holds"]
    assert [proof["experiment"] for proof in data["proofs"]] == list(UNITS["formats"].experiments)
    assert all(reading["text"] for proof in data["proofs"] for reading in proof["readings"])


def test_a_claim_that_is_not_true_is_reported_with_exit_code_3(monkeypatch):
    """The unit is marked, and does not count as done."""
    monkeypatch.setattr(formats, "spacing", lambda: Outcome((Reading("x", 1),), holds=False, meaning="It is not so."))
    result = run("formats")
    assert result.exit_code == 3
    assert "NOT true here" in result.output
    assert "2 of 3 claims confirmed" in result.output
    assert "[!] formats" in run().output


@pytest.mark.parametrize("args", [("format",), ("format", "--json"), ("10",)])
def test_an_unknown_unit_is_an_error_with_the_known_ones(args):
    """The message has the names."""
    result = run(*args)
    assert result.exit_code == 1
    assert "Unknown unit" in str(result.exception)


def test_json_before_a_unit_is_a_usage_error():
    """It would otherwise be ignored."""
    result = run("--json", "formats")
    assert result.exit_code == 2
    assert "halfstep learn formats --json" in result.output


def test_right_answers_are_full_marks():
    """Exit code 0, and all of them are recorded."""
    result = run("quiz", "--answers", RIGHT, "--json")
    assert result.exit_code == 0
    data = json.loads(result.output)
    assert data["right"] == data["answered"] == data["questions"] == len(QUESTIONS)
    assert f"{len(QUESTIONS)} of {len(QUESTIONS)} questions right" in run().output


@pytest.mark.parametrize("number", range(1, len(QUESTIONS) + 1))
def test_each_wrong_answer_is_found(number):
    """Every other letter of a question is wrong: exit code 3, and the answer names the right one."""
    question = QUESTIONS[number - 1]
    for letter in set(question.letters) - {question.answer}:
        result = run("quiz", "--answers", f"{number}{letter}", "--json")
        assert result.exit_code == 3
        assert json.loads(result.output)["answers"][0]["correct"] == question.answer


def test_the_lessons_three_answers_alone_are_full_marks():
    """Questions that were left out do not count."""
    result = run("quiz", "--answers", "1b,2b,3b")
    assert result.exit_code == 0
    assert "3 of 3 answers right. 20 questions not answered." in result.output


@pytest.mark.parametrize("text", ["", "b", "1z", "0a", "1a,1b", "nonsense", "1b;;x"])
def test_bad_answers_are_one_message(text):
    """A HalfstepError, which the command prints without a traceback."""
    result = run("quiz", "--answers", text)
    assert result.exit_code == 1
    assert "answer" in str(result.exception) or "Question" in str(result.exception)
    assert not (run("progress").exception)


@pytest.mark.parametrize("number", ["0", "99", "-1"])
def test_a_question_that_does_not_exist_is_an_error(number):
    """The message has the range."""
    assert "questions 1 to" in str(run("quiz", "--show", number).exception)


def test_show_runs_the_experiment_of_a_question():
    """Text has the question and the proof; JSON both."""
    assert all(text in run("quiz", "--show", "5").output for text in ("70000 stored in fp16", "true here"))
    data = json.loads(run("quiz", "--show", "5", "--json").output)
    assert data["proof"]["holds"]
    assert run("quiz", "--show", "5", "--answers", "1b").exit_code == 2


def test_without_a_terminal_the_quiz_does_not_wait():
    """It is a usage error with the way out; --json alone prints the questions without answers."""
    result = run("quiz")
    assert result.exit_code == 2
    assert "--answers" in result.output
    questions = json.loads(run("quiz", "--json").output)
    assert len(questions) == len(QUESTIONS)
    assert not any("answer" in question for question in questions)


def test_the_quiz_asks_again_skips_and_ends(monkeypatch, state):
    """A bad letter is asked again, an empty line skips, q ends; what was answered is graded and recorded."""
    monkeypatch.setattr(learn_command, "_is_asked", lambda: True)
    result = run("quiz", input="x\nb\n\nb\nq\n")
    assert result.exit_code == 0
    assert "'x' is not an answer to question 1" in result.output
    assert "2 of 2 answers right" in result.output
    assert [json.loads(line)["question"] for line in state.read_text().splitlines()] == [1, 3]
    wrong = run("quiz", input="a\n")  # and the end of the input
    assert wrong.exit_code == 3
    assert "wrong, it is b" in wrong.output


def test_progress_is_ticked_from_what_was_run():
    """The unit and the questions of the clipping box tick it."""
    assert "0 of 5 boxes ticked" in run("progress").output
    run("quiz", "--answers", RIGHT)
    assert "to do: halfstep learn clipping" in run("progress").output
    assert run("clipping").exit_code == 0
    data = json.loads(run("progress", "--json").output)
    assert [box["ticked"] for box in data["boxes"]] == [False, False, True, False, False]
    assert data["units"] == {"clipping": True}


def test_a_damaged_state_file_is_reported_and_not_lost(state):
    """Progress continues after it."""
    state.write_bytes(b"\xff garbage\n")
    assert "1 line of" in run("progress").output
    assert run("formats").exit_code == 0
    assert state.read_bytes().startswith(b"\xff garbage\n")
    assert "[x] formats" in run().output


def test_a_state_directory_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    """The result is shown all the same."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HALFSTEP_STATE", str(tmp_path / "file"))
    result = run("quiz", "--answers", "1b")
    assert result.exit_code == 0
    assert "1 of 1 answer right" in result.output
    assert "progress was not recorded" in result.output


def test_practice_writes_a_starter_and_never_overwrites(tmp_path, monkeypatch):
    """The task is printed; an existing file is a usage error and stays as it is."""
    monkeypatch.chdir(tmp_path)
    result = run("practice", "2")
    assert result.exit_code == 0
    assert "max_norm = 1.0" in result.output
    (file,) = tmp_path.glob("practice2*.py")
    file.write_text("mine")
    again = run("practice", "2")
    assert again.exit_code == 2
    assert "was not overwritten" in again.output
    assert file.read_text() == "mine"
    data = json.loads(run("practice", "5", "-o", "other.py", "--json").output)
    assert data["file"] == "other.py"
    assert "EXPLANATION" in (tmp_path / "other.py").read_text()
    assert run("practice", "1", "-o", str(tmp_path / "no" / "folder.py")).exit_code == 2


@pytest.mark.parametrize("args", [("0",), ("6",), ("x",), (), ("1", "missing.py"), ("1", "--seconds", "5"), ("1", ".")])
def test_practice_with_unusable_arguments_is_a_usage_error(tmp_path, monkeypatch, args):
    """Numbers outside 1 to 5, files that do not exist, options without effect."""
    monkeypatch.chdir(tmp_path)
    assert run("practice", *args).exit_code == 2
    assert not list(tmp_path.glob("*.py"))


def test_practice_of_a_binary_file_is_a_usage_error(tmp_path):
    """Exit code 2 with the reason."""
    file = tmp_path / "model.py"
    file.write_bytes(b"\xff\xfe\x00")
    result = run("practice", "1", str(file))
    assert result.exit_code == 2
    assert "not text" in result.output


def test_practice_of_an_empty_file_fails_and_is_recorded(tmp_path, state):
    """Exit code 3, a row with what to do, and no tick."""
    file = tmp_path / "empty.py"
    file.write_text("")
    result = run("practice", "3", str(file), "--json")
    assert result.exit_code == 3
    data = json.loads(result.output)
    assert not data["passed"]
    assert [row["name"] for row in data["rows"]] == ["code"]
    assert '"practice", "number": 3, "passed": false' in state.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_passed_practice_ticks_its_box(tmp_path):
    """Exit code 0, and the checkpoint shows it."""
    file = tmp_path / "clip.py"
    file.write_text(practice_scripts.CLIP)
    result = run("practice", "2", str(file))
    assert result.exit_code == 0, result.output
    boxes = json.loads(run("progress", "--json").output)["boxes"]
    assert boxes[2]["ticked"]
