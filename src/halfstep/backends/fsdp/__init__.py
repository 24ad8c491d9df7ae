"""FSDP2: models whose parameters are sharded over ranks, by the user or by the Engine."""

from halfstep.backends.fsdp.backend import FSDP
from halfstep.backends.fsdp.groups import is_sharded_model

__all__ = ["FSDP", "is_sharded_model"]
