"""Tasks of other people that a program generates and that need depth: their numbers are published.

The idea: each task is a few lines that draw an example as pieces of text, of which some are
answers. An example is a row, and only its answers count in the loss. A model of one layer that runs
many times should answer what a model of many layers does, because every step of the answer is the
same.

    phop       letters, each followed by the letter that p hops lead back to     a-b-abba (p = 1)
    addition   n numbers of three digits and their sum                           315+120=00435
    igsm       definitions modulo 7 in any order, and one that is asked for      c:=1*a+2*b;b:=3 ...
    depo       the pairs of a cycle in any order, and who comes k places later   fc.ab.bf.caBafCfb

Papers: "Reasoning with Latent Thoughts: On the Power of Looped Transformers" (arXiv 2502.17416,
appendix A.1) for the first three, p-hop after Sanford, Hsu and Telgarsky (2024); "Physics of
Language Models: part 4.1" (PhysicsLM4) for depo.
Here: every place of a p-hop row is asked, and the answers stand between the letters, where theirs
is the target of the last letter alone. Many answers can be guessed from the letter itself, because
hops among four letters often come back: 62% with four hops in 32 letters, and 82% with eight. The
definitions of igsm are drawn in an order in which each uses earlier ones, without their hierarchy
of objects. A token is a byte.

Usage:
    python data/tasks.py phop           # 4 hops in 32 letters, into data/phop
    python data/tasks.py addition --n=16 --rows=2000000 --out=data/addition_16
"""
import random
import string
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from common.errors import Refused, check_choice, refusals  # noqa: E402
from common.fields import within  # noqa: E402
from common.options import read, word  # noqa: E402
from data.primitives import marked  # noqa: E402
from data.tokens import draw, write_dataset  # noqa: E402


@dataclass
class Options:
    task: str = word()                          # phop, addition, igsm, depo
    # hops of phop (None: 4); the k of depo goes from 1 to p (None: 4)
    p: int | None = within(1, 64, default=None)
    length: int | None = within(2, 4096, default=None)      # letters of phop (None: 32)
    # numbers of addition (None: 2), definitions of igsm (6), names of depo (6)
    n: int | None = within(2, 26, default=None)
    rows: int = within(1, 10 ** 8, default=40_000)      # examples to train on
    out: Path | None = None                     # the folder to write; None: data/TASK


# A task yields pieces (text, the answer's kind or None). Every example has the same length.

def hops(letters, p):
    """For each place i, the place that p hops lead to, or None. A hop from i leads to the latest
    place j <= i whose letter before is the letter at i."""
    after, once = {}, []            # letter -> the latest place behind one of it
    for i, letter in enumerate(letters):
        if i:
            after[letters[i - 1]] = i
        once.append(after.get(letter))
    places = list(range(len(letters)))
    for _ in range(p):
        places = [None if i is None else once[i] for i in places]
    return places


def phop(rng, options):
    letters = rng.choices('abcd', k=options.length)
    for letter, place in zip(letters, hops(letters, options.p)):
        yield letter, None
        yield ('-', None) if place is None else (letters[place], f'{options.p} hops')


def addition(rng, options):
    numbers = [rng.randrange(1000) for _ in range(options.n)]
    yield '+'.join(f'{number:03}' for number in numbers) + '=', None
    yield f'{sum(numbers):05}', 'sum'


def igsm(rng, options):
    "Definitions modulo 7: a number, or a sum of up to three earlier ones, each once or twice."
    values, lines = {}, []
    names = rng.sample(string.ascii_lowercase, options.n)
    for name in names:
        least = 1 if name == names[-1] else 0           # the last one, which is asked, uses others
        earlier = rng.sample(list(values), min(len(values), rng.randint(least, 3)))
        if not earlier:
            values[name] = rng.randrange(7)
            lines.append(f'{name}:={values[name]}')
            continue
        factors = [rng.randint(1, 2) for _ in earlier]
        values[name] = sum(f * values[other] for f, other in zip(factors, earlier)) % 7
        lines.append(f'{name}:=' + '+'.join(f'{f}*{other}' for f, other in zip(factors, earlier)))
    rng.shuffle(lines)
    text = ';'.join(lines)
    # as long as the longest that could be drawn
    yield text.ljust(options.n * 15) + f'?{names[-1]}=', None
    yield str(values[names[-1]]), 'value'


def depo(rng, options):
    names = rng.sample(string.ascii_lowercase, options.n)
    pairs = [a + b for a, b in zip(names, names[1:] + names[:1])]
    rng.shuffle(pairs)
    yield '.'.join(pairs), None
    for _ in range(2 * options.n):
        k = rng.randint(1, options.p)
        i = rng.randrange(options.n)
        yield string.ascii_uppercase[k - 1] + names[i], None        # B asks who comes two later
        yield names[(i + k) % options.n], f'{k} later'


TASKS = dict(phop=phop, addition=addition, igsm=igsm, depo=depo)
SIZES = dict(phop=dict(p=4, length=32), addition=dict(n=2), igsm=dict(n=6), depo=dict(p=4, n=6))


def kinds_of(options):
    if options.task == 'phop':
        return [f'{options.p} hops']
    if options.task == 'depo':
        return [f'{k} later' for k in range(1, options.p + 1)]
    return dict(addition=['sum'], igsm=['value'])[options.task]


def main(argv=None):
    options = read(Options, argv, __doc__)
    check_choice('task', options.task, TASKS)
    sizes = SIZES[options.task]
    for name in ('p', 'length', 'n'):
        value = getattr(options, name)
        if value is None:
            setattr(options, name, sizes.get(name))
        elif name not in sizes:
            raise Refused(f'--{name}={value} has no effect on {options.task}, whose sizes are '
                          + ' and '.join(f'--{size}' for size in sizes))
    if options.task == 'depo' and options.p >= options.n:
        raise Refused(f'--p={options.p} leads round a cycle of --n={options.n}: choose fewer')
    out = options.out or ROOT / 'data' / options.task
    kinds = kinds_of(options)
    seen = set()
    made = {}
    for split, count in (('val', 1000), ('train', options.rows)):
        rng = random.Random(draw(0, f'{options.task} {split}'))
        examples = []
        for _ in range(10 * count):
            if len(examples) == count:
                break
            pieces = TASKS[options.task](rng, options)
            example = marked(((text, kind is not None, kind) for text, kind in pieces), kinds)
            if tuple(example[0]) not in seen:           # no example is in both splits
                examples.append([np.array(part, np.uint16) for part in example])
        if len(examples) < count:
            raise Refused(f'{options.task} of this size has too few different examples: choose a '
                          'larger one, or fewer --rows')
        if split == 'val':
            seen = {tuple(tokens.tolist()) for tokens, _, _ in examples}
        made[split] = examples
    for split, examples in made.items():        # nothing is written before both can be
        tokens, mask, marks = (np.stack(part) for part in zip(*examples))
        write_dataset(out, split, 'bytes', tokens.ravel(), mask=mask.ravel(),
                      marks=marks.ravel() if split == 'val' else None, kinds=kinds,
                      row=tokens.shape[1],
                      origin=dict(made_by='data/tasks.py', task=options.task, p=options.p,
                                  n=options.n, length=options.length, rows=options.rows))
        print(f'{out}/{split}: {len(examples):,} examples of {tokens.shape[1]} tokens; the first: '
              + bytes(tokens[0][1:].tolist()).decode())


if __name__ == '__main__':
    with refusals('tasks.py'):
        main()
