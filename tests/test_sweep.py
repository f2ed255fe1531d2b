"Many ways of running: screened, judged on other data, beside what luck would find. No network."
import csv
import dataclasses
import json
import math
import re
from itertools import product

import pytest
import torch
import torch.nn as nn
from test_trust import refused

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import sweep
from nanodepth.common.errors import Refused
from nanodepth.common.options import read as read_options
from nanodepth.data.primitives import few_shot
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.data.tokens import Loader, measure
from nanodepth.engine import checkpoint, harness
from nanodepth.engine.examine import Examined
from nanodepth.engine.measure import Score, ask
from nanodepth.loop import running
from nanodepth.wrapper import looped

pytest.importorskip('lm_eval')
pytest.importorskip('accelerate')


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


GRID = ['--window=all2', '--method=naive,rk', '--K=2', '--batches=2', '--n=8',
        '--tasks=toy_assign/1', '--device=cpu']


@pytest.fixture
def runs(tmp_path, tiny, data):
    for seed in range(2):
        write_run(tmp_path / f'run-{seed}', tiny(seed, vocab_size=257, context=64, n_layer=4), data)
    return [str(tmp_path / f'run-{seed}') for seed in range(2)]


def read(out):
    "The finished cells beside a picture: each of what, and {measure: Score}."
    lines = [json.loads(line) for line in out.with_suffix('.jsonl').read_text().splitlines()
             if line.endswith('}')]
    return [dict(of=line['of'], found={kind: Score(*values) for kind, values
                                       in line['found'].items()}) for line in lines]


def test_a_stopped_sweep_goes_on_where_it_was(runs, tmp_path, capsys, monkeypatch):
    out, made = tmp_path / 'sweep.png', []
    real = Examined.scores

    def counted(self, way, part):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(sweep.PARTS[part])
        return real(self, way, part)
    monkeypatch.setattr(Examined, 'scores', counted)
    with pytest.raises(SystemExit):
        nanodepth('sweep', [*runs, *GRID, f'--out={out}'])
    assert len(read(out)) == 5
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
    assert ('run: 6 ways searched' in text and 'over 2 seeds' in text and '(the recipe)' in text
            and 'screen: gain in loss' in text and 'judge: gain in loss' in text)
    assert out.exists() and out.with_suffix('.csv').exists()
    made[:] = [None] * 6
    nanodepth('sweep', [*runs, *GRID, f'--out={out}'])
    assert made[6:] == []                                       # all is known
    assert capsys.readouterr().out == text


def test_cells_are_what_they_say_and_judged_on_other_data(runs, tmp_path, capsys):
    out = tmp_path / 'sweep.png'
    nanodepth('sweep', [runs[0], *GRID, f'--out={out}'])
    plain = {entry['of']['part']: entry['found'] for entry in read(out)
             if entry['of']['way'] == 'as it is'}
    config = checkpoint.load(runs[0])['config']
    val = Loader(config['data'], 4, 16, split='val', seed=0)
    model = checkpoint.load_model(runs[0])
    for first, part in ((0, 'screen'), (2, 'judge')):
        loss, kinds = measure(model, val, 2, first=first)
        examples = few_shot('toy_assign', 8, shots=0, depth=1, seed=first // 2)
        answers = ask(model, get_tokenizer('bytes'), examples)
        assert {kind: score.mean for kind, score in plain[part].items()} == {
            'loss': loss, 'fifth': kinds['fifth']['accuracy'], 'toy_assign/1': answers.accuracy}
    assert plain['screen']['loss'].mean != plain['judge']['loss'].mean
    way = '--window=1-2 --method=naive --K=2'
    cell = next(entry['found'] for entry in read(out) if entry['of']['way'] == way)
    with looped(model, (1, 2), 'naive', 2):
        loss, kinds = measure(model, val, 2)
    assert (cell['loss'].mean, cell['fifth'].mean) == (loss, kinds['fifth']['accuracy'])
    row = next(r for r in csv.DictReader(open(out.with_suffix('.csv')))
               if (r['way'], r['part']) == (way, 'screen'))
    # a gain: for a loss, down
    assert float(row['loss']) == pytest.approx(plain['screen']['loss'].mean - loss)
    assert float(row['fifth']) == pytest.approx(cell['fifth'].mean - plain['screen']['fifth'].mean)
    capsys.readouterr()


def test_blocks_are_repeated_wherever_they_fit(runs, tmp_path, capsys):
    out = tmp_path / 'blocks.png'
    nanodepth('sweep', [*runs, '--blocks=1,2', '--times=2,3', '--batches=1', '--device=cpu',
                        f'--out={out}'])
    cells = {entry['of']['way']: entry['found'] for entry in read(out)[1:1 + 2 * (4 + 3)]}
    assert len(cells) == 2 * (4 + 3)
    model = checkpoint.load_model(runs[0])
    val = Loader(checkpoint.load(runs[0])['config']['data'], 4, 16, split='val', seed=0)
    with running(model, [0, 1, 2, 1, 2, 1, 2, 3]):
        assert cells['--loop=1-2x3-1']['loss'].mean == measure(model, val, 1)[0]
    said = capsys.readouterr().out
    assert '14 ways searched' in said and 'recipe' not in said
    assert out.stat().st_size > 10_000


def test_luck_is_what_the_best_of_as_many_tries_finds():
    "Against every exchange of four questions, tried one by one."
    changes = [[[1, 1, 0, -1]], [[0, 1, 1, 1]]]
    best = [max(sum(s * c for s, c in zip(signs, lists[0])) / 4 for lists in changes)
            for signs in product((1, -1), repeat=4)]
    said = sweep.luck(changes, True, draws=40_000)
    mean, share = map(float, re.search(r'would gain (\S+), and as much or more in (\S+)%',
                                       said).groups())
    assert 'the best of 2 gains 75.0' in said
    assert mean == pytest.approx(100 * sum(best) / 16, abs=0.5)
    assert share == pytest.approx(100 * sum(b >= 0.75 for b in best) / 16, abs=1)
    assert sweep.luck([[[]]], False) == ''
    diverged = sweep.luck([*changes, [[math.nan] * 4]], True, draws=40_000)
    assert diverged == said                     # what diverged is no try


def test_one_batch_is_too_few_for_two_parts(runs, capsys):
    state = checkpoint.load(runs[0])
    state['config']['batch_size'] = 40
    checkpoint.save(runs[0], **state)
    assert 'fill one batch, of 40 rows of 16 tokens' in refused(capsys, 'sweep', runs[0],
                                                                '--device=cpu')


def test_another_checkpoint_in_the_same_place_is_measured_anew(runs, tmp_path, tiny, data, capsys):
    out = tmp_path / 'sweep.png'
    grid = ['--window=1-2', '--method=rk', '--K=2', '--batches=1', '--device=cpu', f'--out={out}']
    nanodepth('sweep', [runs[0], *grid])
    before = len(read(out))
    write_run(tmp_path / 'run-0', tiny(7, vocab_size=257, context=64, n_layer=4), data)
    nanodepth('sweep', [runs[0], *grid])
    assert len(read(out)) == 2 * before
    capsys.readouterr()


def test_by_token_tells_the_caches_apart(runs, tmp_path, capsys):
    out = tmp_path / 'sweep.png'
    nanodepth('sweep', [runs[0], '--window=1-2', '--method=naive', '--K=3',
                             '--cache=first,exact', '--measures=loss,by_token', '--batches=2',
                             '--device=cpu', f'--out={out}'])
    found = {entry['of']['way'].partition('--cache=')[2]: entry['found'] for entry in read(out)
             if entry['of']['part'] == 'screen'}
    gap = {cache: abs(f['loss of it token by token'].mean - f['loss of the 2nd half'].mean)
           for cache, f in found.items()}
    assert gap['exact'] < 1e-5 and gap['first'] > 1e-3
    capsys.readouterr()


def watched(monkeypatch):
    "The documents that lm-eval is asked for, call by call."
    seen = []
    real = harness.evaluate

    def evaluate(lm, tasks, keep, **options):
        seen.append(options.get('samples'))
        return real(lm, tasks, keep, **options)
    monkeypatch.setattr(harness, 'evaluate', evaluate)
    return seen


def test_a_sweep_by_benchmarks_screens_one_half_and_judges_the_other(folders, tmp_path, capsys,
                                                                     monkeypatch):
    seen = watched(monkeypatch)
    nanodepth('sweep', [str(folders[1]), '--window=0-1,1-2', '--method=naive', '--K=2',
                        '--tasks=primitive_toy_copy', '--limit=6', '--best=1', '--device=cpu',
                        f'--out={tmp_path / "sweep.png"}'])
    halves = [samples['primitive_toy_copy'] for samples in seen if samples]
    assert halves[0] == [0, 2, 4, 6, 8, 10] and [1, 3, 5, 7, 9, 11] in halves
    text = capsys.readouterr().out
    assert ('hf: 2 ways searched' in text and 'screen: gain in primitive_toy_copy acc' in text
            and 'judge: gain in primitive_toy_copy acc' in text and 'with shuffled answers' in text)


def test_judging_by_other_tasks_and_by_half_of_shared_ones(folders, tmp_path, capsys, monkeypatch):
    seen = watched(monkeypatch)
    for judge, documents in (('primitive_toy_assign_d1', [0, 1, 2, 3]),
                             ('primitive_toy_copy', [1, 3, 5, 7])):
        seen.clear()
        nanodepth('sweep', [str(folders[1]), '--window=1-2', '--method=naive', '--K=2',
                            '--tasks=primitive_toy_copy', f'--judge_tasks={judge}', '--limit=4',
                            '--best=1', '--device=cpu', f'--out={tmp_path / judge}.png'])
        assert ({judge: documents} in seen
                and {'primitive_toy_copy': [0, 1, 2, 3] if judge != 'primitive_toy_copy'
                     else [0, 2, 4, 6]} in seen)
        assert f'judge: gain in {judge} acc' in capsys.readouterr().out


def test_metrics_that_are_no_shares():
    assert sweep.main_kinds(['a acc', 'a acc_norm', 'b exact_match (strict)'], 'a,b') == [
        'a acc', 'b exact_match (strict)']
    assert (sweep.main_kinds(['loss', 'copy', 'depth 0'], '') == ['loss']
            and sweep.main_kinds(['loss', 'copy', 'toy_copy'], 'toy_copy') == ['toy_copy']
            and sweep.main_kinds(['loss', 'toy_assign/4', 'a acc'], 'toy_assign/4,a') == [
                'toy_assign/4', 'a acc'])
    with pytest.raises(ValueError,
                       match='choose one of them by --score: a acc, b ppl .less is better.'):
        sweep.main_kinds(['a acc', 'b ppl (less is better)'], 'a,b')
    means = {'a acc': ('share', 0.5, 0.75, 0.25), 'loss': ('nats', 2.0, 1.5, 0.5),
             'entropy': ('nats', 2.0, 2.5, -0.5),
             'c bleu (more is better)': ('score', 1.0, 3.0, 2.0),
             'b ter (strict) (less is better)': ('score', 3.0, 2.0, 1.0)}
    for name, (kind, before, after, better) in means.items():
        assert sweep.gain(name, *(Score(kind, mean, None, []) for mean in (before, after)))[:2] == (
            kind, better)


def test_the_same_weights_are_not_the_same_model_nor_the_same_data(tmp_path, tiny, data, capsys):
    import numpy as np

    from nanodepth.data.tokens import write_dataset
    weights = tiny(vocab_size=257, n_layer=4, context=64).state_dict()
    for name, fields in (('a', {}), ('b', dict(order=[0, 1, 2, 1, 2, 3])),
                         ('c', dict(ln_scaling=True))):
        model = tiny(vocab_size=257, n_layer=4, context=64, **fields)
        model.load_state_dict(weights)
        write_run(tmp_path / name, model, data)
    grid = ['--window=0-1', '--method=naive', '--K=2', '--batches=2', '--best=1', '--device=cpu',
            f'--out={tmp_path / "s.png"}']
    nanodepth('sweep', [*(str(tmp_path / name) for name in 'abc'), *grid])
    losses = [entry['found']['loss'].mean for entry in read(tmp_path / 's.png')
              if entry['of']['part'] == 'screen']
    # no loop, the cell and the recipe of three models
    assert len(losses) == len(set(losses)) == 3 * 3
    write_dataset(data, 'val', 'bytes', np.arange(800) % 50, marks=np.zeros(800, int),
                  kinds=['fifth'])
    nanodepth('sweep', [str(tmp_path / 'a'), *grid])
    # everything of the first model again
    assert len(read(tmp_path / 's.png')) == 3 * 6 + 6
    capsys.readouterr()


def test_what_diverged_is_not_the_best(runs, tmp_path, capsys, monkeypatch):
    real = sweep.gain
    monkeypatch.setattr(sweep, 'gain', lambda kind, plain, score: real(kind, plain, score)._replace(
        mean=math.nan) if kind == 'loss' and not made.append(kind) and len(made) == 1
        else real(kind, plain, score))
    made = []
    nanodepth('sweep', [runs[0], '--window=all2', '--method=rk', '--K=2', '--batches=1',
                        '--best=2', '--device=cpu', f'--out={tmp_path / "s.png"}'])
    assert '| nan' not in capsys.readouterr().out


@pytest.mark.parametrize('args, message', [
    (['--score=los'], "--score='los' is not one of loss, fifth; did you mean 'loss'?"),
    (['--window=3-7'], "within 0 to 3"), (['--K=two'], "--K=two must be a list"),
    (['--method=rkk'], "did you mean 'rk'"),
    (['--mode=blok'], "did you mean 'block'"),
    (['--show=los'], "--show='los' is not one of"),
    (['--batches=0'], '--batches=0 must be at least 1'), (['--window=all9'], 'write all1 to all4'),
    (['--method=aitken', '--K=3'], 'nothing can be run: aitken with K = 3'),
    (['--method=naive', '--T=2'], "the method 'naive' has no option 'T'"),
    (['--judge_tasks=toy_copy'], '--judge_tasks is what the best are judged by'),
    (['--blocks=5'], '--blocks=5: the model is 4 layers deep')])
def test_what_a_sweep_refuses(runs, tmp_path, capsys, args, message):
    with pytest.raises(SystemExit):
        nanodepth('sweep', [runs[0], '--window=1-2', '--method=rk', '--K=2', '--batches=1',
                                 '--device=cpu', f'--out={tmp_path / "s.png"}', *args])
    assert message in capsys.readouterr().err


def test_windows_and_cells():
    assert sweep.windows_of(('all2', 'mid2', '0-0'), 4) == ['0-1', '1-2', '2-3', '0-0']
    with pytest.raises(ValueError, match='write all1 to all4'):
        sweep.windows_of(['allx'], 4)
    assert len(sweep.windows_of(['all'], 4)) == 10 and sweep.windows_of(['all'], 4)[-1] == '0-3'
    asked = read_options(sweep.Options, [
        'run', '--window=1-2', '--method=rk,naive,aitken', '--K=2,3', '--beta=0.3,0.5',
        '--cache=first,last'])
    ways, impossible = sweep.ways_of(asked, [0, 1, 2, 3])
    # beta is for rk alone
    assert (len(ways) == 2 * (2 * 2 + 2 + 1) and len(impossible) == 1
            and 'aitken with K = 3' in impossible[0])
    asked = read_options(sweep.Options, ['run', '--window=mid2', '--method=rk,naive', '--K=6',
                                         '--T=1,2'])
    ways, _ = sweep.ways_of(asked, [0, 1, 2, 3])
    assert [(str(way), window, row) for way, window, row in ways] == [
        (f'--window=1-2 {row}', '1-2', row) for row in (
            '--method=rk --K=6 --T=1', '--method=rk --K=6 --T=2', '--method=naive --K=6')]
    asked = read_options(sweep.Options, ['run', '--blocks=2,3', '--times=4'])
    ways, _ = sweep.ways_of(asked, [0, 1, 0, 1])        # of a looped model, its own order's
    assert [(way.loop, window, row) for way, window, row in ways] == [
        ([0, 1] * 4 + [0, 1], '0-1', '4 times'), ([0] + [1, 0] * 4 + [1], '1-2', '4 times'),
        ([0, 1] + [0, 1] * 4, '2-3', '4 times'), ([0, 1, 0] * 4 + [1], '0-2', '4 times'),
        ([0] + [1, 0, 1] * 4, '1-3', '4 times')]


def test_the_paired_tests_by_every_sign():
    "Against all signs tried one by one: right and wrong, and scores with grades."
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


def test_without_scipy_a_loss_has_no_p_and_answers_have_one(monkeypatch):
    import sys

    from nanodepth.report.tables import p_value
    monkeypatch.setitem(sys.modules, 'scipy', None)
    assert p_value([0.1, 0.2]) is None and p_value([1, 1, -1, 1]) == 0.625


def test_none_is_a_word_where_it_is_one():
    from nanodepth.commands.evaluate import Options as Evaluate
    given = read_options(sweep.Options, ['run', '--cache=first,none'])
    assert given.cache == ('first', 'none')
    assert read_options(Evaluate, ['run', '--cache=none']).cache == ('none',)
