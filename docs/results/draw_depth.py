"""Draw docs/assets/depth.png from what docs/depth.py prints.
    python docs/depth.py | python docs/results/draw_depth.py
"""
import re
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use('Agg')
rows = [(match[1], [int(share) for share in re.findall(r'(\d+)%', match[2])])
        for match in re.finditer(r'^(.{41})((?: +\d+%){9})$', sys.stdin.read(), re.M)]
figure, axes = plt.subplots(figsize=(9, 0.36 * len(rows) + 1))
shares = [right for _, right in rows]
axes.imshow(shares, cmap='Blues', vmin=15, vmax=120, aspect='auto')
for y, right in enumerate(shares):
    for x, share in enumerate(right):
        axes.text(x, y, share, ha='center', va='center', color='white' if share > 60 else '0.3')
names = [f'{i:2}  {name.rstrip()}' for i, (name, _) in enumerate(rows, 1)]
axes.set_yticks(range(len(rows)), names, ha='left')
axes.tick_params(axis='y', pad=270, length=0)
axes.tick_params(axis='x', length=0, labeltop=True, labelbottom=False)
axes.set_xticks(range(9))
axes.set_xlabel('right answers in %, by aliases', labelpad=8)
axes.xaxis.set_label_position('top')
for y, (name, _) in enumerate(rows):
    if y and not name.startswith(' ') and not name.startswith('retrofitted, r = ') or '= 1' in name:
        axes.axhline(y - 0.5, color='white', linewidth=6)
for side in axes.spines.values():
    side.set_visible(False)
figure.savefig(Path(__file__).parents[1] / 'assets/depth.png', dpi=100, bbox_inches='tight')
