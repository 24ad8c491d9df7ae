"""A simulated run, put together."""

from __future__ import annotations

from halfstep.check.simulation.comprehensions import Comprehensions
from halfstep.check.simulation.expressions import Expressions
from halfstep.check.simulation.foreign import Foreign
from halfstep.check.simulation.functions import Functions
from halfstep.check.simulation.library import Libraries
from halfstep.check.simulation.objects import Objects
from halfstep.check.simulation.operators import Operators
from halfstep.check.simulation.python import Python
from halfstep.check.simulation.statements import Statements

__all__ = ["Simulation"]


class Simulation(Statements, Expressions, Comprehensions, Operators, Functions, Objects, Libraries, Python, Foreign):
    """Runs a script: statements, expressions and calls."""
