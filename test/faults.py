"""Put faults into the package, one at a time, and list those that the default tier does not see.

    python test/faults.py                                     # five in each area, of a seed that is printed
    python test/faults.py --areas tensors layers --count 2 --seed 7

A fault: a comparison or an operator becomes its neighbor, two arguments change places, a number is one off, a condition
is turned around, or a call is left out. It is put into a copy of the repository, whose tests of the area run up to the
first one that fails, which is printed. A fault that survives needs a test, or changes nothing: look at it.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Area → (files of the package, tests of the default tier).
AREAS = {
    "kernels": (("ops/**/kernels_*.py", "ops/device/*.py", "ops/gemm/*_*.py"), ("test/ops",)),
    "layers": (("nn/**/*.py",), ("test/nn",)),
    "tensors": (("tensors/**/*.py",), ("test/tensors",)),
    "sharding": (("distributed/**/*.py", "ops/shards/**/*.py"), ("test/distributed", "test/ops/test_shards.py")),
    "conversion": (("conversion/**/*.py",), ("test/conversion",)),
    "checkpoint": (("checkpoint/**/*.py",), ("test/checkpoint",)),
}
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip


def faulty(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of `node`."""
    copied = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        copied.ops[0] = SWAPPED[type(node.ops[0])]()
        yield copied
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        copied.op = SWAPPED[type(node.op)]()
        yield copied
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and len(node.args) > 1 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
        copied.args[:2] = copied.args[1::-1]
        yield copied
    elif isinstance(node, ast.IfExp):
        copied.test = ast.UnaryOp(ast.Not(), copied.test)
        yield copied
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def places(node: ast.AST) -> Iterator[ast.AST]:
    """Expressions and statements that compute: no docstrings, annotations, messages of errors or imports."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            if isinstance(child, ast.AST):
                yield from places(child)


def with_fault(source: str, node: ast.AST, instead: ast.AST) -> str:
    lines = source.encode().splitlines(keepends=True)
    before, after = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1][node.end_col_offset :]
    text = ast.unparse(ast.fix_missing_locations(instead))
    text = f"({text})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else text
    lines[node.lineno - 1 : node.end_lineno] = [before + text.encode() + after]
    return b"".join(lines).decode()


def draw(rng: random.Random, area: str) -> tuple[Path, str, str]:
    """(file, its source with a fault, what was done): first a file, as often as it has lines, then a place in it."""
    files = sorted({path for pattern in AREAS[area][0] for path in (ROOT / "torchao_blockwise").glob(pattern)})
    while True:
        (path,) = rng.choices(files, weights=[path.stat().st_size for path in files])
        source = path.read_text()
        found = [(node, fault) for node in places(ast.parse(source)) for fault in faulty(node)]
        if found:
            node, fault = rng.choice(found)
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            return path, with_fault(source, node, fault), f"{where}: {ast.unparse(node)} → {ast.unparse(fault)}"


def seen_by(path: Path, source: str, area: str, seconds: float) -> str:
    """The test of the area that fails, or "" where all pass, with `source` in the place of the file."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "repository")
        shutil.copytree(ROOT, whole, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        (whole / path.relative_to(ROOT)).write_text(source)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *AREAS[area][1]]
        environment = os.environ | {"PYTHONPATH": str(whole)}
        try:
            done = subprocess.run(command, cwd=whole, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return "they do not end"
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, re.M)
    return "" if done.returncode == 0 else failed.group(1) if failed else f"pytest ends with {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--count", type=int, default=5, help="faults in each area")
    parser.add_argument("--seed", type=int, default=random.randrange(2**16))
    parser.add_argument("--seconds", type=float, default=1800, help="for the tests of one fault")
    parser.add_argument("--list", action="store_true", help="draw the faults and run nothing")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    survived = 0
    for area in arguments.areas:
        rng = random.Random(f"{arguments.seed} {area}")
        for _ in range(arguments.count):
            path, source, what = draw(rng, area)
            if arguments.list:
                print(f"{area}: {what}")
                continue
            seen = seen_by(path, source, area, arguments.seconds)
            survived += not seen
            print(f"{area}: {what}\n    {'seen by ' + seen if seen else 'SURVIVED'}", flush=True)
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
