"""Runs the command line as `python -m halfstep`."""

from halfstep.cli import main

main()
