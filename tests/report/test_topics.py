"""Explanations: complete, and in step with the code."""

import pytest

from halfstep.errors import HalfstepError
from halfstep.precision.formats import FORMATS
from halfstep.report.topics import TOPICS, explain


@pytest.mark.parametrize("name", TOPICS)
def test_every_topic_explains_itself_under_its_own_name(name):
    """Each topic has its name, a title, paragraphs and places to go on."""
    topic = explain(name)
    assert topic.name == name
    assert topic.paragraphs
    assert topic.see
    assert topic.title in str(topic)


def test_numbers_are_the_formats_own():
    """The figures people need stand in the text."""
    scaling = str(explain("loss-scaling"))
    assert all(number in scaling for number in ("2^-24", "65504", "65536", "1000", "100 skipped"))
    assert "1/256" in str(explain("fp16-vs-bf16"))
    assert all(name in str(explain("formats")) for name in FORMATS)


@pytest.mark.parametrize("spelling", ["loss scaling", "Loss_Scaling", "LOSS-SCALING"])
def test_topics_are_found_however_they_are_spelled(spelling):
    """Spaces, underscores and case do not matter."""
    assert explain(spelling).name == "loss-scaling"


def test_unknown_topic_names_the_nearest():
    """A typo is answered with what was meant."""
    with pytest.raises(HalfstepError, match="Did you mean 'hysteresis'"):
        explain("histeresis")
