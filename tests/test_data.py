"""Data: from text to tokens to batches, and questions whose answers can be worked out.

Promised: tokenizers encode as their reference does; an epoch is a permutation, ranks share out the
batch of one, a mixture is exact in every period; a mask and the kinds of answers by a slow form;
damaged data is named. Every question of depth d takes d + 1 looks and no fewer; the toy data are
what they were, and no split shares a document. A dataset is the same bytes whatever the
number of processes, and after a kill.
"""
import hashlib
import gzip
import json
import os
import random
import re
import shutil
import runpy
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import BEGUN, asked_of, bpe, refused, ROOT, save_run, write_noise

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands.train import open_parent
from nanodepth.common.errors import Refused
from nanodepth.models.checkpoint import load_model, state_of
from nanodepth.models.hf import save_hf
from nanodepth.scoring import data as scoring
from nanodepth.scoring.data import Beginning, how_to_prepare, open_data
from nanodepth.scoring.rows import Asked, Subject, data_scores
from nanodepth.text import primitives, tokenizer as tokenizer_file, tokens as tokens_file
from nanodepth.text.primitives import Example, few_shot, TASKS, TOY_TASKS
from nanodepth.text.tokenizer import copy_tokenizer, get_tokenizer
from nanodepth.text.tokens import number, write_dataset
from nanodepth.train import train
from nanodepth.training import loader as loader_file
from nanodepth.training.loader import Loader
from nanodepth.training.measure import answers, validate
from nanodepth.training.plan import seed_for

TEXTS = ['', ' ', 'a', 'Hello, world! It\'s what they\'ve said; I\'ll go, you\'re 12th.',
         'def f(x):\n    return x**2  # 100%\n\n\n',
         'a   1 b  22\t333 \n 4', '   9', '12345678901234567890',
         'ten 10  20   30\n40\r\n  50\u00a060 \u2003 70',
          'naïve café Ωμέγα 東京 2024年 🙂🙃 ½ ² Ⅷ ٣٤',
         'tabs\t\tand  trailing   ', '\n\n  \n', 'x=1;y =2 ; z= 3', "don't can't '5 's 1's",
         '\x00\x01\xff']


def test_bytes():
    enc = get_tokenizer('bytes')
    assert enc.n_vocab == 257 and enc.eot_token == 256
    for text in TEXTS:
        assert enc.encode(text) == [*text.encode()]
        assert enc.decode(enc.encode(text)) == text
    for text in ('', 'aä東🙂\r\n', 'a<|endoftext|>b<|endoftext|>'):
        array = tokenizer_file.encode_as_array(enc, text, special=True)
        assert array.dtype == 'uint16'
        assert array.tolist() == enc.encode(text, allowed_special='all')
        plain = tokenizer_file.encode_as_array(enc, text, special=False)
        assert plain.tolist() == [*text.encode()]
    assert enc.encode('a<|endoftext|>', allowed_special='all') == [97, 256]


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


def row_by_row(loader, step, rank, size, starts=(), last=None):
    "A batch in the slow form: each row's dataset, epoch and window by counting, and its bytes."
    rows, T, quota, n = [], loader.context, loader.quota.tolist(), len(starts)
    share = loader.batch_size // size
    first = step * loader.batch_size + rank * share
    turns = shuffled(seed_for(loader.seed, 'mixture'), np.repeat([*range(len(quota))], quota))
    for row in range(first, first + share)[:None if last is None else max(0, last - first)]:
        *before, d = (turns * (1 + row // 1000))[:row + 1]
        shard, names = shard_of(loader.datasets[d]), loader.datasets[d].about['kinds']
        windows = (len(shard['.bin']) - 1) // T
        epoch, i = divmod(before.count(d), windows)
        i = shuffled(seed_for(loader.seed, f'epoch of dataset {d}', epoch), range(windows))[i]
        tokens, targets, marks = [], [], []
        for place in range(i * T, i * T + T):
            tokens.append(int(shard['.bin'][place]))
            counts = '.mask' not in shard or shard['.mask'][place + 1]
            targets.append(int(shard['.bin'][place + 1]) if counts else -1)
            begins, kind = divmod(int(shard['.marks'][place + 1]), 128) if names else (0, 0)
            marks.append(counts and kind and 128 * begins + 1 + loader.kinds.index(names[kind - 1]))
        if tokens[:n] == list(starts):
            rows.append((tokens + [0] * n, targets + [-1] * n, marks + [0] * n))
        else:
            rows.append(([*starts, *tokens], [-1] * n + targets, [0] * n + marks))
    return [torch.tensor(part) for part in zip(*rows)]


@pytest.fixture
def three_kinds(tmp_path):
    rng = np.random.default_rng(0)
    for name, n, kinds in (('a', 5000, ['x', 'y']), ('b', 300, ['y', 'z']), ('c', 9000, None)):
        write_dataset(tmp_path / name, 'train', 'bytes', rng.integers(3, 9, n), kinds=kinds,
                      mask=None if name == 'c' else rng.integers(0, 2, n),
                      marks=rng.choice([0, 1, 129, 2, 130], n) if kinds else None)
        for path in (tmp_path / name).iterdir():        # the same rows to validate
            shutil.copy(path, path.with_name(path.name.replace('train', 'val')))
        text = (tmp_path / name / 'val.json').read_text()
        (tmp_path / name / 'val.json').write_text(text.replace('train_', 'val_'))
    return tmp_path


@pytest.mark.parametrize('starts', [(), (7,), (3, 4)])
@pytest.mark.parametrize('folders', ['a', 'abc', 'cba'])
def test_a_batch_at_once_is_the_batch_row_by_row(three_kinds, monkeypatch, folders, starts):
    "Kinds of answers go by name where datasets number them otherwise."
    for rank, size in ((0, 1), (1, 3)):
        monkeypatch.setattr(loader_file, 'RANK', rank)
        monkeypatch.setattr(loader_file, 'SIZE', size)
        paths = [three_kinds / name for name in folders]
        train, val = (Beginning(paths, 12, 7, split, 5) for split in ('train', 'val'))
        train.starts = val.starts = starts
        # 83: in two periods; 10: where the second epoch of b begins
        for loader, step, last in ((train, 0, None), (train, 83, None), (train, 10, None),
                                   (val, val.n_batches - 1, val.n_rows)):
            batch = loader.batch(step)
            slow = row_by_row(loader, step, rank, size, starts, last)
            assert len(batch[0]) == (len(slow[0]) if slow else 0)
            assert not slow or all(torch.equal(*pair) for pair in zip(batch, slow, strict=True))


@pytest.mark.parametrize('folders', ['b', 'ab'])
def test_validation_has_each_row_once_and_an_epoch_each_window(three_kinds, monkeypatch, folders):
    "Whatever the batch and the number of processes. Of a mixture until one dataset ends."
    paths = [three_kinds / name for name in folders]
    seen = []
    for batch_size, size in ((1, 1), (12, 1), (12, 3), (999, 3)):
        monkeypatch.setattr(loader_file, 'SIZE', size)
        rows = []
        for rank in range(size):
            monkeypatch.setattr(loader_file, 'RANK', rank)
            val = Loader(paths, batch_size, 7, 'val')
            rows += [row for step in range(val.n_batches) for row in val.batch(step)[0].tolist()]
        assert len(rows) == val.n_rows
        seen.append(sorted(rows))
    turns = shuffled(seed_for(0, 'mixture'), [0] * 500 + [1] * 500)
    of_b = [row for row, d in enumerate(turns) if d == 1]
    assert seen == seen[:1] * 4 and val.n_rows == (42 if folders == 'b' else of_b[42])
    windows = [*range(42)]
    monkeypatch.setattr(loader_file, 'RANK', 0)
    monkeypatch.setattr(loader_file, 'SIZE', 1)
    train = Loader(three_kinds / 'b', 42, 7)
    epochs = [train.datasets[0].order(seed_for(0, 'epoch of dataset 0', e)).tolist()
              for e in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [windows] * 2 and epochs[0] != epochs[1]


def test_the_order_of_rows_is_for_ever(tmp_path):
    "Gold values: another platform or version must see the same data in the same order."
    assert seed_for(0, 'epoch of dataset 0', 3) == 8554754645012042060
    write_dataset(tmp_path, 'train', 'bytes', np.arange(81) % 256)
    row = Loader([tmp_path] * 2, 4, 8, seed=1).batch(3)[0][:, 0]
    assert (row // 8).tolist() == [9, 1, 2, 4]


def test_data_that_are_made_anew_are_read_anew(tmp_path):
    for token in (5, 7):
        write_dataset(tmp_path, 'train', 'bytes', np.full(99, token))
        assert {*Loader(tmp_path, 1, 8).batch(0)[0].flatten().tolist()} == {token}


def windows(loader, numbers, d=0):
    "(tokens, targets, kinds) of these windows of one of its datasets."
    return loader.datasets[d].read(np.array(numbers), loader.kinds)


def test_where_a_dataset_is_made(tmp_path):
    assert 'data/smollm/prepare.py (' in how_to_prepare(ROOT / 'data/smollm/nowhere')
    assert 'data/text/prepare.py FILES' in how_to_prepare(tmp_path / 'nowhere')


def test_measure_by_hand(tmp_path, tiny):
    "Two kinds; an answer is a run of tokens that begins at +128, and all of it must be right."
    model = tiny(vocab_size=257)
    tokens = np.random.default_rng(0).integers(0, 256, 8 * 6 + 1)
    marks = np.zeros(len(tokens), int)
    spans = [(kind, 2 + 4 * i, 2 + 4 * i + length) for i, (kind, length) in enumerate(
        [(1, 1), (2, 2), (1, 1), (2, 3), (1, 2), (2, 1)] * 2)]
    for i, (kind, start, end) in enumerate(spans):
        marks[start:end] = kind
        marks[start] += 128
        # the model's own choices are right: in some answers from the first, in one from the second
        for t in range(start + {0: 0, 1: 0, 3: 1, 4: 0, 7: 0, 9: 0}.get(i, 3), start + 3):
            row = torch.tensor(tokens[None, (t - 1) // 8 * 8:t])
            tokens[t] = model(row)[0, -1].argmax()
    write_dataset(tmp_path, 'val', 'bytes', tokens, marks=marks, kinds=['one', 'two'])
    loader = Loader(tmp_path, 2, 8, 'val')
    scores = data_scores(model, loader)
    sums = sum(of_batch for of_batch, *_ in validate(model, loader))
    x, y, m = (torch.tensor(a) for a in (tokens[:-1].reshape(6, 8), tokens[1:].reshape(6, 8),
                                         marks[1:].reshape(6, 8)))
    logits = model(x).detach()
    losses = F.cross_entropy(logits.transpose(1, 2), y, reduction='none')
    assert scores['loss'].mean == pytest.approx(losses.mean().item(), rel=1e-5)
    assert sums[0, :2].tolist() == pytest.approx([losses.sum().item(), losses.numel()], rel=1e-5)
    right = (logits.argmax(-1) == y).flatten().tolist()
    for k, kind in ((1, 'one'), (2, 'two')):
        results = [all(right[start - 1:end - 1]) for its, start, end in spans if its == k]
        assert sums[k, 2:].tolist() == [sum(results), len(results)]
        assert scores[kind].mean == sum(results) / len(results) not in (0, 1)
        of_kind = losses[m % 128 == k]
        assert sums[k, :2].tolist() == pytest.approx([of_kind.sum().item(), len(of_kind)], rel=1e-5)


def test_an_answer_that_a_row_cuts_off_is_nobodys():
    marks = torch.tensor([[0, 129, 1, 1], [1, 0, 130, 2], [2, 2, 129, 129]])
    wrong = torch.zeros(3, 4, dtype=torch.bool)
    wrong[1, 0] = wrong[2, 0] = wrong[2, 3] = True          # two tails, and one whole answer
    assert list(answers(marks, wrong)) == [(1, True), (2, True), (1, True), (1, False)]


BYTES = get_tokenizer('bytes')
EVERY = [*TASKS, *TOY_TASKS]
ASSIGN = [task for task in EVERY if 'copy' not in task]


def statements(task, prompt):
    "Its statements as a dict, and the name asked for: read off the prompt, not off the generator."
    if task in TOY_TASKS:
        return dict(re.findall(r'(\w)=?(\w)', prompt.split('?')[0])), prompt[-1]
    asked = r'(\w+)=____' if task == 'assign_basic' else r'value of (\w+)\?'
    return dict(re.findall(r'^(\w+) ?= ?(\w+)$', prompt, flags=re.M)), re.findall(asked, prompt)[-1]


def look_up(given, name, looks):
    "Look the name up, and what that gives again, `looks` times in all."
    for _ in range(looks):
        name = given.get(name, name)
    return name


@pytest.mark.parametrize('task, depth, form', [
    ('copy_random', 0, r'Fill in the blank:\n\n([a-z]{3} ){15}____ \. ->'),
    ('assign_basic', 1,
     r'Fill in blank:\n\n([a-z]=\d+\n){5}([a-z]=[a-z]\n){5}[a-z]=____ \. ->'),
    ('assign_math', 1, 'The following is a set of simple mathematical equations.\n\n'
     r'([a-z]=\d+\n){5}([a-z]=[a-z]\n){5}What is the numerical value of [a-z]\?\nAnswer:'),
    ('assign_code', 0, 'The following is a very short Python program. Use the program to resolve '
     'the value of the variable in the question.\n\nProgram:\n'
     r'([a-z] = \d+\n){5}\nQuestion:\nWhat is the value of [a-z]\?\nAnswer:')])
def test_the_papers_form_by_hand(task, depth, form):
    for shots in (0, 5):
        [example] = few_shot(task, 1, shots=shots, depth=depth)
        assert re.fullmatch(rf'({form} \w+\n\n){{{shots}}}{form}', example.prompt)


@pytest.mark.parametrize('task, depth', [(task, depth) for task in ASSIGN for depth in range(7)
                                         if (task, depth) != ('toy_assign', 6)])
def test_depth_d_takes_d_plus_1_looks_and_no_fewer(task, depth):
    for e in few_shot(task, 40, shots=0, depth=depth):
        given, name = statements(task, e.prompt)
        assert look_up(given, name, depth + 1) == e.options[e.answer].strip()
        # a name: only a guess is left
        assert look_up(given, name, depth) not in [o.strip() for o in e.options]


def test_shots_are_fresh_and_the_question_stays():
    "And what is copied is what came next."
    sizes = dict(toy_copy=8, toy_assign=4, copy_random=10, copy_words=10)
    for task in EVERY:
        none, one, two = (few_shot(task, 50, shots=k, seed=3) for k in (0, 1, 2))
        for a, b, c in zip(none, one, two):
            assert b.prompt.endswith(a.prompt) and c.prompt.endswith(b.prompt)
            first, second = c.prompt[:-len(b.prompt)], b.prompt[:-len(a.prompt)]
            assert first and second and first != second and a.prompt not in (first, second)
            assert len({*a.options}) == len(a.options) == sizes.get(task, 5)
            assert task == 'copy_words' or not any(         # 'wind' begins 'window'
                x != y and y.startswith(x) for x in a.options for y in a.options)
            assert sorted(a.options) == sorted(c.options)
            assert a.options[a.answer] == c.options[c.answer]
            if 'copy' in task:
                words = (re.findall('[A-Z][a-z]{2}', a.prompt) if task == 'toy_copy'
                         else a.prompt.split('\n\n')[1].split(' ____')[0].split())
                assert words[words.index(words[-1]) + 1] == a.options[a.answer].strip()
        assert len({e.prompt for e in one}) == 50


def test_a_seed_is_an_example_on_every_platform():
    e = few_shot('assign_math', 1, shots=0, depth=1, seed=7)[0]
    many = few_shot('assign_math', 60, shots=0, depth=1)
    assert {int(option) for each in many for option in each.options} == {*range(1, 26)}
    assert few_shot('assign_math', 3, shots=0, depth=1, seed=7)[0] == e
    assert few_shot('assign_math', 1, shots=0, depth=1, seed=8)[0] != e
    assert few_shot('toy_assign', 1, shots=1, depth=1)[0] == Example(
        'e5v7f1i3wiofyvpe?w3h7g2b5j4whqbsjmg?m', ['4', '5', '2', '7'], 2)


toy = runpy.run_path(str(ROOT / 'data/toy/prepare.py'), run_name='toy')
sys.modules['toy'] = SimpleNamespace(**toy)         # where another process looks its functions up
SIZE, BEGINS = toy['SIZE'], toy['BEGINS']


def test_the_toy_is_what_it_was(monkeypatch):
    "Gold values: every number about the toy is of these documents. Later ones have own seeds."
    digest = lambda made: hashlib.sha256(made.tobytes()).hexdigest()[:16]
    assert digest(toy['documents']('val', 300, 3, set())) == 'cba4b5b13947b3a1'
    monkeypatch.setitem(toy['documents'].__globals__, 'FIRST', 30)
    monkeypatch.setitem(toy['documents'].__globals__, 'PIECE', 20)
    assert digest(toy['documents']('train', 75, 5, set())) == 'd15063cef85fd48c'


def test_the_splits_share_nothing(tmp_path, monkeypatch, capsys):
    texts = [bytes([97 + i]) * 9000 for i in range(20)]
    monkeypatch.setitem(toy['main'].__globals__, 'library', lambda: iter(texts))
    toy['main'](['--documents=800', f'--out={tmp_path}'])
    assert capsys.readouterr().out.count('the library has no more') == 1
    sets = {}
    for split in ('train', 'val'):
        raw = np.fromfile(tmp_path / f'{split}_000.bin', 'uint16')
        n = SIZE * dict(train=800, val=4000)[split]
        sets[split] = {tuple(row) for row in raw[:n].reshape(-1, SIZE)}, {*raw[n:].tolist()} - {256}
        share = (len(raw) - n) / len(raw)       # little text: all of it
        assert share == pytest.approx(0.1, abs=0.01) or split == 'val' and share < 0.1
    assert not sets['train'][0] & sets['val'][0] and not sets['train'][1] & sets['val'][1]
    loader = Loader(tmp_path, 1, 256, 'val')
    (tokens, _), (targets, _), (marks, of_last) = windows(loader, [3, loader.n_windows[0] - 1])
    assert tokens[0] == 256 and tokens[64] == 256                 # whole documents
    at = int(np.argmax(marks >= BEGINS))
    assert marks[at] > BEGINS + 1 and chr(targets[at]).isalnum()
    assert of_last.tolist() == [BEGINS + 1] * 256               # of text every byte is an answer
    before = contents(tmp_path)
    for words, said in ((['--aliases=0-1'], 'another dataset'), (['--text=10'], 'a share below 1')):
        with pytest.raises(SystemExit, match=said):
            toy['main'](['--documents=800', *words, f'--out={tmp_path}'])
    assert contents(tmp_path) == before


text_script = runpy.run_path(str(ROOT / 'data/text/prepare.py'))


def text_of(folder, split):
    "What a dataset of bytes says."
    return BYTES.decode([token for tokens in shards_of(folder, split)
                         for token in tokens.tolist() if token < 256])


def shards_of(folder, split):
    "The tokens of each shard."
    [dataset] = Loader(folder, 1, 8, split).datasets
    return [shard_of(dataset, s)['.bin'] for s in range(len(dataset.about['shards']))]


def test_a_folder_of_documents_of_every_kind(tmp_path):
    datasets = pytest.importorskip('datasets')
    folder = tmp_path / 'texts/deep'
    folder.mkdir(parents=True)
    (folder / 'a.txt').write_text('one file, one document')
    (folder / 'b[1].jsonl').write_text('\n'.join(json.dumps(dict(text=f'row {i} ' * 9))
                                                for i in range(119)))
    (folder / 'b1.jsonl').write_text(json.dumps(dict(text='beside a name that is like a pattern')))
    rows = [dict(text=f'parquet {i} ' * 9) for i in range(30)]
    datasets.Dataset.from_list(rows).to_parquet(folder / 'c.parquet')
    text_script['main']([str(tmp_path / 'texts'), f'--out={tmp_path / "d"}'])
    train, val = text_of(tmp_path / 'd', 'train'), text_of(tmp_path / 'd', 'val')
    assert 'one file' in val and 'row 8 ' in val        # every tenth
    assert 'row 7 ' in train and 'parquet 3 ' in train
    assert (train + val).count('like a pattern') == 1 and (train + val).count('row 0 ') == 9
    assert Loader(tmp_path / 'd', 1, 8).kinds == ['text']


@pytest.mark.parametrize('row, found', [
    (dict(text='user: What is 2 + 2?\nassistant: 4, as the user knows.'),
     'What is 2 + 2?\n4, as the user knows.'),
    (dict(text='<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nThat.<|im_end|>'),
     'What?That.'),
    (dict(text='assistant: <think>well</think> 4'), None),
    (dict(text='assistant: 4', generator='DeepSeek-R1'), None)])
def test_role_tags_and_reasoning_traces(row, found):
    assert tokens_file.chat(row, 'text') == found


def test_a_folder_of_code_is_read_by_the_endings_that_say_text(tmp_path, capsys):
    for name in ('.git/a.py', '__pycache__/b.pyc', 'deep/c.py', 'd.md', 'e.png', 'f.json', 'NOTE'):
        path = tmp_path / 'code' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        is_text = path.suffix in ('.py', '.md')
        path.write_bytes(f'a text{name}'.encode() if is_text else b'\xff\x00')
    with pytest.raises(Refused, match='are too few'):
        text_script['main']([str(tmp_path / 'code/d.md'), f'--out={tmp_path / "few"}'])
    text_script['main']([str(tmp_path / 'code'), f'--out={tmp_path / "d"}'])
    assert [text_of(tmp_path / 'd', split) for split in ('val', 'train')] == [
        'a textd.md', 'a textdeep/c.py']


@pytest.fixture
def threads(monkeypatch):
    "Instead of processes, which are begun in seconds."
    monkeypatch.setattr(tokens_file, 'ProcessPoolExecutor', lambda n, *_: ThreadPoolExecutor(n))


def test_much_text_is_read_in_parts_and_goes_on(tmp_path, monkeypatch, threads):
    "Small files together, as long as they are small: each part is a shard, whole or not at all."
    monkeypatch.setattr(tokens_file, 'PART', 70_000)
    (tmp_path / 'mine').mkdir()
    rows = [f'row {i} of mine' for i in range(9000)]
    for part in range(9):
        (tmp_path / f'mine/{part} [a].jsonl').write_text('\n'.join(
            json.dumps(dict(text=row)) for row in rows[part::9]))
    command = [str(tmp_path / 'mine'), f'--out={tmp_path / "d"}', '--workers=3']
    text_script['main'](command)
    shards = [shards_of(tmp_path / 'd', split) for split in ('train', 'val')]
    assert [*map(len, shards)] == [5, 1]
    loader, firsts = Loader(tmp_path / 'd', 1, 8), shards[0]
    ends = np.cumsum([(len(tokens) - 1) // 8 for tokens in firsts])     # windows are in one shard
    assert windows(loader, ends[:-1])[0].tolist() == [list(tokens[:8]) for tokens in firsts[1:]]
    both = [text_of(tmp_path / 'd', name).split('row ')[1:] for name in ('train', 'val')]
    assert sorted(sum(both, [])) == sorted(row[4:] for row in rows) and len(both[1]) < 90
    whole, first = contents(tmp_path / 'd'), tmp_path / 'd/train_00000.bin'
    before = first.stat().st_mtime_ns
    for name in ('train.json', 'part_00003.json'):      # by a kill
        (tmp_path / 'd' / name).unlink()
    text_script['main'](command)
    assert contents(tmp_path / 'd') == whole
    assert first.stat().st_mtime_ns == before
    (tmp_path / 'mine/9.jsonl').write_text('{"text": "another"}')
    for more in ([], ['--chat']):
        with pytest.raises(Refused, match='was begun with other files or settings'):
            text_script['main']([*command, *more])


def test_a_row_without_its_text_is_fetched_by_its_number_and_one_without_any_is_counted(
        tmp_path, monkeypatch, capsys):
    asked = []

    def request(_, url, **how):
        asked.append(url.rpartition('/')[2])
        return SimpleNamespace(status=404 if asked[-1] == 'gone' else 200,
                               data=gzip.compress(b'fetched'))
    urllib3 = pytest.importorskip('urllib3')
    monkeypatch.setattr(urllib3, 'request', request)
    rows = dict(text='here', blob_id='a'), dict(text=None, blob_id='b'), dict(blob_id='gone')
    assert [tokens_file.archived(row, 'text') for row in rows] == ['here', 'fetched', None]
    assert asked == ['b', 'gone']
    texts = [*map(str, range(50)), '', '']
    lines = '\n'.join(json.dumps(dict(text=text)) for text in texts)
    (tmp_path / 'rows.jsonl').write_text(lines)
    text_script['main']([str(tmp_path / 'rows.jsonl'), f'--out={tmp_path / "d"}'])
    assert 'left out, as empty or by a reasoning model: 2' in capsys.readouterr().out


def test_one_file_is_cut(tmp_path):
    text = '\n\n'.join(f'Paragraph {i}: ' + 'some words of it. ' * 20 for i in range(300))
    (tmp_path / 'notes.txt').write_text(f'\ufeff{text}')       # as Notepad begins a file
    sizes = []
    for more in ([], ['--tokens=20K']):
        out = tmp_path / f'notes{len(more)}'
        text_script['main']([str(tmp_path / 'notes.txt'), f'--out={out}', *more])
        sizes.append([sum(map(len, shards_of(out, split))) for split in ('train', 'val')])
    assert 20_000 <= sum(sizes[1]) < 23_000     # to the end of a document
    assert sizes[0][1] > 1000
    assert sum(sizes[0]) > len(text)            # each document has a beginning, too
    assert ''.join(tokens_file.cut(text)).strip() == text.strip()
    assert text_of(tmp_path / 'notes0', 'val').startswith(text[:9])


def test_so_many_tokens_are_those_of_all_parts_together(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_file, 'PART', 2 ** 16)
    for i in range(3):
        lines = [json.dumps(dict(text=f'text {i} {j} ' * 9)) for j in range(1200)]
        (tmp_path / f'{i}.jsonl').write_text('\n'.join(lines))
    text_script['main']([*map(str, tmp_path.glob('*.jsonl')), f'--out={tmp_path / "d"}',
                         '--tokens=90K'])
    sizes = [sum(map(len, shards_of(tmp_path / 'd', split))) for split in ('train', 'val')]
    assert 90_000 <= sum(sizes) < 91_000


ODD = ['', None, '<|endoftext|> is text here', 'ä東🙂\u200d\x00\ufeff e\u0301 \U000e0041',
       ' ' * 110_000, '\u2028\r\n\t', 'a' * 110_000]
SOURCES = dict(fineweb_edu=5, cosmopedia=2, python_edu=2, open_web_math=2)


def texts_of(name, i):
    "Of a source's file: numbers, and in its first one some odd texts among them."
    draw = random.Random(f'{name} {i}')
    texts = [' '.join(str(draw.randrange(10**draw.randrange(1, 7)))
                      for _ in range(draw.randrange(5, 120))) for _ in range(250)]
    texts += [] if i else ODD
    return draw.sample(texts, len(texts))


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    datasets, folder = pytest.importorskip('datasets'), tmp_path_factory.mktemp('source')
    for name, count in SOURCES.items():
        for i in range(count):
            rows = datasets.Dataset.from_dict(dict(text=texts_of(name, i)))
            path = folder / name / f'train-{i:05d}'
            path.parent.mkdir(exist_ok=True)
            if i % 2:
                rows.to_json(path.with_suffix('.jsonl'), force_ascii=False)
            else:
                rows.to_parquet(path.with_suffix('.parquet'), batch_size=50)
    return folder


def command(source, out, *more):
    return ['--tokens=500K', f'--source={source}', '--tokenizer=bytes', f'--out={out}',
            '--val_every=50', '--workers=2', *more]


def prepare(argv):
    "data/smollm/prepare.py."
    sources = runpy.run_path(str(ROOT / 'data/smollm/prepare.py'))['SMOLLM']
    tokens_file.prepare({'smollm': sources}, argv)


def prepare_until_killed(argv):
    "It is killed where the second source's first part is hashed: the first source is whole."
    def hash_or_kill(path, hash_of=tokens_file.hash_of):
        if path.parent.name == 'cosmopedia':
            os.kill(os.getpid(), signal.SIGKILL)
        return hash_of(path)
    tokens_file.hash_of = hash_or_kill
    prepare(argv)


def contents(out):
    """What the JSON files say and name. Other shards may be there: of parts that were begun at once
    with the last one that was needed."""
    read = {}
    for about in [*out.rglob('train.json'), *out.rglob('val.json'), *out.glob('mixture.json')]:
        read[str(about.relative_to(out))] = about.read_bytes()
        for shard in json.loads(about.read_text()).get('shards', ()):
            for end in shard['sha256']:
                path = (about.parent / shard['file']).with_suffix(end)
                read[str(path.relative_to(out))] = path.read_bytes()
    return read


@pytest.fixture(scope='module')
def made(source, tmp_path_factory):
    out = tmp_path_factory.mktemp('made')
    prepare(command(source, out, '--workers=1'))
    return out


def test_shares_are_exact_and_every_document_is_there_once(made):
    mixture, loader = json.loads((made / 'mixture.json').read_text()), Loader(made, 4, 64)
    assert loader.passes(100) == pytest.approx(max(
        400 * share / n for share, n in zip(mixture.values(), loader.n_windows.tolist())))
    assert mixture == dict(fineweb_edu=0.70, cosmopedia=0.15, python_edu=0.09, open_web_math=0.06)
    for name, share in mixture.items():
        sizes = [*map(len, shards_of(made / name, 'train'))]
        # validation is one shard, so that windows of any length fit
        assert len(shards_of(made / name, 'val')) == 1
        # whole files, and as few as will do
        assert sum(sizes[:-1]) < round(500_000 * share) <= sum(sizes)
    # What is read back, split at the documents' beginnings, is a subset of the source's texts, each
    # once, in one split.
    stream = np.concatenate([shard for split in ('train', 'val')
                             for shard in shards_of(made / 'open_web_math', split)])
    documents = [bytes(document[1:].astype('uint8'))
                 for document in np.split(stream, np.flatnonzero(stream == 256))[1:]]
    assert len({*documents}) == len(documents) > 0
    texts = texts_of('open_web_math', 0) + texts_of('open_web_math', 1)
    assert {*documents} <= {text.encode() for text in texts if text}


def test_neither_processes_nor_being_killed_change_a_byte(source, made, tmp_path, threads):
    killed = BEGUN.Process(target=prepare_until_killed,
                           args=(command(source, tmp_path, '--workers=1'),))
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert (tmp_path / 'fineweb_edu/train.json').exists()
    assert not (tmp_path / 'cosmopedia/train.json').exists()
    prepare(command(source, tmp_path))
    assert contents(tmp_path) == contents(made)


def test_a_mixture_goes_on_to_more_tokens_and_is_left_as_it_is(source, made, tmp_path):
    assert [number(text) for text in ('7', '20k', '0.5M', '2B')] == [7, 20_000, 500_000, 2 * 10**9]
    with pytest.raises(Refused, match='such as 10B'):
        number('10 billion')
    for tokens in ('100K', '500K'):
        prepare(command(source, tmp_path, f'--tokens={tokens}', '--workers=1'))
        meta = json.loads((tmp_path / 'cosmopedia/train.json').read_text())
        assert 0.15 * number(tokens) <= meta['tokens'] == sum(s['tokens'] for s in meta['shards'])
    assert contents(tmp_path) == contents(made)
    with pytest.raises(Refused, match='other files or settings'):
        prepare(command(source, made, '--val_every=7'))
    assert contents(made)['fineweb_edu/train.json'] == contents(tmp_path)['fineweb_edu/train.json']


@pytest.mark.parametrize('changes, error', [
    (dict(dtype='object'), Refused), (dict(dtype='float16'), Refused),
    (dict(shards=[dict(file='x.bin', tokens=0, sha256={'.bin': ''})]), Refused),
    (dict(shards=[dict(file='../x.bin', tokens=50, sha256={'.bin': ''})]), OSError)])
def test_what_a_dataset_says_of_itself_is_not_believed(data, changes, error):
    "A dtype of objects would have a stranger's bytes followed as pointers."
    path = data / 'train.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (data.parent / 'x.bin').write_bytes(bytes(100))
    with pytest.raises(error):
        Loader(data, 1, 8).batch(0)


def test_names_of_a_puzzle_are_letters_where_they_suffice_and_aliases_another_matching():
    "26 names are single letters, 27 are pairs; each level is matched anew, so no place tells."
    for depth, n, length in ((1, 13, 1), (2, 9, 2)):
        example = primitives.assignment(random.Random(0), depth, 'basic', n=n)
        names = re.findall(r'^(\w+)=', example[0], flags=re.M)
        assert len(names) >= (depth + 1) * n and {*map(len, names)} == {length}
    statements, level = primitives.chain(random.Random(1), list('abcdefgh'), list('1234'), 1)
    names = dict(statements)
    assert {*level} == {*'efgh'} and [names[alias] for alias in 'efgh'] != list('abcd')
    assert all(level[alias] == names[names[alias]] for alias in level)


def test_which_documents_validate_and_which_files_come_first_is_for_ever(tmp_path):
    "Gold values: other hashes would be another split and another sample, without a word."
    assert [*map(len, tokens_file.cut('\n\n'.join(['x' * 900] * 5)))] == [3 * 902, 2 * 902]
    (tmp_path / 'some').mkdir()
    for name in 'abcde':
        rows = [dict(text=f'document {i}') for i in range(60)] if name == 'a' else [dict(text=name)]
        (tmp_path / f'some/{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    tokens_file.prepare({'m': [tokens_file.Source('some', 1.0, 'x/y', '*')]}, [
        '--tokens=1K', '--tokenizer=bytes', '--workers=1', '--val_every=7',
        f'--source={tmp_path}', f'--out={tmp_path / "out"}'])
    parts = json.loads((tmp_path / 'out/some/plan.json').read_text())['parts']
    assert ''.join(Path(path).stem for [path] in parts) == 'cbdea'
    validates = re.findall(r'document (\d+)', text_of(tmp_path / 'out/some', 'val'))
    assert [*map(int, validates)] == [6, 7, 32, 46, 50, 54]


def test_parts_of_a_hubs_dataset_are_of_one_commit(tmp_path, monkeypatch):
    "That of the parts that are there, though the dataset has another one by now."
    hub = pytest.importorskip('huggingface_hub')
    newest, listed = ['a' * 40], []

    class Hub:
        def dataset_info(self, repo):
            return SimpleNamespace(sha=newest[-1])

        def list_repo_files(self, repo, repo_type, revision):
            listed.append(revision)
            return ['train-0.parquet', 'notes.md']
    monkeypatch.setattr(hub, 'HfApi', Hub)
    source = tokens_file.Source('some', 1.0, 'x/y', '*.parquet')
    files = tokens_file.files_of(source, None, tmp_path)
    assert files == {'train-0.parquet': f'hf://datasets/x/y@{newest[0]}/train-0.parquet'}
    (tmp_path / 'plan.json').write_text(json.dumps(dict(parts=[[*files.values()]])))
    newest.append('b' * 40)
    assert tokens_file.files_of(source, None, tmp_path) == files
    assert listed == ['a' * 40] * 2


def test_tokenizers_of_one_name_are_told_apart(config, tmp_path, tiny):
    name = bpe(tmp_path / 'tok')
    for folder in ('one', 'two'):
        for split in ('train', 'val'):
            write_dataset(tmp_path / folder, split, name, np.arange(3000) % 250)
        name = bpe(tmp_path / 'tok', swapped='abcd')        # the same folder, and another one in it
    bpe(tmp_path / 'tok')
    train(config(data=str(tmp_path / 'one')))
    run = str(tmp_path / 'run')
    with pytest.raises(Refused, match='two was made with the tokenizer .* is not that of'):
        both = [str(tmp_path / 'one'), str(tmp_path / 'two')]
        open_data(run, state_of(run), load_model(run), both)
    nanodepth('cut', [run, '1-1-0', f'--out={tmp_path / "cut"}'])
    save_hf(load_model(run), tmp_path / 'hf', tokenizer=run)
    for parent in (run, tmp_path / 'cut', tmp_path / 'hf'):
        with pytest.raises(Refused, match='a model has one tokenizer'):
            train(config('next', init_from=str(parent), data=str(tmp_path / 'two')), open_parent)


def test_data_made_by_a_runs_tokenizer_need_no_longer_that_run(config, tmp_path):
    first = config('first')
    train(first)
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'data', split, first.out_dir, np.arange(3000) % 250)
    shutil.rmtree(first.out_dir)
    c = config('second', data=str(tmp_path / 'data'))
    train(c)
    assert get_tokenizer(c.out_dir).name == 'bytes'
    # a dry run knows that the parent's vocabulary counts, and not the setting
    nanodepth('train', [f'--init_from={c.out_dir}', f'--data={c.data}', '--context=16',
                        '--vocab_size=9', '--dry_run'])


def test_rows_of_others_begin_as_a_text_does(gemma, tiny, tmp_path):
    """The tokens that begin a text count in no loss. The end of the text before, with which our own
    exports begin a text, is no such token: our rows are windows."""
    write_noise(tmp_path / 'noise', [])
    assert scoring.starts_of(gemma[0], {}) == []
    theirs = tmp_path / 'theirs'
    shutil.copytree(gemma[0], theirs)
    for path in theirs.glob('*token*.json'):
        path.write_text(path.read_text().replace('<|endoftext|>', '<bos>'))
    subject = Subject(theirs, Asked(data=str(tmp_path / 'noise'), batches=2, device='cpu'))
    plain = Loader(tmp_path / 'noise', 4, 511, 'val')
    losses = []
    for step in range(2):
        tokens, targets, _ = plain.batch(step)
        with torch.no_grad():
            logits = gemma[1](torch.cat((torch.full((len(tokens), 1), 256), tokens), 1)).logits
        losses.append(torch.nn.functional.cross_entropy(logits[:, 1:].transpose(1, 2), targets))
    assert asked_of(subject)['loss'].mean == pytest.approx(np.mean(losses), rel=1e-5)
    ours = save_run(tmp_path / 'ours', tiny(n_layer=2, vocab_size=257, context=512),
                    data=tmp_path / 'noise')
    assert scoring.starts_of(ours, state_of(ours)) == []
    save_hf(tiny(n_layer=2), tmp_path / 'llama', tokenizer=theirs)
    nanodepth('cut', [str(tmp_path / 'llama'), '1-1-0', f'--out={tmp_path / "cut"}'])
    asked = Asked(data=str(tmp_path / 'noise'), device='cpu')
    assert Subject(ours, asked, like=subject).val.starts == [256]       # as the first one's rows
    state = state_of(tmp_path / 'cut')      # of one with such a start, and not trained
    for trained in ({}, dict(flops=1), dict(inherited_flops=1)):
        assert scoring.starts_of(tmp_path / 'cut', state | trained) == ([] if trained else [256])
