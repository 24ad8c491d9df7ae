"""Configurations that a Python script writes down: dictionaries for DeepSpeed, and the calls of other tools.

Only what is written is read. A literal is a value, a name bound once to a literal is that literal, and everything else
is `UNKNOWN`. A dictionary that the script changes later (`ds_config["fp16"]["enabled"] = args.fp16`) is unknown in those
places, and left alone when the change cannot be followed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from halfstep.check.config.kind import Kind, has_own_keys, is_deepspeed
from halfstep.check.config.literals import Literals
from halfstep.check.script.names import Names, chain, read_names
from halfstep.precision.formats import FORMATS_16_BIT, canonical_name
from halfstep.precision.node import UNKNOWN, Block, Entry, Node, Scalar

__all__ = ["Found", "find_in_script"]

# Without one of these words a script writes no configuration down, and is not looked at.
_HINT = (
    "deepspeed", "DeepSpeed", "zero_optimization", "train_micro_batch", "TrainingArguments", "SFTConfig", "POConfig",
    "KTOConfig", "BCOConfig", "RewardConfig", "RLOOConfig", "GKDConfig", "PRMConfig", "lightning", "Accelerator", "Policy.parse",
)  # fmt: skip
_HARDWARE_HINT = re.compile(r"autocast|bfloat16|float16|tf32|matmul_precision|flash_attention")
_TRAINER_PACKAGES = frozenset({"transformers", "trl", "sentence_transformers", "unsloth", "optimum", "adapters"})
_TRAINER_ARGUMENTS = frozenset({
    "TrainingArguments", "Seq2SeqTrainingArguments", "SentenceTransformerTrainingArguments", "SFTConfig", "DPOConfig",
    "ORPOConfig", "KTOConfig", "GRPOConfig", "CPOConfig", "RewardConfig", "RLOOConfig", "OnlineDPOConfig", "GKDConfig",
    "BCOConfig", "PRMConfig", "AdapterTrainingArguments", "GaudiTrainingArguments",
})  # fmt: skip
_LIGHTNING_PACKAGES = frozenset({"pytorch_lightning", "lightning", "lightning_fabric", "lightning_lite"})
# call -> the argument that takes a DeepSpeed configuration
_TAKES_DEEPSPEED = {
    "deepspeed.initialize": ("config", "config_params"),
    "TrainingArguments": ("deepspeed",),
    "DeepSpeedStrategy": ("config",),
    "DeepSpeedPlugin": ("hf_ds_config", "config_file"),
    "HfDeepSpeedConfig": ("config_file_or_dict",),
    "HfTrainerDeepSpeedConfig": ("config_file_or_dict",),
}
# Words that make a model's 16-bit weights something else than what the optimizer trains.
_NOT_PLAIN = re.compile(
    r"peft|lora|load_in_[48]bit|quantization_config|BitsAndBytes|deepspeed|requires_grad", re.IGNORECASE
)


@dataclass(frozen=True)
class Found:
    """One configuration of a script, before it is a `Config`."""

    kind: Kind
    root: Block
    origin: str
    strict: bool
    script: frozenset[str]


def find_in_script(tree: ast.Module, text: str, *, hardware: bool = False) -> tuple[Found, ...]:
    """Every configuration in a script; with `hardware`, also the formats it asks torch for."""
    hinted = any(word in text for word in _HINT) or ("halfstep" in text and "Engine(" in text)
    if not hinted and not (hardware and _HARDWARE_HINT.search(text)):
        return ()
    return tuple(_Finder(tree, text).found(hardware=hardware))


class _Finder:
    """One script's calls, dictionaries and the changes made to them, collected in one walk."""

    def __init__(self, tree: ast.Module, text: str) -> None:
        self.nodes = list(ast.walk(tree))
        self.names = read_names((n, False) for n in self.nodes if isinstance(n, ast.Import | ast.ImportFrom))
        self.literals = Literals(self.nodes, text, self.names)
        self.calls = [n for n in self.nodes if isinstance(n, ast.Call)]
        self.subclasses: set[str] = set()
        self.subclasses = {
            n.name for n in self.nodes if isinstance(n, ast.ClassDef) and any(map(self._is_trainer_class, n.bases))
        }
        self.script = frozenset(self._facts(text))

    def _facts(self, text: str) -> Iterator[str]:
        """What rules about one configuration may have to know of the rest of the script."""
        yield from (full.split(".")[0] for full in self.names.table.values())
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in {"fit", "backward"}:
                yield f".{call.func.attr}()"
        loaded = _loaded_dtype(self.calls, self.names)
        if loaded and not _NOT_PLAIN.search(text):
            yield f"{loaded} weights"

    def _facts_around(self, call: ast.Call) -> frozenset[str]:
        """The script's facts, without the training of other functions where each, as a test does, makes its own trainer."""
        trains = {".fit()", ".backward()"} & self.script
        made = [c for c in self.calls if self.names.full(c.func) == self.names.full(call.func)]
        if not trains or len(made) == 1:
            return self.script
        for node in self.nodes:  # outer functions come first
            if isinstance(node, ast.FunctionDef) and node.lineno <= call.lineno <= (node.end_lineno or 0):
                inside = {f".{n.attr}()" for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                return (self.script - trains) | (trains & inside)
        return self.script

    def found(self, *, hardware: bool) -> Iterator[Found]:
        uses, taken = self._uses_of_dictionaries()
        nested: set[int] = set()
        for node in self.nodes:
            if id(node) in nested or not self.literals.is_block(node):
                continue
            root = self.literals.node(node)
            name = self.literals.name_of(node)
            origin = uses.get(name, "") or taken.get(id(node), "")
            if isinstance(root, Block) and (is_deepspeed(root) or (origin and root.entries)):
                nested.update(id(inner) for inner in ast.walk(node))
                changed = self._changed(root, name)
                if changed is not None:
                    # What nobody is seen to hand to DeepSpeed may pass through a program that takes its own keys out.
                    named = bool(origin) or re.search(r"ds|deepspeed", name, re.IGNORECASE) is not None
                    strict = named and has_own_keys(changed)
                    yield Found("deepspeed", changed, origin or "a dictionary", strict, self.script)
        for call in self.calls:
            yield from self._call(call)
            if hardware:
                yield from self._asks_torch(call)
        if hardware:
            yield from self._tf32_switches()

    def _uses_of_dictionaries(self) -> tuple[dict[str, str], dict[int, str]]:
        """Which variables and which dictionaries are handed to DeepSpeed, and by what."""
        variables: dict[str, str] = {}
        direct: dict[int, str] = {}
        for call in self.calls:
            full = self.names.full(call.func)
            short = "TrainingArguments" if self._is_trainer_class(call.func) else full.rpartition(".")[2]
            for argument in _TAKES_DEEPSPEED.get(full, _TAKES_DEEPSPEED.get(short, ())):
                for keyword in call.keywords:
                    if keyword.arg == argument:
                        variables[".".join(chain(keyword.value))] = full or short
                        direct[id(keyword.value)] = full or short
        variables.pop("", None)
        return variables, direct

    def _changed(self, root: Block, name: str) -> Block | None:
        """The dictionary with every later change to its variable made unknown; None when one cannot be followed."""
        if not name:
            return root
        for path in self.literals.changes.get(name, ()):
            if path is None:
                return None
            root = _forget(root, path)
        return root

    def _is_trainer_class(self, node: ast.AST) -> bool:
        full = self.names.full(node)
        parts = full.split(".")
        if parts[0] in _TRAINER_PACKAGES and parts[-1] in _TRAINER_ARGUMENTS:
            return True
        return isinstance(node, ast.Name) and node.id in self.subclasses

    def _call(self, call: ast.Call) -> Iterator[Found]:
        full = self.names.full(call.func)
        last = full.rpartition(".")[2]
        if self._is_trainer_class(call.func):
            yield self._keywords("transformers", call, last or "TrainingArguments")
        elif last in {"Trainer", "Fabric"} and full.split(".")[0] in _LIGHTNING_PACKAGES:
            yield replace(self._keywords("lightning", call, last), script=self._facts_around(call))
        elif last == "Accelerator" and full.split(".")[0] == "accelerate":
            yield self._keywords("accelerate", call, last)
        elif full.startswith("halfstep.") and last == "Engine":
            yield self._keywords("halfstep", call, last)
        elif full.startswith("halfstep.") and full.endswith("Policy.parse") and call.args:
            yield self._positional("halfstep", call, "Policy.parse", precision=call.args[0])

    def _keywords(self, kind: Kind, call: ast.Call, origin: str) -> Found:
        root = self.literals.call(call)
        # Positional arguments of these calls come first and are none that rules read, except one: Accelerator's are.
        positional = bool(call.args) and kind == "accelerate"
        return Found(kind, replace(root, open=root.open or positional), origin, strict=True, script=self.script)

    def _positional(self, kind: Kind, call: ast.Call, origin: str, **arguments: ast.expr | None) -> Found:
        span = self.literals.span(call)
        entries = tuple(
            Entry(key, span, self.literals.node(value)) for key, value in arguments.items() if value is not None
        )
        return Found(kind, Block(span, entries, call=True), origin, strict=True, script=self.script)

    def _asks_torch(self, call: ast.Call) -> Iterator[Found]:
        """Calls that ask torch for a format: autocast, weights loaded or cast, TF32, an attention kernel."""
        full = self.names.full(call.func)
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if full in {"torch.amp.autocast", "torch.cuda.amp.autocast"}:
            second = call.args[1] if len(call.args) > 1 else None
            device = given.get("device_type", call.args[0] if call.args else None)
            on_cuda = full == "torch.cuda.amp.autocast" or (isinstance(device, ast.Constant) and device.value == "cuda")
            dtype = given.get("dtype", second)
            if on_cuda and not _is_false(given.get("enabled")):
                yield self._positional("torch", call, "autocast", dtype=dtype or ast.Constant("torch.float16"))
        elif method == "from_pretrained":
            yield self._positional(
                "torch",
                call,
                "from_pretrained",
                dtype=given.get("torch_dtype", given.get("dtype")),
                attention=given.get("attn_implementation"),
                flash=given.get("use_flash_attention_2"),
            )
        elif full == "torch.set_float32_matmul_precision" and call.args:
            yield self._positional("torch", call, "set_float32_matmul_precision", matmul=call.args[0])
        elif method == "bfloat16" and not call.args:
            yield self._positional("torch", call, "bfloat16", dtype=ast.Constant("torch.bfloat16"))

    def _tf32_switches(self) -> Iterator[Found]:
        for node in self.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                full = self.names.full(node.targets[0])
                if full in {"torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32"}:
                    span = self.literals.span(node)
                    entries = (Entry("tf32", span, self.literals.node(node.value)),)
                    yield Found("torch", Block(span, entries, call=True), full, strict=True, script=self.script)


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _loaded_dtype(calls: list[ast.Call], names: Names) -> str:
    """The 16-bit format of the one model that a script loads; nothing where there are several or it is another."""
    loads = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "from_pretrained"]
    models = [c for c in loads if re.search(r"Model|For[A-Z]", ".".join(chain(c.func)))]
    if len(models) != 1:
        return ""
    given = {keyword.arg: keyword.value for keyword in models[0].keywords}
    dtype = given.get("torch_dtype", given.get("dtype"))
    word = dtype.value if isinstance(dtype, ast.Constant) else names.full(dtype) if dtype is not None else ""
    name = canonical_name(word)
    return name if name in FORMATS_16_BIT and name != word else ""  # a variable called `bf16` decides nothing


def _forget(block: Block, path: tuple[str, ...]) -> Block:
    """The block with the value at a path unknown, or open where there is none."""
    key, rest = path[0], path[1:]
    found = block.entry(key)
    if found is None:
        return replace(block, open=True)
    node: Node = Scalar(found.value.span, UNKNOWN)
    if rest and isinstance(found.value, Block):
        node = _forget(found.value, rest)
    entries = tuple(Entry(e.key, e.key_span, node) if e is found else e for e in block.entries)
    return replace(block, entries=entries)
