"""Static checks for precision mistakes in scripts, notebooks and configurations. No torch, and nothing is executed.

A small engine: a file becomes a document, a document becomes facts, rules turn facts into findings. Every line below
imports only from the lines after it:

    session  deepspeed          paths -> findings, and fixed files; a DeepSpeed configuration -> one that Halfstep has completed
    fixing  parallel  cases     apply fixes; check many files; check a rule's own cases
    cache  baseline             results of earlier runs; findings that a project accepts
    runner                      one file through all its rules; whatever fails becomes a finding
    suppress  walk              comments that suppress findings; which files are checked
    gitignore                   which paths git ignores
    options                     the command line combined with the project
    project                     [tool.halfstep.check] in pyproject.toml
    select                      selectors: codes, prefixes, names, severities
    registry                    rules by group, loaded on first use
    rules/                      one class per rule: script/, weights/, frameworks/, config/, hardware, advisories
    simulation/                 scripts run on symbolic values: what their scalers and optimizers go through
    fixes/                      where a script can be edited, with which names, for which optimizer
    config/                     facts about configurations: JSON, YAML, dictionaries and calls in scripts
    script/                     facts about Python: names, values, training loops as traces of events
    files/                      bytes to text and back, notebooks, findings about unreadable files (HS0xx)
    rule  examples              base classes, and how to write a rule; loops that examples vary
    finding  settings           the values that everything else passes around
    pins                        the versions of libraries that a program runs with
    regex                       expressions compiled on first use
"""

from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.session import check_path

__all__ = ["Edit", "Finding", "Fix", "check_path"]
