"""Your own text as a dataset: JSON Lines, parquet or plain text files, for whatever tokenizer a
checkpoint has.

A document is a row of a JSON Lines or parquet file (its column --column), or a whole text file;
each begins as the tokenizer's documents do. Every hundredth goes to the validation split.
Everything is held in memory until it is written, so this is for up to some hundred million tokens.

--chat is for instruction data that is read as plain text, as "Retrofitted Recurrence" (section 4.4)
does: the tags of user and assistant are removed, and examples that a reasoning model wrote are left
out: those with a thinking block, or whose other columns name such a model. The paper names
DeepSeek-R1; which columns say so depends on the dataset.

    python data/text/prepare.py notes/*.txt --tokenizer=SmolLM-360M --out=data/notes python
data/text/prepare.py sft.jsonl --chat --tokenizer=out/tinyllama_4-8-4 --out=data/nemotron_math
"""
import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from common.errors import Refused
from data.sources import chat  # noqa: E402
from data.tokenizer import get_tokenizer, start_of_document  # noqa: E402
from data.tokens import write_dataset  # noqa: E402


def rows(paths, column):
    "The documents of some files, as dicts."
    from datasets import load_dataset
    for path in paths:
        kind = {'.jsonl': 'json', '.json': 'json', '.parquet': 'parquet'}.get(path.suffix)
        if not path.exists():
            raise Refused(f'there is no {path}')
        if kind is None:
            yield {column: path.read_text(encoding='utf-8', errors='replace')}
            continue
        for i, row in enumerate(load_dataset(kind, data_files=str(path), split='train',
                                             streaming=True)):
            if not isinstance(row.get(column), str):
                raise Refused(
                    f'{path}: row {i} has no text in the column {column!r}, but the columns '
                    f'{", ".join(row)}')
            yield row


def main(argv=None):
    parser = argparse.ArgumentParser(description='Make a dataset of text files.')
    parser.add_argument('files', nargs='+', type=Path,
                        help='.jsonl, .parquet, or anything else as plain text')
    parser.add_argument('--tokenizer', default='bytes',
                        help="'bytes', 'gpt2', a checkpoint, a tokenizer.json")
    parser.add_argument('--column', default='text')
    parser.add_argument('--chat', action='store_true',
                        help='remove role tags, leave out what reasoning models wrote')
    parser.add_argument('--out', type=Path, required=True)
    args = parser.parse_args(argv)
    from tqdm import tqdm
    tokenizer = get_tokenizer(args.tokenizer)
    start = start_of_document(tokenizer)
    splits, left_out, i = dict(train=[], val=[]), 0, 0
    for row in tqdm(rows(args.files, args.column), unit='document'):
        text = chat(row, args.column) if args.chat else row[args.column]
        if not text:
            left_out += 1
            continue
        splits['val' if i % 100 == 0
               else 'train'].append(
                   np.array([*start, *tokenizer.encode(text, allowed_special='all')],
                            dtype='uint32'))
        i += 1
    if len(splits['train']) == 0:
        raise Refused(f'{i} documents are too few: one goes to validation, the others to training')
    for split, documents in splits.items():
        tokens = np.concatenate(documents)
        write_dataset(args.out, split, args.tokenizer, tokens,
                      origin=dict(made_by='data/text/prepare.py',
                                  files=[path.name for path in args.files],
                                  documents=len(documents)))
        print(f'{args.out}/{split}: {len(documents):,} documents, {len(tokens):,} tokens')
    if left_out:
        print(f'{left_out:,} documents were left out: empty, or written by a reasoning model')
if __name__ == '__main__':
    from common.errors import refusals
    with refusals('prepare.py'):
        main()
