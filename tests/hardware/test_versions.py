"""Versions sort as PEP 440 orders them, as far as packages use it."""

from itertools import pairwise

import pytest

from halfstep.hardware.versions import is_version, matches, version_key


def test_versions_sort_by_age():
    """Development, alpha, release candidate, final and post releases come in this order."""
    ordered = ["1.13.1", "2.5.0.dev20240612", "2.5.0a0", "2.5.0rc1", "2.5.0rc10", "2.5", "2.5.0.post1", "2.5.1", "2.10"]
    assert all(version_key(a) < version_key(b) for a, b in pairwise(ordered))


@pytest.mark.parametrize(
    ("one", "other"), [("2.5", "2.5.0"), ("2.13.0+cpu", "2.13"), ("v0.19.8", "0.19.8"), ("2.11.0+cu130", "2.11")]
)
def test_spellings_of_one_release_are_equal(one, other):
    """Trailing zeros, a leading v and the build after the plus sign make no difference."""
    assert version_key(one) == version_key(other)


@pytest.mark.parametrize(
    ("version", "requirement", "inside"),
    [
        ("2.11", ">=2.11,<2.15", True),
        ("2.15.0", ">=2.11,<2.15", False),
        ("2.14.1+cu130", ">=2.11,<2.15", True),
        ("2.10.9", ">=2.11", False),
        ("4.0.0b11", "==4.0.0b11", True),
        ("4.0.0b12", "==4.0.0b11", False),
        ("0.41.0", "<=0.41.0", True),
        ("0.41.1", ">0.41.1", False),
        ("1.0", "", True),
    ],
)
def test_a_version_is_compared_with_every_bound(version, requirement, inside):
    """All bounds of a requirement apply; the empty one matches everything."""
    assert matches(version, requirement) is inside


def test_what_is_not_a_version_is_rejected():
    """Neither a word nor an unknown bound is taken for a version."""
    assert not is_version("latest")
    with pytest.raises(ValueError, match="not a version"):
        version_key("latest")
    with pytest.raises(ValueError, match="not a bound"):
        matches("1.0", "~=1.0")
