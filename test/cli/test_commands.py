"""`python -m torchao_blockwise`: help, exit codes, wrong input in one sentence, color and JSON."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest

from torchao_blockwise._compat import torchao_import
from torchao_blockwise.cli import COMMANDS, doctor, main, terminal
from torchao_blockwise.cli.terminal import colored
from torchao_blockwise.diagnostics import Examination
from torchao_blockwise.diagnostics.environment import PROBLEM, Finding

HEALTHY = Examination("cpu", {"torch": "2.13.0"}, [], [], [], tested=False)


def exit_of(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as left:
        return left.code


def test_help_names_the_commands(capsys):
    assert exit_of(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed and command.HELP in printed for name, command in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name, capsys):
    assert exit_of([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert COMMANDS[name].__doc__.strip().splitlines()[0] in printed and "exit code: 0" in printed


WRONG = {
    "no command": ([], "the following arguments are required: COMMAND; see python -m torchao_blockwise --help"),
    "command": (["docter"], "invalid choice: 'docter'"),
    "device": (["doctor", "--device", "tpu"], "doctor: --device must be cpu, cuda or cuda:N, got tpu"),
    "index": (["doctor", "--device", "cuda:99"], "GPUs, got --device cuda:99; take another one or cpu"),
    "option": (["doctor", "--fast"], "unrecognized arguments: --fast"),
}


@pytest.mark.parametrize(("argv", "said"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_sentence(argv, said, capsys):
    assert exit_of(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and said in printed.err


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
    """What is printed is the report alone: nothing that others log when they are imported."""
    command = [sys.executable, "-m", "torchao_blockwise", "doctor", "--no-run", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[0] == "healthy: nothing was run, 0 problems"


def test_what_python_says_of_the_source_of_torchao_is_not_shown():
    """As it does where it compiles that source, which is once an installation."""

    def said(package: str) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            with torchao_import.without_noise() if package != "torchao, later" else contextlib.nullcontext():
                compile("1 is 1", f"/packages/{package.split(',')[0]}/file.py", "exec")
        return len(caught)

    assert [said(package) for package in ("torchao", "other", "torchao, later")] == [0, 1, 1]


@pytest.mark.parametrize(
    ("is_terminal", "environment", "wanted"),
    ((True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)),
    ids=str,
)
def test_color_is_for_terminals(is_terminal, environment, wanted, monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert terminal.wants_color() is wanted


RED, GREEN, YELLOW, END = "\033[31m", "\033[32m", "\033[33m", "\033[0m"
COLORED = {
    "cell": ("up    converted  fp8", f"up    {GREEN}converted{END}  fp8"),
    "end": ("fp8  5.20%     failed", f"fp8  5.20%     {RED}failed{END}"),
    "backend": ("x  triton ok, gluon failed  y", f"x  triton {GREEN}ok{END}, gluon {RED}failed{END}  y"),
    "line": ("note: problems", f"{YELLOW}note{END}: problems"),
    "last line": ("PASS", f"{GREEN}PASS{END}"),
    "phrase": ("not healthy: 1", f"{RED}not healthy{END}: 1"),
    "name": ("model.skipped.ok  reference", "model.skipped.ok  reference"),
    "sentence": ("[1] what failed is converted later", "[1] what failed is converted later"),
}


@pytest.mark.parametrize(("plain", "shown"), COLORED.values(), ids=COLORED)
def test_words_that_are_colored(plain, shown):
    assert colored(plain) == shown
