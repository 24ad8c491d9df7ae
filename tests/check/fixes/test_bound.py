"""Names that a fix inserts: certain on their line, or the fix is not offered."""

import pytest

from halfstep.check.finding import Edit
from halfstep.check.fixes.bound import missing_names


def missing(text, inserted="scaler.update()"):
    """What is missing where `HERE` stands."""
    at = text.index("HERE")
    return set(missing_names(text, (Edit(at, at + 4, inserted),)))


CERTAIN = {
    "assigned before": "scaler = make()\nHERE\n",
    "assigned in both branches": "if x:\n    scaler = a()\nelse:\n    scaler = b()\nHERE\n",
    "the other branch leaves": "def f():\n    if x:\n        scaler = a()\n    else:\n        return\n    HERE\n",
    "the same condition": "if amp:\n    scaler = a()\nif amp:\n    HERE\n",
    "a conditional value under its condition": "scaler = a() if amp else None\nif amp:\n    HERE\n",
    "used before": "def f():\n    scaler.scale(x)\n    HERE\n",
    "used right after": "for x in y:\n    HERE\n    scaler.step(o)\n",
    "a parameter": "def f(scaler):\n    HERE\n",
    "a parameter that is tested": "def f(scaler=None):\n    if scaler is not None:\n        HERE\n",
    "a global of the main block": "def f():\n    HERE\nif __name__ == '__main__':\n    scaler = a()\n    f()\n",
    "a variable around": "def f():\n    scaler = a()\n    def g():\n        HERE\n    g()\n",
    "a with target": "with a() as scaler:\n    HERE\n",
    "after try": "try:\n    scaler = a()\nexcept OSError:\n    raise\nHERE\n",
}
MISSING = {
    "assigned later": "HERE\nscaler = make()\n",
    "assigned later in the function": "def f():\n    HERE\n    scaler = make()\n    scaler.step(o)\n",
    "assigned in one branch": "if x:\n    scaler = a()\nHERE\n",
    "in a loop that may not run": "for x in y:\n    scaler = a()\nHERE\n",
    "of the caller": "def f(s):\n    HERE\ndef main():\n    scaler = a()\n    f(scaler)\n",
    "perhaps None": "scaler = a() if amp else None\nHERE\n",
    "None by default": "def f(scaler=None):\n    HERE\n",
    "optional": "def f(scaler: Scaler | None):\n    HERE\n",
    "deleted": "scaler = a()\ndel scaler\nHERE\n",
    "called before it is assigned": "def f():\n    HERE\nf()\nscaler = a()\n",
    "used after a way out": "def f():\n    HERE\n    if x:\n        return\n    scaler.step(o)\n",
    "in except": "try:\n    scaler = a()\nexcept OSError:\n    HERE\n",
}


@pytest.mark.parametrize("text", CERTAIN.values(), ids=CERTAIN)
def test_a_variable_with_a_value_is_certain(text):
    """Each way in which a value is certain."""
    assert missing(text) == set()


@pytest.mark.parametrize("text", MISSING.values(), ids=MISSING)
def test_a_variable_that_may_have_no_value_is_missing(text):
    """Each way in which the inserted line could raise."""
    assert missing(text) == {"scaler"}


def test_attributes_of_self_exist_after_the_constructor():
    """An attribute that `__init__` assigns in any case is certain in methods, unless `__init__` calls them earlier."""
    text = "class T:\n    def __init__(self):\n        {}\n        self.scaler = a()\n        {}\n    def load(self):\n        HERE\n"
    assert missing(text.format("pass", "self.load()"), "self.scaler.update()") == set()
    assert missing(text.format("self.load()", "pass"), "self.scaler.update()") == {"self.scaler"}
    assert missing(text.format("pass", "pass"), "self.other.update()") == {"self.other"}


def test_the_replaced_text_needs_no_proof():
    """What the edited expression already reads is not judged again; an edit that does not parse raises."""
    text = "def f():\n    scaler = a()\n    loss.backward()\n"
    at = text.index("loss")
    assert missing_names(text, (Edit(at, at + 4, "scaler.scale(loss)"),)) == frozenset()
    with pytest.raises(SyntaxError):
        missing_names(text, (Edit(at, at, "(("),))
