"""Launch: which process of a run this is, read from the environment that a launcher sets.

    torchrun    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; TORCHELASTIC_RESTART_COUNT
    srun        SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST
    mpirun      OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK

RANK and WORLD_SIZE come first: people set them inside srun, and torchrun runs inside a SLURM job. SLURM's variables count only
in a step that srun started (SLURM_STEP_ID): a batch script without srun has SLURM_NTASKS as well and is one process. What
contradicts itself raises, because a wrong world size is waited for until the timeout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.backends.hosts import expand_hosts, expand_tasks
from halfstep.errors import SettingError
from halfstep.events import log_warning

__all__ = ["Launch", "read_launch", "reject_distributed_launch"]

LOCALHOST = "127.0.0.1"
_LOCAL_NAMES = {LOCALHOST, "localhost", "::1"}
_PORT = 29500  # torchrun's default
# Ports that SLURM jobs are spread over: below Linux's ephemeral ports, which start at 32768.
_FIRST_PORT, _NUM_PORTS = 12000, 20000


@dataclass(frozen=True)
class Launch:
    """One process of a launch; the defaults are those of a process that no launcher started."""

    launcher: str = "none"  # or torchrun, slurm, openmpi
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1  # processes on this machine
    address: str | None = None  # where rank 0 listens
    port: int | None = None
    restarts: int = 0  # how often torchrun has restarted the processes
    max_restarts: int = 0
    run_id: str | None = None  # torchrun's --rdzv-id, the same for all restarts; None without one

    def __post_init__(self) -> None:
        values = f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of {self.local_world_size}"
        if not (0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size <= self.world_size):
            raise SettingError(
                f"The environment contradicts itself: {values} ({self.launcher}). Ranks count from 0 and are below the world size; "
                "start all processes with one launcher and set none of its variables yourself."
            )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes files and progress."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """The launch that `environ` (os.environ) describes."""
    env = {name: value.strip() for name, value in (os.environ if environ is None else environ).items()}
    if env.get("RANK") or env.get("WORLD_SIZE", "1") not in {"", "1"}:
        return _torchrun(env)
    if env.get("SLURM_STEP_ID") and env.get("SLURM_PROCID"):
        return _slurm(env)
    if env.get("OMPI_COMM_WORLD_SIZE"):
        return _openmpi(env)
    if env.get("SLURM_NTASKS", "1") not in {"", "1"} and env.get("SLURM_JOB_ID"):
        log_warning(
            f"SLURM_NTASKS={env['SLURM_NTASKS']}, but srun did not start this process: it runs alone. Use srun."
        )
    return Launch()


def _torchrun(env: Mapping[str, str]) -> Launch:
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in env and env.get("SLURM_STEP_ID"):
        tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", ""))
        if tasks == str(world_size) and env.get("SLURM_PROCID", str(rank)) != str(rank):
            raise SettingError(
                f"RANK={rank}, but SLURM_PROCID={env['SLURM_PROCID']} in a step of {tasks} tasks. Export RANK=$SLURM_PROCID inside "
                "srun, not in front of it, or omit it: Halfstep reads SLURM's variables itself."
            )
    local = env.get("LOCAL_RANK", "")
    if world_size > 1 and not local and env.get("MASTER_ADDR", LOCALHOST) not in _LOCAL_NAMES:
        raise SettingError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set, LOCAL_RANK is not, and MASTER_ADDR={env['MASTER_ADDR']} may be another "
            "machine: it is unknown which GPU this rank uses. Start the ranks with torchrun, or set LOCAL_RANK."
        )
    local_rank = _number(env, "LOCAL_RANK") if local else rank
    return Launch(
        "torchrun",
        rank,
        world_size,
        local_rank,
        # DeepSpeed's launcher sets LOCAL_SIZE instead.
        _number(
            env,
            "LOCAL_WORLD_SIZE" if env.get("LOCAL_WORLD_SIZE") else "LOCAL_SIZE",
            max(local_rank + 1, world_size if not local else 1),
        ),
        env.get("MASTER_ADDR") or LOCALHOST,
        _number(env, "MASTER_PORT", _PORT),
        _number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        _number(env, "TORCHELASTIC_MAX_RESTARTS", 0),
        None if env.get("TORCHELASTIC_RUN_ID", "none") in {"", "none"} else env["TORCHELASTIC_RUN_ID"],
    )


def _slurm(env: Mapping[str, str]) -> Launch:
    tasks = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    rank, world_size, local_rank = _number(env, "SLURM_PROCID"), _number(env, tasks), _number(env, "SLURM_LOCALID")
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    node, counts = _number(env, "SLURM_NODEID", 0), [] if not per_node else expand_tasks(per_node)
    local_world_size = counts[node] if node < len(counts) else local_rank + 1
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    address = env.get("MASTER_ADDR") or (expand_hosts(hosts)[0] if hosts else None)
    if address is None and world_size > 1:
        raise SettingError(
            "Neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set, so the host of rank 0 is unknown; set MASTER_ADDR."
        )
    # All tasks of a step compute the same port; steps and jobs on one node get different ones.
    spread = _number(env, "SLURM_JOB_ID", 0) * 7 + _number(env, "SLURM_STEP_ID", 0)
    port = _number(env, "MASTER_PORT", _FIRST_PORT + spread % _NUM_PORTS)
    restarts = _number(env, "SLURM_RESTART_COUNT", 0)
    return Launch("slurm", rank, world_size, local_rank, local_world_size, address, port, restarts)


def _openmpi(env: Mapping[str, str]) -> Launch:
    prefix = "OMPI_COMM_WORLD_"
    rank, world_size, local_rank = (_number(env, prefix + name) for name in ("RANK", "SIZE", "LOCAL_RANK"))
    local_world_size = _number(env, prefix + "LOCAL_SIZE", local_rank + 1)
    address = env.get("MASTER_ADDR") or (LOCALHOST if local_world_size == world_size else None)
    if address is None:
        raise SettingError(
            f"mpirun started {world_size} processes, {local_world_size} of them on this machine, and does not report the host of rank 0; "
            "pass it with mpirun -x MASTER_ADDR=HOST."
        )
    port = _number(env, "MASTER_PORT", _PORT)
    return Launch("openmpi", rank, world_size, local_rank, local_world_size, address, port)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdigit():
        related = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        shown = ", ".join(f"{other}={env[other]}" for other in related if other in env) or "none of torchrun's are set"
        state = f"{name}={text!r} is not a number" if text else f"{name} is not set"
        raise SettingError(
            f"{state}, but other variables of a launcher are ({shown}). Start all processes with torchrun, srun or mpirun, or "
            "unset these variables to run in one process."
        )
    return int(text)


def reject_distributed_launch(command: str) -> None:
    """Raise if a launcher such as torchrun started several processes: each would do the whole run on its own."""
    launch = read_launch()
    if launch.world_size > 1:
        raise SettingError(
            f"{launch.launcher} started {launch.world_size} processes (this is rank {launch.rank}), and `{command}` runs in one; each of "
            "them would do the whole run. Start it without the launcher. `halfstep train` trains on several ranks."
        )
