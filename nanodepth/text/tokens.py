"""Turn text into datasets for train.py's Loader: your own text, and mixtures of large datasets.

A dataset is made in parts, and each part becomes a shard. The list of files decides the parts: a
large file is a part, and small files are put together. A part is complete or does not exist, so a
command that was stopped continues when it is repeated, and the number of processes does not change
the result.
Usage: prepare({'smollm': [Source(...)]}, out=Path('data/smollm'))     # in data/smollm/prepare.py
"""
import contextlib
import fnmatch
import functools
import glob
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanodepth.common.errors import check_choice, as_refusal
from nanodepth.common.files import hash_of, read_json, replace, write_json
from nanodepth.common.options import read
from nanodepth.model import Refused, require
from nanodepth.text.tokenizer import (copy_tokenizer, encode_as_array, fingerprint, get_tokenizer,
                                      stands_for, start_of_document, token_type)
from nanodepth.training.checkpoint import remove_unfinished, whole
from nanodepth.training.loader import ANSWER_START

# The endings of files that are read if a folder is named. (A .json there may be settings.)
TEXTS = ('.txt .md .rst .org .tex .html .css .py .js .ts .c .h .cc .cpp .cu .rs .go .java .rb .lua '
         '.r .jl .hs .ml .sh .sql .toml .yaml .yml .ini .cfg .parquet .jsonl .jsonl.gz .jsonl.zst')
PART = 2**26        # bytes of small files that become one shard
MANY = 1000         # from this many documents on, one of a hundred is enough for validation


@dataclass(frozen=True)
class Recipe:
    "Settings for turning files into tokens."
    tokenizer: str
    source: str                     # where the files are from
    read: str = 'text'              # how a row becomes a text: a key of READ
    column: str = 'text'            # the column that has the text
    special: bool = False           # <|im_end|> in a text is this token, and not plain text
    most: int | None = None         # tokens at which a part ends; None: all
    # One document of this many is for validation. A hash of its text decides, so copies land in the
    # same split. None: by position, one in 10, or one in 100 of at least MANY documents
    val_every: int | None = None


# ------------------------------------------------------------------------------ a file -> its texts

ROLE_TAGS = re.compile(r'<\|im_(?:start|end)\|>(?:system|user|assistant)?\n?|'
                       r'<\|(?:start_header_id|end_header_id|eot_id)\|>|'
                       r'^(?:system|user|assistant|human)\s*:\s*|'
                       r'<(?:extra_id_\d+|/?(?:user|assistant|system))>\s*', re.I | re.M)
REASONING = re.compile(r'<think>|</think>|<\|begin_of_thought\|>', re.I)
REASONERS = re.compile(r'\bR1\b|deepseek[-_ ]?r1|\bQwQ\b|reasoning:?\s*on', re.I)


def text_of(row, column):
    "Return a row's text, or None if it has none."
    require(column in row, f'there is no column {column!r}, but {", ".join(row)} (in data/text/'
            'prepare.py, --column names one)')
    hint = ''
    if isinstance(row[column], list):
        hint = ' (in data/text/prepare.py, --chat reads messages)'
    require(isinstance(row[column], str | None), f'the column {column!r} does not hold text, but '
            f'{row[column]!r:.60}{hint}')
    return row[column]


def chat(row, column):
    """Return an instruction example without the tags of its roles. The example is a text, or a list
    of messages, each with a role and a content. Return None if its text, or another column, shows
    that a reasoning model wrote it ("Retrofitted Recurrence", section 4.4)."""
    if isinstance(row.get(column), list):
        contents = [message.get('content') if isinstance(message, dict) else message
                    for message in row[column]]
        require(all(isinstance(content, str | None) for content in contents),
                f'the column {column!r} does not hold messages with texts, but '
                f'{row[column]!r:.60}')
        row = row | {column: '\n'.join(filter(None, contents))}
    text = text_of(row, column) or ''
    others = ' '.join(str(value) for key, value in row.items() if key != column)
    if not (REASONING.search(text) or REASONERS.search(others)):
        return ROLE_TAGS.sub('', text).strip()


def archived(row, column):
    """Return a row's text. A row without one has the number of a file in the archive of Software
    Heritage, from which it is fetched. Return None if the file was taken down."""
    import urllib3
    if row.get(column) is not None or 'blob_id' not in row:
        return text_of(row, column)
    url = f'https://softwareheritage.s3.amazonaws.com/content/{row["blob_id"]}'
    again = urllib3.Retry(6, backoff_factor=1, status_forcelist=[429, 500, 502, 503, 504])
    answer = urllib3.request('GET', url, retries=again, timeout=60)     # (it keeps connections)
    if answer.status not in (403, 404):
        return gzip.decompress(answer.data).decode('utf-8', errors='ignore')


READ = dict(text=text_of, chat=chat, archived=archived)


def format_of(path):
    "Return the name of a file's format in the `datasets` package, or None for plain text."
    found = re.search(r'\.(parquet|json)l?(\.gz|\.zst)?$', str(path), re.I)
    return found and found[1].lower()


def texts(path, how, is_alone):
    """Yield the documents of a file in order, or None for a row without a text. A file of plain
    text is one document, or several if it is the only file. Rows whose texts are fetched are read
    32 at once."""
    if not format_of(path):
        with as_refusal(UnicodeDecodeError, why=lambda error: f'{path}: {error}'):
            text = Path(path).read_text(encoding='utf-8-sig')
        yield from cut(text) if is_alone else [text]
        return
    from datasets import load_dataset
    from datasets.utils.logging import set_verbosity_error
    set_verbosity_error()
    rows = iter(load_dataset(format_of(path), split='train', streaming=True,
                             data_files=glob.escape(str(path))))     # (brackets are a pattern)
    with ThreadPoolExecutor(32) as threads:
        work = threads.map if how.read == 'archived' else map
        while batch := list(itertools.islice(rows, 256)):
            yield from work(functools.partial(READ[how.read], column=how.column), batch)


def cut(text, size=2000):
    "Return a long text as documents of about `size` characters, cut between paragraphs."
    parts = ['']
    for paragraph in text.split('\n\n'):
        if len(parts[-1]) >= size:
            parts.append('')
        parts[-1] += paragraph + '\n\n'
    return parts


# ---------------------------------------------------------------------------- files -> their shards

def files_in(folder):
    "Return the files below a folder whose endings are those of text, except hidden files."
    return [path for path in sorted(folder.rglob('*')) if path.is_file()
            and path.name.lower().endswith(tuple(TEXTS.split()))
            and not any(name[0] == '.' for name in path.relative_to(folder).parts)]


def parts_of(files):
    "Return lists of files. Each list becomes a shard: a large file alone, or small files together."
    parts, size = [[]], 0
    for file in files:
        size += Path(file).stat().st_size
        if parts[-1] and size > PART:
            parts, size = [*parts, []], Path(file).stat().st_size
        parts[-1].append(str(file))
    return parts


def documents(files, how, counts):
    """Yield (text, tokens) of each document, until there are how.most tokens. Documents without a
    text are counted as left out."""
    tokenizer, n = get_tokenizer(how.tokenizer), 0
    start = np.array(start_of_document(tokenizer), token_type(tokenizer.n_vocab))
    for text in itertools.chain.from_iterable(texts(path, how, len(files) == 1) for path in files):
        if text:
            tokens = np.append(start, encode_as_array(tokenizer, text, how.special))
            yield text, tokens
            n += len(tokens)
            if how.most and n >= how.most:
                return
        else:
            counts['left out'] += 1


def write_part(folder, how, i, files):
    """Write the shards of a part, train_I.bin and val_I.bin, unless they exist. Return the
    description of both, and how many documents were left out."""
    done = folder / f'part_{i:05d}.json'
    if done.exists():
        return read_json(done)
    counts, n_vocab = Counter(), get_tokenizer(how.tokenizer).n_vocab
    paths = {split: folder / f'{split}_{i:05d}.bin' for split in ('train', 'val')}
    every = documents(files, how, counts)
    first = list(itertools.islice(every, MANY))
    nth = 100 if len(first) == MANY else 10
    with (whole(paths['train']) as train, whole(paths['val']) as val,
          open(train, 'wb') as train, open(val, 'wb') as val):
        for n, (text, tokens) in enumerate(itertools.chain(first, every)):
            number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')
            validates = number % how.val_every == 0 if how.val_every else n % nth == 0
            (val if validates else train).write(tokens.tobytes())
            counts['val' if validates else 'train'] += 1
    made = {split: shard_of(path, n_vocab, documents=counts[split])
            for split, path in paths.items()}
    write_json(done, made | {'left out': counts['left out']})
    return read_json(done)


# ------------------------------------------------------------------------------ shards -> a dataset

def shard_of(path, n_vocab, **more):
    "Return the description of a shard. With its checksums a run recognizes its data."
    files = [path.with_suffix(ending) for ending in ('.bin', '.mask', '.marks')]
    sums = {file.suffix: hash_of(file) for file in files if file.exists()}
    n = path.stat().st_size // np.dtype(token_type(n_vocab)).itemsize
    return dict(file=path.name, tokens=n, sha256=sums) | more


def write_dataset(folder, split, tokenizer, tokens, *, mask=None, marks=None, kinds=None,
                  origin=None):
    """Write one split as a single shard. `tokenizer` is a name that get_tokenizer takes, and
    `kinds` are the names of the marks 1, 2, ..."""
    path, n_vocab = Path(folder) / f'{split}_000.bin', get_tokenizer(tokenizer).n_vocab
    path.with_name(f'{split}.json').unlink(missing_ok=True)     # it would describe half of a shard
    replace(path, np.asarray(tokens, token_type(n_vocab)).tobytes())
    for ending, array in (('.mask', mask), ('.marks', marks)):
        path.with_suffix(ending).unlink(missing_ok=True)
        if array is not None:
            replace(path.with_suffix(ending), np.asarray(array, 'uint8').tobytes())
    describe(Path(folder), split, tokenizer, [shard_of(path, n_vocab)], kinds or [], origin or {})


def describe(folder, split, tokenizer, shards, kinds, origin):
    "Write the JSON of a split, which completes it, and the files of its tokenizer."
    encoding = get_tokenizer(tokenizer)
    if not copy_tokenizer(tokenizer, folder):
        tokenizer = stands_for(tokenizer)       # a name such as 'gpt2', which is no path
    write_json(folder / f'{split}.json', dict(
        tokenizer=str(tokenizer), fingerprint=fingerprint(encoding), n_vocab=encoding.n_vocab,
        dtype=token_type(encoding.n_vocab), tokens=sum(shard['tokens'] for shard in shards),
        kinds=kinds, shards=shards, origin=origin))


@contextlib.contextmanager
def begun_with(folder, plan):
    """Inside this `with`, write the parts of a dataset. `plan` is a text that names all files and
    settings. A folder with parts that were begun with another plan is refused. If an error comes
    before the first part is complete, plan.json is removed, and the folder if it is empty."""
    path = folder / 'plan.json'
    names = [file.name for file in folder.iterdir()] if folder.exists() else []
    # If the folder has no other files than these, a command was killed before its first part was
    # complete.
    is_left_over = path.exists() and all(
        re.fullmatch(r'plan\.json|\..*\.unfinished|(train|val)_\d{5}\.bin', name) for name in names)
    is_same = path.exists() and path.read_text() == plan
    require(is_same or is_left_over or not names, f'{folder} holds something else, or was begun '
            'with other files or settings: remove it, or choose another --out')
    replace(path, plan.encode())
    remove_unfinished(folder)
    try:
        yield
    except BaseException:
        if not any(folder.glob('part_*.json')):
            path.unlink()
            with contextlib.suppress(OSError):      # the folder held something before
                folder.rmdir()
        raise


def end_with_parent():
    "In a worker: end when the process that started it has ended, even if that was killed."
    def wait():
        parent_process().join()
        os._exit(1)
    threading.Thread(target=wait, daemon=True).start()


def write_parts(folder, parts, how, workers, budget):
    "Write the first parts that have `budget` tokens together. Return what write_part returns."
    made, n, numbered = [], 0, enumerate(parts)
    write = functools.partial(write_part, folder, how)
    with (ProcessPoolExecutor(workers, get_context('spawn'), end_with_parent) as pool,
          tqdm(desc=folder.name, total=budget, unit='token', unit_scale=True) as bar):
        run = map if workers == 1 else pool.map
        while n < budget and (some := list(itertools.islice(numbered, workers))):
            for part in run(write, *zip(*some)):
                if n < budget:          # the last parts in parallel may be more than are needed
                    made.append(part)
                    n += part['train']['tokens']
                    bar.update(n - bar.n)
    return made


def make(folder, parts, how, workers=1, budget=math.inf):
    """Make a dataset of as many parts as give `budget` tokens to train on, or of all parts. Return
    how many tokens these are."""
    with begun_with(folder, json.dumps(asdict(how) | dict(parts=parts))):
        made = write_parts(folder, parts, how, workers, budget)
        counts = {split: sum(part[split]['documents'] for part in made)
                  for split in ('train', 'val')}
        if not all(counts.values()):
            for i in range(len(made)):          # so that the corrected command may begin anew
                for name in (f'part_{i:05d}.json', f'train_{i:05d}.bin', f'val_{i:05d}.bin'):
                    (folder / name).unlink()
            raise Refused(f'{folder}: at least one document is needed to train on and one to '
                          f'validate with, and here are {counts["train"]} and {counts["val"]}. '
                          '(A row is a document, and so is a text file. A single text file is cut '
                          'at its empty lines.)')
    n = sum(part['train']['tokens'] for part in made)
    origin = asdict(how) | dict(documents=counts)
    (folder / 'train.json').unlink(missing_ok=True)     # written last, it completes a dataset
    # The small shards of validation become one, because a row never crosses two shards.
    dtype = token_type(get_tokenizer(how.tokenizer).n_vocab)
    val = np.concatenate([np.fromfile(folder / part['val']['file'], dtype) for part in made])
    # Each token of text is marked as an answer of the kind 'text', so that a mixture can have a
    # separate loss for text.
    write_dataset(folder, 'val', how.tokenizer, val, marks=np.full(len(val), ANSWER_START + 1),
                  kinds=['text'], origin=origin)
    shards = [part['train'] for part in made if part['train']['tokens']]
    describe(folder, 'train', how.tokenizer, shards, ['text'], origin)
    print(f'{folder}: {n:,} tokens of {counts["train"]:,} documents, and {counts["val"]:,} to '
          f'validate with; left out (empty, taken down, or by a reasoning model): '
          f'{sum(part["left out"] for part in made):,}')
    return n


# ----------------------------------------------------------------------------------------- mixtures

@dataclass(frozen=True)
class Source:
    "A dataset in a mixture."
    name: str               # of its folder
    share: float            # its share of the mixture's tokens
    repo: str               # a dataset on the hub
    files: str              # which of its files: a pattern
    read: str = 'text'      # how a row becomes a text: a key of READ


def number(text):
    "Return the number that a text such as '10B' stands for: 10,000,000,000."
    factor = dict(K=10**3, M=10**6, B=10**9, T=10**12).get(text[-1:].upper(), 1)
    with as_refusal(ValueError, why=lambda error: f'--tokens={text} must be a number, such as 10B'):
        return round(float(text[:-1] if factor > 1 else text) * factor)


def files_of(source, folder, out):
    """Return {name: path} for the files of a source, on this disk or on the hub. On the hub they
    are of the commit with which this dataset was begun, or otherwise of the newest one."""
    if folder:
        return {str(path.relative_to(folder)): str(path) for path in files_in(folder / source.name)
                if format_of(path)}
    from huggingface_hub import HfApi
    plan = out / 'plan.json'
    begun = re.search(r'@(\w{40})/', plan.read_text()) if plan.exists() else None
    with as_refusal(Exception, why=lambda error: f'the hub did not list {source.repo} ({error}): '
                  '--source=FOLDER reads local files'):
        commit = begun[1] if begun else HfApi().dataset_info(source.repo).sha
        names = HfApi().list_repo_files(source.repo, repo_type='dataset', revision=commit)
    return {name: f'hf://datasets/{source.repo}@{commit}/{name}' for name in names
            if fnmatch.fnmatch(name, source.files)}


@dataclass
class Options:
    tokens: str                         # to train on, over all sources: 10B, 500M
    mixture: str | None = None          # which data, where there are several mixtures
    tokenizer: str = 'HuggingFaceTB/cosmo2-tokenizer'       # what the model reads
    # a folder that has a folder of parquet or JSON Lines files for each source; None: the hub
    source: Path | None = None
    workers: int = os.cpu_count()       # processes; they do not change the result
    val_every: int = 200                # one document of this many is for validation
    out: Path | None = None             # the folder to write; None: data/ and its name


def prepare(mixtures, argv=None, out=None):
    "Run the command of a data/NAME/prepare.py. `mixtures` is {name: [Source, ...]}."
    options = read(Options, argv, ['mixture'])
    name = next(iter(mixtures)) if len(mixtures) == 1 else options.mixture
    check_choice('mixture', name, mixtures)
    out, tokens = options.out or (out / name if len(mixtures) > 1 else out), number(options.tokens)
    shares = {source.name: source.share for source in mixtures[name]}
    for source in mixtures[name]:
        how = Recipe(options.tokenizer, str(options.source or source.repo), source.read,
                  val_every=options.val_every)
        budget = math.ceil(tokens * source.share / sum(shares.values()))
        files = files_of(source, options.source, out / source.name)
        where = f'in {options.source / source.name}' if options.source else (
            f'of {source.repo} that matches {source.files}')
        require(files, f'there is no parquet or JSON Lines file {where}')
        # Each file is a part. Their order is drawn, so the first few are a fair sample of all.
        drawn = sorted(files, key=lambda name: hashlib.blake2b(name.encode()).hexdigest())
        n = make(out / source.name, [[files[name]] for name in drawn], how, options.workers, budget)
        if n < budget:
            print(f'{source.name} has only {n:,} of the {budget:,} tokens asked for, so training '
                  f'reads it {budget / n:.1f} times')
    data = ','.join(f'{out / name}@{share:g}' for name, share in shares.items())
    print(f'{tokens:,} tokens in the mixture; nanodepth train --data={data}')
