"""`python -m torchao_blockwise`: help, exit codes, wrong input in one sentence, and JSON."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from torchao_blockwise.cli import COMMANDS, doctor, main
from torchao_blockwise.diagnostics import Examination
from torchao_blockwise.diagnostics.environment import PROBLEM, Finding

HEALTHY = Examination("cpu", {"torch": "2.13.0"}, [], [], [], tested=False)


def exit_of(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as left:
        return left.code


def test_help(capsys):
    assert exit_of(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"{name} " in printed and command.HELP in printed
        assert exit_of([name, "--help"]) == 0
        of_command = capsys.readouterr().out
        assert command.__doc__.strip().splitlines()[0] in of_command and "exit code: 0" in of_command


WRONG = {
    "no command": ([], "the following arguments are required: COMMAND"),
    "command": (["docter"], "invalid choice: 'docter'"),
    "option": (["doctor", "--fast"], "unrecognized arguments: --fast"),
    "device": (["doctor", "--device", "tpu"], "doctor: --device must be cpu, cuda or cuda:N, got tpu"),
    "file size": (["convert", "in", "out", "--shard-gb", "nan"], "--shard-gb must be a positive number, got nan"),
    "no file size": (["convert", "in", "out", "--shard-gb", "-1"], "--shard-gb must be a positive number, got -1"),
    "index": (["doctor", "--device", "cuda:99"], "GPUs, got --device cuda:99; use another one or cpu"),
}


@pytest.mark.parametrize(("argv", "said"), WRONG.values(), ids=WRONG)
def test_wrong_input(argv, said, capsys):
    assert exit_of(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("findings", "code"), (([], 0), ([Finding(PROBLEM, "too old")], 1)), ids=("healthy", "problem")
)
def test_the_exit_code_is_the_verdict(findings, code, monkeypatch, capsys):
    seen = []
    examination = replace(HEALTHY, findings=findings)
    monkeypatch.setattr(doctor, "examine", lambda device, run: seen.append((device, run)) or examination)
    assert main(["doctor", "--no-run", "--json"]) == code and seen == [(None, False)]
    assert json.loads(capsys.readouterr().out) == examination.to_dict()


def test_as_a_process():
    """Messages that other packages log on import are not part of the output."""
    command = [sys.executable, "-m", "torchao_blockwise", "doctor", "--no-run", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "healthy: nothing was run, 0 problems"
