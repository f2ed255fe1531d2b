"""A mixture of large datasets as shards of tokens: streamed, tokenised by many processes, and
stopped and started at will.

The idea: each file of a source becomes a shard of its own. So what is in a shard depends on its
file alone, not on how many processes there are. A shard gets its name when it is complete, so a
restart does only the files without one. Whether a document is for validation is decided by its
text, so that all its copies are in one split.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A: the mixture, "sampled by
proportion", where small sources are read several times.
Here: a source is a dataset of its own and `mixture.json` says the shares; the loader keeps them
exactly, in rows of equal length, and reads a small source again when it ends. So new shares need
no new tokens. A source has at least the tokens of its share, because files are taken whole.

Usage:
    python data/smollm/prepare.py --tokens=10B                      # from the Hugging Face hub
    python data/smollm/prepare.py --tokens=1M --source=FOLDER       # from local files
    loader = Loader('data/smollm', batch_size=16, context=2048)     # reads mixture.json
"""
import hashlib
import itertools
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanodepth.common.errors import Refused, check_choice, refusing
from nanodepth.common.files import (claim, fresh, read_json, remove_leftovers, replace,
                                    write_json)
from nanodepth.common.options import read
from nanodepth.text.loader import shares
from nanodepth.text.sources import list_files, texts
from nanodepth.text.tokenizer import fingerprint, get_tokenizer, start_of_document, token_type

# --------------------------------------------------------------------- a worker: a file -> a shard

def end_with_parent():
    "A worker process ends when the process that started it ends, for whatever reason."
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def for_validation(text, every):
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
    if options.source or not path.exists():     # what is on the hub is named with its commit
        now['files'] = list_files(source, options.source)
    if not path.exists():
        write_json(path, now)
    plan = read_json(path)
    for name, value in now.items():
        if plan.get(name) != value:
            what = 'other files' if name == 'files' else f'{name}={plan.get(name)}, not {value!r}'
            raise Refused(f'{folder} was begun with {what}: choose another --out, or remove it')
    return plan


def made_before(folder, budget):
    """What train.json says of a dataset that is there and has tokens enough, or None. A shard that
    is not as long as it says goes."""
    path = folder / 'train.json'
    if not path.exists():
        return None
    made = read_json(path)
    size = np.dtype(made['dtype']).itemsize
    sizes = {folder / shard['file']: size * shard['tokens'] for shard in made['shards']}
    damaged = [shard for shard, n in sizes.items()
               if not shard.exists() or shard.stat().st_size != n]
    if not damaged and made['tokens'] >= budget:
        return made
    for left in [path, *damaged]:           # no dataset until it has more tokens
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
            raise Refused(f'{folder}: no document is for {split}: remove it, and choose another '
                          f'--val_every than {options.val_every}')
        write_json(folder / f'{split}.json', made)
    return made


def shard_of(path, dtype):
    "What a dataset says of a shard."
    with open(path, 'rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
    return dict(file=path.name, tokens=path.stat().st_size // dtype.itemsize,
                sha256={'.bin': digest})


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


@dataclass
class Options:
    WORDS = ['mixture']
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
    options = read(Options, argv, docstring)
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
    with (claim(out), tqdm(total=tokens, unit='token', unit_scale=True) as bar,
          ProcessPoolExecutor(options.workers, spawn, end_with_parent) as pool):
        for source, budget in zip(mixtures[name], budgets):
            bar.set_description(source.name)
            made = make(source, out / source.name, budget, options, pool, bar)
            n = made['tokens']
            repeats = (f' of {budget:,}: all there are, so they are read {budget / n:.1f} times'
                       if n < budget else '')
            bar.write(f'{out / source.name}: {n:,} tokens{repeats}')
        write_json(out / 'mixture.json', {each.name: each.share for each in mixtures[name]})
    print(f'{out}: {tokens:,} tokens in the mixture; train.py --data={out} --dry_run looks at it')
