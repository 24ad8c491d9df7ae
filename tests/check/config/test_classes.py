"""DeepSpeed configurations that a script writes as a class."""

import pytest

from halfstep.check import check_path

FACTORY = 'field(default_factory=lambda: {{"enabled": True{key}}})'
CLASS = """\
from dataclasses import dataclass, field
@dataclass
class {name}:
    bf16: dict = {bf16}
    zero_optimization: dict = field(default_factory=lambda: {{"stage": 2}})
    train_batch_size: str = "auto"
"""


def lines(tmp_path, text):
    """The lines that HS251 reports in a script."""
    path = tmp_path / "settings.py"
    path.write_text(text)
    return [f.line for f in check_path(path) if f.code == "HS251"]


@pytest.mark.parametrize(
    ("name", "bf16", "expected"),
    [
        ("DeepSpeedDefaults", FACTORY.format(key=', "loss_scale": 0'), [4]),
        ("DeepSpeedDefaults", 'Field(default={"enabled": True, "hysteresis": 2})', [4]),
        ("DeepSpeedDefaults", '{"enabled": True, "hysteresis": 2}', [4]),
        ("DeepSpeedDefaults", FACTORY.format(key=""), []),
        ("DeepSpeedDefaults", "field(default_factory=default_bf16)", []),
        ("Precision", FACTORY.format(key=', "loss_scale": 0'), []),
    ],
)
def test_the_attributes_of_a_class_are_a_configuration(tmp_path, name, bf16, expected):
    """Its defaults are checked, strictly where the name shows that DeepSpeed reads them."""
    assert lines(tmp_path, CLASS.format(name=name, bf16=bf16)) == expected


def test_a_class_without_zero_is_no_configuration(tmp_path):
    """An attribute `bf16` alone may belong to any program."""
    text = CLASS.format(name="DeepSpeedDefaults", bf16=FACTORY.format(key=', "loss_scale": 0'))
    assert lines(tmp_path, "\n".join(text.splitlines()[:4])) == []
