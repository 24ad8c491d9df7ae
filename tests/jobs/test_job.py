import functools
import inspect
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import HalfstepError, SettingError
from halfstep.jobs.job import (
    ARGUMENTS,
    FIELDS,
    Arguments,
    Job,
    JobError,
    call_by_name,
    read_arguments,
    trainable,
    user_line,
)

AVAILABLE = {name: f"the {name}" for name in ARGUMENTS}


class Parameter:
    """A stand-in for a parameter."""

    def __init__(self, requires_grad=True):
        self.requires_grad = requires_grad


class Model:
    """A stand-in for a module, so that these tests do not need torch."""

    def __init__(self):
        self.all = {"a": Parameter(), "frozen": Parameter(requires_grad=False), "b": Parameter()}

    def named_parameters(self):
        """As in torch."""
        return self.all.items()

    def __call__(self, x):
        """Forward."""
        return x


class Loss:
    """A stand-in for a tensor with one element."""

    shape = ()

    def backward(self):
        """As in torch."""
        raise NotImplementedError

    def numel(self):
        """As in torch."""
        return 1


OPTIMIZER = SimpleNamespace(step=lambda: None, param_groups=[])


def make(**changes):
    """A valid job with some fields replaced."""
    fields = {
        "model": Model,
        "data": lambda split: [split],
        "loss": lambda model, batch: Loss(),
        "optimizer": lambda params: OPTIMIZER,
    }
    return Job(**{**fields, **changes})


# ---- call_by_name -----------------------------------------------------------------------------------------------


def test_a_callable_receives_only_the_arguments_it_names():
    """Only the named arguments are passed, by name."""
    assert call_by_name(lambda batch, model: (model, batch), AVAILABLE) == ("the model", "the batch")
    assert call_by_name(lambda: "nothing", AVAILABLE) == "nothing"
    assert call_by_name(lambda *, seed: seed, AVAILABLE) == "the seed"


def test_a_default_is_replaced_only_by_a_known_name():
    """An argument with a default is passed if its name is known, and keeps its default otherwise."""
    assert call_by_name(lambda seed=1, width=2: (seed, width), AVAILABLE) == ("the seed", 2)
    assert call_by_name(lambda seed=1, width=2: (seed, width), {}) == (1, 2)


def test_variadic_arguments_receive_nothing():
    """*args and **kwargs name nothing."""
    assert call_by_name(lambda *args, seed, **rest: (args, seed, rest), AVAILABLE) == ((), "the seed", {})


def test_classes_methods_and_callable_objects_are_called_by_name():
    """The signatures of __init__, bound methods, __call__ and static methods are used."""

    class Thing:
        def __init__(self, seed):
            self.seed = seed

        def method(self, rank):
            return self.seed, rank

        @classmethod
        def build(cls, seed):
            return cls(seed)

        @staticmethod
        def static(device):
            return device

        def __call__(self, epoch):
            return self.seed, epoch

    thing = call_by_name(Thing, AVAILABLE)
    assert thing.seed == "the seed"
    assert call_by_name(thing.method, AVAILABLE) == ("the seed", "the rank")
    assert call_by_name(thing, AVAILABLE) == ("the seed", "the epoch")
    assert call_by_name(Thing.build, AVAILABLE).seed == "the seed"
    assert call_by_name(Thing.static, AVAILABLE) == "the device"


def test_arguments_bound_by_partial_stay_bound():
    """A keyword or position bound by functools.partial is never replaced, even through nested partials."""

    def function(model, seed, batch_size, rank=0):
        return model, seed, batch_size, rank

    once = functools.partial(function, seed=7)
    assert call_by_name(once, AVAILABLE) == ("the model", 7, "the batch_size", "the rank")
    twice = functools.partial(once, batch_size=3)
    assert call_by_name(twice, AVAILABLE) == ("the model", 7, 3, "the rank")
    assert call_by_name(functools.partial(function, "mine"), AVAILABLE)[0] == "mine"


def test_a_wrapped_function_keeps_its_names():
    """A decorator that uses functools.wraps is transparent."""

    def decorate(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return function(*args, **kwargs)

        return inner

    assert call_by_name(decorate(lambda seed: seed), AVAILABLE) == "the seed"


def test_an_unknown_required_argument_is_rejected_with_a_suggestion():
    """The error has the unknown name, the nearest known one and the list."""
    with pytest.raises(SettingError) as caught:
        call_by_name(lambda bacth: bacth, AVAILABLE)
    message = str(caught.value)
    assert "'bacth'" in message
    assert "Did you mean 'batch'?" in message
    assert ", ".join(ARGUMENTS) in message


def test_the_error_without_available_arguments_lists_none():
    """If no arguments are available, the list of known names is "none"."""
    with pytest.raises(SettingError, match="Known here: none"):
        call_by_name(lambda x: x, {})


def test_positional_only_arguments_are_rejected():
    """A '/' in the signature raises an error with advice, unless the argument has a default and an unknown name."""
    with pytest.raises(SettingError, match=r"'model' by position only.*remove the '/'"):
        call_by_name(lambda model, /: model, AVAILABLE)
    with pytest.raises(SettingError, match="'seed' by position only"):
        call_by_name(lambda seed=3, /: seed, AVAILABLE)
    assert call_by_name(lambda width=3, /, *, seed: (width, seed), AVAILABLE) == (3, "the seed")


def test_a_signature_that_cannot_be_read_is_rejected():
    """The error for a callable without readable argument names suggests a lambda."""

    class Opaque:
        __signature__ = "nonsense"

        def __call__(self):
            raise NotImplementedError

    with pytest.raises(SettingError, match=r"type Opaque.*cannot be read.*lambda"):
        call_by_name(Opaque(), AVAILABLE)
    unreadable = next(f for f in (dict.fromkeys, type, min, int) if not _readable(f))
    with pytest.raises(SettingError, match="cannot be read"):
        call_by_name(unreadable, AVAILABLE)


def _readable(function):
    try:
        inspect.signature(function)
    except ValueError:
        return False
    return True


def test_a_value_that_is_not_callable_is_rejected():
    """The error for a value in place of a function has its type."""
    with pytest.raises(SettingError, match="an object of type int, which cannot be called"):
        read_arguments(3)


@given(
    required=st.lists(st.sampled_from(sorted(ARGUMENTS)), unique=True),
    optional=st.lists(st.sampled_from([*sorted(ARGUMENTS), "width", "depth"]), unique=True),
    available_names=st.sets(st.sampled_from(sorted(ARGUMENTS))),
)
def test_every_signature_gets_exactly_its_arguments(required, optional, available_names):
    """For any signature, required names are passed or raise, and optional ones are passed or keep their default."""
    optional = [name for name in optional if name not in required]
    text = ", ".join(["*", *required, *(f"{name}=None" for name in optional)]) if required or optional else ""
    function = eval(f"lambda {text}: dict(locals())")
    available = {name: AVAILABLE[name] for name in available_names}
    if set(required) - available_names:
        with pytest.raises(SettingError):
            call_by_name(function, available)
    else:
        assert call_by_name(function, available) == {name: available.get(name) for name in [*required, *optional]}


def test_arguments_are_a_value():
    """The arguments of a signature can be compared and printed."""
    assert read_arguments(lambda model, seed=0, **rest: None) == Arguments(("model",), {"seed": 0}, variadic=True)


# ---- building a Job ---------------------------------------------------------------------------------------------


def test_a_job_is_a_frozen_value():
    """Fields cannot be set after construction."""
    with pytest.raises(AttributeError):
        make().loss = None


@pytest.mark.parametrize("which", FIELDS)
def test_a_misspelt_argument_fails_when_the_job_is_built(which):
    """Every field is checked at construction against its own list of names."""
    with pytest.raises(SettingError) as caught:
        make(**{which: lambda sede: None})
    assert f"Job({which}=...) has an unknown argument 'sede'. Did you mean 'seed'?" in str(caught.value)
    for name in FIELDS[which]:
        assert name in str(caught.value)


def test_a_name_that_does_not_exist_yet_has_its_own_error():
    """A model cannot be built from a batch, and the error explains why."""
    with pytest.raises(SettingError, match="'batch', which does not exist yet when it is called"):
        make(model=lambda batch: None)


def test_a_built_object_in_place_of_a_callable_gets_an_example():
    """A module, a loader or None in place of a function raises an error with an example."""
    with pytest.raises(SettingError, match=r"not an object of type Model; write e.g. model=lambda: MyModel\(\)"):
        make(model=Model())
    with pytest.raises(SettingError, match=r"not an object of type list; write e.g. data=lambda batch_size"):
        make(data=[1, 2])
    with pytest.raises(SettingError, match=r"not None; write e.g. optimizer=lambda params"):
        make(optimizer=None)


def test_a_decorator_that_hides_the_names_is_reported():
    """A loss that names no arguments is rejected, and the error has the usual cause."""
    with pytest.raises(SettingError, match=r"names none of the arguments.*functools.wraps"):
        make(loss=lambda *args, **kwargs: None)
    with pytest.raises(SettingError, match="names none of the arguments it could use, so"):
        make(optimizer=lambda lr=3: None)


def test_shard_accepts_classes_and_patterns():
    """A single class or pattern needs no tuple; any other type is rejected."""
    assert make(shard="blocks.*").shard == ("blocks.*",)
    assert make(shard=Model).shard == (Model,)
    assert make(shard=[Model, "head"]).shard == (Model, "head")
    for wrong in (3, [3], [Model()]):
        with pytest.raises(SettingError, match="takes module classes or name patterns"):
            make(shard=wrong)


# ---- calling a Job ----------------------------------------------------------------------------------------------


def test_call_passes_the_values_that_the_field_names():
    """The caller may pass more values than the callable names."""
    job = make(data=lambda split, seed=1: [split, seed])
    assert job.call("data", split="val", seed=5, rank=0) == ["val", 5]
    assert job.call("data", split="val") == ["val", 1]


def test_call_takes_rank_seed_and_device_from_the_run_context():
    """The RunContext provides its five values, and values passed by name override them."""
    torch = pytest.importorskip("torch")
    from halfstep.backends.context import RunContext

    job = make(
        data=lambda split, batch_size, seed, rank, world_size, device: [batch_size, seed, rank, world_size, device]
    )
    run_context = RunContext(rank=1, world_size=2, seed=5, batch_size=3)
    assert job.call("data", run_context, split="val") == [3, 5, 1, 2, torch.device("cpu")]
    assert job.call("data", run_context, split="val", seed=7)[1] == 7


def test_params_are_the_trainable_ones():
    """`params` and `named_params` come from the model, without frozen parameters."""
    model, received = Model(), {}

    def optimizer(params, named_params):
        received.update(params=params, named_params=named_params)
        return OPTIMIZER

    make(optimizer=optimizer).call("optimizer", model=model)
    assert received["params"] == [model.all["a"], model.all["b"]]
    assert received["named_params"] == [("a", model.all["a"]), ("b", model.all["b"])] == trainable(model)


def test_params_that_were_passed_are_not_replaced():
    """A caller may pass its own list of parameters."""
    received = []
    job = make(optimizer=lambda params: received.append(params) or OPTIMIZER)
    job.call("optimizer", model=Model(), params=["mine"])
    assert received == [["mine"]]


def test_absent_optional_fields_return_none():
    """Calling the metric or scheduler of a job without them returns None."""
    assert make().call("metric", model=1, batch=2) is None
    assert make().call("scheduler", optimizer=1) is None


def test_a_missing_value_is_reported_with_the_available_ones():
    """A required name that the caller does not pass raises a SettingError, not a TypeError in the user's code."""
    with pytest.raises(SettingError, match=r"needs 'split', which this call does not provide \(it provides: 'seed'\)"):
        make().call("data", seed=1)


def test_an_unknown_field_lists_the_fields():
    """The error for an unknown field lists the fields."""
    with pytest.raises(SettingError, match="no field 'losss' to call; it has model, data, loss"):
        make().call("losss")


def test_an_error_in_a_callable_names_field_type_message_and_line():
    """The error has the field, the exception and the user's line; the original is the cause."""

    def loss(model, batch):
        return 1 / 0

    line = loss.__code__.co_firstlineno
    with pytest.raises(JobError) as caught:
        make(loss=loss).call("loss", model=Model(), batch=1)
    message = str(caught.value)
    assert message == (
        f"The loss of the job (defined at {__file__}:{line}) failed at {__file__}:{line + 1}: ZeroDivisionError: division by zero"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert isinstance(caught.value, HalfstepError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_a_named_job_is_described_by_its_name():
    """The name replaces the location in the message."""
    assert make(name="mine").describe("loss") == "The loss of job 'mine'"
    assert "defined at" in make(loss=functools.partial(lambda model, batch: 1)).describe("loss")
    assert make(metric=None).describe("metric") == "The metric of the job"


def test_the_line_is_the_users_even_if_a_library_raised():
    """The deepest line of the user's code is shown, not the library's."""

    def data(split):
        return functools.reduce(lambda a, b: inspect.signature(3), [1, 2])

    with pytest.raises(JobError, match=f"{data.__code__.co_firstlineno + 1}: TypeError: 3 is not a callable"):
        make(data=data).call("data", split="train")


def test_a_line_of_installed_code_is_shown_if_there_is_no_other():
    """Without a line of user code, the first one outside Halfstep is shown."""
    with pytest.raises(JobError, match=r"failed at .*inspect\.py:\d+: TypeError: 3 is not"):
        make(data=functools.partial(inspect.signature, 3)).call("data")
    assert user_line(ValueError("never raised")) == ""


def test_errors_of_halfstep_pass_unchanged():
    """Halfstep's own errors are not wrapped."""

    def data(split):
        raise SettingError("as it is")

    with pytest.raises(SettingError, match=r"^as it is$"):
        make(data=data).call("data", split="train")


def test_out_of_memory_errors_pass_unchanged():
    """The batch finder has to see the original exception."""
    torch = pytest.importorskip("torch")
    for kind in (MemoryError, torch.OutOfMemoryError):

        def loss(model, batch, kind=kind):
            raise kind("full")

        with pytest.raises(kind, match="full"):
            make(loss=loss).call("loss", model=1, batch=2)


def test_a_keyboard_interrupt_passes_unchanged():
    """Ctrl-C is not reported as an error of the job."""

    def loss(model, batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(loss=loss).call("loss", model=1, batch=2)


def test_guard_names_the_field_of_an_error_while_iterating():
    """An exception in a generator of batches is reported for the data; StopIteration is not an error."""

    def data(split):
        yield 1
        raise ValueError("bad file")

    job = make(data=data)
    batches = job.call("data", split="train")
    with job.guard("data"):
        assert next(batches) == 1
    with pytest.raises(JobError, match=r"The data of the job.*ValueError: bad file"), job.guard("data"):
        next(batches)
    with pytest.raises(StopIteration), job.guard("data"):
        next(iter([]))


@pytest.mark.parametrize(
    ("which", "result", "message"),
    [
        ("model", None, "returned None, not a module"),
        ("model", Model, "returned the class Model, not a module"),
        ("data", 3, "type int, not an iterable of batches"),
        ("data", {"x": 1}, "type dict, not an iterable of batches"),
        ("loss", 0.5, "type float, not a tensor to call backward on"),
        ("metric", "high", "type str, not one number"),
        ("optimizer", None, "returned None, not an optimizer"),
        ("scheduler", 3, "type int, not a scheduler"),
    ],
)
def test_a_wrong_result_is_rejected_with_an_example(which, result, message):
    """The result of a callable is checked when it returns, and the error has an example."""
    call = {"model": lambda: result, "data": lambda: result, "optimizer": lambda params: result}
    call["scheduler"] = lambda optimizer: result
    job = make(**{which: call.get(which, lambda model, batch: result)})
    with pytest.raises(JobError) as caught:
        job.call(which, model=Model(), batch=1, params=[], optimizer=OPTIMIZER) if which != "model" else job.call(which)
    assert message in str(caught.value)
    assert f"Write e.g. {which}=" in str(caught.value)


def test_a_loss_per_example_is_rejected():
    """The error for a loss with more than one element has its shape and suggests averaging."""
    torch = pytest.importorskip("torch")
    job = make(loss=lambda model, batch: torch.zeros(4), metric=lambda model, batch: torch.tensor(0.5))
    with pytest.raises(JobError, match=r"of shape \(4,\) where one number is needed; average it"):
        job.call("loss", model=1, batch=2)
    assert job.call("metric", model=1, batch=2) == 0.5


def test_torch_classes_can_be_used_directly():
    """torch's optimizer and scheduler classes are valid fields."""
    torch = pytest.importorskip("torch")
    job = make(
        model=lambda: torch.nn.Linear(2, 1),
        optimizer=torch.optim.AdamW,
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3),
    )
    optimizer = job.call("optimizer", model=job.call("model"))
    assert job.call("scheduler", optimizer=optimizer).step_size == 3
    with pytest.raises(SettingError, match=r"'step_size'.*functools.partial"):
        make(scheduler=torch.optim.lr_scheduler.StepLR)
    with pytest.raises(SettingError, match="not an object of type CrossEntropyLoss"):
        make(loss=torch.nn.CrossEntropyLoss())


def test_job_needs_no_torch_to_be_imported():
    """A job file can be loaded without torch."""
    code = (
        "import sys; sys.modules['torch'] = None; import halfstep.jobs.job, halfstep.jobs.targets, halfstep.jobs.files"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"data": lambda split, batch_size=16: [split]}, 16),
        ({"data": lambda split, batch_size: [split]}, None),
        ({"data": lambda split, batch_size=None: [split]}, None),
        ({"data": lambda split: [split]}, None),
        ({"data": functools.partial(lambda split, batch_size: [split], batch_size=4)}, None),
        ({"data": lambda batch_size=8: [1], "model": lambda batch_size=2: Model()}, 8),
        ({"model": lambda batch_size=2: Model()}, 2),
    ],
)
def test_the_default_batch_size_is_that_of_the_signature(changes, size):
    """Of `data` first; an argument that is bound, required or None has no default."""
    assert make(**changes).default_batch_size() == size


def test_data_without_a_split_has_no_validation():
    """Data that cannot distinguish the splits would be validated on what it trains on."""
    assert make().has_validation
    assert make(data=lambda split="train": [split]).has_validation
    assert not make(data=lambda batch_size: [batch_size]).has_validation


def test_only_validation_data_may_be_none():
    """None for split="val" is a job without validation; for "train" it is a mistake."""
    job = make(data=lambda split: None)
    assert job.call("data", split="val") is None
    with pytest.raises(JobError, match="returned None"):
        job.call("data", split="train")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda: None, None),
        (lambda epoch=None: None, None),
        (lambda metrics: None, None),
        (lambda epoch: None, "needs 'epoch'"),
        (None, "not a scheduler"),
    ],
)
def test_a_scheduler_is_one_that_can_be_stepped(step, message):
    """Without an argument, or with a validation result; anything else is rejected by name."""
    job = make(scheduler=lambda optimizer: SimpleNamespace(step=step))
    if message is None:
        assert job.call("scheduler", optimizer=OPTIMIZER).step is step
    else:
        with pytest.raises(JobError, match=message):
            job.call("scheduler", optimizer=OPTIMIZER)


def test_a_list_of_schedulers_is_rejected_with_what_to_use():
    """torch has schedulers that combine others."""
    with pytest.raises(JobError, match="ChainedScheduler"):
        make(scheduler=lambda optimizer: [SimpleNamespace(step=print)]).call("scheduler", optimizer=OPTIMIZER)
