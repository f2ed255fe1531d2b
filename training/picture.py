"Draws runs, one row of panels for each: left the losses, right how many answers are right."
import numpy as np

from training.checkpoint import whole


def draw(logs, path):
    """Draw {a run's name: the lines of its log} into a file. At a dotted line the depth changes."""
    from matplotlib.figure import Figure        # imported here, because a run works without it
    figure = Figure((12, 4.5 * len(logs)), layout='constrained')
    for name, (left, right) in zip(logs, figure.subplots(len(logs), 2, squeeze=False)):
        draw_run(logs[name], left, right)
        left.set_title(name, parse_math=False)
        left.set(xlabel='steps', ylabel='loss (nats per token)')
        right.set(xlabel='steps', ylabel='% of the answers that are right', ylim=(-3, 103))
    with whole(path) as new:
        figure.savefig(new, format='png', dpi=130)


def draw_run(lines, left, right):
    for name, label, colour in ('loss', 'training', '#bbbbbb'), ('val_loss', 'validation', 'C0'):
        points = [(line['step'], line[name]) for line in lines if name in line]
        left.plot(*zip(*points), color=colour, label=label)
    measured = [line for line in lines if 'kinds' in line]
    for i, kind in enumerate(dict.fromkeys(kind for line in measured for kind in line['kinds'])):
        with_kind = [line for line in measured if kind in line['kinds']]
        steps = [line['step'] for line in with_kind]
        if kind == 'text':      # each of its tokens is marked as an answer, but its loss says more
            of_text = [line['kinds'][kind]['loss'] for line in with_kind]
            left.plot(steps, of_text, 'C1', label='on text alone')
            continue
        share = [100 * line['kinds'][kind]['accuracy'] for line in with_kind]
        [curve] = right.plot(steps, share)
        # A legend would hide the curves, and all curves end at one height. So each name gets its
        # own height, and is written where its curve first reaches this height.
        height = min(max(share), 30 + 12 * i)
        end = 1 + next(j for j, percent in enumerate(share) if percent >= height)
        x = np.interp(height, share[:end][-2:], steps[:end][-2:])
        right.text(x, height, f'{kind} ', color=curve.get_color(), ha='right', weight='bold')
    for line in lines:
        if line['step'] == 0 or line.keys() & {'grown', 'looped'}:
            for ax in (left, right):
                ax.axvline(line['step'], ls=':', color='#888888')
                ax.text(line['step'], 0.02, f' {line["depth"]} layers', rotation=90,
                        transform=ax.get_xaxis_transform())
    left.legend()
