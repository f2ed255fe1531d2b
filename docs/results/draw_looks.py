"""Draw docs/assets/looks.png: where the questions of docs/depth.py look, layer by layer.
    python -m docs.results.draw_looks       # a minute: it trains three layers as docs/depth.py does
"""
import runpy
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch

matplotlib.use('Agg')
HERE = Path(__file__).resolve().parent
depth = runpy.run_path(str(HERE.parent / 'depth.py'))
LETTERS = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJ'


def attention(block, x):
    "Return the attention weights of a block, averaged over its heads: (questions, tokens)."
    T = x.shape[1]
    heads = block.qkv(block.norm(x)).unflatten(-1, (3, -1, depth['HEAD']))
    q, k, _ = heads.permute(2, 0, 3, 1, 4)
    scores = q[0, :, T // 2:] @ k[0].mT / depth['HEAD'] ** 0.5
    visible = torch.eye(T, dtype=torch.bool)[T // 2:] | (torch.arange(T) < T // 2)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).mean(0)


def name_of(left, right):
    "Return a pair as docs/depth.py writes it, such as w7 or ?f."
    names = depth['NAMES']
    first = '?' if left == depth['QUESTION'] else LETTERS[left]
    return first + (LETTERS[right] if right < names else str(right - names))


torch.manual_seed(0)
model = depth['LM'](layers=3, width=64)
depth['train'](model, 600, [(1, [0, 1, 2]), (2, [0, 1, 2])])
tokens, answers = depth['puzzles'](1, aliases=2)
labels = [name_of(*pair) for pair in tokens[0].tolist()]
half = len(labels) // 2
figure, panels = plt.subplots(1, 3, figsize=(11, 3.1), sharey=True)
with torch.no_grad():
    x = model.embed(tokens)
    for i, (ax, block) in enumerate(zip(panels, model.layers)):
        weights = attention(block, x)
        itself = weights[range(half), range(half, 2 * half)]
        shown = torch.cat((weights[:6, :half], itself[:6, None]), 1)    # two of the four chains
        ax.imshow(shown, cmap='Blues', vmin=0, vmax=1, aspect='auto')
        ax.set_xticks(range(half + 1), [*labels[:half], 'itself'], rotation=90)
        ax.set_yticks(range(6), labels[half:half + 6])
        ax.axhline(2.5, color='0.7', linewidth=1)
        ax.set_title(f'layer {i}')
        x = block(x)
    right = model.head(model.norm(x))[:, half:].argmax(-1) == answers
print(f'{right.sum().item()} of {half} questions answered right')
panels[0].set_ylabel('question')
figure.supxlabel('the statements that it may look at', size=10)
figure.tight_layout()
figure.savefig(HERE.parent / 'assets/looks.png', dpi=110)
