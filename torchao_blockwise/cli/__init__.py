"""Commands: `python -m torchao_blockwise COMMAND`. Each is a module with HELP, `add_arguments(parser)` and `run(args)`.

`run` returns the exit code: 0, or 1 for what it found to be wrong. Input that cannot work raises `UsageError`, which is
said in one sentence, with exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from torchao_blockwise._compat import torchao_import
from torchao_blockwise.cli import convert, doctor, report, verify
from torchao_blockwise.cli.inputs import UsageError

COMMANDS = {"doctor": doctor, "report": report, "convert": convert, "verify": verify}
PROGRAM = "python -m torchao_blockwise"


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    whole = argparse.ArgumentParser(
        prog=PROGRAM, description="Train in blockwise FP8 and in NVFP4: what helps around it."
    )
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        options: dict[str, Any] = {
            "description": command.__doc__,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        }
        command.add_arguments(commands.add_parser(name, help=command.HELP, **options))
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv`, by default the process's arguments, names; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        with torchao_import.without_noise():
            return COMMANDS[args.command].run(args)
    except UsageError as error:
        print(f"{PROGRAM} {args.command}: {error}", file=sys.stderr)
        return 2
