"""The `halfstep` command: one small file per subcommand, loaded only when it is called.

A command parses its arguments, calls the library and passes the result to `halfstep.report`. A HalfstepError becomes one
message on stderr and exit code 1; bad usage is 2; findings or a failed gate are 3; a run stopped by a signal is 128 plus
the signal.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from halfstep import __version__
from halfstep.errors import HalfstepError, nearest

__all__ = ["main"]

_INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
# name -> one line for `halfstep --help`, so that the help page imports no command.
_COMMANDS = {
    "check": "Find precision mistakes in scripts, notebooks and configurations.",
    "compare": "Train a job in several precisions and compare speed, memory and learning.",
    "export": "Write the weights of a run as one safetensors file.",
    "explain": "Explain a concept of mixed precision or a rule of `halfstep check`.",
    "learn": "Learn mixed precision: units, a quiz and progress, with an experiment for every claim.",
    "mcp": "Serve check, explain, plan, probe and run files to agents and editors (Model Context Protocol).",
    "plan": "Predict the memory of a training step and how many GPUs it needs.",
    "probe": "Show the formats that this machine (or a named GPU) supports and which precision to use.",
    "rehearse": "Predict from a few fp32 steps what overflows or underflows in fp16, and propose a policy.",
    "train": "Train a job with checkpoints and a run file.",
    "watch": "Show a run live: losses, loss scale, skipped steps and the worst tensors.",
}


class _Lazy(click.Group):
    """A group that imports a subcommand only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"halfstep.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            close = nearest(args[0], _COMMANDS)
            hint = f" Did you mean {close!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{hint} Known: {', '.join(sorted(_COMMANDS))}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; errors that have a known remedy become a HalfstepError."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            sys.stderr.write(f"halfstep: {str(interrupt) or 'interrupted.'}\n")
            sys.exit(_INTERRUPTED)
        except (MemoryError, OSError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if isinstance(error, HalfstepError):
                raise
            from halfstep.cli.failures import explain_error  # the help page needs none of it

            explained = explain_error(error)
            if explained is None:
                raise
            raise explained from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="halfstep")
def cli() -> None:
    """Mixed-precision training for PyTorch that shows what actually runs.

    \b
    halfstep probe                      which precision this machine is good at
    halfstep check train.py             precision mistakes in your own script
    halfstep compare job.py             fp32, bf16 and fp16 on your job, measured
    halfstep explain loss-scaling       a concept with its numbers
    halfstep learn                      the course, with an experiment per claim

    Without a TARGET, commands use a small built-in job (digits). `halfstep COMMAND --help` has examples. Shell completion:
    eval "$(_HALFSTEP_COMPLETE=bash_source halfstep)" in ~/.bashrc; zsh_source and fish_source for other shells.
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    try:
        cli.main(args=args, prog_name="halfstep")
    except HalfstepError as error:
        from halfstep.events import message_text  # the help page needs none of it

        sys.stderr.write(message_text(f"{_of_rank(error)}{error}"))
        sys.exit(1)
    except Exception as error:
        if rank := _of_rank(error):
            from halfstep.events import message_text

            sys.stderr.write(message_text(f"{rank}{type(error).__name__}: {error}"))
        raise


def _of_rank(error: BaseException) -> str:
    """The rank of this process, if there are others; reports the error to torchrun, whose summary shows it."""
    if "halfstep.backends.launch" not in sys.modules:  # no command that runs on ranks
        return ""
    from halfstep.cli.failures import report_to_launcher

    return report_to_launcher(error)
