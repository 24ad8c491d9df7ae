"""Functions, assignments and calls."""

import pytest

from check_scripts import script


def outline(text):
    return script(f"import torch  # float16\n{text}").outline


def function(facts, name):
    return next(f for f in facts.functions if f.name == name)


def test_a_local_variable_hides_the_modules():
    """A local assignment takes precedence over the module's."""
    facts = outline("scaler = one()\ndef f():\n    scaler = two()\n    return scaler\n")
    (binding,) = facts.lookup("scaler", function(facts, "f"))
    assert binding.value.func.id == "two"


def test_a_parameter_is_what_the_same_name_is_elsewhere():
    """A parameter that nothing binds takes the value of its namesake in the file."""
    facts = outline("def main():\n    scaler = make()\n    train(scaler)\ndef train(scaler):\n    scaler.update()\n")
    (binding,) = facts.lookup("scaler", function(facts, "train"))
    assert binding.value.func.id == "make"


def test_copies_are_followed():
    """`self.scaler = scaler` is what `scaler` is."""
    facts = outline("scaler = make()\nclass T:\n    def __init__(self):\n        self.scaler = scaler\n")
    (value,) = facts.values("self.scaler", function(facts, "__init__"))
    assert value.func.id == "make"


def test_copies_in_a_ring_end():
    """Variables that only copy each other do not loop for ever."""
    facts = outline("a = b\nb = c\nc = a\n" * 300 + "d = a\nd = make()\n")
    assert facts.values("a", facts.module) == []
    assert [v.func.id for v in facts.values("d", facts.module)] == ["make"]


def test_methods_are_found_through_self_instances_and_bases():
    """A method call runs the method of the class, of its base in the file, or of the class an instance was made of."""
    text = (
        "class Base:\n    def step(self):\n        scale()\nclass T(Base):\n    def run(self):\n        self.step()\n"
        "t = T()\nt.run()\n"
    )
    facts = outline(text)
    (step, inside), (run, outside) = facts.calls["step"][0], facts.calls["run"][0]
    assert facts.call_target(step, inside).name == "step"
    assert facts.call_target(run, outside).name == "run"


def test_a_stand_in_class_is_not_taken_for_the_import():
    """A class that replaces an import that may fail is not followed."""
    text = (
        "try:\n    from torch.cuda.amp import GradScaler\nexcept ImportError:\n    class GradScaler:\n"
        "        def step(self, optimizer):\n            optimizer.step()\nscaler = GradScaler()\nscaler.step(optimizer)\n"
    )
    facts = outline(text)
    assert facts.call_target(*facts.calls["step"][-1]) is None or facts.calls["step"][-1][1] is not facts.module
    assert all(facts.call_target(c, f) is None for c, f in facts.calls["step"] if f is facts.module)


@pytest.mark.parametrize(
    ("between", "main", "expected"),
    [
        ("", "def main():\n    train(scaler)  # GradScaler\n", "train again"),
        ("", "train()\n", "train again"),
        ("train()\n", "", "train"),
        ("def main():\n    train(scaler)  # GradScaler\n", "", "train again"),
    ],
)
def test_a_function_that_is_defined_again_is_replaced(between, main, expected):
    """A call in a function runs the last definition, and one in the same block the last above it."""
    facts = outline(f"def train():\n    'train'\n{between}def train():\n    'train again'\n{main}")
    assert facts.call_target(*facts.calls["train"][0]).body[0].value.value == expected


def test_a_function_is_replaced_within_its_branch():
    """Of two definitions in one branch the call in that branch runs the last above it."""
    body = "    def train():\n        'a'\n    train()\n    def train():\n        'b'\n    train()\n"
    facts = outline(f"if amp:\n{body}")
    calls = sorted(facts.calls["train"], key=lambda site: site.call.lineno)
    assert [facts.call_target(*site).body[0].value.value for site in calls] == ["a", "b"]


def test_deep_nesting_does_not_exhaust_the_stack():
    """The walk does not recurse, so thousands of nested expressions are read."""
    facts = outline("x = " + "+".join(["scale"] * 900) + "\n")
    assert facts.loads["scale"] == 900
