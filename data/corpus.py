"""A mixture of large datasets as shards of tokens: streamed, tokenised by many processes, and
stopped and started at will.

The idea: the files of a source are dealt out in groups, and a group becomes shards of its own. So
what is in a shard depends on the list of files alone, not on how many processes there are. A
group's record is written last: a restart does only the groups without one. Whether a
document is for validation is decided by its text, so that all its copies are in one split.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A: the mixture, "sampled by
proportion", where small sources are read several times.
Here: a source is a dataset of its own and `mixture.json` says the shares; the loader keeps them
exactly, in rows of equal length, and reads a small source again when it ends. So new shares need
no new tokens.

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
from common.fields import fit, short, within
from common.files import claim, read_json, reading, replace, write_json
from common.options import from_text, read, word
from data.sources import group, list_files, texts
from data.tokenizer import encode_document, get_tokenizer, start_of_document, token_type
from data.tokens import shares

MOST_VALIDATION = 10_000_000        # tokens of a source that are kept for validation
GOES_ON = 'what is done is kept, and the same command goes on'


# ------------------------------------------------------------------------- a group: files -> shards

class Shards:
    "Writes tokens into files of `size` tokens each. A file gets its name when complete."

    def __init__(self, folder, name, size, dtype):
        self.folder, self.name, self.size, self.dtype = folder, name, size, dtype
        self.done, self.file = [], None

    def write(self, tokens):
        while len(tokens):
            if self.file is None:
                self.path = self.folder / f'{self.name}_{len(self.done):03d}.bin'
                self.fresh = self.path.with_name(f'{self.path.name}.{os.getpid()}.tmp')
                self.file, self.tokens, self.digest = open(self.fresh, 'wb'), 0, hashlib.sha256()
            part, tokens = np.split(tokens, [self.size - self.tokens])
            raw = part.astype(self.dtype).tobytes()
            self.file.write(raw)
            self.digest.update(raw)
            self.tokens += len(part)
            if self.tokens == self.size:
                self.finish()

    def finish(self):
        if self.file is None:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.fresh, self.path)
        self.done.append(dict(file=self.path.name, tokens=self.tokens,
                              sha256={'.bin': self.digest.hexdigest()}))
        self.file = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.file is not None:       # something went wrong: remove half a file
            with contextlib.suppress(OSError):
                self.file.close()
            self.fresh.unlink(missing_ok=True)


def for_validation(text, every):
    digest = hashlib.blake2b(text.encode('utf-8'), digest_size=8).digest()
    return int.from_bytes(digest, 'big') % every == 0


def begin(counter, stop):
    """Set up a worker process. It ends when the process that started it ends, for whatever
    reason."""
    global COUNTER, STOP
    COUNTER, STOP = counter, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # its parent handles Ctrl-C
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def do_group(folder, g, paths, read, tokenizer, shard, val_every):
    "Tokenise a group's files into its shards; None if told to stop."
    tokenizer, counted = get_tokenizer(tokenizer), 0
    start, dtype = start_of_document(tokenizer), np.dtype(token_type(tokenizer.n_vocab))
    record, path = dict(documents=0, left_out=0, val_every=val_every), record_of(folder, g)
    path.unlink(missing_ok=True)    # an old record must not vouch for the new shards
    with (Shards(folder, f'train_{g:05d}', shard, dtype) as train,
          Shards(folder, f'val_{g:05d}', shard, dtype) as val):
        for text in texts(paths, read):
            if STOP.value:
                return None
            if not text:
                record['left_out'] += 1
                continue
            # half a pair of surrogates is no character
            text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
            tokens = np.array([*start, *encode_document(tokenizer, text)], dtype='uint32')
            (val if for_validation(text, val_every) else train).write(tokens)
            record['documents'] += 1
            counted += len(tokens)
            if counted > 100_000:
                with COUNTER.get_lock():
                    COUNTER.value += counted
                counted = 0
        train.finish()
        val.finish()
    record |= dict(train=train.done, val=val.done)
    write_json(path, record)
    return record


def record_of(folder, g):
    return folder / f'group_{g:05d}.json'


# -------------------------------------------------------------------- a source: groups -> a dataset

def finished(folder, g, val_every):
    "The record of a group whose shards are all there."
    path = record_of(folder, g)
    if not path.exists():
        return None
    with reading(path, then=': remove it, and its group is done again'):
        record = read_json(path)
        there = all((folder / s['file']).exists() for s in record['train'] + record['val'])
        return record if there and record['val_every'] == val_every else None


def up_to(folder, shards, budget, dtype):
    "The first `budget` tokens of some shards; the last one is cut, as a copy."
    chosen = []
    for shard in shards:
        if budget < shard['tokens']:
            if budget:
                cut = shard['file'].replace('.bin', f'_cut{budget}.bin')
                raw = np.fromfile(folder / shard['file'], dtype, budget).tobytes()
                replace(folder / cut, raw)
                chosen.append(dict(file=cut, tokens=budget,
                                   sha256={'.bin': hashlib.sha256(raw).hexdigest()}))
            break
        chosen.append(shard)
        budget -= shard['tokens']
    return chosen


def do_groups(source, folder, groups, budget, every, options, pool, stop, tick):
    """The records of the first groups that have `budget` tokens together. Others are begun
    ahead as needed, judging by the first ones."""
    records, ahead, g = [], collections.deque(), 0

    def have():
        return sum(s['tokens'] for r in records for s in r['train'])

    def wanted():
        read = sum(n for _, n in groups[:len(records)])
        rate = have() / read if read else 0.3           # tokens of a byte
        return not ahead or rate * sum(n for _, n in groups[:g]) < budget

    stop.value = 0
    try:
        while have() < budget and (ahead or g < len(groups)):
            while g < len(groups) and len(ahead) < options.workers and wanted():
                ahead.append(finished(folder, g, every) or pool.submit(
                    do_group, folder, g, groups[g][0], source.read, options.tokenizer,
                    options.shard, every))
                g += 1
            record = ahead.popleft()
            while not isinstance(record, dict):
                tick()
                record = record.result() if wait([record], timeout=0.2).done else record
            records.append(record)
    finally:        # the groups begun ahead are not needed
        stop.value = 1
        wait([r for r in ahead if not isinstance(r, dict) and not r.cancel()])
    return records


def begun(source, folder, options):
    "The settings and files a folder was begun with: it can only go on with the same."
    path, where = folder / 'plan.json', options.source
    plan = read_json(path) if path.exists() else None
    now = dict(repo=str(where or source.repo), read=source.read, tokenizer=options.tokenizer,
               shard=options.shard, group=options.group, val_every=options.val_every)
    if where or not plan:
        now['files'] = [list(file) for file in list_files(source, where)]
    if not plan:
        write_json(path, now)
        return now
    for name, value in now.items():
        if plan.get(name) != value:
            change = ('other files' if name == 'files'
                      else f'{name}={short(plan.get(name))}, and now it is {value!r}')
            raise Refused(f'{folder} was begun with {change}: choose another --out, or remove it')
    return plan


def make(source, folder, budget, options, pool, stop, tick):
    "One source's dataset of `budget` training tokens, or of all that it has. Returns what it has."
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob('*.tmp'):       # a killed run's: `claim` excludes a live one
        left.unlink()
    plan, path = begun(source, folder, options), folder / 'train.json'
    n_vocab, groups = get_tokenizer(options.tokenizer).n_vocab, group(plan['files'], options.group)
    dtype, every = token_type(n_vocab), options.val_every
    if path.exists():
        with reading(path, then=f': remove {folder}'):
            meta = read_json(path)
            made = fit('budget', meta['origin'].get('budget'), int, path)
        if made > budget:
            raise Refused(f'{folder} has its {meta["tokens"]:,} tokens already, more than '
                          f'{budget:,}: choose another --out')
        if made == budget:
            tidy(folder)
            return meta
        path.unlink()       # no dataset until it has more tokens
    while True:
        records = do_groups(source, folder, groups, budget, every, options, pool, stop, tick)
        shards = {split: up_to(folder, [s for r in records for s in r[split]], most, dtype)
                  for split, most in (('val', MOST_VALIDATION), ('train', budget))}
        documents, left_out = (sum(r[key] for r in records) for key in ('documents', 'left_out'))
        if all(shards.values()):
            break
        if every == 2:
            raise Refused(f'{folder}: {documents} documents are too few: some to train on, some '
                          'for validation')
        every = max(2, every // 8)          # a small source: a larger part of it is for validation
    origin = dict(made_by='corpus.py', source=plan['repo'],
                  files=sum(len(paths) for paths, _ in groups[:len(records)]), budget=budget,
                  documents=documents, left_out=left_out)
    for split, chosen in shards.items():
        meta = dict(tokenizer=options.tokenizer, n_vocab=n_vocab, dtype=dtype,
                    tokens=sum(s['tokens'] for s in chosen), row=None, kinds=[], shards=chosen,
                    origin=origin)
        write_json(folder / f'{split}.json', meta)
    tidy(folder)
    return meta


def tidy(folder):
    "Remove what no split uses: groups that were begun ahead, the whole of a shard that was cut."
    used = {s['file'] for split in ('train', 'val')
            for s in read_json(folder / f'{split}.json')['shards']}
    for path in folder.glob('group_*.json'):
        if any(s['file'] not in used for split in ('train', 'val') for s in read_json(path)[split]):
            path.unlink()
    for path in folder.glob('*.bin'):
        if path.name not in used:
            path.unlink()


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
    source: Path | None = None
    workers: int = within(1, 10_000, default=os.cpu_count())    # they do not change the result
    shard: int = from_text(number, default=100_000_000)         # tokens of a shard
    # bytes of the files that become shards together
    group: int = from_text(number, default=250_000_000)
    val_every: int = within(1, 10 ** 9, default=200)    # one document of so many is for validation
    out: Path | None = None             # the folder to write; None: beside the script


def read_options(mixtures, about, argv, out):
    options = read(Options, argv, about)
    if len(mixtures) > 1 or options.mixture:
        check_choice('mixture', options.mixture, mixtures)
    options.mixture = options.mixture or next(iter(mixtures))
    options.source = options.source and options.source.resolve()
    if options.source and not options.source.is_dir():
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


def prepare(mixtures, about, argv=None, out=None):
    "The command of a data/NAME/prepare.py: `mixtures` is {name: [Source]}."
    options = read_options(mixtures, about, argv, out)
    out, sources = options.out, mixtures[options.mixture]
    with claim(out), stopping(options):
        budgets = shares([s.share for s in sources], options.tokens)
        width = np.dtype(token_type(get_tokenizer(options.tokenizer).n_vocab)).itemsize
        need = options.tokens * width - sum(p.stat().st_size for p in out.rglob('*.bin'))
        if need > (free := shutil.disk_usage(out).free):
            raise Refused(f'{out} would need {need / 1e9:,.1f} GB more, but {free / 1e9:,.1f} GB '
                          'are free')
        spawn = multiprocessing.get_context('spawn')
        # no lock: a process may be killed while it holds one
        counter, stop = spawn.Value('q', 0), spawn.RawValue('b', 0)
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
                short = (f' of {budget:,}: all there are, so they are read {budget / n:.1f} times'
                         if n < budget else '')
                bar.write(f'{out / source.name}: {n:,} tokens{short}; {origin["documents"]:,} '
                          f'documents, {origin["left_out"]:,} empty or left out')
            write_json(out / 'mixture.json', {s.name: s.share for s in sources})
    print(f'{out}: {options.tokens:,} tokens in the mixture; python nanodepth.py check_data '
          f'{out / sources[0].name} looks at a part')
