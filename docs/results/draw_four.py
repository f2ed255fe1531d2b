"""Draw docs/assets/four.png: what each of the four ideas buys and costs on the toy, from page.csv.
    python -m docs.results.draw_four
"""
import matplotlib
import matplotlib.pyplot as plt

from docs.results.check import ROOT, spelled, values_of
from nanodepth.report.contrasts import Contrast
from nanodepth.report.tables import mean, read_rows

matplotlib.use('Agg')
SMALL = '--window=2-5 --method=rk --K=4'
FOUR = [    # what; aliases; with it, without it, in words; beside whose text; layers that run
    ('loop: two layers, four times', 3, ('loop_2x4', 'as it is'), ('standard_2', 'as it is'),
     'the two layers once', ('baseline', 'as it is'), 'eight layers', '8 instead of 2'),
    ('grow: from two layers to eight', 3, ('lidas', 'as it is'), ('baseline_isoflops', 'as it is'),
     'ordinary, equal training FLOPs', ('baseline_isoflops', 'as it is'), 'the same', '8, like it'),
    ('retrofit: a core runs four times', 5, ('retrofit', '--r=4'), ('retrofit_dense', 'as it is'),
     'its parent, equal training FLOPs', ('retrofit_dense', 'as it is'), 'the same', '12, not 8'),
    ('wrap: four small steps, untrained', 4, ('baseline', SMALL), ('baseline', 'as it is'),
     'the model as it is', ('baseline', 'as it is'), 'the same', '20 instead of 8')]
rows = read_rows(ROOT / 'docs/results/page.csv')


def values(model, measure):
    return values_of(rows, dict(run=model[0], way=model[1]), measure)


figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), sharey=True, width_ratios=(3, 2))
for y, (what, aliases, model, without, named, beside, named_beside, layers) in enumerate(FOUR):
    before, after = (100 * mean(list(values(each, f'toy_assign/{aliases} right').values()))
                     for each in (without, model))
    left.plot([before, after], [y, y], color='0.8', linewidth=6, zorder=1)
    left.scatter(before, y, color='0.5', s=90, zorder=2)
    left.scatter(after, y, color='tab:red', s=90, zorder=3)
    left.text(0, y - 0.32, what, weight='bold')
    left.text(0, y + 0.33, f'{aliases} aliases; grey: {named}', size=8, color='0.3')
    ours, other = values(model, 'text'), values(beside, 'text')
    seeds = sorted(ours.keys() & other.keys())
    apart = Contrast([ours[seed] for seed in seeds], [other[seed] for seed in seeds])
    right.errorbar(apart.mean, y, xerr=apart.half(0.95), fmt='o', color='tab:red', capsize=4)
    right.text(-0.14, y - 0.32, f'layers run: {layers}', size=8, color='0.3')
    said = f'{spelled(apart, 3, "+")} beside {named_beside}'
    right.text(-0.14, y + 0.33, said, size=8, color='0.3')
right.axvline(0, color='0.7', linewidth=1, zorder=0)
left.axvline(25, color='0.7', linewidth=1, linestyle=':', zorder=0)
left.set(xlim=(0, 103), ylim=(3.6, -0.6), yticks=[])
left.set_xlabel('buys: right answers, % (dotted: a guess)')
right.set(xlim=(-0.15, 0.2), xlabel='costs: loss on text, nats more (± 95%)')
for axes in (left, right):
    axes.spines[['top', 'right', 'left']].set_visible(False)
figure.tight_layout()
figure.savefig(ROOT / 'docs/assets/four.png', dpi=100)
