"""Scores `halfstep check` on labelled public files: precision and recall, by severity and by age.

    python benchmarks/score_check.py FILES [--part development] [--labels benchmarks/check_sample] [--out FILE.md] [--list]

FILES is a folder with the sampled files, which are not part of this project: each at `OWNER+NAME/PATH`, in the version whose
sha256 the label has. The labels were made from the definitions of the mistakes, before anybody saw what the checker reports
for these files. One JSON object per line: repo, commit, path, sha256, date, kind, labels, doubtful.

A finding and a label are the same mistake if they have the same rule and are at most `REACH` lines apart. Labels of mistakes
that had no rule (`new:...`) are matched with the rules that `rules.json` names for them. A finding next to a doubtful place
counts neither way; every other finding without a label is a false alarm until somebody reads it: `--list` prints them, and
`judged.jsonl` (repo, path, line, rule, true) records the verdicts.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep import __version__
from halfstep.check.session import check_path

REACH = 5  # lines between a label and its finding
HELD_BACK: tuple[str, ...] = ()  # parts whose labels nobody has read yet
SEVERITIES = ("error", "warning", "advice")
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Sampled:
    """A labelled file and what the checker reports for it."""

    entry: dict
    findings: tuple

    @property
    def is_recent(self):
        """Whether the file is of 2025 or later."""
        return self.entry["date"] >= "2025"


def read_labels(folder):
    """The entries of every part, the rules of labels without one, and the verdicts on further findings."""
    parts = [path for path in sorted(folder.glob("*.jsonl")) if path.name != "judged.jsonl"]
    entries = [
        json.loads(line) | {"part": "held-back" if path.stem in HELD_BACK else "development"}
        for path in parts
        for line in path.read_text().splitlines()
        if line.strip()
    ]
    rules = folder / "rules.json"
    judged = folder / "judged.jsonl"
    verdicts = [json.loads(line) for line in judged.read_text().splitlines()] if judged.exists() else []
    true = {(v["repo"], v["path"], v["line"], v["rule"]) for v in verdicts if v["true"]}
    return entries, json.loads(rules.read_text()) if rules.exists() else {}, true


def check_entry(entry, files):
    """Run the checker on the file of an entry; None if it is not there in this version."""
    path = files / entry["repo"].replace("/", "+") / entry["path"]
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        return None
    # A file that cannot be parsed (HS0xx) says nothing about precision: it counts only for a label that names it.
    named = {label["mistake"] for label in entry["labels"]}
    findings = [f for f in check_path(path) if not f.code.startswith("HS0") or f.code in named]
    numbers = code_cells(path) if path.suffix == ".ipynb" else []
    return Sampled(entry, tuple(replace(f, cell=numbers[f.cell - 1]) if f.cell else f for f in findings))


def code_cells(path):
    """The positions of a notebook's code cells among all of its cells: findings count only those with code, from 1."""
    return [i for i, cell in enumerate(json.loads(path.read_text())["cells"]) if cell["cell_type"] == "code"]


def is_same(label, finding, rules):
    """Whether a finding reports this label."""
    codes = rules.get(label["mistake"], [label["mistake"]])
    if finding.code not in codes:
        return False
    lines = (label["line"], *label.get("also", ()))  # places that are as good
    if label["severity"] == "advice":  # once per file, in any cell
        return True
    cell = label.get("cell", finding.cell)
    if finding.cell is not None and abs(cell - finding.cell) > 1:  # counted from 0 or from 1
        return False
    return any(abs(finding.line - line) <= REACH for line in lines)


def matches(sampled, rules, true):
    """Labels that were found, and findings by what they are: matched, doubtful, judged true, or unexplained."""
    entry, kinds = sampled.entry, {}
    found = [any(is_same(label, f, rules) for f in sampled.findings) for label in entry["labels"]]
    for finding in sampled.findings:
        place = (entry["repo"], entry["path"], finding.line, finding.code)
        if any(is_same(label, finding, rules) for label in entry["labels"]):
            kinds[finding] = "matched"
        elif finding.code.startswith("HS0"):
            kinds[finding] = "doubtful"  # another place than that of the label
        elif any(abs(finding.line - d["line"]) <= REACH for d in entry.get("doubtful", [])):
            kinds[finding] = "doubtful"
        else:
            kinds[finding] = "true" if place in true else "unexplained"
    return found, kinds


def share(part, whole):
    """A fraction as text."""
    return f"{part} of {whole} ({part / whole:.2f})" if whole else "none"


def recall(pairs):
    """The share of labels that were found."""
    return share(sum(found for _, found in pairs), len(pairs))


def report(samples, rules, true):
    """The table in Markdown, the findings that nobody has explained, and the labels without a finding."""
    pairs, kinds, unexplained, missed = [], Counter(), [], []
    for sampled in samples:
        found, own = matches(sampled, rules, true)
        pairs += [((sampled, label), hit) for label, hit in zip(sampled.entry["labels"], found, strict=True)]
        missed += [(sampled.entry, label) for label, hit in zip(sampled.entry["labels"], found, strict=True) if not hit]
        # A rule that reports one mistake on several lines counts once.
        kinds.update(kind for kind, _ in {(kind, finding.code) for finding, kind in own.items()})
        unexplained += [(sampled.entry, finding) for finding, kind in own.items() if kind == "unexplained"]
    alone = [pair for pair in pairs if pair[0][1]["scope"] == "file"]
    judged = kinds["matched"] + kinds["true"] + kinds["unexplained"]
    rows = [
        ("precision", share(kinds["matched"] + kinds["true"], judged)),
        ("recall, all labels", recall(pairs)),
        ("recall, one file decides", recall(alone)),
        *(
            (f"recall, one file decides, {s}", recall([p for p in alone if p[0][1]["severity"] == s]))
            for s in SEVERITIES
        ),
        ("recall, one file decides, 2025 and later", recall([p for p in alone if p[0][0].is_recent])),
        ("recall, one file decides, before 2025", recall([p for p in alone if not p[0][0].is_recent])),
    ]
    recent = sum(sampled.is_recent for sampled in samples)
    text = f"halfstep {__version__}; {len(samples)} files, {recent} of 2025 and later; {len(pairs)} labels\n\n| figure | value |\n|---|---|\n"
    return text + "".join(f"| {name} | {value} |\n" for name, value in rows), unexplained, missed


def main():
    """Score the sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path)
    parser.add_argument("--labels", type=Path, default=HERE / "check_sample")
    parser.add_argument("--part", choices=("held-back", "development", "all"), default="all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true", help="print the findings without a label and the missed labels")
    options = parser.parse_args()
    entries, rules, true = read_labels(options.labels)
    entries = [entry for entry in entries if options.part in ("all", entry["part"])]
    samples = [check_entry(entry, options.files) for entry in entries]
    missing = [entry for entry, sampled in zip(entries, samples, strict=True) if sampled is None]
    if missing:
        names = ", ".join(f"{entry['repo']}/{entry['path']}" for entry in missing[:3])
        print(
            f"{len(missing)} of {len(entries)} files are missing or of another version, e.g. {names}", file=sys.stderr
        )
    text, unexplained, missed = report([s for s in samples if s is not None], rules, true)
    print(text)
    if options.out:
        options.out.write_text(text)
    if options.list:
        for entry, finding in unexplained:
            print(f"{entry['repo']}/{entry['path']}:{finding.line} {finding.code} {finding.message}")
        for entry, label in missed:
            place = f"{entry['repo']}/{entry['path']}:{label['line']}"
            print(f"missed: {place} {label['mistake']} {label['severity']} ({label['scope']}) {label['why']}")


if __name__ == "__main__":
    main()
