"""Ops on one GPU beside the planner's prices: ``python -m benchmarks.device_ops``.

Products, attention, traffic, launches and copies to and from the host, on random data in bfloat16 where nothing else is
said. Seconds are medians over five series of 20 ms and more, between events on the device; series of launches are timed
by the host's clock. The prices are those of the cluster that the device suggests, with its software profile.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import as_json, conditions
from cost_models import Cluster
from cost_models.compute import attention_s, matmul_time_s, traffic_s
from cost_models.devices import Device
from cost_models.profile import Profile

SERIES, SERIES_S = 5, 0.02
#: Products [m, k] x [k, n]: squares; a Llama-3-8B layer on 8,192 tokens; GPT-2 with its vocabulary, plain and padded.
PRODUCTS = (*((n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)),
            (8192, 4096, 4096), (8192, 1024, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 128256, 4096),
            (4096, 128256, 8192), (8192, 2304, 768), (8192, 3072, 768), (8192, 50257, 768), (8192, 50304, 768),
            (128, 4096, 4096), (2048, 4096, 4096))
#: Heads of all sequences, tokens, width.
ATTENTIONS = ((96, 1024, 64), (64, 2048, 128), (64, 4096, 128), (32, 8192, 128), (32, 32768, 128))
TRAFFIC = tuple(2**k for k in range(12, 32, 2))


@dataclass(frozen=True)
class Measured:
    """An op's seconds beside its price (nan: none), and what it does a second: FLOP or bytes."""

    op: str
    seconds: float
    price_s: float = math.nan
    rate_per_s: float = math.nan


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call on the device, in a row of calls."""
    def series(times: int) -> float:
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        for _ in range(times):
            call()
        ended.record()
        torch.cuda.synchronize()
        return float(started.elapsed_time(ended)) / 1e3

    series(2)
    times = max(1, math.ceil(SERIES_S / max(series(3) / 3, 1e-7)))
    return statistics.median(series(times) for _ in range(SERIES)) / times


def host_seconds(call: Callable[[], object], times: int = 2000) -> float:
    """Seconds of one call that the host issues in a row, until the device is done."""
    def series() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    series()
    return statistics.median(series() for _ in range(SERIES)) / times


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, device="cuda").to(dtype).requires_grad_(grad)


def products(device: Device) -> Iterator[Measured]:
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        for m, n, k in PRODUCTS[: None if dtype == torch.bfloat16 else 6]:
            a, b = _random(m, k, dtype=dtype), _random(k, n, dtype=dtype)
            found = seconds(partial(torch.mm, a, b))
            yield Measured(f"{name} {m} x {n} x {k}", found, matmul_time_s(m, n, k, name, device),
                           2 * m * n * k / found)


def attentions(device: Device, profile: Profile) -> Iterator[Measured]:
    for heads, tokens, width in ATTENTIONS:
        q, k, v = (_random(1, heads, tokens, width, grad=True) for _ in range(3))
        forward, backward = _both(partial(functional.scaled_dot_product_attention, is_causal=True), q, k, v)
        flops = 2.0 * heads * tokens**2 * width
        priced = attention_s(heads, tokens, tokens, (width, width), profile, device)
        name = f"causal attention {heads} x {tokens} x {width}"
        yield Measured(f"{name}, forward", forward, float(priced[0]), flops / forward)
        yield Measured(f"{name}, backward", backward, float(priced[1]), 2.5 * flops / backward)


def traffic(device: Device, profile: Profile) -> Iterator[Measured]:
    for nbytes in TRAFFIC:
        x = _random(nbytes // 2)
        out = torch.empty_like(x)
        found = seconds(partial(torch.mul, x, 1.5, out=out))
        yield Measured(f"mul of {nbytes} bytes", found,
                       float(traffic_s(2.0 * nbytes, device, nbytes, profile.cache_bytes)), 2 * nbytes / found)


def _both(call: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
    """Seconds of forward and backward."""
    forward = seconds(lambda: call(*inputs))
    out = call(*inputs)
    gradient, wanted = torch.randn_like(out), [x for x in inputs if x.requires_grad]
    return forward, seconds(lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True))


def layers(device: Device) -> Iterator[Measured]:
    """Norms, activations and losses of Llama-3-8B on 8,192 tokens; the rate is by the least traffic."""
    x, wide = (_random(8192, n, grad=True) for n in (4096, 14336))
    scale = _random(4096, grad=True)
    cases: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "rms_norm 8192 x 4096": (lambda x, w: functional.rms_norm(x, (4096,), w), (x, scale)),
        "layer_norm 8192 x 4096": (lambda x, w: functional.layer_norm(x, (4096,), w, w), (x, scale)),
        "silu 8192 x 14336": (functional.silu, (wide,)), "gelu 8192 x 14336": (functional.gelu, (wide,)),
        "softmax 8192 x 4096": (lambda x: x.softmax(-1), (x,)),
    }
    for name, (call, inputs) in cases.items():
        forward, backward = _both(call, *inputs)
        nbytes = 2.0 * inputs[0].numel()
        yield Measured(f"{name}, forward", forward, float(traffic_s(2 * nbytes, device)), 2 * nbytes / forward)
        yield Measured(f"{name}, backward", backward, float(traffic_s(3 * nbytes, device)), 3 * nbytes / backward)
    logits = _random(8192, 128256, dtype=torch.float32, grad=True)
    targets = torch.randint(128256, (8192,), device="cuda")
    forward, backward = _both(lambda x: functional.cross_entropy(x, targets), logits)
    nbytes = 4.0 * logits.numel()
    yield Measured("float32 cross_entropy 8192 x 128256, forward", forward, math.nan, 2 * nbytes / forward)
    yield Measured("float32 cross_entropy 8192 x 128256, backward", backward, math.nan, 2 * nbytes / backward)


def launches(profile: Profile) -> Iterator[Measured]:
    x, y = _random(64, 64), _random(64, 64)
    yield Measured("launch: add of 64 x 64", host_seconds(lambda: torch.add(x, y)), profile.kernel_s)
    yield Measured("launch: product of 64 x 64", host_seconds(lambda: torch.mm(x, y)), profile.kernel_s)
    with torch.no_grad():
        norm = partial(functional.layer_norm, x, (64,))
        yield Measured("launch: layer_norm of 64 x 64, no gradient", host_seconds(norm), profile.kernel_s)
    parameters = [_random(4096, 4096, dtype=torch.bfloat16, grad=True) for _ in range(32)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    for fused in (False, True):
        optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=None if fused else True)
        nbytes = sum(p.numel() for p in parameters) * 2.0 * 7
        found = seconds(optimizer.step)
        yield Measured(f"AdamW of {len(parameters)} x 4096 x 4096, {'fused' if fused else 'foreach'}", found, math.nan,
                       nbytes / found)


def copies(cluster: Cluster) -> Iterator[Measured]:
    """Pinned host memory of 256 MiB, one way and both at once."""
    nbytes = 2**28
    host, other = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, back = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()
    to_device = seconds(lambda: there.copy_(host, non_blocking=True))
    from_device = seconds(lambda: other.copy_(back, non_blocking=True))

    def both() -> None:
        with torch.cuda.stream(side):
            other.copy_(back, non_blocking=True)
        there.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    together = seconds(both)
    yield Measured("256 MiB to the device", to_device, nbytes / cluster.host.to_device_bytes_per_s, nbytes / to_device)
    yield Measured("256 MiB from the device", from_device, nbytes / cluster.host.from_device_bytes_per_s,
                   nbytes / from_device)
    yield Measured("both at once", together, math.nan, 2 * nbytes / together)


def _all_of(made: Iterator[Measured]) -> Iterator[Measured]:
    """All rows up to the first that fails, and its error: what follows is measured all the same."""
    try:
        yield from made
    except RuntimeError as error:
        yield Measured(f"failed: {error}", math.nan)


def main(cluster: Annotated[str, typer.Option(help="whose prices")] = "h200") -> None:
    """Measure, and print a table and JSON."""
    known = Cluster.load(cluster, 1)
    profile = known.profile
    assert profile is not None
    device = profile.device(known.device)
    print(f"torch keeps the host busy for {profile.kernel_s * 1e6:.1f} us a kernel by {profile.software}")
    rows: list[Measured] = []
    for made in (products(device), attentions(device, profile), traffic(device, profile), layers(device),
                 launches(profile), copies(known)):
        for row in _all_of(made):
            print(f"{row.op:52}{row.seconds * 1e6:12.1f} us, priced {row.price_s * 1e6:12.1f} "
                  f"({row.price_s / row.seconds:5.2f}), {row.rate_per_s / 1e12:9.3f} T/s", flush=True)
            rows.append(row)
        torch.cuda.empty_cache()
    print(json.dumps({"conditions": conditions() | {"device": torch.cuda.get_device_name()}, "rows": as_json(rows)}))


if __name__ == "__main__":
    typer.run(main)
