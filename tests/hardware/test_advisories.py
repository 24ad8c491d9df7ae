"""Each advisory applies to the versions, GPUs and features of its thread, and to no others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.hardware.advisories import Environment, advisories_for
from halfstep.hardware.advisory_table import ADVISORIES
from halfstep.hardware.advisory_words import FEATURES, PACKAGES
from halfstep.hardware.versions import matches, version_key
from halfstep.report.advisories_page import render

DOCS = Path(__file__).resolve().parents[2] / "docs"

# Advisory -> versions of its package that have the defect, and versions that do not, at both ends of the range.
RANGES = {
    "HSA-001": (("2.11.0", "2.13.0", "2.14.1"), ("2.10.0", "2.15.0")),
    "HSA-002": (("2.11.0", "2.13.0+cu130"), ("2.10.0", "2.14.0")),
    "HSA-003": (("2.5.0",), ("2.4.1", "2.5.1")),
    "HSA-004": (("2.11.0", "2.13.0"), ("2.10.0", "2.14.0")),
    "HSA-005": (("2.1.0", "2.12.1"), ("2.13.0",)),
    "HSA-006": (("2.0.1", "2.4.1"), ("2.5.0",)),
    "HSA-007": (("2.6.0+rocm6.2.4",), ("2.5.1", "2.7.0")),
    "HSA-008": (("2.5.0+rocm6.2", "2.5.1"), ("2.4.1", "2.6.0")),
    "HSA-009": (("2.3.0", "2.12.1"), ("2.13.0",)),
    "HSA-010": (("2.12.0+rocm7.14.0",), ("2.11.0", "2.12.1")),
    "HSA-011": (("2.10.0",), ("2.9.1", "2.11.0")),
    "HSA-012": (("2.10.0", "2.14.1"), ("2.9.1", "2.15.0")),
    "HSA-013": (("2.1.0", "2.10.0"), ("2.11.0",)),
    "HSA-014": (("2.0.0", "2.13.0", "2.15.0"), ("1.13.1",)),
    "HSA-015": (("2.8.0", "2.12.1"), ("2.7.1", "2.13.0")),
    "HSA-016": (("1.13.0", "1.13.1"), ("1.12.1", "2.0.0")),
    "HSA-017": (("2.0.0", "2.3.1"), ("2.4.0",)),
    "HSA-018": (("0.18.3", "0.19.8"), ("0.18.2",)),
    "HSA-019": (("0.18.3", "0.18.5"), ("0.18.2", "0.18.6")),
    "HSA-020": (("0.17.6", "0.18.2"), ("0.17.5", "0.18.3")),
    "HSA-021": (("0.18.3", "0.19.5"), ("0.18.2", "0.19.6")),
    "HSA-022": (("1.9.0", "1.15.0"), ("1.8.1",)),
    "HSA-023": (("4.46.0", "4.46.1"), ("4.45.2", "4.46.2")),
    "HSA-024": (("4.47.0", "4.47.1"), ("4.46.3", "4.48.0")),
    "HSA-025": (("0.36.0", "0.39.0"), ("0.35.2", "0.40.0")),
    "HSA-026": (("0.36.0", "0.41.0"), ("0.35.4", "0.41.1")),
    "HSA-027": (("0.5.0", "0.8.1"), ("0.8.2",)),
    "HSA-028": (("4.0.0b11",), ("4.0.0b10", "4.0.0b12")),
}


def gpu_of(advisory):
    """An architecture and a kind that the advisory is about."""
    archs = {"gfx90*": "gfx90a", "gfx10*": "gfx1100", "gfx11*": "gfx1100"}
    arch = advisory.archs[-1] if advisory.archs else ""
    arch = archs.get(advisory.archs[0], arch) if arch.endswith("*") else arch
    arch = "gfx1100" if advisory.id == "HSA-010" else arch
    return arch, advisory.kinds[0] if advisory.kinds else ""


def applies(advisory, version, **changes):
    """Whether the advisory applies to one version of its package, on its own GPU and with its own features."""
    arch, kind = gpu_of(advisory)
    environment = Environment({advisory.package: version}, changes.get("arch", arch), changes.get("kind", kind))
    return advisory in advisories_for(environment, changes.get("features", set(advisory.features)))


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda a: a.id)
def test_a_range_has_the_versions_of_its_thread(advisory):
    """Versions inside the range are affected, and those just outside are not."""
    inside, outside = RANGES[advisory.id]
    assert all(applies(advisory, version) for version in inside)
    assert not any(applies(advisory, version) for version in outside)


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda a: a.id)
def test_an_advisory_needs_its_features_and_its_gpu(advisory):
    """It does not apply to a program without one of the features, or on another GPU, or on an unknown one."""
    version = RANGES[advisory.id][0][0]
    for name in advisory.features:
        assert not applies(advisory, version, features=set(advisory.features) - {name})
    for name in advisory.unless:
        assert not applies(advisory, version, features={*advisory.features, name})
    if advisory.archs or advisory.kinds:
        assert not applies(advisory, version, arch="sm75", kind="xpu")
        assert not applies(advisory, version, arch="", kind="")
    assert not advisories_for(Environment({}, *gpu_of(advisory)), set(advisory.features))


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda a: a.id)
def test_an_advisory_is_complete(advisory):
    """It has a thread, a consequence and a remedy in one sentence or two, and known features."""
    assert set(advisory.features) <= FEATURES.keys()
    assert advisory.threads
    assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", url) for url in advisory.threads)
    assert advisory.consequence.endswith(".")
    assert advisory.remedy.endswith(".")
    if advisory.fixed:
        package, version = advisory.fixed.split()
        assert package == advisory.package
        assert not matches(version, advisory.affected[0].versions)
    else:
        assert advisory.checked or "==" in advisory.affected[0].versions


def test_ids_are_unique_and_in_order():
    """Ids count from HSA-001, and no two advisories share one."""
    assert [a.id for a in ADVISORIES] == [f"HSA-{n:03}" for n in range(1, len(ADVISORIES) + 1)]
    assert RANGES.keys() == {a.id for a in ADVISORIES}


def test_a_known_cudnn_outside_the_range_excludes_the_defect():
    """torch 2.14 with cuDNN 9.26 does not have the defect of older cuDNN releases; an unknown cuDNN may."""
    features = {"sdpa_mask"}
    old, new = ({"torch": "2.14.0", "cudnn": version} for version in ("9.24.0", "9.26.0"))
    assert [a.id for a in advisories_for(Environment(old, "sm90", "cuda"), features)] == ["HSA-001"]
    assert advisories_for(Environment(new, "sm90", "cuda"), features) == ()
    assert len(advisories_for(Environment({"torch": "2.14.0"}, "sm90", "cuda"), features)) == 1


def test_the_measuring_machine_is_affected():
    """torch 2.11 with cuDNN 9.19 on an H200 has the NaN gradients of masked attention."""
    here = Environment({"torch": "2.11.0+cu130", "cudnn": "9.19.0"}, "sm90", "cuda")
    assert "HSA-001" in [a.id for a in advisories_for(here)]


def test_the_table_is_read_without_torch():
    """Neither the table nor the selection imports torch."""
    code = "import sys, halfstep.hardware.advisories as a; assert a.ADVISORIES; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_packages_are_those_of_the_table():
    """Every package that the table names, in its order."""
    assert tuple(dict.fromkeys(each.package for a in ADVISORIES for each in a.affected)) == PACKAGES


def test_the_documentation_is_generated_from_the_table():
    """docs/advisories.md is what `python -m halfstep.report.advisories_page` writes, and other pages link to it."""
    assert (DOCS / "advisories.md").read_text() == render()
    for page in ("check.md", "hardware.md"):
        assert "(advisories.md)" in (DOCS / page).read_text()


def test_ranges_are_not_empty():
    """The lower bound of a range is older than the fix."""
    for advisory in ADVISORIES:
        bounds = re.findall(r"[<>=]+([^,]+)", advisory.affected[0].versions)
        assert sorted(bounds, key=version_key) == bounds
