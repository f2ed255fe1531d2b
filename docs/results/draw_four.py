"""Draw docs/assets/four.png: answers and loss on text with each of the four ideas, from page.csv.
    python -m docs.results.draw_four
"""
from statistics import mean

import matplotlib
import matplotlib.pyplot as plt

from docs.results.tables import HERE
from nanodepth.report.contrasts import interval
from nanodepth.report.tables import read_rows

matplotlib.use('Agg')
SMALL = '--window=2-5 --solver=rk --K=4'
# (idea, aliases, the model with it, the model without it and its name, the model that the loss is
# compared with and its name, the layers that run)
FOUR = [
    ('loop: two layers, four times', 3, ('loop_2x4', 'as it is'), ('standard_2', 'as it is'),
     'the two layers once', ('baseline', 'as it is'), 'eight layers', '8 instead of 2'),
    ('grow: from two layers to eight', 3, ('lidas', 'as it is'), ('baseline_isoflops', 'as it is'),
     'ordinary, equal training FLOPs', ('baseline_isoflops', 'as it is'), 'that model',
     '8 in both'),
    ('retrofit: a core runs four times', 5, ('retrofit', '--r=4'), ('retrofit_dense', 'as it is'),
     'its parent, equal training FLOPs', ('retrofit_dense', 'as it is'), 'its parent',
     '12 instead of 8'),
    ('wrap: four small steps, untrained', 4, ('baseline', SMALL), ('baseline', 'as it is'),
     'the model as it is', ('baseline', 'as it is'), 'the plain model',
     '20 instead of 8')]
WORDS = dict(size=8, color='0.3', bbox=dict(facecolor='white', edgecolor='none', pad=1))
rows = read_rows(HERE / 'page.csv')


def values(model, measure):
    return {row['seed']: row[measure] for row in rows if (row['run'], row['way']) == model}


figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), sharey=True, width_ratios=(3, 2))
for y, (what, aliases, model, without, named, beside, named_beside, layers) in enumerate(FOUR):
    before, after = (100 * mean(values(each, f'toy_assign/{aliases} right').values())
                     for each in (without, model))
    left.plot([before, after], [y, y], color='0.8', linewidth=6, zorder=1)
    left.scatter(before, y, color='0.5', s=200, zorder=2)
    left.scatter(after, y, color='tab:red', s=70, zorder=3)
    left.text(0, y - 0.32, what, WORDS | dict(size=10, color='black', weight='bold'))
    about = f'{aliases} aliases; grey: {named}; layers run: {layers}'
    left.text(0, y + 0.33, about, WORDS)
    ours, other = values(model, 'text'), values(beside, 'text')
    apart = [ours[seed] - other[seed] for seed in sorted(ours.keys() & other.keys())]
    half = interval(apart)
    right.errorbar(mean(apart), y, xerr=half, fmt='o', color='tab:red', capsize=4)
    right.text(-0.1, y + 0.33, f'{mean(apart):+.3f} ± {half:.3f} beside {named_beside}', WORDS)
right.axvline(0, color='0.7', linewidth=1, zorder=0)
left.axvline(25, color='0.7', linewidth=1, linestyle=':', zorder=0)
left.set(xlim=(0, 103), ylim=(3.6, -0.6), yticks=[])
left.set_xlabel('right answers, % (dotted: a guess)')
right.set(xlim=(-0.11, 0.17), xticks=(-0.1, 0, 0.1))
right.set_xlabel('loss on text, nats (± 95%):  ← better | worse →')
for axes in (left, right):
    axes.spines[['top', 'right', 'left']].set_visible(False)
figure.tight_layout()
figure.savefig(HERE.parent / 'assets/four.png', dpi=100)
