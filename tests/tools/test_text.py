"""Test nanodepth/text and data/: from text to tokens and datasets, and questions with known
answers.

A split and a mixture are each compared with a slow form. A question is solved by reading it. A
dataset has the same bytes for any number of processes, and after a kill.
"""
import gzip
import hashlib
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
from helpers import FORKS, ROOT, contents, shard_of, write_dataset as slowly_written
from tool_helpers import bpe

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands.train import open_parent
from nanodepth.common import files
from nanodepth.model import Refused
from nanodepth.models.checkpoint import load_model, state_of as state_of_any
from nanodepth.models.hf import save_hf
from nanodepth.scoring.data import open_data
from nanodepth.text import tokens as tokens_file
from nanodepth.text.primitives import Example, TASKS, TOY_TASKS, few_shot
from nanodepth.text.tokenizer import encode_as_array, get_tokenizer
from nanodepth.text.tokens import number, write_dataset
from nanodepth.train import train
from nanodepth.training.loader import Loader


@pytest.mark.parametrize('text, tokens', [
    ('', []), ('a<|endoftext|>b', [97, 256, 98]),
    (odd := '  9\t10\r\n naïve 東京 🙂½ Ⅷ٣ \x00\x01\xff  ', [*odd.encode()])])
def test_bytes_are_tokens(text, tokens):
    "There are 257 tokens: each byte, and the end of a text if it is meant as a token."
    enc, plain = get_tokenizer('bytes'), [*text.encode()]
    assert (enc.n_vocab, enc.eot_token) == (257, 256)
    assert enc.encode_ordinary(text) == plain and enc.decode(plain) == text
    assert enc.encode(text, allowed_special='all') == tokens
    for special, wanted in ((True, tokens), (False, plain)):
        array = encode_as_array(enc, text, special)
        assert array.dtype == 'uint16' and array.tolist() == wanted


def form_of(task, depth):
    "Return a pattern of a question. If there are not enough letters, names have two letters."
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
    "Return the statements in a prompt as a dict, and the name that it asks for."
    if '=' in prompt:
        asked = re.search(r'(\w+)(=____|\?\nAnswer)', prompt)[1]
        return dict(re.findall(r'^(\w+) ?= ?(\w+)$', prompt, flags=re.M)), asked
    return dict(re.findall(r'(\w)(\w)', prompt.split('?')[0])), prompt[-1]


@pytest.mark.parametrize('task, depth', [
    (task, depth) for task in TASKS | TOY_TASKS for depth in range(7)
    if depth == 0 or 'copy' not in task and (task, depth) != ('toy_assign', 6)])
def test_a_question_is_solved_by_reading_it(task, depth):
    """Depth d takes exactly d + 1 look-ups. Each number of shots has fresh shots before the same
    question. What is copied is the word that came next."""
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
    # each level has its own order, so that no position gives the value away
    assert 'copy' in task or depth == 0 or len({*moves}) > 3


def test_the_questions_of_a_seed_never_change():
    "Values are 1 to 25."
    e = few_shot('toy_assign', 1, shots=1, depth=1)[0]
    assert e == Example('e5v7f1i3wiofyvpe?w3h7g2b5j4whqbsjmg?m', ['4', '5', '2', '7'], 2)
    many = few_shot('assign_math', 60, shots=0, depth=1)
    assert {int(option) for e in many for option in e.options} == {*range(1, 26)}
    assert few_shot('assign_math', 60, shots=0, depth=1, seed=8)[0] != many[0]


text_script = runpy.run_path(str(ROOT / 'data/text/prepare.py'))


def shards_of(folder, split):
    "Return the tokens of each shard."
    [dataset] = Loader(folder, 1, 8, split).datasets
    return [shard_of(dataset, s)['.bin'] for s in range(len(dataset.about['shards']))]


def documents_of(folder, split):
    "Return the texts of a dataset of bytes."
    stream = np.concatenate(shards_of(folder, split))
    return [bytes(document[1:].astype('uint8')).decode()
            for document in np.split(stream, np.flatnonzero(stream == 256))[1:]]


def validates(text, every):
    "Return whether a document is for validation, which a hash of its text decides."
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')
    return number % every == 0


def put(folder, files):
    "Write files of text or of rows. Return their folder."
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
    "Threads take the place of processes, which take seconds to begin."
    monkeypatch.setattr(tokens_file, 'ProcessPoolExecutor', lambda n, *_: ThreadPoolExecutor(n))


ROWS = [f'row {i} of mine' for i in range(4000)]
PARAGRAPHS = [f'{i:03} ' + 'word ' * 179 + '\n\n' for i in range(90)]       # 903 characters
NOTE = 'one file\n\n' * 999
# {name: (files, their documents in order, whether document i is for validation)}
FOLDERS = dict(
    cut=({'notes.txt': '\ufeff' + ''.join(PARAGRAPHS)[:-2]},        # Notepad begins a file so
         [''.join(PARAGRAPHS[i:i + 3]) for i in range(0, 90, 3)], lambda i, text: i % 10 == 0),
    many=({'rows.jsonl': ROWS[:1000]}, ROWS[:1000], lambda i, text: i % 100 == 0),
    by_endings=({'.git/a.py': 'no', '__pycache__/b.pyc': 'no', 'e.png': 'no', 'NOTE': 'no',
                 'f.json': '{}', 'deep/a.txt': NOTE, 'deep/b1.jsonl': ['like a pattern', '', None],
                 'deep/b[1].jsonl': ROWS[:9], 'deep/c.parquet': ROWS[9:30], 'd.py': 'of code'},
                ['of code', NOTE, 'like a pattern', *ROWS[:30]], lambda i, text: i % 10 == 0),
    parts=({f'{i} [a].jsonl': ROWS[i::9] for i in range(9)},
           [row for i in range(9) for row in ROWS[i::9]], lambda i, text: validates(text, 200)))


@pytest.mark.parametrize('name', FOLDERS)
def test_text_is_converted_and_a_killed_command_continues(name, tmp_path, monkeypatch, threads,
                                                          capsys):
    """Each document is in one split. Small files share a part, and each part becomes a shard, which
    is complete or missing."""
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
    (out / 'train.json').unlink()                       # as after a kill
    (out / 'part_00003.json').unlink(missing_ok=True)
    text_script['main'](command)
    assert contents(out) == whole and first.stat().st_mtime_ns == before
    put(tmp_path / 'mine', {'z.jsonl': ['another']})
    for more in ([], ['--column=others']):
        with pytest.raises(Refused, match='was begun with other files or settings'):
            text_script['main']([*command, *more])


def test_a_number_of_tokens_limits_a_conversion(tmp_path, monkeypatch):
    "The last document is complete. Tokens for validation count, too."
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
    "The refused command leaves nothing. A folder with another file keeps that file."
    rows = [dict(content=f'document {i}') for i in range(30)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    command = [str(tmp_path / 'rows.jsonl'), f'--out={tmp_path / "out"}', '--workers=1']
    with pytest.raises(Refused, match="no column 'text', but content"):
        text_script['main'](command)
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'out').mkdir()          # a killed command leaves a plan, a hidden file, half a part
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
    "Their output ends when the last worker has ended."
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
    """A chat loses its role tags, and a text by a reasoning model is left out. A text of Python-Edu
    is fetched by its number, if it still exists."""
    monkeypatch.setattr(pytest.importorskip('urllib3'), 'request', lambda method, url, **how: (
        SimpleNamespace(status=200 if url[-1] == 'b' else 404, data=gzip.compress(b'fetched'))))
    assert tokens_file.READ[read](row, 'text') == text


ODD = ['', None, '<|endoftext|> is text', 'ä東🙂\u200d\x00\ufeff e\u0301 \U000e0041', '\u2028\t']


def numbers_of(file):
    "Return the texts of a file: numbers, and some odd texts."
    draw = random.Random(file)
    texts = [' '.join(str(draw.randrange(10**draw.randrange(1, 7)))
                      for _ in range(draw.randrange(5, 120))) for _ in range(250)]
    return draw.sample(texts + ODD, len(texts + ODD))


def prepare(folder, out, *more):
    "Run data/smollm/prepare.py."
    sources = runpy.run_path(str(ROOT / 'data/smollm/prepare.py'))['SMOLLM']
    tokens_file.prepare({'smollm': sources}, [
        f'--source={folder}', '--tokenizer=bytes', f'--out={out}', '--val_every=50', '--workers=1',
        *more])


def prepare_until_killed(*args):
    "Run it, and kill it in the first part of the second source, when the first is complete."
    def hash_or_kill(path, hash_of=tokens_file.hash_of):
        if path.parent.name == 'cosmopedia':
            os.kill(os.getpid(), signal.SIGKILL)
        return hash_of(path)
    tokens_file.hash_of = hash_or_kill
    prepare(*args)


def test_a_mixture_is_that_of_the_slow_form(tmp_path, threads, capsys):
    """This holds after a kill, and for more tokens later. Each source gives complete files, as few
    as its share needs, in an order that a hash of their names decides."""
    shares = dict(fineweb_edu=0.70, cosmopedia=0.15, python_edu=0.09, open_web_math=0.06)
    names = [f'{name}/{i}.{"jsonl" if i % 2 else "parquet"}' for name in shares for i in range(5)]
    files, out = {name: numbers_of(name) for name in names}, tmp_path / 'out'
    folder = put(tmp_path / 'source', files)
    killed = FORKS.Process(target=prepare_until_killed, args=(folder, out, '--tokens=100K'))
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
            # all validation is in one shard, so that rows of any length fit
            assert len(shards_of(out / name, 'val')) == 1
            drawn = sorted((file for file in files if file.startswith(name)),
                           key=lambda file: hashlib.blake2b(file.encode()).hexdigest())
            texts = [text for file in drawn[:len(sizes)] for text in files[file] if text]
            for split in ('train', 'val'):
                assert documents_of(out / name, split) == [
                    text for text in texts if validates(text, 50) == (split == 'val')]
    typed = capsys.readouterr().out.split('--data=')[-1].strip()       # as it is printed
    loader, before = Loader(typed, 4, 64), contents(out)
    assert loader.quota == [700, 150, 90, 60]
    assert loader.passes(100) == pytest.approx(max(
        0.4 * quota / dataset.n_windows for quota, dataset in zip(loader.quota, loader.datasets)))
    with pytest.raises(Refused, match='other files or settings'):
        prepare(folder, out, '--tokens=300K', '--val_every=7')
    assert contents(out) == before


def test_mixture_from_the_hub_is_of_one_commit(tmp_path, monkeypatch):
    "It is the commit of the parts that exist, even if the dataset has a newer one."
    hub = pytest.importorskip('huggingface_hub').HfApi
    monkeypatch.setattr(hub, 'list_repo_files', lambda self, repo, repo_type, revision: [
        f'train-{revision[0]}.parquet', 'notes.md'])
    source, wanted = tokens_file.Source('some', 1.0, 'x/y', '*.parquet'), 'a' * 40
    for newest in (wanted, 'b' * 40):
        monkeypatch.setattr(hub, 'dataset_info', lambda self, repo: SimpleNamespace(sha=newest))
        files = tokens_file.files_of(source, None, tmp_path)
        assert files == {'train-a.parquet': f'hf://datasets/x/y@{wanted}/train-a.parquet'}
        (tmp_path / 'plan.json').write_text(json.dumps(dict(parts=[[*files.values()]])))


def test_two_tokenizers_in_one_folder_are_told_apart(config, tmp_path):
    for folder, swapped in (('two', 'abcd'), ('one', '')):      # one after the other
        name = bpe(tmp_path / 'tok', swapped)
        for split in ('train', 'val'):
            write_dataset(tmp_path / folder, split, name, np.arange(3000) % 250)
    train(config(data=str(tmp_path / 'one')))
    run = str(tmp_path / 'run')
    with pytest.raises(Refused, match='two was made with another tokenizer .* than'):
        open_data(run, state_of_any(run), load_model(run), [f'{tmp_path}/one', f'{tmp_path}/two'])
    nanodepth('cut', [run, '1-1-0', f'--out={tmp_path / "cut"}'])
    save_hf(load_model(run), tmp_path / 'hf', tokenizer=run)
    for parent in (run, tmp_path / 'cut', tmp_path / 'hf'):
        with pytest.raises(Refused, match='a model has one tokenizer'):
            train(config('next', init_from=str(parent), data=str(tmp_path / 'two')), open_parent)


SAME = '\nA. a\nB. b\nC. c\nD. d\nE. a'         # E reads the same as A
# {task: (file, rows, the prompt and the right answer of the first row in lm-eval's own task)}
QUESTIONS = dict(
    piqa=('PIQA/validation', [dict(question=question, options='A. cools \nB. burns',
                                   answer='A. cools ') for question in ('ice box ', *'abcdefgh')],
          'Question: ice box\nAnswer:', 'cools '),
    boolq=('BoolQ/dev', [dict(question='is it', passage='It is.', answer='True')],
           'It is.\nQuestion: is it?\nAnswer:', 'yes'),
    commonsense_qa=('CommonsenseQA/validation', [
        dict(question='Where?', options=SAME, answer='E. a'),
        dict(question='none of them, so it is left out', options=SAME, answer='A. a?')],
        f'Question: Where?{SAME}\nAnswer:', 'E'),
    openbookqa=('OpenBookQA/test', [dict(question='Fog is ', answer='B. dry',
                                         options='A. wet\nB. dry\nC. hot\nD. red')],
                'Fog is', 'dry'),
    mmlu=('MMLU/test', [dict(question='1 + 1', options='A. 1\nB. 2\nC. 3\nD. 4', answer='B. 2')],
          '1 + 1\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:', 'B'),
    asdiv=('ASDiv/test', [dict(passage='Two and two.', question='How many?', answer='4 apples')],
           'Two and two.\nQuestion:How many?\nAnswer:', '4'),
    nq_open=('NQ-open/test', [dict(question='who is it', answer=['The one']),
                              dict(question='and now', answer=['Two', '2'])],
             'Q: who is it?\nA:', 'The one'))


def test_questions_become_the_tasks_of_lm_eval(tmp_path):
    from lm_eval.tasks import TaskManager
    for file, rows, *_ in QUESTIONS.values():
        path = tmp_path / f'data/{file}.jsonl'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('\n'.join(map(json.dumps, rows)))
    prepare = runpy.run_path(str(ROOT / 'data/evals/questions/prepare.py'))
    prepare['main']([f'{tmp_path}/data', f'{tmp_path}/tasks'])
    manager = TaskManager(include_path=str(tmp_path / 'tasks'), include_defaults=False)
    tasks = {}
    for name, (_, rows, prompt, answer) in QUESTIONS.items():
        [tasks[name]] = manager.load([f'questions_{name}'])['tasks'].values()
        docs = list(tasks[name].test_docs())
        assert len(docs) == (1 if name == 'commonsense_qa' else len(rows))
        target = tasks[name].doc_to_target(docs[0])
        if isinstance(target, int):
            target = tasks[name].doc_to_choice(docs[0])[target]
        assert (tasks[name].doc_to_text(docs[0]), target) == (prompt, answer)
    for name, shots in (('piqa', 8), ('nq_open', 1)):
        tasks[name].set_config('num_fewshot', shots)
        tasks[name].set_fewshot_seed(1234)
        tasks[name].build_all_requests(rank=0, world_size=1)
    for question in tasks['piqa'].instances:        # a question is not among its own examples
        assert question.args[0].count(f'Question: {question.doc["goal"]}\n') == 1
    assert tasks['nq_open'].instances[0].args[0] == (
        'Answer these questions:\n\nQ: and now?\nA: Two\nQ: who is it?\nA:')


def test_write_dataset_writes_what_the_slow_form_does(tmp_path):
    "The tests of the book write their datasets with the slow form."
    arrays = dict(mask=[1, 0, 1] * 20, marks=[129, 1, 0] * 20, kinds=['x'])
    write_dataset(tmp_path / 'one', 'val', 'bytes', [*range(60)], **arrays)
    slowly_written(tmp_path / 'two', 'val', [*range(60)], **arrays)
    one, two = (contents(tmp_path / name) for name in ('one', 'two'))
    assert json.loads(one.pop('val.json')) == json.loads(two.pop('val.json'))
    assert one == two


def test_a_dataset_that_was_half_written_is_refused(tmp_path, monkeypatch):
    write_dataset(tmp_path, 'train', 'bytes', [1] * 40)
    real = files.replace

    def killed(path, raw):
        real(path, raw)
        raise KeyboardInterrupt
    monkeypatch.setattr('nanodepth.text.tokens.replace', killed)
    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path, 'train', 'bytes', [2] * 40)
    with pytest.raises(Refused, match='there is no data in'):
        Loader(tmp_path, 1, 8)


def test_datasets_and_runs_have_their_own_tokenizer_file(config, tmp_path):
    "So the folder that it came from may be removed."
    bpe(tmp_path / 'tok')
    made = (tmp_path / 'tok/tokenizer.json').rename(tmp_path / 'tok/mine.json')
    (made.parent / 'chat_template.jinja').write_text('of something else')
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'bpe', split, made, np.arange(3000) % 250)
    tokens = get_tokenizer(made).encode('ab')
    shutil.rmtree(tmp_path / 'tok')
    train(config(data=str(tmp_path / 'bpe')))
    shutil.rmtree(tmp_path / 'bpe')
    assert not [*tmp_path.rglob('*.jinja')]
    assert get_tokenizer(tmp_path / 'run').encode('ab') == tokens != [97, 98]
