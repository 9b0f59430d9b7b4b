"""Commands: `python -m torchao_blockwise COMMAND`. Each is a module with HELP, `add_arguments(parser)` and `run(args)`.

`run` returns the exit code: 0, or 1 if it found a problem. Invalid input raises `UsageError`, which prints its message
and exits with code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchao_blockwise.cli import convert, doctor, report, verify
from torchao_blockwise.cli.inputs import UsageError

COMMANDS = {"doctor": doctor, "report": report, "convert": convert, "verify": verify}
PROGRAM = "python -m torchao_blockwise"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default the arguments of the process; return the exit code."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Tools for training in blockwise FP8 and NVFP4.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        as_written = argparse.RawDescriptionHelpFormatter
        options = commands.add_parser(name, help=command.HELP, description=command.__doc__, formatter_class=as_written)
        command.add_arguments(options)
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except UsageError as error:
        print(f"{PROGRAM} {args.command}: {error}", file=sys.stderr)
        return 2
