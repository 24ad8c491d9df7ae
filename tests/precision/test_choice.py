import pytest

from halfstep.errors import SettingError
from halfstep.hardware.devices import ARCHITECTURES, FORMAT_NAMES, Fact, Facts
from halfstep.hardware.probe import Hardware, find_gpu, from_cpu, from_cuda, from_mps, from_rocm, from_xpu
from halfstep.precision import choice as choice_module
from halfstep.precision.choice import Choice, choose, resolve
from halfstep.precision.policy import Policy

AMX = "avx512_bf16 avx512_fp16 amx_bf16 amx_tile"
CASES = {
    # hardware, the preset chosen, and words that its text must have
    "V100": (find_gpu("V100"), "fp16", "is_bf16_supported() answers True"),
    "T4": (find_gpu("T4"), "fp16", "is_bf16_supported() answers True"),
    "T4 probed": (from_cuda("Tesla T4", (7, 5)), "fp16", "bf16 would need no loss scale, but is emulated"),
    "RTX 2080 Ti": (find_gpu("RTX 2080 Ti"), "fp16", "scaled dynamically"),
    "P100": (find_gpu("P100"), "fp32", "slower or no faster"),
    "GTX 1080 Ti": (find_gpu("GTX 1080 Ti"), "fp32", "no tensor cores"),
    "GTX 1660": (find_gpu("GTX 1660"), "fp32", "no tensor cores"),
    "RTX 3090": (find_gpu("RTX 3090"), "bf16", "no loss scale"),
    "RTX 4090": (find_gpu("RTX 4090"), "bf16", "not fp8: native: fp8 tensor cores"),
    "RTX 5090": (find_gpu("RTX 5090"), "bf16", "not built yet"),
    "A100": (find_gpu("A100"), "bf16", "not fp8: not available: fp8 came with Ada and Hopper"),
    "H100": (find_gpu("H100"), "bf16", "not tf32: native here, but slower than bf16 and twice its bytes"),
    "H200": (from_cuda("NVIDIA H200", (9, 0)), "bf16", "not built yet"),
    "B200": (find_gpu("B200"), "bf16", "not fp32: slower than bf16"),
    "MI250": (find_gpu("MI250"), "bf16", "flush its subnormals to zero"),
    "MI250 probed": (from_rocm("AMD Instinct MI250X", "gfx90a:sramecc+"), "bf16", "not tf32: not available"),
    "MI300X": (find_gpu("MI300X"), "bf16", "e4m3fnuz"),
    "Apple M1": (from_mps("Apple M1"), "fp32", "it saves memory only"),
    "Apple M2": (find_gpu("M2"), "fp32", "fused optimizers ignore the loss scale on MPS"),
    "Apple M4": (find_gpu("M4"), "fp32", "To try it: --precision fp16"),
    "Apple M5": (from_mps("Apple M5"), "fp32", "no facts about Apple M5"),
    "Intel Max": (find_gpu("Max 1550"), "bf16", "XMX"),
    "Arc B580": (find_gpu("B580"), "bf16", "XMX"),
    "Intel without XMX": (from_xpu("Intel(R) Graphics", has_xmx=False), "fp32", "would be no faster here"),
    "x86": (from_cpu("x86_64", ["avx2"]), "fp32", "slower or no faster"),
    "x86 AVX512-BF16": (from_cpu("x86_64", ["avx512_bf16"]), "bf16", "AVX512-BF16 dot products"),
    "x86 AVX512-FP16": (from_cpu("x86_64", ["avx512_fp16"]), "fp32", "no faster than fp32's"),
    "x86 AMX-BF16": (from_cpu("x86_64", AMX.split()), "bf16", "not fp16: slow: AVX512-FP16 without AMX-FP16"),
    "x86 AMX-FP16": (from_cpu("x86_64", [*AMX.split(), "amx_fp16"]), "bf16", "not fp16: native here as well"),
    "Arm": (from_cpu("aarch64", ["asimd"]), "fp32", "recorded 150 to 350 times slower"),
    "Arm fp16": (from_cpu("aarch64", ["asimdhp"]), "fp32", "slower or no faster"),
    "Arm bf16": (from_cpu("aarch64", ["bf16"]), "bf16", "a small model may see none"),
    "Arm bf16 fp16": (from_cpu("aarch64", ["bf16", "asimdhp"]), "bf16", "bf16 matrix instructions"),
    "newer NVIDIA": (from_cuda("NVIDIA Next", (14, 0)), "bf16", "This is assumed: Halfstep has no facts about sm140"),
    "unknown AMD": (from_rocm("AMD Next", "gfx9999"), "fp32", "no facts about AMD Next (gfx9999)"),
    "unknown CPU": (from_cpu("riscv64", []), "fp32", "not bf16: not assumed"),
}


@pytest.mark.parametrize(("hardware", "preset", "words"), CASES.values(), ids=CASES)
def test_each_device_gets_its_precision_and_the_reason(hardware, preset, words):
    """The choice on every kind of hardware, and the words that explain it."""
    choice = choose(hardware)
    assert str(choice.policy) == preset
    assert words in str(choice)


EVERY = [Hardware(a.name, a.kind, a.name, a.vendor, a.facts) for a in ARCHITECTURES.values()]


@pytest.mark.parametrize("hardware", [*EVERY, *(case[0] for case in CASES.values())], ids=str)
def test_every_format_is_chosen_or_rejected_with_a_reason(hardware):
    """Nothing is left unsaid: one format is chosen, all others carry a reason that is a sentence."""
    choice = choose(hardware)
    rejected = [rejection.format for rejection in choice.rejected]
    assert sorted([*rejected, choice.policy.compute]) == sorted(FORMAT_NAMES)
    assert hardware.support[choice.policy.compute] == "native"
    for text in (*choice.reasons, *(rejection.reason for rejection in choice.rejected)):
        assert text.endswith(".")
        assert ".." not in text


def test_t4_says_what_torch_answers():
    """On a T4 the reason against bf16 names the torch call that claims otherwise."""
    (against,) = [r.reason for r in choose(find_gpu("T4")).rejected if r.format == "bf16"]
    assert "torch.cuda.is_bf16_supported() answers True" in against
    assert against.startswith("emulated")


def test_tf32_is_offered_where_nothing_better_is_native():
    """Hardware with TF32 and no 16-bit units gets fp32 and a note on how to select TF32."""
    hardware = Hardware("Odd", "cuda", "odd", "NVIDIA", Facts(tf32=Fact("native", "units")))
    assert "select it with --precision tf32" in str(choose(hardware))


def test_this_machine_is_chosen_for_by_default(monkeypatch):
    """Without hardware, this machine is probed."""
    monkeypatch.setattr(choice_module, "probe", lambda: find_gpu("T4"))
    assert str(choose().policy) == "fp16"
    assert str(resolve("auto")[0]) == "fp16"


def test_choice_is_a_value():
    """The same hardware gives the same choice, which can be compared and hashed."""
    assert choose(find_gpu("T4")) == choose(find_gpu("Tesla T4"))
    assert isinstance(choose(find_gpu("T4")), Choice)
    assert len({choose(find_gpu("T4")), choose(find_gpu("V100")), choose(find_gpu("T4"))}) == 2


@pytest.mark.parametrize("auto", ["auto", " AUTO "])
def test_auto_resolves_to_the_choice_with_its_reasons(auto):
    """The word auto is choose(), and its reasons come along."""
    choice = choose(find_gpu("H100"))
    assert resolve(auto, find_gpu("H100")) == (choice.policy, choice.reasons)


def test_a_named_precision_is_taken_as_it_is():
    """A preset, a policy and a foreign name resolve to what they mean, with the notes of the mapping."""
    assert resolve("bf16") == (Policy.parse("bf16"), ())
    assert resolve(Policy(compute="tf32")) == (Policy(compute="tf32"), ())
    policy, notes = resolve("bf16-mixed", find_gpu("H100"))
    assert policy == Policy.parse("bf16")
    assert "Lightning" in notes[0]
    assert len(notes) == 1


def test_a_named_precision_that_the_hardware_emulates_is_said():
    """Asking for bf16 on a T4 gets bf16, and the truth about it."""
    policy, notes = resolve("bf16", find_gpu("T4"))
    assert policy.compute == "bf16"
    assert "On NVIDIA T4, bf16 is emulated" in notes[-1]


@pytest.mark.parametrize(
    ("name", "preset"), [("bfloat16", "bf16"), ("float16", "fp16"), ("half", "fp16"), ("float32", "fp32")]
)
def test_a_torch_dtype_is_a_precision(name, preset):
    """A dtype is mapped as its name is, and the mapping is noted."""
    torch = pytest.importorskip("torch")
    policy, notes = resolve(getattr(torch, name))
    assert str(policy) == preset
    assert notes


def test_bits_are_lightnings_names():
    """precision=16 and precision=32 are accepted as Lightning's names are."""
    assert (str(resolve(16)[0]), str(resolve(32)[0])) == ("fp16", "fp32")


@pytest.mark.parametrize("value", [None, 1.5, True, ["bf16"], object])
def test_what_is_no_precision_is_rejected_by_its_type(value):
    """A value of another type is an error that shows it, not a traceback."""
    with pytest.raises(SettingError, match="must be a preset such as 'bf16'"):
        resolve(value)


@pytest.mark.parametrize("name", ["float64", "int8", "float8_e4m3fn"])
def test_dtypes_without_a_preset_are_rejected_by_name(name):
    """fp64, integers and raw fp8 have no preset."""
    torch = pytest.importorskip("torch")
    with pytest.raises(SettingError, match=name):
        resolve(getattr(torch, name))
