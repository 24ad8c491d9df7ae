"""Functions followed into their callers."""

from check_scripts import script


def traces(text):
    return script(f"import torch\nscaler = torch.amp.GradScaler('cuda')\n{text}").traces


def test_a_helper_runs_in_its_callers_loop():
    """The events of a function appear inside the loop that calls it, with its parameters renamed."""
    (trace,) = traces(
        "def step(gs, opt):\n    gs.step(opt)\n    gs.update()\nfor x in data:\n    scaler.scale(loss).backward()\n    step(scaler, optimizer)\n"
    )
    step = next(e for e in trace if e.kind == "scaler_step")
    assert (step.scaler, step.optimizer, len(step.loops)) == ("scaler", "optimizer", 1)


def test_a_function_nobody_calls_is_a_root():
    """A function that other files may call has a separate trace."""
    all_traces = traces("def train(loader):\n    for x in loader:\n        loss.backward()\n")
    assert [t[0].function.name for t in all_traces] == ["<module>", "train"]


def test_recursion_ends():
    """Functions that call themselves or each other are followed once."""
    all_traces = traces(
        "def a():\n    loss.backward()\n    b()\ndef b():\n    a()\ndef c():\n    c()\n    loss.backward()\n"
    )
    assert sum(e.kind == "backward" for t in all_traces for e in t) >= 2


def test_a_literal_argument_decides_its_branches():
    """A branch that the caller's literal rules out is not in the trace, and one it allows has no guard."""
    text = (
        "def run(train):\n    if train:\n        optimizer.step()\n    else:\n        model(x)\n"
        "with torch.no_grad():\n    run(False)\nrun(train=True)\n"
    )
    (trace,) = traces(text)
    (step,) = [e for e in trace if e.kind == "opt_step"]
    (forward,) = [e for e in trace if e.kind == "forward"]
    assert step.guards == ()
    assert step.inside("no_grad") is None
    assert forward.inside("no_grad")


def test_a_literal_default_decides_like_an_argument():
    """A branch that the default rules out is not in the trace."""
    (trace,) = traces("def run(train=False):\n    if train:\n        optimizer.step()\nrun()\nloss.backward()\n")
    assert not [e for e in trace if e.kind == "opt_step"]


def test_calls_that_branch_out_are_cut_off():
    """A chain of functions that each call the next one ten times is cut off, not followed to its ten millionth end."""
    body = (
        "".join(f"def f{i}():\n" + f"    f{i + 1}()\n" * 10 for i in range(7))
        + "def f7():\n    loss.backward()\nf0()\n"
    )
    assert sum(len(t) for t in traces(body)) <= 3001


def test_a_spawned_function_is_read_without_the_condition_of_its_plain_call():
    """`mp.spawn(main)` in one branch and `main()` in the other: both branches of the same flag in main are possible."""
    text = (
        "import torch.multiprocessing as mp\ndef main(rank=0):\n    if args.ddp:\n        loss.backward()\n    optimizer.step()\n"
        "if args.ddp:\n    mp.spawn(main)\nelse:\n    main()\n"
    )
    assert any("backward" in {e.kind for e in trace} for trace in traces(text))
    assert not any("backward" in {e.kind for e in trace} for trace in traces(text.replace("mp.spawn(main)", "pass")))


def test_a_literal_of_one_call_is_not_the_variable_of_another():
    """A flag that one call passes as False rules its branch out there, though another caller has a variable of that name."""
    text = """\
def step(gs, last):
    scaler.scale(loss).backward()
    if last:
        gs.step(optimizer)
def probe():
    step(scaler, last=False)
def fit():
    for i, x in enumerate(loader):
        last = {value}
        step(scaler, last=last)
probe()
fit()
"""
    for value in ("(i + 1) % 4 == 0", "args.last"):
        (trace,) = traces(text.format(value=value))
        assert [len(e.loops) for e in trace if e.kind == "scaler_step"] == [1]
        assert [len(e.loops) for e in trace if e.kind == "backward"] == [0, 1]
