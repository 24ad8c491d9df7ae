"""The code of a run in words."""

from halfstep.train.code import code_facts
from halfstep.train.config import TrainConfig
from launch_job import make_job


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
