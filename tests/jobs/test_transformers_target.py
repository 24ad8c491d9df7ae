import copy
import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from halfstep.cli import cli
from halfstep.errors import SettingError
from halfstep.jobs.targets import load_target
from halfstep.jobs.transformers_target import HEADS, job_from_config

transformers = pytest.importorskip("transformers", reason="Requires: [transformers]")

DECODER = "num_hidden_layers=2,hidden_size=16,num_attention_heads=2,vocab_size=64"
LLAMA = f"{DECODER},intermediate_size=32,num_key_value_heads=1,max_position_embeddings=24"
ENCODER = f"{DECODER},intermediate_size=32,max_position_embeddings=24"
PAIR = (
    "vocab_size=64,d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2,encoder_ffn_dim=32,"
    "decoder_ffn_dim=32"
)
VISION = "hidden_size=16,num_hidden_layers=2,num_attention_heads=2,num_labels=4"
MOE = f"{LLAMA},num_experts_per_tok=2"
# Each model with the name of its class and the shape of its first input.
QUICK = {
    "gpt2,n_layer=2,n_embd=16,n_head=2,vocab_size=64,n_positions=24": ("GPT2LMHeadModel", (2, 24)),
    f"llama,{LLAMA}": ("LlamaForCausalLM", (2, 24)),
    f"bert,{ENCODER}": ("BertForMaskedLM", (2, 24)),
    "t5,vocab_size=64,d_model=16,d_kv=8,d_ff=32,num_layers=2,num_heads=2,length=24": (
        "T5ForConditionalGeneration",
        (2, 24),
    ),
    f"vit,{VISION},intermediate_size=32,image_size=32": ("ViTForImageClassification", (2, 3, 32, 32)),
}
SLOW = {
    f"qwen2,{LLAMA}": ("Qwen2ForCausalLM", (2, 24)),
    f"qwen3,{LLAMA},head_dim=8": ("Qwen3ForCausalLM", (2, 24)),
    f"gemma2,{LLAMA},head_dim=8": ("Gemma2ForCausalLM", (2, 24)),
    f"Gemma3TextConfig,{LLAMA},head_dim=8": ("Gemma3ForCausalLM", (2, 24)),
    f"mistral,{LLAMA}": ("MistralForCausalLM", (2, 24)),
    f"mixtral,{MOE},num_local_experts=4": ("MixtralForCausalLM", (2, 24)),
    f"qwen2_moe,{MOE},num_experts=4,moe_intermediate_size=16,shared_expert_intermediate_size=16": (
        "Qwen2MoeForCausalLM",
        (2, 24),
    ),
    f"olmoe,{MOE},num_experts=4": ("OlmoeForCausalLM", (2, 24)),
    f"phi3,{LLAMA}": ("Phi3ForCausalLM", (2, 24)),
    f"opt,{DECODER},ffn_dim=32,word_embed_proj_dim=16,max_position_embeddings=24": ("OPTForCausalLM", (2, 24)),
    f"gpt_neox,{ENCODER}": ("GPTNeoXForCausalLM", (2, 24)),
    "mamba,vocab_size=64,hidden_size=16,num_hidden_layers=2,state_size=4,length=24": ("MambaForCausalLM", (2, 24)),
    f"falcon,{DECODER},max_position_embeddings=24": ("FalconForCausalLM", (2, 24)),
    f"bert,{ENCODER},head=causal-lm": ("BertLMHeadModel", (2, 24)),
    f"llama,{LLAMA},head=sequence-classification,num_labels=3": ("LlamaForSequenceClassification", (2, 24)),
    f"roberta,{DECODER},intermediate_size=32,max_position_embeddings=26": ("RobertaForMaskedLM", (2, 24)),
    f"modernbert,{ENCODER}": ("ModernBertForMaskedLM", (2, 24)),
    f"deberta-v2,{ENCODER}": ("DebertaV2ForMaskedLM", (2, 24)),
    f"bart,{PAIR},max_position_embeddings=24": ("BartForConditionalGeneration", (2, 24)),
    f"bart,{PAIR},max_position_embeddings=24,head=sequence-classification": ("BartForSequenceClassification", (2, 24)),
    f"whisper,{PAIR},max_target_positions=24,max_source_positions=20,num_mel_bins=8": (
        "WhisperForConditionalGeneration",
        (2, 8, 40),
    ),
    "wav2vec2,hidden_size=16,num_hidden_layers=2,num_attention_heads=2,intermediate_size=32,conv_dim=[8,8,8,8,8,8,8],"
    "num_conv_pos_embeddings=16,num_conv_pos_embedding_groups=2,length=8000": ("Wav2Vec2ForCTC", (2, 8000)),
    "swin,image_size=32,embed_dim=8,depths=[1,1],num_heads=[1,2],window_size=4": (
        "SwinForImageClassification",
        (2, 3, 32, 32),
    ),
    "convnext,image_size=32,hidden_sizes=[8,8,16,16],depths=[1,1,1,1]": (
        "ConvNextForImageClassification",
        (2, 3, 32, 32),
    ),
    f"dinov2,{VISION},image_size=28": ("Dinov2ForImageClassification", (2, 3, 28, 28)),
    "resnet,embedding_size=8,hidden_sizes=[8,16],depths=[1,1],length=32": (
        "ResNetForImageClassification",
        (2, 3, 32, 32),
    ),
}
# Parameters that these models do not use without masks of their own.
UNUSED = {"dinov2.embeddings.mask_token"}


def build(text):
    """The job, model and first batch of two examples of a target."""
    job = load_target(f"transformers:{text}").job
    torch.manual_seed(0)
    return job, job.call("model"), next(iter(job.call("data", split="train", batch_size=2)))


def tiny(**settings):
    return transformers.GPT2Config(**{"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, **settings})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in the file of DeBERTa
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(pytest.param(text, expected, id=text.partition(",")[0]) for text, expected in QUICK.items()),
        *(
            pytest.param(text, expected, marks=pytest.mark.slow, id=f"{text.partition(',')[0]}-{expected[0]}")
            for text, expected in SLOW.items()
        ),
    ],
)
def test_models_train_on_batches_that_fit_them(text, expected):
    """The loss of a batch is finite and gives every trainable fp32 parameter a gradient."""
    job, model, batch = build(text)
    shape = tuple(next(iter(batch.values())).shape)
    assert (type(model).__name__, shape) == expected
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.training
    loss = job.call("loss", model=model, batch=batch)
    loss.backward()
    assert torch.isfinite(loss)
    missing = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    assert missing <= UNUSED
    if job.metric is not None:
        assert 0 <= job.call("metric", model=model, batch=batch) <= 1
    assert all(isinstance(module, type) for module in job.shard)


def test_the_configuration_is_copied():
    """A job leaves the configuration as it is, and its models have caches off, dropout on and the default attention."""
    config = tiny()
    before = copy.deepcopy(config.to_dict())
    model = job_from_config(config).call("model")
    assert config.to_dict() == before
    assert before["use_cache"]
    assert not model.config.use_cache
    assert model.config._attn_implementation == "sdpa"
    assert model.transformer.drop.p == before["embd_pdrop"] == 0.1


def test_weights_are_fp32_whatever_the_configuration_names():
    """A configuration of a 16-bit checkpoint builds fp32 weights."""
    model = job_from_config(tiny(dtype="bfloat16")).call("model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_seed_determines_the_weights():
    """Two models after the same seed are equal."""
    job = job_from_config(tiny())
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        weights.append(job.call("model").transformer.wte.weight)
    assert torch.equal(*weights)


def test_architectures_decide_and_a_head_overrides_them():
    """The class that a configuration names is trained, head= replaces it, and a name without a head decides nothing."""
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=40, num_labels=3
    )

    def chosen(architecture, head=None):
        config.architectures = [architecture]
        return type(job_from_config(config, head=head, length=8).call("model")).__name__

    assert chosen("BertForSequenceClassification") == "BertForSequenceClassification"
    assert chosen("BertForSequenceClassification", head="masked-lm") == "BertForMaskedLM"
    assert chosen("BertModel") == "BertForMaskedLM"
    with pytest.raises(SettingError, match="BertForQuestionAnswering.*choose one by head=NAME: masked-lm, causal-lm"):
        chosen("BertForQuestionAnswering")


@pytest.mark.parametrize(("head", "sees"), [("causal-lm", False), ("masked-lm", True)])
def test_only_a_causal_head_is_blind_to_later_tokens(head, sees):
    """With head=causal-lm BERT attends to earlier tokens only."""
    _, model, batch = build(f"bert,{ENCODER},head={head}")
    model.eval()
    tokens = batch["input_ids"]
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % 64
    with torch.no_grad():
        before, after = (model(input_ids=each).logits[:, :-1] for each in (tokens, changed))
    assert torch.allclose(before, after, atol=1e-6) is not sees


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (tiny, {"head": "causal"}, "Unknown head 'causal'. Did you mean 'causal-lm'?"),
        (tiny, {"head": "masked-lm"}, "no model for GPT2Config with head=masked-lm; it has causal-lm"),
        (tiny, {"length": 1}, "length=1 must be an integer of at least 2"),
        (
            transformers.CLIPConfig,
            {},
            r"several configurations \((vision_config, text_config|text_config, vision_config)\).*CLIPTextConfig",
        ),
        (transformers.SamConfig, {}, "several configurations"),
        (
            transformers.CLIPTextConfig,
            {},
            "no model for CLIPTextConfig with one of the heads image-classification",
        ),
        (transformers.ImageGPTConfig, {}, "ImageGPTForImageClassification has no input 'pixel_values'"),
        (
            lambda: tiny(attn_implementation="kernels-community/flash-attn"),
            {},
            "attn_implementation='kernels-community/flash-attn' may need a download; use one of eager, sdpa",
        ),
    ],
)
def test_configurations_without_a_job_are_rejected_by_name(config, options, message):
    """The error names the configuration and the reason."""
    with pytest.raises(SettingError, match=message):
        job_from_config(config(), **options)


def test_models_are_built_offline(monkeypatch):
    """While a model is built the hub client is offline, and afterwards as before."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    modes = []
    original = transformers.GPT2LMHeadModel.__init__

    def record(self, *args, **kwargs):
        modes.append(constants.is_offline_mode())
        original(self, *args, **kwargs)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "__init__", record)
    job_from_config(tiny()).call("model")
    assert modes == [True]
    assert not constants.is_offline_mode()


def test_every_head_has_its_default_batch_size():
    """A target's default batch is 8, and 128 for images."""
    assert load_target("transformers:gpt2").defaults == (("batch", 8),)
    assert load_target("transformers:vit").defaults == (("batch", 128),)
    assert {head.batch_size for head in HEADS.values()} == {8, 128}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("gpt2,n_layer=2,n_embd=16,n_head=2,vocab_size=64,n_positions=24", id="tied weights"),
        pytest.param(f"llama,{LLAMA}", marks=pytest.mark.slow, id="rotary buffers"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(text, tmp_path):
    """train, --resume and export work from the command line, bit for bit, and the export loads into the model."""

    def run(*arguments):
        result = CliRunner().invoke(cli, [str(each) for each in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    settings = ("--batch", 2, "-p", "fp32", "--set", "eval_batches=1", "--json")
    run("train", f"transformers:{text}", "--steps", 4, *settings, "--out", tmp_path / "one")
    run("train", f"transformers:{text}", "--steps", 2, *settings, "--out", tmp_path / "two")
    run("train", "--resume", "--steps", 4, "--json", "--out", tmp_path / "two")
    weights = [load_file(json.loads(run("export", tmp_path / each, "--json"))["path"]) for each in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    model = load_target(f"transformers:{text}").job.call("model")
    model.load_state_dict(weights[0])


def test_plan_predicts_a_model_of_transformers():
    """`halfstep plan` runs the step of such a target on fake tensors."""
    result = CliRunner().invoke(cli, ["plan", f"transformers:llama,{LLAMA}", "--batch", "4", "-p", "bf16", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["entries"]


@pytest.mark.slow
def test_a_language_model_learns_the_synthetic_text():
    """The loss of a small Llama falls below the entropy of the token frequencies: it learns which token follows."""
    job, model, _ = build(f"llama,{LLAMA}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, tokens = [], []
    for batch in job.call("data", split="train", batch_size=8):
        loss = job.call("loss", model=model, batch=batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens.append(batch["input_ids"])
    entropy = torch.distributions.Categorical(torch.cat(tokens).flatten().bincount().float()).entropy().item()
    assert losses[0] > entropy
    assert sum(losses[-10:]) / 10 < entropy - 0.5
