"""Pictures of rows of numbers. A picture is a grid of panels, and a panel holds a
heat map or curves. A curve is the mean over the seeds, with a shade from the lowest to the highest.
Usage: show(path, draw_runs, {'baseline': [log_of('out/baseline')]}, ['loss'])
"""
import itertools
import math
import os

from nanodepth.common.files import fresh
from nanodepth.report.logs import growths, measured
from nanodepth.report.tables import beside, grouped, mean, where

COLOURS = ['#3b6fb6', '#d1495b', '#2e8b57', '#e08e1b', '#7b5aa6', '#4f4f4f', '#17a2b8', '#c45ab3',
           '#8c6d31', '#9aa0a6']
PICTURES = '.png', '.pdf', '.svg'


def show(path, draw, *what):
    "Draw, and print where the picture is, or that matplotlib is missing."
    path = path if path.suffix in PICTURES else beside(path, '.png')
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
    import matplotlib
    matplotlib.rcParams['text.parse_math'] = False      # a run may be called $x$
    from matplotlib.figure import Figure
    fig = Figure(figsize=size, layout='constrained')
    axes = fig.subplots(rows, columns, squeeze=False, **shared)
    for ax in () if maps else axes.flat:
        ax.grid(alpha=0.25)
        ax.spines[['top', 'right']].set_visible(False)
    return fig, axes


def curve(ax, rows, x, y, colour, label, factor=1, by=None, **style):
    """The mean of the rows at each x (of its seeds), and a shade from the lowest to the highest.
    by: the column in which the rows of a point are equal, if x is not."""
    rows = [row for row in rows if y in row]
    points = [where(rows, **{by or x: at}) for at in sorted({row[by or x] for row in rows})]
    xs = [mean([row[x] for row in seeds]) for seeds in points]
    values = [[factor * row[y] for row in seeds] for seeds in points]
    ax.plot(xs, list(map(mean, values)), color=colour, label=label,
            **dict(marker='o', ms=3) | style)
    if any(len(seeds) > 1 for seeds in values):
        ax.fill_between(xs, list(map(min, values)), list(map(max, values)), color=colour,
                        alpha=0.15, lw=0)


def cells_of(rows, down, right, value):
    "{(row of a map, column): the mean over the seeds}"
    cells = {}
    for row in rows:
        if value in row:
            cells.setdefault((row[down], row[right]), []).append(row[value])
    return {cell: mean(seeds) for cell, seeds in cells.items()}


# -------------------------------------------------------------------------------- training, growing

COSTS = dict(step='steps', flops='training FLOPs', tokens='tokens')


def draw_runs(groups, kinds, costs=('step', 'flops'), like=None):
    """groups: {name: [one log per seed]}. A row for the loss or a kind of answers, a column for a
    cost. The loss begins where the warm-up ends. Dotted lines show where a model became deeper.
    like: {name: the run whose colour it has}, dashed if that is another one."""
    like = like or {name: name for name in groups}
    colours = dict(zip(dict.fromkeys(like.values()), COLOURS * 9))
    size = (4 * len(costs), 0.8 + 2.7 * len(kinds))
    fig, axes = figure(len(kinds), len(costs), size, sharex='col', sharey='row')
    for name, logs in groups.items():
        style = dict(colour=colours[like[name]], lw=2, ls='-' if like[name] == name else '--',
                     label=f'{name} ({len(logs)} seeds)' if len(logs) > 1 else name)
        for line, kind in zip(axes, kinds):
            for ax, cost in zip(line, costs):
                curve(ax, measured(logs), cost, kind, factor=1 if kind == 'loss' else 100,
                      by='step', **style)
                for grown in growths(logs[0]):
                    ax.axvline(grown[cost], color=style['colour'], ls=':', lw=1.3, zorder=0)
    for (first, *_), kind in zip(axes, kinds):
        first.set_ylabel('validation loss (nats per token)' if kind == 'loss' else
                         f'{kind}: % right')
        first.set_ylim(*limits(groups) if kind == 'loss' else (-3, 103))
    for ax, cost in zip(axes[-1], costs):
        ax.set_xlabel(COSTS[cost])
    fig.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, fontsize=9, ncols=1,
               handlelength=4, loc='outside lower center')      # names may be whole lines
    return fig


def limits(groups):
    "Of the validation losses after the warm-up; None, None if there are none."
    after = [line['val_loss'] for logs in groups.values() for log in logs for line in log
             if math.isfinite(line.get('val_loss', math.nan)) and line['step'] >= warmed_up(log)]
    room = 0.03 * (max(after) - min(after)) if after else 0
    return (min(after) - room, max(after) + room) if room else (None, None)


def warmed_up(log):
    "The first step with the highest learning rate."
    rates = {line['step']: line['lr'] for line in log if 'lr' in line}
    return max(rates, key=rates.get, default=0)


# ---------------------------------------------------------------------------- ways, and the probes

def draw_curves(rows, x, panel, values, labels, title, axis, ticks=None):
    """A column per value, a row per panel (`panel` names its column, or is None), a line per run.
    A row without an x is the model as it is: a dotted line. `ticks` says what an x is called."""
    at = list(dict.fromkeys(row[panel] for row in rows if row[x] is not None)) if panel else [None]
    cells = list(itertools.product(at, values))
    across = len(values) if panel else min(4, len(values))
    down = -(-len(cells) // across)
    fig, axes = figure(down, across, (1 + 3.3 * across, 0.8 + 2.5 * down))
    for ax, (place, value) in zip(axes.flat, cells):
        here = [row for row in rows if panel is None or row[x] is None or row[panel] == place]
        for colour, (group, group_rows) in zip(COLOURS * 9, grouped(here).items()):
            points = [row for row in group_rows if row[x] is not None and value in row]
            level = [row[value] for row in group_rows if row[x] is None and value in row]
            name = labels.get(group, group)
            if points:
                curve(ax, points, x, value, colour, name)
            if level:
                ax.axhline(mean(level), color=colour, ls=':', lw=1, label=None if points else name)
        named = f'{panel} {place:g}' if isinstance(place, (int, float)) else place
        ax.set_title(value if panel is None else f'{value}, {named}', fontsize=9)
        places = sorted({row[x] for row in here} - {None})
        places = places[::-(-len(places) // 8)] if places and not ticks else places
        ax.set_xticks(places, [ticks[at] if ticks else f'{at:g}' for at in places],
                      **dict(fontsize=7, rotation=30, ha='right') if ticks else {})
        ax.set_xlabel(axis, fontsize=8)
        if 'cosine' in value:
            ax.axhline(0, color='#888888', lw=0.8)
    for ax in axes.flat[len(cells):]:
        ax.axis('off')
    axes[0][0].legend(frameon=False, fontsize=8)
    fig.suptitle(title, fontsize=11)
    return fig


def draw_maps(rows, down, right, value, panel, title):
    """Maps of a value over two columns of the rows, `down` and `right`. A panel for each run and
    each setting (`panel` is their column, or None), a colour scale for each setting."""
    groups = grouped(rows)
    settings = list(dict.fromkeys(row[panel] for row in rows)) if panel else [None]
    # several models: one column each; of one model the settings stand side by side
    shape = (len(settings), len(groups)) if len(groups) > 1 else (1, len(settings))
    fig, axes = figure(*shape, (1.4 + 3.3 * shape[1], 0.9 + 2.7 * shape[0]), maps=True)
    for line, setting in zip(axes if len(groups) > 1 else axes.T, settings):
        maps = {group: cells_of(where(group_rows, **{panel: setting} if panel else {}), down,
                                right, value) for group, group_rows in groups.items()}
        values = {at: v for cells in maps.values() for at, v in cells.items()}
        if value == 'cosine':       # a layer equals itself: the diagonal is beyond the scale
            top = max([0.2, *(abs(v) for (i, j), v in values.items() if i != j)])
            style = dict(cmap='RdBu_r', vmin=-top, vmax=top)
        else:
            style = dict(cmap='viridis', vmin=0, vmax=max([1e-9, *map(abs, values.values())]))
        for ax, (group, cells) in zip(line, maps.items()):
            if not cells:
                ax.axis('off')          # this setting does not exist for this model
                continue
            layers = range(1 + int(max(max(at) for at in cells)))
            image = ax.imshow([[cells.get((y, x), math.nan) for x in layers] for y in layers],
                              **style)
            ax.set_title(group if panel is None else f'{group}: {setting}', fontsize=9)
            ax.set_xlabel('layer' if right == 'other' else f'{right} layer', fontsize=8)
            ax.set_ylabel('layer' if down == 'layer' else f'{down} layer', fontsize=8)
            for axis in (ax.xaxis, ax.yaxis):
                axis.get_major_locator().set_params(integer=True)
        fig.colorbar(image, ax=line, pad=0.01, label=value,
                     extend='max' if value == 'cosine' else 'neither')
    fig.suptitle(title, fontsize=11)
    return fig
