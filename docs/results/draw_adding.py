"""Draw docs/assets/adding.png, five ways to give toy B's LIDAS more depth, from depth.csv.
    python -m docs.results.draw_adding
"""
from statistics import mean

import matplotlib
import matplotlib.pyplot as plt

from docs.results.tables import HERE
from nanodepth.report.contrasts import interval
from nanodepth.report.tables import read_rows

matplotlib.use('Agg')
WAYS = {'recurrent': ('cool-down with a core', '0.2'),
        'window, T = 1': ('small steps, untrained', 'tab:green'),
        'looped': ('looped cool-down', 'tab:purple'),
        'repeated': ('repeated, untrained', 'tab:red'),
        'more FLOPs': ('ordinary, trained longer', 'tab:blue')}
rows = [row for row in read_rows(HERE / 'depth.csv') if row['run'] == 'lidas']
plain = [row for row in rows if row['way'] == 'ordinary']

figure, panels = plt.subplots(1, 2, figsize=(8.5, 3.4))
for axes, measure, factor in (panels[0], 'aliases 5 right', 100), (panels[1], 'text', 1):
    axes.axhline(factor * mean(row[measure] for row in plain), color='black', linestyle=':')
    for way, (name, color) in WAYS.items():
        added = sorted({row['added'] for row in rows if row['way'] == way})
        values = [[factor * row[measure] for row in rows if (row['way'], row['added']) == (way, n)]
                  for n in added]
        axes.errorbar(added, [mean(each) for each in values], [interval(each) for each in values],
                      label=name, color=color, marker='o', markersize=4, linewidth=2,
                      elinewidth=0.7, capsize=2)
    axes.set(xlabel='layers added to the ten', xticks=(0, 4, 8, 16))
    axes.spines[['top', 'right']].set_visible(False)
panels[0].set_ylabel('right with five aliases, %')
panels[1].set_ylabel('loss on text, nats')
panels[0].set(ylim=(0, 100))
panels[0].axhline(100 / 3, color='0.7', linewidth=1)
panels[0].text(16, 28, 'a guess', color='0.5', ha='right')
panels[1].legend(frameon=False, loc='upper left', fontsize=8)
figure.tight_layout()
figure.savefig(HERE.parent / 'assets/adding.png', dpi=100)
