"""A block in which torch raises on every synchronising CUDA call it can detect."""

import contextlib
import warnings

import torch


@contextlib.contextmanager
def no_synchronisation():
    """Raise on synchronising calls inside the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
