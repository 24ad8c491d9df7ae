"""What a rehearsal says about models built to break fp16, and about healthy ones."""

import functools

import pytest
import torch
import torch.nn.functional as F

import rehearsal_jobs as jobs
from halfstep.jobs.job import Job
from halfstep.precision.policy import Policy
from halfstep.rehearsal import proposal, rehearse
from halfstep.rehearsal.proposal import propose, troubles_of


@functools.cache
def run(job, precision="fp16"):
    return rehearse(job, precision, steps=2, batch=16)


def with_policy(job, precision):
    """The troubles, scale and proposal of another policy, from the same steps."""
    ledger, policy = run(job).ledger, Policy.parse(precision)
    return *troubles_of(ledger, policy), propose(ledger, policy)


def named(rehearsal):
    return {(t.module, t.kind, t.effect) for t in rehearsal.troubles}


def test_a_large_residual_stream_is_named_and_one_layer_is_kept():
    """The layer that makes the stream large, and every sum from there on; fp32 in that layer makes all later sums fp32."""
    result = run(jobs.residual)
    overflows = {module for module, kind, effect in named(result) if (kind, effect) == ("activation", "overflow")}
    assert overflows == {"blocks.1.fc2", "blocks.1", "blocks.2", "blocks.3"}
    assert Policy.parse(result.proposal.policy).keep_fp32 == ("blocks.1.fc2",)


def test_attention_logits_are_named_and_their_module_is_kept():
    """The product of queries and keys is computed in the forward of the attention module."""
    result = run(jobs.attention)
    assert ("blocks.1.attention", "activation", "overflow") in named(result)
    assert {t.module for t in result.troubles if t.effect == "overflow"} == {"blocks.1.attention"}
    assert Policy.parse(result.proposal.policy).keep_fp32 == ("blocks.1.attention",)


def test_tiny_gradients_behind_a_sigmoid_stack_are_named_and_the_first_layers_are_kept():
    """Gradients that no loss scale can bring into range together with those of the head."""
    result = run(jobs.sigmoids)
    names = named(result)
    assert {("embed", kind, "underflow") for kind in ("activation gradient", "weight gradient")} <= names
    assert not any(effect == "overflow" for _, _, effect in names)
    assert ("head", "weight gradient", "underflow") not in names
    kept = result.proposal.keep_fp32
    assert kept[:2] == ("embed", "layers.0")
    assert len(kept) <= 6
    assert Policy.parse(result.proposal.policy).compute == "fp16"


def test_what_leads_to_kept_layers_has_to_be_more_accurate(monkeypatch):
    """One limit for all gradients keeps fewer layers of a stack; the first one that stays in fp16 then loses more than 0.1 %."""
    result = rehearse(jobs.stack(lambda: jobs.Sigmoids(16)), steps=2, batch=16)
    monkeypatch.setattr(proposal, "LOST_BEFORE", proposal.LOST)
    assert set(propose(result.ledger, Policy.parse("fp16")).keep_fp32) < set(result.proposal.keep_fp32)


def test_the_stricter_limit_is_only_for_gradients_that_lead_to_kept_layers(monkeypatch):
    """Without a gradient that underflows, the limit for what leads to kept layers has no effect, even below rounding."""
    monkeypatch.setattr(proposal, "LOST_BEFORE", 0.0)
    for job in (jobs.mlp, jobs.transformer, jobs.residual):
        assert with_policy(job, "fp16")[2] == run(job).proposal


def test_an_unscaled_gradient_penalty_is_named():
    """A gradient that the loss computes overflows, and no loss scale applies to it."""
    result = run(jobs.critic)
    assert ("first", "inner gradient", "overflow") in named(result)
    assert {t.kind for t in result.troubles} == {"inner gradient"}
    assert Policy.parse(result.proposal.policy).keep_fp32 == ("first", "second")


def test_a_penalty_with_autocast_on_cannot_be_cured_by_keeping_modules():
    """torch casts the backward pass of every module then, so bf16 is proposed, with the change that would help."""
    result = run(jobs.cast_critic)
    assert ("first", "inner gradient", "overflow") in named(result)
    assert result.proposal.policy == "bf16"
    assert "torch.autocast(device_type, enabled=False)" in result.proposal.reasons[-1]


def test_a_penalty_that_underflows_is_named():
    """Gradients inside the loss that fp16 flushes to 0."""

    def loss(model, batch):
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(1e-8 * model(x).sum(), x, create_graph=True)
        return F.cross_entropy(model(batch[0]), batch[1]) + 1e12 * gradient.pow(2).sum()

    result = run(Job(jobs.mlp.model, jobs.mlp.data, loss, jobs.mlp.optimizer))
    assert {(t.kind, t.effect) for t in result.troubles} == {("inner gradient", "underflow")}


def test_inputs_beyond_the_range_are_named():
    """A batch that is not normalised overflows when the first product casts it."""
    result = run(jobs.unnormalised)
    assert ("0", "activation", "overflow") in named(result)


def test_what_cannot_be_kept_gets_bf16():
    """The root module has no name that a pattern could match, and most products in fp32 are no gain."""

    class Root(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(8, 4)

        def forward(self, x):
            h = self.fc(x) * 300
            return (h @ h.mT) @ h * 1e-9

    result = run(Job(Root, jobs.mlp.data, jobs.mlp.loss, jobs.mlp.optimizer))
    assert result.proposal.policy == "bf16"
    assert "bf16 has the range of fp32" in result.proposal.reasons[-1]
    assert run(jobs.unnormalised).proposal.policy == "bf16"  # its only product would stay in fp32


def test_a_policy_with_exceptions_is_taken_as_it_is():
    """The modules that a policy keeps in fp32 are not in trouble, and a static scale is used as given."""
    troubles, _, proposal = with_policy(jobs.residual, "fp16,keep_fp32=blocks.1.fc2")
    assert troubles == ()
    assert Policy.parse(proposal.policy).keep_fp32 == ("blocks.1.fc2",)
    troubles, scale, _ = with_policy(jobs.mlp, "fp16,loss_scale=16777216")
    assert scale.exponent == 24
    assert {t.effect for t in troubles} == {"overflow"}


def test_bf16_has_none_of_these_troubles():
    """bf16 has the range of fp32."""
    for job in (jobs.residual, jobs.attention, jobs.sigmoids, jobs.critic):
        troubles, scale, proposal = with_policy(job, "bf16")
        assert (troubles, scale, proposal.policy) == ((), None, "bf16")


def keeps_nothing(result):
    policy = Policy.parse(result.proposal.policy)
    return (result.troubles, policy.compute, policy.keep_fp32) == ((), "fp16", ())


@pytest.mark.parametrize("job", [jobs.mlp, jobs.transformer, None], ids=["mlp", "transformer", "digits"])
def test_healthy_models_need_no_exception(job):
    """Plain fp16 is proposed."""
    assert keeps_nothing(run(job))


TRANSFORMERS = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16}),
    "bert": (
        "BertForMaskedLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64},
    ),
    "llama": (
        "LlamaForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}
        | {"attn_implementation": "eager"},
    ),
    "vit": (
        "ViTForImageClassification",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32}
        | {"patch_size": 8, "num_labels": 4},
    ),
    "convnext": ("ConvNextForImageClassification", {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_labels": 4}),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic", "num_labels": 4},
    ),
}  # fmt: skip


WIDTHS = ("n_embd", "hidden_size", "intermediate_size", "hidden_sizes", "embedding_size")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "factor"), [(0, 1), (3, 2)])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_public_models_need_no_exception(name, seed, factor):
    """Six architectures of transformers with random weights, also with others and twice as wide."""
    transformers = pytest.importorskip("transformers")
    head, settings = TRANSFORMERS[name]
    wide = {key: settings[key] for key in WIDTHS if key in settings}
    wide = {k: [factor * w for w in v] if isinstance(v, list) else factor * v for k, v in wide.items()}
    settings = settings | wide
    cls = getattr(transformers, head)
    reads_text = name in ("gpt2", "bert", "llama")

    def data(batch_size, split):
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            if reads_text:
                yield {"input_ids": (ids := torch.randint(0, 64, (batch_size, 16), generator=generator)), "labels": ids}
            else:
                images = torch.randn(batch_size, 3, 32, 32, generator=generator)
                yield {"pixel_values": images, "labels": torch.randint(0, 4, (batch_size,), generator=generator)}

    job = Job(
        lambda: cls(cls.config_class(**settings)),
        lambda batch_size, split: list(data(batch_size, split)),
        lambda model, batch: model(**batch).loss,
        lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
    assert keeps_nothing(rehearse(job, steps=6, batch=8, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_models_of_timm_need_no_exception(name):
    """timm's test models on synthetic images."""
    pytest.importorskip("timm")
    assert keeps_nothing(rehearse(f"timm:{name}", steps=12, batch=2))
