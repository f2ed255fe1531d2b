"Families that are not ours: evaluate and sweep, on text and by lm-eval; names of tasks."
import re

import pytest
import torch

transformers = pytest.importorskip('transformers')
transformers.logging.set_verbosity_error()

from conftest import ROOT
from families import tiny as family
from test_trust import refused

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.data.primitives import task_and_depth
from nanodepth.data.tokenizer import write_tokenizer
from nanodepth.data.tokens import Dataset, Loader, measure
from nanodepth.engine.examine import split_tasks
from nanodepth.engine.foreign import Hooked, answer_of, is_foreign, open_any, repeated_block
from nanodepth.engine.ways import Way
from nanodepth.loop import parse_loop, running
from nanodepth.report.tables import read_csv
from nanodepth.wrapper import looped


@pytest.fixture(scope='module')
def theirs(tmp_path_factory):
    "A small Gemma 3 that reads bytes, and its folder."
    folder = tmp_path_factory.mktemp('gemma')
    model = family('gemma3_text', vocab_size=257, max_position_embeddings=512)
    model.save_pretrained(folder)
    write_tokenizer('bytes', folder, 512)
    return str(folder), model


@pytest.fixture
def notes(tmp_path):
    text = '\n\n'.join(f'Paragraph {i}: ' + 'some words of it. ' * 20 for i in range(300))
    (tmp_path / 'notes.txt').write_text(text)
    import runpy
    prepare = runpy.run_path(str(ROOT / 'data/text/prepare.py'))['main']
    prepare([str(tmp_path / 'notes.txt'), f'--out={tmp_path / "notes"}'])
    return str(tmp_path / 'notes')


def loss_of(model, data):
    val = Loader(data, 8, 64, split='val', seed=0)
    return measure(lambda tokens: model(tokens).logits, val, 1)[0]


def test_a_foreign_model_is_an_answer(theirs):
    path, model = theirs
    assert is_foreign(path)
    state, opened = open_any(path)
    assert type(opened) is type(model) and state['kind'] == 'hf'
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(answer_of(opened)(tokens), model(tokens).logits)
        with Way(loop='2-2x3-2').apply(opened), looped(model, (2, 3), 'naive', 3):
            assert torch.equal(answer_of(opened)(tokens), model(tokens).logits)


def test_it_is_evaluated_and_swept_by_the_loss_on_text(theirs, notes, tmp_path, capsys):
    path, model = theirs
    val = Loader(notes, 4, 512, split='val', seed=0)
    batches = min(2, len(val))
    answer = lambda tokens: model(tokens).logits
    ways = {'as it is': (0, 0, 1), '--window=2-3 --method=naive --K=2': (2, 3, 2),
            '--loop=1-3x2-2': (1, 3, 2)}
    expected = {}
    with torch.no_grad():
        for way, (a, b, times) in ways.items():
            with looped(model, (a, b), 'naive', times):
                expected[way] = measure(answer, val, batches)[0]
    losses = {}
    for more in (['--window=2-3', '--method=naive', '--K=2'], ['--loop=1-3x2-2']):
        nanodepth('evaluate', [path, f'--data={notes}', '--batches=2', '--device=cpu',
                               f'--out={tmp_path / "e.csv"}', *more])
        losses |= {row['way']: float(row['mean']) for row in read_csv(tmp_path / 'e.csv')}
    assert losses == pytest.approx(expected, rel=1e-5) and len({*losses.values()}) == 3
    for out, more in (('s', ['--window=2-3,mid2', '--method=naive', '--K=2']),
                      ('b', ['--blocks=3', '--times=2'])):
        nanodepth('sweep', [path, f'--data={notes}', '--batches=1', '--device=cpu',
                            f'--out={tmp_path / out}.png', *more])
        with torch.no_grad():
            plain = measure(answer, val, 1)[0]
            for row in read_csv(tmp_path / f'{out}.csv'):
                if row['part'] == 'screen' and 'rk' not in row['way']:
                    window = re.search(r'--window=(\d)-(\d)', row['way'])
                    a, b = map(int, window.groups()) if window else repeated_ends(row['way'])
                    with looped(model, (a, b), 'naive', 2):
                        assert float(row['loss']) == pytest.approx(
                            plain - measure(answer, val, 1)[0], rel=1e-3, abs=1e-6)
    capsys.readouterr()


def repeated_ends(way):
    start, length, _ = repeated_block(parse_loop(way.removeprefix('--loop=')), 6)
    return start, start + length - 1


def test_lm_eval_takes_any_family(theirs, tmp_path, capsys):
    pytest.importorskip('lm_eval')
    path, model = theirs
    nanodepth('evaluate', [path, '--tasks=primitive_toy_assign_d1', '--limit=12', '--device=cpu',
                           '--loop=2-2x2-2', f'--out={tmp_path / "e.csv"}'])
    assert [row['way'] for row in read_csv(tmp_path / 'e.csv')] == ['as it is', '--loop=2-2x2-2']
    assert 'one block can be repeated' in refused(
        capsys, 'evaluate', path, '--tasks=primitive_toy_assign_d1', '--loop=1x2-2x2-1x2-2',
        '--device=cpu')


def test_names_of_tasks():
    assert task_and_depth('toy_assign/3') == ('toy_assign', 3) == task_and_depth(
        'primitive_toy_assign_d3')
    assert task_and_depth('primitive_copy_words') == ('copy_words', 0)
    assert split_tasks('toy_assign/0-2,arc_easy,assign_math,primitive_copy_words,toy') == (
        ['toy_assign/0', 'toy_assign/1', 'toy_assign/2', 'assign_math', 'toy_copy', 'toy_assign/0',
         'toy_assign/1', 'toy_assign/2'], ['arc_easy', 'primitive_copy_words'])
    with pytest.raises(Refused, match='the depth must be a whole number'):
        split_tasks('toy_assign/2-x')


def test_which_block_an_order_repeats():
    for text in ('2-2x2-2', '1x4-5', '3-3x3', '6'):
        a, block, times = repeated_block(parse_loop(text), 6)
        order = [*range(a), *[*range(a, a + block)] * times, *range(a + block, 6)]
        assert order == parse_loop(text)
    with pytest.raises(Refused, match='export FOLDER OUT'):
        repeated_block([0, 2, 1, 3, 4, 5], 6)


def test_one_file_is_cut_and_a_folder_is_read(notes, tmp_path):
    import runpy
    text = (tmp_path / 'notes.txt').read_text()
    val = Dataset(notes, 'val', 8)
    assert val.tokens > 1000
    both = sum(Dataset(notes, split, 8).tokens for split in ('train', 'val'))
    assert both > len(text)             # every character, and a beginning for each document
    (tmp_path / 'many/deep').mkdir(parents=True)
    for i in range(3):
        (tmp_path / f'many/deep/{i}.md').write_text(f'text {i}')
    prepare = runpy.run_path(str(ROOT / 'data/text/prepare.py'))
    assert [p.name for p in prepare['in_folders']([tmp_path / 'many'])] == ['0.md', '1.md', '2.md']
    assert ''.join(prepare['cut'](text)).strip() == text.strip()
