"""Rules are true: every axis strategy run on shards in one process.

`test_axis_strategies_on_shards_give_the_whole` takes an op and, for each axis strategy of its rule, does what the
ranks of one axis would do: shards (S), copies (R, I) or splits into summands (P) the inputs, runs the op on each
rank's, joins the outputs and compares them with the op on the whole. Gradients likewise, by the duals S-S, R-P, I-I,
P-I.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import transformers.integrations.moe  # noqa: F401, its op of experts' products
from torch import Tensor

from autoparallel.kernels import variants
from autoparallel.layout import INVARIANT, PARTIAL, Placement, layout_fits, local_shape, shards
from autoparallel.rules import AxisStrategy
from tests.support.op_calls import OpCall, aten, call, f, ids, mask
from tests.support.tiers import slow

SAMPLES: dict[str, Callable[[], list[OpCall]]] = {
    "matmul": lambda: [
        call(aten.linear.default, f(4, 6, 8), f(10, 8), f(10)),
        call(aten.linear.default, f(7, 5), f(9, 5)),
        call(aten.linear.default, f(6), f(4, 6), f(4)),
        call(aten.linear.default, f(4, 1, 8), f(1, 8), f(1)),
        call(aten.mm.default, f(4, 6), f(6, 5)),
        call(aten.matmul.default, f(2, 4, 6), f(6, 5)),
        call(aten.matmul.default, f(2, 3, 4, 6), f(2, 3, 6, 5)),
        call(aten.bmm.default, f(4, 3, 6), f(4, 6, 5)),
        call(aten.baddbmm.default, f(4, 3, 5), f(4, 3, 6), f(4, 6, 5)),
        call(aten.baddbmm.default, f(5), f(4, 3, 6), f(4, 6, 5)),
        call(aten.addmm.default, f(4, 1), f(4, 6), f(6, 5), beta=0.5),
        call(aten.addmv.default, f(4), f(4, 6), f(6)),
        call(aten.addbmm.default, f(3, 5), f(4, 3, 6), f(4, 6, 5)),
        call(aten.addr.default, f(4, 5), f(4), f(5)),
        call(aten.baddbmm.default, f(1, 3, 5), f(4, 3, 6), f(4, 6, 5), beta=0.5, alpha=2.0),
        call(aten.matmul.default, f(2, 1, 4, 6), f(3, 6, 5)),
        call(aten.matmul.default, f(6), f(6)),
        call(aten.matmul.default, f(4, 6), f(6)),
        call(aten.matmul.default, f(6), f(3, 6, 5)),
        call(aten.outer.default, f(4), f(6)),
        call(aten.linalg_multi_dot.default, [f(4, 6), f(6, 5), f(5, 8)]),
        call(aten.linalg_multi_dot.default, [f(4), f(4, 6), f(6, 5), f(5)]),
        call(aten.bilinear.default, f(4, 6), f(4, 5), f(8, 6, 5), f(8)),
    ],
    "linalg": lambda: [
        call(aten.linalg_inv.default, f(4, 6, 3, 3)),
        call(aten.linalg_svdvals.default, f(6, 3, 2)),
        call(aten.linalg_solve.default, f(4, 3, 3), f(4, 3, 6)),
        call(aten.linalg_solve.default, f(4, 3, 3), f(4, 3)),
        call(aten.linalg_cross.default, f(4, 3, 6), f(1, 3, 6), dim=1),
        call(aten.linalg_vecdot.default, f(4, 6), f(4, 6)),
        call(aten.cdist.default, f(2, 4, 3), f(2, 6, 3)),
        call(aten.cdist.default, f(4, 6), f(5, 6)),
        call(aten.linalg_vander.default, f(4, 6)),
        call(aten.linalg_vander.default, f(4, 6), N=3),
        call(aten.linalg_tensorsolve.default, f(2, 3, 6), f(2, 3)),
        call(aten.pairwise_distance.default, f(4, 6), f(4, 6) + 1, keepdim=True),
        call(aten.cosine_similarity.default, f(4, 6, 5), f(6, 5), 1),
    ],
    "einsum": lambda: [
        call(aten.einsum.default, "...k,kn->...n", [f(2, 4, 6), f(6, 3)]),
        call(aten.einsum.default, "ij,kj", [f(4, 6), f(3, 6)]),
        call(aten.einsum.default, "bqd,hd->bhq", [f(2, 4, 6), f(3, 6)]),
        call(aten.einsum.default, "bij,bjk,k->ik", [f(2, 4, 6), f(2, 6, 5), f(5)]),
        call(aten.einsum.default, "ab,ab->b", [f(1, 6), f(4, 6)]),
        call(aten.einsum.default, "iij->j", [f(4, 4, 6)]),
        call(aten.einsum.default, "ij->ji", [f(4, 6)]),
    ],
    "experts": lambda: [
        call(torch.ops.transformers.grouped_mm_fallback.default, f(8, 6), f(4, 6, 5), torch.tensor([2, 2, 7, 8])),
    ],
    "gather": lambda: [
        call(aten.index.Tensor, f(9, 6), [ids(9, 4, 5)]),
        call(aten.index.Tensor, f(9, 6, 4), [None, ids(6, 4, 1), ids(4, 3)]),
        call(aten.index.Tensor, f(9, 6, 4), [ids(9, 5), None, ids(4, 5)]),
        call(aten.index.Tensor, f(9, 1, 4), [None, ids(1, 4)]),
        call(aten.index_select.default, f(4, 9), 1, ids(9, 6)),
        call(aten.gather.default, f(4, 9, 6), 1, ids(9, 4, 5, 6)),
        call(aten.gather.default, f(4, 9, 6), -1, ids(6, 4, 9, 1)),
        call(aten.gather.default, f(4, 9), 0, ids(4, 6, 7)),
        call(aten.index_put.default, f(4, 9), [None, torch.tensor([1, 7, 3])], f(4, 3)),
        call(aten.index_put.default, f(9, 4), [torch.tensor([1, 7, 1])], f(1, 4), True),
        call(aten.scatter.src, f(4, 9), 1, torch.tensor([[0, 3, 8]] * 4), f(4, 3)),
        call(aten.scatter.value, f(4, 9), 1, ids(9, 4, 3), 2.0),
        call(aten.scatter_add.default, f(4, 9), 1, ids(9, 4, 6), f(4, 6)),
        call(aten.index_add.default, f(4, 9), 1, ids(9, 6), f(4, 6)),
        call(aten.index_copy.default, f(4, 9), 1, torch.tensor([3, 0]), f(4, 2)),
        call(aten.scatter_reduce.two, f(4, 9), 1, ids(9, 4, 6), f(4, 6), "sum"),
        call(aten.scatter_reduce.two, f(4, 9), 1, ids(9, 4, 6), f(4, 6), "amax"),
        call(aten.index_fill.int_Scalar, f(4, 9), 1, torch.tensor([3, 0]), 0.0),
        call(aten.index_reduce.default, f(4, 9), 1, torch.tensor([3, 0]), f(4, 2), "prod"),
        call(aten.take.default, f(4, 9), ids(36, 4, 5)),
        call(aten.searchsorted.Tensor, f(4, 5).sort()[0], f(4, 6)),
        call(aten.searchsorted.Tensor, f(5).sort()[0], f(4, 6)),
        call(aten.isin.Tensor_Tensor, ids(9, 4, 6), ids(9, 3)),
        call(aten.bucketize.Tensor, f(4, 6), f(3).sort()[0]),
        call(aten.one_hot.default, ids(9, 4, 6), 9),
        call(aten.masked_scatter.default, f(4, 6), mask(4, 6), f(24)),
        call(aten.scatter_reduce.two, f(4, 9), 1, ids(9, 4, 6), f(4, 6), "mean", include_self=False),
        call(aten.repeat_interleave.self_Tensor, f(3, 4), torch.tensor([2, 0, 1]), 0),
    ],
    "order": lambda: [
        call(aten.sort.default, f(4, 6)),
        call(aten.sort.default, f(4, 6), 0, True),
        call(aten.topk.default, f(4, 6), 2),
        call(aten.argsort.default, f(4, 6), 0),
        call(aten.diff.default, f(4, 6), 1, 0),
        call(aten.diff.default, f(4, 6), 1, -1, f(4, 1)),
        call(aten.diff.default, mask(4, 6)),
        call(aten.histc.default, f(12), 5, -1, 1),
        call(aten.gradient.array, f(4, 6, 5), dim=[0, 2]),
        call(aten.gradient.tensorarrayint, f(4, 6), spacing=[f(6).sort()[0]], dim=1),
        call(aten.quantile.default, f(4, 6), torch.tensor([0.25, 0.5]).double(), 1),
    ],
    "attention": lambda: [
        call(aten.scaled_dot_product_attention.default, f(4, 6, 5, 2), f(4, 6, 7, 2), f(4, 6, 7, 3)),
        call(aten.scaled_dot_product_attention.default, f(2, 6, 5, 2), f(2, 6, 5, 2), f(2, 6, 5, 2), is_causal=True),
        call(aten.scaled_dot_product_attention.default, f(2, 6, 5, 2), f(2, 1, 5, 2), f(2, 1, 5, 2), enable_gqa=True),
        call(aten.scaled_dot_product_attention.default, f(4, 6, 2), f(4, 7, 2), f(4, 7, 3)),
        call(aten.scaled_dot_product_attention.default, f(4, 6, 2), f(1, 7, 2), f(1, 7, 2), mask(6, 7)),
        call(aten.scaled_dot_product_attention.default, f(6, 2), f(7, 2), f(7, 2)),
        call(aten.scaled_dot_product_attention.default, f(2, 2, 4, 6, 2), f(2, 2, 4, 6, 2), f(2, 2, 4, 6, 2),
             mask(2, 1, 1, 6, 6)),
        call(aten.scaled_dot_product_attention.default, f(2, 8, 5, 2), f(2, 4, 5, 2), f(2, 4, 5, 2), enable_gqa=True),
        call(aten.scaled_dot_product_attention.default, f(2, 6, 5, 2), f(2, 2, 7, 2), f(2, 2, 7, 3), f(1, 6, 5, 7),
             enable_gqa=True),
        call(aten.scaled_dot_product_attention.default, f(2, 4, 5, 2), f(2, 4, 5, 2), f(2, 4, 5, 2), mask(2, 1, 5, 5)),
        call(aten.scaled_dot_product_attention.default, f(2, 4, 5, 2), f(2, 4, 5, 2), f(2, 4, 5, 2), f(4, 5, 5)),
        call(aten.scaled_dot_product_attention.default, f(2, 4, 5, 2), f(2, 4, 5, 2), f(2, 4, 5, 2), f(5, 5)),
    ],
    "views": lambda: [
        call(aten.reshape.default, f(4, 6, 8), [4, 6, 4, 2]),
        call(aten.reshape.default, f(4, 6, 4, 2), [4, 6, 8]),
        call(aten.reshape.default, f(4, 6), [24]),
        call(aten.reshape.default, f(4, 6), [6, 4]),
        call(aten.reshape.default, f(1, 6, 1, 5), [6, 5, 1]),
        call(aten.permute.default, f(4, 5, 6), [2, 0, 1]),
        call(aten.expand.default, f(4, 1, 5), [3, 4, 6, 5]),
        call(aten.slice.Tensor, f(4, 9), 1, 2, 8, 3),
        call(aten.select.int, f(4, 5, 6), 1, -1),
        call(aten.select.int, f(4, 5, 6), -1, 2),
        call(aten.cat.default, [f(4, 5), f(2, 5)], 0),
        call(aten.stack.default, [f(4, 5), f(4, 5)], 1),
        call(aten.constant_pad_nd.default, f(4, 5, 6), [1, 2]),
        call(aten.constant_pad_nd.default, f(4, 5, 6), [0, 0, 1, 0], 2.0),
        call(aten.flip.default, f(4, 5), [1]),
        call(aten.roll.default, f(4, 5), [2], [0]),
        call(aten.slice_scatter.default, f(4, 9), f(4, 3), 1, 2, 5),
        call(aten.select_scatter.default, f(4, 5, 6), f(4, 6), 1, 2),
        call(aten.tril.default, f(4, 5, 6), -1),
        call(aten.triu.default, f(4, 6)),
        call(aten.flipud.default, f(4, 6)),
        call(aten.fliplr.default, f(4, 6)),
        call(aten.roll.default, f(4, 6), [3]),
        call(aten.diag_embed.default, f(4, 6, 3), 1, 0, 2),
        call(aten.diagonal_scatter.default, f(4, 5, 5), f(4, 4), 1, 1, 2),
        call(aten.block_diag.default, [f(4, 5), f(2, 3)]),
        call(aten.unfold.default, f(4, 9, 6), 1, 3, 2),
        call(aten.diagonal.default, f(4, 5, 5), 1, 1, 2),
    ],
    "reduce": lambda: [
        call(aten.sum.dim_IntList, f(4, 6, 5), [1]),
        call(aten.sum.dim_IntList, f(4, 6, 5), [0, -1], True),
        call(aten.sum.dim_IntList, f(4, 6), []),
        call(aten.amax.default, f(4, 6), [1]),
        call(aten.amin.default, f(4, 6), [0], True),
        call(aten.max.dim, f(4, 6), 1),
        call(aten.argmax.default, f(4, 6), -1),
        call(aten.argmax.default, f(4, 6)),
        call(aten.cumsum.default, f(4, 6), 1),
        call(aten.softmax.int, f(4, 6, 5), -1),
        call(aten.var.correction, f(4, 6, 5), [1], correction=1),
        call(aten.linalg_vector_norm.default, f(4, 6, 5), 2, [-1], True),
        call(aten.logsumexp.default, f(4, 6), [1]),
        call(aten.prod.dim_int, f(4, 6), 1),
        call(aten.kthvalue.default, f(4, 6), 2),
        call(aten.max.default, f(4, 6)),
        call(aten.nansum.default, f(4, 6), [1]),
        call(aten.count_nonzero.dim_IntList, f(4, 6), [1]),
        call(aten.aminmax.default, f(4, 6), dim=1),
        call(aten.trace.default, f(4, 6)),
        call(aten.renorm.default, f(4, 6), 2, 0, 1.0),
        call(aten.cumprod.default, f(4, 6), 1),
        call(aten.cummax.default, f(4, 6), 0), call(aten.cummin.default, f(4, 6), 1),
        call(aten.glu.default, f(4, 6), 1),
        call(aten.log_softmax.int, f(4, 6), 0),
        call(aten._softmax_backward_data.default, f(4, 6), f(4, 6).softmax(1), 1, torch.float64),
        call(aten.linalg_vector_norm.default, f(4, 6), 1, [1]),
        call(aten.quantile.scalar, f(4, 6), 0.3, 1, True),
        call(aten.linalg_matrix_norm.default, f(4, 6, 5), 1),
    ],
    "norm": lambda: [
        call(aten.layer_norm.default, f(4, 6, 8), [8], f(8), f(8)),
        call(aten.layer_norm.default, f(4, 6, 8), [6, 8]),
        call(aten.rms_norm.default, f(4, 6, 8), [8], f(8)),
        call(aten.group_norm.default, f(4, 6, 5), 3, f(6), f(6)),
        call(aten.instance_norm.default, f(4, 6, 5), f(6), f(6), None, None, True, 0.1, 1e-5, False),
        call(aten.native_layer_norm.default, f(4, 6, 8), [8], f(8), f(8), 1e-5),
        call(aten._native_batch_norm_legit.no_stats, f(4, 6, 5), f(6), f(6), True, 0.1, 1e-5),
    ],
    "conv": lambda: [
        call(aten.conv2d.default, f(4, 6, 7, 7), f(5, 6, 3, 3), f(5), [2, 2], [1, 1]),
        call(aten.conv2d.default, f(4, 6, 5, 5), f(6, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 6),
        call(aten.conv1d.default, f(4, 6, 9), f(8, 6, 3)),
        call(aten.conv1d.default, f(6, 9), f(8, 6, 3), f(8)),
        call(aten.conv2d.default, f(4, 6, 7, 6), f(5, 6, 3, 1), f(5), [1, 1], [1, 0]),
        call(aten.max_pool2d.default, f(4, 6, 8, 8), [2, 2]),
        call(aten.avg_pool2d.default, f(4, 6, 8, 8), [3, 3], [2, 2], [1, 1]),
        call(aten.adaptive_avg_pool2d.default, f(4, 6, 7, 7), [1, 1]),
        call(aten.max_pool2d.default, f(6, 8, 8), [2, 2]),
        call(aten.conv1d.default, f(4, 12, 9), f(24, 2, 3), f(24), [1], [1], [1], 6),
        call(aten.conv2d.default, f(4, 12, 5, 5), f(12, 1, 3, 3), f(12), [1, 1], [1, 1], [1, 1], 12),
        call(aten.conv1d.padding, f(4, 6, 9), f(6, 1, 3), f(6), [1], "same", [1], 6),
        call(aten.conv_transpose2d.input, f(4, 6, 6, 6), f(6, 8, 2, 2), f(8), [2, 2]),
        call(aten.max_pool2d_with_indices.default, f(4, 6, 8, 8), [2, 2]),
        call(aten.upsample_bilinear2d.vec, f(4, 6, 4, 4), [8, 8], False, None),
        call(aten.grid_sampler_2d.default, f(4, 6, 5, 5), f(4, 3, 8, 2), 0, 0, False),
        call(aten.max_unpool2d.default, f(4, 6, 2, 2), torch.tensor([[0, 3], [8, 10]]).expand(4, 6, 2, 2), [4, 4]),
        call(aten.im2col.default, f(4, 6, 5, 5), [3, 3], [1, 1], [1, 1], [1, 1]),
    ],
    "recurrent": lambda: [
        call(aten.gru.input, f(5, 6, 3), f(1, 6, 4), [f(12, 3), f(12, 4), f(12), f(12) + 1], True, 1, 0.0, True, False,
             False),
        call(aten.lstm.input, f(6, 5, 3), [f(1, 6, 4), f(1, 6, 4) + 1], [f(16, 3), f(16, 4), f(16), f(16) + 1], True, 1,
             0.0, True, False, True),
    ],
    "spectral": lambda: [
        call(aten.fft_rfft.default, f(4, 6, 8)),
        call(aten.fft_fftn.default, f(4, 6, 8), None, [1, 2]),
        call(aten.fft_ihfft.default, f(4, 6, 8)),
        call(aten.stft.default, f(4, 40), 8, None, None, f(8), return_complex=True),
        call(aten.fft_irfft.default, torch.complex(f(4, 6, 5), f(4, 6, 5) + 1), 8, 1),
        call(aten.real.default, torch.complex(f(4, 6), f(4, 6) + 1)),
        call(aten.complex.default, f(4, 6), f(4, 6)),
        call(aten.polar.default, f(4, 6), f(4, 6)),
        call(aten.view_as_real.default, torch.complex(f(4, 6), f(4, 6) + 1)),
        call(aten.view_as_complex.default, f(4, 6, 2)),
    ],
    "embedding": lambda: [
        call(aten.embedding.default, f(9, 6), ids(9, 4, 5)),
        call(aten.embedding.default, f(9, 6), ids(9, 4, 5), 2),
    ],
    "loss": lambda: [
        call(aten.cross_entropy_loss.default, f(8, 10), ids(10, 8), None, 2),
        call(aten.cross_entropy_loss.default, f(8, 10), ids(10, 8), None, 2, 3),
        call(aten.cross_entropy_loss.default, f(8, 10), ids(10, 8), None, 2, -100, 0.1),
        call(aten.cross_entropy_loss.default, f(4, 10, 6), ids(10, 4, 6), None, 2),
        call(aten.mse_loss.default, f(4, 6), f(4, 6) + 1, 2),
        call(aten.mse_loss.default, f(4, 6), f(4, 6) + 1, 0),
        call(aten.cross_entropy_loss.default, f(4, 10, 6), ids(10, 4, 6), None, 0),
        call(aten.multi_margin_loss.default, f(8, 10), ids(10, 8), reduction=2),
        call(aten.smooth_l1_loss.default, f(4, 6), f(4, 6) + 1, 2),
        call(aten.nll_loss_nd.default, f(8, 10), ids(10, 8), None, 2),
        call(aten.binary_cross_entropy_with_logits.default, f(4, 6), f(4, 6).sigmoid(), None, None, 2),
        call(aten.kl_div.default, f(4, 6), f(4, 6).softmax(1), 2),
        call(aten.cross_entropy_loss.default, f(8, 10), f(8, 10).softmax(1), None, 2),
        call(aten.poisson_nll_loss.default, f(4, 6), f(4, 6).exp(), True, False, 1e-8, 2),
        call(aten.hinge_embedding_loss.default, f(4, 6), f(4, 6).sign(), 1.0, 0),
        call(aten.cosine_embedding_loss.default, f(4, 6), f(4, 6) + 1, f(4).sign(), 0.1, 2),
        call(aten.triplet_margin_loss.default, f(4, 6), f(4, 6) + 1, f(4, 6) - 1, reduction=0),
    ],
    "pointwise": lambda: [
        call(aten.add.Tensor, f(4, 6), f(6), alpha=2),
        call(aten.add.Tensor, f(4, 6), 2.0),
        call(aten.sub.Tensor, f(4, 1, 6), f(5, 1)),
        call(aten.mul.Tensor, f(4, 6), f(4, 1)),
        call(aten.mul.Tensor, f(4, 6), 0.5),
        call(aten.mul.Tensor, f(4, 6), mask(4, 6)),
        call(aten.div.Tensor, f(4, 6), f(6) + 9),
        call(aten.neg.default, f(7)),
        call(aten.where.self, mask(6), f(4, 6), f(4, 1)),
        call(aten.where.ScalarOther, mask(4, 1), f(6), 0.0),
        call(aten.floor_divide.default, ids(9, 4, 6), 2),
        call(aten.masked_fill.Scalar, f(4, 6), mask(1, 6), 3.0),
        call(aten.gelu.default, f(4, 6)),
        call(aten.pow.Tensor_Scalar, f(4, 6), 2),
        call(aten.clamp.default, f(4, 6), -0.5, 0.5),
        call(aten.to.dtype, f(4, 6), torch.float32),
        call(aten.detach.default, f(4, 6)),
        call(aten.rsub.Scalar, f(4, 6), 1.0),
        call(aten.addcmul.default, f(4, 6), f(6), f(4, 6), value=2),
        call(aten.lerp.Scalar, f(4, 6), f(4, 6), 0.3),
        call(aten.rsub.Tensor, f(4, 6), f(4, 1)),
        call(aten.hardswish.default, f(4, 6)),
        call(aten.prelu.default, f(4, 6, 5), f(6)),
        call(aten.prelu.default, f(4, 6), f(1)),
        call(aten.masked_fill.Scalar, f(4, 6), mask(1, 6), 0.0),
        call(aten.ldexp.Tensor, f(4, 6), ids(3, 6)),
        call(aten.deg2rad.default, f(4, 6)),
        call(aten.maximum.default, f(4, 6), f(6)),
        call(aten.gt.Scalar, f(4, 6), 0.0),
        call(aten.frexp.Tensor, f(4, 6)),
        call(aten.masked_fill.Tensor, f(4, 6), mask(4, 6), f()),
        call(aten.to.dtype, ids(9, 4, 6), torch.float64),
        call(aten.xlogy.Tensor, f(4, 6), f(6).exp()),
    ],
}


def split(whole: Tensor, p: Placement, num_ranks: int) -> list[Tensor]:
    """What each rank holds; summands differ in every element."""
    if p.is_shard:
        return list(whole.split(list(shards(whole.shape[p.dim], num_ranks)), p.dim))
    if p == PARTIAL and not whole.is_floating_point():
        return [whole, *(torch.zeros_like(whole) for _ in range(num_ranks - 1))]
    if p == PARTIAL:
        generator = torch.Generator().manual_seed(5)
        parts = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(num_ranks - 1)]
        return [*parts, whole - sum(parts)]
    return [whole] * num_ranks


def join(held: Sequence[Tensor], p: Placement) -> Tensor:
    """The global value; whoever holds all of it must hold the same."""
    if p.is_shard:
        return torch.cat(list(held), p.dim)
    if p == PARTIAL:
        return torch.stack(list(held)).sum(0)
    for other in held[1:]:
        torch.testing.assert_close(other, held[0])
    return held[0]


def dual(p: Placement) -> Placement:
    return p if p.is_shard else {"R": PARTIAL, "I": INVARIANT, "P": INVARIANT}[p.kind]


def fits(strategy: AxisStrategy, made: OpCall, outputs: Sequence[Tensor], num_ranks: int) -> bool:
    placed = zip((*made.inputs, *outputs), (*strategy.inputs, *strategy.outputs), strict=True)
    return all(layout_fits(tuple(t.shape), (p,), (num_ranks,)) for t, p in placed) and not any(
        size % num_ranks for size in strategy.even
    )


def run_rank(
    made: OpCall, strategy: AxisStrategy, inputs: Sequence[Tensor], sizes: Sequence[int], start: int
) -> list[Tensor]:
    if strategy.variant == "vocabulary":
        return [variants.vocabulary_embedding(*inputs, *made.args[2:3], start=start, length=len(made.inputs[0]))]
    if strategy.variant == "queries":
        return [variants.causal_queries(*inputs, start=start, **made.kwargs)]
    if strategy.variant == "heads":
        shards = start, made.inputs[0].shape[1], 0, made.inputs[1].shape[1]
        return [variants.heads_of_groups(*inputs, shards=shards, axes=[], **made.kwargs)]
    return made.run(inputs, sizes)


def check_strategy(made: OpCall, strategy: AxisStrategy, num_ranks: int) -> bool:
    """Whether the axis strategy applies; if it does it must be true, forward and backward."""
    whole = [t.clone().requires_grad_(t.is_floating_point()) for t in made.inputs]
    expected = made.run(whole)
    if not fits(strategy, made, expected, num_ranks):
        return False
    given = [split(t.detach(), p, num_ranks) for t, p in zip(whole, strategy.inputs, strict=True)]
    cut = strategy.inputs[0].dim if strategy.inputs and strategy.inputs[0].is_shard else 0
    starts = [sum(t.shape[cut] for t in given[0][:r]) for r in range(num_ranks)]
    held = [[t[r].clone().requires_grad_(t[r].is_floating_point()) for t in given] for r in range(num_ranks)]
    size = [local_shape(tuple(expected[0].shape), (strategy.outputs[0],), (num_ranks,), (r,)) for r in range(num_ranks)]
    results = [run_rank(made, strategy, held[r], size[r], starts[r]) for r in range(num_ranks)]
    for number, (value, p) in enumerate(zip(expected, strategy.outputs, strict=True)):
        torch.testing.assert_close(join([r[number] for r in results], p), value)
        if not value.requires_grad:
            continue
        gradient = torch.randn(value.shape, generator=torch.Generator().manual_seed(6), dtype=value.dtype)
        asked = [i for i, t in enumerate(whole) if t.requires_grad]
        right = torch.autograd.grad(value, [whole[i] for i in asked], gradient, retain_graph=True, allow_unused=True)
        mine = [
            torch.autograd.grad(results[r][number], [held[r][i] for i in asked], g, retain_graph=True,
                                materialize_grads=True)
            for r, g in enumerate(split(gradient, dual(p), num_ranks))
        ]
        for place, i in enumerate(asked):
            whole_gradient = right[place] if right[place] is not None else torch.zeros_like(whole[i])
            joined = join([m[place] for m in mine], dual(strategy.inputs[i]))
            torch.testing.assert_close(joined, whole_gradient, rtol=1e-6, atol=1e-6)
    return True


@pytest.mark.parametrize(("family", "num_ranks"), [
    case if case[1] == 2 or case in (("matmul", 3), ("attention", 3), ("norm", 3), ("gather", 3)) else slow(*case)
    for case in itertools.product(SAMPLES, (2, 3, 4))])
def test_axis_strategies_on_shards_give_the_whole(family: str, num_ranks: int) -> None:
    """Forward and gradient, even and uneven shards. (Those that communicate run on ranks: below, test_sequence.)"""
    for made in SAMPLES[family]():
        rule, known = made.rule()
        assert known, f"{made.op} has no rule"
        for strategy in rule.axis_strategies():
            if strategy.inside:
                continue
            try:
                check_strategy(made, strategy, num_ranks)
            except Exception as error:
                shapes = [list(t.shape) for t in made.inputs]
                raise AssertionError(f"{made.op} of {shapes} on {num_ranks} ranks, {strategy}: {error}") from error


@pytest.mark.parametrize("family", list(SAMPLES))
def test_every_axis_strategy_is_run(family: str) -> None:
    """Each axis strategy of each sample applies on some number of ranks: nothing above passes by being skipped."""
    for made in SAMPLES[family]():
        for strategy in made.rule()[0].axis_strategies():
            cuts = [*strategy.inputs, *strategy.outputs]
            if not strategy.inside and not any(p.is_shard for p in cuts):
                assert check_strategy(made, strategy, 2)
            elif not strategy.inside:
                assert any(check_strategy(made, strategy, n) for n in (2, 3)), f"{made.op}: {strategy}"


def test_a_wrong_axis_strategy_is_found() -> None:
    """The property can fail: a bias on every rank of a cut sum, a softmax cut where it must be whole."""
    linear = call(aten.linear.default, f(4, 8), f(6, 8), f(6))
    k = next(strategy for strategy in linear.rule()[0].axis_strategies() if strategy.name == "k")
    wrong = AxisStrategy("k", (*k.inputs[:2], Placement("R")), k.outputs, "k")
    softmax = call(aten.softmax.int, f(4, 8), 1)
    cut = AxisStrategy("d1", (Placement("S", 1),), (Placement("S", 1),), "d1")
    for made, strategy in ((linear, wrong), (softmax, cut)):
        with pytest.raises(AssertionError):
            check_strategy(made, strategy, 2)
