"""A run's log, and every picture: logs in (log.jsonl of one run or of several), PNG out. No model is opened here.

The idea: a loss says how well a model predicts on the average, but a skill comes all at once. So beside the loss stands
the accuracy on each kind of answer that the validation data marks: a staircase. Everything is drawn against steps, and
against FLOPs, because runs of different depth don't pay the same for a step.

Usage:
    python plot.py out/baseline                     # out/baseline/loss.png
    python plot.py out/baseline out/lidas           # both in one picture, beside the first: out/baseline/compare.png
"""
import argparse
import json
import os
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
    try:
        draw(what).savefig(path, dpi=130)
    except ImportError:
        print('no picture: matplotlib is not installed (pip install matplotlib)')
    else:
        print(f'picture: {path}')


def draw_runs(runs):
    """runs: {name: log}. One run: its losses above, all its kinds of answers in one staircase below. Several: a row for
    the validation loss, and one for each kind."""
    kinds = list(dict.fromkeys(kind for log in runs.values() for line in log for kind in line.get('kinds', {})))
    skills, alone = [kind for kind in kinds if kind != 'text'], len(runs) == 1
    rows = [['loss'], skills] if alone else [['loss'], *([kind] for kind in skills)]
    rows = [row for row in rows if row]
    fig, axes = figure(len(rows), 2, (11, 1 + 3.1 * len(rows)), sharex='col', sharey='row')
    for row, shown in zip(axes, rows):
        for ax, x in zip(row, ('step', 'flops')):
            colours = iter(COLOURS * 9)
            for name, log in runs.items():
                seen = [line for line in log if 'val_loss' in line]
                xs = [line[x] for line in seen]
                if shown == ['loss']:
                    colour = next(colours)
                    if alone:
                        trained = [line for line in log if 'loss' in line]
                        ax.plot([line[x] for line in trained], [line['loss'] for line in trained], color='#bbbbbb', lw=1,
                                label='training')
                        if 'text' in kinds:
                            ax.plot(xs, pick(seen, 'text', 'loss'), color=next(colours), lw=1.5, label='validation, text alone')
                    ax.plot(xs, [line['val_loss'] for line in seen], color=colour, lw=2, label='validation' if alone else name)
                else:
                    for kind in shown:
                        ax.plot(xs, [100 * a for a in pick(seen, kind, 'accuracy')], color=next(colours), lw=2,
                                marker='o', ms=3, label=kind if alone else name)
            ax.grid(alpha=0.25)
            ax.spines[['top', 'right']].set_visible(False)
        row[0].set_ylabel('loss (nats a token)' if shown == ['loss'] else
                          'answers right (%)' if alone else f'{shown[0]}: answers right (%)')
        row[0].legend(frameon=False, fontsize=9)
        if shown != ['loss']:
            row[0].set_ylim(-3, 103)
    axes[-1][0].set_xlabel('steps')
    axes[-1][1].set_xlabel('training FLOPs')
    fig.suptitle(', '.join(runs) if len(runs) < 5 else f'{len(runs)} runs')
    return fig


def pick(lines, kind, what):
    return [line['kinds'].get(kind, {}).get(what, float('nan')) for line in lines]


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


def main(argv=None):
    parser = argparse.ArgumentParser(description='Draw the logs of one run or of several against steps and FLOPs.')
    parser.add_argument('runs', nargs='+', help='folders that train.py wrote')
    parser.add_argument('--out', type=Path, help='the picture (default: in the first folder)')
    args = parser.parse_args(argv)
    names = [Path(folder).name for folder in args.runs]
    names = names if len(set(names)) == len(names) else args.runs
    runs = {name: read_log(folder) for name, folder in zip(names, args.runs)}
    show(draw_runs, runs, args.out or Path(args.runs[0]) / ('loss.png' if len(runs) == 1 else 'compare.png'))
    print('numbers: ' + ', '.join(str(Path(folder) / 'log.jsonl') for folder in args.runs))


if __name__ == '__main__':
    import plot
    plot.main()
