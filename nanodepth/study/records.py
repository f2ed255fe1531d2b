"""A number to beat: the fewest training FLOPs with which a config learns the toy, seed after seed.

The idea: the FLOPs follow from the config, so whether they are fewer needs no statistics. Whether
the model is good enough does: over the seeds, the mean loss on text must be below its threshold and
the mean share of right answers above its own, each by a one-sided t-test.

Usage:
    entries = judged(rows)          # {config: Entry}, the fewest FLOPs first
    standing(entries)               # the name of the config that holds the record, or None
"""
from typing import NamedTuple

from nanodepth.report.tables import mean, where
from nanodepth.study.claims import ALPHA, Contrast, one_sided

TEXT = 2.20             # nats a byte: the loss on text must be below it
RIGHT = 0.95            # the share of questions of depth 3 that are answered right: above it
SEEDS = 8


class Entry(NamedTuple):
    flops: float
    minutes: float      # of one run
    seeds: int
    text: Contrast      # the losses, minus the threshold
    right: Contrast     # the shares, minus the threshold
    p_text: float
    p_right: float
    meets: bool         # both thresholds, on all seeds


def judged(rows):
    entries = {}
    for config in dict.fromkeys(row['config'] for row in rows):
        seeds = where(rows, config=config)
        text = Contrast([row['text'] for row in seeds], [TEXT] * len(seeds))
        right = Contrast([row['depth 3 right'] for row in seeds], [RIGHT] * len(seeds))
        p_text = one_sided(text, -1)
        p_right = one_sided(right, 1)
        minutes = mean([row['minutes'] for row in seeds])
        meets = len(seeds) >= SEEDS and max(p_text, p_right) < ALPHA
        entries[config] = Entry(seeds[0]['flops'], minutes, len(seeds), text, right,
                                p_text, p_right, meets)
    return dict(sorted(entries.items(), key=lambda item: item[1].flops))


def standing(entries):
    "The entries come in the order of their FLOPs, so the first that is good enough holds it."
    return next((config for config, entry in entries.items() if entry.meets), None)


def table(rows):
    "Markdown: a line a config."
    entries = judged(rows)
    record = standing(entries)
    lines = ['| config | 10^12 FLOPs | minutes | seeds | loss on text | p | depth 3, % | p | |',
             '|' + '---|' * 9]
    for config, e in entries.items():
        verdict = 'good enough' if e.meets else 'not good enough' if e.seeds >= SEEDS else 'open'
        verdict = '**the record**' if config == record else verdict
        lines.append(f'| {config} | {e.flops / 1e12:.2f} | {e.minutes:.1f} | {e.seeds} | '
                     f'{mean(e.text.a):.3f} | {e.p_text:.2g} | {100 * mean(e.right.a):.1f} | '
                     f'{e.p_right:.2g} | {verdict} |')
    return lines
