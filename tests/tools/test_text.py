"""Test data: from text to tokens to batches, and questions whose answers can be worked out.

A batch, a split and a mixture are each compared with a slow form. A question is solved by reading
it. The toy data and the questions have not changed. A dataset has the same bytes for any number of
processes, and after a kill.
"""
import gzip
import hashlib
import itertools
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import BEGUN, ROOT, asked_of, bpe, logits as logits_of, save_run, write_noise

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands.train import open_parent
from nanodepth.common.errors import Refused
from nanodepth.models.checkpoint import load_model, state_of
from nanodepth.models.hf import save_hf
from nanodepth.scoring.data import PrefixedLoader, open_data, starts_of
from nanodepth.scoring.rows import ScoreOptions, Subject
from nanodepth.text import tokens as tokens_file
from nanodepth.text.primitives import TASKS, TOY_TASKS, Example, few_shot
from nanodepth.text.tokenizer import encode_as_array, get_tokenizer
from nanodepth.text.tokens import number, write_dataset
from nanodepth.train import train
from nanodepth.training import loader as loader_file
from nanodepth.training.loader import Loader
from nanodepth.training.plan import seed_for


@pytest.mark.parametrize('text, tokens', [
    ('', []), ('a<|endoftext|>b', [97, 256, 98]),
    (odd := '  9\t10\r\n naïve 東京 🙂½ Ⅷ٣ \x00\x01\xff  ', [*odd.encode()])])
def test_bytes_are_tokens(text, tokens):
    "There are 257: each byte, and the end of a text where it is meant."
    enc, plain = get_tokenizer('bytes'), [*text.encode()]
    assert (enc.n_vocab, enc.eot_token) == (257, 256)
    assert enc.encode_ordinary(text) == plain and enc.decode(plain) == text
    assert enc.encode(text, allowed_special='all') == tokens
    for special, wanted in ((True, tokens), (False, plain)):
        array = encode_as_array(enc, text, special)
        assert array.dtype == 'uint16' and array.tolist() == wanted


def shard_of(dataset, s=0):
    "{'.bin': the tokens of a shard}, and .mask and .marks, if it has them."
    shard, dtypes = dataset.about['shards'][s], {'.bin': dataset.about['dtype']}
    return {ending: np.fromfile((dataset.folder / shard['file']).with_suffix(ending),
                                dtypes.get(ending, 'uint8')) for ending in shard['sha256']}


def shuffled(seed, items):
    "numpy's RandomState, whose stream is frozen, and its two words of the seed."
    items = np.array(items)
    np.random.RandomState([*divmod(seed, 2 ** 32)]).shuffle(items)
    return items.tolist()


def rows_slowly(loader, starts):
    "Row after row: (its epoch, (tokens, targets, marks)), by counting, and from the bytes."
    T, quota, n = loader.context, loader.quota, len(starts)
    shards = [shard_of(dataset) for dataset in loader.datasets]
    turns = shuffled(seed_for(loader.seed, 'mixture'), np.repeat([*range(len(quota))], quota))
    if loader.split == 'val':           # each row goes to the dataset that is furthest behind
        turns = []
        for row in range(1, 1001):
            behind = [q * row / 1000 - turns.count(d) for d, q in enumerate(quota)]
            turns.append(behind.index(max(behind)))
    read = [0] * len(quota)
    for d in itertools.cycle(turns):
        shard, names = shards[d], loader.datasets[d].about['kinds']
        windows = (len(shard['.bin']) - 1) // T
        epoch, i = divmod(read[d], windows)
        read[d] += 1
        i = shuffled(seed_for(loader.seed, f'epoch of dataset {d}', epoch), range(windows))[i]
        tokens, targets, marks = shard['.bin'][i * T:i * T + T].tolist(), [], []
        for place in range(i * T + 1, i * T + T + 1):
            counts = '.mask' not in shard or shard['.mask'][place]
            targets.append(int(shard['.bin'][place]) if counts else -1)
            begins, kind = divmod(int(shard['.marks'][place]), 128) if names else (0, 0)
            marks.append(counts and kind and 128 * begins + 1 + loader.kinds.index(names[kind - 1]))
        if tokens[:n] == list(starts):
            yield epoch, (tokens + [0] * n, targets + [-1] * n, marks + [0] * n)
        else:
            yield epoch, ([*starts, *tokens], [-1] * n + targets, [0] * n + marks)


@pytest.mark.parametrize('folders, starts', [
    ('b', ()), ('abc', ()), ('abc', (7,)), ('cba', (3, 4)), ('d', ())])
def test_loader_by_slow_form(tmp_path, monkeypatch, folders, starts):
    """Whatever the batch and the number of processes. Kinds of answers go by name where datasets
    number them otherwise. Validation has each row once, until one dataset ends."""
    rng = np.random.default_rng(0)
    for name, n, kinds in (('a', 5000, ['x', 'y']), ('b', 300, ['y', 'z']), ('c', 9000, None),
                           ('d', 8, None)):         # a single window
        tokens, mask = rng.integers(3, 9, n), rng.integers(0, 2, n) if kinds else None
        marks = rng.choice([0, 1, 129, 2, 130], n) if kinds else None
        for split in ('train', 'val'):
            write_dataset(tmp_path / name, split, 'bytes', tokens, mask=mask, marks=marks,
                          kinds=kinds)
    paths = [tmp_path / name for name in folders]
    slow, slow_val = ([*itertools.islice(rows_slowly(Loader(paths, 1, 7, split, 5), starts), 1008)]
                      for split in ('train', 'val'))
    once = [epoch for epoch, _ in slow_val].index(1)
    rows, val_rows = ([row for _, row in some] for some in (slow, slow_val))

    def read(loader, n):
        "The first n rows, from all processes."
        parts = []
        for step in range(-(-n // loader.batch_size)):
            for rank in range(size):
                monkeypatch.setattr(loader_file, 'process', lambda: (rank, size))
                parts.append(loader.batch(step))
        return [torch.cat(part).tolist() for part in zip(*parts)]

    for batch_size, size in ((1, 1), (12, 1), (12, 3), (999, 3)):
        train, val = (PrefixedLoader(paths, batch_size, 7, split, 5) for split in ('train', 'val'))
        train.starts = val.starts = starts
        assert val.n_rows == once
        assert read(val, once) == [[*part] for part in zip(*val_rows[:once])]
        if batch_size == 12:        # 1008 rows are 84 batches, the last of which is in two periods
            assert read(train, 1008) == [[*part] for part in zip(*rows)]


def test_loader_has_one_order_for_ever(tmp_path):
    "Gold values: another platform or version must see the same data in the same order."
    assert seed_for(0, 'epoch of dataset 0', 3) == 8554754645012042060
    write_dataset(tmp_path, 'train', 'bytes', np.arange(81) % 256)
    row = Loader([tmp_path] * 2, 4, 8, seed=1).batch(3)[0][:, 0]
    assert (row // 8).tolist() == [9, 1, 2, 4]


@pytest.mark.parametrize('changes, error', [
    (dict(dtype='object'), Refused), (dict(dtype='float16'), Refused),
    (dict(shards=[dict(file='x.bin', tokens=0, sha256={'.bin': ''})]), Refused),
    (dict(shards=[dict(file='../x.bin', tokens=50, sha256={'.bin': ''})]), OSError)])
def test_loader_believes_no_json(data, changes, error):
    "A dtype of objects would have a stranger's bytes followed as pointers."
    path = data / 'train.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (data.parent / 'x.bin').write_bytes(bytes(100))
    with pytest.raises(error):
        Loader(data, 1, 8).batch(0)


def test_loader_reads_what_is_there_now(tmp_path):
    "As in a notebook, where data are made anew."
    for token in (1, 2):
        shutil.rmtree(tmp_path / 'd', ignore_errors=True)
        write_dataset(tmp_path / 'd', 'train', 'bytes', [token] * 340)
        assert Loader(tmp_path / 'd', 1, 8).batch(0)[0].unique().tolist() == [token]


def form_of(task, depth):
    "What a question looks like. Names are pairs of letters where single ones do not suffice."
    name = '[a-z]' if 5 * (depth + 1) <= 26 else '[a-z]{2}'
    asked = rf'What is the (numerical )?value of {name}\?\nAnswer:'

    def chain(sign):
        return rf'({name}{sign}\d+\n){{5}}({name}{sign}{name}\n){{{5 * depth}}}'
    return dict(
        toy_copy='([A-Z][a-z]{2}){9,15}',
        toy_assign=rf'([a-z]\d){{4}}([a-z][a-z]){{{4 * depth}}}\?[a-z]',
        copy_random=r'Fill in the blank:\n\n([a-z]{3} ){15}____ \. ->',
        copy_words=r'Fill in the blank:\n\n([a-z]+ ){15}____ \. ->',
        assign_basic=rf'Fill in blank:\n\n{chain("=")}{name}=____ \. ->',
        assign_math='The following is a set of simple mathematical equations.\n\n'
                    + chain('=') + asked,
        assign_code='The following is a very short Python program. Use the program to resolve the '
                    'value of the variable in the question.\n\nProgram:\n' + chain(' = ')
                    + r'\nQuestion:\n' + asked)[task]


def statements(prompt):
    "Its statements as a dict, and the name asked for: read off the prompt, not off the generator."
    if '=' in prompt:
        asked = re.search(r'(\w+)(=____|\?\nAnswer)', prompt)[1]
        return dict(re.findall(r'^(\w+) ?= ?(\w+)$', prompt, flags=re.M)), asked
    return dict(re.findall(r'(\w)(\w)', prompt.split('?')[0])), prompt[-1]


@pytest.mark.parametrize('task, depth', [
    (task, depth) for task in TASKS | TOY_TASKS for depth in range(7)
    if depth == 0 or 'copy' not in task and (task, depth) != ('toy_assign', 6)])
def test_question_is_solved_by_reading_it(task, depth):
    """Depth d takes d + 1 looks and no fewer. Shots are fresh, and the question stays. What is
    copied is what came next."""
    form, between = form_of(task, depth), '' if task in TOY_TASKS else '\n\n'
    size = dict(toy_copy=8, toy_assign=4, copy_random=10, copy_words=10).get(task, 5)
    by_shots = [few_shot(task, 40, shots=shots, depth=depth, seed=3) for shots in (0, 1, 2)]
    assert len({e.prompt for e in by_shots[0]}) == 40
    moves = []
    for a, b, c in zip(*by_shots):
        right, options = a.options[a.answer], [option.strip() for option in a.options]
        for shots, e in enumerate((a, b, c)):
            assert re.fullmatch(rf'({form} ?\w+{between}){{{shots}}}{form}', e.prompt)
            assert e.options[e.answer] == right and sorted(e.options) == sorted(a.options)
        first, second = c.prompt.removesuffix(b.prompt), b.prompt.removesuffix(a.prompt)
        assert c.prompt == first + second + a.prompt and first != second
        assert a.prompt not in (first, second)
        assert len({*options}) == len(options) == size
        assert task == 'copy_words' or not any(         # 'wind' begins 'window'
            x != y and y.startswith(x) for x in options for y in options)
        if 'copy' in task:
            words = re.findall('[A-Z][a-z]{2}' if task == 'toy_copy' else r'[a-z]+(?= )',
                               a.prompt.rpartition('\n')[2])
            assert words[words.index(words[-1]) + 1] == right.strip()
            continue
        given, name = statements(a.prompt)
        moves.append([*given].index(name) - [*given.values()].index(right.strip()))
        for _ in range(depth):
            name = given[name]
        assert name not in options and given[name] == right.strip()
    # each level is matched anew, so that no place tells the value
    assert 'copy' in task or depth == 0 or len({*moves}) > 3


def test_few_shot_has_one_stream_for_ever():
    "A seed is an example on every platform, and values are 1 to 25."
    e = few_shot('toy_assign', 1, shots=1, depth=1)[0]
    assert e == Example('e5v7f1i3wiofyvpe?w3h7g2b5j4whqbsjmg?m', ['4', '5', '2', '7'], 2)
    many = few_shot('assign_math', 60, shots=0, depth=1)
    assert {int(option) for e in many for option in e.options} == {*range(1, 26)}
    assert few_shot('assign_math', 60, shots=0, depth=1, seed=8)[0] != many[0]


toy = runpy.run_path(str(ROOT / 'data/toy/prepare.py'), run_name='toy')
sys.modules['toy'] = SimpleNamespace(**toy)         # where another process looks its functions up


def test_toy_is_what_it_was(monkeypatch):
    "Gold values: every number about the toy is of these documents. Later ones have own seeds."
    digest = lambda made: hashlib.sha256(made.tobytes()).hexdigest()[:16]
    assert digest(toy['documents']('val', 300, 3, set())) == 'cba4b5b13947b3a1'
    monkeypatch.setitem(toy['documents'].__globals__, 'FIRST', 30)
    monkeypatch.setitem(toy['documents'].__globals__, 'PIECE', 20)
    assert digest(toy['documents']('train', 75, 5, set())) == 'd15063cef85fd48c'


def test_toy_splits_share_nothing(tmp_path, monkeypatch, capsys):
    library = [bytes([97 + i]) * 9000 for i in range(20)]
    monkeypatch.setitem(toy['main'].__globals__, 'library', lambda: iter(library))
    toy['main'](['--documents=800', f'--out={tmp_path}'])
    assert capsys.readouterr().out.count('the library has no more') == 1
    documents, texts, shares, size = [], [], [], toy['SIZE']
    for split, n in (('train', 800), ('val', 4000)):
        shard = shard_of(Loader(tmp_path, 1, 256, split).datasets[0])
        documents.append({tuple(row) for row in shard['.bin'][:n * size].reshape(-1, size)})
        texts.append(shard['.bin'][n * size:])
        shares.append(len(texts[-1]) / len(shard['.bin']))
        assert shard['.mask'][n * size:].all()
    assert documents[0].isdisjoint(documents[1]) and {*texts[0]} & {*texts[1]} == {256}
    assert shares[0] == pytest.approx(0.1, abs=0.01) and shares[1] < 0.1    # all of little text
    assert {*shard['.marks'][4000 * size:]} == {129}        # of it every byte is an answer
    before = contents(tmp_path)
    with pytest.raises(SystemExit, match='another dataset'):
        toy['main'](['--documents=800', '--aliases=0-1', f'--out={tmp_path}'])
    assert contents(tmp_path) == before


text_script = runpy.run_path(str(ROOT / 'data/text/prepare.py'))


def shards_of(folder, split):
    "The tokens of each shard."
    [dataset] = Loader(folder, 1, 8, split).datasets
    return [shard_of(dataset, s)['.bin'] for s in range(len(dataset.about['shards']))]


def documents_of(folder, split):
    "The texts of a dataset of bytes."
    stream = np.concatenate(shards_of(folder, split))
    return [bytes(document[1:].astype('uint8')).decode()
            for document in np.split(stream, np.flatnonzero(stream == 256))[1:]]


def contents(out):
    """What the JSON files say and name. Other shards may be there: of parts that were begun at once
    with the last one that was needed."""
    read = {}
    for about in [*out.rglob('train.json'), *out.rglob('val.json')]:
        read[str(about.relative_to(out))] = about.read_bytes()
        for shard in json.loads(about.read_text()).get('shards', ()):
            for ending in shard['sha256']:
                path = (about.parent / shard['file']).with_suffix(ending)
                read[str(path.relative_to(out))] = path.read_bytes()
    return read


def validates(text, every):
    "Is this document the one of so many that is for validation, so that its copies are, too?"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')
    return number % every == 0


def put(folder, files):
    "Files of a text or of rows."
    for name, what in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(what, str):
            path.write_text(what)
        elif path.suffix == '.jsonl':
            path.write_text('\n'.join(json.dumps(dict(text=text)) for text in what))
        else:
            pytest.importorskip('datasets').Dataset.from_dict(dict(text=what)).to_parquet(path)
    return str(folder)


@pytest.fixture
def threads(monkeypatch):
    "Instead of processes, which are begun in seconds."
    monkeypatch.setattr(tokens_file, 'ProcessPoolExecutor', lambda n, *_: ThreadPoolExecutor(n))


ROWS = [f'row {i} of mine' for i in range(4000)]
PARAGRAPHS = [f'{i:03} ' + 'word ' * 179 + '\n\n' for i in range(90)]       # 901 letters, and 2
NOTE = 'one file\n\n' * 999
FOLDERS = dict(         # {name: (files, their documents in order, does one validate)}
    cut=({'notes.txt': '\ufeff' + ''.join(PARAGRAPHS)[:-2]},        # as Notepad begins a file
         [''.join(PARAGRAPHS[i:i + 3]) for i in range(0, 90, 3)], lambda i, text: i % 10 == 0),
    many=({'rows.jsonl': ROWS[:1000]}, ROWS[:1000], lambda i, text: i % 100 == 0),
    by_endings=({'.git/a.py': 'no', '__pycache__/b.pyc': 'no', 'e.png': 'no', 'NOTE': 'no',
                 'f.json': '{}', 'deep/a.txt': NOTE, 'deep/b1.jsonl': ['like a pattern', '', None],
                 'deep/b[1].jsonl': ROWS[:9], 'deep/c.parquet': ROWS[9:30], 'd.py': 'of code'},
                ['of code', NOTE, 'like a pattern', *ROWS[:30]], lambda i, text: i % 10 == 0),
    parts=({f'{i} [a].jsonl': ROWS[i::9] for i in range(9)},
           [row for i in range(9) for row in ROWS[i::9]], lambda i, text: validates(text, 200)))


@pytest.mark.parametrize('name', FOLDERS)
def test_text_is_read_back_and_a_command_goes_on(name, tmp_path, monkeypatch, threads, capsys):
    """Each document is in one split. Small files are together, as long as they are small: each part
    is a shard, whole or not at all."""
    monkeypatch.setattr(tokens_file, 'PART', 32_000)
    (files, documents, is_val), out = FOLDERS[name], tmp_path / 'out'
    command = [put(tmp_path / 'mine', files), f'--out={out}', '--workers=3']
    text_script['main'](command)
    for split in ('train', 'val'):
        assert documents_of(out, split) == [text for i, text in enumerate(documents)
                                            if is_val(i, text) == (split == 'val')]
    left_out = 2 * (name == 'by_endings')
    assert f'or by a reasoning model): {left_out}' in capsys.readouterr().out
    loader, shards = Loader(out, 1, 8), shards_of(out, 'train')
    assert loader.kinds == ['text'] and len(shards) == (5 if name == 'parts' else 1)
    ends = np.cumsum([(len(tokens) - 1) // 8 for tokens in shards])     # windows are in one shard
    firsts = [loader.datasets[0].window(i)[0][:8].tolist() for i in (0, *ends[:-1])]
    assert firsts == [list(tokens[:8]) for tokens in shards]
    whole, first = contents(out), out / 'train_00000.bin'
    before = first.stat().st_mtime_ns
    (out / 'train.json').unlink()                       # by a kill
    (out / 'part_00003.json').unlink(missing_ok=True)
    text_script['main'](command)
    assert contents(out) == whole and first.stat().st_mtime_ns == before
    put(tmp_path / 'mine', {'z.jsonl': ['another']})
    for more in ([], ['--column=others']):
        with pytest.raises(Refused, match='was begun with other files or settings'):
            text_script['main']([*command, *more])


def test_text_of_so_many_tokens(tmp_path, monkeypatch):
    "To the end of a document; what validates counts, too."
    assert [*map(number, ('7', '20k', '0.5M', '2B'))] == [7, 20_000, 500_000, 2 * 10**9]
    monkeypatch.setattr(tokens_file, 'PART', 32_000)
    out = tmp_path / 'out'
    text_script['main']([put(tmp_path / 'cut', FOLDERS['cut'][0]), f'--out={out}', '--tokens=20K'])
    size = sum(len(tokens) for split in ('train', 'val') for tokens in shards_of(out, split))
    assert 20_000 <= size < 22_800
    put(tmp_path / 'parts', FOLDERS['parts'][0])
    put(tmp_path / 'few', {'a.md': 'x'})
    (tmp_path / 'rows.jsonl').write_text(json.dumps(dict(messages=[dict(role='user')])))
    for name, more, message in (('few', '--workers=1', 'at least one document is needed'),
                                ('parts', '--tokens=10K', '--tokens is for one large file'),
                                ('few', '--chat', '--chat is for rows'),
                                ('rows.jsonl', '--column=messages', 'not hold text, but .*--chat'),
                                ('rows.jsonl', '--column=text', "no column 'text', but messages")):
        with pytest.raises(Refused, match=message):
            text_script['main']([str(tmp_path / name), more, f'--out={tmp_path / name}-{more}'])
        assert not (tmp_path / f'{name}-{more}').exists()


def test_after_a_refused_conversion_the_corrected_command_works(tmp_path):
    "Nothing is left of it. A folder that holds somebody's file keeps that."
    rows = [dict(content=f'document {i}') for i in range(30)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    command = [str(tmp_path / 'rows.jsonl'), f'--out={tmp_path / "out"}', '--workers=1']
    with pytest.raises(Refused, match="no column 'text', but content"):
        text_script['main'](command)
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'out').mkdir()          # as a kill leaves it: a plan, a hidden file, half a part
    for name in ('plan.json', '.train_00000.bin.7.unfinished', 'train_00000.bin'):
        (tmp_path / 'out' / name).write_text('{}')
    os.utime(tmp_path / 'out/.train_00000.bin.7.unfinished', (0, 0))
    text_script['main']([*command, '--column=content'])
    assert {path.name for path in (tmp_path / 'out').iterdir()} >= {'train.json', 'val.json'}
    assert not [*(tmp_path / 'out').glob('.*')]
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other/thesis.txt').write_text('mine')
    with pytest.raises(Refused, match='holds something else'):
        text_script['main']([command[0], f'--out={tmp_path / "other"}', '--column=content'])
    assert [path.name for path in (tmp_path / 'other').iterdir()] == ['thesis.txt']


WORKERS = """
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from nanodepth.text.tokens import end_with_parent
if __name__ == '__main__':
    pool = ProcessPoolExecutor(1, get_context('spawn'), end_with_parent)
    pool.submit(print, 'begun', flush=True)
    pool.submit(time.sleep, 3600).result()
"""


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    "Their output has its end only when they have ended, too."
    (tmp_path / 'pool.py').write_text(WORKERS)
    process = subprocess.Popen([sys.executable, str(tmp_path / 'pool.py')], stdout=subprocess.PIPE,
                               text=True, env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert process.stdout.readline() == 'begun\n'
    process.kill()
    assert process.communicate(timeout=60)[0] == ''


@pytest.mark.parametrize('read, row, text', [
    ('chat', dict(text='user: What is 2 + 2?\nassistant: 4, as the user knows.'),
     'What is 2 + 2?\n4, as the user knows.'),
    ('chat', dict(text='<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nThat.<|im_end|>'),
     'What?That.'),
    ('chat', dict(text='assistant: <think>well</think> 4'), None),
    ('chat', dict(text=[dict(role='user', content='What is 2 + 2?'), dict(content=None),
                        dict(role='assistant', content='4.')]), 'What is 2 + 2?\n4.'),
    ('chat', dict(text=[dict(role='assistant', content='<think>well</think> 4')]), None),
    ('chat', dict(text='assistant: 4', generator='DeepSeek-R1'), None),
    ('archived', dict(text='here', blob_id='a'), 'here'),
    ('archived', dict(text=None, blob_id='b'), 'fetched'),
    ('archived', dict(blob_id='c'), None)])
def test_text_of_a_row(read, row, text, monkeypatch):
    "Without role tags and what reasoning models wrote; of Python-Edu by its number, if it is kept."
    monkeypatch.setattr(pytest.importorskip('urllib3'), 'request', lambda method, url, **how: (
        SimpleNamespace(status=200 if url[-1] == 'b' else 404, data=gzip.compress(b'fetched'))))
    assert tokens_file.READ[read](row, 'text') == text


ODD = ['', None, '<|endoftext|> is text', 'ä東🙂\u200d\x00\ufeff e\u0301 \U000e0041', '\u2028\t']


def numbers_of(file):
    "A source's file: texts of numbers, and some odd ones."
    draw = random.Random(file)
    texts = [' '.join(str(draw.randrange(10**draw.randrange(1, 7)))
                      for _ in range(draw.randrange(5, 120))) for _ in range(250)]
    return draw.sample(texts + ODD, len(texts + ODD))


def prepare(folder, out, *more):
    "data/smollm/prepare.py."
    sources = runpy.run_path(str(ROOT / 'data/smollm/prepare.py'))['SMOLLM']
    tokens_file.prepare({'smollm': sources}, [
        f'--source={folder}', '--tokenizer=bytes', f'--out={out}', '--val_every=50', '--workers=1',
        *more])


def prepare_until_killed(*args):
    "It is killed where the second source's first part is hashed: the first source is whole."
    def hash_or_kill(path, hash_of=tokens_file.hash_of):
        if path.parent.name == 'cosmopedia':
            os.kill(os.getpid(), signal.SIGKILL)
        return hash_of(path)
    tokens_file.hash_of = hash_or_kill
    prepare(*args)


def test_mixture_by_slow_form(tmp_path, threads, capsys):
    """After a kill, and of more tokens: whole files of each source, as few as its share takes, in
    an order that is drawn from their names for ever."""
    shares = dict(fineweb_edu=0.70, cosmopedia=0.15, python_edu=0.09, open_web_math=0.06)
    names = [f'{name}/{i}.{"jsonl" if i % 2 else "parquet"}' for name in shares for i in range(5)]
    files, out = {name: numbers_of(name) for name in names}, tmp_path / 'out'
    folder = put(tmp_path / 'source', files)
    killed = BEGUN.Process(target=prepare_until_killed, args=(folder, out, '--tokens=100K'))
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert (out / 'fineweb_edu/train.json').exists()
    assert not (out / 'cosmopedia/train.json').exists()
    for tokens in (100_000, 300_000):
        prepare(folder, out, f'--tokens={tokens // 1000}K', '--workers=2')
        for name, share in shares.items():
            sizes = [*map(len, shards_of(out / name, 'train'))]
            assert sum(sizes[:-1]) < round(tokens * share) <= sum(sizes)
            # validation is one shard, so that windows of any length fit
            assert len(shards_of(out / name, 'val')) == 1
            drawn = sorted((file for file in files if file.startswith(name)),
                           key=lambda file: hashlib.blake2b(file.encode()).hexdigest())
            texts = [text for file in drawn[:len(sizes)] for text in files[file] if text]
            for split in ('train', 'val'):
                assert documents_of(out / name, split) == [
                    text for text in texts if validates(text, 50) == (split == 'val')]
    typed = capsys.readouterr().out.split('--data=')[-1].strip()       # what is printed
    loader, before = Loader(typed, 4, 64), contents(out)
    assert loader.quota == [700, 150, 90, 60]
    assert loader.passes(100) == pytest.approx(max(
        0.4 * quota / dataset.n_windows for quota, dataset in zip(loader.quota, loader.datasets)))
    with pytest.raises(Refused, match='other files or settings'):
        prepare(folder, out, '--tokens=300K', '--val_every=7')
    assert contents(out) == before


def test_mixture_from_the_hub_is_of_one_commit(tmp_path, monkeypatch):
    "That of the parts that are there, though the dataset has another one by now."
    hub = pytest.importorskip('huggingface_hub').HfApi
    monkeypatch.setattr(hub, 'list_repo_files', lambda self, repo, repo_type, revision: [
        f'train-{revision[0]}.parquet', 'notes.md'])
    source, wanted = tokens_file.Source('some', 1.0, 'x/y', '*.parquet'), 'a' * 40
    for newest in (wanted, 'b' * 40):
        monkeypatch.setattr(hub, 'dataset_info', lambda self, repo: SimpleNamespace(sha=newest))
        files = tokens_file.files_of(source, None, tmp_path)
        assert files == {'train-a.parquet': f'hf://datasets/x/y@{wanted}/train-a.parquet'}
        (tmp_path / 'plan.json').write_text(json.dumps(dict(parts=[[*files.values()]])))


def test_tokenizers_of_one_name_are_told_apart(config, tmp_path):
    for folder, swapped in (('two', 'abcd'), ('one', '')):      # two in the same place, one by one
        name = bpe(tmp_path / 'tok', swapped)
        for split in ('train', 'val'):
            write_dataset(tmp_path / folder, split, name, np.arange(3000) % 250)
    train(config(data=str(tmp_path / 'one')))
    run = str(tmp_path / 'run')
    with pytest.raises(Refused, match='two was made with another tokenizer .* than'):
        open_data(run, state_of(run), load_model(run), [f'{tmp_path}/one', f'{tmp_path}/two'])
    nanodepth('cut', [run, '1-1-0', f'--out={tmp_path / "cut"}'])
    save_hf(load_model(run), tmp_path / 'hf', tokenizer=run)
    for parent in (run, tmp_path / 'cut', tmp_path / 'hf'):
        with pytest.raises(Refused, match='a model has one tokenizer'):
            train(config('next', init_from=str(parent), data=str(tmp_path / 'two')), open_parent)


def test_starts_are_those_a_checkpoint_was_trained_with(gemma, tiny, tmp_path):
    """The tokens that begin a text count in no loss. The end of the text before, with which our own
    exports begin a text, is no such token: our rows are windows."""
    write_noise(tmp_path / 'noise', [])
    theirs = tmp_path / 'theirs'
    shutil.copytree(gemma[0], theirs)
    for path in theirs.glob('*token*.json'):
        path.write_text(path.read_text().replace('<|endoftext|>', '<bos>'))
    asked = ScoreOptions(data=str(tmp_path / 'noise'), batches=2, device='cpu')
    subject, losses = Subject(theirs, asked), []
    plain = Loader(tmp_path / 'noise', 4, 511, 'val')
    for tokens, targets, _ in map(plain.batch, range(2)):
        logits = logits_of(gemma[1], F.pad(tokens, (1, 0), value=256))[:, 1:]
        losses.append(F.cross_entropy(logits.transpose(1, 2), targets))
    assert asked_of(subject)['loss'].mean == pytest.approx(np.mean(losses), rel=1e-5)
    ours = save_run(tmp_path / 'ours', tiny(n_layer=2, vocab_size=257, context=512),
                    data=tmp_path / 'noise')
    assert Subject(ours, asked, like=subject).val.starts == [256]       # as the first one's rows
    save_hf(tiny(n_layer=2), tmp_path / 'llama', tokenizer=theirs)
    nanodepth('cut', [str(tmp_path / 'llama'), '1-1-0', f'--out={tmp_path / "cut"}'])
    state = state_of(tmp_path / 'cut')
    for path, its_state, starts in (
            (gemma[0], {}, []), (ours, state_of(ours), []), (tmp_path / 'cut', state, [256]),
            (tmp_path / 'cut', state | dict(flops=1), []),
            (tmp_path / 'cut', state | dict(inherited_flops=1), [])):
        assert starts_of(path, its_state) == starts
