"""The table of operations whose dtypes a region decides."""

from itertools import chain

import pytest

from halfstep.precision.operations import KINDS, ON_EVERY_DEVICE, ON_THE_OTHER_LIST


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_each_operation_has_one_kind(device_type):
    """No operation is listed twice for a device, and every kind is a known one."""
    tables = ON_THE_OTHER_LIST[device_type], ON_EVERY_DEVICE[device_type]
    names = list(chain.from_iterable(chain.from_iterable(table.values() for table in tables)))
    assert len(names) == len(set(names))
    assert {kind for table in tables for kind in table} <= set(KINDS)


def test_operations_in_place_follow_their_first_tensor():
    """An operation in place cannot change its tensor's dtype, so it casts the others, and no other kind has one."""
    for table in (*ON_THE_OTHER_LIST.values(), *ON_EVERY_DEVICE.values()):
        assert not [name for kind, names in table.items() if kind != "first" for name in names if name.endswith("_")]
