"""Four ideas about depth in one file that needs torch alone: copy it into a notebook.

A model is its layers and an order, such as [0, 1, 1, 2], which says what runs. A loop names a layer
twice. Growing gives each entry a copy of its own. A recurrent model runs its core as often as told,
and small steps loop a model that never learned to. `python depth.py` tries each on puzzles: w7 bw
fb says that w is 7, b stands for w, and f for b, so ?f is 7. A token is a pair without a position,
and only a question sees others, the statements. So it takes a layer for each alias, and one for the
value. A model learns one and two aliases before it gets three."""
import copy
import torch
from torch import nn

NAMES, VALUES, QUESTION, MEANINGS = 36, 8, 36, 44   # a pair: a name or ?, then a name or value


class Block(nn.Module):
    "One layer: it reads the residual stream (B, T, C) and adds to it, in heads of 32 channels."
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width)
        self.out, expand = nn.Linear(width, width), nn.Linear(width, 4 * width)
        self.mlp = nn.Sequential(nn.RMSNorm(width), expand, nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        asks = torch.arange(x.shape[1]) >= x.shape[1] // 2      # a row's second half are questions
        sees = asks[:, None] & ~asks | torch.eye(len(asks), dtype=torch.bool)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class LM(nn.Module):
    def __init__(self, vocab, layers, width, answers=None):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, answers or vocab, bias=False)

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
    "Retrofit: prelude, r times the core, coda. (In retrofit.py s begins as noise, times zeros.)"
    def __init__(self, model, prelude, core, coda):
        super().__init__()
        self.model, self.prelude, self.core, self.coda = model, prelude, core, coda
        C = model.embed.embedding_dim
        self.adapter = nn.Linear(2 * C, C, bias=False)
        self.adapter.weight.data = torch.eye(C).repeat(1, 2)

    def forward(self, tokens, r, state=None):
        e = self.model.run(self.model.embed(tokens), self.prelude)
        s = torch.zeros_like(e) if state is None else state
        for _ in range(r):
            s = self.model.run(self.adapter(torch.cat((s, e), dim=-1)), self.core)
        return self.model.head(self.model.norm(self.model.run(s, self.coda)))


def looped(model, tokens, a, b, K, beta=0.5):
    "Layers a to b of a frozen model in K steps of length 1/K, then back towards the plain output."
    x = model.run(model.embed(tokens), range(a))
    plain = model.run(x, range(a, b + 1))
    for _ in range(K):
        x = x + (model.run(x, range(a, b + 1)) - x) / K
    x = beta * plain + (1 - beta) * x
    return model.head(model.norm(model.run(x, range(b + 1, len(model.layers)))))


def puzzles(rows, aliases):
    "Four names have values, each later one stands for the fourth before it, and all are asked for."
    names = torch.rand(rows, NAMES).argsort(dim=1)[:, :4 * aliases + 4]
    values = torch.rand(rows, VALUES).argsort(dim=1)[:, :4]
    statements = MEANINGS * names + torch.cat((NAMES + values, names[:, :-4]), dim=1)
    return torch.cat((statements, MEANINGS * QUESTION + names), 1), values.repeat(1, aliases + 1)


def guesser(tokens):
    "Question i asks for the name of statement i. It copies that one's value, else takes any value."
    given = tokens[:, :NAMES, None] % MEANINGS == NAMES + torch.arange(VALUES)
    return 2.0 * given + given.any(dim=1, keepdim=True)


def train(model, steps, tasks, rate=4e-3):
    "Each step draws one of the tasks: the most aliases, and what else the model is told."
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
    for step in range(steps):
        optimizer.param_groups[0]['lr'] = rate * min(1, (step + 1) / 50, 3 * (1 - step / steps))
        aliases, told = tasks[int(torch.randint(len(tasks), ()))]
        tokens, answers = puzzles(32, aliases)
        logits = model(tokens, **told)[:, answers.shape[1]:]
        nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def show(what, model, **told):
    "Print the share of right answers, of 1,024 for each number of aliases. A tie counts in part."
    tokens, answers = puzzles(256, aliases=8)
    scores = model(tokens, **told)[:, -NAMES:]
    right = (1e6 * scores).softmax(-1).gather(-1, answers[..., None])       # of the best score
    shares = right.view(256, 9, 4).mean((0, 2))
    print(f'{what:41}', *(f'{share:4.0%}' for share in shares), flush=True)


def main(steps=600, seed=0):
    torch.manual_seed(seed)
    show('chance, 0 to 8 aliases (wait 2 minutes)', guesser)
    tokens, order = puzzles(8, aliases=8)[0], [0, 1, 1, 2]
    small = LM(MEANINGS * (QUESTION + 1), layers=3, width=64, answers=VALUES)
    sides = torch.randn(QUESTION + 1, 1, 64) + torch.randn(MEANINGS, 64)
    small.embed.weight = nn.Parameter(sides.flatten(0, 1), requires_grad=False)     # as drawn
    train(small, steps, [(1, {}), (2, {})])
    show('three layers', small)
    loop, grown = copy.deepcopy(small), untie(small, order)
    print('growing is untied looping:', torch.equal(grown(tokens), small(tokens, order)))
    for what, model, told in (('  trained on, with three aliases too', small, {}),
                              ('  trained on so, with layer 1 twice', loop, dict(order=order)),
                              ('  trained on so, grown to four layers', grown, {})):
        train(model, 2 * steps // 5, [(1, told), (2, told), (3, told)])
        show(what, model, **told)
    show('that one, with layer 1 twice, untrained', grown, order=[0, 1, 1, 2, 3])
    show('  with layers 1 and 2 twice', grown, order=[0, 1, 2, 1, 2, 3])
    show('  in two half steps', lambda t: looped(grown, t, 1, 2, K=2, beta=0))
    show('  in those, and half of the way back', lambda t: looped(grown, t, 1, 2, K=2))
    print('K = 1 is plain:', torch.allclose(looped(grown, tokens, 1, 2, 1), grown(tokens), 0, 1e-4))
    core = Recurrent(copy.deepcopy(grown), prelude=[0], core=[1], coda=[2, 3])
    print('a core run once, untrained, is its parent:', torch.equal(core(tokens, 1), grown(tokens)))
    train(core, 3 * steps // 5, [(r + 2, dict(r=r)) for r in (1, 2, 3, 4)], rate=2e-3)
    for r in (1, 2, 3, 4, 6):
        show(f'retrofitted, r = {r}', core, r=r)
    print('Not shown: growing better than the loop, or small steps that clearly gain an alias.')


if __name__ == '__main__':
    main()
