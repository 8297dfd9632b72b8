"""The models of the tests: Alpa's layers in torch, and the two of autoparallel (Meta)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class WithLoss(nn.Module):
    """The mean squared error of a model's result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.model(x), target)


class Layers(nn.Module):
    """Linear layers of equal width, with or without relu between them."""

    def __init__(self, layers: int, hidden: int, bias: bool = True, relu: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=bias) for _ in range(layers))
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x)) if self.relu else layer(x)
        return self.layers[-1](x)


def mlp(layers: int, hidden: int, bias: bool = True, relu: bool = True) -> nn.Module:
    return WithLoss(Layers(layers, hidden, bias, relu))


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                             for layer in (self.query, self.key, self.value))
        found = functional.scaled_dot_product_attention(query, key, value)
        return self.out(found.transpose(1, 2).flatten(2))


class SumOfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x).sum()


class BertLayer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.inner, self.outer = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.dropout(self.attention(x)))
        return self.norms[1](x + self.dropout(self.outer(functional.gelu(self.inner(x)))))


class BertLayers(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BertLayer(hidden, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def bert(layers: int, hidden: int, heads: int) -> nn.Module:
    return WithLoss(BertLayers(layers, hidden, heads))


class BertLM(nn.Module):
    """Layers between an embedding and itself, with a dense layer before the second."""

    def __init__(self, vocabulary: int, length: int, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.layers, self.dense = BertLayers(layers, hidden, heads), nn.Linear(hidden, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.layers(self.norms[0](self.words(ids) + self.places.weight))
        x = self.norms[1](functional.gelu(self.dense(x)))
        logits = x @ self.words.weight.t() + self.bias
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Tied(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.embedding(ids) @ self.embedding.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Mixture(nn.Module):
    """GShard's mixture of experts: g groups of s tokens, c places in each of e experts for a group, all as products."""

    def __init__(self, hidden: int, experts: int, group: int) -> None:
        super().__init__()
        self.group, self.places = group, 2 * group // experts
        self.gate = nn.Parameter(torch.zeros(hidden, experts))
        self.inner = nn.Parameter(torch.zeros(experts, hidden, 4 * hidden))
        self.outer = nn.Parameter(torch.zeros(experts, 4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self.group, x.shape[-1])
        shares = torch.softmax(torch.einsum("gsm,me->gse", groups, self.gate), -1)
        shares = shares.unsqueeze(-1).expand(-1, -1, -1, self.places)
        rows = torch.einsum("gsec,gsm->egcm", shares, groups)
        rows = torch.einsum("egcm,emh->egch", rows, self.inner)
        rows = torch.einsum("egch,ehm->gecm", torch.relu(rows), self.outer)
        return torch.einsum("gsec,gecm->gsm", shares, rows).reshape(x.shape)


class MixtureLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, experts: int, group: int) -> None:
        super().__init__()
        self.attention, self.mixture = Attention(hidden, heads), Mixture(hidden, experts, group)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.attention(x))
        return self.norms[1](x + self.mixture(x))


class MixtureLM(nn.Module):
    """A layer with a mixture and one without, between an embedding and itself."""

    def __init__(self, vocabulary: int, length: int, hidden: int, heads: int, experts: int, group: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.norm, self.bias = nn.LayerNorm(hidden), nn.Parameter(torch.zeros(vocabulary))
        self.mixture, self.layer = MixtureLayer(hidden, heads, experts, group), BertLayer(hidden, heads)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.layer(self.mixture(self.norm(self.words(ids) + self.places.weight)))
        logits = x @ self.words.weight.t() + self.bias
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Convolutions(nn.Module):
    """Convolutions of stride 2, each with batch norm, relu and pooling."""

    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, stride=2, padding=1, bias=False)
                                    for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
            x = functional.max_pool2d(functional.pad(x, (0, 1, 0, 1)), 2, stride=1)
        return x


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return y + 2, self.linear2(self.linear1(x)), y + 2


class Block(nn.Module):
    """A transformer's block without norms, of width 6,144 and 48 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(6144, 48, bias=False)
        self.w1, self.w2 = nn.Linear(6144, 4 * 6144, bias=False), nn.Linear(4 * 6144, 6144, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.w2(torch.relu(self.w1(x)))
