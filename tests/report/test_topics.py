"""Topics of `halfstep explain`: complete, and consistent with the code."""

import pytest

from halfstep.errors import HalfstepError
from halfstep.precision.formats import FORMATS
from halfstep.report.topics import TOPICS, explain


@pytest.mark.parametrize("name", TOPICS)
def test_every_topic_is_complete(name):
    """Each topic has its registered name, a title, paragraphs and further reading."""
    topic = explain(name)
    assert topic.name == name
    assert topic.paragraphs
    assert topic.see
    assert topic.title in str(topic)


def test_topics_contain_the_key_numbers():
    """The texts contain the limits of the formats and the loss-scale defaults."""
    scaling = str(explain("loss-scaling"))
    assert all(number in scaling for number in ("2^-24", "65504", "65536", "1000", "100 skipped"))
    assert "1/256" in str(explain("fp16-vs-bf16"))
    assert all(name in str(explain("formats")) for name in FORMATS)


@pytest.mark.parametrize("spelling", ["loss scaling", "Loss_Scaling", "LOSS-SCALING"])
def test_topic_names_ignore_case_and_separators(spelling):
    """Spaces, underscores and dashes are equivalent, and case is ignored."""
    assert explain(spelling).name == "loss-scaling"


def test_unknown_topic_suggests_the_closest_name():
    """The error for a misspelled topic suggests the closest one."""
    with pytest.raises(HalfstepError, match="Did you mean 'hysteresis'"):
        explain("histeresis")
