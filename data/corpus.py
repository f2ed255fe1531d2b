"""A mixture of large datasets as shards of tokens: streamed, tokenised by many processes, and
stopped and started at will.

The idea: each file of a source becomes a shard of its own. So what is in a shard depends on its
file alone, not on how many processes there are. A record is written when a file is done, so a
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
import collections
import contextlib
import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.errors import Refused, check_choice, refusing
from common.fields import short, within
from common.files import claim, fresh, read_json, reading, write_json
from common.options import from_text, read, word
from data.sources import list_files, texts
from data.tokenizer import encode_document, get_tokenizer, start_of_document, token_type
from data.tokens import shares

GOES_ON = 'what is done is kept, and the same command goes on'


# --------------------------------------------------------------------- a worker: a file -> a shard

class Stopped(Exception):
    "The command wants no more shards."


def begin(counter, stop):
    "Set up a worker process. It ends when the process that started it ends, for whatever reason."
    global COUNTER, STOP
    COUNTER, STOP = counter, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # its parent handles Ctrl-C
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def for_validation(text, every):
    digest = hashlib.blake2b(text.encode('utf-8'), digest_size=8).digest()
    return int.from_bytes(digest, 'big') % every == 0


def tokenise(folder, i, path, read, tokenizer, every):
    """Write a file's two shards, train_I.bin and val_I.bin, and then its record, which vouches for
    them. Returns the record."""
    tokenizer = get_tokenizer(tokenizer)
    start = start_of_document(tokenizer)
    dtype = np.dtype(token_type(tokenizer.n_vocab))
    shards = {split: dict(file=f'{split}_{i:05d}.bin', tokens=0) for split in ('train', 'val')}
    digests = {split: hashlib.sha256() for split in shards}
    record = dict(val_every=every, documents=0, left_out=0)
    uncounted = 0
    record_of(folder, i).unlink(missing_ok=True)
    with (fresh(folder / shards['train']['file']) as train,
          fresh(folder / shards['val']['file']) as val):
        files = dict(train=train, val=val)
        for text in texts(path, read):
            if STOP.value:
                raise Stopped
            if not text:
                record['left_out'] += 1
                continue
            # half a pair of surrogates is no character
            text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
            tokens = np.array([*start, *encode_document(tokenizer, text)], dtype)
            split = 'val' if for_validation(text, every) else 'train'
            raw = tokens.tobytes()
            files[split].write(raw)
            digests[split].update(raw)
            shards[split]['tokens'] += len(tokens)
            record['documents'] += 1
            uncounted += len(tokens)
            if uncounted > 100_000:
                with COUNTER.get_lock():
                    COUNTER.value += uncounted
                uncounted = 0
    for split, shard in shards.items():
        record[split] = shard | dict(sha256={'.bin': digests[split].hexdigest()})
    write_json(record_of(folder, i), record)
    return record


def record_of(folder, i):
    return folder / f'file_{i:05d}.json'


def is_done(folder, i, every):
    "The record of a file whose shards are there, with this share of validation, or None."
    path = record_of(folder, i)
    if not path.exists():
        return None
    with reading(path, then=': remove it, and its file is read again'):
        record = read_json(path)
        there = all((folder / record[split]['file']).exists() for split in ('train', 'val'))
        return record if there and record['val_every'] == every else None


# --------------------------------------------------------------------- a source: files -> a dataset

def read_files(folder, plan, budget, every, options, pool, stop, tick):
    """The records of the first files that have `budget` tokens to train on together. More are
    begun ahead, for all workers, as far as the first ones say that they will be needed."""
    files = plan['files']
    records = []
    ahead = collections.deque()

    def have():
        return sum(record['train']['tokens'] for record in records)

    def more_is_needed():
        size_read = sum(size for _, size in files[:len(records)])
        tokens_per_byte = have() / size_read if size_read else 0.3
        begun = len(records) + len(ahead)
        return not ahead or tokens_per_byte * sum(size for _, size in files[:begun]) < budget

    stop.value = 0
    try:
        while have() < budget and len(records) < len(files):
            while (len(records) + len(ahead) < len(files) and len(ahead) < options.workers
                   and more_is_needed()):
                i = len(records) + len(ahead)
                ahead.append(is_done(folder, i, every) or pool.submit(
                    tokenise, folder, i, files[i][0], plan['read'], options.tokenizer, every))
            first = ahead.popleft()
            while not isinstance(first, dict):
                tick()
                if wait([first], timeout=0.2).done:
                    first = first.result()
            records.append(first)
    finally:        # the files begun ahead are not needed
        stop.value = 1
        wait([job for job in ahead if not isinstance(job, dict) and not job.cancel()])
    return records


def begun(source, folder, options):
    "The settings and files a folder was begun with: it can only go on with the same."
    path = folder / 'plan.json'
    where = options.source
    plan = read_json(path) if path.exists() else None
    now = dict(repo=str(where or source.repo), read=source.read, tokenizer=options.tokenizer,
               val_every=options.val_every)
    if where or not plan:
        now['files'] = [list(file) for file in list_files(source, where)]
    if not plan:
        write_json(path, now)
        return now
    if 'group' in plan:
        raise Refused(f'{folder} was begun by an older version, whose shards were cut otherwise: '
                      'choose another --out, or remove it')
    for name, value in now.items():
        if plan.get(name) != value:
            change = ('other files' if name == 'files'
                      else f'{name}={short(plan.get(name))}, and now it is {value!r}')
            raise Refused(f'{folder} was begun with {change}: choose another --out, or remove it')
    return plan


def make(source, folder, budget, options, pool, stop, tick):
    """One source's dataset of at least `budget` training tokens, or of all that it has. Returns
    what its train.json says."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob('*.tmp'):       # a killed run's: `claim` excludes a live one
        left.unlink()
    plan = begun(source, folder, options)
    path = folder / 'train.json'
    every = options.val_every
    if path.exists():
        with reading(path, then=f': remove {folder}'):
            description = read_json(path)
            there = all((folder / shard['file']).exists() for shard in description['shards'])
            exhausted = description['origin']['files'] == len(plan['files'])
            if there and (exhausted or description['tokens'] >= budget):
                return description
        path.unlink()       # no dataset until it has more tokens
    while True:
        records = read_files(folder, plan, budget, every, options, pool, stop, tick)
        shards = {split: [record[split] for record in records if record[split]['tokens']]
                  for split in ('val', 'train')}
        documents = sum(record['documents'] for record in records)
        if all(shards.values()):
            break
        if every == 2:
            raise Refused(f'{folder}: {documents} documents are too few: some to train on, some '
                          'for validation')
        every = max(2, every // 8)          # a small source: a larger part of it is for validation
    for i in range(len(records), len(plan['files'])):       # begun ahead, and not needed
        record_of(folder, i).unlink(missing_ok=True)
        for split in shards:
            (folder / f'{split}_{i:05d}.bin').unlink(missing_ok=True)
    shards['val'] = [joined(folder, shards['val'])]
    n_vocab = get_tokenizer(options.tokenizer).n_vocab
    origin = dict(made_by='corpus.py', source=plan['repo'], files=len(records),
                  documents=documents, left_out=sum(record['left_out'] for record in records))
    for split, chosen in shards.items():
        description = dict(tokenizer=options.tokenizer, n_vocab=n_vocab, dtype=token_type(n_vocab),
                           tokens=sum(shard['tokens'] for shard in chosen), row=None, kinds=[],
                           shards=chosen, origin=origin)
        write_json(folder / f'{split}.json', description)
    return description


def joined(folder, shards):
    "Small shards as a single one: a window of text lies within a shard, and theirs are short."
    digest = hashlib.sha256()
    with fresh(folder / 'val.bin') as file:
        for shard in shards:
            raw = (folder / shard['file']).read_bytes()
            file.write(raw)
            digest.update(raw)
    return dict(file='val.bin', tokens=sum(shard['tokens'] for shard in shards),
                sha256={'.bin': digest.hexdigest()})


# -------------------------------------------------------------------------------------- the mixture

def number(text):
    "'10B' as 10,000,000,000."
    factor = dict(K=10**3, M=10**6, B=10**9, T=10**12).get(text[-1:].upper(), 1)
    with refusing(ValueError, why=lambda error: f'{text!r} is no number such as 500M or 10B'):
        value = float(text[:-1] if factor > 1 else text) * factor
    if not (0 < value < 1e15 and value == int(value)):
        raise Refused(f'{text!r} is no whole number such as 500M or 10B')
    return int(value)


@dataclass
class Options:
    mixture: str | None = word(default=None)    # which data, where there are several mixtures
    tokens: int = from_text(number, kw_only=True)       # to train on, over all sources: 10B, 500M
    tokenizer: str = 'HuggingFaceTB/cosmo2-tokenizer'       # what the model reads
    # a folder with a folder of parquet or JSON Lines files for each source; None: the hub
    source: str | None = None
    workers: int = within(1, 10_000, default=os.cpu_count())    # they do not change the result
    val_every: int = within(1, 10 ** 9, default=200)    # one document of so many is for validation
    out: Path | None = None             # the folder to write; None: beside the script


def read_options(mixtures, docstring, argv, out):
    options = read(Options, argv, docstring)
    if len(mixtures) == 1:
        options.mixture = options.mixture or next(iter(mixtures))
    check_choice('mixture', options.mixture, mixtures)
    if options.source is not None:
        options.source = Path(options.source).resolve()
        if not options.source.is_dir():
            raise Refused(f'--source={options.source} is no folder')
    options.out = options.out or (out / options.mixture if len(mixtures) > 1 else out)
    return options


@contextlib.contextmanager
def stopping(options):
    "Whatever ends the work in here: what is done is kept."
    try:
        yield
    except BrokenProcessPool:
        raise SystemExit('prepare.py: a process was killed (out of memory?): try fewer than '
                         f'--workers={options.workers}; {GOES_ON}') from None
    except KeyboardInterrupt:
        raise SystemExit(f'\nprepare.py: stopped; {GOES_ON}') from None
    except OSError as error:
        where = error.filename or options.out
        raise Refused(f'{error.strerror or error} ({where}); {GOES_ON}') from None


def prepare(mixtures, docstring, argv=None, out=None):
    "The command of a data/NAME/prepare.py: `mixtures` is {name: [Source]}."
    options = read_options(mixtures, docstring, argv, out)
    out = options.out
    sources = mixtures[options.mixture]
    with claim(out), stopping(options):
        budgets = shares([s.share for s in sources], options.tokens)
        width = np.dtype(token_type(get_tokenizer(options.tokenizer).n_vocab)).itemsize
        need = options.tokens * width - sum(p.stat().st_size for p in out.rglob('*.bin'))
        if need > (free := shutil.disk_usage(out).free):
            raise Refused(f'{out} would need {need / 1e9:,.1f} GB more, but {free / 1e9:,.1f} GB '
                          'are free')
        spawn = multiprocessing.get_context('spawn')
        # no lock: a process may be killed while it holds one
        counter = spawn.Value('q', 0)
        stop = spawn.RawValue('b', 0)
        with (tqdm(total=options.tokens, unit='token', unit_scale=True, dynamic_ncols=True,
                   smoothing=0.05) as bar,
              ProcessPoolExecutor(options.workers, spawn, begin, (counter, stop)) as pool):
            done = 0
            for source, budget in zip(sources, budgets):
                bar.set_description(source.name)
                counter.value = 0
                made = make(source, out / source.name, budget, options, pool, stop,
                            lambda: bar.update(min(done + budget, done + counter.value) - bar.n))
                done += budget
                bar.update(done - bar.n)
                n, origin = made['tokens'], made['origin']
                repeats = (f' of {budget:,}: all there are, so they are read {budget / n:.1f} times'
                           if n < budget else '')
                bar.write(f'{out / source.name}: {n:,} tokens{repeats}; {origin["documents"]:,} '
                          f'documents, {origin["left_out"]:,} empty or left out')
            write_json(out / 'mixture.json', {s.name: s.share for s in sources})
    print(f'{out}: {options.tokens:,} tokens in the mixture; python nanodepth.py check_data '
          f'{out / sources[0].name} looks at a part')
