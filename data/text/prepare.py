"""Your own text as a dataset: JSON Lines, parquet or plain text files, for any tokenizer.

Below a folder, the files count whose endings say text. A file of text is a document, and a row is
one; a large file of text, or a single one, is cut between paragraphs. If you stop the command, it
goes on when you repeat it.
    python data/text/prepare.py notes --tokenizer=out/smollm2 --out=data/notes
"""
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))    # a clone needs no install
from nanodepth.common.errors import Refused, refusals, refusing  # noqa: E402
from nanodepth.common.files import claim, read_json, write_json  # noqa: E402
from nanodepth.text.tokenizer import fingerprint, get_tokenizer  # noqa: E402
from nanodepth.text.tokens import (How, files_in, listed, make, number, parts_of,  # noqa: E402
                                   refuse_taken)
from nanodepth.common.options import read  # noqa: E402


@dataclass(kw_only=True)
class Options:
    files: list[str]      # .jsonl, .parquet, anything else as plain text; or folders
    tokenizer: str = 'bytes'        # bytes, gpt2, a checkpoint, a tokenizer.json
    column: str = 'text'            # where .jsonl and .parquet have the text
    tokens: str | None = None       # stop after so many, such as 70M; None: all of the files
    chat: bool = False              # remove role tags, leave out what reasoning models wrote
    workers: int = os.cpu_count()   # processes for much text; they do not change the result
    # a dataset beside --out, and its share of the rows, such as puzzles:0.1: the folder above both
    # becomes their mixture
    mix: str | None = None
    out: Path                       # the folder to write


def shares_of(args):
    "{folder: share} of the mixture that --mix names."
    with refusing(ValueError, why=lambda error: f'--mix={args.mix} must be a folder and a share '
                  'between 0 and 1, such as puzzles:0.1'):
        name, share = args.mix.split(':')
        share = float(share)
        if not 0 < share < 1:
            raise ValueError
    file = args.out.parent / name / 'train.json'
    if not file.exists():
        raise Refused(f'--mix={args.mix}: there is no dataset at {file.parent}')
    if read_json(file)['fingerprint'] != fingerprint(get_tokenizer(args.tokenizer)):
        raise Refused(f'--mix={args.mix}: {file.parent} was made with another tokenizer')
    shares = {args.out.name: 1 - share, name: share}
    refuse_taken(args.out.parent, shares.keys())
    return shares


def main(argv=None):
    args = read(Options, argv, ['files'])
    shares = shares_of(args) if args.mix else None
    files = [file for path in map(Path, args.files)
             for file in (files_in(path) if path.is_dir() else [path])]
    if not files:
        raise Refused(f'there is no text in {", ".join(args.files)}')
    parts = parts_of(map(listed, files))
    how = How(args.tokenizer, ', '.join(args.files), 'chat' if args.chat else 'text', args.column,
              special=True, most=number(args.tokens) if args.tokens else None,
              val_every=200 if len(parts) > 1 else None)
    with claim(args.out):
        make(args.out, parts, how, min(len(parts), args.workers), how.most or math.inf)
    if shares:
        with claim(args.out.resolve().parent):
            write_json(args.out.parent / 'mixture.json', shares)
        print(f'{args.out.parent} is their mixture: ' + ', '.join(
            f'{share:.1%} {name}' for name, share in shares.items()))


if __name__ == '__main__':
    with refusals('prepare.py'):
        main()
