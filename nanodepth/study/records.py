"""A number to beat: the fewest training FLOPs with which a config learns the toy, seed after seed.

The idea: the FLOPs follow from the config, so whether they are fewer needs no statistics. Whether
the model is good enough does: over the seeds, the mean loss on text must be below its threshold and
the mean share of right answers above its own, each by a one-sided t-test. Eight other seeds, which
nobody chose the config by, may refute it: a config that fails on them is not accepted.

Usage:
    entries = judged(rows)          # {config: Entry} of the seeds 0 to 7, the fewest FLOPs first
    others = judged(rows, 8)        # the same of the seeds 8 to 15
    entries = accepted(rows)        # of the seeds 0 to 7, those that the others refute do not meet
    standing(entries)               # the name of the config that holds the record, or None
"""
import ast
from typing import NamedTuple

from nanodepth import ROOT
from nanodepth.report.tables import mean, where
from nanodepth.study.claims import ALPHA, Contrast, one_sided

TEXT = 2.20             # nats a byte: the loss on text must be below it
RIGHT = 0.95            # the share of questions of depth 3 that are answered right: above it
SEEDS = 8


class Entry(NamedTuple):
    flops: float
    seeds: int
    text: Contrast      # the losses, minus the threshold
    right: Contrast     # the shares, minus the threshold
    p_text: float
    p_right: float
    meets: bool         # both thresholds, on all seeds
    first_seed: int


def judged(rows, first_seed=0):
    entries = {}
    rows = [row for row in rows if first_seed <= row['seed'] < first_seed + SEEDS]
    for config in dict.fromkeys(row['config'] for row in rows):
        seeds = where(rows, config=config)
        text = Contrast([row['text'] for row in seeds], [TEXT] * len(seeds))
        right = Contrast([row['depth 3 right'] for row in seeds], [RIGHT] * len(seeds))
        p_text = one_sided(text, -1)
        p_right = one_sided(right, 1)
        meets = len(seeds) >= SEEDS and max(p_text, p_right) < ALPHA
        entries[config] = Entry(seeds[0]['flops'], len(seeds), text, right, p_text, p_right, meets,
                                first_seed)
    return dict(sorted(entries.items(), key=lambda item: item[1].flops))


def accepted(rows):
    "The entries of the seeds 0 to 7. One that fails on the seeds 8 to 15 does not meet."
    others = judged(rows, SEEDS)
    entries = judged(rows)
    for config, other in others.items():
        if config in entries and other.seeds >= SEEDS and not other.meets:
            entries[config] = entries[config]._replace(meets=False)
    return entries


def standing(entries):
    "The entries come in the order of their FLOPs, so the first that is good enough holds it."
    return next((config for config, entry in entries.items() if entry.meets), None)


def idea(config):
    "What is new in a config: the first sentence of its docstring."
    path = ROOT / config
    text = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) if path.exists() else None
    return (text or '').partition('.')[0]


def table(rows):
    "Markdown: a line for each config, the most FLOPs first, so that it reads as a story."
    entries = accepted(rows)
    others = judged(rows, SEEDS)
    record = standing(entries)
    lines = ['| config | idea | 10^12 FLOPs | saved | text | depth 3, % | p | '
             'text, seeds 8 to 15 | depth 3, % | p | verdict |', '|' + '---|' * 11]
    best = None
    for config, e in reversed(entries.items()):
        if e.meets:
            verdict = '**the record**' if config == record else 'good enough'
        elif max(e.p_text, e.p_right) < ALPHA and e.seeds >= SEEDS:
            verdict = 'not confirmed'
        else:
            verdict = 'not good enough' if e.seeds >= SEEDS else 'open'
        saved = f'{1 - e.flops / best:.0%}' if best and e.meets else ''
        again = cells(others[config]) if config in others else ' | | '
        lines.append(f'| [{config}](../{config}) | {idea(config)} | {e.flops / 1e12:.2f} | {saved} '
                     f'| {cells(e)} | {again} | {verdict} |')
        best = e.flops if e.meets else best
    return lines


def cells(entry):
    "The two means, and the larger of the two p values."
    return (f'{mean(entry.text.a):.3f} | {100 * mean(entry.right.a):.1f} | '
            f'{max(entry.p_text, entry.p_right):.2g}')
