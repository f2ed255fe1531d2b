"""p-hop induction: a task that needs depth, and for which others have published a table of loops.

The idea: a row of letters, and after each letter the one that p hops lead back to. A hop from a
letter leads to the place behind the latest earlier letter like it. Every hop is the same step, so
a model of one layer that runs many times should answer what a model of many layers does. An example
is a row, and only its answers count in the loss.

    a-b-abba        letters a b a b, each with its answer, one hop back (p = 1); -: there is none

Papers: "Reasoning with Latent Thoughts: On the Power of Looped Transformers" (arXiv 2502.17416,
appendix A.1), after Sanford, Hsu and Telgarsky (2024).
Here: every place of a row is asked, and the answers stand between the letters, where theirs is the
target of the last letter alone. Many answers can be guessed from the letter itself, because hops
among four letters often come back: 62% with four hops in 32 letters, and 82% with eight. A token is
a byte.

    python data/phop/prepare.py                             # 4 hops in 32 letters: data/phop
    python data/phop/prepare.py --p=8 --out=data/phop_8     # 8 hops
"""
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))    # a clone needs no install
from nanodepth.common.errors import Refused, refusals  # noqa: E402
from nanodepth.common.options import read  # noqa: E402
from nanodepth.data.primitives import marked  # noqa: E402
from nanodepth.data.tokens import draw, write_dataset  # noqa: E402


@dataclass
class Options:
    p: int = 4                          # hops
    length: int = 32                    # letters of a row
    rows: int = 40_000                  # examples to train on
    out: Path = Path('data/phop')       # the folder to write


def hops(letters, p):
    """For each place i, the place that p hops lead to, or None. A hop from i leads to the latest
    place j <= i whose letter before is the letter at i."""
    after = {}          # letter -> the latest place behind one of it
    once = []           # where one hop leads
    for i, letter in enumerate(letters):
        if i:
            after[letters[i - 1]] = i
        once.append(after.get(letter))
    places = list(range(len(letters)))
    for _ in range(p):
        places = [None if i is None else once[i] for i in places]
    return places


def phop(rng, p, length):
    "Pieces (text, can it be known, its kind if it is an answer) of an example."
    letters = rng.choices('abcd', k=length)
    for letter, place in zip(letters, hops(letters, p)):
        yield letter, False, None
        if place is None:
            yield '-', False, None
        else:
            yield letters[place], True, f'{p} hops'


def examples_of(split, count, options, left_out):
    "So many rows of a split, none of which is in `left_out`."
    rng = random.Random(draw(0, f'phop {split}'))
    kinds = [f'{options.p} hops']
    examples = []
    for _ in range(10 * count):
        example = marked(phop(rng, options.p, options.length), kinds)
        if tuple(example[0]) not in left_out:
            examples.append([np.array(part, np.uint16) for part in example])
        if len(examples) == count:
            return examples
    raise Refused(f'--p={options.p} --length={options.length} has too few different examples: '
                  'choose more letters, or fewer --rows')


def main(argv=None):
    options = read(Options, argv, __doc__)
    held_out = examples_of('val', 1000, options, set())
    train = examples_of('train', options.rows, options,
                        {tuple(tokens.tolist()) for tokens, _, _ in held_out})
    for split, examples in dict(val=held_out, train=train).items():
        tokens, mask, marks = (np.stack(part) for part in zip(*examples))
        write_dataset(options.out, split, 'bytes', tokens.ravel(), mask=mask.ravel(),
                      marks=marks.ravel() if split == 'val' else None, kinds=[f'{options.p} hops'],
                      row=tokens.shape[1],
                      origin=dict(made_by='data/phop/prepare.py', p=options.p,
                                  length=options.length, rows=options.rows))
        print(f'{options.out}/{split}: {len(examples):,} examples of {tokens.shape[1]} tokens; the '
              'first: ' + bytes(tokens[0][1:].tolist()).decode())


if __name__ == '__main__':
    with refusals('prepare.py'):
        main()
