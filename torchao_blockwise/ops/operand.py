"""Quantised operands: (qdata, scale, global_scale) tuples whose type says the format."""

from __future__ import annotations

from collections import namedtuple

from torchao_blockwise.formats import FORMATS, BlockFormat, get_format

_types: dict[str, type] = {}


def operand_type(fmt: BlockFormat | str) -> type:
    """The NamedTuple type `(qdata, scale, global_scale)` of quantised tensors in `fmt`; `.fmt` is the format.

    A type a format, so that a product never guesses formats from dtypes and a plain 3-tuple unpacking stays possible.
    Raises ValueError for a format that is not registered.
    """
    name = fmt if isinstance(fmt, str) else fmt.name
    return _types.get(name) or _make_type(get_format(fmt))


def _make_type(fmt: BlockFormat) -> type:
    cls = namedtuple(f"Quantized_{fmt.name}", ("qdata", "scale", "global_scale"), defaults=(None,))  # type: ignore[misc]
    cls.__doc__ = f"A tensor quantised in {fmt.name}: x ≈ qdata · scale [· global_scale]."
    cls.fmt = fmt  # type: ignore[attr-defined]
    # What traced code reads: torch.compile knows strings on a type, and no other objects.
    cls.format_name = fmt.name  # type: ignore[attr-defined]
    # Pickle finds a class as an attribute of its module.
    cls.__module__ = __name__
    globals()[cls.__name__] = cls
    _types[fmt.name] = cls
    return cls


for _fmt in FORMATS.values():
    _make_type(_fmt)


def operand(fmt: BlockFormat | str, qdata, scale, global_scale=None):
    """The quantised operand (qdata, scale, global_scale) in `fmt`."""
    return operand_type(fmt)(qdata, scale, global_scale)


def is_operand(x) -> bool:
    """Whether `x` is a quantised operand, a result of `quantize`."""
    return hasattr(x, "format_name") and type(x) is operand_type(x.format_name)


def format_of(x) -> BlockFormat:
    """The format of a quantised operand."""
    return FORMATS[x.format_name]
