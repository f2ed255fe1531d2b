"""The toy data: Python's own library as text, and reasoning primitives that a small model soon
learns. A copying document repeats a few words, as in JicDqySofJicDqySof. A chain gives values to
names and these to other names, and asks for some of them, as in w7j6z1q3bwdzejhq?d1?w7.
    python data/toy/prepare.py          # takes a minute and needs no network: writes data/toy
"""
import ast
import os
import platform
import random
import string
import sys
import sysconfig
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))    # a clone needs no install
from nanodepth.common.errors import Refused, refusals  # noqa: E402
from nanodepth.common.files import claim  # noqa: E402
from nanodepth.common.options import read  # noqa: E402
from nanodepth.common.seeds import seed_for  # noqa: E402
from nanodepth.text.corpus import end_with_parent  # noqa: E402
from nanodepth.text.loader import START, begin_dataset, write_dataset  # noqa: E402
from nanodepth.text.primitives import chain, random_words  # noqa: E402

END_OF_TEXT = 256       # of the tokenizer that reads bytes
# Tokens of a document, with the end-of-text token before it. Windows of 64, 128, ... hold whole
# documents.
SIZE = 64
# 0, 1, 2, 3: few-shot scores and fine-tuning need depths that were not seen
DEPTHS = 4
# marks 1, 2, ...; with four values depth 5 takes 24 letters
KINDS = ['text', 'copy', *(f'depth {d}' for d in range(6))]
COPIES = 0.25        # of the documents of primitives; the rest are chains
VALUES = 4          # names that get a value, and names at every depth
FIRST = 100_000     # documents from one seed
PIECE = 20_000      # documents from a seed of their own, after those
ROUNDS = 5          # of questions for every name: more than a document has room for


def copy(rng):
    "Pieces (text, can it be known, its kind if it is an answer) of a copying document."
    period = [word.capitalize() for word in random_words(rng, rng.randint(3, 9))]
    for i in range(SIZE):
        known = i > len(period)      # the first word to come back could as well have been a new one
        yield period[i % len(period)], known, 'copy' if known else None


def chains(rng, depths, rounds):
    """Pieces of a document that assigns values to names, hands them on, and asks: first for one of
    the last, then in rounds for all. Only the first answer is marked, because later ones are
    easier: if w has been asked for, b needs one look less."""
    depth = rng.randrange(depths)
    names = rng.sample(string.ascii_lowercase, (depth + 1) * VALUES)
    statements, last = chain(rng, names, rng.sample(string.digits, VALUES), depth)
    asked = {}                          # what every name comes to
    for name, given in statements:
        asked[name] = asked.get(given, given)
    for name, value in statements:
        # With a sign between them, as in `w=7`, a model has to look two places back, which it
        # learns much later, and not reliably (docs/LOG.md).
        yield name + value, False, None
    questions = [rng.choice(list(last)),
                 *(name for _ in range(rounds) for name in rng.sample(list(asked), len(asked)))]
    for i, name in enumerate(questions):
        yield '?' + name, False, None
        yield asked[name], True, f'depth {depth}' if i == 0 else None


def document(rng, depths=DEPTHS, rounds=SIZE):
    """One document as (tokens, mask, marks), SIZE of each. The first documents draw SIZE rounds of
    questions, nearly all of them for nothing: with fewer, data/toy would be another one."""
    tokens = [END_OF_TEXT]
    mask = [0]
    marks = [0]
    pieces = copy(rng) if rng.random() < COPIES else chains(rng, depths, rounds)
    for text, known, kind in pieces:
        tokens += text.encode()
        mask += [known] * len(text)
        mark = KINDS.index(kind) + 1 if kind else 0
        marks += [mark + START if kind else 0] + [mark] * (len(text) - 1)
        if len(tokens) >= SIZE:
            return tokens[:SIZE], mask[:SIZE], marks[:SIZE]


def rows(seed, n, depths, rounds, held_out, label=None):
    "n documents that are not held out, as arrays (tokens, mask, marks) with a row for each."
    rng = random.Random(seed)
    arrays = [np.empty((n, SIZE), dtype) for dtype in ('uint16', 'uint8', 'uint8')]
    for i in tqdm(range(n), label, unit=' documents', disable=label is None):
        example = document(rng, depths, rounds)
        while tuple(example[0]) in held_out:
            example = document(rng, depths, rounds)
        for array, values in zip(arrays, example):
            array[i] = values
    return arrays


def documents(split, n, depths, held_out):
    "n documents of a split: those after the first come from other processes, in pieces."
    sizes = [min(PIECE, n - start) for start in range(FIRST, n, PIECE)]
    pool = ProcessPoolExecutor(max((os.cpu_count() or 2) - 1, 1), None, end_with_parent)
    try:
        pieces = [pool.submit(rows, seed_for(0, f'toy {split} {i}'), size, depths, ROUNDS, held_out)
                  for i, size in enumerate(sizes)]
        first = rows(seed_for(0, f'toy {split}'), min(n, FIRST), depths, SIZE, held_out, split)
        waiting = tqdm(pieces, 'later pieces', unit='piece', disable=not pieces)
        arrays = [first, *(piece.result() for piece in waiting)]
    finally:
        pool.shutdown(cancel_futures=True)
    return [np.concatenate(parts) for parts in zip(*arrays)]


def library():
    "The standard library's files: (path, its source and then its documentation strings, as bytes)."
    home = Path(sysconfig.get_paths()['stdlib'])
    for path in tqdm(sorted(home.rglob('*.py')), 'reading the standard library', unit=' files'):
        part = path.relative_to(home)
        if {'test', 'tests', 'idlelib', 'lib2to3', 'site-packages', 'dist-packages',
            '__pycache__'} & set(part.parts):
            continue
        try:
            source = path.read_text(encoding='utf-8')
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        prose = [ast.get_docstring(node) or '' for node in ast.walk(tree)
                 if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        yield str(part), '\n\n'.join([source,
                                      *(text for text in prose if len(text) > 200)]).encode()


@dataclass
class Options:
    documents: int = 100_000                # documents of primitives to train on
    text: float = 0.1                       # share of text in the training windows
    depths: int = DEPTHS      # how many: depth 0, 1, ...
    out: Path = Path('data/toy')        # the folder to write


def main(argv=None):
    args = read(Options, argv, __doc__)
    if not 1 <= args.depths <= 26 // VALUES:
        raise Refused(f'--depths={args.depths} must be from 1, which is depth 0, to '
                      f'{26 // VALUES}: there are no more letters for names')
    with claim(args.out):       # both splits are of one command
        make(args)


def make(args):
    files = []
    if args.text:
        files = list(library())
    random.Random(seed_for(0, 'toy files')).shuffle(files)
    plan = dict(made_by='data/toy/prepare.py',
                options=dict(documents=args.documents, text=args.text, depths=args.depths))
    begin_dataset(args.out, plan)
    held_out = set()
    cut = len(files) // 20
    for split, share, n in (('val', files[:cut], 4_000), ('train', files[cut:], args.documents)):
        arrays = documents(split, n, args.depths, held_out)
        if split == 'val':      # it comes first: training gets none of its documents
            held_out = set(map(tuple, arrays[0].tolist()))
        tokens, mask, marks = (array.ravel() for array in arrays)
        size = round(len(tokens) * args.text / (1 - args.text))
        text = [np.array([END_OF_TEXT, *raw]) for _, raw in share]
        text = np.concatenate([np.zeros(0, int), *text])[:size]
        if len(text) < size:
            print(f'the standard library has no more text: it is '
                  f'{len(text) / (len(tokens) + len(text)):.0%} of {split}')
        marks = np.concatenate((marks, np.full(len(text), START + 1)))
        write_dataset(args.out, split, 'bytes', np.concatenate((tokens, text)),
                      mask=np.concatenate((mask, np.ones(len(text)))),
                      marks=marks if split == 'val' else None, kinds=KINDS[:2 + args.depths],
                      origin=plan | dict(python=platform.python_version(), documents=n,
                                         copies=COPIES, text=f'{len(text):,} bytes of {len(share)} '
                                         'files of the standard library'))
        print(f'{args.out}/{split}: {n:,} documents of primitives, {len(tokens):,} tokens; '
              f'text from {len(share)} files, {len(text):,} tokens')


if __name__ == '__main__':
    with refusals('prepare.py'):
        main()
