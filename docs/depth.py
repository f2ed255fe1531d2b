"""Four ideas about depth, in one file that needs only torch. You may copy it into a notebook.

A model is its layers and an order, such as [0, 1, 1, 2], which lists the layers that run. A loop
names a layer twice. Growing makes a new layer for each entry of such an order, as a copy. A
retrofit trains a core of layers to run as often as you ask. The wrapper takes small steps through
layers that were never trained to loop. `python depth.py` tries each idea on puzzles. A chain of a
puzzle looks like this:

    w7 bw fb | ?w ?b ?f     w is 7, b is another name for w, and f for b. So all answers are 7:
                            without an alias, with one alias and with two aliases

The model reads each pair as one token, and it knows no positions. A statement sees only itself. A
question sees itself and all statements of its row, so no causal mask is needed. A question holds a
name. In each layer it finds the statement that begins with this name, and then holds what the
statement ends with. So ?f finds fb in the first layer, bw in the second, and w7 in the third. Each
alias takes a layer, and one more layer reads the value. A row has four such chains.

It takes a minute or two. Expect that three layers follow two aliases, and that the loop and the
grown model follow three. If layer 1 of the grown model runs twice, without training, the model
answers about two thirds of the puzzles with four aliases, but 80% instead of 95% of those with
three. The retrofit follows r + 2 aliases for r up to 4, as it was trained to."""
import copy
import torch
from torch import nn

# A pair is two numbers. Left: 0 to 35 is a name, 36 is ?. Right: 0 to 35 a name, 36 to 43 a value.
NAMES, VALUES = 36, 8       # (36 names are four chains of nine, so there are at most eight aliases)
QUESTION = NAMES
HEAD = 32                   # channels of an attention head; the width is a multiple of this


class Block(nn.Module):
    "A layer, which reads the residual stream (B, T, C) and adds to it."
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))

    def forward(self, x):
        T = x.shape[1]
        asks = torch.arange(T, device=x.device) >= T // 2       # the second half are questions
        itself = torch.eye(T, dtype=torch.bool, device=x.device)
        sees = (asks[:, None] & ~asks) | itself         # (T, T): may row i look at column j?
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, -1, HEAD))             # (B, T, 3, H, 32)
        q, k, v = heads.permute(2, 0, 3, 1, 4)                                  # (B, H, T, 32) each
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class LM(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        # These vectors are random and are not trained, because a name only has to be recognized.
        self.left = nn.Embedding(NAMES + 1, width).requires_grad_(False)
        self.right = nn.Embedding(NAMES + VALUES, width).requires_grad_(False)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VALUES, bias=False)

    def embed(self, tokens):
        return self.left(tokens[..., 0]) + self.right(tokens[..., 1])

    def run(self, x, order):
        for item in order:              # the number of a layer, or a Core or a Window (below)
            x = self.layers[item](x) if isinstance(item, int) else item(self.run, x)
        return x

    def forward(self, tokens, order):
        "Turn pairs (B, T, 2) into scores of all values for each question (B, T / 2, VALUES)."
        x = self.run(self.embed(tokens), order)
        return self.head(self.norm(x))[:, tokens.shape[1] // 2:]


def untie(model, order):
    """Return a grown model, whose layer i is a copy of layer order[i]. Until it is trained,
    new(tokens, [0, 1, 2, ...]) equals model(tokens, order)."""
    new = copy.deepcopy(model)
    new.layers = nn.ModuleList(copy.deepcopy(model.layers[i]) for i in order)
    return new


class Core:
    """The core of a retrofit: an item of an order that runs its own items r times. The state s
    begins with zeros. Before each run, the stream e that came in is added to the state.
    (retrofit.py begins with noise, and learns how to mix the state and e.)"""
    def __init__(self, items, r):
        self.items, self.r = items, r

    def __call__(self, run, e):
        s = torch.zeros_like(e)
        for _ in range(self.r):
            s = run(s + e, self.items)
        return s


class Window:
    """The window of the wrapper. What its items g add, g(x) - x, is one step of length 1. K steps
    of length 1/K end near the same point, but each step reads what the step before it has written.
    The result is then mixed with the plain output, which the later layers were trained on. Its
    share is beta."""
    def __init__(self, items, K, beta=0.5):
        self.items, self.K, self.beta = items, K, beta

    def __call__(self, run, x):
        plain = run(x, self.items)
        x = x + (plain - x) / self.K                # the first small step reuses `plain`
        for _ in range(self.K - 1):
            x = x + (run(x, self.items) - x) / self.K
        return self.beta * plain + (1 - self.beta) * x


def puzzle(aliases):
    "Return a row: the statements and questions of four chains of names, and the answers."
    names, values = torch.randperm(NAMES).tolist(), torch.randperm(VALUES).tolist()
    statements, questions, answers = [], [], []
    for value in values[:4]:
        meaning = NAMES + value                                 # of the first name of the chain
        for _ in range(aliases + 1):
            name = names.pop()
            statements.append((name, meaning))
            questions.append((QUESTION, name))
            answers.append(value)
            meaning = name                                      # the next name is an alias for it
    return statements + questions, answers


def puzzles(rows, aliases):
    "Return the tokens (rows, T, 2) and the answers (rows, T / 2) of some rows."
    tokens, answers = zip(*(puzzle(aliases) for _ in range(rows)))
    return torch.tensor(tokens), torch.tensor(answers)


def train(model, steps, tasks, rate=4e-3):
    "Train a model. Each step draws a task: the number of aliases, and the order that runs."
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
    for step in range(steps):
        # the learning rate rises for 50 steps, is constant, and falls over the last third
        share = min((step + 1) / 50, 1, 3 * (1 - step / steps))
        optimizer.param_groups[0]['lr'] = rate * share
        aliases, order = tasks[torch.randint(len(tasks), ()).item()]
        tokens, answers = puzzles(32, aliases)
        scores = model(tokens, order)
        nn.functional.cross_entropy(scores.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def show(what, model, order):
    """Print the shares of right answers, in 1,024 chains of nine names, which are longer than those
    in training. (A guess among the four values of a row is right 25% of the time, and a guess among
    all eight values 12%.)"""
    tokens, answers = puzzles(256, aliases=8)
    right = model(tokens, order).argmax(-1) == answers          # (256, 36): four chains of nine
    shares = right.view(256, 4, 9).float().mean((0, 1))
    print(f'{what:41}', *(f'{share:4.0%}' for share in shares), flush=True)


def main(steps=600, seed=0):
    torch.manual_seed(seed)
    print(f'{"right, by aliases (a guess: 25%)":41}', *(f'{n:4}' for n in range(9)), flush=True)
    three, repeated, four = [0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 3]
    small = LM(layers=3, width=64)
    train(small, steps, [(1, three), (2, three)])
    show('three layers', small, three)
    loop, grown = copy.deepcopy(small), untie(small, repeated)
    tokens, _ = puzzles(8, aliases=8)
    print('growing is untied looping:', torch.equal(grown(tokens, four), loop(tokens, repeated)))
    for what, model, order in (('  trained further: up to three aliases', small, three),
                               ('  same training, layer 1 twice: a loop', loop, repeated),
                               ('  same training, grown to four layers', grown, four)):
        train(model, 2 * steps // 5, [(1, order), (2, order), (3, order)])
        show(what, model, order)
    show('the grown one, layer 1 twice, untrained', grown, [0, 1, 1, 2, 3])
    show('  layers 1 and 2 twice', grown, [0, 1, 2, 1, 2, 3])
    show('  wrapped: 1 and 2 in two half steps', grown, [0, Window([1, 2], K=2, beta=0), 3])
    show('  wrapped: and then halfway back', grown, [0, Window([1, 2], K=2), 3])
    retrofitted = copy.deepcopy(grown)
    once = [0, Core([1], r=1), 2, 3]
    same = torch.equal(retrofitted(tokens, once), grown(tokens, four))
    print('a core that runs once is its parent:', same)
    # With r runs of the core, this order is r + 3 layers deep, which is enough for r + 2 aliases.
    tasks = [(r + 2, [0, Core([1], r), 2, 3]) for r in (1, 2, 3, 4)]
    # half the rate, because the model is trained already
    train(retrofitted, 3 * steps // 5, tasks, rate=2e-3)
    for r in (1, 2, 3, 4, 6):
        show(f'retrofitted, r = {r}', retrofitted, [0, Core([1], r), 2, 3])


if __name__ == '__main__':
    main()
