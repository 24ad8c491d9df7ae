"""Guards every test shares: one way to state needs, and no leaks from one test to the next."""

import os

import pytest
from hypothesis import HealthCheck, settings

from forked_python import forking
from halfstep import events

# A deadline, and the health check that counts examples per second, would measure how busy the machine is.
settings.register_profile("halfstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("halfstep")


def pytest_collection_modifyitems(items):
    """GPU tests skip with their reason where there is no CUDA device."""
    if any("gpu" in item.keywords for item in items):
        import torch

        if not torch.cuda.is_available():
            skip = pytest.mark.skip(reason="Requires: [a CUDA device]")
            for item in items:
                if "gpu" in item.keywords:
                    item.add_marker(skip)


@pytest.fixture
def forked():
    """Python programs that the test starts are forked from one interpreter that has imported torch."""
    with forking():
        yield


@pytest.fixture(autouse=True)
def no_remembered_messages():
    """What an earlier test logged once is logged again."""
    events._logged.clear()


@pytest.fixture(autouse=True)
def no_environment_leaks():
    """A test that changes an environment variable and leaves it changed fails."""
    before = dict(os.environ)
    yield
    # Set by pytest, by torch and its compiler, and by Accelerate, once in a process, themselves.
    ignored = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"}
    ignored |= {"PYTORCH_NVML_BASED_CUDA_CHECK"}
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)} - ignored
    changed = {k for k in changed if not k.startswith(("_TORCHINDUCTOR_", "KMP_"))}
    for key in changed:
        if key in before:
            os.environ[key] = before[key]
        else:
            del os.environ[key]
    assert not changed, f"environment changed: {sorted(changed)}"
