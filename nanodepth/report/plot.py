"""Draw rows of numbers. A picture is a grid of panels, and a panel has a heat map or curves. A
curve is the mean over the seeds, with a shade from the lowest to the highest. Usage: show(path,
draw_runs, {'baseline': [log_of('out/baseline')]}, ['loss'])
"""
import itertools
import math

from nanodepth.report.contrasts import mean
from nanodepth.report.logs import growths, measured
from nanodepth.report.tables import beside, grouped, where
from nanodepth.training.checkpoint import whole

COLOURS = 9 * ['#3b6fb6', '#d1495b', '#2e8b57', '#e08e1b', '#7b5aa6', '#4f4f4f', '#17a2b8',
               '#c45ab3', '#8c6d31', '#9aa0a6']
COSTS = dict(step='steps', flops='training FLOPs', tokens='tokens')


def show(path, draw, *what):
    "Draw a picture with draw(*what), and print its path, or that matplotlib is missing."
    path = path if path.suffix in ('.png', '.pdf', '.svg') else beside(path, '.png')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as new:
            draw(*what).savefig(new, dpi=130, format=path.suffix[1:])
    except ImportError:
        print('no picture: matplotlib is not installed (pip install matplotlib)')
    else:
        print(f'picture: {path}')


def figure(rows, columns, size, maps=False, **shared):
    "Return a matplotlib figure that needs no screen, and its axes as a grid."
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
    """Draw the mean over the seeds at each x, and a shade from the lowest to the highest. `by` is
    the column in which the rows of a point are equal, if this is not x."""
    rows = [row for row in rows if y in row]
    points = [where(rows, **{by or x: at}) for at in sorted({row[by or x] for row in rows})]
    xs = [mean([row[x] for row in seeds]) for seeds in points]
    values = [[factor * row[y] for row in seeds] for seeds in points]
    style = dict(marker='o', ms=3) | style
    ax.plot(xs, [*map(mean, values)], color=colour, label=label, **style)
    ax.fill_between(xs, [*map(min, values)], [*map(max, values)], color=colour, alpha=0.15, lw=0)


def draw_runs(groups, kinds, costs=('step', 'flops')):
    """Return a figure with a row of panels for the loss and for each kind of answers, and a column
    for each cost. `groups` is {name: [one log for each seed]}. The axis of the loss is cut to the
    values after the warm-up. Dotted lines show where a model became deeper."""
    size = (4 * len(costs), 0.8 + 2.7 * len(kinds))
    fig, axes = figure(len(kinds), len(costs), size, sharex='col', sharey='row')
    for (line, kind), (i, cost) in itertools.product(zip(axes, kinds), enumerate(costs)):
        for colour, (name, logs) in zip(COLOURS, groups.items()):
            curve(line[i], measured(logs), cost, kind, colour,
                  f'{name} ({len(logs)} seeds)' if len(logs) > 1 else name,
                  factor=1 if kind == 'loss' else 100, by='step', lw=2)
            for grown in growths(logs[0]):
                line[i].axvline(grown[cost], color=colour, ls=':', lw=1.3, zorder=0)
        is_loss = kind == 'loss'
        line[0].set_ylabel('validation loss (nats per token)' if is_loss else f'{kind}: % right')
        line[0].set_ylim(*limits(groups) if is_loss else (-3, 103))
        axes[-1][i].set_xlabel(COSTS[cost])
    fig.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, fontsize=9, ncols=1,
               handlelength=4, loc='outside lower center')      # names may be whole lines
    return fig


def limits(groups):
    "Return limits of an axis for the validation losses after the warm-up, or (None, None)."
    after = []
    for log in sum(groups.values(), []):
        warm = max(log, key=lambda line: line.get('lr', 0), default={}).get('step', 0)
        after += [line['val_loss'] for line in log if line['step'] >= warm
                  and math.isfinite(line.get('val_loss', math.nan))]
    room = 0.03 * (max(after) - min(after)) if after else 0
    return (min(after) - room, max(after) + room) if room else (None, None)


def draw_curves(rows, x, panel, values, title, axis, labels={}):
    """Return a figure with a column of panels for each value, a row of panels for each value of the
    column `panel` (or one row, if it is None), and a curve for each group of runs. A row without an
    x is the model as it is, and is drawn as a dotted line."""
    at = list(dict.fromkeys(row[panel] for row in rows if row[x] is not None)) if panel else [None]
    cells = list(itertools.product(at, values))
    across = len(values) if panel else min(4, len(values))
    down = -(-len(cells) // across)
    fig, axes = figure(down, across, (1 + 3.3 * across, 0.8 + 2.5 * down))
    for ax in axes.flat[len(cells):]:
        ax.axis('off')
    for ax, (place, value) in zip(axes.flat, cells):
        here = [row for row in rows if value in row
                and (panel is None or row[x] is None or row[panel] == place)]
        for colour, (group, group_rows) in zip(COLOURS, grouped(here).items()):
            points = [row for row in group_rows if row[x] is not None]
            name, level = labels.get(group, group), where(group_rows, **{x: None})
            if points:
                curve(ax, points, x, value, colour, name)
            if level:
                ax.axhline(mean([row[value] for row in level]), color=colour, ls=':', lw=1,
                           label=None if points else name)
        named = f'{panel} {place:g}' if isinstance(place, (int, float)) else place
        ax.set_title(value if panel is None else f'{value}, {named}', fontsize=9)
        ax.set_xlabel(axis, fontsize=8)
        places = sorted({row[x] for row in here} - {None})
        places = places[::-(-len(places) // 8) or 1]
        ax.set_xticks(places, [f'{place:g}' for place in places], fontsize=7)
    axes[0][0].legend(frameon=False, fontsize=8)
    fig.suptitle(title, fontsize=11)
    return fig


def draw_maps(rows, down, right, value, panel, title):
    """Return a figure with heat maps of a value over two columns of the rows, `down` and `right`.
    It has a panel for each run and for each value of the column `panel` (or one, if it is None).
    The panels of one value of this column share a colour scale."""
    groups = grouped(rows)
    settings = list(dict.fromkeys(row[panel] for row in rows)) if panel else [None]
    # several models: one column each; of one model the settings stand side by side
    shape = (len(settings), len(groups)) if len(groups) > 1 else (1, len(settings))
    fig, axes = figure(*shape, (1.4 + 3.3 * shape[1], 0.9 + 2.7 * shape[0]), maps=True)
    is_cosine = value == 'cosine'       # a layer equals itself: the diagonal is beyond the scale
    for line, setting in zip(axes if len(groups) > 1 else axes.T, settings):
        maps = {group: {} for group in groups}      # {(row of a map, column): the seeds' values}
        for group, group_rows in groups.items():
            for row in where(group_rows, **{panel: setting} if panel else {}):
                maps[group].setdefault((row[down], row[right]), []).append(row[value])
        top = max([0.2 if is_cosine else 1e-9, *(abs(mean(v)) for cells in maps.values()
                                                 for (i, j), v in cells.items() if i != j)])
        for ax, (group, cells) in zip(line, maps.items()):
            if not cells:
                ax.axis('off')          # this setting does not exist for this model
                continue
            layers = range(1 + max(map(max, cells)))
            image = ax.imshow([[mean(cells.get((y, x), [])) for x in layers] for y in layers],
                              cmap='RdBu_r' if is_cosine else 'viridis', vmax=top,
                              vmin=-top if is_cosine else 0)
            ax.set_title(group if panel is None else f'{group}: {setting}', fontsize=9)
            ax.set_xlabel('layer' if right == 'other' else f'{right} layer', fontsize=8)
            ax.set_ylabel('layer' if down == 'layer' else f'{down} layer', fontsize=8)
            ax.locator_params(integer=True)
        fig.colorbar(image, ax=line, pad=0.01, label=value,
                     extend='max' if is_cosine else 'neither')
    fig.suptitle(title, fontsize=11)
    return fig
