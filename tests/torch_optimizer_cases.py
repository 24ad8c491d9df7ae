"""Writes torch's own cases for its optimizers to a file: `python torch_optimizer_cases.py FILE`.

A process of its own, because torch's test package changes global settings when it is imported.
"""

import sys
import types
import unittest

import torch


def collect():
    """By class name: (description, arguments) of every input, and (params, arguments, error, at construction) of errors."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401 - only whether it is there
        except ImportError:  # a base class of torch's test cases, of which none is used here
            sys.modules["expecttest"] = types.ModuleType("expecttest")
            sys.modules["expecttest"].TestCase = unittest.TestCase
    from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

    cases = {}
    for info in optim_db:
        inputs = [(case.desc, case.kwargs) for case in info.optim_inputs_func(device="cpu")]
        errors = [
            (
                error.optimizer_error_input.params,
                error.optimizer_error_input.kwargs,
                error.error_type.__name__,
                error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR,
            )
            for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
        ]
        cases[info.optim_cls.__name__] = inputs, errors
    return cases


if __name__ == "__main__":
    torch.save(collect(), sys.argv[1])
