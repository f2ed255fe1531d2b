"""Your own text as a dataset: JSON Lines, parquet or plain text files, for any tokenizer.

A document is a row of a JSON Lines or parquet file (its column --column), or a whole text file;
each begins as the tokenizer's documents do. Every hundredth goes to the validation split.
Everything is held in memory until it is written, so this is for up to some hundred million tokens.

--chat is for instruction data that is read as plain text, as "Retrofitted Recurrence" (section 4.4)
does: the tags of user and assistant are removed, and examples that a reasoning model wrote are left
out: those with a thinking block, or whose other columns name such a model.

    python data/text/prepare.py notes/*.txt --tokenizer=SmolLM-360M --out=data/notes
    python data/text/prepare.py sft.jsonl --chat --tokenizer=out/tinyllama_4-8-4 --out=data/sft_math
"""
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from common.errors import Refused, refusals, refusing  # noqa: E402
from common.options import read, words  # noqa: E402
from data.sources import chat, column, kind_of, texts  # noqa: E402
from data.tokenizer import get_tokenizer, start_of_document  # noqa: E402
from data.tokens import write_dataset  # noqa: E402


@dataclass(kw_only=True)
class Options:
    files: list[str] = words()      # .jsonl, .parquet, or anything else as plain text
    tokenizer: str = 'bytes'        # bytes, gpt2, a checkpoint, a tokenizer.json
    column: str = 'text'            # where .jsonl and .parquet have the text
    chat: bool = False              # remove role tags, leave out what reasoning models wrote
    out: Path                       # the folder to write


def documents(paths, read, name):
    "The texts of some files: read(row, name) of each row, or of a whole text file as a row."
    for path in paths:
        if not path.exists():
            raise Refused(f'there is no {path}')
        if kind_of(path):
            yield from texts([path], lambda row: read(row, name))
            continue
        with refusing(UnicodeDecodeError, why=lambda error: f'{path} is not text in UTF-8 '
                      f'({error.reason} at byte {error.start}): convert it first, or leave it out'):
            text = path.read_text(encoding='utf-8')
        yield read({name: text}, name)


def main(argv=None):
    args = read(Options, argv, __doc__)
    files = [Path(file) for file in args.files]
    tokenizer = get_tokenizer(args.tokenizer)
    start = start_of_document(tokenizer)
    splits, left_out, n = dict(train=[], val=[]), 0, 0
    text_of = chat if args.chat else column
    for text in tqdm(documents(files, text_of, args.column), unit='document'):
        if not text:
            left_out += 1
            continue
        tokens = [*start, *tokenizer.encode(text, allowed_special='all')]
        splits['train' if n % 100 else 'val'].append(np.array(tokens, dtype='uint32'))
        n += 1
    if not splits['train']:
        raise Refused(f'{n} documents are too few: one goes to validation, the others to training')
    for split, found in splits.items():
        tokens = np.concatenate(found)
        write_dataset(args.out, split, args.tokenizer, tokens,
                      origin=dict(made_by='data/text/prepare.py', documents=len(found),
                                  files=[path.name for path in files]))
        print(f'{args.out}/{split}: {len(found):,} documents, {len(tokens):,} tokens')
    if left_out:
        print(f'{left_out:,} documents were left out: empty, or written by a reasoning model')
if __name__ == '__main__':
    with refusals('prepare.py'):
        main()
