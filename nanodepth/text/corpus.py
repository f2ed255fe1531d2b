"""A mixture of large datasets as shards of tokens: streamed, tokenised by many processes, and
stopped and started at will. Each file of a source becomes a shard of its own. So a shard depends on
its file alone, and a restart makes only the shards that are missing.
Usage: prepare({'smollm': [Source(...)]}, __doc__, out=Path('data/smollm'))     # in prepare.py
"""
import fnmatch
import glob
import gzip
import hashlib
import http.client
import itertools
import multiprocessing
import os
import re
import threading
import time
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanodepth.common.errors import Refused, check_choice, refusing
from nanodepth.common.files import (claim, fresh, hash_of, read_json, remove_leftovers, replace,
                                    write_json)
from nanodepth.train import read
from nanodepth.text.loader import shares
from nanodepth.text.tokenizer import (copy_tokenizer, fingerprint, get_tokenizer,
                                      start_of_document, token_type)

KINDS = {'.parquet': 'parquet', '.jsonl': 'json', '.json': 'json', '.gz': 'json', '.zst': 'json'}


@dataclass(frozen=True)
class Source:
    name: str               # of its folder
    share: float            # of the mixture's tokens
    repo: str               # a dataset on the hub
    files: str              # which of its files: a pattern
    read: str = 'text'      # how a row becomes a text: a key of READ


# ------------------------------------------------------------------------------------ rows -> texts

ROLE_TAGS = re.compile(r'<\|im_(?:start|end)\|>(?:system|user|assistant)?\n?|'
                       r'<\|(?:start_header_id|end_header_id|eot_id)\|>|'
                       r'^(?:system|user|assistant|human)\s*:\s*|'
                       r'<(?:extra_id_\d+|/?(?:user|assistant|system))>\s*', re.I | re.M)
REASONING = re.compile(r'<think>|</think>|<\|begin_of_thought\|>', re.I)
REASONERS = re.compile(r'\bR1\b|deepseek[-_ ]?r1|\bQwQ\b|reasoning:?\s*on', re.I)


def column(row, name='text'):
    if not isinstance(row.get(name, 0), str | None):
        raise Refused(f"no text in the column {name!r}, but the columns {', '.join(row)}")
    return row[name]


def chat(row, name='text'):
    """The text of an instruction example without the tags of its roles, or None if a reasoning
    model wrote it, as in "Retrofitted Recurrence", section 4.4. Which columns say so depends on the
    dataset."""
    text = column(row, name) or ''
    others = ' '.join(str(value) for key, value in row.items() if key != name)
    if not (REASONING.search(text) or REASONERS.search(others)):
        return ROLE_TAGS.sub('', text).strip()


def archived(row):
    """A file whose row has its text, or else its number in Software Heritage's archive; None if it
    was taken down."""
    if row.get('text') is not None or 'blob_id' not in row:
        return column(row)
    url = f'https://softwareheritage.s3.amazonaws.com/content/{row["blob_id"]}'
    for attempt in itertools.count():
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return gzip.decompress(answer.read()).decode('utf-8', errors='ignore')
        except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code in (403, 404):
                return None
            reason = error
        if attempt == 5:
            raise Refused(f'Software Heritage did not give {row["blob_id"]}: {reason}')
        time.sleep(2 ** attempt)


READ = {'text': column, 'chat': chat, 'archived': archived}


def kind_of(path):
    "How `datasets` reads the rows of a file, or None: it has none."
    return KINDS.get(Path(path).suffix.lower())


def rows(path):
    "The rows of a parquet or JSON Lines file, here or on the hub, as dicts."
    from datasets import load_dataset
    from datasets.utils.logging import set_verbosity_error
    set_verbosity_error()
    i = 0
    try:
        # escaped, because a name with brackets would be taken for a pattern of others
        for row in load_dataset(kind_of(path), data_files=glob.escape(str(path)), split='train',
                                streaming=True):
            yield row
            i += 1
    except Exception as error:      # each kind of file has errors of its own
        if 'StopIteration' in repr(error):      # an empty file
            return
        cause = error.__cause__ or error
        raise Refused(f'{path}, after row {i}: {type(cause).__name__}: '
                      f'{(str(cause).splitlines() or [""])[0][:200]}') from None


def texts(path, read):
    """The documents of a file in order, by a key of READ or a function; what has to be fetched is
    fetched in 32 threads."""
    some = rows(path)
    with ThreadPoolExecutor(32) as threads:
        work = threads.map if read == 'archived' else map
        while batch := list(itertools.islice(some, 256)):
            try:
                yield from work(READ.get(read, read), batch)
            except Refused as error:
                raise Refused(f'{path}: {error}') from None


# -------------------------------------------------------------------------------------------- files

def is_hidden(path):
    return any(part.startswith('.') for part in path.parts)


def list_files(source, where):
    """[[path, bytes]] of a source's files, in an order drawn from their names, so that the first
    few are a fair sample; of files on this disk also when they were last changed."""
    if where is None:
        from huggingface_hub import HfApi
        try:
            commit = HfApi().dataset_info(source.repo).sha
            tree = list(HfApi().list_repo_tree(source.repo, repo_type='dataset', revision=commit,
                                               recursive=True))
        except Exception as error:      # each version of the package has names of its own
            raise Refused(f'the Hugging Face hub did not list {source.repo} '
                          f'({type(error).__name__}): is there a network, and a login where the '
                          'dataset asks for one? --source=FOLDER reads local files') from None
        listed = {f.path: [f'hf://datasets/{source.repo}@{commit}/{f.path}', f.size] for f in tree
                  if fnmatch.fnmatch(f.path, source.files) and hasattr(f, 'size')}
        if not listed:
            raise Refused(f'{source.repo} has no file {source.files} any more')
    else:
        folder = Path(where) / source.name
        listed = {str(p.relative_to(where)): [str(p), p.stat().st_size, p.stat().st_mtime_ns]
                  for p in folder.rglob('*') if kind_of(p) and p.is_file()
                  and not is_hidden(p.relative_to(folder))}
        if not listed:
            raise Refused(f'there is no parquet or JSON Lines file in {folder}')

    def digest(name):
        return hashlib.blake2b(name.encode()).hexdigest()
    return [listed[name] for name in sorted(listed, key=digest)]


# --------------------------------------------------------------------- a worker: a file -> a shard

def end_with_parent():
    "A worker process ends when the process that started it ends, for whatever reason."
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def for_validation(text, every):        # by the text, so that all its copies are in one split
    digest = hashlib.blake2b(text.encode('utf-8'), digest_size=8).digest()
    return int.from_bytes(digest, 'big') % every == 0


def tokenise(folder, i, path, read, tokenizer, every):
    "Write a file's two shards, train_I.bin and val_I.bin. Returns the tokens to train on."
    paths = [folder / f'{split}_{i:05d}.bin' for split in ('train', 'val')]
    tokenizer = get_tokenizer(tokenizer)
    dtype = np.dtype(token_type(tokenizer.n_vocab))
    if not all(map(Path.exists, paths)):
        start = start_of_document(tokenizer)
        with fresh(paths[0]) as train, fresh(paths[1]) as val:
            for text in filter(None, texts(path, read)):
                # half a pair of surrogates is no character
                text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
                tokens = np.array([*start, *tokenizer.encode_ordinary(text)], dtype)
                (val if for_validation(text, every) else train).write(tokens.tobytes())
    return paths[0].stat().st_size // dtype.itemsize


# --------------------------------------------------------------------- a source: files -> a dataset

def read_files(folder, plan, budget, options, pool, bar):
    """The numbers of the first files that have `budget` tokens to train on together. Every worker
    reads one file at a time, and the next are begun when all are done."""
    numbers, tokens = [], 0
    files = iter(enumerate(plan['files']))
    while tokens < budget and (some := list(itertools.islice(files, options.workers))):
        jobs = [pool.submit(tokenise, folder, i, path, plan['read'], options.tokenizer,
                            options.val_every) for i, (path, *_) in some]
        for (i, _), job in zip(some, jobs):
            n = job.result()
            if tokens < budget:
                numbers.append(i)
                tokens += n
                bar.update(n)
            else:               # the workers were more than the files that were still needed
                for split in ('train', 'val'):
                    (folder / f'{split}_{i:05d}.bin').unlink()
    return numbers


def begun(source, folder, options):
    "The settings and files a folder was begun with: it can only go on with the same."
    path = folder / 'plan.json'
    now = dict(repo=str(options.source or source.repo), read=source.read,
               tokenizer=options.tokenizer, val_every=options.val_every,
               fingerprint=fingerprint(get_tokenizer(options.tokenizer)))
    if not path.exists() and any(folder.glob('train*')):
        raise Refused(f'{folder} holds shards and no {path.name}, so nothing says what was made of '
                      'what: remove that folder, or choose another --out')
    if options.source or not path.exists():     # what is on the hub is named with its commit
        now['files'] = list_files(source, options.source)
    if not path.exists():
        write_json(path, now)
    plan = read_json(path)
    for name, value in now.items():
        if plan.get(name) != value:
            what = 'other files' if name == 'files' else f'{name}={plan.get(name)}, not {value!r}'
            raise Refused(f'{folder} was begun with {what}: choose another --out, or remove that '
                          'folder')
    return plan


def made_before(folder, budget):
    """What train.json says of a dataset that is there, whole, and has tokens enough, or None. A
    shard that is not what was written goes."""
    paths = [folder / f'{split}.json' for split in ('train', 'val')]
    made = [read_json(path) for path in paths if path.exists()]
    damaged = [folder / shard['file'] for each in made for shard in each['shards']
               if not (folder / shard['file']).exists()
               or hash_of(folder / shard['file']) != shard['sha256']['.bin']]
    if len(made) == 2 and not damaged and made[0]['tokens'] >= budget:
        return made[0]
    for left in [*paths, *damaged]:         # no dataset until it is whole and has more tokens
        left.unlink(missing_ok=True)


def make(source, folder, budget, options, pool, bar):
    """One source's dataset of at least `budget` training tokens, or of all that it has. Returns
    what its train.json says."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)                # of workers that were killed
    plan = begun(source, folder, options)
    if made := made_before(folder, budget):
        return made
    numbers = read_files(folder, plan, budget, options, pool, bar)
    # small shards as a single one: a window of text lies within a shard, and theirs are short
    replace(folder / 'val.bin', b''.join((folder / f'val_{i:05d}.bin').read_bytes()
                                         for i in numbers))
    n_vocab = get_tokenizer(options.tokenizer).n_vocab
    names = dict(val=['val.bin'], train=[f'train_{i:05d}.bin' for i in numbers])
    for split, files in names.items():      # train.json comes last: with it, it is a dataset
        shards = [shard_of(folder / name, np.dtype(token_type(n_vocab))) for name in files]
        made = dict(tokenizer=options.tokenizer, fingerprint=plan['fingerprint'], n_vocab=n_vocab,
                    dtype=token_type(n_vocab), tokens=sum(shard['tokens'] for shard in shards),
                    kinds=[], shards=[shard for shard in shards if shard['tokens']],
                    origin=dict(made_by='corpus.py', source=plan['repo'], files=len(numbers)))
        if not made['tokens']:
            raise Refused(f'{folder}: no document is for {split}. By its text, one of '
                          f'{options.val_every} is for validation: give more documents and '
                          '--tokens, and another --out')
        copy_tokenizer(options.tokenizer, folder)
        write_json(folder / f'{split}.json', made)
    return made


def shard_of(path, dtype):
    "What a dataset says of a shard."
    return dict(file=path.name, tokens=path.stat().st_size // dtype.itemsize,
                sha256={'.bin': hash_of(path)})


# -------------------------------------------------------------------------------------- the mixture

def number(text):
    "'10B' as 10,000,000,000."
    factor = dict(K=10**3, M=10**6, B=10**9, T=10**12).get(text[-1:].upper(), 1)
    with refusing(ValueError, OverflowError, why=lambda error: f'--tokens={text} is no number of '
                  'tokens such as 500M or 10B'):
        found = round(float(text[:-1] if factor > 1 else text) * factor)
        if found < 1:
            raise ValueError
        return found


def refuse_taken(out, names):
    "A folder that holds something else than this mixture, which would be read instead of it."
    mixture = out / 'mixture.json'
    if mixture.exists() and read_json(mixture).keys() != names:
        raise Refused(f'{out} holds a mixture of {", ".join(read_json(mixture))}: choose another '
                      '--out')
    for file, what in (('ckpt.pt', 'a run'), ('train.json', 'a dataset')):
        if (out / file).exists():
            raise Refused(f'{out} holds {what}: choose another --out for a mixture')


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


def prepare(mixtures, docstring, argv=None, out=None):
    "The command of a data/NAME/prepare.py: `mixtures` is {name: [Source]}."
    options = read(Options, argv, ['mixture'])
    name = next(iter(mixtures)) if len(mixtures) == 1 else options.mixture
    check_choice('mixture', name, mixtures)
    if options.source is not None:
        options.source = options.source.resolve()
        if not options.source.is_dir():
            raise Refused(f'--source={options.source} is no folder')
    out = options.out or (out / name if len(mixtures) > 1 else out)
    tokens = number(options.tokens)
    budgets = shares([source.share for source in mixtures[name]], tokens)
    spawn = multiprocessing.get_context('spawn')
    killed = lambda error: ('a worker was ended from outside, as where memory runs out: take fewer '
                            '--workers; the same command goes on where it was')
    refuse_taken(out, {source.name for source in mixtures[name]})
    with (claim(out), refusing(BrokenProcessPool, why=killed),
          tqdm(total=tokens, unit='token', unit_scale=True) as bar,
          ProcessPoolExecutor(options.workers, spawn, end_with_parent) as pool):
        for source, budget in zip(mixtures[name], budgets):
            bar.set_description(source.name)
            made = make(source, out / source.name, budget, options, pool, bar)
            n = made['tokens']
            repeats = (f' of {budget:,}: all there are, so they are read {budget / n:.1f} times'
                       if n < budget else '')
            bar.write(f'{out / source.name}: {n:,} tokens{repeats}')
        write_json(out / 'mixture.json', {each.name: each.share for each in mixtures[name]})
    print(f'{out}: {tokens:,} tokens in the mixture; nanodepth train --data={out} --dry_run looks '
          'at it')
