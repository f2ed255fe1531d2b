"""A little network that shows why naive looping explodes and small steps do not.

The idea: 4 numbers become two, pass through a window of three residual layers, and two come out. It
is trained without any loop; then the window is run K times. What the later layers see is a point in
the plane, so one can plot where they were trained.

Paper: "Training-Free Looped Transformers", Figures 2 and 4. It names neither the target nor the
widths: ours are sin(x0 + x1), cos(x2 - x3) and 32 (LOG.md says how much depends on the range of x).

Usage:
    python wrapper.py --toy                         # all of it: the table and both pictures
    rows = little_errors(train_little(seed=0), CURVES, (1, 2, 8))
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from common.columns import columns
from report.plot import draw_landscape, draw_little, show
from report.tables import mean, where, write_csv
from wrapper import pick_solver

# of the pictures: a name, the method behind it and its options
CURVES = {'naive': ('naive', {}), 'uniform': ('uniform', {}), 'sub-steps': ('euler', {}),
          'anchored RK': ('rk', {}), 'anchored RK, T = 2': ('rk', dict(T=2))}
PICTURED = 'naive', 'sub-steps', 'anchored RK'          # in the landscape


class Little(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.pre, self.post = nn.Linear(4, 2), nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, hidden), nn.Tanh(),
                                                  nn.Linear(hidden, 2)) for _ in range(3))

    def window(self, z):
        for layer in self.layers:
            z = z + layer(z)
        return z                                                                    # (N, 2)

    def forward(self, x, solver=None):
        z = self.pre(x)
        return self.post(self.window(z) if solver is None else solver(self.window, z))


def little_data(n, seed):
    x = 2 * torch.rand(n, 4, generator=torch.Generator().manual_seed(seed)) - 1
    return x, torch.stack((torch.sin(x[:, 0] + x[:, 1]), torch.cos(x[:, 2] - x[:, 3])), 1)


def train_little(seed=0, steps=900):
    "The little network, trained on its plain window; takes about a second."
    torch.manual_seed(seed)
    model = Little()
    x, y = little_data(256, seed=1000 + seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@torch.no_grad()
def little_errors(model, methods, Ks, n=400):
    """[{'method', 'K', 'error'}]: mean squared error on fresh data of the network with its window
    looped. methods: {name: (method, options)}."""
    x, y = little_data(n, seed=7)
    rows = [dict(method='no loop', K=1, error=F.mse_loss(model(x), y).item())]
    for name, (method, options) in methods.items():
        for K in Ks:
            solver, _ = pick_solver(method, K, **options)
            rows.append(dict(method=name, K=K, error=F.mse_loss(model(x, solver), y).item()))
    return rows


@torch.no_grad()
def little_landscape(model, Ks, n=200):
    """What the layers behind the window make of every point: {'x', 'y', 'loss' (n, n): the median
    over the data of the squared error if the window ended there, 'ends': {K: {method: where it ends
    (N, 2)}}}."""
    x, y = little_data(n, seed=7)
    z = model.pre(x)
    ends = {}
    for K in Ks:
        ends[K] = {'no loop': model.window(z)}
        for name, (method, options) in CURVES.items():
            if name in PICTURED:
                ends[K][name] = pick_solver(method, K)[0](model.window, z)
    points = torch.cat([p for of_K in ends.values() for p in of_K.values()])
    low, high = points.min(0).values, points.max(0).values
    xs, ys = (torch.linspace(a - 0.05 * (b - a), b + 0.05 * (b - a), n)
              for a, b in zip(low.tolist(), high.tolist()))
    grid = model.post(torch.cartesian_prod(xs, ys))                                 # (n * n, 2)
    loss = torch.stack([(grid - target).square().sum(-1) for target in y]).median(0).values
    return dict(x=xs.numpy(), y=ys.numpy(), loss=loss.view(n, n).T.numpy(),
                ends={K: {name: p.numpy() for name, p in of_K.items()} for K, of_K in ends.items()})


def show_little(out, seeds=4, Ks=(1, 2, 3, 4, 6, 8, 12, 16, 24)):
    "A table, the errors against K, and where the window ends."
    models = [train_little(seed) for seed in range(seeds)]
    rows = [dict(seed=seed, **row) for seed, model in enumerate(models)
            for row in little_errors(model, CURVES, Ks)]
    lines = [['mean squared error', *(f'K = {K}' for K in Ks)]]
    for name in ['no loop', *CURVES]:
        errors = [[row['error'] for row in where(rows, method=name, K=K)] for K in Ks]
        lines.append([name, *(f'{mean(e):.2g} ({min(e):.2g} to {max(e):.2g})' if e else ''
                              for e in errors)])
    print(f'means over {seeds} seeds, and their range')
    print(columns(lines))
    write_csv(rows, out)
    show(out, draw_little, rows, CURVES)
    show(out.with_stem(out.stem + '_landscape'), draw_landscape,
         little_landscape(models[1], (2, 4, 8)))
