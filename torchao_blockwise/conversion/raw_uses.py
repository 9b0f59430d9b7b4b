"""Weights that a model multiplies by itself, as `hidden @ self.weight`: products that a converted weight would refuse.

They are found in the source of forward passes, so that a conversion can refuse them with a remedy. What is not found
there (a weight behind a local name, code without source) is refused where it runs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchao_blockwise._compat import hugging_face

# Products of weights that are not asked for as a layer's: by operator, or by one of these functions or methods.
_PRODUCTS = {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "einsum", "inner", "matmul", "mm", "mv", "tensordot"}
# What gives the same weight in another form.
_FORMS = {
    "bfloat16", "contiguous", "float", "half", "permute", "reshape", "squeeze", "t", "to", "transpose", "type",
    "type_as", "unsqueeze", "view",
}  # fmt: skip


def raw_uses(model: nn.Module) -> dict[int, str]:
    """{id of a Parameter: why it cannot be converted, with the remedy} of all that modules of `model` multiply by."""
    reasons: dict[int, str] = {}
    for module in model.modules():
        cls: Any = type(module)
        for path, method in _multiplied(cls).items():
            weight: Any = module
            for name in path:
                weight = getattr(weight, name, None)
            chosen = hugging_face.experts_implementation(module) if len(path) == 1 else None
            if not isinstance(weight, torch.Tensor) or chosen not in (None, "eager"):
                continue
            what = f"{type(module).__name__}.{method} multiplies by self.{'.'.join(path)} itself, in high precision"
            if chosen == "eager":
                remedy = 'call model.set_experts_implementation("grouped_mm") before'
            elif len(path) > 1:
                remedy = f'leave it out, filter_fn=skip_fqns("*.{path[-2]}")'
            else:
                remedy = "leave the module out, filter_fn=skip_fqns(its name)"
            reasons[id(weight)] = f"{what}; {remedy}"
    return reasons


@functools.cache
def _multiplied(cls: type) -> dict[tuple[str, ...], str]:
    """{path of an attribute: method} of what the forward pass of `cls`, and methods that it calls, multiply by."""
    found: dict[tuple[str, ...], str] = {}
    if cls.__module__.startswith("torch."):
        return found
    waiting, seen = ["forward"], set()
    while waiting:
        method = waiting.pop()
        seen.add(method)
        function = _source(getattr(cls, method, None))
        if function is None or not function.args.args:
            continue
        itself = function.args.args[0].arg
        for node in ast.walk(function):
            for operand in _operands(node):
                path = _path(operand, itself)
                if path:
                    found.setdefault(path, method)
            if isinstance(node, ast.Call) and (called := _path(node.func, itself)) and called[0] not in seen:
                waiting += called if len(called) == 1 else ()
    return found


def _source(method: Any) -> ast.FunctionDef | None:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method)))).body
    except (OSError, TypeError, ValueError, SyntaxError, tokenize.TokenError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _operands(node: ast.AST) -> Iterator[ast.expr]:
    """What an expression multiplies, if it is a product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield from (node.left, node.right)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PRODUCTS:
        yield from (node.func.value, *node.args, *(keyword.value for keyword in node.keywords))


def _path(node: ast.AST, itself: str) -> tuple[str, ...]:
    """("a", "weight") of `self.a.weight`, also of a part or another form of it; () of all else."""
    names: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FORMS:
            node = node.func.value
        elif isinstance(node, ast.Attribute):
            if names or node.attr not in ("T", "mT", "data"):
                names.insert(0, node.attr)
            node = node.value
        else:
            return ()
    return tuple(names) if node.id == itself else ()
