"""The machine that tests pretend to run on: its GPU, its Triton, its CUDA.

Also the one place that knows how to see launches of kernels, and how warnings that are given once are given again.
Tests ask for the fixture `machine`, and ranks and worker processes for `without_interpreter`.
"""

from typing import Any, NamedTuple

import pytest
import torch

from torchao_blockwise import _compat
from torchao_blockwise._compat import modes
from torchao_blockwise.ops import backend, operands
from torchao_blockwise.ops.groups import ends


def without_interpreter(patch: pytest.MonkeyPatch) -> None:
    """AUTO on a CPU takes the reference, not Triton's interpreter: the same bits, many times faster."""
    patch.setattr(backend, "interpreting", lambda: False)


class Launched(NamedTuple):
    """A launch of a Triton kernel, and its tensors: None where one is left out."""

    kernel: Any
    tensors: list


class Machine:
    def __init__(self, patch: pytest.MonkeyPatch):
        self.patch = patch

    def forget(self) -> None:
        """What the package remembers of the machine, which was another one."""
        backend.compute_capability.cache_clear()

    def has_gpu_of(self, capability: tuple[int, int]) -> None:
        """CUDA devices have this compute capability. No tensor is on one."""
        self.patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        self.forget()

    def has_cuda(self, version: str) -> None:
        self.patch.setattr(torch.version, "cuda", version)

    def has_triton(self, has: bool = True) -> None:
        self.patch.setattr(_compat, "has_triton", lambda: has)

    def without_interpreter(self) -> None:
        without_interpreter(self.patch)

    def runs_gluon(self, capability: tuple[int, int] = (9, 0), interprets: bool = False) -> None:
        """Each device, the CPU too, has this compute capability to Gluon's kernels, which are compiled there.

        Triton's kernels run where they ran before.
        """
        self.patch.setattr(operands, "compute_capability", lambda device: capability)
        self.patch.setattr(operands, "interpreting", lambda: interprets)

    def multiplies_by(self, scaled_mm) -> None:
        """cuBLASLt's product with block scales, which CPUs do not have, is this function."""

        def product(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype):
            how = [[kind.value for kind in kinds] for kinds in (recipe_a, swizzle_a, recipe_b, swizzle_b)]
            return scaled_mm(a, b, scale_a, *how[:2], scale_b, *how[2:], output_dtype)

        self.patch.setattr(torch.nn.functional, "scaled_mm", product)

    def captures_a_graph(self) -> None:
        """All that runs is captured in a CUDA graph."""
        self.patch.setattr(modes, "is_capturing", lambda x: True)

    def reads_no_group_ends(self) -> None:
        """As on a GPU, the host looks at no value of the ends of groups."""
        self.patch.setattr(ends, "_check_values", lambda *args: None)

    def warns_anew(self) -> None:
        """Warnings that are given once are given again, and afterwards as if they never were."""
        self.patch.setattr(backend, "_warned", set())

    def launches_of(self, kernels) -> list[Launched]:
        """The launches of the kernels of a module from now on."""
        seen: list[Launched] = []
        launch = kernels.launch

        def record(kernel, grid, *args, **options):
            # A pointer may be (tensor, dtype to see it as).
            given = [arg[0] if type(arg) is tuple else arg for arg in args]
            seen.append(Launched(kernel, [x for x in given if x is None or isinstance(x, torch.Tensor)]))
            return launch(kernel, grid, *args, **options)

        self.patch.setattr(kernels, "launch", record)
        return seen
