"""The models of the step-time benchmark, and how one parallelises them by hand with torch's own tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

VOCABULARY = 4096


@dataclass(frozen=True)
class Subject:
    """A model, its call (global values), and where tensor parallelism cuts it by hand.

    ``by_hand`` maps module name patterns to a style: column, row, or "gathered" (column-wise, its result gathered);
    empty: nobody cuts it so.
    ``prepare(model, num_ranks)`` makes a model ready for that.
    """

    name: str
    build: Callable[[], nn.Module]
    kwargs: Callable[[], dict[str, torch.Tensor]]
    by_hand: Mapping[str, str]
    prepare: Callable[[nn.Module, int], None] = lambda model, num_ranks: None


class WideMLP(nn.Module):
    """Few rows, wide layers: gradients are larger than activations, so data parallelism is a poor plan."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 4096)
        self.down = nn.Linear(4096, 512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)


class Residual(nn.Module):
    """Two convolutions with group norm, added to their input; nothing is added at first (Goyal et al. 2017, section
    5.1), so that a step does not amplify rounding."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = (nn.GroupNorm(8, channels) for _ in range(2))
        nn.init.zeros_(self.second_norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(x + self.second_norm(self.second(inner)))


class ResNet(nn.Module):
    """Stages of residual blocks, each of half the size and twice the channels of the one before, and a classifier."""

    def __init__(self, stages: int = 3, blocks: int = 2, channels: int = 64, classes: int = 100) -> None:
        super().__init__()
        widths = [channels << stage for stage in range(stages)]
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(Residual(width) for width in widths for _ in range(blocks))
        self.narrower = nn.ModuleList(nn.Conv2d(width, 2 * width, 2, stride=2, bias=False) for width in widths[:-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, each = torch.relu(self.stem(images)), len(self.blocks) // (len(self.narrower) + 1)
        for number, block in enumerate(self.blocks):
            if number and number % each == 0:
                x = self.narrower[number // each - 1](x)
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def llama(vocabulary: int, hidden: int, intermediate: int, layers: int, kv_heads: int, heads: int = 8) -> nn.Module:
    """Untied head; equal weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=8192, use_cache=False)).train()


def gpt2(vocabulary: int, hidden: int, layers: int, positions: int) -> nn.Module:
    """8 heads, tied embeddings, no dropout; equal weights each time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=vocabulary, n_embd=hidden, n_layer=layers, n_head=8, n_positions=positions, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)).train()


def bert(vocabulary: int, hidden: int, layers: int, positions: int) -> nn.Module:
    """8 heads, tied embeddings, no dropout; equal weights each time."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=8,
        intermediate_size=4 * hidden, max_position_embeddings=positions, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)).train()


def token_batch(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def row_batch(count: int, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(count, width, generator=generator) for name in ("x", "y")}


def image_batch(count: int, size: int, classes: int = 100) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"images": torch.randn(count, 3, size, size, generator=generator),
            "labels": torch.randint(0, classes, (count,), generator=generator)}


def _resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet()


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return WideMLP()


def _cut_gpt2(model: nn.Module, num_ranks: int) -> None:
    """Conv1D becomes Linear, the fused projection's rows are ordered by rank, and each rank has its share of the heads.

    q, k, v of 2 ranks lie as q0 q1 k0 k1 v0 v1; column-wise shards must be q0 k0 v0 and q1 k1 v1.
    """
    transformer: Any = model.transformer
    for block in transformer.h:
        for owner, leaf in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            conv = getattr(owner, leaf)
            linear = nn.Linear(*conv.weight.shape)
            weight, bias = conv.weight.detach().t(), conv.bias.detach()
            if leaf == "c_attn":
                order = torch.arange(len(bias)).view(3, num_ranks, -1).transpose(0, 1).flatten()
                weight, bias = weight[order], bias[order]
            linear.weight, linear.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.clone())
            setattr(owner, leaf, linear)
        block.attn.split_size //= num_ranks


def tensor_parallel(subject: Subject, mesh: DeviceMesh) -> nn.Module:
    """torch's parallelize_module with column- and row-wise linears, as its tutorial does it."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    styles: dict[str, Callable[[], ParallelStyle]] = {
        "column": ColwiseParallel, "row": RowwiseParallel,
        "gathered": lambda: ColwiseParallel(output_layouts=Replicate())}
    model = subject.build()
    subject.prepare(model, mesh.size())
    plan = {
        name: styles[style]()
        for name, module in model.named_modules() if isinstance(module, nn.Linear)
        for pattern, style in subject.by_hand.items() if re.search(pattern, name)
    }
    return parallelize_module(model, mesh, plan)


#: 3.6, 4.2, 4.3 and 3.3 million parameters, and 4.2 in two layers.
SUBJECTS = {
    "llama": Subject("llama", lambda: llama(VOCABULARY, 256, 704, 2, 4), lambda: token_batch(VOCABULARY, 8, 64), {
        r"(q|k|v|gate|up)_proj$": "column", r"(o|down)_proj$": "row", r"^lm_head$": "gathered"}),
    "gpt2": Subject("gpt2", lambda: gpt2(VOCABULARY, 256, 4, 128), lambda: token_batch(VOCABULARY, 8, 64),
                    {r"c_attn$|c_fc$": "column", r"c_proj$": "row"}, _cut_gpt2),
    "bert": Subject("bert", lambda: bert(VOCABULARY, 256, 4, 128), lambda: token_batch(VOCABULARY, 8, 64), {
        r"(query|key|value|intermediate\.dense)$": "column", r"layer\.\d+\.(attention\.)?output\.dense$": "row"}),
    "resnet": Subject("resnet", _resnet, lambda: image_batch(8, 16), {}),
    "wide_mlp": Subject("wide_mlp", _mlp, lambda: row_batch(64, 512), {r"^up$": "column", r"^down$": "row"}),
}
