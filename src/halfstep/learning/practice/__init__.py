"""Practice: the reader's own script, graded by `halfstep check` and by what it does in a measured run on the CPU.

grading  speed  explanation rows per task: what was expected, what was measured, what to do
loop  printed               rows about any training loop; what a script printed, compared with what was measured
launch                      starts the runs of a script in separate processes, each with a time limit
host                        the program in those processes: runs the script, observed
pretend  observe  layers  memory    torch.cuda on a CPU; steps, gradients, layers, live bytes, as they happen. They import torch
starters  tasks             the five tasks and their starter files
record                      values: a run, its steps and backward passes, a row, a grade
"""
