"""A run's log, and every picture: logs in (log.jsonl of one run or of several), PNG out. No model is opened here.

The idea: a loss says how well a model predicts on the average, but a skill comes all at once. So beside the loss stands
the accuracy on each kind of answer that the validation data marks: a staircase. Everything is drawn against steps, and
against FLOPs, because runs of different depth don't pay the same for a step.

Usage:
    python plot.py out/baseline                     # out/baseline/loss.png
    python plot.py out/baseline out/lidas           # both in one picture and one table: out/baseline/compare.png, .csv
    python plot.py out/toys/* --out=out/toys.png    # runs named NAME-SEED are averaged over their seeds
"""
import argparse
import csv
import json
import math
import os
import re
from pathlib import Path

COLOURS = ['#3b6fb6', '#d1495b', '#2e8b57', '#e08e1b', '#7b5aa6', '#4f4f4f', '#17a2b8', '#c45ab3']


def read_log(folder):
    "A run's log as a list of dicts, in the order of the steps."
    path = Path(folder) / 'log.jsonl'
    if not path.exists():
        raise SystemExit(f'plot.py: there is no {path}: is {folder} the folder of a run?')
    return read_lines(path)


def read_lines(path):
    "The lines of a log up to the first that is not whole: a run at work, or one that was cut off, may have half a line."
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


class Log:
    """log.jsonl, a line for each logged step. A run that resumes drops the lines after its step first: it will write
    them again, so that a log has neither gaps nor doubles wherever the run was cut off."""

    def __init__(self, path, last_step, silent=False):
        self.file = None
        if not silent:
            kept = [line for line in read_lines(path) if line['step'] <= last_step]
            fresh = path.with_suffix('.tmp')
            fresh.write_text(''.join(json.dumps(line) + '\n' for line in kept))
            os.replace(fresh, path)
            self.file = open(path, 'a')

    def write(self, **line):
        if self.file:
            self.file.write(json.dumps(line) + '\n')
            self.file.flush()


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


def run_names(paths):
    "{name: path}: the last part of each path, where that tells them apart."
    names = [Path(path).name for path in paths]
    return dict(zip(names if len(set(names)) == len(names) else map(str, paths), paths))


def by_seed(runs):
    "{name: log} to {name: [a log for each seed]}: lidas-0, lidas-1 and lidas-2 are one run over three seeds; 1e-3 is a number."
    stem = {name: re.sub(r'(?<!\de)-\d+$', '', name) for name in runs}
    seeds = [stem[name] for name in runs if stem[name] != name]
    groups = {}
    for name, log in runs.items():
        together = seeds.count(stem[name]) > 1 and stem[name] != name
        groups.setdefault((stem[name] + '-*' if stem[name] in runs else stem[name]) if together else name, []).append(log)
    return groups


def write_csv(rows, picture):
    "The numbers beside their picture."
    path = picture.with_suffix('.csv')
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'w', newline='') as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f'numbers: {path}')


def draw_runs(groups):
    """groups: {name: [a log a seed]}. One run alone: its losses above, all its kinds of answers in one staircase below.
    Several: a row for the validation loss, and one for each kind. Lines are means over the seeds, and the shade around them
    goes from the lowest to the highest. A dotted line: here a model grew."""
    logs = [log for group in groups.values() for log in group]
    kinds, alone = kinds_of(logs), len(logs) == 1
    skills = [kind for kind in kinds if kind != 'text']
    rows = [['loss'], skills] if alone else [['loss'], *([kind] for kind in skills)]
    rows = [row for row in rows if row]
    fig, axes = figure(len(rows), 2, (11, 1 + (3.1 if alone else 2.3) * len(rows)), sharex='col', sharey='row')

    def line(ax, x, group, value, **style):
        xs, values = zip(*at_all_seeds(group, x, value))
        drawn, = ax.plot(xs, list(map(mean, values)), lw=2, **style)
        if len(group) > 1:
            ax.fill_between(xs, list(map(min, values)), list(map(max, values)), color=drawn.get_color(), alpha=0.15, lw=0)

    for row, shown in zip(axes, rows):
        for ax, x in zip(row, ('step', 'flops')):
            colours = iter(COLOURS * 9)
            for name, group in groups.items():
                colour = next(colours)
                if shown == ['loss']:
                    if alone:
                        trained = [entry for entry in group[0] if 'loss' in entry]
                        ax.plot([e[x] for e in trained], [e['loss'] for e in trained], color='#bbbbbb', lw=1, label='training')
                        if 'text' in kinds:
                            line(ax, x, group, pick('text', 'loss'), color=next(colours), label='validation, text alone')
                    line(ax, x, group, lambda e: e['val_loss'], color=colour, label='validation' if alone else name)
                else:
                    for i, kind in enumerate(shown):
                        line(ax, x, group, lambda e: 100 * pick(kind, 'accuracy')(e), color=colour if i == 0 else next(colours),
                             marker='o', ms=3, label=kind if alone else name)
                for entry in growths(group[0]):
                    ax.axvline(entry[x], color='#888888' if alone else colour, ls=':', lw=1.3, zorder=0)
                    if alone and shown == ['loss']:
                        ax.text(entry[x], 1, f' {entry.get("depth", entry["n_layer"])} layers', color='#666666', fontsize=8, va='bottom',
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


def growths(log):
    "The lines of a log at which the model is deeper than on the line before: it has grown, or begun to loop."
    deep = [line.get('depth', line.get('n_layer', 0)) for line in log]
    return [line for line, before, now in zip(log[1:], deep, deep[1:]) if now > before]


def kinds_of(logs):
    return list(dict.fromkeys(kind for log in logs for line in log for kind in line.get('kinds', {})))


def pick(kind, what):
    return lambda line: line['kinds'].get(kind, {}).get(what, math.nan)


def at_all_seeds(group, x, value):
    "[(x, [value of each seed])] at the steps that all seeds have measured."
    seen = [{line['step']: line for line in log if 'val_loss' in line} for log in group]
    steps = sorted(set(seen[0]).intersection(*seen))
    return [(seen[0][step][x], [value(lines[step]) for lines in seen]) for step in steps] or [(math.nan, [math.nan])]


# ---------------------------------------------------------------------------------------------- the table

def table(groups, emerged=0.8):
    """A row for each group: means and standard errors over its seeds at the last step that all of them have measured, and for
    each kind the step and the FLOPs at which the accuracy first reached `emerged` (means over the seeds that got there:
    `reached`)."""
    rows, kinds = [], kinds_of([log for group in groups.values() for log in group])
    for name, group in groups.items():
        end = max(set.intersection(*({e['step'] for e in log if 'val_loss' in e} for log in group)), default=None)
        if end is None:
            raise SystemExit(f'plot.py: {name} has no measurement yet that all of its seeds share')
        last = [next(e for e in log if e['step'] == end and 'val_loss' in e) for log in group]
        row = dict(run=name, seeds=len(group), steps=mean([e['step'] for e in last]), layers=mean([e['n_layer'] for e in last]),
                   flops=mean([e['flops'] for e in last]), minutes=mean([e['seconds'] / 60 for e in last]))
        for key, value in {'loss': lambda e: e['val_loss'], 'text': pick('text', 'loss'),
                           **{kind: pick(kind, 'accuracy') for kind in kinds if kind != 'text'}}.items():
            values = [value(e) for e in last]
            row[key], row[f'{key} se'] = mean(values), standard_error(values)
        for kind in kinds:
            if kind != 'text':
                first = [next((e for e in log if 'val_loss' in e and pick(kind, 'accuracy')(e) >= emerged), None) for log in group]
                first = [e for e in first if e]
                row[f'{kind} reached'] = len(first)
                row[f'{kind} step'], row[f'{kind} flops'] = (mean([e[x] for e in first]) for x in ('step', 'flops'))
        rows.append(row)
    return rows


def mean(values):
    return sum(values) / len(values) if values else math.nan


def standard_error(values):
    n, middle = len(values), mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.nan


def print_table(rows):
    """The rows in columns. Behind a mean and its standard error stands how far it is from the first row's, in standard
    errors of the difference: below 2 it is not resolved (and with three seeds, 2 is not much: chance gives more in one case
    of ten)."""
    kinds = [key.removesuffix(' reached') for key in rows[0] if key.endswith(' reached')]
    ends = [['run', 'seeds', 'steps', 'FLOPs', 'minutes', 'loss', 'on text', *(f'{kind}, %' for kind in kinds)]]
    firsts = [['over 80% from', *(f'{kind}: step, FLOPs' for kind in kinds)]]
    for row in rows:
        ends.append([row['run'], str(row['seeds']), f'{row["steps"]:,.0f}', f'{row["flops"]:.3e}', f'{row["minutes"]:.1f}'])
        for key in ('loss', 'text', *kinds):
            factor, digits = (1, 3) if key in ('loss', 'text') else (100, 1)
            cell = f'{factor * row[key]:.{digits}f}'
            if row['seeds'] > 1:
                cell += f' ± {factor * row[f"{key} se"]:.{digits}f}'
                error = math.hypot(row[f'{key} se'], rows[0][f'{key} se'])
                cell += f' ({(row[key] - rows[0][key]) / error:+.1f})' if row is not rows[0] and error > 0 else ''
            ends[-1].append(cell)
        firsts.append([row['run']])
        for kind in kinds:
            some = '' if row[f'{kind} reached'] == row['seeds'] else f' ({row[f"{kind} reached"]} of {row["seeds"]} seeds)'
            firsts[-1].append(f'{row[f"{kind} step"]:.0f}, {row[f"{kind} flops"]:.2e}{some}' if row[f'{kind} reached'] else 'never')
    for lines in (ends, firsts):
        widths = [max(map(len, column)) for column in zip(*lines)]
        lines.insert(1, ['-' * width for width in widths])
        print(*('| ' + ' | '.join(map(str.ljust, cells, widths)) + ' |' for cells in lines), '', sep='\n')


def draw_origins(pictures):
    """pictures: {operator: [the order of each growth]}. A row a growth, a cell a layer; number and colour say which layer of
    the stage before it is a copy of, and a frame marks the ones that are new."""
    deepest = max(len(order) for orders in pictures.values() for order in orders)
    stages = max(map(len, pictures.values()))
    fig, axes = figure(len(pictures), 1, (1.5 + 0.3 * deepest, (1.1 + 0.3 * stages) * len(pictures)))
    for ax, (name, orders) in zip(axes[:, 0], pictures.items()):
        cells = [[i / (max(order) or 1) for i in order] + [float('nan')] * (deepest - len(order)) for order in orders]
        ax.imshow(cells, cmap='viridis', vmin=-0.1, vmax=1.3, aspect='auto')
        for y, order in enumerate(orders):
            for x, source in enumerate(order):
                new = source in order[:x]
                ax.text(x, y, source, ha='center', va='center', fontsize=8, color='white', weight='bold' if new else 'normal')
                if new:
                    ax.add_patch(ax.patch.__class__((x - 0.46, y - 0.44), 0.92, 0.88, fill=False, edgecolor='#d1495b', lw=1.8))
        ax.set_yticks(range(len(orders)), [f'{max(order) + 1} to {len(order)}' for order in orders])
        ax.set(title=name, xticks=[], ylabel='layers')
        ax.spines[:].set_visible(False)
    axes[-1, 0].set_xlabel('layer, from the embedding (left) to the head (right); framed: new')
    return fig


def draw_repetitions(what):
    """(sweeps, kinds, block): {run: [{'start', 'times', a number for each kind}]}. A column a run (the mean of its seeds), a
    row a kind; against the position where the repeated block begins, a line for each number of times."""
    sweeps, kinds, block = what
    groups = by_seed(sweeps)
    fig, axes = figure(len(kinds), len(groups), (1 + 2.6 * len(groups), 0.8 + 2.3 * len(kinds)), sharex='col', sharey='row')
    for column, (name, seeds) in zip(axes.T, groups.items()):
        for ax, kind in zip(column, kinds):
            factor = 1 if kind == 'loss' else 100
            for colour, k in zip(['#4f4f4f', *COLOURS], dict.fromkeys(row['times'] for row in seeds[0])):
                values = [[factor * row[kind] for row in rows if row['times'] == k] for rows in seeds]
                ax.plot(range(len(values[0])), [mean(at) for at in zip(*values)], color=colour, marker='' if k == 1 else 'o', ms=3,
                        ls='--' if k == 1 else '-', label='as it is' if k == 1 else f'{k} times')
            ax.grid(alpha=0.25)
            ax.spines[['top', 'right']].set_visible(False)
        column[0].set_title(name, fontsize=10)
        column[-1].set_xlabel(f'first of the {block} layers')
    for ax, kind in zip(axes[:, 0], kinds):
        ax.set_ylabel('loss' if kind == 'loss' else f'{kind} (%)')
        if kind == 'loss':      # a repeated first layer ruins a model: keep the rest in sight
            ordinary = [row['loss'] for rows in sweeps.values() for row in rows if row['times'] == 1]
            ax.set_ylim(min(ordinary) - 0.15, max(ordinary) + 1.5)
    axes[0, 0].legend(frameon=False, fontsize=8)
    return fig


def draw_tradeoffs(what):
    "(rows, kinds): the mean accuracy over the kinds against unique parameters, inference FLOPs and training FLOPs."
    rows, kinds = what
    fig, axes = figure(1, 3, (13, 4), sharey=True)
    shapes, skills = {'looped': 's', 'ordinary': 'o'}, [kind for kind in kinds if kind != 'loss']
    for ax, (key, label) in zip(axes[0], (('params', 'unique parameters'), ('inference_flops', 'inference FLOPs a token'),
                                          ('training_flops', 'training FLOPs'))):
        for colour, row in zip(COLOURS * 9, rows):
            y = 100 * mean([row[kind] for kind in skills]) if skills else row['loss']
            ax.scatter(row[key], y, color=colour, s=70, marker=shapes['looped' if row['unique'] < row['depth'] else 'ordinary'],
                       label=row['run'])
        ax.set_xlabel(label)
        ax.set_xlim(0)
        ax.grid(alpha=0.25)
        ax.spines[['top', 'right']].set_visible(False)
    axes[0][0].set_ylabel('answers right, mean of the kinds (%)' if skills else 'loss (nats a token)')
    axes[0][2].legend(frameon=False, fontsize=9, loc='center left', bbox_to_anchor=(1, 0.5), title='square: looped')
    return fig


def draw_shots(what):
    "(rows, groups): a panel a task, accuracy against the number of shots, a line a run (the mean of its seeds); dotted: chance."
    rows, groups = what
    tasks = list(dict.fromkeys(row['task'] for row in rows))
    fig, axes = figure(1, len(tasks), (1.5 + 2.8 * len(tasks), 3.6), sharey=True)
    for ax, task in zip(axes[0], tasks):
        for colour, (name, members) in zip(COLOURS * 9, groups.items()):
            mine = [row for row in rows if row['run'] in members and row['task'] == task]
            xs = sorted({row['shots'] for row in mine})
            cells = [[row for row in mine if row['shots'] == x] for x in xs]
            ax.plot(xs, [100 * mean([row['accuracy'] for row in cell]) for cell in cells], color=colour, marker='o', ms=4, label=name)
            ax.fill_between(xs, [100 * min(row['low'] for row in cell) for cell in cells],
                            [100 * max(row['high'] for row in cell) for cell in cells], color=colour, alpha=0.12, lw=0)
        ax.axhline(100 * next(row['chance'] for row in rows if row['task'] == task), color='#888888', ls=':')
        ax.set(title=task, xlabel='shots')
        ax.set_ylim(-3, 103)
        ax.grid(alpha=0.25)
        ax.spines[['top', 'right']].set_visible(False)
    axes[0][0].set_ylabel('answers right (%)')
    axes[0][-1].legend(frameon=False, fontsize=8)
    return fig


def main(argv=None):
    parser = argparse.ArgumentParser(description='Draw the logs of one run or of several against steps and FLOPs.')
    parser.add_argument('runs', nargs='+', help='folders that train.py wrote')
    parser.add_argument('--out', type=Path, help='the picture (default: in the first folder)')
    args = parser.parse_args(argv)
    groups = by_seed({name: read_log(folder) for name, folder in run_names(args.runs).items()})
    out = args.out or Path(args.runs[0]) / ('loss.png' if len(args.runs) == 1 else 'compare.png')
    show(draw_runs, groups, out)
    if len(args.runs) == 1:
        return print(f'numbers: {args.runs[0]}/log.jsonl')
    rows = table(groups)
    print_table(rows)
    write_csv(rows, out)


if __name__ == '__main__':
    import plot
    plot.main()
