"""The activations that layers multiply by a weight. Each kind is quantized in the kernel that computes it.

Input          x itself
NormInput      norm(x), of RMSNorm or LayerNorm
SwiGLUInput    silu(gate) · up

An observer, such as the numerics monitor, receives each activation in high precision and the gradient of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from torchao_blockwise import ops
from torchao_blockwise._compat import modes
from torchao_blockwise.formats import CastOptions, Copies, RoundingBits
from torchao_blockwise.nn.gemms import GemmSpec, quantize
from torchao_blockwise.tensors.weight_uses import note_gemm, note_traced_gemm

aten = torch.ops.aten
# The matrices that forward and backward read; None for those that a layer does not have.
Prepared: TypeAlias = Sequence[Any]
Gradients: TypeAlias = Sequence[torch.Tensor | None]
# Called with the gradient of a GEMM's output [T, N], once in the backward of the forward pass that returned it.
GradientObserver: TypeAlias = Callable[[torch.Tensor], None]
# Called with the weight, its activation [T, K], the spec of their GEMM, and whether gradients are enabled.
Observer: TypeAlias = Callable[[Any, torch.Tensor, GemmSpec, bool], GradientObserver | None]


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [.., K] as [T, K]; K may be 0."""
    # Do not alias a matrix: graphs of DDP's optimizer cannot take the same tensor twice.
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


class Input:
    """x [.., K] itself.

    leading: the number of inputs with the leading dims of the output.
    is_computed: whether the activation is computed from the inputs, so that backward reads the prepared matrices.
    """

    leading = 1
    is_computed = False

    @staticmethod
    def prepare(inputs: Sequence[Any], spec: GemmSpec) -> Prepared:
        x = as_rows(inputs[0])
        return (x if x.dtype == spec.dtype else x.to(spec.dtype),)

    @staticmethod
    def quantize(prepared: Prepared, spec: GemmSpec, options: CastOptions) -> Copies:
        return quantize(prepared[0], spec, options, spec.amax_groups.x)

    @staticmethod
    def values(prepared: Prepared, spec: GemmSpec) -> torch.Tensor:
        """The activation in high precision, for observers."""
        return prepared[0]

    @staticmethod
    def backward(grad: torch.Tensor, prepared: Prepared, spec: GemmSpec, needs: Sequence[bool]) -> Gradients:
        """Gradients of the inputs, computed from the gradient of the activation."""
        return (grad,)

    @staticmethod
    def backward_quantize(
        grad: torch.Tensor, prepared: Prepared, spec: GemmSpec, options: CastOptions, bits: RoundingBits | None
    ) -> Copies:
        """Copies of the gradient of the inputs, for the GEMMs of this spec, which computed the inputs."""
        return quantize(grad, spec, options, spec.amax_groups.grad_output, bits)


class NormInput(Input):
    """norm(x) of inputs x, weight, bias, kind ("rms" or "layer") and eps."""

    is_computed = True

    @staticmethod
    def prepare(inputs: Sequence[Any], spec: GemmSpec) -> Prepared:
        x, weight, bias, kind, eps = inputs
        x = as_rows(x)
        statistics = ops.norm_statistics(x, kind, eps, backend=ops.casting_backend(spec.config.backend))
        return x, *statistics, weight, bias

    @staticmethod
    def quantize(prepared: Prepared, spec: GemmSpec, options: CastOptions) -> Copies:
        x, mean, rstd, weight, bias = prepared
        backend = ops.casting_backend(spec.config.backend)
        return ops.norm_quantize(ops.Norm(x, weight, bias, mean, rstd, spec.dtype), options, backend=backend)

    @staticmethod
    def values(prepared: Prepared, spec: GemmSpec) -> torch.Tensor:
        x, mean, rstd, weight, bias = prepared
        return ops.normalize(ops.Norm(x, weight, bias, mean, rstd, spec.dtype))

    @staticmethod
    def backward(grad: torch.Tensor, prepared: Prepared, spec: GemmSpec, needs: Sequence[bool]) -> Gradients:
        """Call PyTorch's own kernels.

        They need tensors of one dtype (on a CPU fp32, because statistics are fp32), so different dtypes are cast to
        fp32. RMSNorm has a backward kernel only on GPUs.
        """
        x, mean, rstd, weight, bias = prepared
        tensors: list[Any] = [grad, x, weight, bias]
        if not (x.is_cuda and all(t is None or t.dtype == x.dtype for t in tensors)):
            tensors = [None if t is None else t.float() for t in tensors]
        dy, x32, weight32, bias32 = tensors
        shape, needs = [x.shape[-1]], list(needs[:3])
        if mean is not None:
            grads = aten.native_layer_norm_backward(
                dy, x32, shape, mean[:, None], rstd[:, None], weight32, bias32, needs
            )
        elif x.is_cuda:
            grads = *aten._fused_rms_norm_backward(dy, x32, shape, rstd[:, None], weight32, needs[:2]), None
        else:
            grads = *_rms_norm_backward(dy, x32, rstd[:, None], weight32), None
        return [g.to(t.dtype) if need else None for g, t, need in zip(grads, (x, weight, bias), needs)]


def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    normalized = x * rstd
    grad = dy if weight is None else dy * weight
    grad_x = rstd * (grad - normalized * (grad * normalized).mean(-1, keepdim=True))
    return grad_x, (dy * normalized).sum(0)


class SwiGLUInput(Input):
    """h = silu(gate) · up of inputs gate and up."""

    leading = 2
    is_computed = True

    @staticmethod
    def prepare(inputs: Sequence[Any], spec: GemmSpec) -> Prepared:
        return as_rows(inputs[0]), as_rows(inputs[1])

    @staticmethod
    def quantize(prepared: Prepared, spec: GemmSpec, options: CastOptions) -> Copies:
        (gate, up), backend = prepared, ops.casting_backend(spec.config.backend)
        return ops.swiglu_quantize(gate, up, options, groups=spec.groups, backend=backend)

    @staticmethod
    def values(prepared: Prepared, spec: GemmSpec) -> torch.Tensor:
        return ops.swiglu(*prepared)

    @staticmethod
    def backward(grad: torch.Tensor, prepared: Prepared, spec: GemmSpec, needs: Sequence[bool]) -> Gradients:
        grads = ops.swiglu_backward(grad, *prepared, backend=ops.casting_backend(spec.config.backend))
        return [g if need else None for g, need in zip(grads, needs)]

    @staticmethod
    def backward_quantize(
        grad: torch.Tensor, prepared: Prepared, spec: GemmSpec, options: CastOptions, bits: RoundingBits | None
    ) -> Copies:
        """Copies of the gradient of (gate | up), computed and quantized in one pass."""
        (gate, up), backend = prepared, ops.casting_backend(spec.config.backend)
        return ops.swiglu_backward_quantize(
            grad, gate, up, options, groups=spec.groups, rounding_bits=bits, backend=backend
        )


_observer: Observer | None = None


def observe(observer: Observer | None) -> Observer | None:
    """Set or remove the observer of the activations of layers, in eager mode; return the previous one."""
    global _observer
    before, _observer = _observer, observer
    return before


def observe_gemm(
    weight: Any, kind: type[Input], prepared: Prepared, spec: GemmSpec, grad_enabled: bool
) -> GradientObserver | None:
    """Report a GEMM with `weight` to the observer, if there is one; return what observes the gradient of the output."""
    if modes.is_traced():
        note_traced_gemm()
        return None
    note_gemm(weight)
    if _observer is None:
        return None
    with torch.no_grad():
        return _observer(weight, kind.values(prepared, spec).detach(), spec, grad_enabled)
