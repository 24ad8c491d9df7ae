"""Every test leaves torch's switches as a fresh process has them, as far as torch can show."""

import itertools
import subprocess
import sys
import types
import warnings

import pytest

from halfstep.hardware.tf32 import Tf32State, set_tf32, tf32, tf32_state

torch = pytest.importorskip("torch")
B = torch.backends


def reset():
    """Torch's defaults."""
    B.fp32_precision = B.cudnn.fp32_precision = B.mkldnn.fp32_precision = "none"
    B.cuda.matmul.allow_tf32 = False
    B.cudnn.allow_tf32 = True
    B.cuda.matmul.fp32_precision = B.mkldnn.matmul.fp32_precision = "none"
    B.cudnn.conv.fp32_precision = B.cudnn.rnn.fp32_precision = "tf32"


@pytest.fixture(autouse=True)
def fresh():
    """Every test starts from torch's defaults."""
    reset()
    yield
    reset()


def show(read):
    """The value of a getter, or that it raises."""
    try:
        return read()
    except RuntimeError:
        return "raises"


def everything():
    """All that torch shows of its switches, mkldnn's included."""
    return {
        "process": B.fp32_precision,
        "cuda": B.cudnn.fp32_precision,
        "matmul": B.cuda.matmul.fp32_precision,
        "conv": B.cudnn.conv.fp32_precision,
        "rnn": B.cudnn.rnn.fp32_precision,
        "mkldnn matmul": B.mkldnn.matmul.fp32_precision,
        "mkldnn conv": B.mkldnn.conv.fp32_precision,
        "allow_tf32": show(lambda: B.cuda.matmul.allow_tf32),
        "cudnn.allow_tf32": show(lambda: B.cudnn.allow_tf32),
        "matmul precision": show(torch.get_float32_matmul_precision),
    }


def assign(target, name, value):
    """An assignment, to be made later."""
    return lambda: setattr(target, name, value)


# What a user may have done before us, in either of torch's two ways or in both.
USERS = {
    "nothing": lambda: None,
    "old-matmul": assign(B.cuda.matmul, "allow_tf32", True),
    "old-cudnn-off": assign(B.cudnn, "allow_tf32", False),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "new-matmul": assign(B.cuda.matmul, "fp32_precision", "tf32"),
    "new-matmul-ieee": assign(B.cuda.matmul, "fp32_precision", "ieee"),
    "new-conv-ieee": assign(B.cudnn.conv, "fp32_precision", "ieee"),
    "process-tf32": assign(B, "fp32_precision", "tf32"),
    "process-ieee": assign(B, "fp32_precision", "ieee"),
    "cuda-ieee": assign(B.cudnn, "fp32_precision", "ieee"),
}
PAIRS = [pytest.param(a, b, id=f"{a}+{b}") for a, b in itertools.product(USERS, USERS) if a != b or a == "nothing"]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_context_restores_both_records_exactly(first, second, enabled):
    """After the block torch shows what it showed before, whatever mix of calls the user had made."""
    USERS[first]()
    USERS[second]()
    before = everything()
    with tf32(enabled) as state:
        assert (state.matmul, state.conv, state.rnn) == (enabled, enabled, enabled)
        inside = everything()
        assert (inside["matmul"] == "tf32", inside["conv"] == "tf32", inside["rnn"] == "tf32") == (enabled,) * 3
        # The readers torch.compile uses answer, and mkldnn is as it was.
        assert (inside["allow_tf32"], inside["cudnn.allow_tf32"]) == (enabled, enabled)
        assert inside["mkldnn matmul"] == before["mkldnn matmul"]
        assert inside["mkldnn conv"] == before["mkldnn conv"]
    assert everything() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_every_reader_answers_after_setting(enabled):
    """From a fresh state, neither of torch's two records contradicts the other, and nothing warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set_tf32(enabled) == Tf32State(enabled, enabled, enabled)
    assert "raises" not in everything().values()
    assert torch.get_float32_matmul_precision() == ("high" if enabled else "highest")


def test_context_restores_after_an_exception():
    """An error inside the block does not leave TF32 switched."""
    before = everything()
    with pytest.raises(ZeroDivisionError), tf32(True):
        raise ZeroDivisionError
    assert everything() == before


def test_setting_off_beats_a_process_wide_tf32():
    """Torch's own switch for cuDNN leaves "none" there, which the process-wide setting would turn on again."""
    B.fp32_precision = "tf32"
    state = set_tf32(False)
    assert (state.matmul, state.conv, state.rnn) == (False, False, False)


def test_unreadable_state_is_read_and_said():
    """A mix of both ways makes torch's older readers raise; the state is read anyway and has a note."""
    B.cuda.matmul.fp32_precision = "tf32"
    state = tf32_state()
    assert (state.matmul, state.conv) == (True, True)
    assert "reading torch.backends.cuda.matmul.allow_tf32 raises" in str(state)


def test_medium_that_cannot_be_kept_readable_is_said(caplog):
    """Where mkldnn's bf16 makes one older reader raise, the user gets one warning with the reason."""
    torch.set_float32_matmul_precision("medium")
    set_tf32(False)
    assert "reading torch.get_float32_matmul_precision() raises" in caplog.text
    assert B.mkldnn.matmul.fp32_precision == "bf16"
    caplog.clear()
    set_tf32(False)
    assert not caplog.text


def test_switch_that_is_already_as_asked_is_not_written():
    """Whether torch's own default for cuDNN follows a later process-wide setting is the same with us as without."""
    later = "import torch; torch.backends.fp32_precision = 'ieee'; print(torch.backends.cudnn.conv.fp32_precision)"
    ours = "import halfstep.hardware.tf32 as t\nt.set_tf32(True)\nwith t.tf32(True): pass\n"
    messages = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for code in (later, ours + later)
    ]
    assert messages[0] == messages[1]


def test_the_driver_override_is_said(monkeypatch):
    """NVIDIA's environment variable overrides torch's switches, so the state mentions it."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert "NVIDIA_TF32_OVERRIDE=0" in str(tf32_state())


class OldMatmul:
    """The cuBLAS switches of a torch without `fp32_precision`, which warn when they are used."""

    __slots__ = ("_allowed",)

    def __init__(self):
        self._allowed = False

    @property
    def allow_tf32(self):
        """The switch."""
        return self._allowed

    @allow_tf32.setter
    def allow_tf32(self, value):
        warnings.warn("Please use the new API settings to control TF32 behavior", UserWarning, stacklevel=2)
        self._allowed = value


def test_a_torch_with_the_older_record_only_works_too(monkeypatch):
    """Without `fp32_precision` the older flags are used, quietly, and restored."""
    matmul = OldMatmul()
    backends = types.SimpleNamespace(
        cuda=types.SimpleNamespace(matmul=matmul), cudnn=types.SimpleNamespace(allow_tf32=True)
    )
    precision = lambda: "high" if matmul.allow_tf32 else "highest"  # noqa: E731 - it stands for a function of torch
    old = types.SimpleNamespace(backends=backends, get_float32_matmul_precision=precision)
    monkeypatch.setitem(sys.modules, "torch", old)
    with tf32(True) as state:
        assert state == Tf32State(True, True, True)
    assert tf32_state() == Tf32State(False, True, True)
    with tf32(False) as state:
        assert state == Tf32State(False, False, False)
    assert tf32_state() == Tf32State(False, True, True)
