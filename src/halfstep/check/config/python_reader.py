"""Configurations written in a Python script: dictionaries for DeepSpeed, and the calls of other tools.

Only literals are read. A name bound once to a literal is that literal, and everything else is `UNKNOWN`. A dictionary
that the script changes later (`ds_config["fp16"]["enabled"] = True`) is checked as changed, in every branch that changes
it, and not at all when a change cannot be followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from halfstep.check.config.alternatives import Alternatives
from halfstep.check.config.arms import arms_of, with_defaults
from halfstep.check.config.assigned import Assignments
from halfstep.check.config.classes import class_configs
from halfstep.check.config.config import Config
from halfstep.check.config.fitting import facts_around
from halfstep.check.config.flags import assigned_facts, flag_facts
from halfstep.check.config.kind import Kind, has_own_keys, is_deepspeed, is_trainer_part, kind_of, recipe_of
from halfstep.check.config.literals import copied_name, literals_of, subscript
from halfstep.check.config.placement import is_for_deepspeed, uses_of_dictionaries
from halfstep.check.config.text_flags import with_text_flags
from halfstep.check.files.source import Source
from halfstep.check.regex import regex
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import chain, read_names
from halfstep.check.settings import Settings
from halfstep.precision.node import UNKNOWN, Block, Entry, Scalar

__all__ = ["expects_error", "find_in_script"]

# A script without any of these words contains no configuration and is not searched.
_HINT = (
    "deepspeed", "DeepSpeed", "zero_optimization", "train_micro_batch", "TrainingArguments", "SFTConfig", "POConfig",
    "KTOConfig", "BCOConfig", "RewardConfig", "RLOOConfig", "GKDConfig", "PRMConfig", "lightning", "Accelerator", "Policy.parse",
    "finetuning_type", "16-true", "pl.Trainer(",
)  # fmt: skip
# Settings in a class of the project, for a Trainer in another file: a value that only Lightning has, next to its arguments.
_TRUE = frozenset({"16-true", "bf16-true"})
_TRAINS = frozenset({"gradient_clip_val", "accumulate_grad_batches", "max_epochs", "max_steps"})
_HARDWARE_HINT = regex(r"autocast|bfloat16|float16|tf32|matmul_precision|flash_attention")
_TRAINER_PACKAGES = frozenset({"transformers", "trl", "sentence_transformers", "unsloth", "optimum", "adapters"})
_TRAINER_ARGUMENTS = frozenset({
    "TrainingArguments", "Seq2SeqTrainingArguments", "SentenceTransformerTrainingArguments", "SFTConfig", "DPOConfig",
    "ORPOConfig", "KTOConfig", "GRPOConfig", "CPOConfig", "RewardConfig", "RLOOConfig", "OnlineDPOConfig", "GKDConfig",
    "BCOConfig", "PRMConfig", "AdapterTrainingArguments", "GaudiTrainingArguments",
})  # fmt: skip
_WRAPS = frozenset({"partial", "builds"})  # of functools and hydra_zen: the class is the first argument
_HALF_PLUGINS = frozenset({"HalfPrecision", "HalfPrecisionPlugin"})
_REMOVED_OPTIONS = frozenset({"amp_backend", "amp_level"})
_LIGHTNING_PACKAGES = frozenset({"pytorch_lightning", "lightning", "lightning_fabric", "lightning_lite"})
_BLOCKS = frozenset({ast.Call, ast.Dict})  # few nodes are one, and only these can be a dictionary written out
# Context managers of tests: what they contain is meant to fail.
_EXPECTS_ERROR = frozenset({"raises", "assertRaises", "assertRaisesRegex"})


def find_in_script(tree: ast.Module, source: Source, settings: Settings) -> tuple[Config, ...]:
    """Every configuration written in a script; for a known GPU, also the formats it requests from torch."""
    text = source.text
    hinted = any(word in text for word in _HINT) or ("halfstep" in text and "Engine(" in text)
    if not hinted and not (settings.gpu is not None and _HARDWARE_HINT.search(text)):
        return ()
    return tuple(_Finder(tree, source, settings).configs())


class _Finder:
    """One script's calls, dictionaries and the changes made to them, collected in one walk."""

    def __init__(self, tree: ast.Module, source: Source, settings: Settings) -> None:
        text = source.text
        self.source = source
        self.settings = settings
        self.nodes = all_nodes(tree)
        self.names = read_names((n, False) for n in self.nodes if isinstance(n, (ast.Import, ast.ImportFrom)))
        self.literals = literals_of(tree, text, self.names)
        failing = [inner for n in self.nodes if expects_error(n) for inner in ast.walk(n)]
        self.failing = {id(node) for node in failing}
        self.failing_names = {node.id for node in failing if isinstance(node, ast.Name)}
        self.calls = [n for n in self.nodes if isinstance(n, ast.Call) and id(n) not in self.failing]
        self.subclasses: set[str] = set()
        self.subclasses = {
            n.name for n in self.nodes if isinstance(n, ast.ClassDef) and any(map(self._is_trainer_class, n.bases))
        }
        self.script = frozenset(self._facts())

    def _facts(self) -> Iterator[str]:
        """What rules about one configuration may need to know about the rest of the script."""
        yield from (full.split(".")[0] for full in self.names.table.values())
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in {"fit", "backward"}:
                yield f".{call.func.attr}()"

    def _config(self, kind: Kind, root: Block, origin: str, *, strict: bool = True) -> Config:
        return Config(kind, root, self.source, self.settings, origin, strict, self.script)

    def configs(self) -> Iterator[Config]:
        """The configurations: dictionaries first, then calls, then TF32 switches."""
        by_variable, by_node = uses_of_dictionaries(
            self.calls, self.nodes, self.names, self.literals, self._is_trainer_class
        )
        hardware = self.settings.gpu is not None
        nested: set[int] = set()
        for node in self.nodes:
            if type(node) not in _BLOCKS or id(node) in nested or id(node) in self.failing:
                continue
            if not self.literals.is_block(node):
                continue
            root = self.literals.node(node)
            name = self.literals.name_of(node)
            if name and name in self.failing_names:
                continue
            if copied_name(node) is not None and name not in self.literals.changes:
                continue  # reported where it is written
            # The other programs take their recipe as a file; a dictionary with their keys is a fixture of a test.
            if isinstance(root, Block) and recipe_of(root) == "llamafactory":
                for changed in self._versions(root, name, node):
                    yield self._config("llamafactory", changed, "a dictionary")
            origin = by_variable.get(name, "") or by_node.get(id(node), "")
            if isinstance(root, Block) and (is_deepspeed(root) or origin):
                nested.update(id(inner) for inner in ast.walk(node))
                blocks = list(self._versions(root, name, node))
                versions = [arm for block in blocks for arm in arms_of(block, node, self.literals)]
                if not root.entries:  # `config = {}`, filled key by key, here and perhaps in other places
                    versions = [replace(block, open=True) for block in versions if block.entries]
                for changed in versions:
                    # A dictionary not visibly passed to DeepSpeed may go through a program that removes its own keys.
                    named = bool(origin) or is_for_deepspeed(node, name, self.nodes, self.source.path)
                    strict = named and has_own_keys(changed)
                    config = self._config("deepspeed", changed, origin or "a dictionary", strict=strict)
                    yield config if changed is root else replace(config, assembled=True)
                if blocks and blocks[0].entries:
                    config = replace(config, root=blocks[0])
                    yield from with_defaults(config, self.nodes, self.literals, self.alternatives)
            elif isinstance(root, Block) and self._is_trainer_dictionary(root, name):
                yield replace(self._config("lightning", root, "a dictionary", strict=False), assembled=True)
        for root, strict in class_configs(self.nodes, self.literals, self.source.path):
            yield replace(self._config("deepspeed", root, "a class", strict=strict), assembled=True)
        for call in self.calls:
            yield from self._call(call)
            if hardware:
                yield from self._torch_request(call)
        if hardware:
            yield from self._tf32_switches()

    def _is_trainer_dictionary(self, root: Block, name: str) -> bool:
        """Whether a dictionary has the arguments of a Lightning Trainer and no call that is read spreads it."""
        if not self.script & _LIGHTNING_PACKAGES or (name in self.literals.blocks and name in self.spread_names):
            return False
        return kind_of(root) == "lightning" or is_trainer_part(root, name)

    @cached_property
    def spread_names(self) -> set[str]:
        """The variables that are passed as `**name`."""
        return {".".join(chain(k.value)) for call in self.calls for k in call.keywords if k.arg is None}

    @cached_property
    def assignments(self) -> Assignments:
        """The changes that the script makes to its dictionaries; few scripts have any."""
        return Assignments(self.nodes, self.literals)

    def _versions(self, root: Block, name: str, node: ast.AST) -> Iterator[Block]:
        """The dictionary as it is after the script's changes to its variable, one for each branch that changes it."""
        yield from self.assignments.versions(root, name, node) if name else (root,)

    def _is_trainer_class(self, node: ast.AST) -> bool:
        full = self.names.full(node)
        parts = full.split(".")
        if parts[0] in _TRAINER_PACKAGES and parts[-1] in _TRAINER_ARGUMENTS:
            return True
        return isinstance(node, ast.Name) and node.id in self.subclasses

    def _call(self, call: ast.Call) -> Iterator[Config]:
        full = self.names.full(call.func)
        last = full.rpartition(".")[2]
        if self._is_trainer_class(call.func):
            config = self._keywords("transformers", call, last or "TrainingArguments")
            config = with_text_flags(config, call, self.nodes, self.alternatives)
            yield replace(config, script=self.script | flag_facts(call, self.nodes, self.names))
            yield from self._changed_options(call, last or "TrainingArguments")
        elif self._is_lightning(call):
            yield from self._lightning(call, last)
            yield from self._removed_options(call, last)
        elif last in _HALF_PLUGINS and full.split(".")[0] in _LIGHTNING_PACKAGES:
            value = next((k.value for k in call.keywords if k.arg == "precision"), call.args[0] if call.args else None)
            config = self._positional("lightning", call, last, precision=value or ast.Constant("16-true"))
            yield replace(config, assembled=True)
        elif last.endswith("LightningCLI") and full.split(".")[0] in _LIGHTNING_PACKAGES:
            defaults = next((k.value for k in call.keywords if k.arg == "trainer_defaults"), None)
            root = self.literals.node(defaults) if defaults is not None else None
            if isinstance(root, Block):
                yield self._config("lightning", root, last)
        elif last == "Accelerator" and full.split(".")[0] == "accelerate":
            precision = next((k.value for k in call.keywords if k.arg == "mixed_precision"), None)
            config = self._keywords("accelerate", call, last)
            yield from self._each(config, "mixed_precision", precision)
            for literal in self.alternatives.offered(precision) if precision is not None else ():
                node = self.literals.node(literal)
                root = replace(config.root, entries=(Entry("mixed_precision", node.span, node),))
                yield replace(config, root=root, assembled=True)
        elif full.startswith("halfstep.") and last == "Engine":
            yield self._keywords("halfstep", call, last)
        elif full.startswith("halfstep.") and full.endswith("Policy.parse") and call.args:
            yield self._positional("halfstep", call, "Policy.parse", precision=call.args[0])
        elif any(k.arg == "precision" and getattr(k.value, "value", "") in _TRUE for k in call.keywords):
            root = replace(self.literals.call(call), call=False)
            if _TRAINS.intersection(root.keys()) and is_trainer_part(root, last):
                yield replace(self._config("lightning", root, "a class of settings", strict=False), assembled=True)

    def _changed_options(self, call: ast.Call, origin: str) -> Iterator[Config]:
        """The arguments of `TrainingArguments(**options)` with the keys that the script sets in `options` later."""
        spread = [".".join(chain(k.value)) for k in call.keywords if k.arg is None]
        name = spread[0] if len(spread) == 1 else ""
        source = self.literals.blocks.get(name) if name in self.literals.changes else None
        root = self.literals.node(source) if source is not None else None
        if isinstance(root, Block) and source is not None:
            own = self.literals.call(call)
            for changed in self._versions(root, name, source):
                entries = (*own.entries, *changed.entries)
                block = replace(own, entries=entries, open=changed.open)
                written = self.assignments.written(call, entries, name, source)
                facts = self.script | assigned_facts(written, self.nodes, self.names)
                yield replace(self._config("transformers", block, origin), assembled=True, script=facts)

    def _removed_options(self, call: ast.Call, origin: str) -> Iterator[Config]:
        """The arguments that Lightning 2 removed, where the script sets them in `options` of `Trainer(**options)`."""
        spread = {".".join(chain(k.value)) for k in call.keywords if k.arg is None} - {""}
        calls = {c.func.id for c in self._values_of(spread) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}
        functions = [n for n in self.nodes if isinstance(n, ast.FunctionDef) and n.name in calls]
        returned = [
            n.value for f in functions for n in ast.walk(f) if isinstance(n, ast.Return) and n.value is not None
        ]
        for name in spread | {".".join(chain(value)) for value in returned} - {""}:
            for group in self.assignments.groups.get(name, ()):
                targets = [(a.targets[0], a.value, subscript(a.targets[0])[1]) for a in group.assigns]
                entries = tuple(
                    Entry(path[0], self.literals.span(target), self.literals.node(value))
                    for target, value, path in targets
                    if path is not None and len(path) == 1 and path[0] in _REMOVED_OPTIONS
                )
                if entries and not self._is_for_version(group.assigns[0]):
                    root = Block(entries[0].key_span, entries, open=True)
                    yield replace(self._config("lightning", root, origin, strict=False), assembled=True)

    def _is_for_version(self, node: ast.stmt) -> bool:
        """Whether a test of a version is around a statement."""
        tests = (n for n in self.nodes if isinstance(n, ast.If) and n.lineno < node.lineno <= (n.end_lineno or 0))
        return any("version" in ast.unparse(n.test).lower() for n in tests)

    def _values_of(self, names: set[str]) -> list[ast.expr]:
        """What the script assigns to variables."""
        assigns = [n for n in self.nodes if isinstance(n, ast.Assign)] if names else []
        return [a.value for a in assigns if any(".".join(chain(t)) in names for t in a.targets)]

    def _is_lightning(self, call: ast.Call) -> bool:
        """Whether a call creates a Trainer or Fabric: the class, a subclass, or `partial(Trainer, ...)`."""
        func = call.func
        if isinstance(func, ast.Attribute) and func.attr == "from_argparse_args":
            func = func.value
        if self._is_lightning_class(func):
            return True
        if _WRAPS.intersection(chain(call.func)[-1:]) and call.args and self._is_lightning_class(call.args[0]):
            return True
        # `super().__init__(precision=16)` of a subclass
        func = call.func
        inner = func.value if isinstance(func, ast.Attribute) and func.attr == "__init__" else None
        is_super = isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "super"
        return is_super and any(n.lineno <= call.lineno <= (n.end_lineno or 0) for n in self.trainers)

    def _is_lightning_class(self, node: ast.AST) -> bool:
        full = self.names.full(node)
        if full.rpartition(".")[2] in {"Trainer", "Fabric"} and full.split(".")[0] in _LIGHTNING_PACKAGES:
            return True
        # In a part of a notebook, or under a star import, nothing binds the name that everybody gives the package.
        if not full and chain(node) == ("pl", "Trainer") and not self._values_of({"pl"}):
            return True
        return isinstance(node, ast.Name) and any(node.id == n.name for n in self.trainers)

    @cached_property
    def trainers(self) -> list[ast.ClassDef]:
        """The subclasses of Lightning's Trainer."""
        classes = [n for n in self.nodes if isinstance(n, ast.ClassDef)]
        return [
            n
            for n in classes
            if any(
                self.names.full(b).rpartition(".")[2] == "Trainer"
                and self.names.full(b).split(".")[0] in _LIGHTNING_PACKAGES
                for b in n.bases
            )
        ]

    @cached_property
    def alternatives(self) -> Alternatives:
        """What the script's variables may be."""
        return Alternatives(self.nodes)

    def _lightning(self, call: ast.Call, last: str) -> Iterator[Config]:
        """A Trainer's arguments; once for each literal that its precision may be."""
        facts = facts_around(call, self.script, self.calls, self.nodes, self.names)
        config = replace(self._keywords("lightning", call, last), script=facts)
        precision = next((k.value for k in call.keywords if k.arg == "precision"), None)
        if config.entry("precision") is None and precision is None:
            precision = _spread_precision(call)
            span = self.literals.span(call)
            entry = Entry("precision", span, Scalar(span, UNKNOWN))
            if precision is not None and any(True for _ in self.alternatives.of(precision)):
                config = replace(config, root=replace(config.root, entries=(*config.root.entries, entry)))
        yield from self._each(config, "precision", precision)

    def _each(self, config: Config, key: str, value: ast.expr | None) -> Iterator[Config]:
        """The arguments of a call, once for each literal that an undecided one of them may be."""
        entry = config.entry(key)
        is_open = entry is not None and value is not None and config.value(key) is UNKNOWN
        literals = list(self.alternatives.untested(value)) if is_open and value is not None else []
        if entry is None or not literals:
            yield config
            return
        for literal in dict.fromkeys(literals):
            node = self.literals.node(literal)
            new = Entry(key, node.span, node)
            entries = tuple(new if e is entry else e for e in config.root.entries)
            inside = entry.span.start <= node.span.start and node.span.end <= entry.span.end
            yield replace(config, root=replace(config.root, entries=entries), assembled=not inside)

    def _keywords(self, kind: Kind, call: ast.Call, origin: str) -> Config:
        root = self.literals.spread(call)
        # Rules read no positional arguments of these calls, except Accelerator's.
        positional = bool(call.args) and kind == "accelerate"
        return self._config(kind, replace(root, open=root.open or positional), origin)

    def _positional(self, kind: Kind, call: ast.Call, origin: str, **arguments: ast.expr | None) -> Config:
        span = self.literals.span(call)
        entries = tuple(
            Entry(key, span, self.literals.node(value)) for key, value in arguments.items() if value is not None
        )
        return self._config(kind, Block(span, entries, call=True), origin)

    def _torch_request(self, call: ast.Call) -> Iterator[Config]:
        """Calls that request a format from torch: autocast, weights loaded or cast, TF32, an attention kernel."""
        full = self.names.full(call.func)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if full in {"torch.amp.autocast", "torch.cuda.amp.autocast"}:
            second = call.args[1] if len(call.args) > 1 else None
            device = keywords.get("device_type", call.args[0] if call.args else None)
            on_cuda = full == "torch.cuda.amp.autocast" or (isinstance(device, ast.Constant) and device.value == "cuda")
            dtype = keywords.get("dtype", second)
            if on_cuda and not _is_false(keywords.get("enabled")):
                yield self._positional("torch", call, "autocast", dtype=dtype or ast.Constant("torch.float16"))
        elif method == "from_pretrained":
            yield self._positional(
                "torch",
                call,
                "from_pretrained",
                dtype=keywords.get("torch_dtype", keywords.get("dtype")),
                attention=keywords.get("attn_implementation"),
                flash=keywords.get("use_flash_attention_2"),
            )
        elif full == "torch.set_float32_matmul_precision" and call.args:
            yield self._positional("torch", call, "set_float32_matmul_precision", matmul=call.args[0])
        elif method == "bfloat16" and not call.args:
            yield self._positional("torch", call, "bfloat16", dtype=ast.Constant("torch.bfloat16"))

    def _tf32_switches(self) -> Iterator[Config]:
        for node in self.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                full = self.names.full(node.targets[0])
                if full in {"torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32"}:
                    span = self.literals.span(node)
                    entries = (Entry("tf32", span, self.literals.node(node.value)),)
                    yield self._config("torch", Block(span, entries, call=True), full)


def expects_error(node: ast.AST) -> bool:
    """Whether a node is `with pytest.raises(...)` or `with self.assertRaises(...)`."""
    if not isinstance(node, ast.With):
        return False
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(chain(call.func)[-1:] and chain(call.func)[-1] in _EXPECTS_ERROR for call in calls)


def _spread_precision(call: ast.Call) -> ast.expr | None:
    """The precision that `Trainer.from_argparse_args(args)` or `Trainer(**options)` reads: `args.precision`, `options["precision"]`."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    options = next((k.value for k in call.keywords if k.arg is None), None)
    part: ast.expr
    if method == "from_argparse_args" and call.args:
        part = ast.Attribute(call.args[0], "precision", ast.Load())
    elif options is not None and chain(options):
        part = ast.Subscript(options, ast.Constant("precision"), ast.Load())
    else:
        return None
    return ast.copy_location(part, call)


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
