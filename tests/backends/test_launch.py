"""The environments of launchers, read into one value."""

import pytest

from halfstep.backends import reject_distributed_launch
from halfstep.backends.launch import Launch, read_launch
from halfstep.errors import SettingError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize("env", [{}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "1"}])
def test_without_a_launcher_there_is_one_process(env):
    """No variables, or a world size of 1 alone."""
    assert read_launch(env) == Launch()


def test_torchrun_is_read_with_its_restarts():
    """Every variable of torchrun has its place."""
    assert read_launch(TORCHRUN) == Launch("torchrun", 3, 4, 1, 2, "node1", 29501, 2, 3, "job7")


def test_torchrun_inside_a_slurm_job_comes_first():
    """One srun task per node starts torchrun, whose ranks are not SLURM's."""
    assert read_launch(SLURM | TORCHRUN).rank == 3


def test_srun_is_read_with_the_first_host_and_a_port_of_the_step():
    """Rank, local ranks of this node, the host of rank 0 from a compressed list, and the same port on all tasks."""
    launch = read_launch(SLURM)
    assert (launch.launcher, launch.rank, launch.world_size) == ("slurm", 5, 8)
    assert (launch.local_rank, launch.local_world_size, launch.address) == (1, 4, "gpu07")
    assert launch.port == read_launch(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).port
    assert launch.port != read_launch(SLURM | {"SLURM_STEP_ID": "1"}).port
    assert 1024 < launch.port < 32768


def test_a_batch_script_without_srun_is_one_process(caplog):
    """SLURM_NTASKS is set there too; waiting for the other tasks would never end."""
    env = {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS")} | {"SLURM_PROCID": "0"}
    assert read_launch(env).world_size == 1
    assert "srun did not start this process" in caplog.text


def test_open_mpi_is_read_on_one_machine_and_needs_an_address_on_several():
    """The host of rank 0 is not among its variables."""
    assert read_launch(OPENMPI) == Launch("openmpi", 1, 2, 1, 2, "127.0.0.1", 29500)
    with pytest.raises(SettingError, match="-x MASTER_ADDR=HOST"):
        read_launch(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WORLD_SIZE": "4"}, r"RANK is not set.*WORLD_SIZE=4"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"contradicts itself: rank 4 of 4"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, r"RANK='x' is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, r"local rank 2 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, r"LOCAL_RANK is not.*MASTER_ADDR=node1"),
        (SLURM | {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, r"RANK=0, but SLURM_PROCID=5"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[07-"}, r"'gpu\[07-' is not a host list"),
    ],
)
def test_contradictions_raise_with_their_values(env, message):
    """A wrong world size would be waited for until the timeout."""
    with pytest.raises(SettingError, match=message):
        read_launch(env)


def test_commands_of_one_process_reject_several(monkeypatch):
    """Each of them would do the whole run."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=r"torchrun started 4 processes \(this is rank 3\).*halfstep train"):
        reject_distributed_launch("halfstep compare")
