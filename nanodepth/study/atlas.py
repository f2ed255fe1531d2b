"""What the layers of a published model do for its loss and its answers: each left out, run twice,
or looped in two half steps; and so each block of four.

The idea: every change is a way of running the model, and every way reads the same rows of text, so
each row is its own control. docs/ATLAS.md shows what came out; docs/results/claims.toml says which
sentences were to be judged, before anything was measured. What was measured is on disk and is not
measured again.

Usage:
    nanodepth atlas out/smollm2 out/lidas --data=data/pydoc     # goes on where it stopped
    nanodepth atlas out/smollm2 --tasks=questions_piqa --measures=      # the named ways' answers
"""
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from nanodepth.common.files import Notes, replace
from nanodepth.common.options import read
from nanodepth.models.checkpoint import is_hugging_face
from nanodepth.asking.scoring import Asked, Subject
from nanodepth.asking.way import Way, depth_in
from nanodepth.loop import repeat_block
from nanodepth.report.plot import draw_atlas, show
from nanodepth.report.tables import answer_rows, as_csv, mean, read_csv, read_rows, run_names

# layers that are judged together: of each row, the mean over them
GROUPS = {'1 to 9': range(1, 10), '10 to 19': range(10, 20), '20 to 28': range(20, 29),
          '8 to 11': range(8, 12), '4 to 25, but 8 to 11': [*range(4, 8), *range(12, 26)]}
# the ways that are asked questions: what was named before anything was measured
ASKED = {'as it is': Way(), 'mid4, K = 2': Way(window='mid4', method='rk', K=2),
         'mid4, K = 6': Way(window='mid4', method='rk', K=6),
         '4-7, K = 2': Way(window='4-7', method='rk', K=2),
         '8 to 11 twice': Way(loop=repeat_block(range(30), 8, 4)),
         '14 to 15 twice': Way(loop=repeat_block(range(30), 14, 2))}


@dataclass(kw_only=True)
class Options(Asked):
    WORDS = ['models']
    models: list[str]           # a Hugging Face folder; others, such as toys, are drawn beside it
    # folders in which probe.py has left its numbers
    probes: tuple[str, ...] = ('out/atlas/probe', 'out/atlas/probe_toys')
    out: Path = Path('out/atlas')               # where what was measured is kept
    rows: Path | None = None    # where atlas.csv is written (None: there; make: docs/results)


def ways_of(depth):
    """{(kind, first layer): Way}: each layer left out; each layer, and each block of four, run
    twice in a row and looped in two half steps."""
    every = [*range(depth)]
    ways = {('as it is', ''): Way()}
    ways |= {('without', i): Way(loop=every[:i] + every[i + 1:]) for i in every}
    for size, mark in ((1, ''), (4, '4 ')):
        for i in range(depth - size + 1):
            ways[f'{mark}twice', i] = Way(loop=repeat_block(every, i, size))
            ways[f'{mark}by rk', i] = Way(window=f'{i}-{i + size - 1}', method='rk', K=2)
    return ways


def main(argv=None):
    options = read(Options, argv, __doc__)
    notes = Notes(options.out / 'atlas.jsonl')
    losses = {}                 # {model: {(kind, first layer): the loss of each row}}
    for name, path in run_names(options.models).items():
        # a run of ours is measured on data of its own
        asked = options if is_hugging_face(path) else dataclasses.replace(options, data=None)
        subject = Subject(path, asked)
        if options.tasks:
            return write_answers(name, subject.noted(ASKED.values(), notes), options)
        ways = ways_of(depth_in(subject.model))
        scores = subject.noted(ways.values(), notes)
        losses[name] = {at: scores[str(way)]['loss'].answers for at, way in ways.items()}
    write_losses(*next(iter(losses.items())), options)
    probes = {}
    for path in (path for folder in options.probes for path in Path(folder).glob('*.csv')):
        probes.setdefault(path.stem, []).extend(read_rows(path))
    show(options.out / 'atlas.png', draw_atlas, losses, probes)


def write_losses(name, losses, options):
    "The rows of atlas.csv: of each row of text the loss in every way, and its mean over groups."
    losses = dict(losses)
    for group, layers in GROUPS.items():
        for kind in ('without', 'twice', 'by rk', '4 twice', '4 by rk'):
            some = [losses[kind, i] for i in layers if (kind, i) in losses]
            losses[kind, group] = list(map(mean, zip(*some)))
    write((options.rows or options.out) / 'atlas.csv',
          [dict(seed=row, run=name, way=kind, layer=layer, text=f'{loss:.6g}')
           for (kind, layer), of_rows in losses.items() for row, loss in enumerate(of_rows)])


def write_answers(name, scores, options):
    "A row for each question and each of the named ways: whether it was answered right."
    file = (options.rows or options.out) / 'atlas_answers.csv'
    others = [row for row in (read_csv(file) if file.exists() else [])
              if row['measure'] not in scores[str(Way())]]
    write(file, others + answer_rows(name, {said: scores[str(way)] for said, way in ASKED.items()}))


def write(file, rows):
    replace(file, as_csv(rows, lineterminator='\n'))
    print(f'numbers: {file}')
