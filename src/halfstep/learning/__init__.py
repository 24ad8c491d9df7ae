"""The course of `halfstep learn`: units, a quiz and progress, every claim backed by an experiment on this machine.

progress                    what was run, as lines of a file; the checkpoint boxes that it ticks
quiz  questions             questions, answers, grading
course  units               the units in their order; their texts
experiment                  an experiment by name, run in isolation: numbers measured now, and whether the claim is true
experiments/                one file per subject; the only part that imports torch
"""
