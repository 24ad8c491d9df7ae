"""HS145: a float8 dtype for autocast, also where a function chooses it among others."""

import pytest

from check_scripts import findings

METHOD = """\
import torch
class Runner:
    def __init__(self, model, name):
        self.model = model
        self.dtype, self.amp = self.setup(name)

    def resolve(self, name):
        if name == "fp8":
            return torch.{fp8}
        if name == "bf16":
            return torch.bfloat16
        return torch.float16

    def setup(self, name):
        if name == "none":
            return None, False
        return self.resolve(name), True

    def step(self, x):
        with torch.autocast("cuda", dtype=self.dtype{flag}):
            return self.model(x)
"""


@pytest.mark.parametrize("fp8", ["float8_e4m3fn", "float8_e5m2"])
def test_a_float8_dtype_of_a_method_that_returns_several_values(fp8):
    """The dtype is one of two results, and comes from another method."""
    reports = findings(METHOD.format(fp8=fp8, flag=""), "HS145")
    assert [(f.line, f.severity) for f in reports] == [(20, "error")]


def test_a_region_without_float8_is_right():
    """Other formats, and a region that is disabled."""
    assert findings(METHOD.format(fp8="bfloat16", flag=""), "HS145") == []
    assert findings(METHOD.format(fp8="float8_e5m2", flag=", enabled=False"), "HS145") == []
