"""The validation result of a checkpoint, added after it was written."""

import math

import pytest

from halfstep.checkpoint.score import Score, read_score, write_score
from halfstep.errors import HalfstepError


def test_a_score_is_read_as_it_was_written(tmp_path):
    """Non-finite values included; a later score replaces an earlier one, and no other file stays behind."""
    assert read_score(tmp_path) is None
    for score in (Score(0.5, True, {"metric": 0.5}), Score(math.inf, False, {"loss": math.inf}), Score(None, True, {})):
        write_score(tmp_path, score)
        assert read_score(tmp_path) == score
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"metric": 1}', "\xff"])
def test_a_damaged_score_is_no_score(tmp_path, text):
    """The checkpoint itself is intact, so the run is validated again."""
    (tmp_path / "score.json").write_text(text, encoding="latin-1")
    assert read_score(tmp_path) is None


def test_a_score_that_cannot_be_written_raises_by_name(tmp_path):
    """The message names the checkpoint."""
    with pytest.raises(HalfstepError, match="missing could not be written"):
        write_score(tmp_path / "missing", Score(0.5, True, {}))
