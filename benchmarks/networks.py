"""Networks as users write them by hand, small, in train mode; each returns its loss and what it says."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

NUM_CLASSES, VOCABULARY = 10, 128


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


def _convolutions(made_of: int, channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(made_of, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
                         nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())


class UNet(nn.Module):
    """Ronneberger 2015: down by pooling, up by transposed convolution, skips concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _convolutions(3, 8), _convolutions(8, 16), _convolutions(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 3, 2, 1, output_padding=1)
        self.merge2, self.merge1 = _convolutions(32, 16), _convolutions(16, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, image: Tensor, target: Tensor) -> Output:
        first = self.down1(image)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.merge2(torch.cat([self.up2(x), second], dim=1))
        x = self.merge1(torch.cat([self.up1(x), first], dim=1))
        logits = self.head(x)
        return Output(F.cross_entropy(logits, target), logits)


class _Residual(nn.Module):
    def __init__(self, made_of: int, channels: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, made_of), nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(made_of, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(time, 2 * channels)
        self.skip = nn.Conv2d(made_of, channels, 1) if made_of != channels else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        return h + self.skip(x)


class _Attention(nn.Module):
    """Pixels attend to one another, and then to the text."""

    def __init__(self, channels: int, text: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(4, channels), heads
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)
        self.query, self.key_value = nn.Linear(channels, channels), nn.Linear(text, 2 * channels)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(b, c, h, w))
        tokens = x.flatten(2).transpose(1, 2)
        q = self.query(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.key_value(text).chunk(2, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + seen.transpose(1, 2).reshape(b, c, h, w)


class DiffusionUNet(nn.Module):
    """Predicts noise: residual blocks with group norm and time, attention, up by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first, self.last = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        self.down, self.shrink = _Residual(16, 16, 32), nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.middle, self.attention = _Residual(16, 32, 32), _Attention(32, 24)
        self.grow, self.up = nn.Conv2d(32, 16, 3, padding=1), _Residual(32, 16, 32)
        self.norm = nn.GroupNorm(4, 16)
        self.kept: Tensor
        self.register_buffer("kept", torch.linspace(0.99, 0.01, 100))

    def forward(self, image: Tensor, noise: Tensor, times: Tensor, text: Tensor) -> Output:
        kept = self.kept[times].view(-1, 1, 1, 1)
        x = image * kept.sqrt() + noise * (1 - kept).sqrt()
        frequencies = torch.exp(-math.log(1000) * torch.arange(8, device=x.device) / 8)
        angles = times[:, None].float() * frequencies[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1).to(image.dtype))
        first = self.down(self.first(x), time)
        x = self.attention(self.middle(self.shrink(first), time), text)
        x = self.grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.up(torch.cat([x, first], dim=1), time)
        made = self.last(F.silu(self.norm(x)))
        return Output(F.mse_loss(made, noise), made)


class Recurrent(nn.Module):
    """Tokens through two layers in both directions, classified by the mean of their states."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32, padding_idx=0)
        self.cell = cell(32, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, NUM_CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        states, _ = self.cell(self.embedding(ids))
        there = (ids != 0).unsqueeze(-1).to(states.dtype)
        logits = self.head((states * there).sum(1) / there.sum(1).clamp(min=1))
        return Output(F.cross_entropy(logits, labels), logits)


class GraphNetwork(nn.Module):
    """Messages along edges, added up at the nodes that they reach; then weighed by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(32, 32), nn.Linear(48, 16)
        self.score, self.head = nn.Linear(32, 1), nn.Linear(16, 4)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Output:
        source, target = edges[0], edges[1]
        degree = nodes.new_zeros(nodes.shape[0]).index_add(0, target, nodes.new_ones(target.shape[0])).clamp(min=1)
        pairs = torch.cat([nodes[source], nodes[target]], dim=-1)
        messages = nodes.new_zeros(nodes.shape[0], 32).index_add_(0, target, torch.relu(self.message(pairs)))
        nodes = torch.relu(self.update(torch.cat([nodes, messages / degree[:, None]], dim=-1)))
        pairs = torch.cat([nodes[source], nodes[target]], dim=-1)
        weights = torch.exp(F.leaky_relu(self.score(pairs).squeeze(-1), 0.2))
        total = nodes.new_zeros(nodes.shape[0]).scatter_add(0, target, weights)
        shares = weights / (total[target] + 1e-9)
        seen = torch.zeros_like(nodes).scatter_add(0, target[:, None].expand(-1, 16), nodes[source] * shares[:, None])
        logits = self.head(nodes + seen)
        return Output(F.cross_entropy(logits, labels), logits)


class VariationalAutoencoder(nn.Module):
    """Its noise is an input, so that two runs draw the same."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor, noise: Tensor) -> Output:
        mean, logs = self.encoder(x).chunk(2, dim=-1)
        made = self.decoder(mean + noise * torch.exp(0.5 * logs))
        divergence = -0.5 * torch.sum(1 + logs - mean.pow(2) - logs.exp())
        return Output(F.binary_cross_entropy_with_logits(made, x.sigmoid(), reduction="sum") + divergence, made)


class Recommender(nn.Module):
    """DLRM: one table per feature, bags of clicks, products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(64, 16) for _ in range(4))
        self.history = nn.EmbeddingBag(64, 16, mode="mean")
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(16 + 15, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Tensor, bags: Tensor, clicked: Tensor) -> Output:
        dense = self.bottom(dense)
        found = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([dense, self.history(bags), *found], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(6, 6, offset=-1)
        logits = self.top(torch.cat([dense, products[:, rows, columns]], dim=1)).squeeze(-1)
        return Output(F.binary_cross_entropy_with_logits(logits, clicked), logits)


class Translator(nn.Module):
    """torch.nn.Transformer with masks, as in torch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Output:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        made = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True,
                                src_key_padding_mask=source < 4, memory_key_padding_mask=source < 4)
        logits = self.head(made)
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten()), logits)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and weight norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.first, self.last = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 1, 1)
        self.gates = nn.ModuleList(norm(nn.Conv1d(16, 32, 2, dilation=2**i)) for i in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Output:
        x = self.first(x)
        total = torch.zeros_like(x)
        for i, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            value, weight = gate(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            h = skip(torch.tanh(value) * torch.sigmoid(weight))
            x, total = x + h, total + h
        made = self.last(torch.relu(total))
        return Output(F.smooth_l1_loss(made, target), made)


class FourierOperator(nn.Module):
    """Li et al. 2021: products of the lowest frequencies, beside a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 1, 1)
        self.weights = nn.Parameter(torch.randn(2, 8, 8, 4, 4, 2) * 0.05)
        self.local = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Output:
        x = self.lift(x)
        for weight, local in zip(self.weights, self.local, strict=True):
            spectrum = torch.fft.rfft2(x)
            low = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :4, :4], torch.view_as_complex(weight))
            whole = torch.zeros_like(spectrum)
            whole[:, :, :4, :4] = low
            x = F.gelu(torch.fft.irfft2(whole, s=x.shape[-2:]) + local(x))
        made = self.project(x)
        return Output(F.mse_loss(made, target), made)


class PointNet(nn.Module):
    """Each point by itself, then the largest of all points; points turned by a learned matrix first."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.matrix = nn.Linear(16, 9)
        self.features = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1))
        self.head = nn.Linear(64, NUM_CLASSES)

    def forward(self, points: Tensor, labels: Tensor) -> Output:
        none = torch.eye(3, dtype=points.dtype)
        matrix = self.matrix(self.turn(points).max(dim=2)[0]).view(-1, 3, 3) + none
        points = torch.bmm(points.transpose(2, 1), matrix).transpose(2, 1)
        logits = self.head(self.features(points).amax(dim=2))
        turned = torch.linalg.matrix_norm(torch.bmm(matrix, matrix.transpose(1, 2)) - none).mean()
        return Output(F.nll_loss(F.log_softmax(logits, dim=1), labels) + 0.001 * turned, logits)


class TwoTowers(nn.Module):
    """Contrastive: each row's partner among all of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16))
        self.right = nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> Output:
        a, b = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        logits = a @ b.T * self.temperature.exp()
        labels = torch.arange(logits.shape[0], device=logits.device)
        return Output((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2, logits)


class Mixer(nn.Module):
    """MLP-Mixer: patches and channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(5))
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.head = nn.Linear(32, NUM_CLASSES)

    def forward(self, image: Tensor, labels: Tensor) -> Output:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for i in range(2):
            x = x + self.tokens[i](self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[i](self.norms[2 * i + 1](x))
        logits = self.head(self.norms[4](x).mean(dim=1))
        return Output(F.cross_entropy(logits, labels, label_smoothing=0.1), logits)


class Upscaler(nn.Module):
    """Super-resolution by pixel shuffle, beside a bilinear guess."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 5, padding=2, padding_mode="reflect"), nn.Conv2d(16, 12, 3, padding=1)
        self.slope = nn.PReLU(16)

    def forward(self, image: Tensor, labels: Tensor) -> Output:
        small = F.avg_pool2d(image, 2)
        made = F.pixel_shuffle(self.last(self.slope(self.first(small))), 2)
        made = made + F.interpolate(small, size=image.shape[-2:], mode="bilinear", align_corners=False)
        return Output(F.l1_loss(made, image) + made.clamp(-1, 1).var(), made)


class Adversary(nn.Module):
    """A generator and a discriminator with spectral norm, hinge loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = nn.Linear(8, 32 * 16)
        self.generator = nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1),
                                       nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh())
        norm = nn.utils.parametrizations.spectral_norm
        self.discriminator = nn.Sequential(norm(nn.Conv2d(3, 16, 4, 2, 1)), nn.LeakyReLU(0.2),
                                           norm(nn.Conv2d(16, 32, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(),
                                           nn.Linear(512, 1))

    def forward(self, image: Tensor, labels: Tensor) -> Output:
        noise = F.one_hot(labels % 8, 8).to(image.dtype)
        made = self.generator(self.seed(noise).view(-1, 32, 4, 4))
        false, true = self.discriminator(made), self.discriminator(image)
        return Output(F.relu(1 - true).mean() + F.relu(1 + false).mean() - 0.1 * false.mean(), made)


class Mixture(nn.Module):
    """Experts chosen by hand-written routing with a capacity, one-hot dispatch, and a loss of balance (GShard)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.router = nn.Linear(32, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 32, 48) * 0.1), nn.Parameter(torch.randn(4, 48, 32) * 0.1)
        self.head = nn.Linear(32, NUM_CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        x = self.embedding(ids).flatten(0, 1)
        capacity = 2 * x.shape[0] // 4
        shares = self.router(x).softmax(dim=-1)
        weight, expert = shares.max(dim=-1)
        chosen = F.one_hot(expert, 4)
        place = (chosen.cumsum(dim=0) * chosen).sum(dim=-1) - 1
        kept = place < capacity
        slots = F.one_hot(place.clamp(max=capacity - 1), capacity).to(x.dtype) * kept[:, None]
        dispatch = torch.einsum("te,tc->tec", chosen.to(x.dtype), slots)
        rows = torch.einsum("tec,td->ecd", dispatch, x)
        made = torch.einsum("ecf,efd->ecd", F.gelu(torch.einsum("ecd,edf->ecf", rows, self.up)), self.down)
        x = x + torch.einsum("tec,ecd->td", dispatch * weight[:, None, None], made)
        balance = (shares.mean(dim=0) * chosen.to(x.dtype).mean(dim=0)).sum() * 4
        logits = self.head(x.unflatten(0, ids.shape).mean(dim=1))
        return Output(F.cross_entropy(logits, labels) + 0.01 * balance, logits)


class Speech(nn.Module):
    """A convolution and a recurrent layer, aligned by CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cell = nn.Conv1d(8, 32, 3, stride=2, padding=1), nn.LSTM(32, 16, bidirectional=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, sound: Tensor, labels: Tensor, lengths: Tensor) -> Output:
        states, _ = self.cell(F.relu(self.conv(sound)).permute(2, 0, 1))
        scores = self.head(states).log_softmax(-1)
        heard = torch.full((sound.shape[0],), scores.shape[0])
        return Output(F.ctc_loss(scores, labels, heard, lengths, zero_infinity=True), scores)


class ForceField(nn.Module):
    """Energies of atoms by their distances; forces are the gradient of the energy, and in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.score = nn.Embedding(10, 16), nn.Linear(16, 1)
        self.message = nn.Sequential(nn.Linear(24, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 16))
        self.register_buffer("centres", torch.linspace(0, 3, 8))

    def forward(self, places: Tensor, kinds: Tensor, energy: Tensor, forces: Tensor) -> Output:
        places = places.requires_grad_(True)
        others = 1 - torch.eye(places.shape[1])
        distance = (places[:, :, None] - places[:, None] + (1 - others)[..., None]).norm(dim=-1)
        radial = torch.exp(-((distance[..., None] - self.centres) ** 2))
        atoms = self.kinds(kinds)
        pairs = torch.cat([atoms[:, None].expand(-1, radial.shape[1], -1, -1), radial], dim=-1)
        made = self.score(atoms + (self.message(pairs) * others[..., None]).sum(2)).squeeze(-1).sum(1)
        pulled = -torch.autograd.grad(made.sum(), places, create_graph=self.training)[0]
        return Output(F.mse_loss(made, energy) + F.l1_loss(pulled, forces), pulled)


class Burgers(nn.Module):
    """Physics-informed: the residual of a differential equation, with second derivatives of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inside: Tensor, border: Tensor) -> Output:
        inside = inside.detach().clone().requires_grad_(True)
        u = self.net(inside)
        first = torch.autograd.grad(u.sum(), inside, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), inside, create_graph=True)[0]
        residual = first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second[:, 0]
        return Output(residual.square().mean() + self.net(border).square().mean(), u)


class Critic(nn.Module):
    """Wasserstein GAN with a penalty on the critic's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 768), nn.Unflatten(1, (3, 16, 16)), nn.Tanh())
        self.critic = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.2),
                                    nn.AvgPool2d(2), nn.ConvTranspose2d(8, 8, 2, 2), nn.GroupNorm(2, 8), nn.Softplus(),
                                    nn.MaxPool2d(2), nn.Conv2d(8, 1, 3, 2, 1))

    def forward(self, real: Tensor, noise: Tensor, shares: Tensor) -> Output:
        made = self.generator(noise)
        between = (shares * real + (1 - shares) * made.detach()).requires_grad_(True)
        said = self.critic(between)
        slope = torch.autograd.grad(said, between, torch.ones_like(said), create_graph=True)[0]
        penalty = ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        return Output(self.critic(made).mean() - self.critic(real).mean() + 10 * penalty, made)


class MetaLearner(nn.Module):
    """MAML: the loss after two steps of descent of each task, whose gradients are differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, seen: Tensor, told: Tensor, asked: Tensor, answers: Tensor) -> Output:
        losses = []
        for task in range(2):
            weights: dict[str, Tensor] = dict(self.net.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(torch.func.functional_call(self.net, weights, (seen[task],)), told[task])
                slopes = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
                weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
            losses.append(F.mse_loss(torch.func.functional_call(self.net, weights, (asked[task],)), answers[task]))
        return Output(torch.stack(losses).sum(), torch.stack(losses))


class Policy(nn.Module):
    """PPO's losses with torch.distributions; a parameter called as an op is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.Tanh())
        self.mean, self.value, self.choice = nn.Linear(32, 4), nn.Linear(32, 1), nn.Linear(32, 5)
        self.std = nn.Parameter(torch.zeros(4))

    def forward(self, seen: Tensor, done: Tensor, chosen: Tensor, advantage: Tensor, earned: Tensor) -> Output:
        state = self.body(seen)
        moves = torch.distributions.Normal(self.mean(state), self.std.exp())
        kinds = torch.distributions.Categorical(logits=self.choice(state))
        said = moves.log_prob(done).sum(-1)
        ratio = torch.exp(said - said.detach() - 0.1)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage).mean()
        prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
        far = torch.distributions.kl_divergence(moves, prior).sum(-1).mean()
        entropy = moves.entropy().sum(-1).mean() + kinds.entropy().mean()
        error = F.mse_loss(self.value(state).squeeze(-1), earned)
        return Output(0.5 * error - gain - 0.01 * entropy - 0.1 * kinds.log_prob(chosen).mean() + 0.01 * far, said)


class Ensemble(nn.Module):
    """Members run at once by torch.vmap of a functional call; all pairs of their answers by two more."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, left: Tensor, right: Tensor) -> Output:
        named = [dict(member.named_parameters()) for member in self.members]
        weights = {name: torch.stack([each[name] for each in named]) for name in named[0]}
        first = self.members[0]
        made = torch.vmap(lambda w, x: torch.func.functional_call(first, w, (x,)), in_dims=(0, None))(weights, left)
        distance = torch.vmap(torch.vmap(lambda a, b: ((a - b) ** 2).sum(), (None, 0)), (0, None))(made[0], made[1])
        return Output(made.var(0).mean() + distance.mean() + F.mse_loss(made.mean(0), right[:, :8]), made)


class Quantised(nn.Module):
    """VQ-VAE: nearest codes, straight through, and codes that follow as moving averages in buffers."""

    codes: Tensor
    size: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 4, 2, 1))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))
        for name, value in (("codes", torch.randn(32, 8)), ("size", torch.ones(32)), ("average", torch.randn(32, 8))):
            self.register_buffer(name, value)

    def forward(self, image: Tensor, labels: Tensor) -> Output:
        z = self.encoder(image).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 8)
        far = (flat**2).sum(1, keepdim=True) + (self.codes**2).sum(1) - 2 * flat @ self.codes.t()
        places = torch.zeros_like(far).scatter_(1, far.argmin(dim=1).unsqueeze(1), 1)
        near = (places @ self.codes).view(z.shape)
        if self.training:
            size = self.size * 0.99 + 0.01 * places.sum(0)
            total = size.data.sum()
            self.size = (size + 1e-5) / (total + 32e-5) * total
            self.average = self.average * 0.99 + 0.01 * (places.t() @ flat.detach())
            self.codes = self.average / self.size.unsqueeze(1)
        made = self.decoder((z + (near - z).detach()).permute(0, 3, 1, 2))
        return Output(F.mse_loss(made, image) + 0.25 * F.mse_loss(near.detach(), z), made)


class Contrast(nn.Module):
    """Two views: MoCo's queue of keys in a buffer, SimCLR's and Barlow Twins' losses written in place."""

    queue: Tensor
    place: Tensor
    slow: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.short = nn.Linear(24, 16)
        self.register_buffer("queue", F.normalize(torch.randn(16, 32), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.register_buffer("slow", torch.randn(16, 24) * 0.1)

    def forward(self, left: Tensor, right: Tensor) -> Output:
        n = left.shape[0]
        q, other = (F.normalize(self.encoder(x) + self.short(x), dim=1) for x in (left, right))
        with torch.no_grad():
            self.slow.mul_(0.9).add_(self.short.weight, alpha=0.1)
            k = F.normalize(F.linear(right, self.slow), dim=1)
        found = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], dim=1) / 0.2
        with torch.no_grad():
            self.queue[:, (self.place + torch.arange(n)) % 32] = k.t()
            self.place[0] = (self.place[0] + n) % 32
        both = torch.cat([q, other])
        equivalent = (both @ both.t() / 0.5).fill_diagonal_(float("-inf"))
        pairs = F.cross_entropy(equivalent, (torch.arange(2 * n) + n) % (2 * n))
        a, b = ((x - x.mean(0)) / x.std(0) for x in (q, other))
        shared = a.t() @ b / n
        twins = torch.diagonal(shared).add_(-1).pow_(2).sum() + shared.flatten()[:-1].view(15, 17)[:, 1:].pow(2).sum()
        return Output(F.cross_entropy(found, torch.zeros(n, dtype=torch.long)) + pairs + 0.01 * twins, found)


class Labeller(nn.Module):
    """A conditional random field: all sequences of labels by a loop of logsumexp, of lengths by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(12, 5)
        self.steps, self.start, self.end = (nn.Parameter(torch.randn(*shape) * 0.1) for shape in ((5, 5), (5,), (5,)))

    def forward(self, words: Tensor, labels: Tensor, there: Tensor) -> Output:
        scores, labels, there = self.score(words).transpose(0, 1), labels.t(), there.t()
        rows = torch.arange(labels.shape[1])
        path = self.start[labels[0]] + scores[0, rows, labels[0]]
        total = self.start + scores[0]
        for i in range(1, len(labels)):
            path = path + (self.steps[labels[i - 1], labels[i]] + scores[i, rows, labels[i]]) * there[i]
            longer = torch.logsumexp(total.unsqueeze(2) + self.steps + scores[i].unsqueeze(1), dim=1)
            total = torch.where(there[i].unsqueeze(1), longer, total)
        path = path + self.end[labels[there.long().sum(0) - 1, rows]]
        return Output((torch.logsumexp(total + self.end, dim=1) - path).sum() / there.float().sum(), scores)


class Scan(nn.Module):
    """Mamba by hand: a selective scan as a loop over the sequence, after a causal depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.wide = nn.Embedding(VOCABULARY, 24), nn.Linear(24, 64, bias=False)
        self.conv = nn.Conv1d(32, 32, 4, groups=32, padding=3)
        self.select, self.step = nn.Linear(32, 20, bias=False), nn.Linear(4, 32)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1, 9).float().repeat(32, 1)))
        self.skip, self.narrow, self.head = nn.Parameter(torch.ones(32)), nn.Linear(32, 24), nn.Linear(24, NUM_CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        x, gate = self.wide(self.embedding(ids)).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[:, :, : ids.shape[1]].transpose(1, 2))
        step, into, out = self.select(x).split([4, 8, 8], dim=-1)
        step = F.softplus(self.step(step))
        kept = torch.exp(torch.einsum("bld,dn->bldn", step, -torch.exp(self.log_decay)))
        given = torch.einsum("bld,bln,bld->bldn", step, into, x)
        state, seen = torch.zeros_like(kept[:, 0]), []
        for i in range(ids.shape[1]):
            state = kept[:, i] * state + given[:, i]
            seen.append(torch.einsum("bdn,bn->bd", state, out[:, i]))
        x = (torch.stack(seen, dim=1) + x * self.skip) * F.silu(gate)
        logits = self.head(self.narrow(x).mean(1))
        return Output(F.cross_entropy(logits, labels), logits)
