"""Every picture: numbers in (the log.jsonl of one run or of several, or rows that a script
measured), PNG out.

The idea: a loss says how well a model predicts on the average, but a skill comes all at once. So
beside the loss stands the accuracy on each kind of answer that the validation data marks: a
staircase. Everything is drawn against steps, and against FLOPs, because runs of different depth
don't pay the same for a step. No model is opened here.

Usage:
    python nanodepth.py plot out/baseline                     # out/baseline/loss.png
    # both in one picture and one table: out/baseline/compare.png, .csv
    python nanodepth.py plot out/baseline out/lidas
    # runs named NAME-SEED are averaged over their seeds
    python nanodepth.py plot out/toys/* --out=out/toys.png
"""
import math

from report.logs import at_all_seeds, by_seed, growths, kinds_of, mean, pick

COLOURS = ['#3b6fb6', '#d1495b', '#2e8b57', '#e08e1b', '#7b5aa6', '#4f4f4f', '#17a2b8', '#c45ab3',
           '#8c6d31', '#9aa0a6']


def figure(rows, columns, size, **kw):
    "A matplotlib figure that needs no screen, and its axes as a grid."
    from matplotlib.figure import Figure
    fig = Figure(figsize=size, layout='constrained')
    return fig, fig.subplots(rows, columns, squeeze=False, **kw)


def show(draw, what, path):
    "Draw, and say where the picture is; without matplotlib, say that."
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path if path.suffix in ('.png', '.pdf', '.svg') else path.with_suffix('.png')
    try:
        draw(what).savefig(path, dpi=130)
    except ImportError:
        print('no picture: matplotlib is not installed (pip install matplotlib)')
    else:
        print(f'picture: {path}')


def draw_runs(groups):
    """groups: {name: [a log a seed]}. One run alone: its losses above, all its kinds of answers in
    one staircase below. Several: a row for the validation loss, and one for each kind. Lines are
    means over the seeds, and the shade around them goes from the lowest to the highest. A dotted
    line: here a model grew."""
    logs = [log for group in groups.values() for log in group]
    kinds, alone = kinds_of(logs), len(logs) == 1
    skills = [kind for kind in kinds if kind != 'text']
    rows = [['loss'], skills] if alone else [['loss'], *([kind] for kind in skills)]
    rows = [row for row in rows if row]
    fig, axes = figure(len(rows), 2, (11, 1 + (3.1 if alone else 2.3) * len(rows)), sharex='col',
                       sharey='row')

    def line(ax, x, group, value, **style):
        xs, values = zip(*at_all_seeds(group, x, value))
        drawn, = ax.plot(xs, list(map(mean, values)), lw=2, **style)
        if len(group) > 1:
            ax.fill_between(xs, list(map(min, values)), list(map(max, values)),
                            color=drawn.get_color(), alpha=0.15, lw=0)

    for row, shown in zip(axes, rows):
        for ax, x in zip(row, ('step', 'flops')):
            colours = iter(COLOURS * 9)
            for name, group in groups.items():
                colour = next(colours)
                if shown == ['loss']:
                    if alone:
                        trained = [entry for entry in group[0] if 'loss' in entry]
                        ax.plot([e[x] for e in trained], [e['loss'] for e in trained],
                                color='#bbbbbb', lw=1, label='training')
                        if 'text' in kinds:
                            line(ax, x, group, pick('text', 'loss'), color=next(colours),
                                 label='validation, text alone')
                    line(ax, x, group, lambda e: e['val_loss'], color=colour,
                         label='validation' if alone else name)
                else:
                    for i, kind in enumerate(shown):
                        line(ax, x, group, lambda e: 100 * pick(kind, 'accuracy')(e),
                             color=colour if i == 0 else next(colours),
                             marker='o', ms=3, label=kind if alone else name)
                for entry in growths(group[0]):
                    ax.axvline(entry[x], color='#888888' if alone else colour, ls=':', lw=1.3,
                               zorder=0)
                    if alone and shown == ['loss']:
                        ax.text(entry[x], 1, f' {entry.get("depth", entry["n_layer"])} layers',
                                color='#666666', fontsize=8, va='bottom',
                                ha='center', transform=ax.get_xaxis_transform())
            ax.grid(alpha=0.25)
            ax.spines[['top', 'right']].set_visible(False)
        row[0].set_ylabel('loss (nats a token)' if shown == ['loss'] else
                          'answers right (%)' if alone else f'{shown[0]}: answers right (%)')
        row[0].legend(frameon=False, fontsize=9)
        if shown != ['loss']:
            row[0].set_ylim(-3, 103)
    axes[-1][0].set_xlabel('steps')
    axes[-1][1].set_xlabel('training FLOPs')
    fig.suptitle(', '.join(groups) + (f' ({len(logs)} runs)' if len(logs) > len(groups) else ''))
    return fig


def draw_origins(pictures):
    """pictures: {operator: [the order of each growth]}. A row a growth, a cell a layer; number and
    colour say which layer of the stage before it is a copy of, and a frame marks the ones that are
    new."""
    deepest = max(len(order) for orders in pictures.values() for order in orders)
    stages = max(map(len, pictures.values()))
    fig, axes = figure(len(pictures), 1,
                       (1.5 + 0.3 * deepest, (1.1 + 0.3 * stages) * len(pictures)))
    for ax, (name, orders) in zip(axes[:, 0], pictures.items()):
        cells = [[i / (max(order) or 1) for i in order] + [float('nan')] * (deepest - len(order))
                 for order in orders]
        ax.imshow(cells, cmap='viridis', vmin=-0.1, vmax=1.3, aspect='auto')
        for y, order in enumerate(orders):
            for x, source in enumerate(order):
                new = source in order[:x]
                ax.text(x, y, source, ha='center', va='center', fontsize=8, color='white',
                        weight='bold' if new else 'normal')
                if new:
                    ax.add_patch(ax.patch.__class__((x - 0.46, y - 0.44), 0.92, 0.88, fill=False,
                                                    edgecolor='#d1495b', lw=1.8))
        ax.set_yticks(range(len(orders)), [f'{max(order) + 1} to {len(order)}' for order in orders])
        ax.set(title=name, xticks=[], ylabel='layers')
        ax.spines[:].set_visible(False)
    axes[-1, 0].set_xlabel('layer, from the embedding (left) to the head (right); framed: new')
    return fig


def draw_repetitions(what):
    """(sweeps, kinds, block): {run: [{'start', 'times', a number for each kind}]}. A column a run
    (the mean of its seeds), a row a kind; against the position where the repeated block begins, a
    line for each number of times."""
    sweeps, kinds, block = what
    groups = by_seed(sweeps)
    fig, axes = figure(len(kinds), len(groups), (1 + 2.6 * len(groups), 0.8 + 2.3 * len(kinds)),
                       sharex='col', sharey='row')
    for column, (name, seeds) in zip(axes.T, groups.items()):
        for ax, kind in zip(column, kinds):
            factor = 1 if kind == 'loss' else 100
            for colour, k in zip(['#4f4f4f', *COLOURS],
                                 dict.fromkeys(row['times'] for row in seeds[0])):
                values = [[factor * row[kind] for row in rows if row['times'] == k]
                          for rows in seeds]
                ax.plot(range(len(values[0])), [mean(at) for at in zip(*values)], color=colour,
                        marker='' if k == 1 else 'o', ms=3,
                        ls='--' if k == 1 else '-', label='as it is' if k == 1 else f'{k} times')
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.grid(alpha=0.25)
            ax.spines[['top', 'right']].set_visible(False)
        column[0].set_title(name, fontsize=10)
        column[-1].set_xlabel(f'first of the {block} layers')
    for ax, kind in zip(axes[:, 0], kinds):
        ax.set_ylabel('loss' if kind == 'loss' else f'{kind} (%)')
        if kind == 'loss':      # a repeated first layer ruins a model: keep the rest in sight
            ordinary = [row['loss'] for rows in sweeps.values() for row in rows if row['times']
                        == 1]
            ax.set_ylim(min(ordinary) - 0.15, max(ordinary) + 1.5)
        else:
            ax.set_ylim(-3, 103)
    axes[0, 0].legend(frameon=False, fontsize=8)
    return fig


def draw_tradeoffs(what):
    """(rows, kinds): the mean accuracy over the kinds against unique parameters, inference FLOPs
    and training FLOPs."""
    rows, kinds = what
    fig, axes = figure(1, 3, (13, 4), sharey=True)
    shapes, skills = {'looped': 's', 'ordinary': 'o'}, [kind for kind in kinds if kind != 'loss']
    for ax, (key, label) in zip(axes[0],
                                (('params', 'unique parameters'),
                                 ('inference_flops', 'inference FLOPs a token'),
                                          ('training_flops', 'training FLOPs'))):
        for colour, row in zip(COLOURS * 9, rows):
            y = 100 * mean([row[kind] for kind in skills]) if skills else row['loss']
            ax.scatter(row[key], y, color=colour, s=70,
                       marker=shapes['looped' if row['unique'] < row['depth'] else 'ordinary'],
                       label=row['run'])
        ax.set_xlabel(label)
        ax.set_xlim(0)
        ax.grid(alpha=0.25)
        ax.spines[['top', 'right']].set_visible(False)
    axes[0][0].set_ylabel('answers right, mean of the kinds (%)' if skills
                          else 'loss (nats a token)')
    axes[0][2].legend(frameon=False, fontsize=9, loc='center left', bbox_to_anchor=(1, 0.5),
                      title='square: looped')
    return fig


def draw_recurrences(what):
    """(rows, kinds, groups): a column a kind, against the recurrences above and against effective
    parameters below, a line for each run (the mean of its seeds); an ordinary model is a dotted
    line."""
    rows, kinds, groups = what
    fig, axes = figure(2, len(kinds), (1.5 + 3.2 * len(kinds), 5.6), sharey='col', sharex='row')
    for panels, kind in zip(axes.T, kinds):
        factor = 1 if kind == 'loss' else 100
        for colour, (name, members) in zip(COLOURS * 9, groups.items()):
            mine = [row for row in rows if row['run'] in members]
            rs = sorted({row['r'] for row in mine})
            ys = [factor * mean([row[kind] for row in mine if row['r'] == r]) for r in rs]
            for ax, xs in zip(panels,
                              (rs,
                               [next(row['effective_params'] for row in mine if row['r'] == r)
                                for r in rs])):
                if rs == [0]:
                    ax.axhline(ys[0], color=colour, ls=':', label=name)
                else:
                    ax.plot(xs, ys, color=colour, marker='o', ms=4, label=name)
        for ax in panels:
            ax.set_xscale('log', base=2)
            ax.grid(alpha=0.25)
            ax.spines[['top', 'right']].set_visible(False)
        panels[0].set_title('loss' if kind == 'loss' else f'{kind} (%)', fontsize=10)
        panels[0].set_xlabel('recurrences')
        panels[1].set_xlabel('effective parameters of the layers')
        if kind != 'loss':
            panels[0].set_ylim(-3, 103)
    axes[0][0].legend(frameon=False, fontsize=8)
    return fig


def draw_shots(what):
    """(rows, x): a panel a task, accuracy against the number of shots, or of examples to fine-tune
    on, a line for each run (the mean of its seeds); dotted: chance."""
    rows, x = what
    tasks, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ('task', 'line'))
    colours = dict(zip(dict.fromkeys(name.removeprefix('untied_') for name in names), COLOURS * 9))
    fig, axes = figure(1, len(tasks), (3 + 2.8 * len(tasks), 3.6), sharey=True)
    for ax, task in zip(axes[0], tasks):
        for name in names:
            colour = colours[name.removeprefix('untied_')]          # dashed beside its tied twin
            mine = [row for row in rows if row['line'] == name and row['task'] == task]
            xs = sorted({row[x] for row in mine})
            cells = [[row for row in mine if row[x] == at] for at in xs]
            ax.plot(xs, [100 * mean([row['accuracy'] for row in cell]) for cell in cells],
                    color=colour, marker='o', ms=4, label=name,
                    ls='--' if name.startswith('untied') else '-')
            if len(names) < 5:      # more shades than that are fog
                ax.fill_between(xs, [100 * min(row['low'] for row in cell) for cell in cells],
                                [100 * max(row['high'] for row in cell) for cell in cells],
                                color=colour, alpha=0.1, lw=0)
        ax.axhline(100 * next(row['chance'] for row in rows if row['task'] == task),
                   color='#888888', ls=':')
        ax.set(title=task, xlabel={'shots': 'shots', 'examples': 'examples fine-tuned on'}[x])
        if x == 'examples':         # 32, 128, 512: evenly, and 0 too
            ticks = sorted({row[x] for row in rows})
            ax.set_xscale('symlog', linthresh=next((t for t in ticks if t), 1), linscale=0.5)
            ax.set_xticks(ticks, list(map(str, ticks)), minor=False)
            ax.minorticks_off()
        ax.set_ylim(-3, 103)
        ax.grid(alpha=0.25)
        ax.spines[['top', 'right']].set_visible(False)
    axes[0][0].set_ylabel('answers right (%)')
    axes[0][-1].legend(frameon=False, fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
    return fig


def draw_little(what):
    """(rows of {seed, method, K, error}, methods): the error against K on logarithmic axes; the
    shade spans the seeds, the dots are no loop."""
    rows, methods = what
    fig, [[ax]] = figure(1, 1, (7, 4.4))
    for colour, name in zip(COLOURS, methods):
        Ks = sorted({row['K'] for row in rows if row['method'] == name})
        values = [[row['error'] for row in rows if (row['method'], row['K']) == (name, K)]
                  for K in Ks]
        ax.plot(Ks, list(map(mean, values)), color=colour, marker='o', ms=4, label=name)
        ax.fill_between(Ks, list(map(min, values)), list(map(max, values)), color=colour,
                        alpha=0.15, lw=0)
    ax.axhline(mean([row['error'] for row in rows if row['method'] == 'no loop']), color='black',
               ls=':', label='no loop')
    ax.set(xscale='log', yscale='log', xticks=Ks, xticklabels=Ks,
           xlabel='K, how often the window is run', ylabel='mean squared error',
           title='A network trained without loops, its middle run K times')
    ax.minorticks_off()
    ax.grid(alpha=0.25)
    ax.spines[['top', 'right']].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    return fig


def draw_landscape(what):
    """little.little_landscape: a panel a K. The colour is the loss that the layers behind the
    window make of a point, the marks are where it ends."""
    from matplotlib.colors import LogNorm
    fig, [axes] = figure(1, len(what['ends']), (1 + 4 * len(what['ends']), 4.2), sharex=True,
                         sharey=True)
    for ax, (K, ends) in zip(axes, what['ends'].items()):
        image = ax.pcolormesh(what['x'], what['y'], what['loss'], norm=LogNorm(), cmap='viridis',
                              rasterized=True)
        for (name, points), (colour, mark) in zip(ends.items(),
                                                  (('white', 'x'), (COLOURS[1], 'o'),
                                                   ('#f2b134', '^'), ('#c9a7ff', 's'))):
            ax.scatter(*points[::2].T, s=14, c=colour, marker=mark, linewidths=0.8,
                       edgecolors=None if mark == 'x' else 'black', label=name)
        ax.set(title=f'K = {K}', xlabel='first number behind the window')
    axes[0].set_ylabel('second number behind the window')
    axes[0].legend(fontsize=8, loc='best')
    fig.colorbar(image, ax=axes, label='median squared error from there')
    return fig


def draw_sweep(what):
    """(rows of {run, window, ..., kind: gain}, kinds, groups, label, is_share): a row of panels a
    kind, a column a run; windows to the right, settings below each other. Blue is a gain, red a
    loss, grey not run or not a number; the scale ends at the largest gain, since what is lost can
    be without bound."""
    rows, kinds, groups, label, is_share = what
    grid = [{key: r[key] for key in ('method', 'K', 'beta', 'mode', 'cache')} for r in rows]
    windows = sorted({r['window'] for r in rows},
                     key=lambda w: (int(w.split('-')[1]) - int(w.split('-')[0]),
                                    int(w.split('-')[0])))
    settings = list(dict.fromkeys(label(r, grid) for r in rows))
    fig, axes = figure(len(kinds), len(groups), (2.2 + (0.8 + 0.42 * len(windows)) * len(groups),
                                                 1 + (0.8 + 0.3 * len(settings)) * len(kinds)))
    for panels, kind in zip(axes, kinds):
        unit, cells = 100 if is_share(kind) else 1000 if kind.startswith('loss') else 1, {}
        for r in (r for r in rows if kind in r):
            group = next(group for group, names in groups.items() if r['run'] in names)
            cells.setdefault((group, r['window'], label(r, grid)), []).append(unit * r[kind])
        cells = {place: mean(values) for place, values in cells.items()}
        sizes = sorted(abs(v) for v in cells.values() if math.isfinite(v)) or [0]
        top = max([v for v in cells.values() if math.isfinite(v)] + [sizes[len(sizes) // 4],
                5 if unit == 100 else 2 if unit == 1000 else 1e-6])
        for ax, group in zip(panels, groups):
            values = [[cells.get((group, w, s), math.nan) for w in windows] for s in settings]
            image = ax.imshow(values, cmap='RdBu', vmin=-top, vmax=top, aspect='auto')
            ax.set_facecolor('#cccccc')
            for y, line in enumerate(values):
                for x, v in enumerate(line):
                    if (group, windows[x], settings[y]) in cells:
                        ax.text(x, y, f'{v:+.0f}' if unit > 1 else f'{v:+.2g}', ha='center',
                                va='center', fontsize=6,
                                color='white' if abs(v) > 0.6 * top and math.isfinite(v)
                                else 'black')
            ax.set_xticks(range(len(windows)), windows, fontsize=7, rotation=60)
            ax.set_yticks(range(len(settings)), settings if ax is panels[0] else [], fontsize=7)
            ax.set_title(f'{group}: {kind}, gain' + {100: ' in points', 1000: ' in 1/1000',
                                                     1: ''}[unit], fontsize=9)
        fig.colorbar(image, ax=panels, pad=0.01)
    for ax in axes[-1]:
        ax.set_xlabel('window looped', fontsize=8)
    return fig
