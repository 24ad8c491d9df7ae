"""Several optimizers in simulated runs: whose parameters each has, and which models are frozen meanwhile."""

import pytest

from halfstep.check.simulation.frozen import Frozen
from simulated_scripts import codes

STUDENT = """
teacher, model = Teacher(), Model()
{freeze}
a, b = torch.optim.AdamW(model.encoder.parameters()), torch.optim.SGD(model.head.parameters())
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    a.zero_grad()
    b.zero_grad()
    with torch.autocast("cuda"):
        loss = criterion(model(x), teacher(x))
    scaler.scale(loss).backward()
    scaler.unscale_(a)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(a)
    scaler.step(b)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        ("teacher.requires_grad_(False)", ["HS104"]),
        ("for p in teacher.parameters(): p.requires_grad = False", ["HS104"]),
        ("set_requires_grad(teacher, False)", ["HS104"]),
        ("model.head.requires_grad_(False)", []),
        ("for n, p in model.named_parameters():\n    if 'bias' in n: p.requires_grad = False", []),
        ("model.freeze_layers()", []),
        ("x.requires_grad = False", []),
    ],
    ids=["teacher", "loop", "function", "own", "some", "method", "unknown"],
)
def test_a_frozen_model_silences_only_its_own_optimizer(freeze, expected):
    """A frozen teacher has nothing to do with the optimizers of the student."""
    assert codes(STUDENT.format(freeze=freeze)) == expected


GAN = """
def requires_grad(nets, flag):
    if not isinstance(nets, list):
        nets = [nets]
    for net in nets:
        for p in net.parameters():
            p.requires_grad = flag

scaler = torch.amp.GradScaler("cuda")
of_d, of_g = torch.optim.Adam(D.parameters()), torch.optim.Adam(G.parameters())
for x in loader:
    {freeze}
    of_g.zero_grad()
    with torch.autocast("cuda"):
        fake = G(noise)
        loss_g = criterion(D(fake))
    scaler.scale(loss_g).backward()
    scaler.step(of_g)
    scaler.update()
    {release}
    with torch.autocast("cuda"):
        loss_d = criterion(D(x)) + criterion(D(fake.detach()))
    scaler.scale(loss_d).backward()
    scaler.step(of_d)
    scaler.update()
    of_d.zero_grad()
"""


def test_a_generator_s_loss_leaves_no_gradients_in_a_frozen_discriminator():
    """Without freezing it, they have the scale of before the update."""
    assert codes(GAN.format(freeze="pass", release="pass")) == ["HS108"]
    assert codes(GAN.format(freeze="requires_grad(D, False)", release="requires_grad(D, True)")) == []
    assert codes(GAN.format(freeze="requires_grad([D], False)", release="requires_grad([D], True)")) == []


def test_part_of_a_frozen_model_that_is_released_makes_the_rest_unknown():
    """Which parameters an optimizer of all of it trains is not known then."""
    frozen = Frozen()
    frozen.set(frozenset({"model"}), False, is_all=True)
    assert frozen.reached(frozenset({"model.head", "other"})) == {"other"}
    frozen.set(frozenset({"model.head"}), True, is_all=True)
    assert frozen.reached(frozenset({"model.head"})) == {"model.head"}
    assert frozen.may_leave(frozenset({"model"}))
    frozen.set(frozenset({"model"}), True, is_all=True)
    assert not frozen.may_leave(frozenset({"model"}))


FACTORY = """
from models import Net
from optimizers import {name}
model, criterion = Net(), CenterLoss()
{create}
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    first.zero_grad()
    second_optimizer.zero_grad()
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(first)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(first)
    scaler.step(second_optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("name", "create", "expected"),
    [
        ("build_optimizers", "first, second_optimizer = build_optimizers(model, args)", ["HS104"]),
        ("build_optimizers", "first_optimizer, second_optimizer = build_optimizers(args, model)\nfirst = first_optimizer", ["HS104"]),
        ("make_optimizer", "first = make_optimizer(model)\nsecond_optimizer = make_optimizer(criterion)", []),
        ("make_optimizers", "first, second_optimizer = make_optimizers(args)", []),
    ],
    ids=["schedule-named", "both", "criterion", "settings-only"],
)  # fmt: skip
def test_a_factory_of_another_file_gives_optimizers_of_the_model_that_it_gets(name, create, expected):
    """A clip of this model then finds gradients of both; of an optimizer of something unknown nothing is reported."""
    if "first, second_optimizer = build" in create:
        create = create.replace("first,", "opt_first,") + "\nfirst = opt_first"
    assert codes(FACTORY.format(name=name, create=create)) == expected


UNKNOWN = """
def train(model, optimizer, optimizer_center, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        optimizer_center.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        {steps}
"""


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("scaler.step(optimizer); scaler.step(optimizer_center); scaler.update()", []),
        ("scaler.step(optimizer); scaler.update(); scaler.step(optimizer_center); scaler.update()", ["HS108"]),
        ("scaler.step(optimizer); scaler.update(); optimizer_center.step()", ["HS103"]),
        ("scaler.step(optimizer); scaler.unscale_(optimizer_center); scaler.update(); optimizer_center.step()", []),
        ("scaler.step(optimizer); head(x).sum().backward(); optimizer_center.step(); scaler.update()", []),
    ],
    ids=["right", "update-between", "bypass", "unscaled", "two-losses"],
)
def test_optimizers_of_unknown_models_are_judged_where_all_backward_passes_agree(steps, expected):
    """Whichever backward pass gave an optimizer its gradients, they have the wrong scale."""
    assert codes(UNKNOWN.format(steps=steps)) == expected


WRAPPED = """
from other import Lookahead, prepare
model, loader = Model(), Loader()
optimizer = torch.optim.AdamW(model.parameters())
{wrap}
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        loss = model(x, y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize("wrap", ["optimizer = Lookahead(optimizer)", "model, optimizer = prepare(model, optimizer)"])
def test_a_wrapped_optimizer_is_no_second_one(wrap):
    """It has the parameters of the one that was passed."""
    assert codes(WRAPPED.format(wrap=wrap)) == ["HS104"]


def test_the_region_of_a_discriminator_on_detached_samples_is_its_own():
    """The generator's region is not reported for the discriminator's loss."""
    text = """
        scaler = torch.amp.GradScaler("cuda")
        of_d, of_g = torch.optim.Adam(D.parameters()), torch.optim.Adam(G.parameters())
        for x in loader:
            of_g.zero_grad()
            of_d.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                fake = G(x)
                loss = criterion(fake)
            scaler.scale(loss).backward()
            scaler.step(of_g)
            scaler.update()
            with torch.autocast("cuda", dtype=torch.float16):
                loss_d = D(fake.detach()).mean()
            loss_d.backward()
            of_d.step()
        """
    assert codes(text) == ["HS123"]


FROM_ELSEWHERE = """
def train(model, config, loader):
    context, scaler = get_amp_components(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in loader:
        optimizer.zero_grad()
        with context:
            loss = model(x, y)
        if scaler is not None:
            scaler.scale(loss).backward()
            {unscale}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(("unscale", "expected"), [("pass", ["HS104"]), ("scaler.unscale_(optimizer)", [])])
def test_a_scaler_that_a_function_of_another_file_gives_with_others(unscale, expected):
    """It is one by the name that it is assigned to."""
    assert codes(FROM_ELSEWHERE.format(unscale=unscale)) == expected


def test_elements_of_an_unknown_list_are_no_single_optimizer():
    """Each of them steps once before the update."""
    text = """
        def train(model, optimizers, loader):
            scaler = torch.amp.GradScaler("cuda")
            for x, y in loader:
                for optimizer, _ in optimizers:
                    optimizer.zero_grad()
                with torch.autocast("cuda"):
                    loss = model(x, y)
                scaler.scale(loss).backward()
                for optimizer, _ in optimizers:
                    scaler.step(optimizer)
                scaler.update()
        """
    assert codes(text) == []


AGENT = """
class Agent:
    def __init__(self, actor, critic):
        self.actor, self.critic = actor, critic
        self.actor_opt = torch.optim.AdamW(self.actor.parameters())
        self.critic_opt = torch.optim.AdamW(self.critic.parameters())
        self.alpha = torch.zeros(1, requires_grad=True)
        self.alpha_opt = torch.optim.Adam([self.alpha])
        self.scaler = torch.amp.GradScaler("cuda")

    def update(self, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            critic_loss = criterion(self.critic(batch), batch)
        {critic}
        self.scaler.scale(critic_loss).backward()
        self.scaler.step(self.critic_opt)
        with torch.autocast("cuda", dtype=torch.float16):
            logp = self.actor(batch)
            actor_loss = logp.mean()
        {actor}
        self.scaler.scale(actor_loss).backward()
        self.scaler.step(self.actor_opt)
        self.scaler.update()
        loss = (self.alpha * logp{detach}).mean()
        self.alpha_opt.zero_grad()
        loss.backward()
        self.alpha_opt.step()
"""
CLEAR = "self.{}_opt.zero_grad()"


@pytest.mark.parametrize(
    ("critic", "actor", "detach", "expected"),
    [
        (CLEAR.format("critic"), CLEAR.format("actor"), ".detach()", []),
        ("pass", CLEAR.format("actor"), ".detach()", ["HS156"]),
        (CLEAR.format("critic"), CLEAR.format("actor"), "", ["HS123"]),
    ],
    ids=["right", "one", "attached"],
)
def test_a_method_that_another_file_calls_for_each_batch(critic, actor, detach, expected):
    """A class that clears some gradients clears all that need it, and no gradient passes through what is detached."""
    assert codes(AGENT.format(critic=critic, actor=actor, detach=detach)) == expected
