"""Draw docs/assets/uniform.png: three ways of running a window several times, from uniform.csv.
    python -m docs.results.draw_uniform

uniform.csv has numbers that such a command printed, for the seeds 0 to 4 of the baseline that
docs/results/compare_ideas.py trains:
    nanodepth evaluate out/compare_ideas/baseline-0 --measures=text,log_prob --n=500 --seed=7 \
        --tasks=toy_assign/3-4 --window=2-5 --solver=anchored,uniform,naive --K=1,2,3,4,6,8
"""
from pathlib import Path

from nanodepth.report.plot import COLOURS, curve, figure
from nanodepth.report.tables import read_rows, where

HERE = Path(__file__).resolve().parent
PANELS = {'4 aliases right': '4 aliases: right answers, %',
          '3 aliases right': '3 aliases: right answers, %', 'text': 'loss on text, nats'}

rows = read_rows(HERE / 'uniform.csv')
fig, [axes] = figure(1, 3, (10, 3.2))
for ax, (measure, title) in zip(axes, PANELS.items()):
    for colour, solver in zip(COLOURS[2:3] + COLOURS[:2], ('anchored', 'uniform', 'naive')):
        curve(ax, where(rows, solver=solver), 'K', measure, colour, solver,
              factor=1 if measure == 'text' else 100)
    ax.set_title(title, fontsize=9)
    ax.set_xlabel('K: runs of the window', fontsize=8)
axes[0].legend(frameon=False, fontsize=8)
fig.savefig(HERE.parent / 'assets/uniform.png', dpi=120)
