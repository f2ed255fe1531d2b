"""Your own text as a dataset: JSON Lines, parquet or plain text files, for any tokenizer. All of it
is held in memory, which is fine up to some hundred million tokens. For more, --workers and --tokens
read one folder a file at a time, and a command that was stopped goes on when it is repeated.
    python data/text/prepare.py notes --tokenizer=out/smollm2 --out=data/notes
"""
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))    # a clone needs no install
from nanodepth.common.errors import Refused, refusals, refusing  # noqa: E402
from nanodepth.common.files import claim, write_json  # noqa: E402
from nanodepth.train import read  # noqa: E402
from nanodepth.text.corpus import (Source, chat, column, is_hidden, kind_of,  # noqa: E402
                                   number, prepare, refuse_taken, texts)
from nanodepth.train import BEGINS as START  # noqa: E402
from nanodepth.text.loader import (begin_dataset, refuse_others,  # noqa: E402
                                   write_dataset)
from nanodepth.text.tokenizer import (encode_as_array, get_tokenizer,  # noqa: E402
                                      start_of_document)

MANY = 1000         # documents, from which on one of a hundred is enough to validate with


@dataclass(kw_only=True)
class Options:
    files: list[str]      # .jsonl, .parquet, anything else as plain text; or folders
    tokenizer: str = 'bytes'        # bytes, gpt2, a checkpoint, a tokenizer.json
    column: str = 'text'            # where .jsonl and .parquet have the text
    tokens: str | None = None       # stop after so many, such as 70M; None: all of the files
    chat: bool = False              # remove role tags, leave out what reasoning models wrote
    workers: int | None = None      # a folder, by so many processes, a file at a time
    # a dataset beside --out, and its share of the rows, such as puzzles:0.1: the folder above both
    # becomes their mixture
    mix: str | None = None
    out: Path                       # the folder to write


def documents(paths, read, name):
    "The texts of some files: read(row, name) of each row, or of a whole text file as a row."
    for path in paths:
        if not path.exists():
            raise Refused(f'there is no {path}')
        if kind_of(path):
            yield from texts(path, lambda row: read(row, name))
            continue
        with refusing(UnicodeDecodeError, why=lambda error: f'{path} is not text in UTF-8 '
                      f'({error.reason} at byte {error.start}): convert it first, or leave it out'):
            text = path.read_text(encoding='utf-8')
        yield read({name: text}, name)


def in_folders(paths):
    "The files given, and those below the folders given, in the order of their names."
    files = []
    for path in map(Path, paths):
        below = sorted(p for p in path.rglob('*')
                       if p.is_file() and not is_hidden(p.relative_to(path)))
        files += below if path.is_dir() else [path]
    if not files:
        raise Refused(f'{", ".join(map(str, paths))}: there is no file in there')
    return files


def cut(text, size=2000):
    "A long text as documents of about so many characters, cut between paragraphs."
    parts = ['']
    for paragraph in text.split('\n\n'):
        if len(parts[-1]) >= size:
            parts.append('')
        parts[-1] += paragraph + '\n\n'
    return parts


def by_many(args):
    "A folder as data/smollm has its sources: a shard for each file."
    if not args.tokens or len(args.files) > 1 or args.column != 'text':
        raise Refused('--workers is for one folder, whose text is in the column `text`, and for '
                      'so many --tokens')
    folder = Path(args.files[0]).resolve()
    source = Source(folder.name, 1.0, '', '', read='chat' if args.chat else 'text')
    prepare({folder.name: [source]}, __doc__, [
        f'--tokens={args.tokens}', f'--tokenizer={args.tokenizer}', f'--workers={args.workers}',
        f'--source={folder.parent}', f'--out={args.out}'])


def shares_of(args):
    "{folder: share} of the mixture that --mix names."
    name, colon, share = args.mix.partition(':')
    with refusing(ValueError, why=lambda error: f'--mix={args.mix} must be a folder and a share, '
                  'such as puzzles:0.1'):
        share = float(share)
    if not 0.001 <= share <= 0.999:
        raise Refused(f'--mix={args.mix}: the share must be from 0.001 to 0.999')
    if not (args.out.parent / name / 'train.json').exists():
        raise Refused(f'--mix={args.mix}: there is no dataset at {args.out.parent / name}')
    parts = {args.out.name: 1 - share, name: share}
    refuse_taken(args.out.parent, parts.keys())
    return parts


def main(argv=None):
    args = read(Options, argv, ['files'])
    parts = shares_of(args) if args.mix else None
    if args.workers:
        if args.mix:
            raise Refused('--mix is for a dataset that is made at once, without --workers')
        return by_many(args)
    plan = dict(made_by='data/text/prepare.py', options=dict(
        files=args.files, tokenizer=args.tokenizer, column=args.column, tokens=args.tokens,
        chat=args.chat))
    refuse_others(args.out, plan)
    files = in_folders(args.files)
    tokenizer = get_tokenizer(args.tokenizer)
    start = start_of_document(tokenizer)
    budget = number(args.tokens) if args.tokens else math.inf
    all_tokens, left_out = [], 0
    text_of = chat if args.chat else column
    all_texts = documents(files, text_of, args.column)
    if len(files) == 1 and not kind_of(files[0]):
        all_texts = cut(next(all_texts) or '')
    for text in tqdm(all_texts, unit='document'):
        if not text:
            left_out += 1
            continue
        tokens = encode_as_array(tokenizer, text)
        tokens = np.concatenate((np.array(start, tokens.dtype), tokens))
        all_tokens.append(tokens)
        budget -= len(tokens)
        if budget <= 0:
            break
    if len(all_tokens) < 2:
        raise Refused(f'{len(all_tokens)} documents are too few: one goes to validation, the '
                      'others to training (a text file is one document, and a row of a parquet or '
                      'JSON Lines file is one)')
    every = 100 if len(all_tokens) >= MANY else 10
    splits = dict(train=[t for i, t in enumerate(all_tokens) if i % every],
                  val=all_tokens[::every])
    with claim(args.out):       # both splits are of one command
        begin_dataset(args.out, plan)
        for split, documents_of in splits.items():
            tokens = np.concatenate(documents_of)
            # text is a kind of answer, of which each token is one: a mixture tells it from others
            marks = np.full(len(tokens), START + 1, 'uint8') if split == 'val' else None
            write_dataset(args.out, split, args.tokenizer, tokens, marks=marks, kinds=['text'],
                          origin=plan | dict(documents=len(documents_of)))
            print(f'{args.out}/{split}: {len(documents_of):,} documents, {len(tokens):,} tokens')
    if parts:
        with claim(args.out.parent):
            write_json(args.out.parent / 'mixture.json', parts)
        print(f'{args.out.parent} is their mixture: ' + ', '.join(
            f'{share:.1%} {name}' for name, share in parts.items()))
    if left_out:
        print(f'{left_out:,} documents were left out: empty, or written by a reasoning model')


if __name__ == '__main__':
    with refusals('prepare.py'):
        main()
