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

from nanodepth import ROOT
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
    rows: Path = ROOT / 'docs/results'          # where atlas.csv is written


def ways_of(depth):
    """[(kind, first layer, Way)]: each layer left out; each layer, and each block of four, run
    twice in a row and looped in two half steps."""
    every = [*range(depth)]
    ways = [('as it is', '', Way())]
    ways += [('without', i, Way(loop=every[:i] + every[i + 1:])) for i in every]
    for size in (1, 4):
        mark = f'{size} ' if size > 1 else ''
        for i in range(depth - size + 1):
            ways += [(f'{mark}twice', i, Way(loop=repeat_block(every, i, size))),
                     (f'{mark}by rk', i, Way(window=f'{i}-{i + size - 1}', method='rk', K=2))]
    return ways


def main(argv=None):
    options = read(Options, argv, __doc__)
    notes = Notes(options.out / 'atlas.jsonl')
    if options.tasks:
        subject = Subject(options.models[0], options)
        return answers(options, subject.noted(ASKED.values(), notes))
    models = {name: losses_of(path, options, notes)
              for name, path in run_names(options.models).items()}
    write_rows(*next(iter(models.items())), options)
    probes = {}
    for path in (path for folder in options.probes for path in Path(folder).glob('*.csv')):
        probes.setdefault(path.stem, []).extend(read_rows(path))
    show(options.out / 'atlas.png', draw_atlas, models, probes)


def losses_of(path, options, notes):
    "{(kind, first layer): the loss of each row}. A run of ours is measured on data of its own."
    own = not is_hugging_face(path)
    subject = Subject(path, dataclasses.replace(options, data=None) if own else options)
    ways = ways_of(depth_in(subject.model))
    found = subject.noted([way for _, _, way in ways], notes)
    return {(kind, layer): found[str(way)]['loss'].answers for kind, layer, way in ways}


def write_rows(name, losses, options):
    "The rows of atlas.csv: of each row of text the loss in every way, and its mean over groups."
    losses = dict(losses)
    for group, layers in GROUPS.items():
        for kind in ('without', 'twice', 'by rk', '4 twice', '4 by rk'):
            some = [losses[kind, i] for i in layers if (kind, i) in losses]
            losses[kind, group] = list(map(mean, zip(*some)))
    rows = [dict(seed=row, run=name, way=kind, layer=layer, text=f'{loss:.6g}')
            for (kind, layer), of_rows in losses.items() for row, loss in enumerate(of_rows)]
    file = options.rows / 'atlas.csv'
    replace(file, as_csv(rows, lineterminator='\n'))
    print(f'numbers: {file}')


def answers(options, found):
    "A row for each question and each of the named ways: whether it was answered right."
    file = options.rows / 'atlas_answers.csv'
    rows = [row for row in (read_csv(file) if file.exists() else [])
            if row['measure'] not in found[str(Way())]]
    rows += answer_rows(Path(options.models[0]).name,
                        {said: found[str(way)] for said, way in ASKED.items()})
    replace(file, as_csv(rows, lineterminator='\n'))
    print(f'numbers: {file}')
