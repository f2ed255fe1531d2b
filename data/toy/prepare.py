"""Make the toy data: real text that every Python installation has, and generated documents of
reasoning primitives.

The text is the source code of the standard library and its documentation strings. The primitives
are the papers' two kinds, in a form that a model of 2 million parameters learns within minutes:

    copy        a few random words, over and over             JicDqySofJicDqySofJic...
    aliases 0-3 names get values, other names get those       w7j6z1q3 bwdzejhq ?d1?w7?e6...
                names, up to three times; then some are       (without the spaces)
                asked for

A name is a letter, a value is a digit, and a question mark precedes the name that is asked for.
There is no sign between a name and its value, because with `w=7` the model would have to look two
tokens back, which it learns much later, and not reliably. Forms with a sign, and 4 and 5 aliases,
are left out of the mix, because few-shot scores and fine-tuning need something unseen.

Tokens that cannot be predicted have mask 0, so they do not count in the loss: the statements, the
first appearance of a word, and the name that is asked for. Every document of primitives has 64
tokens, so that windows of 64, 128, ... tokens have complete documents. Training and validation
share no file and no document.

In the validation split, answers are marked with their kind. In copying, every repeated word is an
answer. In a chain, only the answer to the first question is marked, which always asks for one of
the last names. Later questions are easier (if w has been asked for, b needs one look-up less), and
count in the loss alone.

    python data/toy/prepare.py          # a minute, no network: writes data/toy
    python data/toy/prepare.py --aliases=0-5 --out=data/toy_deep
"""
import argparse
import ast
import hashlib
import json
import multiprocessing
import platform
import random
import re
import string
import sys
import sysconfig
import warnings
from pathlib import Path

import numpy as np
from tqdm import tqdm

END_OF_TEXT = 256       # tokens are the bytes 0 to 255, and this one
SIZE = 64           # tokens of a document, with the end-of-text token before it
# the names of the marks 1, 2, ... (with four values, five aliases take 24 of the 26 letters)
KINDS = ['text', 'copy', *(f'aliases {n}' for n in range(6))]
ANSWER_START = 128      # it is added to the mark of an answer's first token
COPIES = 0.25       # of the documents of primitives; the rest are chains
VALUES = 4          # names that get a value, and names of each further step
FIRST = 100_000     # documents that are drawn with one seed
PIECE = 20_000      # after these, documents for each further seed


def seed_for(purpose):
    "Return a seed of 63 bits for a purpose, as training/plan.py does for the seed 0."
    digest = hashlib.blake2b(f'0 {purpose} 0'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big') >> 1


def random_words(rng, n):
    "Return n different words of three letters."
    words = []
    while len(words) < n:
        word = ''.join(rng.choice(string.ascii_lowercase) for _ in range(3))
        if word not in words:
            words.append(word)
    return words


def copy(rng):
    """Yield the pieces of a copying document: (text, whether it can be predicted, its kind if it is
    an answer)."""
    period = [word.capitalize() for word in random_words(rng, rng.randint(3, 9))]
    for i in range(SIZE):
        known = i > len(period)      # the first word to come back could as well have been a new one
        yield period[i % len(period)], known, 'copy' if known else None


def chain(rng, most, rounds):
    """Yield the pieces of a chain. Its statements give each value a name and then, once for each
    alias (there are up to `most`), give each name an alias at random. The first question is about
    one of the last names, and then there are rounds of questions about all names."""
    aliases = rng.randrange(most + 1)
    names = rng.sample(string.ascii_lowercase, (aliases + 1) * VALUES)
    level = dict(zip(names, rng.sample(string.digits, VALUES)))
    asked = dict(level)                 # what every name comes to
    statements = list(level.items())
    for n in range(1, aliases + 1):
        sources = rng.sample(list(level), VALUES)
        level = dict(zip(names[n * VALUES:(n + 1) * VALUES], sources))
        statements += level.items()
        asked |= {name: asked[source] for name, source in level.items()}
    for name, given in statements:
        yield name + given, False, None
    questions = [rng.choice(list(level)),
                 *(name for _ in range(rounds) for name in rng.sample(list(asked), len(asked)))]
    for i, name in enumerate(questions):
        yield '?' + name, False, None
        yield asked[name], True, f'aliases {aliases}' if i == 0 else None


def document(rng, most, rounds):
    "Return a document as (tokens, mask, marks), SIZE numbers each."
    tokens, mask, marks = [END_OF_TEXT], [0], [0]
    pieces = copy(rng) if rng.random() < COPIES else chain(rng, most, rounds)
    for text, known, kind in pieces:
        tokens += text.encode()
        mask += [known] * len(text)
        mark = KINDS.index(kind) + 1 if kind else 0
        marks += [mark + ANSWER_START if kind else 0] + [mark] * (len(text) - 1)
        if len(tokens) >= SIZE:
            return tokens[:SIZE], mask[:SIZE], marks[:SIZE]


def rows(seed, n, most, rounds, held_out):
    "Return n documents that are not held out: (3, n, SIZE)."
    rng = random.Random(seed)
    made = np.empty((3, n, SIZE), np.uint16)
    for i in tqdm(range(n), unit=' documents'):
        example = document(rng, most, rounds)
        while tuple(example[0]) in held_out:
            example = document(rng, most, rounds)
        made[:, i] = example
    return made


def documents(split, n, most, held_out):
    """Return n documents of a split. The first ones draw SIZE rounds of questions, most of which
    are cut off. Drawing fewer would change the documents of data/toy."""
    work = [(seed_for(f'toy {split}'), min(n, FIRST), most, SIZE, held_out)]
    work += [(seed_for(f'toy {split} {i}'), min(PIECE, n - first), most, 5, held_out)
             for i, first in enumerate(range(FIRST, n, PIECE))]
    if len(work) == 1:
        return rows(*work[0])
    with multiprocessing.Pool() as pool:
        return np.concatenate(pool.starmap(rows, work, chunksize=1), axis=1)


def library():
    "The standard library's files, each as bytes: its source and then its documentation strings."
    home = Path(sysconfig.get_paths()['stdlib'])
    others = {'test', 'tests', 'idlelib', 'lib2to3', 'site-packages', 'dist-packages',
              '__pycache__'}
    for path in tqdm(sorted(home.rglob('*.py')), 'reading the standard library', unit=' files'):
        if others & set(path.relative_to(home).parts):
            continue
        try:
            source = path.read_text(encoding='utf-8')
            with warnings.catch_warnings(action='ignore'):
                tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        prose = [ast.get_docstring(node) or '' for node in ast.walk(tree)
                 if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        yield '\n\n'.join([source, *(text for text in prose if len(text) > 200)]).encode()


def write(folder, split, kinds, origin, **arrays):
    "The files of a split; the JSON, which says what is in them, comes last."
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'train.json').unlink(missing_ok=True)     # it would vouch for half of the new
    sums = {}
    for ending, array in arrays.items():
        if array is not None:
            raw = np.asarray(array, 'uint16' if ending == 'bin' else 'uint8').tobytes()
            (folder / f'{split}_000.{ending}').write_bytes(raw)
            sums[f'.{ending}'] = hashlib.sha256(raw).hexdigest()
    n = len(arrays['bin'])
    (folder / f'{split}.json').write_text(json.dumps(dict(
        tokenizer='bytes', fingerprint='76286bf1999d54d6', n_vocab=257, dtype='uint16', tokens=n,
        kinds=kinds, shards=[dict(file=f'{split}_000.bin', sha256=sums, tokens=n)],
        origin=origin), indent=1))


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--documents', type=int, default=100_000, help='of primitives, to train on')
    parser.add_argument('--text', type=float, default=0.1, help='share of text in the windows')
    parser.add_argument('--aliases', default='0-3', help='from none to how many')
    parser.add_argument('--out', type=Path, default='data/toy', help='the folder to write')
    c = parser.parse_args(argv)
    if not re.fullmatch('0-[0-5]', c.aliases) or not 0 <= c.text < 1:
        sys.exit('--aliases is 0-5 at most: there are no more letters; --text is a share below 1')
    most, options = int(c.aliases[2:]), dict(documents=c.documents, text=c.text, aliases=c.aliases)
    there = c.out / 'val.json'
    if there.exists() and json.loads(there.read_text())['origin'].get('options') != options:
        sys.exit(f'{c.out} holds another dataset: choose another --out, or remove it')
    files = list(library()) if c.text else []
    random.Random(seed_for('toy files')).shuffle(files)
    cut = len(files) // 20
    held_out = set()
    for split, share, n in (('val', files[:cut], 4_000), ('train', files[cut:], c.documents)):
        made = documents(split, n, most, held_out)
        if split == 'val':      # it comes first: training gets none of its documents
            held_out = set(map(tuple, made[0].tolist()))
        tokens, mask, marks = made.reshape(3, -1)
        size = round(len(tokens) * c.text / (1 - c.text))
        text = [np.array([END_OF_TEXT, *raw]) for raw in share]
        text = np.concatenate([np.zeros(0, int), *text])[:size]
        marks = np.concatenate((marks, np.full(len(text), ANSWER_START + 1)))
        write(c.out, split, KINDS[:3 + most], bin=np.concatenate((tokens, text)),
              mask=np.concatenate((mask, np.ones(len(text)))),
              marks=marks if split == 'val' else None,
              origin=dict(made_by='data/toy/prepare.py', options=options, copies=COPIES,
                          python=platform.python_version(),
                          text=f'{len(text):,} bytes of {len(share)} files of the library'))
        print(f'{c.out}/{split}: {n:,} documents of primitives, {len(tokens):,} tokens; text from '
              f'{len(share)} files, {len(text):,} tokens')
        if len(text) < size:
            print('(the library has no more, so the share of text is '
                  f'{len(text) / (len(tokens) + len(text)):.1%})')


if __name__ == '__main__':
    main(sys.argv[1:])
