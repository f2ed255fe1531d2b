"One setting against none, and many settings: lm-eval on local tasks, and our own runs. No network."
import dataclasses
import json
import math

import pytest
import torch
import torch.nn as nn

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import evaluate, wrapper as sweep
from nanodepth.common.errors import Refused
from nanodepth.common.options import read as read_options
from nanodepth.engine import checkpoint
from nanodepth.wrapper import looped

pytest.importorskip('lm_eval')
pytest.importorskip('accelerate')
TASKS = 'primitive_toy_copy,primitive_toy_assign_d1'


def write_run(folder, model, data=None):
    checkpoint.save(folder, kind='lm', model=model.state_dict(),
                    model_config=dataclasses.asdict(model.config), flops=0,
                    config=dict(data=[str(data)], batch_size=4, context=16) if data else {})
    (folder / 'run.json').write_text(json.dumps(dict(tokenizer='bytes')))


@pytest.fixture
def folders(tmp_path, tiny):
    "A run of ours, and the same as a Hugging Face folder."
    write_run(tmp_path / 'ours', tiny(vocab_size=257, context=96, n_layer=4))
    nanodepth('export', [str(tmp_path / 'ours'), str(tmp_path / 'hf')])
    return tmp_path / 'ours', tmp_path / 'hf'


SETTINGS = dict(window='1-2', method='naive', K=3)


def test_one_evaluation_changes_nothing_and_more_do(folders):
    found = {}
    for path in folders:
        same = sweep.side_by_side(path, TASKS, SETTINGS | dict(K=1), limit=12, device='cpu')
        assert (len(same) == 2
                and all(row['plain'] == row['looped'] and row['change'] == row['change_stderr'] == 0
                        for row in same))
        found[path] = sweep.side_by_side(path, TASKS, SETTINGS, limit=12, device='cpu')
        assert any(row['change'] != 0 for row in found[path])
    # through transformers as through our own
    assert found[folders[0]] == found[folders[1]]


def test_the_error_of_a_change_is_that_of_each_document_against_itself(folders):
    lm = evaluate.open_model(folders[0], device='cpu')
    docs = lambda: [s['acc']
                    for s in sorted(evaluate.harness(lm, 'primitive_toy_copy', limit=30,
                                                     log_samples=True)['samples'][
                                                         'primitive_toy_copy'],
                                             key=lambda s: s['doc_id'])]
    plain = torch.tensor(docs())
    with looped(lm.model, **SETTINGS):
        there = torch.tensor(docs())
    row, = sweep.side_by_side(folders[0], 'primitive_toy_copy', SETTINGS, limit=30, device='cpu')
    assert row['documents'] == 30 and row['change'] == pytest.approx((there - plain).mean().item())
    assert row['change_stderr'] == pytest.approx((there - plain).std().item() / 30 ** 0.5)
    assert row['plain'] == pytest.approx(plain.mean().item()) and row['looped_stderr'] > 0


def test_a_group_is_shown_by_subject_and_a_perplexity_has_no_error_of_its_change(folders, manager,
        tmp_path, monkeypatch):
    (tmp_path / 'tasks' / 'g.yaml').write_text('group: local_group\ntask:\n  - local_choice\n  - '
                                               'local_other\naggregate_metric_list:\n  - metric: '
                                               'acc\n    weight_by_size: true\n')
    (tmp_path / 'tasks' / 'o.yaml').write_text((tmp_path / 'tasks' / 'a.yaml').read_text().replace(
        'local_choice', 'local_other'))
    from lm_eval.tasks import TaskManager
    known = TaskManager(include_path=[str(tmp_path / 'tasks')], include_defaults=False)
    monkeypatch.setattr(evaluate, 'manager', lambda everything: known)
    rows = ({row['task']: row for row in sweep.side_by_side(folders[1], 'local_group,local_rolling',
            SETTINGS, device='cpu')})
    assert set(rows) == {'local_group', 'local_choice', 'local_other', 'local_rolling'}
    assert (rows['local_choice']['documents'] == 12
            and rows['local_choice']['change_stderr'] is not None)
    assert (rows['local_rolling']['change'] != 0 and rows['local_rolling']['change_stderr'] is None
            and rows['local_group']['change_stderr'] is None)


def test_chat_templates_are_those_of_the_checkpoint(folders):
    path = folders[1]
    about = json.loads((path / 'tokenizer_config.json').read_text())
    about['chat_template'] = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% "
        "if add_generation_prompt %}<assistant>{% endif %}")
    (path / 'tokenizer_config.json').write_text(json.dumps(about))
    plain, chat = (sweep.side_by_side(path, 'primitive_toy_copy', SETTINGS, limit=20, chat=on,
                                     device='cpu') for on in (False, True))
    assert plain[0]['plain'] != chat[0]['plain']
    with pytest.raises(ValueError, match='tokenizer.chat_template is not set'):
        sweep.side_by_side(folders[0], 'primitive_toy_copy', SETTINGS, limit=2, chat=True,
                          device='cpu')


# ------------------------------------------------------------------------------------------- sweeps

GRID = ['--windows=all2', '--methods=naive,rk', '--K=2', '--batches=2', '--n=8',
        '--tasks=toy_assign/1', '--device=cpu']


@pytest.fixture
def runs(tmp_path, tiny, data):
    for seed in range(2):
        write_run(tmp_path / f'run-{seed}', tiny(seed, vocab_size=257, context=64, n_layer=4), data)
    return [str(tmp_path / f'run-{seed}') for seed in range(2)]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_stopped_sweep_goes_on_where_it_was(runs, tmp_path, capsys, monkeypatch):
    out, made = tmp_path / 'sweep.png', []
    real = sweep.open_ours

    def counted(path, args):
        model, looks, data = real(path, args)

        def look(part):
            def measure(model):
                if len(made) == 5:
                    raise KeyboardInterrupt
                made.append(part)
                return looks[part](model)
            return measure
        return model, {part: look(part) for part in looks}, data
    monkeypatch.setattr(sweep, 'open_ours', counted)
    with pytest.raises(SystemExit):
        nanodepth('sweep', [*runs, *GRID, f'--out={out}'])
    assert len(read(out.with_suffix('.jsonl'))) == 5
    with open(out.with_suffix('.jsonl'), 'a') as file:
        file.write('{"of": {"model"')                           # it was writing when it was killed
    made[:] = [None] * 6
    nanodepth('sweep', [*runs, *GRID, f'--out={out}'])
    again = made[6:]
    # no loop, three windows, two methods; and the recipe
    assert again.count('screen') == 2 * (1 + 3 * 2) - 5 + 2
    # no loop, the best three, the recipe
    assert again.count('judge') in (2 * 4, 2 * 5)
    text = capsys.readouterr().out
    assert ('run: 6 cells searched' in text and 'over 2 seeds' in text and '(the recipe)' in text
            and 'screen: loss' in text and 'judge: loss' in text)
    assert out.exists() and out.with_suffix('.csv').exists()
    made[:] = [None] * 6
    nanodepth('sweep', [*runs, *GRID, f'--out={out}'])
    assert made[6:] == []                                       # all is known
    assert capsys.readouterr().out == text


def test_cells_are_what_they_say_and_judged_on_other_data(runs, tmp_path, capsys):
    out = tmp_path / 'sweep.png'
    nanodepth('sweep', [runs[0], *GRID, f'--out={out}'])
    lines = [entry for entry in read(out.with_suffix('.jsonl'))]
    plain = {entry['of']['part']: entry['found'] for entry in lines if entry['of']['cell'] is None}
    assert plain['screen']['loss'] != plain['judge']['loss']
    from nanodepth.engine.measure import parse_tasks, run_scorer
    state = checkpoint.load(runs[0])
    model = checkpoint.load_model(runs[0])
    look = run_scorer(runs[0], state, model, None, 2, parse_tasks('toy_assign/1', 8))
    assert look(model) == plain['screen']
    cell = next(entry for entry in lines if entry['of']['cell'] == dict(window='1-2',
            method='naive', K=2, beta=None, T=None, mode='block', cache='first'))
    with looped(model, (1, 2), 'naive', 2):
        assert look(model) == cell['found']
    import csv
    row = next(r for r in csv.DictReader(open(out.with_suffix('.csv')))
               if (r['window'], r['method'], r['part']) == ('1-2', 'naive', 'screen'))
    # a gain: for a loss, down
    assert float(row['loss']) == pytest.approx(plain['screen']['loss'] - cell['found']['loss'])
    assert float(row['fifth']) == pytest.approx(cell['found']['fifth'] - plain['screen']['fifth'])
    capsys.readouterr()


def test_another_checkpoint_in_the_same_place_is_measured_anew(runs, tmp_path, tiny, data, capsys):
    out = tmp_path / 'sweep.png'
    grid = ['--windows=1-2', '--methods=rk', '--K=2', '--batches=1', '--device=cpu', f'--out={out}']
    nanodepth('sweep', [runs[0], *grid])
    before = len(read(out.with_suffix('.jsonl')))
    write_run(tmp_path / 'run-0', tiny(7, vocab_size=257, context=64, n_layer=4), data)
    nanodepth('sweep', [runs[0], *grid])
    assert len(read(out.with_suffix('.jsonl'))) == 2 * before
    capsys.readouterr()


def test_by_token_tells_the_caches_apart(runs, tmp_path, capsys):
    out = tmp_path / 'sweep.png'
    nanodepth('sweep', [runs[0], '--windows=1-2', '--methods=naive', '--K=3',
                             '--cache=first,exact', '--by_token', '--batches=2',
                             '--device=cpu', f'--out={out}'])
    found = {entry['of']['cell']['cache']: entry['found']
             for entry in read(out.with_suffix('.jsonl'))
             if entry['of']['part'] == 'screen' and entry['of']['cell']
             and entry['of']['cell']['method'] == 'naive'}
    gap = {cache: abs(f['loss of it token by token'] - f['loss of the 2nd half'])
           for cache, f in found.items()}
    assert gap['exact'] < 1e-5 and gap['first'] > 1e-3
    capsys.readouterr()


def test_a_sweep_by_benchmarks_screens_one_half_and_judges_the_other(folders, tmp_path, capsys,
        monkeypatch):
    seen = []
    real = evaluate.harness
    monkeypatch.setattr(sweep, 'harness', lambda lm, tasks, *keep,
                        **options: seen.append(options.get('samples')) or real(lm, tasks, *keep,
            **options))
    out = tmp_path / 'sweep.png'
    nanodepth('sweep', [str(folders[1]), '--windows=0-1,1-2', '--methods=naive', '--K=2',
                             '--tasks=primitive_toy_copy', '--limit=6', '--best=1', '--device=cpu',
                             f'--out={out}'])
    halves = [samples['primitive_toy_copy'] for samples in seen if samples]
    assert halves[0] == [0, 2, 4, 6, 8, 10] and [1, 3, 5, 7, 9, 11] in halves
    text = capsys.readouterr().out
    assert ('hf: 2 cells searched' in text and 'screen: primitive_toy_copy acc' in text
            and 'judge: primitive_toy_copy acc' in text)


def test_judging_by_other_tasks_and_by_half_of_shared_ones(folders, tmp_path, capsys, monkeypatch):
    seen = []
    real = evaluate.harness
    monkeypatch.setattr(sweep, 'harness', lambda lm, tasks, *keep,
                        **options: seen.append(options.get('samples')) or real(lm, tasks, *keep,
            **options))
    for judge, documents in (('primitive_toy_assign_d1', [0, 1, 2, 3]),
                             ('primitive_toy_copy', [1, 3, 5, 7])):
        seen.clear()
        nanodepth('sweep', [str(folders[1]), '--windows=1-2', '--methods=naive', '--K=2',
                                 '--tasks=primitive_toy_copy', f'--judge_tasks={judge}',
                                 '--limit=4', '--best=1',
                    '--device=cpu', f'--out={tmp_path / judge}.png'])
        assert ({judge: documents} in seen
                and {'primitive_toy_copy': [0, 1, 2, 3] if judge != 'primitive_toy_copy'
                     else [0, 2, 4, 6]} in seen)
        assert f'judge: {judge} acc' in capsys.readouterr().out


def test_tasks_that_are_kept_score_as_fresh_ones(folders):
    lm, keep = evaluate.open_model(folders[1], device='cpu'), {}
    score = lambda *kept, **options: evaluate.harness(lm, TASKS, *kept, **options)['results']
    for options in (dict(limit=5),
                    dict(samples={'primitive_toy_copy': [3, 4, 9],
                                  'primitive_toy_assign_d1': [0, 2]}), dict(limit=5)):
        assert score(keep, **options) == score(**options)
    kept, = keep.values()
    score(keep, limit=2)
    assert list(keep.values()) == [kept]


def test_metrics_that_are_no_shares():
    assert sweep.main_kinds(['a acc', 'a acc_norm', 'b exact_match (strict)']) == ['a acc',
            'b exact_match (strict)']
    assert (sweep.main_kinds(['loss', 'copy', 'depth 0']) == ['loss']
            and sweep.main_kinds(['loss', 'copy', 'toy_copy'], ['toy_copy']) == ['toy_copy']
            and sweep.main_kinds(['loss', 'copy', 'toy_assign/4']) == ['toy_assign/4']
            and sweep.main_kinds(['toy_assign/1']) == ['toy_assign/1'])
    with pytest.raises(ValueError,
                       match='choose one of them by --score: a acc, b ppl .less is better.'):
        sweep.main_kinds(['a acc', 'b ppl (less is better)'])
    before = {'a acc': 0.5, 'b ter (strict) (less is better)': 3.0, 'loss': 2.0}
    after = {'a acc': 0.75, 'b ter (strict) (less is better)': 2.0, 'loss': 1.5}
    assert sweep.gains(before, after) == {'a acc': 0.25, 'b ter (strict) (less is better)': 1.0,
                                          'loss': 0.5}
    kinds = *before, 'depth 0', 'loss of it token by token'
    assert [sweep.in_percent(kind) for kind in kinds] == [True, False, False, True, False]


def test_the_same_weights_are_not_the_same_model_nor_the_same_data(tmp_path, tiny, data, capsys):
    import numpy as np

    from nanodepth.data.tokens import write_dataset
    weights = tiny(vocab_size=257, n_layer=4, context=64).state_dict()
    for name, fields in (('a', {}), ('b', dict(order=[0, 1, 2, 1, 2, 3])),
                         ('c', dict(ln_scaling=True))):
        model = tiny(vocab_size=257, n_layer=4, context=64, **fields)
        model.load_state_dict(weights)
        write_run(tmp_path / name, model, data)
    grid = ['--windows=0-1', '--methods=naive', '--K=2', '--batches=2', '--best=1', '--device=cpu',
            f'--out={tmp_path / "s.png"}']
    nanodepth('sweep', [*(str(tmp_path / name) for name in 'abc'), *grid])
    losses = [entry['found']['loss'] for entry in read(tmp_path / 's.jsonl') if entry['of']['part']
              == 'screen']
    # no loop, the cell and the recipe of three models
    assert len(losses) == len(set(losses)) == 3 * 3
    write_dataset(data, 'val', 'bytes', np.arange(800) % 50, marks=np.zeros(800, int),
                  kinds=['fifth'])
    nanodepth('sweep', [str(tmp_path / 'a'), *grid])
    # everything of the first model again
    assert len(read(tmp_path / 's.jsonl')) == 3 * 6 + 6
    capsys.readouterr()


def test_what_diverged_is_not_the_best(runs, tmp_path, capsys, monkeypatch):
    real = sweep.gains
    monkeypatch.setattr(sweep, 'gains', lambda plain,
                        found: {k: math.nan if len(made) == 1 and k == 'loss' else v
                                for k, v in real(plain, found).items() if made.append(k) or True})
    made = []
    nanodepth('sweep', [runs[0], '--windows=all2', '--methods=rk', '--K=2', '--batches=1',
                             '--best=2', '--device=cpu', f'--out={tmp_path / "s.png"}'])
    assert 'nan' not in capsys.readouterr().out


@pytest.mark.parametrize('args, message', [
    (['--score=los'], "--score='los' is not one of loss, fifth; did you mean 'loss'?"),
    (['--windows=3-7'], "within 0 to 3"), (['--K=two'], "--K=two must be a list"),
    (['--methods=rkk'], "did you mean 'rk'"),
    (['--mode=blok'], "did you mean 'block'"),
    (['--show=los'], "--show='los' is not one of"),
    (['--batches=0'], '--batches=0 must be at least 1'), (['--windows=all9'], 'write all1 to all4'),
    (['--methods=aitken', '--K=3'], 'nothing can be run: aitken with K = 3')])
def test_what_a_sweep_refuses(runs, tmp_path, capsys, args, message):
    with pytest.raises(SystemExit):
        nanodepth('sweep', [runs[0], '--windows=1-2', '--methods=rk', '--K=2', '--batches=1',
                                 '--device=cpu', f'--out={tmp_path / "s.png"}', *args])
    assert message in capsys.readouterr().err


def test_windows_and_cells():
    assert sweep.windows_of(('all2', 'mid2', '0-0'), 4) == ['0-1', '1-2', '2-3', '0-0']
    with pytest.raises(ValueError, match='write all1 to all4'):
        sweep.windows_of(['allx'], 4)
    assert len(sweep.windows_of(['all'], 4)) == 10 and sweep.windows_of(['all'], 4)[-1] == '0-3'
    asked = read_options(sweep.Sweep, [
        'run', '--windows=1-2', '--methods=rk,naive,aitken', '--K=2,3', '--beta=0.3,0.5',
        '--cache=first,last'])
    cells, impossible = sweep.cells_of(asked, 4)
    # beta is for rk alone
    assert (len(cells) == 2 * (2 * 2 + 2 + 1) and len(impossible) == 1
            and 'aitken with K = 3' in impossible[0])
    asked = read_options(sweep.Sweep, [
        'run', '--windows=1-2', '--methods=rk,naive,layer_anchored_frozen', '--K=6', '--beta=0.5',
        '--T=1,2'])
    cells, _ = sweep.cells_of(asked, 4)
    assert [(c.method, c.T, c.mode, c.cache) for c in cells] == [
        ('rk', 1, 'block', 'first'), ('rk', 2, 'block', 'first'), ('naive', None, 'block', 'first'),
        *[('layer_anchored_frozen', T, 'layer', 'natural') for T in (1, 2)]]
    cells = [cell._asdict() for cell in cells]
    assert [sweep.label(c, cells) for c in cells][1] == 'rk K=6 beta 0.5 T=2 block first'
    cost = lambda **cell: sweep.cost(sweep.Cell(**sweep.PAPER | dict(window='1-2') | cell), 4)
    assert cost(method='rk', K=3) == 2.0 and cost(method='heun', K=1, cache='last') == 2.0
    assert cost(method='rk', K=3, mode='layer') == 2.5          # the unlooped chain


def test_the_paired_tests_by_every_sign():
    "Against all signs tried one by one: right and wrong, and scores with grades."
    from itertools import product

    from nanodepth.report.tables import p_value
    assert p_value([1, 1, 1, 1, 1, 0, 0]) == pytest.approx(2 / 32) and p_value([0, 0]) == 1.0
    assert p_value([1, -1, 1, -1]) == 1.0 and p_value([]) is None
    assert p_value([1] * 9 + [-1]) == pytest.approx(2 * 11 / 1024)
    for changes in ([0.1, 0.2, 0.3, 0.4], [0.5, -0.1, 0.2, 0.2, 0.0, -0.2], [1, 1, -1, 2, 3, -3]):
        sizes = sorted(abs(c) for c in changes if c)
        rank = {s: sum(i for i, t in enumerate(sizes, 1) if t == s) / sizes.count(s) for s in sizes}
        statistic = lambda signed: sum(rank[abs(c)] for c in signed if c > 0)
        middle = sum(rank[s] for s in sizes) / 2
        far = abs(statistic(changes) - middle)
        every = [statistic([a * b for a, b in zip(signs, sizes)])
                 for signs in product((1, -1), repeat=len(sizes))]
        wanted = sum(abs(s - middle) >= far for s in every) / len(every)
        assert p_value(changes) == pytest.approx(wanted)


def test_none_is_a_word_where_it_is_one():
    from nanodepth.commands.export import Options as Export
    given = read_options(sweep.Sweep, ['run', '--cache=first,none'])
    assert given.cache == ('first', 'none')
    assert read_options(sweep.Options, ['run', '--cache=none', '--T=none']).cache == 'none'
    assert read_options(Export, ['run', 'out', '--cache=none']).cache == 'none'


@pytest.mark.parametrize('args, message', [
    (['run', '--data=x', '--limit=3'], '--limit is for --tasks'),
    (['run', '--data=x', '--dtype=bfloat16'], '--dtype is for --tasks')])
def test_options_without_effect_are_refused(args, message):
    with pytest.raises(Refused, match=message):
        sweep.main(args)
