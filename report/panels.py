"""The pictures of the wrapper and of the probes: rows of numbers in, PNG out.

Usage:
    show(path, draw_sweep, rows, ['loss', 'toy_assign/4'])
"""
import itertools
import math

from report.plot import COLOURS, curve, figure, heat
from report.tables import Metric, grouped, in_percent, mean, where

# -------------------------------------------------------------------------------------- the wrapper

def draw_little(rows, methods):
    """rows: {seed, method, K, error}: the error against K on logarithmic axes; the shade spans the
    seeds, the dots are no loop."""
    fig, [[ax]] = figure(1, 1, (7, 4.4))
    for colour, name in zip(COLOURS, methods):
        curve(ax, where(rows, method=name), 'K', 'error', colour, name, ms=4)
    ax.axhline(mean([row['error'] for row in where(rows, method='no loop')]), color='black',
               ls=':', label='no loop')
    Ks = sorted({row['K'] for row in rows})
    ax.set(xscale='log', yscale='log', xticks=Ks, xticklabels=Ks,
           xlabel='K, how often the window is run', ylabel='mean squared error',
           title='A network trained without loops, its middle run K times')
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=9)
    return fig


def draw_landscape(what):
    """little.little_landscape: one panel per K. The colour is the loss if the window ends at a
    point, the marks show where it ends."""
    from matplotlib.colors import LogNorm
    fig, [axes] = figure(1, len(what['ends']), (1 + 4 * len(what['ends']), 4.2), maps=True,
                         sharex=True, sharey=True)
    styles = ('white', 'x'), (COLOURS[1], 'o'), ('#f2b134', '^'), ('#c9a7ff', 's')
    for ax, (K, ends) in zip(axes, what['ends'].items()):
        image = ax.pcolormesh(what['x'], what['y'], what['loss'], norm=LogNorm(), cmap='viridis',
                              rasterized=True)
        for (name, points), (colour, mark) in zip(ends.items(), styles):
            ax.scatter(*points[::2].T, s=14, c=colour, marker=mark, linewidths=0.8,
                       edgecolors=None if mark == 'x' else 'black', label=name)
        ax.set(title=f'K = {K}', xlabel='first number behind the window')
    axes[0].set_ylabel('second number behind the window')
    axes[0].legend(fontsize=8, loc='best')
    fig.colorbar(image, ax=axes, label='median squared error from there')
    return fig


def draw_sweep(rows, kinds):
    """rows: {run, window, setting, kind: gain}. One row of panels per kind, one column per
    run; windows to the right, settings below each other. Blue is a gain, red a loss, grey not run
    or not a number; the scale ends at the largest gain, since a loss has no bound."""
    groups = grouped(rows)
    spans = {w: list(map(int, w.split('-'))) for w in dict.fromkeys(r['window'] for r in rows)}
    windows = sorted(spans, key=lambda w: (spans[w][1] - spans[w][0], spans[w][0]))
    settings = list(dict.fromkeys(row['setting'] for row in rows))
    fig, axes = figure(len(kinds), len(groups), (4 + (1 + 0.42 * len(windows)) * len(groups),
                                                 1 + (0.8 + 0.3 * len(settings)) * len(kinds)),
                       maps=True)
    for panels, kind in zip(axes, kinds):
        # gains below show as whole numbers
        unit, says = dict(nats=(1000, ' in 1/1000'), score=(1, ''),
                          share=(100, ' in points'))[Metric.of(kind).unit]
        maps = {group: {(s, w): unit * mean([row[kind] for row in where(mine, setting=s, window=w)])
                        for s in settings for w in windows
                        if any(kind in row for row in where(mine, setting=s, window=w))}
                for group, mine in groups.items()}
        finite = [v for cells in maps.values() for v in cells.values() if math.isfinite(v)]
        sizes = sorted(map(abs, finite)) or [0]
        top = max(*finite, sizes[len(sizes) // 4], {100: 5, 1000: 2, 1: 1e-6}[unit])
        for ax, (group, cells) in zip(panels, maps.items()):
            image = heat(ax, cells, settings, windows, f'{group}: {kind}, gain{says}', cmap='RdBu',
                         vmin=-top, vmax=top, aspect='auto')
            for (s, w), v in cells.items():
                ax.text(windows.index(w), settings.index(s),
                        f'{v:+.0f}' if unit > 1 else f'{v:+.2g}', ha='center', va='center',
                        fontsize=6,
                        color='white' if math.isfinite(v) and abs(v) > 0.6 * top else 'black')
            ax.set_xticks(range(len(windows)), windows, fontsize=7, rotation=60)
            ax.set_yticks(range(len(settings)), settings if ax is panels[0] else [], fontsize=7)
        fig.colorbar(image, ax=panels, pad=0.01)
    for ax in axes[-1]:
        ax.set_xlabel('window looped', fontsize=8)
    return fig


def draw_windows(rows, kinds):
    """rows as above, of every window. A row of maps a kind, a column a run and setting: first layer
    downwards, last layer to the right."""
    panels = [(f'{group}: {setting}', where(mine, setting=setting))
              for group, mine in grouped(rows).items()
              for setting in dict.fromkeys(row['setting'] for row in mine)
              if len(where(mine, setting=setting)) > 1]         # the recipe has one window alone
    fig, axes = figure(len(kinds), len(panels), (1 + 3.1 * len(panels), 0.6 + 2.9 * len(kinds)),
                       maps=True)
    for y, (line, kind) in enumerate(zip(axes, kinds), 1):
        gains = [row[kind] for row in rows if kind in row and math.isfinite(row[kind])]
        top = max(*gains, 0.05 if in_percent(kind) else 0.002)
        for ax, (title, mine) in zip(line, panels):
            cells = {}
            for row in mine:
                cells.setdefault(tuple(map(int, row['window'].split('-'))), []).append(row[kind])
            layers = range(1 + max(b for _, b in cells))
            image = heat(ax, {cell: mean(seeds) for cell, seeds in cells.items()}, layers, layers,
                         f'{title}: {kind}', cmap='RdBu', vmin=-top, vmax=top)
            ax.set(xlabel='last layer' if y == len(kinds) else '', ylabel='first layer')
        fig.colorbar(image, ax=line, pad=0.01, label='gain')
    return fig


def draw_ways(rows, kinds, chance):
    """rows: {seed, run, way, added, kind: a share, or the loss on text}. A row of panels a kind, a
    column a model, a line a way of adding depth."""
    models = list(dict.fromkeys(row['run'] for row in rows))
    ways = [way for way in dict.fromkeys(row['way'] for row in rows) if way != 'ordinary']
    fig, axes = figure(len(kinds), len(models), (1 + 2.7 * len(models), 0.8 + 2.6 * len(kinds)),
                       sharey='row')
    for y, (line, kind) in enumerate(zip(axes, kinds), 1):
        for x, (ax, model) in enumerate(zip(line, models)):
            plain, factor = where(rows, run=model, way='ordinary'), 1 if kind == 'text' else 100
            ax.axhline(factor * mean([row[kind] for row in plain]), color='black', ls=':',
                       label='as trained')
            if kind != 'text':
                ax.axhline(100 * chance, color='grey', ls='-', lw=0.8, label='chance')
            for colour, way in zip(COLOURS, ways):
                curve(ax, where(rows, run=model, way=way), 'added', kind, colour, way, factor,
                      lw=2)
            says = 'loss on text' if kind == 'text' else f'{kind}, %'
            ax.set(title=model if y == 1 else '', ylabel='' if x else says,
                   xlabel='layers added per token' if y == len(kinds) else '')
    axes[0][0].figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, fontsize=9,
                             loc='outside lower center', ncols=9)
    return fig


def draw_exits(rows, kind, chance):
    """rows: {seed, run, by, at, layers, recurrences, kind: a share}. Above, answers against layers
    run a token, a line a rule; below, how many recurrences it takes until states stand still."""
    models = list(dict.fromkeys(row['run'] for row in rows))
    fig, axes = figure(2, len(models), (1 + 3.2 * len(models), 5.6), sharey='row', sharex='row')
    for x, (above, below, model) in enumerate(zip(*axes, models)):
        above.axhline(100 * chance, color='grey', lw=0.8, label='chance')
        for colour, by in zip(COLOURS, dict.fromkeys(row['by'] for row in rows)):
            mine = where(rows, run=model, by=by)
            curve(above, mine, 'layers', kind, colour, by, 100, by='at', lw=2)
            if by == 'latent':
                curve(below, mine, 'at', 'recurrences', colour, by, lw=2)
        above.set(title=model, xlabel='layers run per token', ylabel='' if x else f'{kind}, %')
        below.set(xscale='log', xlabel='its state moves by less than this share',
                  ylabel='' if x else 'recurrences until then')
        ticks = sorted({row['at'] for row in where(rows, by='latent')})
        below.set_xticks(ticks, [f'{at:g}' for at in ticks])
        below.minorticks_off()
    fig.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, ncols=9,
               loc='outside lower center')
    return fig


def draw_lines(rows, x, kinds, chance, axes):
    """rows: {seed, run, x, kind: a number}. A panel a kind, a line a run. kinds:
    {kind: its name on the axis}; chance: {kind: what guessing gives}; axes: as matplotlib's set."""
    fig, [panels] = figure(1, len(kinds), (1 + 3.4 * len(kinds), 3.4))
    for ax, (kind, says) in zip(panels, kinds.items()):
        factor = 100 if says.endswith('%') else 1
        if kind in chance:
            ax.axhline(factor * chance[kind], color='grey', lw=0.8, label='chance')
        for colour, (run, mine) in zip(COLOURS, grouped(rows).items()):
            curve(ax, mine, x, kind, colour, run, factor, lw=2)
        ax.set(ylabel=says, **axes)
        ax.minorticks_off()
    fig.legend(*panels[-1].get_legend_handles_labels(), frameon=False, ncols=9,
               loc='outside lower center')
    return fig


# --------------------------------------------------------------------------------------- the probes

def draw_curves(rows, x, panel, values, labels, title):
    """A column per value, a row per panel (`panel` names its column, or is None), a line per run.
    Interventions of size 0 are the model as it is: a dotted line."""
    plain = where(rows, size=0) if panel == 'size' else []
    rows = [row for row in rows if row not in plain]
    at = list(dict.fromkeys(row[panel] for row in rows)) if panel else [None]
    cells = list(itertools.product(at, values))
    across = len(values) if panel else min(4, len(values))
    down = -(-len(cells) // across)
    fig, axes = figure(down, across, (1 + 3.3 * across, 0.8 + 2.5 * down))
    for ax, (place, value) in zip(axes.flat, cells):
        here = where(rows, **{panel: place}) if panel else rows
        for colour, (group, mine) in zip(COLOURS * 9, grouped(here).items()):
            curve(ax, mine, x, value, colour, labels.get(group, group))
            level = [row[value] for row in grouped(plain).get(group, []) if value in row]
            if level:
                ax.axhline(mean(level), color=colour, ls=':', lw=1)
        named = f'{panel} {place:g}' if isinstance(place, float) else place
        ax.set_title(value if panel is None else f'{value}, {named}', fontsize=9)
        ticks = sorted({row[x] for row in here})
        ticks = ticks[::-(-len(ticks) // 8)]
        ax.set_xticks(ticks, [f'{tick:g}' for tick in ticks])
        ax.set_xlabel('first of these layers (by depth, from 0)' if x == 'start'
                      else 'layer (by depth, from 0)', fontsize=8)
        if 'cosine' in value:
            ax.axhline(0, color='#888888', lw=0.8)
    for ax in axes.flat[len(cells):]:
        ax.axis('off')
    axes[0][0].legend(frameon=False, fontsize=8)
    fig.suptitle(title, fontsize=11)
    return fig


def draw_maps(rows, down, right, value, panel, title):
    "A panel per run and setting (`panel`: its column, or None), one colour scale per setting."
    groups = grouped(rows)
    at = list(dict.fromkeys(row[panel] for row in rows)) if panel else [None]
    down_, across = (len(at), len(groups)) if len(groups) > 1 else (1, len(at))
    fig, axes = figure(down_, across, (1.4 + 3.3 * across, 0.9 + 2.7 * down_), maps=True)
    axes = axes if len(groups) > 1 else axes.T          # one model: its settings side by side
    signed = value == 'cosine'
    for line, place in zip(axes, at):
        maps = {}
        for group, mine in groups.items():
            cells = {}
            for row in where(mine, **{panel: place}) if panel else mine:
                cells.setdefault((int(row[down]), int(row[right])), []).append(row[value])
            maps[group] = {cell: mean(seeds) for cell, seeds in cells.items()}
        # a layer equals itself: the diagonal must not set the scale
        shown = [abs(v) for cells in maps.values() for (i, j), v in cells.items()
                 if not (signed and i == j)]
        top = max([*shown, 0.2 if signed else 1e-9])
        for ax, (group, cells) in zip(line, maps.items()):
            if not cells:
                ax.axis('off')          # this setting does not exist for this model
                continue
            layers = range(1 + max(max(cell) for cell in cells))
            image = heat(ax, cells, layers, layers, group if panel is None else f'{group}: {place}',
                         cmap='RdBu_r' if signed else 'viridis', vmin=-top if signed else 0,
                         vmax=top)
            ax.set_facecolor('white')
            ax.set_xlabel('layer' if right == 'other' else f'{right} layer', fontsize=8)
            ax.set_ylabel('layer' if down == 'layer' else f'{down} layer', fontsize=8)
            for axis in (ax.xaxis, ax.yaxis):
                axis.get_major_locator().set_params(integer=True)
        fig.colorbar(image, ax=line, pad=0.01, label=value)
    fig.suptitle(title, fontsize=11)
    return fig
