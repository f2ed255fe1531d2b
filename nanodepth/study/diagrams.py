"""The diagrams of README.md and COURSE.md, drawn from the orders and the solvers themselves.

The idea: a layer is a tile, and its colour says whose weights it has. So a plain, a grown, a
looped, a recurrent and a wrapped model differ by their rows of tiles, and the rows are the lists
that the code runs. The time line is what the wrapper's solvers really do, on a field of one number.

Usage:
    nanodepth results --diagrams        # docs/assets/tiles.png and three others: seconds
"""
import torch

from nanodepth.grow import lidas, midas
from nanodepth.loop import parse_loop
from nanodepth.model import ModelConfig
from nanodepth.report.plot import figure, show
from nanodepth.retrofit import Recurrent
from nanodepth.wrapper import pick_solver

# eight colours that differ in brightness, too
TILES = ['#1f4e8c', '#3f8fd2', '#7cc4e8', '#2b8a5e', '#8fcf6b', '#f2c14e', '#e8833a', '#c0392b']
INK, DARK, PALE = '#222222', '#555555', '#777777'


def canvas(width, height, columns, rows):
    "A white page with a grid to draw on: x to the right, y down. Readable at a phone's width."
    fig, [[ax]] = figure(1, 1, (width, height), maps=True)
    ax.set(xlim=(0, columns), ylim=(rows, 0))
    ax.axis('off')
    return fig, ax


def tile(ax, x, y, colour, text, copied=False):
    from matplotlib.patches import FancyBboxPatch
    ax.add_patch(FancyBboxPatch(
        (x + 0.07, y + 0.07), 0.86, 0.86, boxstyle='round,pad=0,rounding_size=0.12', fc=colour,
        ec=INK if copied else colour, lw=2.5 if copied else 1, ls='--' if copied else '-'))
    bright = sum(int(colour[i:i + 2], 16) * w for i, w in ((1, .3), (3, .6), (5, .1))) > 140
    ax.text(x + 0.5, y + 0.52, text, ha='center', va='center', fontsize=15, weight='bold',
            color=INK if bright else 'white')


def row(ax, y, order, copies=()):
    for x, i in enumerate(order):
        tile(ax, x, y, TILES[i], str(i), copied=x in copies)


def say(ax, x, y, text, size=13, colour=INK, **more):
    ax.text(x, y, text, fontsize=size, color=colour, va='center', **more)


def draw_tiles():
    "Eight layer evaluations, five kinds of model."
    fig, ax = canvas(7, 6.1, 8, 9.9)
    grown = lidas(6, 2)                                     # the last growth, from six layers
    first = [lidas(4, 2)[i] for i in grown]                 # which of the first four each was
    recurrent = Recurrent(ModelConfig(n_layer=8, n_embd=8, n_head=1), [0, 1], [4, 5], [6, 7],
                          mean=2)
    rows = [
        ('plain', [*range(8)], 'eight layers, each with weights of its own'),
        ('grown', first, 'began as four layers; copies of middle ones, trained apart'),
        ('looped', parse_loop('1-2x3-1'), 'four layers; the middle two run three times'),
        ('recurrent', recurrent.order,
         'a core that runs r times, here twice; layers 2 and 3 dropped'),
        ('wrapped', [*range(8)], 'a frozen model; layers 2 to 5 run K times, then blended')]
    for k, (name, order, about) in enumerate(rows):
        y = 1.9 * k + 0.35 * (name == 'wrapped')        # below the row before it stand two words
        say(ax, 0.05, y + 0.3, name, 15, weight='bold')
        say(ax, 1.6, y + 0.32, about, 12.5, DARK)
        for x, i in enumerate(order):
            tile(ax, x, y + 0.6, TILES[i], str(x if name == 'grown' else i))
        brackets = dict(recurrent=[(2, 4, 'first run'), (4, 6, 'second run')],
                        wrapped=[(2, 6, '× K')])
        for a, b, text in brackets.get(name, []):
            ax.plot([a + 0.07, b - 0.07], [y + 1.57] * 2, color=INK, lw=2)
            say(ax, (a + b) / 2, y + 1.83, text, 12.5, ha='center')
    return fig


def draw_growth():
    "MIDAS and LIDAS from eight layers to twelve, with blocks of four."
    fig, ax = canvas(8.4, 4.6, 12, 6.4)
    say(ax, 0.05, 0.3, 'before: eight layers in two blocks of four', 14)
    row(ax, 0.6, range(8))
    for y, name, operator, about in (
            (2.2, 'MIDAS', midas, 'copies a whole block: the earlier of the middle two'),
            (4.3, 'LIDAS', lidas, 'copies the four layers around the middle')):
        order = operator(8, 4)
        copies = [x for x in range(len(order)) if order[x] in order[:x]]
        say(ax, 0.05, y + 0.3, name, 16, weight='bold')
        say(ax, 1.9, y + 0.32, about, 13, PALE)
        row(ax, y + 0.65, order, copies=copies)
    say(ax, 0.05, 6.25, 'dashed: a copy, with weights of its own from now on', 12, PALE)
    return fig


def draw_core():
    "A retrofitted model."
    from matplotlib.patches import FancyArrowPatch
    fig, ax = canvas(9.6, 3.6, 13.6, 5.4)
    ax.set_xlim(-1.5, 13.6)

    def arrow(a, b, bend=0, colour=INK):
        ax.add_patch(FancyArrowPatch(a, b, arrowstyle='-|>', mutation_scale=18, lw=2, color=colour,
                                     connectionstyle=f'arc3,rad={bend}'))
    for x, i in ((0.6, 0), (1.6, 1), (6.2, 4), (7.2, 5), (9.6, 6), (10.6, 7)):
        tile(ax, x, 2.2, TILES[i], str(i))
    for x, name in ((1.6, 'prelude'), (7.2, 'core, r times'), (10.6, 'coda')):
        say(ax, x, 3.6, name, 14, ha='center', weight='bold')
    tile(ax, 4.3, 2.2, '#dddddd', 'W')
    say(ax, 4.8, 3.6, 'adapter', 14, ha='center', weight='bold')
    say(ax, -0.3, 2.7, 'tokens', 13, ha='right')
    arrow((-0.2, 2.7), (0.6, 2.7))
    arrow((11.65, 2.7), (12.45, 2.7))
    say(ax, 12.55, 2.7, 'logits', 13)
    arrow((2.7, 2.7), (4.25, 2.7))
    say(ax, 3.3, 2.35, 'e', 14, style='italic')
    arrow((5.3, 2.7), (6.2, 2.7))
    arrow((8.25, 2.7), (9.6, 2.7))
    arrow((8.0, 2.15), (4.8, 2.15), bend=0.45)
    say(ax, 6.4, 0.75, 'the state s', 13, ha='center')
    say(ax, 3.0, 4.6, 'e is mixed in again before each run,\nso the input is not forgotten', 12,
        PALE, ha='left')
    arrow((3.9, 1.35), (4.6, 2.15), colour=PALE)
    say(ax, 3.8, 1.2, 'the first state: noise', 12, PALE, ha='right')
    return fig


def window(x):
    "One pass through a window of layers: x moves by F(x)."
    return x - 1.1 * torch.cos(1.7 * x)


def draw_time(K=4):
    "Where looping a window ends in time, by the real solvers."
    fig, [[ax]] = figure(1, 1, (7.6, 4.6))
    ax.grid(False)
    start = torch.tensor([[1.2]])

    def path(method, **options):
        "The points at which a solver asks for the window, and where it ends."
        asked = []

        def g(x):
            asked.append(x.item())
            return window(x)
        solver, _ = pick_solver(method, K, **options)
        return asked, solver(g, start).item()

    asked, end = path('naive')
    ax.plot(range(K + 1), [*asked, end], 'o-', color='#c0392b', lw=2.5, ms=8)
    ax.text(K, end - 0.08, 'naive: four whole steps,\nfar past time 1', ha='right', va='top',
            fontsize=13, color='#c0392b')
    asked, end = path('euler')
    ax.plot([i / K for i in range(K + 1)], [*asked, end], 's-', color='#2b8a5e', lw=2.5, ms=7)
    ax.annotate('sub-steps:\nfour quarters, to time 1', (1, end), (1.75, end - 0.02), fontsize=13,
                color='#2b8a5e', arrowprops=dict(arrowstyle='-', color='#2b8a5e'), va='center')
    plain = window(start).item()
    _, anchored = path('rk')
    ax.plot(1, plain, 'D', color=INK, ms=9)
    ax.annotate('the plain output, g(x)', (1, plain), (1.75, plain - 0.22), fontsize=13, color=INK,
                arrowprops=dict(arrowstyle='-', color=INK), va='center')
    ax.plot(1, anchored, '*', color='#1f4e8c', ms=20)
    ax.annotate('anchored: half-way back\nto the plain output', (1, anchored),
                (1.75, anchored - 0.12), fontsize=13, color='#1f4e8c', va='center',
                arrowprops=dict(arrowstyle='-', color='#1f4e8c'))
    ax.axvline(1, color=PALE, ls=':', lw=1.5)
    ax.set(xlabel='time: a whole pass through the window is one step of length 1',
           ylabel='the stream (one number)', xticks=range(K + 1))
    ax.xaxis.label.set_size(13)
    ax.yaxis.label.set_size(13)
    ax.tick_params(labelsize=12)
    return fig


def draw_all(folder):
    for name, draw in dict(tiles=draw_tiles, growth=draw_growth, core=draw_core,
                           time=draw_time).items():
        show(folder / f'{name}.png', draw)
