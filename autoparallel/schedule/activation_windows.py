"""Async windows of activations: where a redistribution of an activation is launched and awaited, so that compute which
does not need it runs beside it.

    forward     launched where the value is made        awaited where it is first read
    backward    launched where its gradient is made     awaited where the value was made

Backward runs in reverse order of forward. Two kinds of work run beside a step: products between the value and its first
reader, such as other branches; and, in backward, the gradients of the weights of products that read the redistributed
value: their inputs' gradients are made first, and travel while the weights' are computed (Megatron's column-parallel
linear layer does the same). A step beside which nothing would run stays as it is: launched and awaited at once.

`lower.activation_pass` applies the windows to a program and `pricing.activation_steps` to a plan, so that what is
priced is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autoparallel.schedule.step_config import Hybrid

#: The source of a value that no op of a program makes.
NOWHERE = -1
#: Classes of ops that take time enough for something to travel beside them.
PRODUCTS = frozenset({"matmul", "attention", "conv"})


class Travel(NamedTuple):
    """A redistribution of an activation that communicates. ``source``: the decision that makes the value (`NOWHERE`: no
    op of this program); ``target``: the decision before which the steps are; ``reader``: the first decision that reads
    the result: the target, or the first reader of a shared read. ``products``: the linear layers that read the result,
    in order, whose weights' gradients can be put off until the result's gradient is on its way."""

    source: int
    target: int
    reader: int
    products: tuple[int, ...] = ()


class Window(NamedTuple):
    """``number``: of its `Travel`. ``ahead``: launched right behind its source, not at its target. ``put_off``: the
    layers whose weights' gradients are computed after the launch of the result's gradient, the last one first."""

    number: int
    ahead: bool
    put_off: tuple[int, ...]


def overlaps_activations(hybrid: Hybrid) -> bool:
    """Whether redistributions of activations overlap with compute of the same micro-batch. Multi-copy runs another
    one's beside them; zero bubble computes all gradients of weights later."""
    return hybrid.copies == 1 and not hybrid.puts_off_weights


def activation_windows(travels: Iterable[Travel], products: Sequence[int], block_of: Callable[[int], str | None],
                       hybrid: Hybrid) -> list[Window]:
    """The windows of a program. ``products``: the decisions that are products (attention and convolutions too), which
    take time enough to run beside communication; ``block_of``: the block of a decision, in which a window lies.

        >>> travels = [Travel(3, 9, 9), Travel(5, 9, 9), Travel(1, 2, 3, (3, 4))]
        >>> for window in activation_windows(travels, [3, 4, 5], lambda index: None, Hybrid()):
        ...     print(window)
        Window(number=0, ahead=True, put_off=())
        Window(number=2, ahead=False, put_off=(3, 4))
    """
    found = list[Window]()
    for number, travel in enumerate(travels if overlaps_activations(hybrid) else ()):
        block = block_of(travel.reader)
        inside = travel.source != NOWHERE and block == block_of(travel.source) and not hybrid.recomputed(block)
        ahead = inside and any(travel.source < product < travel.reader and block_of(product) == block
                               for product in products)
        put_off = tuple(product for product in travel.products if block_of(product) == block == block_of(travel.target))
        if ahead or put_off:
            found.append(Window(number, ahead, put_off))
    return found


__all__ = ["NOWHERE", "PRODUCTS", "Travel", "Window", "activation_windows", "overlaps_activations"]
