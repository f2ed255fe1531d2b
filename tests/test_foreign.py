"Commands on families that are not ours: loop, sweep, wrap on text, evaluate; names of tasks; text."
import json

import pytest
import torch

transformers = pytest.importorskip('transformers')
transformers.logging.set_verbosity_error()

from conftest import ROOT
from families import tiny as family
from test_trust import refused

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands.evaluate import in_harness
from nanodepth.common.errors import Refused
from nanodepth.data.primitives import task_and_depth
from nanodepth.data.tokenizer import write_tokenizer
from nanodepth.data.tokens import Dataset, Loader, measure
from nanodepth.engine.foreign import (Hooked, answer_of, is_foreign, open_any, repeated,
                                      repeated_block)
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
        with repeated(opened, 2, 2, 3), looped(model, (2, 3), 'naive', 3):
            assert torch.equal(answer_of(opened)(tokens), model(tokens).logits)


def test_loop_repeats_its_blocks(theirs, notes, tmp_path, capsys):
    path, model = theirs
    nanodepth('loop', [path, f'--data={notes}', '--block=3', '--times=1,2', '--batches=1',
                            '--device=cpu', f'--out={tmp_path / "l.png"}'])
    rows = {(int(r['start']), int(r['times'])): float(r['loss'])
            for r in read_csv(tmp_path / 'l.csv')}
    assert len(rows) == 4 * 2
    val = Loader(notes, 4, 512, split='val', seed=0)
    answer = lambda tokens: model(tokens).logits
    with torch.no_grad(), looped(model, (1, 3), 'naive', 2):
        assert rows[1, 2] == pytest.approx(measure(answer, val, 1)[0], rel=1e-5)
    assert '| 6 ' in capsys.readouterr().out


def test_wrap_and_sweep_by_the_loss_on_text(theirs, notes, tmp_path, capsys):
    path, model = theirs
    out = tmp_path / 'numbers.json'
    nanodepth('wrap', [path, f'--data={notes}', '--window=2-3', '--K=2', '--batches=2',
                            '--device=cpu', f'--out={out}'])
    *_, line, where = capsys.readouterr().out.strip().splitlines()
    assert where == f'numbers: {out}'
    val = Loader(notes, 4, 512, split='val', seed=0)
    batches = min(2, len(val))
    answer = lambda tokens: model(tokens).logits
    with torch.no_grad():
        plain = measure(answer, val, batches)[0]
        with looped(model, (2, 3), 'rk', 2):
            other = measure(answer, val, batches)[0]
    numbers = [float(part.split()[0].replace('±', '')) for part in line.strip('| ').split('|')]
    assert numbers[1:3] == pytest.approx([plain, other], abs=2e-3)
    row, = json.loads(out.read_text())['rows']
    assert (row['plain'], row['looped']) == pytest.approx((plain, other), rel=1e-5)
    assert row['settings']['K'] == 2 and row['change'] == pytest.approx(other - plain, abs=1e-4)
    nanodepth('sweep', [path, f'--data={notes}', '--windows=2-3,mid2', '--methods=rk',
                             '--K=2', '--batches=1', '--device=cpu', f'--out={tmp_path / "s.png"}'])
    notes_of = [json.loads(line) for line in (tmp_path / 's.jsonl').read_text().splitlines()]
    with torch.no_grad(), looped(model, (2, 3), 'rk', 2):
        cell = next(n for n in notes_of if n['of']['cell'] and n['of']['part'] == 'screen')
        assert cell['found']['loss'] == pytest.approx(measure(answer, val, 1)[0], rel=1e-5)
    assert 'not both' in refused(capsys, 'wrap', path, f'--data={notes}', '--tasks=arc_easy')


def test_evaluate_takes_any_family_and_one_spelling_of_a_task(theirs, tmp_path, capsys):
    pytest.importorskip('lm_eval')
    path, model = theirs
    rows = {}
    for name, more in (('plain', []), ('loop', ['--loop=2-2x2-2'])):
        nanodepth('evaluate', [path, '--tasks=toy_assign/1', '--limit=12', '--device=cpu',
                                    f'--out={tmp_path / name}.json', *more])
        rows[name] = json.loads((tmp_path / f'{name}.json').read_text())['rows']
        assert {row['task'] for row in rows[name]} == {'primitive_toy_assign_d1'}
    assert 'one block can be repeated' in refused(
        capsys, 'evaluate', path, '--tasks=toy_assign/1', '--loop=1x2-2x2-1x2-2', '--device=cpu')


def test_names_of_tasks():
    assert task_and_depth('toy_assign/3') == ('toy_assign', 3) == task_and_depth(
        'primitive_toy_assign_d3')
    assert task_and_depth('primitive_copy_words') == ('copy_words', 0)
    assert [in_harness(name) for name in (
        'assign_math/1', 'assign_math', 'toy_assign/3', 'copy_words', 'arc_easy',
        'primitive_assign_math')] == [
        'primitive_assign_math_d1', 'primitive_assign_math', 'primitive_toy_assign_d3',
        'primitive_copy_words', 'arc_easy', 'primitive_assign_math']
    with pytest.raises(Refused, match='lm-eval has no form of that depth; there are primitive_ass'):
        in_harness('assign_math/7')


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
