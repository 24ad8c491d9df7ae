"""A policy is one frozen value: it prints and parses, and rejects what cannot work with the reason."""

import dataclasses
import itertools
import logging
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import HalfstepError, SettingError
from halfstep.precision import policy as policy_module
from halfstep.precision.loss_scale import SEMANTICS, LossScale
from halfstep.precision.policy import KEYS, PATTERN_KEYS, PRESETS, VALUES, Policy, parse_with_notes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


@st.composite
def loss_scales(draw):
    """Text of every kind of loss scale."""
    if draw(st.booleans()):
        return draw(st.sampled_from(["none", "dynamic", "1", "128", "0.5", "1e-3", "65536"]))
    settings = {
        "semantics": draw(st.sampled_from(SEMANTICS)),
        "init_scale": draw(st.floats(min_value=1, max_value=2**24)),
        "growth_interval": draw(st.integers(1, 5000)),
        "max_skips": draw(st.none() | st.integers(1, 500)),
    }
    if settings["semantics"] != "torch":
        settings["hysteresis"] = draw(st.integers(1, 9))
    return str(LossScale.dynamic(**settings))


names = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=6)
patterns = st.lists(st.one_of(names, st.just("a[bc]")), min_size=1, max_size=3).map(".".join)
pattern_lists = st.lists(st.one_of(patterns, patterns.map("*.".__add__)), max_size=3).map(tuple)
any_fields = st.fixed_dictionaries(
    {key: st.sampled_from(values) for key, values in VALUES.items()}
    | {
        "loss_scale": loss_scales(),
        "keep_fp32": pattern_lists,
        "compute_fp32": pattern_lists,
    }
)
pairs = [("fp32", c) for c in ("fp32", "tf32", "bf16", "fp16")] + [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8")]


@st.composite
def policies(draw):
    """Every valid policy: the rules, turned round into choices."""
    params, compute = draw(st.sampled_from(pairs))
    plain, fp16 = params == "fp32", compute == "fp16"
    fields = draw(any_fields)
    kept = () if compute in {"fp32", "tf32"} else fields["keep_fp32"]
    return Policy(
        params=params,
        compute=compute,
        grads=draw(st.sampled_from(["auto", "fp32"] if plain else ["auto", "fp32", params])),
        master="weights" if plain else draw(st.sampled_from(["split", "fp32", "none"])),
        states=fields["states"],
        reduce=draw(st.sampled_from(["fp32", "bf16", "fp16"] if fp16 else ["fp32", "bf16"])),
        loss_scale=draw(loss_scales().filter(lambda s: s != "none")) if fp16 else "none",
        keep_fp32=kept,
        compute_fp32=() if compute in {"fp32", "tf32"} else [p for p in fields["compute_fp32"] if p not in kept],
    )


def unless_rejected(make):
    """What `make` returns, or None when Halfstep raises; any other exception passes through."""
    try:
        return make()
    except HalfstepError:
        return None


@given(policies())
def test_text_round_trip_gives_the_same_value(policy):
    """Every valid policy prints as text that parses to the same policy."""
    assert Policy.parse(str(policy)) == policy
    assert str(Policy.parse(str(policy))) == str(policy)


@given(policies())
def test_printed_form_writes_the_fewest_keys(policy):
    """No other preset would leave fewer keys to write."""
    fewest = min(sum(getattr(policy, k) != getattr(preset, k) for k in KEYS) for preset in PRESETS.values())
    assert str(policy).count(",") == fewest


@given(any_fields)
def test_constructor_gives_a_policy_or_a_setting_error(fields):
    """Any combination of known values is a policy or is rejected in words."""
    policy = unless_rejected(lambda: Policy(**fields))
    assert policy is None or Policy.parse(str(policy)) == policy


words = st.sampled_from([*PRESETS, *KEYS, *VALUES["compute"], *policy_module.FOREIGN, "dynamic", "none", "auto", "nan"])
marks = st.sampled_from([",", "=", "|", "(", ")", ";", "*", ".", " ", "\x00", "\u2028", "init_scale", "1e999", "-1"])


@given(st.one_of(st.text(max_size=40), st.lists(st.one_of(words, marks), max_size=12).map("".join)))
def test_any_text_parses_or_raises_only_our_error(text):
    """Text of any kind gives a policy that round-trips, or one of Halfstep's errors."""
    policy = unless_rejected(lambda: parse_with_notes(text)[0])
    assert policy is None or Policy.parse(str(policy)) == policy


@pytest.mark.parametrize("name", PRESETS)
def test_presets_print_as_their_name(name):
    """Each preset prints as its own name, in any case and with blanks around it."""
    assert str(PRESETS[name]) == name
    assert Policy.parse(f"  {name.upper()} ") == PRESETS[name]


def test_default_policy_is_the_fp32_reference():
    """A policy without arguments is plain fp32."""
    assert Policy() == PRESETS["fp32"]


def test_torch_dtypes_and_their_names_are_taken():
    """Spellings of torch and its dtype objects are normalised to the canonical one."""
    torch = pytest.importorskip("torch")
    assert Policy(params="bfloat16", compute="torch.bfloat16", master="split") == PRESETS["bf16-lean"]
    assert Policy(params=torch.float16, compute="half", master="split", loss_scale="dynamic") == PRESETS["fp16-lean"]
    assert Policy.parse("bf16,reduce=bfloat16").reduce == "bf16"


def test_loss_scale_takes_text_number_or_value():
    """The loss scale is stored as canonical text, in whichever form it was passed."""
    settings = LossScale.dynamic(hysteresis=1)
    assert Policy(compute="fp16", loss_scale=128).loss_scale == "128"
    assert Policy(compute="fp16", loss_scale=" 128.0 ").loss_scale == "128"
    assert Policy(compute="fp16", loss_scale=settings).scaling == settings
    assert PRESETS["bf16"].scaling == LossScale(mode="none")


def test_loss_scale_that_its_text_cannot_hold_is_rejected():
    """A value whose text would lose a setting is rejected and not shortened."""
    with pytest.raises(SettingError, match="omits some of its settings"):
        Policy(compute="fp16", loss_scale=LossScale(mode="static", init_scale=8.0, max_skips=5))


def test_loss_scale_settings_survive_inside_a_policy():
    """Semicolons and equal signs inside the parentheses belong to the loss scale."""
    policy = Policy.parse("fp16,loss_scale=dynamic(hysteresis=1;init_scale=256),states=8bit")
    assert (policy.scaling.hysteresis, policy.scaling.init_scale, policy.states) == (1, 256, "8bit")


@pytest.mark.parametrize(
    "given_patterns",
    ["head|*.norm", " head | *.norm ", ["*.norm", "head"], ("head", "*.norm", "head"), {"head", "*.norm"}],
)
def test_patterns_are_normalised_to_one_tuple(given_patterns):
    """Patterns passed as text, list, tuple or set become the same sorted tuple."""
    assert Policy(compute="bf16", keep_fp32=given_patterns).keep_fp32 == ("*.norm", "head")


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        ("head", "head", True),
        ("head", "head.fc.0", True),
        ("head", "neck.head", False),
        ("head", "head2", False),
        ("head", "Head", False),
        ("*.norm", "blocks.0.norm", True),
        ("*.norm", "encoder.blocks.0.norm", True),
        ("*.norm", "blocks.0.norm.weight_norm", True),
        ("*.norm", "norm", False),
        ("*norm*", "blocks.0.norm1", True),
        ("blocks.?.mlp", "blocks.3.mlp.fc1", True),
        ("blocks.?.mlp", "blocks.13.mlp", False),
        ("blocks.[01]", "blocks.1", True),
        ("blocks.[01]", "blocks.2", False),
        ("?*", "", False),
    ],
)
def test_pattern_covers_a_module_and_its_children(pattern, name, covered):
    """A pattern matches whole dotted names with case, and covers what is inside a matched module."""
    assert Policy(compute="bf16", keep_fp32=pattern).keeps_fp32(name) is covered


def test_patterns_that_match_nothing_are_reported():
    """The patterns that cover no module are known by name."""
    policy = Policy.parse("bf16,keep_fp32=head|*.norm|tail")
    assert policy.unused_patterns(["", "head", "blocks.0.norm"]) == ("tail",)
    policy = Policy.parse("bf16,keep_fp32=tail,compute_fp32=head|neck")
    assert policy.unused_patterns(["", "head", "tail"], "compute_fp32") == ("neck",)


def test_modules_that_compute_in_fp32_are_those_of_both_keys():
    """`computes_fp32` is true for either key, `keeps_fp32` for its own only."""
    policy = Policy.parse("bf16-lean,keep_fp32=*.norm,compute_fp32=lm_head")
    assert [policy.computes_fp32(name) for name in ("blocks.0.norm", "lm_head", "lm_head.fc", "blocks.0")] == [
        True
    ] * 3 + [False]
    assert [policy.keeps_fp32(name) for name in ("blocks.0.norm", "lm_head")] == [True, False]


@pytest.mark.parametrize(
    ("text", "accumulate", "expected"),
    [
        ("bf16", 1, "fp32"),
        ("bf16-lean", 1, "bf16"),
        ("bf16-lean", 4, "fp32"),
        ("bf16-lean,grads=bf16", 4, "bf16"),
        ("fp16-lean,grads=fp32", 1, "fp32"),
    ],
)
def test_automatic_gradients_are_fp32_when_accumulating(text, accumulate, expected):
    """`grads=auto` is the weights' format with one micro-batch and fp32 with more."""
    policy = Policy.parse(text)
    assert policy.grads_format(accumulate) == expected
    assert policy.widens_grads(accumulate) == (policy.params != expected)


REJECTED = [
    ("bf16-lean,master=weights", "half an ulp"),
    ("fp32,master=split", "no effect with params=fp32"),
    ("bf16,master=none", "no effect with params=fp32"),
    ("bf16,grads=bf16", "gradients of fp32 weights are fp32"),
    ("bf16-lean,grads=fp16", "grads=bf16, grads=fp32"),
    ("bf16-lean,compute=fp16", "mixes two 16-bit formats"),
    ("fp16-lean,compute=bf16,loss_scale=none", "mixes two 16-bit formats"),
    ("bf16-lean,compute=fp32", "Use compute=bf16, or params=fp32"),
    ("fp16-lean,compute=tf32,loss_scale=none", "compute=tf32"),
    ("fp16,loss_scale=none", "loss_scale=1 to force it"),
    ("bf16,loss_scale=dynamic", "Use loss_scale=none"),
    ("fp32,loss_scale=128", "Use loss_scale=none"),
    ("tf32,loss_scale=1", "Use loss_scale=none"),
    ("fp8,loss_scale=dynamic", "fp8 linears scale their own"),
    ("bf16,reduce=fp16", "reduce=fp32 or reduce=bf16"),
    ("fp32,reduce=fp16", "reduce=fp32 or reduce=bf16"),
    ("fp32,keep_fp32=head", "no effect with compute=fp32"),
    ("tf32,keep_fp32=head", "one switch for the whole process"),
    ("fp32,compute_fp32=head", "no effect with compute=fp32"),
    ("tf32,compute_fp32=head", "one switch for the whole process"),
    ("bf16-lean,keep_fp32=a|head,compute_fp32=b|head", "have a pattern in common"),
    ("fp16,compute=fp8,loss_scale=none", "built on bf16 weights"),
    ("fp8,params=fp32,master=weights", "built on bf16 weights"),
    ("bf16,stats=8bit", "Did you mean 'states'"),
    ("bf16,states=8bits", "Did you mean '8bit'"),
    ("bf16,compute=nan", "Unknown value for compute"),
    ("bf17", "Did you mean 'bf16'"),
    ("bf16,states=8bit,states=bf16", "'states' twice"),
    ("bf16,states=", "no value for 'states'"),
    ("bf16,states", "no value for 'states'"),
    ("bf16,=8bit", "empty setting"),
    ("bf16,", "empty setting"),
    ("bf16,,states=8bit", "empty setting"),
    ("", "names no preset"),
    (" ,states=8bit", "names no preset"),
    ("states=8bit", "start with a preset"),
    ("fp16,loss_scale=nan", "not a number"),
    ("fp16,loss_scale=inf", "finite in fp32"),
    ("fp16,loss_scale=-1", "above 0"),
    ("fp16,loss_scale=0", "above 0"),
    ("fp16,loss_scale=3.4028235e38", "finite in fp32"),
    ("fp16,loss_scale=dynamic(hysteresis=0)", "hysteresis=0"),
    ("fp16,loss_scale=dynamic(init_scale=1,hysteresis=2)", "Loss scale setting"),
    ("bf16,keep_fp32=|", "empty pattern"),
    ("bf16,keep_fp32=a b", "blank, comma or parenthesis"),
    ("bf16,keep_fp32=a(b)", "blank, comma or parenthesis"),
    ("bf16,keep_fp32=.norm", "Drop the extra dot"),
    ("bf16,keep_fp32=*", "Use the preset fp32"),
    ("bf16,compute_fp32=**", "makes every module compute in fp32"),
    ("bf16,compute_fp32=|", "compute_fp32 has an empty pattern"),
    ("bf16,compute_fp32=norm.", "compute_fp32 pattern 'norm.' matches no module"),
    ("auto", "halfstep.choose()"),
    ("AUTO,states=8bit", 'precision="auto"'),
    ("64-true", "no fp64"),
    ("torch.float64", "no fp64"),
    ("transformer-engine-float16", "bf16 weights only"),
]


@pytest.mark.parametrize(("text", "reason"), REJECTED, ids=[text or "empty" for text, _ in REJECTED])
def test_contradiction_is_rejected_with_its_reason(text, reason):
    """Each contradiction raises an error that gives the reason or the way out."""
    with pytest.raises(SettingError) as caught:
        Policy.parse(text)
    assert reason in str(caught.value)


ACCEPTED = [
    "bf16-lean,master=none",
    "fp16-lean,master=none",
    "bf16-lean,master=fp32",
    "fp16,loss_scale=1",
    "fp16,reduce=fp16",
    "fp16,reduce=bf16",
    "fp32,states=8bit",
    "bf16,grads=fp32",
    "fp8,keep_fp32=head",
    "bf16,compute_fp32=head",
    "bf16-lean,keep_fp32=*.norm,compute_fp32=decoder.*|lm_head",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_can_be_meant_is_accepted(text):
    """Unusual settings that work, and those that insist, are accepted as written."""
    assert str(Policy.parse(text)) == text


@pytest.mark.parametrize("value", [None, 3, b"bf16", ["bf16"]])
def test_precision_that_is_no_text_is_rejected(value):
    """Only text can be parsed."""
    with pytest.raises(SettingError, match="A precision is text"):
        Policy.parse(value)


@pytest.mark.parametrize("value", [3, [1, 2], None, {"a": 1}])
def test_patterns_that_are_no_names_are_rejected(value):
    """`keep_fp32` and `compute_fp32` take names only."""
    for key in PATTERN_KEYS:
        with pytest.raises(SettingError, match=f"{key}=.* is not a list of module name patterns"):
            Policy(compute="bf16", **{key: value})


FOREIGN = {
    "16": "fp16", "16-mixed": "fp16", "16-true": "fp16-lean", "bf16-mixed": "bf16", "bf16-true": "bf16-lean",
    "32": "fp32", "32-true": "fp32", "transformer-engine": "fp8", "O0": "fp32", "O1": "fp16", "O2": "fp16-lean",
    "O3": "fp16-lean", "no": "fp32", "amp_fp16": "fp16", "amp_bf16": "bf16", "amp_fp8": "fp8", "float32": "fp32",
    "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_name_becomes_its_preset_with_a_note(name):
    """A name of another tool maps to a preset, and the note names both."""
    policy, notes = parse_with_notes(name)
    assert policy == PRESETS[FOREIGN[name]]
    assert len(notes) == 1
    assert repr(name) in notes[0]
    assert repr(FOREIGN[name]) in notes[0]


def test_foreign_table_is_the_tested_one():
    """Every foreign name is in the table above."""
    assert set(FOREIGN) == set(policy_module.FOREIGN)


def test_own_names_need_no_note():
    """Presets that other tools call the same are not commented on."""
    assert [parse_with_notes(name)[1] for name in PRESETS] == [()] * len(PRESETS)


@pytest.mark.parametrize("name", ["bf16-true", "16-true", "O3"])
def test_names_without_a_master_have_a_note_on_how_to_force_that(name):
    """Names that mean 16-bit weights alone get a master, and the note has the setting without one."""
    policy, (note,) = parse_with_notes(name)
    assert policy.master == "split"
    assert "master=none" in note
    assert parse_with_notes(f"{name},master=none")[0].master == "none"


def test_foreign_name_takes_settings():
    """Settings apply on top of the preset that a foreign name becomes."""
    assert parse_with_notes("o2,states=8bit")[0] == Policy.parse("fp16-lean,states=8bit")


def test_mapping_is_logged_once_per_name(caplog, monkeypatch):
    """`Policy.parse` logs each mapping once in a process, whatever the case and settings."""
    monkeypatch.setattr(policy_module, "_LOGGED", set())
    with caplog.at_level(logging.INFO, logger="halfstep"):
        for text in ("O1", "o1", "O1,states=8bit", "half"):
            Policy.parse(text)
    assert [record.getMessage().split("'")[1] for record in caplog.records] == ["O1", "half"]


def test_policy_is_a_value():
    """Policies compare and hash by value, and cannot be changed."""
    assert len({Policy.parse("bf16"), PRESETS["bf16"], Policy(compute="bfloat16")}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["bf16"].params = "fp16"


def test_every_rule_can_be_broken():
    """No rule of the table is dead: each is the one that rejects some combination."""
    first = set()
    scales, patterns = ("none", "dynamic"), ((), ("head",))
    for values in itertools.product(*VALUES.values(), scales, patterns, patterns):
        broken = object.__new__(Policy)
        for key, value in zip(KEYS, values, strict=True):
            object.__setattr__(broken, key, value)
        first.add(next((i for i, rule in enumerate(policy_module._RULES) if rule.applies(broken)), None))
    assert first == {None, *range(len(policy_module._RULES))}


def preset_table():
    """The table of docs/policies.md, from the code."""
    header = ["preset", *KEYS[: -len(PATTERN_KEYS)]]
    rows = [
        [f"`{name}`", *(getattr(preset, key) for key in KEYS[: -len(PATTERN_KEYS)])] for name, preset in PRESETS.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def test_page_shows_the_presets_as_they_are():
    """The table of presets in the documentation is the one in the code."""
    assert preset_table() in PAGE.read_text()


def test_page_names_every_foreign_name():
    """The documentation lists every foreign name with its preset, and every rejected one."""
    text = PAGE.read_text()
    assert [n for n, f in policy_module.FOREIGN.items() if f"| `{n}` | {f.source} | `{f.preset}` |" not in text] == []
    assert [n for n in policy_module.REJECTED if f"`{n}`" not in text] == []


def test_page_examples_parse():
    """Every policy text shown in the documentation's example block parses."""
    block = PAGE.read_text().split("```text\n")[1].split("```")[0]
    examples = [line.split("  ")[0] for line in block.strip().splitlines()]
    assert len(examples) >= 5
    for example in examples:
        assert Policy.parse(str(Policy.parse(example))) == Policy.parse(example)
