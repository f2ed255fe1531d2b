"""Text -> datasets, which train.py's Loader reads: your own text, and mixtures of large ones.

A dataset is shards. A shard is made of one file, or of some small ones, whole or not at all. So a
command that was stopped goes on when it is repeated, and the number of processes changes nothing.
Usage: prepare({'smollm': [Source(...)]}, out=Path('data/smollm'))     # in data/smollm/prepare.py
"""
import fnmatch
import functools
import glob
import gzip
import hashlib
import itertools
import math
import multiprocessing
import os
import re
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanodepth.common.errors import Refused, check_choice, refusing
from nanodepth.common.files import claim, fresh, hash_of, read_json, replace, write_json
from nanodepth.common.options import read
from nanodepth.report.tables import TAKEN
from nanodepth.text.tokenizer import (copy_tokenizer, encode_as_array, fingerprint, get_tokenizer,
                                      stands_for, start_of_document, token_type)
from nanodepth.training.loader import BEGINS

# Plain text, as far as it is taken from a folder. (A .json there may hold settings.)
TEXTS = set('.txt .md .rst .org .tex .html .css .py .pyi .js .jsx .ts .tsx .c .h .cc .cpp .hpp .cu '
            '.rs .go .java .kt .scala .swift .rb .php .pl .lua .r .jl .hs .ml .sh .sql .toml .yaml '
            '.yml .ini .cfg'.split())
ARCHIVE = 'https://softwareheritage.s3.amazonaws.com/content'
PART = 2**26        # bytes: so many of small files become a shard together
MANY = 1000         # documents, from which on one of a hundred is enough to validate with


@dataclass(frozen=True)
class How:
    "How files become tokens."
    tokenizer: str
    source: str                     # where the files are from
    read: str = 'text'              # how a row becomes a text: a key of READ
    column: str = 'text'            # where a row has it
    special: bool = False           # <|im_end|> in a text is that token, and no plain text
    most: int | None = None         # tokens of a part, which ends there; None: all
    # One document of so many is for validation, by its text, so that its copies are in one split.
    # None: every tenth, or if there are many every hundredth.
    val_every: int | None = None


# ------------------------------------------------------------------------------------ rows -> texts

ROLE_TAGS = re.compile(r'<\|im_(?:start|end)\|>(?:system|user|assistant)?\n?|'
                       r'<\|(?:start_header_id|end_header_id|eot_id)\|>|'
                       r'^(?:system|user|assistant|human)\s*:\s*|'
                       r'<(?:extra_id_\d+|/?(?:user|assistant|system))>\s*', re.I | re.M)
REASONING = re.compile(r'<think>|</think>|<\|begin_of_thought\|>', re.I)
REASONERS = re.compile(r'\bR1\b|deepseek[-_ ]?r1|\bQwQ\b|reasoning:?\s*on', re.I)


def column(row, name):
    if not isinstance(row.get(name, 0), str | None):
        raise Refused(f"no text in the column {name!r}, but the columns {', '.join(row)}")
    return row[name]


def chat(row, name):
    """The text of an instruction example without the tags of its roles, or None if a reasoning
    model wrote it, as in "Retrofitted Recurrence", section 4.4. Which columns say so depends on the
    dataset."""
    text = column(row, name) or ''
    others = ' '.join(str(value) for key, value in row.items() if key != name)
    if not (REASONING.search(text) or REASONERS.search(others)):
        return ROLE_TAGS.sub('', text).strip()


def archived(row, name):
    """A file whose row has its text, or else its number in Software Heritage's archive; None if it
    was taken down."""
    if row.get(name) is not None or 'blob_id' not in row:
        return column(row, name)
    answer = connection().request('GET', f'{ARCHIVE}/{row["blob_id"]}')
    if answer.status not in (403, 404):
        return gzip.decompress(answer.data).decode('utf-8', errors='ignore')


@functools.cache
def connection():
    import urllib3
    again = urllib3.Retry(6, backoff_factor=1, status_forcelist=[429, 500, 502, 503, 504])
    return urllib3.PoolManager(maxsize=32, retries=again, timeout=60)


READ = {'text': column, 'chat': chat, 'archived': archived}


def format_of(path):
    "How `datasets` reads a file whose rows are documents; None for plain text."
    found = re.search(r'\.(parquet|json)l?(\.gz|\.zst)?$', str(path), re.I)
    return found and found[1].lower()


def rows(path, name, cuts):
    """The rows of a parquet or JSON Lines file, here or on the hub, as dicts. Plain text is one, or
    is cut into several."""
    if not format_of(path):
        with refusing(UnicodeDecodeError, why=lambda error: f'{path} is not text in UTF-8 '
                      f'({error.reason} at byte {error.start}): convert it first, or leave it out'):
            text = Path(path).read_text(encoding='utf-8-sig')
        yield from ({name: part} for part in (cut(text) if cuts else [text]))
        return
    from datasets import load_dataset
    from datasets.utils.logging import set_verbosity_error
    set_verbosity_error()
    i = 0
    try:
        # escaped, because a name with brackets would be taken for a pattern of others
        for row in load_dataset(format_of(path), data_files=glob.escape(str(path)), split='train',
                                streaming=True):
            yield row
            i += 1
    except Exception as error:      # each kind of file has errors of its own
        if 'StopIteration' in repr(error):      # an empty file
            return
        cause = error.__cause__ or error
        raise Refused(f'{path}, after row {i}: {type(cause).__name__}: '
                      f'{(str(cause).splitlines() or [""])[0][:200]}') from None


def cut(text, size=2000):
    "A long text as documents of about so many characters, cut between paragraphs."
    parts = ['']
    for paragraph in text.split('\n\n'):
        if len(parts[-1]) >= size:
            parts.append('')
        parts[-1] += paragraph + '\n\n'
    return parts


def texts(path, how, cuts):
    "The documents of a file in order, None where a row has none; 32 at once, if they are fetched."
    some, text_of = rows(path, how.column, cuts), functools.partial(READ[how.read], name=how.column)
    with ThreadPoolExecutor(32) as threads:
        work = threads.map if how.read == 'archived' else map
        while batch := list(itertools.islice(some, 256)):
            try:
                yield from work(text_of, batch)
            except Refused as error:
                raise Refused(f'{path}: {error}') from None


# -------------------------------------------------------------------------------------------- files

def files_in(folder):
    "The files below a folder that are text by their endings. A line says what is left out."
    files, others = [], Counter()
    for path in sorted(folder.rglob('*')):
        if path.is_file() and not any(name[0] == '.' for name in path.relative_to(folder).parts):
            ending = path.suffix.lower()
            if ending in TEXTS or format_of(path) and ending != '.json':
                files.append(path)
            else:
                others[ending or 'no ending'] += 1
    if others:
        print(f'{folder}: left out are files that are no text by their endings: '
              + ', '.join(f'{n} of {ending}' for ending, n in others.most_common()))
    return files


def listed(path):
    return [str(path), path.stat().st_size, path.stat().st_mtime_ns]


def on_the_hub(source):
    "{name: [path, bytes]} of a source's files, named with the dataset's commit of today."
    from huggingface_hub import HfApi
    try:
        commit = HfApi().dataset_info(source.repo).sha
        tree = list(HfApi().list_repo_tree(source.repo, repo_type='dataset', revision=commit,
                                           recursive=True))
    except Exception as error:      # each version of the package has names of its own
        raise Refused(f'the Hugging Face hub did not list {source.repo} '
                      f'({type(error).__name__}): is there a network, and a login where the '
                      'dataset asks for one? --source=FOLDER reads local files') from None
    return {f.path: [f'hf://datasets/{source.repo}@{commit}/{f.path}', f.size] for f in tree
            if fnmatch.fnmatch(f.path, source.files) and hasattr(f, 'size')}


def parts_of(files):
    "Lists of files, each of which becomes a shard: a large one alone, small ones together."
    parts, size = [[]], 0
    for file in files:
        if parts[-1] and size + file[1] > PART:
            parts.append([])
            size = 0
        parts[-1].append(file)
        size += file[1]
    return parts


# ------------------------------------------------------------------- a worker: a part -> its shards

def documents(files, how, left_out):
    "(text, tokens) of each document, until there are how.most. What has no text is counted."
    tokenizer, tokens = get_tokenizer(how.tokenizer), 0
    start = np.array(start_of_document(tokenizer), token_type(tokenizer.n_vocab))
    every = itertools.chain.from_iterable(texts(path, how, len(files) == 1) for path, *_ in files)
    for text in tqdm(every, unit='document', leave=False,
                     disable=multiprocessing.parent_process() is not None):
        if text:
            document = np.append(start, encode_as_array(tokenizer, text, how.special))
            yield text, document
            tokens += len(document)
            if how.most and tokens >= how.most:
                return
        else:
            left_out.append(text)


def for_validation(text, every):
    digest = hashlib.blake2b(text.encode('utf-8'), digest_size=8).digest()
    return int.from_bytes(digest, 'big') % every == 0


def write_part(folder, how, i, files):
    """Write a part's shards, train_I.bin and val_I.bin, if they are not there. Returns what a
    dataset says of them, and how many documents were left out."""
    done = folder / f'part_{i:05d}.json'
    if done.exists():
        return read_json(done)
    left_out, counts = [], Counter()
    paths = {split: folder / f'{split}_{i:05d}.bin' for split in ('train', 'val')}
    every = documents(files, how, left_out)
    first = list(itertools.islice(every, MANY))
    nth = 100 if len(first) == MANY else 10
    with fresh(paths['train']) as train, fresh(paths['val']) as val:
        for n, (text, document) in enumerate(itertools.chain(first, every)):
            validates = for_validation(text, how.val_every) if how.val_every else n % nth == 0
            (val if validates else train).write(document.tobytes())
            counts['val' if validates else 'train'] += 1
    itemsize = np.dtype(token_type(get_tokenizer(how.tokenizer).n_vocab)).itemsize
    made = {split: dict(file=path.name, tokens=path.stat().st_size // itemsize,
                        sha256={'.bin': hash_of(path)}, documents=counts[split])
            for split, path in paths.items()}
    made['left_out'] = len(left_out)
    write_json(done, made)
    return made


def end_with_parent():
    "A worker process ends when the process that started it ends, for whatever reason."
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


# ------------------------------------------------------------------------------ shards -> a dataset

def write_dataset(folder, split, tokenizer, tokens, *, mask=None, marks=None, kinds=None,
                  origin=None):
    """Write one split as a single shard. `tokenizer` is the name that get_tokenizer takes; `kinds`
    names the marks 1, 2, ..."""
    folder, sums = Path(folder), {}
    if taken := TAKEN.intersection(kinds or ()):
        raise Refused(f'{folder}: a kind of answer cannot be called {min(taken)!r}: tables and '
                      'pictures have a column of that name')
    arrays = {'.bin': np.asarray(tokens, token_type(get_tokenizer(tokenizer).n_vocab)),
              '.mask': mask, '.marks': marks}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f'{split}.json').unlink(missing_ok=True)  # it would vouch for half of the new
    for ending, array in arrays.items():
        if array is not None:
            raw = np.asarray(array, None if ending == '.bin' else 'uint8').tobytes()
            replace(folder / f'{split}_000{ending}', raw)
            sums[ending] = hashlib.sha256(raw).hexdigest()
    shard = dict(file=f'{split}_000.bin', tokens=len(tokens), sha256=sums)
    describe(folder, split, tokenizer, [shard], kinds or [], origin or {})


def describe(folder, split, tokenizer, shards, kinds, origin):
    "Write a split's JSON, with which it is there, and its tokenizer, which a run takes from it."
    encoding = get_tokenizer(tokenizer)
    if not copy_tokenizer(tokenizer, folder):
        tokenizer = stands_for(tokenizer)       # the word that a run reads by, wherever that is
    write_json(folder / f'{split}.json', dict(
        tokenizer=str(tokenizer), fingerprint=fingerprint(encoding), n_vocab=encoding.n_vocab,
        dtype=token_type(encoding.n_vocab), tokens=sum(shard['tokens'] for shard in shards),
        kinds=kinds, shards=shards, origin=origin))


def begin(folder, plan):
    "A dataset's folder is new, or was begun with the same plan."
    path = folder / 'plan.json'
    begun = read_json(path) if path.exists() else {}
    others = {each.name for each in folder.iterdir()} - {'lock', 'plan.json'}
    if others and begun != plan:
        name = next(name for name in (*plan, *begun) if begun.get(name) != plan.get(name))
        raise Refused(f'{folder} holds {min(others)}, made of other files or settings ({name}): '
                      'choose another --out, or remove it')
    write_json(path, plan)


def make(folder, parts, how, workers=1, budget=math.inf):
    """Make a dataset of the first parts that have `budget` tokens to train on together, or of all.
    Returns how many tokens they have."""
    tokenizer = get_tokenizer(how.tokenizer)
    begin(folder, asdict(how) | dict(parts=parts, fingerprint=fingerprint(tokenizer)))
    for path in folder.glob('*.nanodepth.tmp'):         # of a command that was killed
        path.unlink()
    made, n, numbered = [], 0, enumerate(parts)
    counted = ['train', 'val'] if how.most else ['train']       # `most` is of both
    spawn, write = multiprocessing.get_context('spawn'), functools.partial(write_part, folder, how)
    with (ProcessPoolExecutor(workers, spawn, end_with_parent) as pool,
          tqdm(desc=folder.name, total=budget, unit='token', unit_scale=True) as bar):
        run = map if workers == 1 else pool.map
        while n < budget and (some := list(itertools.islice(numbered, workers))):
            for part in run(write, *zip(*some)):
                if n < budget:          # else more were begun than were still needed
                    made.append(part)
                    n += sum(part[split]['tokens'] for split in counted)
                    bar.update(n - bar.n)
    documents = {split: sum(part[split]['documents'] for part in made)
                 for split in ('train', 'val')}
    if not all(documents.values()):
        if len(made) == len(parts):         # these are all: it begins anew with more files
            for path in [*folder.glob('*_?????.*'), folder / 'plan.json']:
                path.unlink()
        raise Refused(f'{folder}: {documents["train"]} documents to train on and '
                      f'{documents["val"]} to validate with are too few (a file of text is one, '
                      'or if it is the only one, is cut at empty lines; a row of a parquet or JSON '
                      'Lines file is one)')
    origin = asdict(how) | dict(documents=documents)
    (folder / 'train.json').unlink(missing_ok=True)     # it comes last: with it, it is a dataset
    # small shards as a single one: a window of text lies within a shard, and theirs are short
    val = np.concatenate([np.fromfile(folder / part['val']['file'], token_type(tokenizer.n_vocab))
                          for part in made])
    # text is a kind of answer, of which each token is one: a mixture tells it from others
    write_dataset(folder, 'val', how.tokenizer, val, marks=np.full(len(val), BEGINS + 1),
                  kinds=['text'], origin=origin)
    shards = [part['train'] for part in made if part['train']['tokens']]
    describe(folder, 'train', how.tokenizer, shards, ['text'], origin)
    print(f'{folder}: {sum(shard["tokens"] for shard in shards):,} tokens of '
          f'{documents["train"]:,} documents, and {len(val):,} of {documents["val"]:,} to validate '
          'with')
    if left_out := sum(part['left_out'] for part in made):
        print(f'{left_out:,} documents were left out: empty, or written by a reasoning model')
    return n


# ----------------------------------------------------------------------------------------- mixtures

@dataclass(frozen=True)
class Source:
    name: str               # of its folder
    share: float            # of the mixture's tokens
    repo: str               # a dataset on the hub
    files: str              # which of its files: a pattern
    read: str = 'text'      # how a row becomes a text: a key of READ


def number(text):
    "'10B' as 10,000,000,000."
    factor = dict(K=10**3, M=10**6, B=10**9, T=10**12).get(text[-1:].upper(), 1)
    with refusing(ValueError, why=lambda error: f'--tokens={text} must be a number, such as 10B'):
        return round(float(text[:-1] if factor > 1 else text) * factor)


def refuse_taken(out, names):
    "A folder that holds something else than this mixture, which would be read instead of it."
    mixture = out / 'mixture.json'
    own = [mixture] if mixture.exists() and read_json(mixture).keys() == names else []
    for path in (out / 'ckpt.pt', out / 'train.json', mixture):
        if path.exists() and path not in own:
            raise Refused(f'{out} holds {path.name} of something else: choose another --out')


def parts_of_source(source, folder, where):
    """Each file is a part, in an order drawn from their names, so that the first few are a fair
    sample. What was begun with the hub's files of some commit goes on with them."""
    path = folder / 'plan.json'
    if not where and path.exists() and 'parts' in (plan := read_json(path)):
        return plan['parts']
    files = on_the_hub(source) if not where else {
        str(path.relative_to(where)): listed(path) for path in files_in(where / source.name)
        if format_of(path)}
    if not files:
        raise Refused(f'there is no parquet or JSON Lines file of {source.name} in '
                      f'{where or f"{source.repo}, {source.files}"}')
    return [[files[name]] for name in sorted(files, key=lambda name: hashlib.blake2b(
        name.encode()).hexdigest())]


@dataclass
class Options:
    tokens: str                         # to train on, over all sources: 10B, 500M
    mixture: str | None = None          # which data, where there are several mixtures
    tokenizer: str = 'HuggingFaceTB/cosmo2-tokenizer'       # what the model reads
    # a folder with one of parquet or JSON Lines files for each source, by its name; None: the hub
    source: Path | None = None
    workers: int = os.cpu_count()       # they do not change the result
    val_every: int = 200                # one document of so many is for validation
    out: Path | None = None             # the folder to write; None: data/ and its name


def prepare(mixtures, argv=None, out=None):
    "The command of a data/NAME/prepare.py: `mixtures` is {name: [Source]}."
    options = read(Options, argv, ['mixture'])
    name = next(iter(mixtures)) if len(mixtures) == 1 else options.mixture
    check_choice('mixture', name, mixtures)
    out, tokens = options.out or (out / name if len(mixtures) > 1 else out), number(options.tokens)
    shares = {source.name: source.share for source in mixtures[name]}
    refuse_taken(out, shares.keys())
    with claim(out):
        for source in mixtures[name]:
            how = How(options.tokenizer, str(options.source or source.repo), source.read,
                      val_every=options.val_every)
            budget = math.ceil(tokens * source.share / sum(shares.values()))
            parts = parts_of_source(source, out / source.name, options.source)
            with claim(out / source.name):
                n = make(out / source.name, parts, how, options.workers, budget)
            if n < budget:
                print(f'{source.name}: these are all, so they are read {budget / n:.1f} times')
        write_json(out / 'mixture.json', shares)
    print(f'{out}: {tokens:,} tokens in the mixture; nanodepth train --data={out} --dry_run looks '
          'at it')
