"""The checker on files made to break it; benchmarks/fuzz_check.py does the same for as long as one likes."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from check_mutants import ENDINGS, mutant, seeds, survive
from work_counter import no_hang, num_lines

POOL = seeds()
MAX_LINES = (
    6_000_000  # for a hostile file; most take less than a tenth, comparing all pairs would take several times as many
)


@settings(max_examples=700, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**40))
def test_no_mutant_breaks_the_checker(number):
    """Cases of the rules, mutated as bytes, as lines and as syntax trees: always findings, never a failure."""
    survive(*mutant(number, POOL), gpu=number % 4 == 0)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(ENDINGS)),
    st.one_of(st.binary(max_size=400), st.text(max_size=400).map(lambda t: t.encode("utf-8", "replace"))),
)
def test_no_random_file_breaks_the_checker(language, data):
    """Bytes and texts of any kind under any ending."""
    survive(language, data)


HOSTILE = {
    "yaml alias bomb": ("yaml", "a: &a [x,x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)) + "mixed_precision: fp16\n"),
    "yaml self reference": ("yaml", "mixed_precision: &a [*a]\n"),
    "yaml tag": ("yaml", "mixed_precision: !!python/object/apply:os.abort []\n"),
    "yaml deep flow": ("yaml", "fp16: " + "[" * 20_000),
    "yaml deep blocks": ("yaml", "".join("  " * i + "fp16:\n" for i in range(400))),
    "yaml many documents": ("yaml", "--- {fp16: true}\n" * 3000),
    "json deep": ("json", '{"zero_optimization": ' + "[" * 100_000),
    "json deep closed": ("json", '{"fp16":' * 20_000 + "1" + "}" * 20_000),
    "json huge number": ("json", '{"zero_optimization": {"stage": ' + "9" * 100_000 + "}}"),
    "json many quotes": ("json", '{"fp16": "' + '\\"' * 50_000),
    "json open comments": ("json", '{"fp16": 1, ' + "/*" * 50_000),
    "json slashes": ("json", '{"zero_optimization": ' + "/" * 50_000),
    "json braces": ("json", '{"fp16": ' + "{{" * 20_000),
    "json spaces": ("json", '{"fp16"' + " " * 200_000 + "1"),
    "json bare words": ("json", '{"fp16": ' + "a " * 50_000),
    "python names": ("python", "autocast\n" + "scaler = scaler\n" * 8000),
    "python helpers": ("python", "from torch.cuda.amp import *\n" + "".join(f"def f{i}(scaler):\n    f{(i * 7) % 200}(scaler); f{(i * 11) % 200}(scaler); scaler.update()\n" for i in range(200)) + "f0(GradScaler())\n"),
    "python branches": ("python", "from torch.cuda.amp import *\nscaler = GradScaler()\n" + "if use_amp:\n    scaler.step(o)\nelse:\n    o.step()\n" * 300),
    "python nested ifs": ("python", "from torch.cuda.amp import *\nscaler = GradScaler()\n" + "".join(" " * i + f"if x{i}:\n" for i in range(60)) + " " * 60 + "scaler.step(o)\n"),
    "python aliases": ("python", "from torch.cuda.amp import GradScaler as a0\n" + "".join(f"a{i + 1} = a{i}\n" for i in range(4000)) + "a4000().update()\n"),
    "python recursion": ("python", "from torch.cuda.amp import *\ndef f(scaler):\n    g(scaler)\ndef g(scaler):\n    f(scaler); f(scaler)\nf(GradScaler())\n"),
    "python ternaries": ("python", "from torch.cuda.amp import *\nctx = " + "autocast() if a else (" * 150 + "None" + ")" * 150 + "\nwith ctx: pass\n"),
    "python long call": ("python", "import torch\ntorch.autocast(" + "float16, " * 30_000 + ")\n"),
    "python comments": ("python", "autocast\n" + "# halfstep: ignore[HS104]\n" * 1200),
    "python brackets": ("python", "# halfstep: ignore[" + "[" * 100_000),
    "notebook strings": ("notebook", '{"cells": [{"cell_type": "code", "source": "' + "!x\\n" * 20_000 + '"}]}'),
    "notebook deep": ("notebook", '{"cells": ' + "[" * 100_000),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_take_a_bounded_amount_of_work(name):
    """What is quadratic or exponential in a careless reader ends after a few million lines of Python here."""
    language, text = HOSTILE[name]
    with no_hang():
        num_lines(survive, language, text.encode(), limit=MAX_LINES)
