"""Every picture: rows of numbers in, PNG out.

The idea: a picture is a grid of panels, and a panel holds curves (the mean over the seeds, a shade
from the lowest to the highest) or a heat map. Each function below says what each panel shows.

Usage:
    show(path, draw_runs, {'baseline': [read_log('out/baseline')]})
"""
import itertools
import math
import os
from pathlib import Path

from common.files import fresh
from common.options import from_text
from report.runs import growths, kinds_of, measured
from report.tables import grouped, in_percent, mean, where

COLOURS = ['#3b6fb6', '#d1495b', '#2e8b57', '#e08e1b', '#7b5aa6', '#4f4f4f', '#17a2b8', '#c45ab3',
           '#8c6d31', '#9aa0a6']


def picture(path=None):
    "A field for the path of a picture: .png unless it says another, so that T1.0 and T1.5 are two."
    def with_ending(text):
        path = Path(text)
        known = not path.name or path.suffix in ('.png', '.pdf', '.svg', '.csv')
        return path if known else path.with_name(f'{path.name}.png')
    return from_text(with_ending, default=path and Path(path))


def show(path, draw, *what):
    "Draw, and print where the picture is, or that matplotlib is missing."
    path = path if path.suffix in ('.png', '.pdf', '.svg') else path.with_suffix('.png')
    try:
        with fresh(path) as file:
            draw(*what).savefig(file, dpi=130, format=path.suffix[1:])
    except ImportError:
        print('no picture: matplotlib is not installed (pip install matplotlib)')
    else:
        print(f'picture: {path}')


# -------------------------------------------------------------------------- panels, curves and maps

def figure(rows, columns, size, maps=False, **shared):
    "A matplotlib figure that needs no screen, and its axes as a grid."
    os.environ['MPLBACKEND'] = 'agg'        # whatever it says: a picture goes into a file
    from matplotlib.figure import Figure
    fig = Figure(figsize=size, layout='constrained')
    axes = fig.subplots(rows, columns, squeeze=False, **shared)
    for ax in () if maps else axes.flat:
        ax.grid(alpha=0.25)
        ax.spines[['top', 'right']].set_visible(False)
    return fig, axes


def curve(ax, rows, x, y, colour, label, factor=1, shade=True, by=None, **style):
    """The mean of the rows at each x (of its seeds), or at each value of `by`, and a shade from the
    lowest to the highest."""
    rows, by = [row for row in rows if y in row], by or x
    points = [where(rows, **{by: at}) for at in sorted({row[by] for row in rows})]
    xs = [mean([row[x] for row in seeds]) for seeds in points]
    values = [[factor * row[y] for row in seeds] for seeds in points]
    ax.plot(xs, list(map(mean, values)), color=colour, label=label,
            **dict(marker='o', ms=3) | style)
    if shade and any(len(seeds) > 1 for seeds in values):
        ax.fill_between(xs, list(map(min, values)), list(map(max, values)), color=colour,
                        alpha=0.15, lw=0)


def scale(kind):
    return 100 if in_percent(kind) else 1


def say_kind(ax, kind, title=False):
    "What a panel shows: a loss, or a share of right answers, from 0 to 100%."
    text = f'{kind} (%)' if in_percent(kind) else kind
    ax.set_title(text, fontsize=10) if title else ax.set_ylabel(text)
    if in_percent(kind):
        ax.set_ylim(-3, 103)


def heat(ax, cells, down, across, title, **style):
    "A map of {(y, x): value}, `down` and `across` the labels of its rows and columns."
    image = ax.imshow([[cells.get((y, x), math.nan) for x in across] for y in down], **style)
    ax.set_facecolor('#cccccc')
    ax.set_title(title, fontsize=9)
    return image


# -------------------------------------------------------------------------------- training, growing

def draw_runs(groups):
    """groups: {name: [one log per seed]}. One run: its losses above, its kinds of answers below.
    Several runs: a row for the validation loss, and one for each kind. Against steps, and against
    FLOPs, because a step costs more in a deeper model. Dotted lines show where a model grew."""
    logs = [log for group in groups.values() for log in group]
    kinds, alone = kinds_of(logs), len(logs) == 1
    skills = [kind for kind in kinds if kind != 'text']
    losses = dict(loss='validation')
    if 'text' in kinds:
        losses['text'] = 'validation, text alone'
    panels = [list(losses), skills] if alone else [['loss'], *([kind] for kind in skills)]
    panels = list(filter(None, panels))
    fig, axes = figure(len(panels), 2, (11, 1 + (3.1 if alone else 2.3) * len(panels)),
                       sharex='col', sharey='row')
    for row, shown in zip(axes, panels):
        for ax, x in zip(row, ('step', 'flops')):
            if alone and shown[0] == 'loss':
                trained = [line for line in logs[0] if 'loss' in line]
                ax.plot([line[x] for line in trained], [line['loss'] for line in trained],
                        color='#bbbbbb', lw=1, label='training')
            lines = zip(COLOURS * 9, itertools.product(groups, shown))
            for colour, (name, kind) in lines:
                curve(ax, measured(groups[name]), x, kind, colour,
                      losses.get(kind, kind) if alone else name, scale(kind), lw=2,
                      marker='' if kind in losses else 'o')
                for line in growths(groups[name][0]) if kind == shown[0] else ():
                    ax.axvline(line[x], color='#888888' if alone else colour, ls=':', lw=1.3,
                               zorder=0)
                    if alone and kind == 'loss':
                        ax.text(line[x], 1, f' {line.get("depth", line["n_layer"])} layers',
                                color='#666666', fontsize=8, va='bottom', ha='center',
                                transform=ax.get_xaxis_transform())
        row[0].set_ylabel('loss (nats a token)' if shown[0] == 'loss' else
                          'answers right (%)' if alone else f'{shown[0]}: answers right (%)')
        row[0].legend(frameon=False, fontsize=9)
        if shown[0] != 'loss':
            row[0].set_ylim(-3, 103)
    axes[-1][0].set_xlabel('steps')
    axes[-1][1].set_xlabel('training FLOPs')
    fig.suptitle(', '.join(groups) + (f' ({len(logs)} runs)' if len(logs) > len(groups) else ''))
    return fig


def draw_origins(pictures):
    """pictures: {operator: [the order of each growth]}. One row per growth, one cell per layer;
    number and colour say which layer of the stage before it copies; a frame marks new layers."""
    deepest = max(len(order) for orders in pictures.values() for order in orders)
    stages = max(map(len, pictures.values()))
    fig, axes = figure(len(pictures), 1,
                       (1.5 + 0.3 * deepest, (1.1 + 0.3 * stages) * len(pictures)), maps=True)
    for ax, (name, orders) in zip(axes[:, 0], pictures.items()):
        cells = {(y, x): source / (max(order) or 1) for y, order in enumerate(orders)
                 for x, source in enumerate(order)}
        heat(ax, cells, range(len(orders)), range(deepest), name, cmap='viridis', vmin=-0.1,
             vmax=1.3, aspect='auto')
        ax.set_facecolor('white')
        for y, x in cells:
            source, new = orders[y][x], orders[y][x] in orders[y][:x]
            ax.text(x, y, source, ha='center', va='center', fontsize=8, color='white',
                    weight='bold' if new else 'normal')
            if new:
                ax.add_patch(ax.patch.__class__((x - 0.46, y - 0.44), 0.92, 0.88, fill=False,
                                                edgecolor='#d1495b', lw=1.8))
        ax.set_yticks(range(len(orders)), [f'{max(order) + 1} to {len(order)}' for order in orders])
        ax.set(xticks=[], ylabel='layers')
        ax.spines[:].set_visible(False)
    axes[-1, 0].set_xlabel('layer, from the embedding (left) to the head (right); framed: new')
    return fig


# ----------------------------------------------------------------------------- looping, recurrences

def draw_repetitions(rows, kinds, block):
    """rows: {run, start, times, a number for each kind}. One column per run, one row per kind; a
    line for each number of times, against the position where the repeated block begins."""
    groups = grouped(rows)
    fig, axes = figure(len(kinds), len(groups), (1 + 2.6 * len(groups), 0.8 + 2.3 * len(kinds)),
                       sharex='col', sharey='row')
    for column, (name, mine) in zip(axes.T, groups.items()):
        for ax, kind in zip(column, kinds):
            for colour, k in zip(['#4f4f4f', *COLOURS], dict.fromkeys(r['times'] for r in mine)):
                style = dict(marker='', ls='--') if k == 1 else {}
                curve(ax, where(mine, times=k), 'start', kind, colour,
                      'as it is' if k == 1 else f'{k} times', scale(kind), shade=False, **style)
            ax.xaxis.get_major_locator().set_params(integer=True)
        column[0].set_title(name, fontsize=10)
        column[-1].set_xlabel(f'first of the {block} layers')
    for ax, kind in zip(axes[:, 0], kinds):
        say_kind(ax, kind)
        if kind == 'loss':      # a repeated first layer ruins a model: keep the rest in sight
            ordinary = [row['loss'] for row in where(rows, times=1)]
            ax.set_ylim(min(ordinary) - 0.15, max(ordinary) + 1.5)
    axes[0, 0].legend(frameon=False, fontsize=8)
    return fig


def draw_tradeoffs(rows, kinds):
    """The mean accuracy over the kinds against unique parameters, inference FLOPs and training
    FLOPs."""
    fig, axes = figure(1, 3, (13, 4), sharey=True)
    skills = [kind for kind in kinds if kind != 'loss']
    labels = dict(params='unique parameters', inference_flops='inference FLOPs a token',
                  training_flops='training FLOPs')
    for ax, (key, label) in zip(axes[0], labels.items()):
        for colour, row in zip(COLOURS * 9, rows):
            y = 100 * mean([row[kind] for kind in skills]) if skills else row['loss']
            ax.scatter(row[key], y, color=colour, s=70, label=row['run'],
                       marker='s' if row['unique'] < row['depth'] else 'o')
        ax.set_xlabel(label)
        ax.set_xlim(0)
    axes[0][0].set_ylabel('answers right, mean of the kinds (%)' if skills
                          else 'loss (nats a token)')
    axes[0][2].legend(frameon=False, fontsize=9, loc='center left', bbox_to_anchor=(1, 0.5),
                      title='square: looped')
    return fig


def draw_recurrences(rows, kinds):
    """rows: {run, r, effective_params, a number for each kind}. One column per kind, against
    recurrences above and effective parameters below, one line per run; an ordinary model (r = 0)
    is a dotted line."""
    fig, axes = figure(2, len(kinds), (1.5 + 3.2 * len(kinds), 5.6), sharey='col', sharex='row')
    xs = dict(r='recurrences', effective_params='effective parameters of the layers')
    for panels, kind in zip(axes.T, kinds):
        for ax, (x, label) in zip(panels, xs.items()):
            for colour, (name, mine) in zip(COLOURS * 9, grouped(rows).items()):
                if mine[0]['r']:
                    curve(ax, mine, x, kind, colour, name, scale(kind), shade=False, ms=4)
                else:
                    level = scale(kind) * mean([row[kind] for row in mine])
                    ax.axhline(level, color=colour, ls=':', label=name)
            ax.set_xscale('log', base=2)
            ax.set_xlabel(label)
        say_kind(panels[0], kind, title=True)
    axes[0][0].legend(frameon=False, fontsize=8)
    return fig


def draw_shots(rows, x):
    """rows: {line, task, shots, examples, accuracy, low, high, chance}. One panel per task:
    accuracy against the number of shots, or of fine-tuning examples, one line per run; dotted:
    chance."""
    tasks, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ('task', 'line'))
    plain = [name.removeprefix('untied_') for name in names]        # dashed beside its tied twin
    colours = dict(zip(dict.fromkeys(plain), COLOURS * 9))
    fig, axes = figure(1, len(tasks), (3 + 2.8 * len(tasks), 3.6), sharey=True)
    for ax, task in zip(axes[0], tasks):
        for name, twin in zip(names, plain):
            mine = where(rows, line=name, task=task)
            curve(ax, mine, x, 'accuracy', colours[twin], name, 100, shade=False, ms=4,
                  ls='-' if name == twin else '--')
            if len(names) < 5:      # more shades are unreadable
                xs = sorted({row[x] for row in mine})
                low, high = ([100 * pick(row[end] for row in where(mine, **{x: at})) for at in xs]
                             for end, pick in (('low', min), ('high', max)))
                ax.fill_between(xs, low, high, color=colours[twin], alpha=0.1, lw=0)
        ax.axhline(100 * where(rows, task=task)[0]['chance'], color='#888888', ls=':')
        ax.set(title=task, xlabel={'shots': 'shots', 'examples': 'examples fine-tuned on'}[x])
        if x == 'examples':         # 32, 128, 512: evenly, and 0 too
            ticks = sorted({row[x] for row in rows})
            ax.set_xscale('symlog', linthresh=next((t for t in ticks if t), 1), linscale=0.5)
            ax.set_xticks(ticks, list(map(str, ticks)), minor=False)
            ax.minorticks_off()
        ax.set_ylim(-3, 103)
    axes[0][0].set_ylabel('answers right (%)')
    axes[0][-1].legend(frameon=False, fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
    return fig
