"""Code that Inductor generates leaves memory alone while a collective uses it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.fx import Graph, GraphModule

from autoparallel.backends import buckets, moving
from autoparallel.backends.generated import misuse_of_memory
from autoparallel.backends.traced import with_one_wait
from autoparallel.errors import LoweringError
from autoparallel.kernels import collectives
from autoparallel.kernels.groups import Axis
from autoparallel.schedule.step_config import BUCKET_BYTES

AXIS = Axis("x", 4, 0, "0")
KERNELS = """
read = async_compile.cpp_pybinding(['const float*', 'float*'], '''void kernel() {}''')
triton_write = async_compile.triton('triton_write', '''
def triton_write(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')
def call(args):
    buf0, = args
    buf1 = empty_strided_cpu((32, ), (1, ), torch.float32)
    with torch.cuda._DeviceGuard(0):
        LINES
    buf3 = buf1; del buf1  # reuse
    read(buf0, buf3)
    return (buf3, )
"""
SEND = "buf2 = torch.ops._c10d_functional.reduce_scatter_tensor.default(buf1, 'sum', 4, '0')"
AWAIT = "torch.ops._c10d_functional.wait_tensor.default(buf2)"
SUM = "torch.ops._c10d_functional.all_reduce_.default(reinterpret_tensor(buf1, (8, ), (1, ), 8), 'sum', '0')"

DRAW = "torch.ops.higher_order.graphsafe_run_with_rng_state(torch.ops.{}, {}, rng_state=state)"


def _code(lines: Sequence[str]) -> str:
    return KERNELS.replace("LINES", "\n        ".join(lines))


@pytest.mark.parametrize("lines", [
    (SEND, "read(buf1, buf0)", AWAIT),  # what is sent may be read
    (SEND, "triton_write.run(buf1, buf0, 32, stream=stream0)", AWAIT),
    (SEND, DRAW.format("aten.bernoulli.default", "buf1"), AWAIT),    # as backward on GPUs draws what forward drew
    (SUM, "read(buf0, reinterpret_tensor(buf1, (8, ), (1, ), 16))",  # another part of an allocation
     "torch.ops._c10d_functional.wait_tensor.default(reinterpret_tensor(buf1, (8, ), (1, ), 8))"),
])
def test_sound_code_is_accepted(lines: tuple[str, ...]) -> None:
    assert misuse_of_memory(_code(lines)) is None


@pytest.mark.parametrize(("lines", "user"), [
    ((SEND,), "read uses buf1"),  # awaited too late: `buf1` is reused
    ((SEND, "read(buf0, buf1)", AWAIT), "read uses buf1"),
    ((SEND, "read(buf2, buf0)", AWAIT), "read uses buf2"),
    ((SEND, "triton_write.run(buf0, buf1, 32, stream=stream0)", AWAIT), "triton_write.run uses buf1"),
    ((SEND, "extern_kernels.mm(buf0, buf0, out=buf1)", AWAIT), "extern_kernels.mm uses buf1"),
    ((SEND, "torch.ops.aten.add_.Tensor(buf1, buf0)", AWAIT), "add_.Tensor uses buf1"),
    ((SEND, SUM, AWAIT), "all_reduce_.default uses buf1"),
    ((SEND, DRAW.format("aten.bernoulli_.float", "buf1"), AWAIT), "graphsafe_run_with_rng_state uses buf1"),
    ((SEND, DRAW.format("aten.bernoulli.default", "buf2"), AWAIT), "graphsafe_run_with_rng_state uses buf2"),
    ((SEND, "torch.ops.higher_order.unknown(buf1)", AWAIT), "unknown uses buf1"),
    ((SUM, "read(reinterpret_tensor(buf1, (2, ), (1, ), 14), buf0)"), "read uses buf1"),
])
def test_code_that_takes_memory_in_use_is_found(lines: tuple[str, ...], user: str) -> None:
    assert user in str(misuse_of_memory(_code(lines)))


def _gathered(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is sent, and what is computed meanwhile, are of one size."""
    finish = collectives.begin_all_gather(x + 1, AXIS, 0, (64,) * 4)
    beside = torch.mm(torch.mm(y, y), y)
    return finish() * 2, beside


def _summed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums of three numbers, a product, one that is a result too, and what is no product."""
    product, other = torch.mm(x, y), torch.mm(y, y)
    parts = x[:, :3].sum(0), product, other, x.sum(0)
    return *(finish() for finish in [collectives.begin_all_reduce(part, AXIS) for part in parts]), other * 2


def _compiled(monkeypatch: pytest.MonkeyPatch, function: Callable[..., tuple[torch.Tensor, ...]] = _gathered
              ) -> GraphModule:
    """The graph that Inductor made code of, without a C++ compiler."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import fresh_cache

    from autoparallel.backends import aot

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: [])
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, *args: None)
    found = list[GraphModule]()

    def alone(module: GraphModule) -> None:
        with_one_wait(module.graph)
        buckets.bucket_reductions(module.graph, buckets.Limits(BUCKET_BYTES))
        moving.move_collectives(module, [])
        moving.name_what_is_sent(module)
        module.recompile()
        found.append(module)

    inputs = [torch.zeros(64, 64), torch.zeros(64, 64)]
    graph = Graph()
    made = graph.call_function(function, (graph.placeholder("x"), graph.placeholder("y")))
    results = 2 if function is _gathered else 5
    graph.output(tuple(graph.call_function(collectives.item, (made, n)) for n in range(results)))
    program = GraphModule({}, graph)
    with torch.no_grad(), fresh_cache():
        aot.compile_graph(program, inputs, aot.Passes(alone, lambda module, _: None, alone), generates=True)
    return found[-1]


@pytest.mark.ranks  # asks for the version of g++
def test_inputs_of_a_gather_stay_unchanged_until_it_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    graph = _compiled(monkeypatch).graph
    (start,) = graph.find_nodes(op="call_function", target=torch.ops.autoparallel.all_gather.default)
    (wait,) = graph.find_nodes(op="call_function", target=torch.ops.autoparallel.awaited.default)
    assert wait.args == (start, start.args[0])
    kept = counters["inductor"]
    assert (kept["fxgraph_cache_miss"], kept["fxgraph_cache_bypass"]) == (1, 0), "the code is kept for the next run"


@pytest.mark.ranks
def test_code_that_would_take_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Inductor did not know what is in flight."""
    from torch._inductor import ir

    monkeypatch.setattr(ir._WaitKernel, "get_volatile_reads", lambda self: [])
    with pytest.raises(LoweringError, match="Inductor's code would compute wrong numbers"):
        _compiled(monkeypatch)


@pytest.mark.ranks
def test_gradients_are_made_and_summed_in_their_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what is read elsewhere too, of which the bucket has a copy. The three numbers come last, so that products
    begin where kernels are fast."""
    from autoparallel.backends import aot

    written = list[str]()
    monkeypatch.setattr(aot, "misuse_of_memory", lambda code: written.append(code) or misuse_of_memory(code))
    _compiled(monkeypatch, _summed)
    (code,) = written
    (bucket,) = re.findall(r"all_reduce_\.default\((buf\d+)", code)
    assert f"{bucket} = empty_strided_cpu(({2 * 64 * 64 + 64 + 3}, )" in code
    places = dict(re.findall(rf"(buf\d+) = reinterpret_tensor\({bucket}, .*, (\d+)\)  # alias", code))
    outs = re.findall(r"extern_kernels\.mm\(.*, out=(?:reinterpret_tensor\()?(buf\d+)", code)
    assert sorted(out in (*places, bucket) for out in outs) == [False, True]
    assert f"{bucket}, (3, ), (1, ), {2 * 64 * 64 + 64})" in code, "the three numbers, also of the result"
    assert code.count("empty_strided_cpu(") == 3, "the bucket, the product that is read twice, and its double"
