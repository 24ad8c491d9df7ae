"""What ranks compare before they train."""

import pytest

from halfstep.errors import SettingError
from halfstep.train.config import TrainConfig
from halfstep.train.equality import check_equal, code_facts
from launch_job import make_job


class OfThree:
    """Ranks whose facts differ from this one's in the last."""

    def __init__(self, **changed):
        self._changed = changed

    def gather(self, value):
        return [value, value, value | self._changed]


def test_equal_ranks_pass():
    """Nothing is raised."""
    check_equal(OfThree(), {"torch": "2.13"})


def test_a_difference_names_the_values_and_their_ranks():
    """The same text on every rank."""
    with pytest.raises(SettingError, match=r"torch: 2.13 on rank 0, 1, 2.11 on rank 2"):
        check_equal(OfThree(torch="2.11"), {"torch": "2.13"})
    with pytest.raises(SettingError, match=r"file job.py: missing on rank 0, 1, abc on rank 2"):
        check_equal(OfThree(**{"file job.py": "abc"}), {"torch": "2.13"})


def test_the_facts_cover_code_and_settings():
    """The job's file by its contents, versions, every setting and the precision."""
    facts = code_facts(make_job(), TrainConfig(steps=3), "bf16")
    assert facts["file launch_job.py"].startswith("sha256 ")
    assert facts["setting steps"] == "3"
    assert facts["precision"] == "bf16"
    assert {"halfstep", "torch", "Python"} <= facts.keys()


def test_another_job_file_has_another_fact(tmp_path):
    """Files of the same name differ by their contents."""
    namespace = {}
    for number in range(2):
        path = tmp_path / str(number) / "job.py"
        path.parent.mkdir()
        path.write_text(f"def loss(model, batch):\n    return {number}\n")
        exec(compile(path.read_text(), path, "exec"), namespace)
        job = make_job(loss=namespace["loss"])
        namespace[f"facts{number}"] = code_facts(job, TrainConfig(steps=1), "fp32")
    assert namespace["facts0"]["file job.py"] != namespace["facts1"]["file job.py"]
