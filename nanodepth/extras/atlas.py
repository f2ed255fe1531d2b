"""What the layers of a published model do for its loss: each left out, run twice, or looped in two
half steps; and so each block of four.

The idea: every change is a way of running the model, and every way reads the same rows of text, so
each row is its own control. docs/ATLAS.md shows what came out; docs/results/claims.toml says which
sentences were to be judged, before anything was measured. What was measured is on disk and is not
measured again.

Usage:
    nanodepth atlas out/smollm2 out/lidas --data=data/pydoc     # goes on where it stopped
"""
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from nanodepth.common.errors import Refused
from nanodepth.common.files import Notes
from nanodepth.common.options import read
from nanodepth.models.checkpoint import is_hugging_face
from nanodepth.scoring.scores import Asked, Subject
from nanodepth.scoring.way import Way, depth_in
from nanodepth.loop import repeat_block
from nanodepth.report.plot import draw_atlas, show
from nanodepth.report.tables import read_rows, run_names, write_csv


@dataclass(kw_only=True)
class Options(Asked):
    WORDS = ['models']
    models: list[str]           # a Hugging Face folder; others, such as toys, are drawn beside it
    # folders in which probe.py has left its numbers
    probes: tuple[str, ...] = ('out/atlas/probe', 'out/atlas/probe_toys')
    out: Path = Path('out/atlas')               # where the picture and its numbers are kept


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
    if options.tasks or not options.measures:
        raise Refused('the atlas is of the loss: leave --tasks and --measures out')
    notes = Notes(options.out / 'atlas.jsonl')
    losses = {}                 # {model: {(kind, first layer): the loss of each row}}
    for name, path in run_names(options.models).items():
        # a run of ours is measured on data of its own
        asked = options if is_hugging_face(path) else dataclasses.replace(options, data=None)
        subject = Subject(path, asked)
        ways = ways_of(depth_in(subject.model))
        scores = subject.noted(ways.values(), notes)
        losses[name] = {at: scores[str(way)]['loss'].answers for at, way in ways.items()}
    out = options.out / 'atlas.png'
    write_csv([dict(seed=row, run=name, way=kind, layer=layer, text=f'{loss:.6g}')
               for name, of_model in losses.items() for (kind, layer), of_rows in of_model.items()
               for row, loss in enumerate(of_rows)], out)
    probes = {}
    for path in (path for folder in options.probes for path in Path(folder).glob('*.csv')):
        probes.setdefault(path.stem, []).extend(read_rows(path))
    show(out, draw_atlas, losses, probes)
