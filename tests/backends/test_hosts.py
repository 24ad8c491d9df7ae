"""SLURM's host lists."""

import pytest

from halfstep.backends.hosts import expand_hosts, expand_tasks
from halfstep.errors import SettingError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[08-10]", ["node08", "node09", "node10"]),
        ("n[1,3-4]x,login", ["n1x", "n3x", "n4x", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu[099-101].cluster", ["gpu099.cluster", "gpu100.cluster", "gpu101.cluster"]),
    ],
)
def test_compressed_lists_expand(text, hosts):
    """Ranges keep their zeros, brackets multiply, commas inside them do not split."""
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "node[1", "node[b-c]", "node[3-1]", "a,,b"])
def test_other_text_is_rejected(text):
    """With what to set instead."""
    with pytest.raises(SettingError, match="MASTER_ADDR"):
        expand_hosts(text)


def test_tasks_per_node_expand():
    """Repeated counts, and an error for other text."""
    assert expand_tasks("4(x2),3") == [4, 4, 3]
    with pytest.raises(SettingError, match="tasks per node"):
        expand_tasks("4x2")
