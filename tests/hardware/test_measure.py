import math
import types

import pytest

from halfstep.errors import SettingError
from halfstep.hardware import measure
from halfstep.hardware.measure import Measured, confirm, measure_matmuls
from halfstep.hardware.probe import find_gpu, from_cpu
from halfstep.hardware.tf32 import tf32_state

torch = pytest.importorskip("torch")


@pytest.fixture
def ticking(monkeypatch):
    """A clock that moves only when a product runs: `ticking(seconds)` is a product that takes that long."""
    now = 0.0

    def product(seconds):
        def run():
            nonlocal now
            now += seconds

        return run

    product.now = lambda: now
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=product.now))
    monkeypatch.setattr(measure, "pick_device", lambda: torch.device("cpu"))
    return product


def measured(name, ratio):
    """A result with a given ratio to fp32."""
    return Measured(name, 100.0 * ratio, 0.05, 10, ratio, 512)


def test_every_number_is_a_measurement():
    """Each format gets a positive speed, its spread, its runs and its ratio to fp32."""
    results = measure_matmuls(size=128, seconds=0.2)
    names = [m.format for m in results]
    assert names[0] == "fp32"
    assert {"bf16", "fp16"} <= set(names)
    assert results[0].ratio_to_fp32 == 1
    for result in results:
        assert 0 < result.gflops_median < math.inf
        assert result.spread >= 0
        assert result.runs >= 2
        assert 64 <= result.size <= 128
        assert str(result).startswith(f"{result.format}: {result.speed} GFLOP/s")


@pytest.mark.parametrize("slowdown", [1, 20, 1000])
@pytest.mark.parametrize("speed", [1e9, 5e10, 1e15])
def test_the_time_asked_for_is_about_used(slowdown, speed, ticking, monkeypatch):
    """The timings take about what was asked, also where 16 bits run at a thousandth of fp32's speed."""
    monkeypatch.setattr(
        measure, "_product", lambda _t, _d, name, n: ticking(2 * n**3 / speed * (1 if name == "fp32" else slowdown))
    )
    measure_matmuls(seconds=1.0)
    # The smallest product of 64 x 64 is timed about ten times even where that is too slow.
    assert ticking.now() < 2 + 3 * 10 * (2 * 64**3 / speed * slowdown)


def test_nothing_of_the_process_is_changed():
    """The random state and the TF32 switches are as before."""
    torch.manual_seed(7)
    state, switches = torch.get_rng_state(), tf32_state()
    measure_matmuls(size=64, seconds=0.05)
    assert torch.equal(torch.get_rng_state(), state)
    assert tf32_state() == switches


def test_a_slow_format_is_timed_small_and_compared_at_its_own_size(ticking, monkeypatch):
    """A format a thousand times slower uses a smaller product, and fp32 is timed again at that size."""
    made = []

    def product(_torch, _device, name, n):
        if name == "fp8":
            raise RuntimeError("no such kernel")
        made.append((name, n))
        seconds = 2 * n**3 / {"fp32": 5e9, "bf16": 1e8, "fp16": 5e9}[name]
        return ticking(seconds)

    monkeypatch.setattr(measure, "_product", product)
    results = {m.format: m for m in measure_matmuls(size=256, seconds=1.0)}
    assert results["bf16"].size < results["fp32"].size
    assert ("fp32", results["bf16"].size) in made
    assert results["bf16"].ratio_to_fp32 < 0.2
    assert "fp8" not in results  # the fake cannot run it, so it is left out


@pytest.mark.parametrize(
    ("kwargs", "word"), [({"size": 8}, "size=8"), ({"seconds": 0}, "seconds=0"), ({"seconds": math.nan}, "nan")]
)
def test_settings_without_sense_are_rejected(kwargs, word):
    """A product too small to time and no time to measure in are errors."""
    with pytest.raises(SettingError, match=word):
        measure_matmuls(**kwargs)


@pytest.mark.parametrize(
    ("ratio", "gpu", "words"),
    [
        (7.0, "H100", "they agree"),
        (0.9, "H100", "they disagree"),
        (1.15, "H100", "too close"),
        (0.9, "T4", "they agree"),
        (2.0, "T4", "they disagree"),
    ],
)
def test_table_and_measurement_are_compared(ratio, gpu, words):
    """Native means faster than fp32, everything else means not; a tie decides nothing."""
    (sentence,) = confirm(find_gpu(gpu), [measured("fp32", 1.0), measured("bf16", ratio)])
    assert words in sentence
    assert sentence.startswith("bf16")


def test_a_product_that_stayed_small_decides_only_large_differences():
    """On a busy machine even fp32 may not get beyond a tiny product; then a ratio near 1 says nothing."""
    tiny = [Measured("bf16", 0.07, 0.05, 10, ratio, 64) for ratio in (1.0, 0.01)]
    undecided, decided = confirm(find_gpu("T4"), tiny)
    assert "the product is too small" in undecided
    assert "they agree" in decided


def test_a_disturbed_reference_does_not_cost_minutes(ticking, monkeypatch):
    """If fp32's first timing is spoilt, a format a thousand times slower still stays within seconds."""
    first = iter([0.01])

    def product(_torch, _device, name, n):
        if name not in {"fp32", "fp16"}:
            raise RuntimeError("no such kernel")
        seconds = 2 * n**3 / (5e10 if name == "fp32" else 5e7) + next(first, 0.0) * (name == "fp32" and n == 64)
        return ticking(seconds)

    monkeypatch.setattr(measure, "_product", product)
    results = {m.format: m for m in measure_matmuls(seconds=0.5)}
    assert ticking.now() < 10
    assert results["fp16"].size < 1024


@pytest.mark.parametrize(("spread", "fp32_spread"), [(0.9, 0.05), (0.05, 0.9)])
def test_unsteady_timings_decide_nothing(spread, fp32_spread):
    """Where the format's or fp32's own timings vary widely, no verdict is given on a small difference."""
    results = [Measured("fp32", 100, fp32_spread, 10, 1.0, 1024), Measured("bf16", 70, spread, 10, 0.7, 1024)]
    assert "the timings vary too much" in confirm(find_gpu("H100"), results)[0]


def test_time_that_does_not_grow_with_the_size_is_not_taken_for_slowness(ticking, monkeypatch):
    """Waiting a while for each product, as on a busy machine, does not keep the product small."""
    monkeypatch.setattr(measure, "_product", lambda *_args: ticking(0.002))
    assert {m.size for m in measure_matmuls(seconds=1.5)} == {1024}


def test_what_the_table_thinks_impossible_but_runs_fast_is_a_disagreement():
    """Unknown hardware that turns out fast contradicts the assumption."""
    (sentence,) = confirm(from_cpu("riscv64", []), [measured("bf16", 3.0)])
    assert "they disagree" in sentence


class Namespace(types.SimpleNamespace):
    """A stand-in for a module of torch."""


def device_torch(kind, capability=(9, 0), hip=None, gcn=""):
    """A torch that has one device of a kind."""
    there, calls = Namespace(is_available=lambda: True), []
    there.synchronize = lambda: calls.append("sync")
    there.get_device_capability = lambda: capability
    there.get_device_properties = lambda _i: Namespace(gcnArchName=gcn)
    absent = Namespace(is_available=lambda: False)
    fake = Namespace(cuda=absent, xpu=absent, backends=Namespace(mps=absent), version=Namespace(hip=hip), calls=calls)
    if kind == "mps":
        fake.backends.mps, fake.mps = there, there
    else:
        setattr(fake, kind, there)
    return fake


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_the_device_is_synchronized_before_each_reading_of_the_clock(kind):
    """The work of an accelerator is finished when a timing starts and when it ends."""
    fake = device_torch(kind)
    measure._clock(fake, kind, lambda: None, 3)
    assert fake.calls == ["sync", "sync"]


@pytest.mark.parametrize(
    ("capability", "hip", "expected"), [((9, 0), None, True), ((7, 5), None, False), ((9, 4), "6.4", False)]
)
def test_tf32_is_timed_only_where_it_exists(capability, hip, expected):
    """TF32 is NVIDIA's, from Ampere on."""
    assert measure._has_tf32(device_torch("cuda", capability, hip), "cuda") is expected
    assert not measure._has_tf32(device_torch("cuda", capability, hip), "cpu")


def test_fp32_on_a_gpu_is_timed_without_tf32():
    """The reference is IEEE fp32 whatever the process has switched on, and the switches come back."""
    before = tf32_state()
    with measure._tf32("cuda", "fp32"):
        assert not tf32_state().matmul
    with measure._tf32("cuda", "tf32"):
        assert tf32_state().matmul
    assert tf32_state() == before


@pytest.mark.gpu
def test_native_formats_are_faster_on_a_gpu():
    """On a real GPU the table and the clock agree about bf16 and fp16."""
    from halfstep.hardware.probe import probe

    hardware = probe()
    for sentence in confirm(hardware, measure_matmuls()):
        assert "disagree" not in sentence
