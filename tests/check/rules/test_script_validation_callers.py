"""HS149: forwards whose region, or whose purpose, is that of a caller."""

import pytest

from check_scripts import findings


def reported(text):
    """The lines at which HS149 is reported."""
    return [f.line for f in findings(text, "HS149")]


PART = """\
import torch
class Net({base}):
    def forward(self, x):
        return self.{inner}(x)
    def run_frozen(self, x):
        with torch.no_grad():
            for view in x:
                out = self.backbone_model(view)
        return out
for x in loader:
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("base", "expected"), [("torch.nn.Module", []), ("Evaluator", [8])])
@pytest.mark.parametrize("inner", ["run_frozen", "head"])
def test_a_module_runs_in_the_region_of_its_caller(base, inner, expected):
    """A forward inside a module that does not train itself is in whatever region the module is called in."""
    assert reported(PART.format(base=base, inner=inner)) == expected


TRAINER = """\
import torch
class Trainer:
    def fit(self, loader):
        for x in loader:
            with torch.autocast('cuda', dtype=torch.bfloat16):
                loss = self.model(x)
            loss.backward()
            self.optimizer.step()
    def {name}(self, x):
        with torch.no_grad():
            return self.model(x)
"""


@pytest.mark.parametrize(("name", "expected"), [("encode", []), ("predict", []), ("validation_step", [11])])
def test_a_method_for_one_input_is_no_validation(name, expected):
    """What a user of the trained model calls, with one input, evaluates nothing."""
    assert reported(TRAINER.format(name=name)) == expected


MONITOR = """\
import torch
@torch.no_grad()
def {name}(model, loader):
    model.eval()
    for x in loader:
        cv2.imwrite(path, model(x).cpu().numpy())
for x in loader:
    with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    optimizer.step()
{name}(model, loader)
"""


@pytest.mark.parametrize(("name", "expected"), [("save_monitor", []), ("run_holdout", [6])])
def test_a_function_that_saves_examples_is_no_validation(name, expected):
    """Pictures for a look at the progress need no autocast."""
    assert reported(MONITOR.format(name=name)) == expected


PASSED = """\
import torch
from contextlib import nullcontext
class Trainer:
    def fit(self, loader):
        context = nullcontext
        if self.mixed:
            def context():
                return torch.autocast('cuda', dtype=torch.bfloat16)
        for x in loader:
            with context():
                loss = self.model(x)
            loss.backward()
            self.optimizer.step()
        self.validate(self.model, loader, context)
    def validate(self, model, loader, context):
        with torch.no_grad():
            for x in loader:
                {region}
                    out = model(x)
"""


@pytest.mark.parametrize(("region", "expected"), [("with context():", []), ("if True:", [19])])
def test_the_context_of_training_is_passed_to_validation(region, expected):
    """A parameter with the name of training's region is that region."""
    assert reported(PASSED.format(region=region)) == expected


SHARED = """\
import torch
class Trainer:
    def scores(self, x):
        if x.dim() == 4:
            with torch.no_grad():
                return self.model(x)
        return self.model(x)
    def fit(self, loader):
        for x in loader:
            with torch.autocast('cuda', dtype=torch.bfloat16):
                loss = self.scores(x)
            loss.backward()
            self.optimizer.step()
    def evaluate(self, loader):
        with torch.no_grad():
            for x in loader:
                {region}
                    out = self.scores(x)
"""


@pytest.mark.parametrize(
    ("region", "expected"), [("if True:", [18]), ("with torch.autocast('cuda', dtype=torch.bfloat16):", [])]
)
def test_a_method_of_both_phases_is_reported_where_validation_calls_it(region, expected):
    """A branch without gradients, in a method that training calls too, needs no region of its own."""
    assert reported(SHARED.format(region=region)) == expected


SPARE = """\
import torch
def decode(model, prompts):
    for x in prompts:
        with torch.no_grad():
            out = model(x)
def train(model, loader, prompts):
    for x in loader:
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = model(x)
        loss.backward()
        optimizer.step()
    {use}
{main}
"""


@pytest.mark.parametrize(
    ("use", "main", "expected"),
    [
        ("pass", "train(model, loader, prompts)", []),
        ("decode(model, prompts)", "train(model, loader, prompts)", [5]),
        ("pass", "train(model, loader, prompts)\nevaluate(model, decode)", [5]),
        ("pass", "", [5]),
    ],
)
def test_a_function_that_a_program_never_calls_validates_nothing(use, main, expected):
    """Code that is left over runs in no dtype; in a file that only defines functions another file may call it."""
    assert reported(SPARE.format(use=use, main=main)) == expected


LOSSES_OF_BOTH = """\
import torch
def compute_losses(model, batch):
    return model.get_logits(batch).clamp_min(1).mean()
{decorator}def evaluate(model, loader):
    with torch.no_grad():
        for batch in loader:
            {evaluated}
def main():
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compute_losses(model, batch)
        loss.backward()
        optimizer.step()
        {called}
"""


@pytest.mark.parametrize(
    ("decorator", "evaluated", "called", "expected"),
    [
        ("", "compute_losses(model, batch)", "evaluate(model, valid)", [7]),
        ("", "show(batch)", "evaluate(model, valid)", []),
        ("", "compute_losses(model, batch)", "with torch.autocast('cuda'): evaluate(model, valid)", []),
        ("@torch.autocast('cuda')\n", "compute_losses(model, batch)", "evaluate(model, valid)", []),
    ],
)
def test_a_function_that_training_calls_under_autocast(decorator, evaluated, called, expected):
    """Validation needs the region of training for a function with the model too, whatever the function does with it."""
    text = LOSSES_OF_BOTH.format(decorator=decorator, evaluated=evaluated, called=called)
    assert reported(text) == [line + bool(decorator) for line in expected]


PART_OF_MODEL = """\
import torch
def train(base):
    vision_model = base.vision_model
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(vision_model(x))
        loss.backward()
        optimizer.step()
def test(base):
    with torch.inference_mode():
        for x in valid:
            features = base.{part}(x)[:2]
            evaluator.update(features)
"""


@pytest.mark.parametrize(("part", "expected"), [("vision_model", [12]), ("tokenizer", [])])
def test_a_part_that_training_runs_under_its_own_name(part, expected):
    """The part of a model is recognised by its name."""
    assert reported(PART_OF_MODEL.format(part=part)) == expected


PREVIEW = """\
import torch
class Detector:
    def train_epoch(self, loader):
        for x in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.model(x)
            loss.backward()
            self.optimizer.step()
    def val_epoch(self, loader):
        with torch.no_grad():
            for x in loader:
                draw(self.predict(x[:1]))
                {validated}
    def predict(self, x):
        with torch.no_grad():
            return self.model(x)
    def fit(self):
        self.train_epoch(loader)
        self.val_epoch(valid)
"""


@pytest.mark.parametrize(
    ("validated", "expected"),
    [
        ("with torch.autocast('cuda', dtype=torch.bfloat16): self.total += self.model(x)", []),
        ("self.total += self.model(x)", [16]),
    ],
)
def test_a_preview_in_a_validation_under_autocast(validated, expected):
    """A prediction for one input that validation shows is no validation, if that itself is under autocast."""
    assert reported(PREVIEW.format(validated=validated)) == expected


CHOSEN = """\
import torch
def run(loader, train):
    use_amp = scaler is not None and train
    for x in loader:
        if use_amp:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        elif train:
            model(x).backward()
            optimizer.step()
        else:
            {validated}
"""


@pytest.mark.parametrize(("validated", "expected"), [("loss = model(x)", [3]), ("loss = show(x)", [])])
def test_a_flag_that_is_true_in_training_only(validated, expected):
    """The other branch of a variable for `amp and train` is validation where training in float32 is apart."""
    assert reported(CHOSEN.format(validated=validated)) == expected


IMPORTED = """\
import torch
from {module} import calc_loss_batch, calc_loss_loader
class Experiment:
    def train(self, loader, valid_loader):
        for batch in loader:
            with torch.amp.autocast("cuda"):
                loss = calc_loss_batch(batch, model=self.model, device=self.device)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        self.valid(loader, valid_loader)

    def valid(self, loader, valid_loader):
        self.model.eval()
        with torch.no_grad():
            train_loss = calc_loss_loader(loader, model=self.model, num_batches=self.eval_iter)
            {context}
                valid_loss = {function}(valid_loader, model=self.model, device=self.device)
        self.model.train()
        return train_loss, valid_loss
"""


@pytest.mark.parametrize(
    ("context", "function", "expected"),
    [
        ("if valid_loader:", "calc_loss_loader", [18]),
        ("if valid_loader:", "measure", [16]),
        ("with torch.autocast('cuda'):", "calc_loss_loader", []),
    ],
)
def test_an_imported_function_for_a_loader_validates_without_the_region_of_its_sibling(context, function, expected):
    """Training opens the region around the imported function of one batch, so that the one for a loader has none."""
    assert reported(IMPORTED.format(module="utils", context=context, function=function)) == expected


def test_an_imported_function_without_a_sibling_in_a_region_may_open_its_own():
    """Nothing shows where the region of a function from another import is."""
    text = IMPORTED.format(module="utils", context="if valid_loader:", function="measure")
    assert reported(text.replace(", calc_loss_loader", "\nfrom evaluation import calc_loss_loader")) == []
    assert reported(text.replace("with torch.amp.autocast", "with torch.profiler.record")) == []
