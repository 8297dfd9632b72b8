"""Fourier transforms and complex numbers: dims that are transformed stay whole; everything is linear."""

from __future__ import annotations

import torch

from autoparallel.rules.families.views import whole_dims
from autoparallel.rules.registry import OpView, rule_for
from autoparallel.rules.rule import Dims, Rule

aten = torch.ops.aten
SUMMANDS = (frozenset({0}),)


@rule_for(aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default, aten.fft_irfft.default,
          aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_rfft2.default, aten.fft_irfft2.default,
          aten.fft_fftn.default, aten.fft_ifftn.default, aten.fft_rfftn.default, aten.fft_irfftn.default,
          aten.fft_hfft.default, aten.fft_ihfft.default, aten.fft_hfft2.default, aten.fft_ihfft2.default,
          aten.fft_hfftn.default, aten.fft_ihfftn.default, aten.fft_fftshift.default, aten.fft_ifftshift.default)
def transform(op: OpView) -> Rule:
    rank, dim = len(op.out.shape), op.arg("dim")
    sizes = op.arg("s") if any(a.name == "s" for a in op.target._schema.arguments) else None
    dims = [dim] if isinstance(dim, int) else dim or range(rank - len(sizes or range(rank)), rank)
    keeps = not op.inputs[0].dtype.is_complex and "shift" not in op.target._schema.name
    return whole_dims(op, {d % rank for d in dims}, linear=SUMMANDS, flops=25.0 * op.out.num_elements,
                      saves=frozenset({0}) if keeps else frozenset())


@rule_for(aten.stft.default)
def windows(op: OpView) -> Rule:
    """Signals (one, or one for each instance) in windows that overlap: instances may be cut."""
    signal = op.shapes[0]
    batch: Dims = ("b",) if len(signal) == 2 and signal[0] != 1 else (None,) * (len(signal) - 1)
    rest = [(None,) * len(shape) for shape in op.shapes[1:]]
    out = (*batch, *(None,) * (len(op.out.shape) - len(batch)))
    return Rule(((*batch, None), *rest), (out,), {"b": signal[0]} if "b" in batch else {},
                linear=tuple(frozenset({i}) for i in range(len(op.inputs))), flops=25.0 * op.out.num_elements,
                saves=frozenset({0, 1}) & frozenset(range(len(op.inputs))))


@rule_for(aten.view_as_real.default, aten.view_as_complex.default)
def pairs(op: OpView) -> Rule:
    """The last dim of the real tensor has the real and the imaginary part."""
    shape = min(op.shapes[0], op.out.shape, key=len)
    names = tuple(f"d{i}" if n != 1 else None for i, n in enumerate(shape))
    sizes = {f: shape[i] for i, f in enumerate(names) if f}
    dims = [names if len(t) == len(shape) else (*names, None) for t in (op.shapes[0], op.out.shape)]
    return Rule((dims[0],), (dims[1],), sizes, linear=SUMMANDS, alias=True)
