"""Drawings of the pages, as SVG files: `python docs/extensions/pictures.py` writes docs/_static/<name>.svg."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

STATIC = Path(__file__).resolve().parents[1] / "_static"
LINE = 18
# A white ground, so that they can be read on dark pages.
STYLE = """<style>
svg { background: white; }
text { font: 14px sans-serif; text-anchor: middle; fill: #222832; }
.word { font-size: 12px; fill: #48566b; }
.down { text-anchor: start; }
rect { fill: #f3f4f5; stroke: #d1d5da; }
rect.answer { stroke: #0e7c86; stroke-width: 2; }
.arrow { fill: none; stroke: #48566b; }
.tick { stroke: #0e7c86; }
.tip { fill: #48566b; }
</style>"""


class Box(NamedTuple):
    """A question or an answer at column x and row y of a grid."""

    x: float
    y: float
    lines: tuple[str, ...]
    is_answer: bool = False


class Arrow(NamedTuple):
    """From one box to another, with a word next to it."""

    start: str
    end: str
    word: str


RECIPE = (
    {
        "kind": Box(0, 0, ("Do the weights train,", "or only adapters (LoRA)?")),
        "base": Box(1, 0, ("master_weights=False:", "a frozen base in FP8 or NVFP4"), True),
        "gpu": Box(0, 1, ("Which GPU?",)),
        "bytes": Box(1, 1, ("FP8 is emulated:", "it saves memory but no time"), True),
        "try": Box(0, 2, ("Is it enough to halve saved", "activations and FSDP2 traffic?")),
        "fp8": Box(1, 2, ("BlockwiseFP8TrainingConfig()", "the safe first choice"), True),
        "nvfp4": Box(0, 3, ("NVFP4TrainingConfig()", "and recommended_layers(...)"), True),
        "watch": Box(1, 3, ("NumericsMonitor: which layers", "stay in bf16?"), True),
    },
    (
        Arrow("kind", "base", "adapters"),
        Arrow("kind", "gpu", "weights"),
        Arrow("gpu", "bytes", "before Ada, or none"),
        Arrow("gpu", "try", "Ada, Hopper, Blackwell"),
        Arrow("try", "fp8", "yes"),
        Arrow("try", "nvfp4", "no: a quarter of bf16's bytes"),
        Arrow("nvfp4", "watch", "then"),
    ),
)
GEMMS = (
    {
        "x": Box(0, 0, ("x rowwise", "1×128, quantized from bf16")),
        "w": Box(1, 0, ("w rowwise", "128×128, from the master weight")),
        "output": Box(2, 0, ("output", "forward"), True),
        "dy": Box(0, 1, ("dy rowwise", "1×128, quantized from bf16")),
        "wt": Box(1, 1, ("w transposed", "128×128, quantized again")),
        "grad_input": Box(2, 1, ("grad_input", "backward"), True),
        "dyt": Box(0, 2, ("dy columnwise", "from the same read of dy")),
        "xt": Box(1, 2, ("x columnwise", "saved in forward, 1 byte an element")),
        "grad_weight": Box(2, 2, ("grad_weight", "backward"), True),
    },
    (
        Arrow("x", "w", "times"),
        Arrow("w", "output", "gives"),
        Arrow("dy", "wt", "times"),
        Arrow("wt", "grad_input", "gives"),
        Arrow("dyt", "xt", "times"),
        Arrow("xt", "grad_weight", "gives"),
    ),
)
DRAWINGS = {"choose_recipe": RECIPE, "gemms": GEMMS}
WIDTH, HEIGHT, GAP_X, GAP_Y = 280, 56, 130, 36


def draw(name: str) -> str:
    """The drawing as SVG."""
    if name == "number_lines":
        return draw_number_lines()
    boxes, arrows = DRAWINGS[name]
    width = max(box.x for box in boxes.values()) * (WIDTH + GAP_X) + WIDTH + 8
    height = max(box.y for box in boxes.values()) * (HEIGHT + GAP_Y) + HEIGHT + 8
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    drawn = [_arrow(boxes[arrow.start], boxes[arrow.end], arrow.word) for arrow in arrows]
    return _svg(width, height, [marker, *drawn, *(_box(box) for box in boxes.values())])


def draw_number_lines() -> str:
    """Every value of both elements from 0 to 6, as ticks."""
    import torch

    from torchao_blockwise.formats import E2M1_VALUES

    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    largest, left, scale = max(E2M1_VALUES), 70, 110
    parts = []
    for y, name, values in ((22, "e2m1", E2M1_VALUES), (72, "e4m3", [v for v in every if v <= largest])):
        parts.append(f'<text x="30" y="{y + 14}">{name}</text>')
        parts.append(f'<path class="arrow" d="M{left} {y + 10}H{left + largest * scale:g}"/>')
        parts += [f'<path class="tick" d="M{left + v * scale:.1f} {y}V{y + 20}"/>' for v in values]
    parts += [f'<text class="word" x="{left + v * scale:g}" y="112">{v:g}</text>' for v in E2M1_VALUES]
    return _svg(left + largest * scale + 20, 118, parts)


def _svg(width: float, height: float, parts: list[str]) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, *parts, "</svg>\n"])


def _corner(box: Box) -> tuple[float, float]:
    return 4 + box.x * (WIDTH + GAP_X), 4 + box.y * (HEIGHT + GAP_Y)


def _box(box: Box) -> str:
    x, y = _corner(box)
    kind = "answer" if box.is_answer else "question"
    top = y + HEIGHT / 2 - (len(box.lines) - 1) * LINE / 2 + 5
    lines = (
        f'<text x="{x + WIDTH / 2:g}" y="{top + i * LINE:g}">{escape(text)}</text>' for i, text in enumerate(box.lines)
    )
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>' + "".join(lines)


def _arrow(start: Box, end: Box, word: str) -> str:
    """To the right, or down where the columns are the same."""
    (x, y), (to_x, to_y) = _corner(start), _corner(end)
    if start.x == end.x:
        middle = x + WIDTH / 2
        line = f"M{middle:g} {y + HEIGHT:g}V{to_y:g}"
        where = f'x="{middle + 8:g}" y="{(y + HEIGHT + to_y) / 2 + 5:g}" class="word down"'
    else:
        line = f"M{x + WIDTH:g} {y + HEIGHT / 2:g}L{to_x:g} {to_y + HEIGHT / 2:g}"
        where = f'x="{(x + WIDTH + to_x) / 2:g}" y="{(y + to_y + HEIGHT) / 2 - 7:g}" class="word"'
    return f'<path class="arrow" d="{line}" marker-end="url(#tip)"/><text {where}>{escape(word)}</text>'


if __name__ == "__main__":
    for name in (*DRAWINGS, "number_lines"):
        (STATIC / f"{name}.svg").write_text(draw(name), encoding="utf-8")
