"""The survey of a comparison, as a value and as a file."""

import dataclasses
import json

import pytest

from comparison_cases import write_case
from halfstep.comparison.remainder import read_remainder
from halfstep.comparison.result import read_comparison
from halfstep.comparison.survey import SURVEY, read_json, read_survey, write_survey
from halfstep.errors import SettingError


@pytest.fixture
def folder(tmp_path):
    return write_case(tmp_path / "c", stopped=True)


def test_a_survey_is_read_as_it_was_written(folder, tmp_path):
    """Writing and reading gives the same value, and the file keeps its keys."""
    values = json.loads((folder / SURVEY).read_text())
    survey = read_survey(folder)
    write_survey(tmp_path, survey)
    assert read_survey(tmp_path) == survey
    assert json.loads((tmp_path / SURVEY).read_text()) == values


def test_questions_about_hardware_are_answered_from_the_survey(folder):
    """Support levels and matmul rates are looked up by format; an unknown format counts as native and not measured."""
    survey = dataclasses.replace(read_survey(folder), support={"bf16": ("slow", "half rate")})
    assert survey.support_for("bf16") == ("slow", "half rate")
    assert survey.support_for("fp8") == ("native", "")
    assert survey.matmul_rate("bf16") == 1e11
    assert survey.matmul_rate("fp8") is None
    assert survey.labels == ("fp32", "bf16", "fp16")


def test_missing_keys_are_named(folder):
    """A report and --resume name the missing keys; optional ones have defaults."""
    values = json.loads((folder / SURVEY).read_text())
    optional = {key: value for key, value in values.items() if key not in {"threads", "flops_per_step"}}
    (folder / SURVEY).write_text(json.dumps(optional))
    assert read_survey(folder).threads is None
    (folder / SURVEY).write_text(json.dumps({k: v for k, v in values.items() if k not in {"contenders", "notes"}}))
    for reader in (lambda: read_comparison([folder]), lambda: read_remainder(folder)):
        with pytest.raises(SettingError, match="lacks notes, contenders"):
            reader()


@pytest.mark.parametrize(
    ("key", "value"), [("support", 3), ("settings", []), ("contenders", [{"label": "fp32"}]), ("notes", 1)]
)
def test_a_damaged_survey_is_one_error(folder, key, value):
    """A value of the wrong type is a SettingError with the path, not a traceback."""
    values = json.loads((folder / SURVEY).read_text())
    (folder / SURVEY).write_text(json.dumps({**values, key: value}))
    with pytest.raises(SettingError, match=r"survey\.json"):
        read_survey(folder)


def test_files_that_are_not_json_objects_are_rejected(tmp_path):
    """Broken JSON, a list and a missing file are each named."""
    for text, message in (("{", "not JSON"), ("[]", "does not contain a JSON object")):
        (tmp_path / SURVEY).write_text(text)
        with pytest.raises(SettingError, match=message):
            read_json(tmp_path / SURVEY)
    with pytest.raises(SettingError, match="cannot be read"):
        read_json(tmp_path / "nothing")
