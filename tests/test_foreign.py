"Commands on families that are not ours: loop, sweep, wrap on text, evaluate; names of tasks; text."
import json
import os

import pytest
import torch

transformers = pytest.importorskip('transformers')
transformers.logging.set_verbosity_error()

from conftest import ROOT
from families import FAMILIES, tiny as family
from test_trust import refused

import nanodepth
import probe
from common.errors import Refused
from data.primitives import few_shot, task_and_depth
from data.tokenizer import get_tokenizer, write_tokenizer
from data.tokens import Dataset, Loader, measure
from engine import foreign
from engine.foreign import Hooked, answer_of, is_foreign, open_any, repeated, repeated_block
from engine.hf import save_hf
from engine.measure import score
from loop import parse_loop, running
from report.tables import read_csv
from tools.evaluate import in_harness
from wrapper import looped


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
    nanodepth.main('loop', [path, f'--data={notes}', '--block=3', '--times=1,2', '--batches=1',
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
    nanodepth.main('wrap', [path, f'--data={notes}', '--window=2-3', '--K=2', '--batches=2',
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
    nanodepth.main('sweep', [path, f'--data={notes}', '--windows=2-3,mid2', '--methods=rk',
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
        nanodepth.main('evaluate', [path, '--tasks=toy_assign/1', '--limit=12', '--device=cpu',
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
    assert val.about.tokens > 1000
    both = sum(Dataset(notes, split, 8).about.tokens for split in ('train', 'val'))
    assert both > len(text)             # every character, and a beginning for each document
    (tmp_path / 'many/deep').mkdir(parents=True)
    for i in range(3):
        (tmp_path / f'many/deep/{i}.md').write_text(f'text {i}')
    prepare = runpy.run_path(str(ROOT / 'data/text/prepare.py'))
    assert [p.name for p in prepare['in_folders']([tmp_path / 'many'])] == ['0.md', '1.md', '2.md']
    assert ''.join(prepare['cut'](text)).strip() == text.strip()


HYBRIDS = 'qwen2_hybrid', 'gemma2', 'gemma3_text', 'gpt_oss', 'smollm3', 'llama4_text'
PROBED = [*FAMILIES] if os.environ.get('TORTURE') else ['llama', 'gemma3_text', 'gpt2', 'bloom']


@pytest.mark.parametrize('name', PROBED)
def test_orders_and_listening_on_any_family(name):
    model, tokens = family(name), torch.randint(2, 97, (2, 9))
    hooked = Hooked(model)
    with torch.no_grad():
        plain = model(tokens, use_cache=False)
        assert torch.equal(hooked(tokens), plain.logits)
        with running(hooked, parse_loop('2-2x2-2')), looped(family(name), (2, 3), 'naive', 2) as m:
            assert torch.equal(hooked(tokens), m(tokens, use_cache=False).logits)
        with running(hooked, [0, 1, 2, 3, 4]):
            assert not torch.allclose(hooked(tokens), plain.logits)
        assert torch.equal(hooked(tokens), plain.logits)
        logits, before, after = hooked.listen(tokens)
        assert torch.equal(logits, plain.logits) and torch.equal(before[1:], after[:-1])
        read = hooked.reader(tokens)
        if read:
            assert torch.allclose(read(after[-1]), logits, atol=1e-3)
        # without a layer for all tokens but the last: at the last it is what the order says
        dropped, _, _ = hooked.listen(tokens, lambda d, x, y: x if d == 2 else y)
        with running(hooked, [0, 1, 3, 4, 5]):
            if name not in HYBRIDS:
                assert torch.allclose(hooked(tokens), dropped, atol=1e-5)


def moved_slowly(hooked, tokens, boundaries):
    "Every layer at every boundary by a run of its own, from the first layer on."
    plain, weights = hooked(tokens).float().softmax(-1), []
    for erased in range(len(hooked.order)):
        furthest = torch.zeros(len(tokens))
        for t in boundaries:
            output, _, _ = hooked.listen(tokens, lambda depth, x, y: torch.cat(
                (x[:, :t + 1], y[:, t + 1:]), dim=1) if depth == erased else y)
            moved = (output.float().softmax(-1) - plain).norm(dim=-1)[:, t + 1:]
            furthest = torch.maximum(furthest, moved.amax(dim=1))
        weights.append(furthest.mean())
    return torch.stack(weights)


def test_a_family_whose_layers_cannot_begin_in_the_middle_is_run_from_its_first_on(monkeypatch):
    hooked, tokens = Hooked(family('llama')), torch.randint(90, (2, 9))
    wanted, without = hooked.moved_without(tokens, range(8)), Hooked.without

    def from_the_first(self, erased, first, *more):
        if first:
            raise AttributeError("property 'layer_types' has no setter")
        return without(self, erased, first, *more)
    monkeypatch.setattr(Hooked, 'without', from_the_first)
    assert torch.allclose(hooked.moved_without(tokens, range(8)), wanted, atol=1e-6)


@pytest.mark.parametrize('name', PROBED)
def test_the_layers_before_an_erased_one_are_not_run_again(name, monkeypatch):
    hooked, tokens = Hooked(family(name)), torch.randint(90, (2, 9))
    wanted = moved_slowly(hooked, tokens, range(8))
    assert (wanted[:-1] > 5e-4).all() and wanted[-1] == 0       # nobody reads the last layer
    runs = []
    hooked.layers[0].register_forward_hook(lambda *_: runs.append(1))
    assert torch.allclose(hooked.moved_without(tokens, range(8)), wanted, atol=1e-5)
    assert len(runs) == 2           # the run as it is, and the one that lacks this layer
    monkeypatch.setattr(foreign, 'NUMBERS', 1)          # the boundaries one by one
    assert torch.allclose(hooked.moved_without(tokens, range(8)), wanted, atol=1e-5)
    assert hooked.config.order is None and hooked.order == hooked.plain


def test_a_depth_score_by_hooks_is_the_depth_score(tiny, tmp_path):
    ours = tiny(vocab_size=257, n_layer=4, context=64)
    save_hf(ours, tmp_path / 'hf')
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hf')
    tokens = torch.randint(256, (3, 10))
    score, weights = probe.depth_score(ours, tokens)
    by_hooks = Hooked(model).moved_without(tokens, range(9))
    assert torch.allclose(by_hooks, weights, atol=1e-4)
    assert probe.score_of(by_hooks) == pytest.approx(score, rel=1e-3)


def test_the_probes_of_a_foreign_model(theirs, notes, tmp_path, capsys):
    path, model = theirs
    out = tmp_path / 'page'
    nanodepth.main('probe', [path, f'--data={notes}', '--count=2', '--length=12', '--batches=1',
                             '--n=4', '--tasks=toy_assign/1', '--device=cpu', f'--out={out}'])
    said = capsys.readouterr().out
    for name in ('heatmap', 'heatmap_attn', 'heatmap_mlp', 'similarity', 'block_similarity'):
        assert f'is not in {name}: this needs a layer' in said
    for name in ('depth_score', 'norms', 'swap', 'skip', 'reverse', 'repeat'):
        assert len(read_csv(out / f'{name}.csv')) >= 6 and (out / f'{name}.png').exists()
    rows = read_csv(out / 'skip.csv')
    assert len({row['loss'] for row in rows}) > 5
    exits = read_csv(out / 'early_exit.csv')
    assert float(exits[-1]['KL']) == pytest.approx(0, abs=1e-5)
    assert float(exits[0]['KL']) > 0.01
    assert exits[-1]['loss'] == next(r['loss'] for r in rows if r['size'] == '0')
