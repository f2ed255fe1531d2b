"""Rows and figures of "What was claimed since" (docs/ATLAS.md), from what `make claims` left.

    python docs/results/since.py        # since.csv, healing.csv, assets/{luck,healing}.png
"""
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from nanodepth.report.tables import as_csv  # noqa: E402

OUT, DOCS = ROOT / 'out/claims', ROOT / 'docs'
ACC = 'questions_piqa acc'
PLAIN = 'as it is'
SIZES = 17, 32, 100, 1000


def notes(name):
    "{way: {measure: the answers, one a row or question}} of what evaluate noted."
    found = {}
    for line in filter(str.strip, (OUT / f'{name}.jsonl').read_text().splitlines()):
        note = json.loads(line)
        for measure, score in note['found'].items():
            found.setdefault(note['of']['way'], {})[measure] = np.array(score[3], float)
    return found


def rows(run, way, measure, values, first=0):
    return [dict(seed=i, run=run, measure=measure, way=way, value=f'{value:.6g}')
            for i, value in enumerate(values, first)]


def copies():
    "Every four layers in each way: of each row or question, the mean over them."
    twice, half, root, rk = map(notes, ('twice', 'half', 'root', 'rk'))
    yield from rows('smollm2', PLAIN, 'loss', twice[PLAIN]['loss'])
    yield from rows('smollm2', PLAIN, ACC, twice[PLAIN][ACC])
    for name, found, mark, measure in (
            ('4 twice', twice, '--loop', 'loss'), ('4 at 0.71', root, '--loop', 'loss'),
            ('4 at 0.71', root, '--loop', ACC),
            ('4 at 0.5', half, '--loop', 'loss'), ('4 at 0.5', half, '--loop', ACC),
            ('4 by rk, layer by layer', rk, 'mode=layer', 'loss')):
        some = [scores[measure] for way, scores in found.items() if mark in way]
        yield from rows('smollm2', name, measure, np.mean(some, 0))


def recirculated():
    for way, scores in notes('recirculate').items():
        if way != PLAIN:
            yield from rows('smollm2', 'recirculated', 'loss', scores['loss'])


def best_of_many():
    "The blocks run twice: the best of the first N questions, on all others; and the figure."
    found = notes('blocks') | notes('twice')
    plain = found.pop(PLAIN)[ACC]
    changes = np.array([scores[ACC] - plain for scores in found.values()])      # (blocks, 1500)
    rng = np.random.default_rng(0)
    figure, axis = plt.subplots(figsize=(7, 4))
    for n in SIZES:
        best = changes[:, :n].mean(1).argmax()
        yield from rows('smollm2', f'best of {n}', ACC, (plain + changes[best])[n:], first=n)
        won, fresh, luck = [], [], []
        for _ in range(2000):           # other questions, and the same with answers exchanged
            order = rng.permutation(changes.shape[1])
            seen, rest = changes[:, order[:n]], changes[:, order[n:]]
            first = seen.mean(1).argmax()
            won.append(seen[first].mean())
            fresh.append(rest[first].mean())
            luck.append((seen * rng.choice((-1, 1), n)).mean(1).max())
        for values, shift, color, name in (
                (luck, 0.9, '#9aa5b1', 'the same, answers exchanged: luck alone'),
                (won, 1, '#d1495b', 'the best, where it was chosen'),
                (fresh, 1.1, '#1f5fa8', 'the same block, on all other questions')):
            low, mid, high = 100 * np.quantile(values, (0.05, 0.5, 0.95))
            axis.errorbar(n * shift, mid, [[mid - low], [high - mid]], fmt='o', color=color,
                          capsize=3, label=name if n == SIZES[0] else None)
            print(f'best of {len(changes)} on {n}: {name} {mid:+.1f} ({low:+.1f} to {high:+.1f})')
    axis.axhline(0, color='black', linewidth=0.8)
    axis.set_xscale('log')
    axis.set_xticks(SIZES, [f'{n:,}' for n in SIZES])
    axis.minorticks_off()
    axis.set_xlabel('questions by which the best was chosen')
    axis.set_ylabel('points gained over the plain model')
    axis.set_title(f'The best of {len(changes)} blocks run twice (PIQA)', loc='left')
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(DOCS / 'assets/luck.png', dpi=150)


def healing():
    "The retrofit and its parent at each power of three; rows of the end; the figure."
    points, table = {}, []
    for path in sorted((OUT / 'heal').glob('*-*.jsonl')):
        kind, step = path.stem.split('-')
        log = [json.loads(line) for line in (OUT / f'heal/{kind}.jsonl').open() if line.strip()]
        last = max((line for line in log if line['step'] <= int(step)), key=lambda x: x['step'])
        for way, scores in notes(f'heal/{path.stem}').items():
            points[kind, last['tokens'], way] = scores
            table.append(dict(run=kind, step=last['step'], tokens=last['tokens'],
                              flops=f'{last["flops"]:.4g}', way=way,
                              loss=f'{scores["loss"].mean():.4f}',
                              piqa=f'{100 * scores[ACC].mean():.1f}'))
    table.sort(key=lambda row: (row['run'], row['tokens'], row['way']))
    (DOCS / 'results/healing.csv').write_bytes(as_csv(table, lineterminator='\n'))
    end = {kind: max(tokens for k, tokens, _ in points if k == kind)
           for kind in ('retrofit', 'parent')}
    for measure in ('loss', ACC):
        for r in (1, 4, 8):
            yield from rows('retrofit', f'r = {r}, at the end', measure,
                            points['retrofit', end['retrofit'], f'--r={r}'][measure])
        yield from rows('parent', 'at the end', measure,
                        points['parent', end['parent'], PLAIN][measure])
    figure, axes = plt.subplots(1, 2, figsize=(9, 4))
    lines = [('retrofit', f'--r={r}', f'r = {r}', color, style) for r, color, style in
             ((1, '#9aa5b1', 'o-'), (2, '#7fb2e5', 's-'), (4, '#1f5fa8', '^-'),
              (8, '#0b2545', 'x--'))]
    for kind, way, name, color, style in [*lines, ('parent', PLAIN, 'the parent, trained on',
                                                   '#d1495b', 'o-')]:
        of_way = [row for row in table if row['run'] == kind and row['way'] == way]
        for axis, key in zip(axes, ('loss', 'piqa')):
            axis.plot([float(row['flops']) for row in of_way], [float(row[key]) for row in of_way],
                      style, color=color, label=name)
    for axis, title in zip(axes, ('loss, nats', 'PIQA, % right of 1,500')):
        axis.set_xscale('log')
        axis.set_xlabel('training FLOPs')
        axis.set_title(title, loc='left')
    axes[0].legend(frameon=False, loc='upper right')
    figure.tight_layout()
    figure.savefig(DOCS / 'assets/healing.png', dpi=150)


LOOPS = (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)


def exponent(losses, seed):
    """phi, where u layers run r times are as good as u r^phi: fitted to the loops of at most 8
    layer runs. What each is worth is read off the losses of 1 to 8 ordinary layers."""
    base = [losses[f'{n}x1-{seed}'] for n in range(1, 9)]
    base = np.maximum.accumulate(base[::-1])[::-1]              # so that it falls
    above = below = 0
    for u, r in LOOPS:
        worth = np.exp(np.interp(-losses[f'{u}x{r}-{seed}'], -base, np.log(range(1, 9))))
        above += np.log(r) * np.log(worth / u)
        below += np.log(r) ** 2
    return above / below


def worth():
    text, chains = {}, {}
    for path in (ROOT / 'out/worth').glob('*/log.jsonl'):
        kinds = json.loads(path.read_text().splitlines()[-1])['kinds']
        text[path.parent.name] = kinds['text']['loss']
        chains[path.parent.name] = np.mean([kinds[f'depth {d}']['loss'] for d in range(4)])
    names = {name.partition('-')[0] for name in text}
    needed = [f'{n}x1' for n in range(1, 9)] + [f'{u}x{r}' for u, r in LOOPS]
    seeds = [s for s in range(8) if all(f'{name}-{s}' in text for name in needed)]
    for measure, losses in (('text', text), ('chains', chains)):
        values = [exponent(losses, seed) for seed in seeds]
        print(f'exponent, {measure}:', np.round(values, 3))
        yield from rows('toy', 'measured', f'exponent, {measure}', values)
        yield from rows('toy', 'claimed', f'exponent, {measure}', [0.46] * len(seeds))
        for name in sorted(names):
            yield from rows('toy', name, f'loss, {measure}', [
                losses[f'{name}-{s}'] for s in seeds if f'{name}-{s}' in losses])


def parts():
    found = json.loads((OUT / 'parts.json').read_text())
    for way in ('attention twice', 'weights at 0.9'):
        for measure, values in found[way].items():
            yield from rows('smollm2', way, measure, values)


def gemma():
    "With a first token on each row and without: as it is, and the best of the four screened rows."
    found = {}
    for line in (OUT / 'gemma.jsonl').open():
        note = json.loads(line)
        kind, first, *way = note['key']
        found[kind, first, *way] = note['value']
    for first, token in ((False, ''), (True, 'first token')):
        screened = {key: np.mean(values) for key, values in found.items()
                    if key[:2] == ('screen', first) and key[2]}
        best = min(screened, key=screened.get)[2:]
        for way, name in (((None, None), token or PLAIN),
                          (best, ', '.join(filter(None, (token, 'recirculated'))))):
            yield from rows('gemma', name, 'loss', found['test', first, *way])
            if first:
                yield from rows('gemma', name, ACC, found['piqa', first, *way])


all_rows = [*copies(), *recirculated(), *gemma(), *parts(), *best_of_many(), *healing(), *worth()]
(DOCS / 'results/since.csv').write_bytes(as_csv(all_rows, lineterminator='\n'))
