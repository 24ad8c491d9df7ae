"""HS169: a save that casts the weights in training to 16 bits and back."""

import pytest

from check_scripts import findings

LOOP = """\
import copy, torch
class Process:
    def __init__(self):
        self.vae = Net()
        self.optimizer = torch.optim.AdamW(self.vae.decoder.parameters())
    def save(self, step):
{body}
    def run(self):
        for x in loader:
            loss = self.vae(x)
            loss.backward()
            self.optimizer.step()
            self.save(1)
"""


def text(*lines):
    return LOOP.format(body="\n".join(f"        {line}" for line in lines))


@pytest.mark.parametrize(
    "lines",
    [
        ("self.vae = self.vae.to('cpu', dtype=torch.float16)", "self.vae.save_pretrained(path)", "self.vae.float()"),
        (
            "self.vae.to('cpu', dtype=torch.float16)",
            "self.vae.save_pretrained(path)",
            "self.vae.to(dev, dtype=self.dtype)",
        ),
        ("self.vae.half()", "torch.save(self.vae.state_dict(), path)", "self.vae.float()"),
        (
            "self.vae.bfloat16()",
            "torch.save({'vae': self.vae.state_dict()}, path)",
            "self.vae = self.vae.to(torch.float32)",
        ),
        ("self.vae.half().save_pretrained(path)", "self.vae.float()"),
        ("if main:", "    self.vae.half()", "    save_model(self.vae, path)", "    self.vae.float()"),
    ],
)
def test_weights_in_training_are_rounded(lines):
    """The module is cast in place, written and cast back."""
    assert len(findings(text(*lines), "HS169")) == 1


@pytest.mark.parametrize(
    "lines",
    [
        ("vae = copy.deepcopy(self.vae)", "vae.half()", "vae.save_pretrained(path)", "vae.float()"),
        ("state = {k: v.half() for k, v in self.vae.state_dict().items()}", "torch.save(state, path)"),
        ("self.vae.to('cpu')", "self.vae.save_pretrained(path)", "self.vae.to(dev)"),
        ("self.vae.half()", "self.vae.save_pretrained(path)", "self.vae.to(dtype=torch.float16)"),
        ("self.other.half()", "self.other.save_pretrained(path)", "self.other.float()"),
        ("self.vae.to(torch.float32)", "self.vae.save_pretrained(path)", "self.vae.to(torch.bfloat16)"),
        ("self.vae.half()", "self.vae.float()"),
    ],
)
def test_a_copy_or_another_model_is_silent(lines):
    """Nothing that is trained loses bits, or nothing is written."""
    assert findings(text(*lines), "HS169") == []


@pytest.mark.parametrize("back", ["self.vae.to(self.weight_dtype)", "self.vae.float()", "self.vae.to(dtype=dtype)"])
def test_a_dtype_for_files_may_round_the_weights_in_training(back):
    """`save_dtype` is an option: advice, as it may be float32."""
    lines = ("self.vae.to(self.save_dtype)", "self.vae.save_pretrained(path)", back)
    assert [f.severity for f in findings(text(*lines), "HS169")] == ["advice"]


@pytest.mark.parametrize(
    "lines",
    [
        ("self.vae.to(self.save_dtype)", "self.vae.save_pretrained(path)"),
        ("self.vae.to(self.save_dtype)", "self.vae.save_pretrained(path)", "self.vae.to(self.save_dtype)"),
        ("copied = self.vae.to(self.save_device)", "self.vae.save_pretrained(path)", "self.vae.to(self.device)"),
        ("self.vae.to(self.save_dtype)", "self.vae.eval()", "self.vae.to(self.weight_dtype)"),
    ],
)
def test_a_dtype_for_files_that_rounds_nothing(lines):
    """Nothing is cast back, it is the same dtype or a device, or nothing is saved."""
    assert findings(text(*lines), "HS169") == []
