"""Panels of curves and of heat maps: rows that a probe measured, runs side by side.

Usage:
    show(draw_curves, (rows, ('depth', None), ['change'], groups, {}, 'title'), path)
    show(draw_maps, (rows, ('erased', 'observed', 'change', 'setting'), groups, 'title'), path)
"""
import math

from report.logs import mean
from report.plot import COLOURS, figure


def draw_curves(what):
    """(rows, (x, panel key or None), values, groups, labels, title): a column a value, a row a
    panel, a line a group: the mean of its seeds, the shade from the lowest to the highest."""
    rows, (x, panel), values, groups, labels, title = what
    # interventions: a dotted line for the model as it is
    asis = [row for row in rows if panel == 'size' and row['size'] == 0]
    rows = [row for row in rows if row not in asis]
    cells = ([(value, at) for at in dict.fromkeys(row[panel] for row in rows) for value in values]
             if panel else [(value, None) for value in values])
    across = len(values) if panel else min(4, len(values))
    fig, axes = figure(-(-len(cells) // across), across,
                       (1 + 3.3 * across, 0.8 + 2.5 * -(-len(cells) // across)))
    for ax, (value, at) in zip(axes.flat, cells):
        for colour, (group, names) in zip(COLOURS * 9, groups.items()):
            mine = [row for row in rows if row['run'] in names and value in row
                    and (panel is None or row[panel] == at)]
            xs = sorted({row[x] for row in mine})
            ys = [[row[value] for row in mine if row[x] == place] for place in xs]
            ax.plot(xs, list(map(mean, ys)), color=colour, marker='o', ms=3,
                    label=labels.get(group, group))
            ax.fill_between(xs, list(map(min, ys)), list(map(max, ys)), color=colour, alpha=0.15,
                            lw=0)
            if mine and [row for row in asis if row['run'] in names]:
                ax.axhline(mean([row[value] for row in asis if row['run'] in names]), color=colour,
                           ls=':', lw=1)
        ax.set_title(value if panel is None else f'{value}, {panel} {at:g}' if isinstance(at, float)
                     else f'{value}, {at}', fontsize=9)
        ax.grid(alpha=0.25)
        ax.spines[['top', 'right']].set_visible(False)
        ticks = sorted({row[x] for row in rows if panel is None or row[panel] == at})
        ax.set_xticks(ticks[::-(-len(ticks) // 8)],
                      [f'{tick:g}' for tick in ticks[::-(-len(ticks) // 8)]])
        ax.set_xlabel('first of these layers (by depth, from 0)' if x == 'start'
                      else 'layer (by depth, from 0)', fontsize=8)
        if 'cosine' in value:
            ax.axhline(0, color='#888888', lw=0.8)
    for ax in axes.flat[len(cells):]:
        ax.axis('off')
    axes[0][0].legend(frameon=False, fontsize=8)
    fig.suptitle(title, fontsize=11)
    return fig


def draw_maps(what):
    """(rows, (down, right, value, panel key or None), groups, title): a panel a group and setting,
    one colour scale for all groups of a setting."""
    rows, (down, right, value, panel), groups, title = what
    panels = list(dict.fromkeys(row[panel] for row in rows)) if panel else [None]
    fig, axes = figure(len(panels), len(groups), (1.4 + 3 * len(groups), 0.9 + 2.7 * len(panels)))
    for line, at in zip(axes, panels):
        maps = []
        for group, names in groups.items():
            mine = [row for row in rows if row['run'] in names
                    and (panel is None or row[panel] == at)]
            n = 1 + int(max((max(row[down], row[right]) for row in mine), default=0))
            cells = {}
            for row in mine:
                cells.setdefault((int(row[down]), int(row[right])), []).append(row[value])
            maps.append([[mean(cells[i, j]) if (i, j) in cells else math.nan for j in range(n)]
                         for i in range(n)])
        signed = value == 'cosine'
        shown = [v for m, of in zip(maps, groups) for i, line_ in enumerate(m)
                 for j, v in enumerate(line_) if not math.isnan(v) and not (signed and i == j)]
        top = max([*map(abs, shown), 0.2 if signed else 1e-9])
        for ax, of, group in zip(line, maps, groups):
            if len(of) == 1 and math.isnan(of[0][0]):
                ax.axis('off')          # this setting does not exist for this model
                continue
            image = ax.imshow(of, cmap='RdBu_r' if signed else 'viridis',
                              vmin=-top if signed else 0, vmax=top)
            ax.set_title(group if panel is None else f'{group}: {at}', fontsize=8)
            ax.set_xlabel(f'{right} layer' if right != 'other' else 'layer', fontsize=8)
            ax.set_ylabel(f'{down} layer' if down != 'layer' else 'layer', fontsize=8)
            for axis in (ax.xaxis, ax.yaxis):
                axis.get_major_locator().set_params(integer=True)
        fig.colorbar(image, ax=line, pad=0.01, label=value)
    fig.suptitle(title, fontsize=11)
    return fig
