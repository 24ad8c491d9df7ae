"""Static checks for precision mistakes in scripts, notebooks and configurations; no torch, nothing executed."""

from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.session import check_path

__all__ = ["Edit", "Finding", "Fix", "check_path"]
