"""Four ideas about depth in one file that needs torch alone: copy it into a notebook.

A model owns its layers, and an order such as [0, 1, 2, 1, 2, 3] says which run. A loop names a
layer twice, growing gives each entry a copy of its own, a recurrent model runs its core as often as
it is told, and small steps loop a model that never learned to loop. `python depth.py` shows each on
puzzles, in minutes: w7 bw fb says that w is 7, b stands for w and f for b, so ?f is 7."""
import copy
import torch
from torch import nn


class Block(nn.Module):
    "One layer: it reads the residual stream (B, T, C) and adds to it, in heads of 32 channels."
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def rotate(x):
    "Rotary positions: turn each pair of channels by an angle that grows with the position."
    angles = torch.outer(torch.arange(x.shape[-2]).float(), 10_000.0 ** -(torch.arange(16) / 16))
    cos, sin, (a, b) = angles.cos().to(x), angles.sin().to(x), x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class LM(nn.Module):
    def __init__(self, vocab, layers, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def run(self, x, order):
        for i in order:
            x = self.layers[i](x)
        return x

    def forward(self, tokens, order=None):
        return self.head(self.norm(self.run(self.embed(tokens), order or range(len(self.layers)))))


def untie(model, order):
    "Grow: a model whose layer i is its own copy of layer order[i]. It computes model(x, order)."
    new = copy.deepcopy(model)
    new.layers = nn.ModuleList(copy.deepcopy(model.layers[i]) for i in order)
    return new


class Recurrent(nn.Module):
    "Retrofit: prelude, r times the core, coda. Its adapter begins as (state, input) -> input."
    def __init__(self, model, prelude, core, coda):
        super().__init__()
        self.model, self.prelude, self.core, self.coda = model, prelude, core, coda
        C = model.embed.embedding_dim
        self.adapter = nn.Linear(2 * C, C, bias=False)
        self.adapter.weight.data = torch.cat((torch.zeros(C, C), torch.eye(C)), dim=1)

    def forward(self, tokens, r):
        e = self.model.run(self.model.embed(tokens), self.prelude)
        s = torch.randn_like(e)
        for _ in range(r):
            s = self.model.run(self.adapter(torch.cat((s, e), dim=-1)), self.core)
        return self.model.head(self.model.norm(self.model.run(s, self.coda)))


def looped(model, tokens, a, b, K, beta=0.5):
    "Layers a to b of a frozen model in K steps of length 1/K, then back towards the plain output."
    x = model.run(model.embed(tokens), range(a))
    plain = model.run(x, range(a, b + 1))
    x = x + (plain - x) / K
    for _ in range(K - 1):
        x = x + (model.run(x, range(a, b + 1)) - x) / K
    x = beta * plain + (1 - beta) * x
    return model.head(model.norm(model.run(x, range(b + 1, len(model.layers)))))


def puzzles(rows, depths=(0, 3)):
    "Twelve pairs, then eight questions of alias depths from one to below another; targets or -1."
    names, values = torch.rand(rows, 20).argsort(1)[:, :12], 20 + torch.rand(rows, 4).argsort(1)
    stands_for = torch.cat((values, names[:, :8]), dim=1)       # four values, eight aliases
    mixed = torch.rand(rows, 3, 4).argsort(2) + 4 * torch.arange(3)[:, None]    # within each four
    pairs = torch.stack((names, stands_for), dim=2).take_along_dim(mixed.view(rows, 12, 1), 1)
    which = torch.randint(4 * depths[0], 4 * depths[1], (rows, 8))
    asked, answers = names.gather(1, which), values.gather(1, which % 4)
    questions = torch.stack((torch.full_like(asked, 24), asked, answers), dim=2)
    tokens = torch.cat((pairs.flatten(1), questions.flatten(1)), dim=1)         # (rows, 48)
    place = torch.arange(47)
    return tokens[:, :-1], tokens[:, 1:].where((place > 23) & (place % 3 == 1), -1)


def copies(rows):
    "Rows that repeat themselves: a model that learns to continue them learns to look up."
    period, place = torch.randint(4, 25, (rows, 1)), torch.arange(48)
    tokens = torch.randint(24, (rows, 24)).gather(1, place % period)
    return tokens[:, :-1], tokens[:, 1:].where(place[1:] >= period, -1)


def train(model, steps, rate=2e-3, more=dict):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    for _ in range(steps):
        tokens, targets = map(torch.cat, zip(puzzles(32), copies(32)))
        logits = model(tokens, **more()).flatten(0, 1)
        nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-1).backward()
        optimizer.step()
        optimizer.zero_grad()


def show(what, answer):
    "Print the share of correct answers at each alias depth."
    print(f'{what:53} right, by aliases:', end='', flush=True)
    for depth in range(3):
        tokens, targets = puzzles(128, (depth, depth + 1))
        hits = (answer(tokens).argmax(-1) == targets)[targets != -1]
        print(f' {hits.float().mean():4.0%}', end='' if depth < 2 else '\n')


def main(steps=250):
    torch.manual_seed(0)
    tokens, order = puzzles(8)[0], [0, 1, 0, 1]
    small = LM(vocab=25, layers=2, width=64)        # 20 names, 4 values, a question mark
    train(small, steps)
    show('two layers', small)
    show('a loop: the same two layers, run twice, untrained', lambda t: small(t, order))
    grown = untie(small, order)
    print('growing is untied looping:', torch.equal(grown(tokens), small(tokens, order)))
    train(grown, steps)
    show('grown to four layers, and trained on', grown)
    show('its middle run twice, untrained', lambda t: grown(t, [0, 1, 2, 1, 2, 3]))
    show('its middle in two half steps, half of the way back', lambda t: looped(grown, t, 1, 2, 2))
    one_step = looped(grown, tokens, 1, 2, K=1) - grown(tokens)
    print('K = 1 is the plain model:', bool(one_step.abs().max() < 1e-4))
    core = Recurrent(copy.deepcopy(grown), [0], [1, 2], [3])
    print('untrained, a cut is its parent:', torch.equal(core(tokens, 3), grown(tokens)))
    train(core, steps // 2, 1e-3, more=lambda: dict(r=int(torch.randint(1, 5, ()))))
    for r in (1, 2, 4, 8):
        show(f'retrofitted, its core run {r} times', lambda t: core(t, r))
    print('(copying and elimination give 76% in these rows, so none of this shows learning)')


if __name__ == '__main__':
    main()
