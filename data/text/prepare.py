"""Convert your own text into a dataset: JSON Lines, parquet or plain text files, for any tokenizer.

In a folder, files with an ending for text are read. Each file of text is a document, and so is each
row of a JSON Lines or parquet file. A large file of text, or a single one, is cut between
paragraphs. If you stop the command, it continues when you repeat it. Several datasets become a
mixture when you type them with their shares: --data=data/notes@0.9,data/toy@0.1.
    python data/text/prepare.py notes --tokenizer=out/smollm2 --out=data/notes
"""
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))    # a clone needs no install
from nanodepth.common.errors import refusals  # noqa: E402
from nanodepth.common.options import read  # noqa: E402
from nanodepth.model import require  # noqa: E402
from nanodepth.text.tokens import Recipe, files_in, format_of, make, number, parts_of  # noqa: E402


@dataclass(kw_only=True)
class Options:
    files: list[str]      # .jsonl, .parquet, anything else as plain text; or folders
    tokenizer: str = 'bytes'        # bytes, gpt2, a checkpoint, a tokenizer.json
    # where .jsonl and .parquet have the text, or with --chat a list of messages
    column: str = 'text'
    tokens: str | None = None       # of one file: stop after this many, such as 70M (None: all)
    chat: bool = False              # remove role tags, leave out what reasoning models wrote
    workers: int = os.cpu_count()   # processes for much text; they do not change the result
    out: Path                       # the folder to write


def main(argv=None):
    args = read(Options, argv, ['files'])
    files = [file for path in map(Path, args.files)
             for file in (files_in(path) if path.is_dir() else [path])]
    require(files, f'there is no text in {", ".join(args.files)}')
    parts = parts_of(files)
    require(not args.tokens or len(parts) == 1, '--tokens is for one large file, or 64 MB of small '
            f'ones: give fewer files ({len(parts)} such parts are here)')
    require(not args.chat or all(map(format_of, files)),
            '--chat is for rows of .jsonl and .parquet, and here is plain text')
    how = Recipe(args.tokenizer, ', '.join(args.files),
                 'chat' if args.chat else 'text', args.column,
              special=True, most=number(args.tokens) if args.tokens else None,
              val_every=200 if len(parts) > 1 else None)
    make(args.out, parts, how, min(len(parts), args.workers))


if __name__ == '__main__':
    with refusals('prepare.py'):
        main()
