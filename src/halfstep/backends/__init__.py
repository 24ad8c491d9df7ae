"""How many ranks a run has and what that changes: the hook list, and one file per backend."""

from halfstep.backends.base import Backend, unwrap
from halfstep.backends.choose import make_backend
from halfstep.backends.context import RunContext
from halfstep.backends.ddp import DataParallel
from halfstep.backends.deepspeed import DeepSpeed, deepspeed_backend
from halfstep.backends.fsdp import FSDP
from halfstep.backends.launch import reject_distributed_launch
from halfstep.backends.single import SingleDevice
from halfstep.backends.wrapped import WrappedDDP

__all__ = [
    "FSDP",
    "Backend",
    "DataParallel",
    "DeepSpeed",
    "RunContext",
    "SingleDevice",
    "WrappedDDP",
    "deepspeed_backend",
    "make_backend",
    "reject_distributed_launch",
    "unwrap",
]
