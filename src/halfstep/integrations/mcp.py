"""A server of the Model Context Protocol over standard input and output, with the official SDK.

Each tool runs a command of Halfstep in a process of its own and returns what its `--json` prints. So a tool gives what a
person would get, code of a job cannot write into the protocol or outlive a cancelled call, and files that were edited
since the last call are read again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.hardware.torch_build import require

__all__ = ["Tool", "run_command", "serve"]

_HAS_RESULT = {0, 3}  # 3: findings, which are the result
_MAX_CHARS = 4000  # of an error


@dataclass(frozen=True)
class Tool:
    """A tool: an async function whose docstring is its description; `reads_only` is what clients may ask a person less about."""

    function: Callable[..., Any]
    reads_only: bool = True


def serve(tools: Sequence[Tool], *, name: str, version: str, instructions: str) -> None:
    """Answer requests until standard input ends."""
    for module in ("mcp", "mcp.server.mcpserver"):  # the latter: since version 2
        require(module, "halfstep mcp", "mcp")
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    server = MCPServer(name, version=version, instructions=instructions, log_level="ERROR")
    for tool in tools:
        hints = ToolAnnotations(read_only_hint=tool.reads_only, destructive_hint=False, open_world_hint=False)
        # Unstructured: the text is the JSON of the command, as it is documented there.
        server.add_tool(tool.function, annotations=hints, structured_output=False)
    server.run("stdio")


async def run_command(arguments: Sequence[str], stdin: str = "") -> str:
    """What `halfstep ARGUMENTS` prints; its error message as the error of the tool."""
    import anyio
    from mcp.server.mcpserver.exceptions import ToolError

    # -P: a file of the current directory must not shadow a module that Halfstep imports.
    command = [sys.executable, "-P", "-m", "halfstep", *arguments]
    result = await anyio.run_process(command, input=stdin.encode(), stderr=subprocess.PIPE, check=False)
    if result.returncode not in _HAS_RESULT:
        raise ToolError(_message(result.stderr.decode(errors="replace"), result.returncode))
    return result.stdout.decode(errors="replace")


def _message(stderr: str, code: int) -> str:
    """The message of a command that failed, without the frames of a traceback."""
    before, traceback, after = stderr.partition("Traceback (most recent call last):\n")
    lines = before.strip().splitlines()
    if traceback:
        lines.append(next((line for line in reversed(after.splitlines()) if re.match(r"\w", line)), ""))
    text = "\n".join(line for line in lines if line.strip()).removeprefix("halfstep: ")
    return (text or f"The command ended with exit code {code} and no message.")[-_MAX_CHARS:]
