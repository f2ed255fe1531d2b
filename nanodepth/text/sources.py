"""Where large datasets come from: their files on the Hugging Face hub or on this disk, and how a
row becomes a text.

The idea: a source is a list of files in an order drawn from their names, so that the first few are
a fair sample, and a function that turns a row into a text, or None.

Paper: "Retrofitted Recurrence", section 4.4, for `chat`: the tags of user and assistant removed,
what reasoning models wrote left out (which columns say so depends on the dataset).
Here: Python-Edu's rows are numbers of files in Software Heritage's public archive.
Usage:
    source = Source('open_web_math', 0.06, 'open-web-math/open-web-math', 'data/*.parquet')
    files = list_files(source, None)                # [(path, bytes)]; None: on the hub
    for text in texts(files[0][0], source.read): ...
"""
import dataclasses
import fnmatch
import gzip
import hashlib
import http.client
import itertools
import re
import time
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanodepth.common.errors import Refused

KINDS = {'.parquet': 'parquet', '.jsonl': 'json', '.json': 'json', '.gz': 'json', '.zst': 'json'}


@dataclasses.dataclass(frozen=True)
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
    model wrote it."""
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
        for row in load_dataset(kind_of(path), data_files=str(path), split='train',
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

def list_files(source, where):
    """[[path, bytes]] of a source's files, in an order drawn from their names; of files on this
    disk also when they were last changed."""
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
                  for p in folder.rglob('*') if kind_of(p) and p.is_file()}
        if not listed:
            raise Refused(f'there is no parquet or JSON Lines file in {folder}')

    def digest(name):
        return hashlib.blake2b(name.encode()).hexdigest()
    return [listed[name] for name in sorted(listed, key=digest)]
