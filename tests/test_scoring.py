"""Scoring: one way of running, one score, one order of asking.

Promised: a way of running does what it says on every kind of model, costs what it says and is
undone; answers are scored as an option at a time would be, and what is not a number is no score;
lm-eval's own `hf` gives our scores on our exports; a change has the error of pairs; a sweep screens
on one half, judges on the other, and says what luck finds; a stopped command goes on, and another
model is measured anew.
"""
import json
import math
import os
import re
import runpy
import shutil
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import nanodepth as package
from docs.results.check import read_rows
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from conftest import asked_of, logits, refused, ROOT, save_run, write_noise
from families import tiny as family

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import evaluate, sweep
from nanodepth.common.errors import Refused
from nanodepth.common.whose import is_ours
from nanodepth import wrapped
from nanodepth.model import Span
from nanodepth.models import checkpoint
from nanodepth.models.hf import as_theirs, Hooked
from nanodepth.report.tables import named_after, where
from nanodepth.retrofit import surgery
from nanodepth.scoring import (likelihoods, lm_eval_scores as harness, rows as rows_file,
                               scores as scoring)
from nanodepth.scoring.rows import Asked, facts, Subject
from nanodepth.scoring.scores import ask, half, log_likelihoods, parse_tasks, Score
from nanodepth.scoring.way import notation, read_ways, Way, Ways
from nanodepth.text.primitives import Example, few_shot
from nanodepth.text.tokenizer import get_tokenizer, keep_tokenizer, write_tokenizer
from nanodepth.text.tokens import write_dataset
from nanodepth.common.options import read
from nanodepth.training.loader import Loader
from nanodepth.wrapper import Window

lm_eval = pytest.importorskip('lm_eval')
from lm_eval.models.huggingface import HFLM
from nanodepth.scoring.lm_eval_model import ScoredModel as Model
sys.path.insert(0, str(ROOT / 'data/evals'))
import tasks

TOKENS = torch.arange(24).view(2, 12)
BYTES = get_tokenizer('bytes')


def written(command, out, *argv):
    "The rows that a command writes beside a picture, or as CSV."
    nanodepth(command, [*map(str, argv), '--device=cpu', f'--out={out}'])
    return read_rows(out.with_suffix('.csv'))


def test_each_kind_of_model_runs_in_its_ways_and_is_restored(tiny):
    ours = tiny(n_layer=4)
    core, five = (surgery(tiny(n_layer=5), '1-2-2', r=r) for r in (2, 5))
    nested = surgery(tiny(n_layer=5), '1-2-2')
    nested.order = [0, Span(nested.order[1:])]
    theirs, alibi = family('gemma3_text'), family('bloom')
    book = tiny(n_layer=4, order=[0, Window([1, 2], K=3), 3])
    within = tiny(n_layer=4, order=[0, Window([Window([1], K=3), 2], K=2), 3])
    for model, way, by_hand, cost in (
            (alibi, Way(window='2-3', solver='naive', K=3), lambda: in_window(alibi, (2, 3)), 10),
            (book, Way(), lambda: in_window(ours, (1, 2), 'rk'), 8),
            (within, Way(), lambda: logits(within, TOKENS), 1 + 2 * (3 + 1) + 1),
            (ours, Way(), lambda: logits(ours, TOKENS), 4),
            (ours, Way(loop='1-2x3-1'), lambda: ours(TOKENS, order=[0, 1, 2, 1, 2, 1, 2, 3]), 8),
            (ours, Way(loop=[3, 0, 0]), lambda: ours(TOKENS, order=[3, 0, 0]), 3),
            (core, Way(r=5), lambda: logits(five, TOKENS), 1 + 2 * 5 + 2),
            (nested, Way(r=5), lambda: logits(five, TOKENS), 1 + 2 * 5 + 2),
            (theirs, Way(window='2-3', K=2, mode='layer'), lambda: in_window(
                theirs, (2, 3), 'rk', 2, mode='layer'), 8),
            (ours, Way(window='1-2', solver='naive', K=3), lambda: in_window(ours, (1, 2)), 8)):
        before = logits(model, TOKENS)
        with way.apply(model):
            inside = logits(model, TOKENS)
        assert torch.equal(inside, by_hand()), str(way)
        assert torch.equal(logits(model, TOKENS), before), str(way)
        assert way.cost(model) == cost, str(way)
    for model, way, message in ((core, Way(loop='2x2'), 'a recurrent core is run more often by r'),
                                (ours, Way(r=2), 'is for models with a recurrent core'),
                                (theirs, Way(loop='2-2x3-2'), 'run in their own order')):
        with pytest.raises(Refused, match=message):
            way.apply(model)


def in_window(model, window, solver='naive', K=3, **how):
    with wrapped(model, window, solver, K, **how):
        return logits(model, TOKENS)


def test_options_become_ways_as_users_type_them():
    given = lambda *argv: [str(way) for way in read_ways(read(Ways, argv))]
    assert given() == [] and str(Way()) == 'as it is'
    assert given('--loop=2x2,1-2x3-1') == ['--loop=2x2', '--loop=1-2x3-1']
    assert given('--r=1,2,4') == ['--r=1', '--r=2', '--r=4']
    assert given('--window=mid4,0.5', '--K=2', '--T=1.5') == [
        '--window=mid4 --K=2 --T=1.5', '--window=0.5 --K=2 --T=1.5']
    assert given('--window=mid4', '--K=3', '--beta=0.3', '--decode=bypass') == [
        '--window=mid4 --K=3 --beta=0.3 --decode=bypass']
    assert given('--solver=heavy_ball', '--K=2', '--alpha=0.4') == [
        '--solver=heavy_ball --K=2 --alpha=0.4']
    assert given('--solver=anderson', '--m=1,2', '--pin=true') == [
        '--solver=anderson --m=1 --pin=True', '--solver=anderson --m=2 --pin=True']
    # named twice, it is one way: else its rows would be taken for those of two seeds
    assert given('--window=mid4', '--K=2,2', '--T=1,1.0') == ['--window=mid4 --K=2 --T=1']
    orders = [list(o) for n in (1, 2, 3) for o in product(range(4), repeat=n)]
    assert len({*map(notation, orders)}) == len(orders)      # each has a name of its own


def test_answers_and_their_interval_by_hand(monkeypatch):
    values = [torch.tensor([-1.0, -2.0]).double(), torch.tensor([-3.0, -5.0]).double()]
    monkeypatch.setattr('nanodepth.scoring.scores.log_likelihoods', lambda *_: values)
    first, second = Example('', ('a', 'b'), 0), Example('', ('a', 'b'), 1)
    assert ask(None, None, [first, second]) == Score('share', 0.5, 0.5, [1, 0], 0.5)
    values[0][1] = math.nan         # one that is not known makes the whole unknown
    assert math.isnan(ask(None, None, [first, second]).mean)


@pytest.fixture
def run(tmp_path, tiny):
    "A looped run of ours, and the same as a Hugging Face folder."
    model = tiny(vocab_size=257, context=96, n_layer=3, order=[0, 1, 1, 2])
    ours = tmp_path / 'ours'
    save_run(ours, model)
    nanodepth('export', [str(ours), str(tmp_path / 'hf')])
    return ours, tmp_path / 'hf'


def scored(model, manager, tasks):
    return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0)


LOCAL = ['local_choice', 'local_text', 'local_rolling']


def test_an_export_scores_as_lm_evals_own_model(run, manager):
    expected = scored(HFLM(str(run[1]), device='cpu', batch_size=4), manager, LOCAL)
    for path in run:            # our checkpoint with its loop, and the folder it was exported to
        subject = Subject(path, Asked(tasks='svamp', device='cpu'))
        lm = Model(subject.answer, as_theirs(subject.model), subject.harness.tokenizer, str(path))
        results = scored(lm, manager, LOCAL)
        for task in LOCAL:
            for a, b in zip(results['samples'][task], expected['samples'][task]):
                assert a['doc'] == b['doc']
                if task == 'local_text':
                    assert a['resps'] == b['resps']
                else:           # log-likelihoods, and of a choice whether it is greedy: 0 or 1
                    assert np.array(a['resps'], float) == pytest.approx(
                        np.array(b['resps'], float), rel=1e-4)
    subject.model.head.register_forward_hook(lambda module, x, y: y * float('nan'))
    with pytest.raises(Refused, match='logits that are not numbers'):
        scored(lm, manager, ['local_choice'])


def test_the_tokenizer_is_opened_as_transformers_opens_it_beside_its_model(run, tmp_path):
    "Of Mistral, unlike of others, the class that tokenizer_config.json names is not made anew."
    from tokenizers import Tokenizer, models, normalizers
    folder = shutil.copytree(run[1], tmp_path / 'mistral')
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | dict(model_type='mistral')))
    words = ['<unk>', '<s>', '</s>', '▁', '[', 'a']
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token='<unk>'))
    made.normalizer = normalizers.Prepend('▁')
    made.add_special_tokens(words[:3])
    made.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps(dict(
        tokenizer_class='LlamaTokenizer', bos_token='<s>', eos_token='</s>', unk_token='<unk>',
        legacy=False)))
    tokenizer = Subject(folder, Asked(tasks='svamp', device='cpu')).harness.tokenizer
    for opened in (tokenizer, AutoTokenizer.from_pretrained(folder)):
        assert opened('<s>[a', add_special_tokens=False)['input_ids'] == [1, 3, 4, 5]


def test_chat_templates_are_those_of_the_checkpoint(run, manager, monkeypatch):
    monkeypatch.setattr(harness, 'manager', lambda everything: manager)
    about = json.loads((run[1] / 'tokenizer_config.json').read_text())
    about['chat_template'] = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% "
        "if add_generation_prompt %}<assistant>{% endif %}")
    (run[1] / 'tokenizer_config.json').write_text(json.dumps(about))
    plain, chat = (asked_of(Subject(run[1], Asked(tasks='local_other', chat=on, device='cpu')))
                   for on in (False, True))
    assert plain['local_other acc'].answers != chat['local_other acc'].answers


def test_the_authors_form_of_gsm8k(tmp_path):
    "One fixed shot, their words, and the last number of what is said."
    [shot] = tasks.fifteen_trees()
    assert '15 trees' in shot['question'] and shot['target'].endswith('6.')
    asked = dict(question='How many?', answer='x #### 1,250')
    (tmp_path / 'test.json').write_text(json.dumps(asked))
    (tmp_path / 'local.yaml').write_text(
        f'include: {ROOT}/data/evals/gsm8k_cot_sean.yaml\ntask: local\ndataset_path: json\n'
        f'dataset_name: null\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/test.json\n')
    task = lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False).load(
        ['local'])['tasks']['local']
    doc = task.test_docs()[0]
    prompt = task.fewshot_context(doc, 1)
    assert prompt.startswith(f"Q: {shot['question']}\nA: Let's think step by step.")
    assert prompt.endswith("Q: How many?\nA: Let's think step by step.")
    assert task.doc_to_target(doc) == '1,250'
    task.build_all_requests(limit=1)
    [instance] = task.instances
    instance.resps = ['3 and 2 make 5. So it is 1250.']
    task.apply_filters()
    last = instance.filtered_resps['flexible-extract']
    assert task.process_results(doc, [last])['exact_match'] == 1.0


def test_a_list_with_shots_keeps_the_tasks_own_questions(run, monkeypatch, manager):
    "The harness takes a dict of name and shots for a task of its own making, without any."
    seen = {}

    def simple_evaluate(model, tasks, task_manager, **_):
        seen.update(task_manager.load(tasks)['tasks'])
    monkeypatch.setattr(lm_eval, 'simple_evaluate', simple_evaluate)
    monkeypatch.setattr(harness, 'manager', lambda everything: manager)
    monkeypatch.setitem(harness.LISTS, 'two', [('local_choice', 2, None),
                                               ('local_other', None, None)])
    harness.evaluate(None, ['two'], {})
    assert seen['local_choice'].config.num_fewshot == 2 and seen['local_choice'].config.doc_to_text
    assert not seen['local_other'].config.num_fewshot
    subject = Subject(run[1], Asked(tasks='svamp', shots=(0,), device='cpu'))
    harness.evaluate(None, ['two'], {}, subject.harness.shots)
    assert seen['local_choice'].config.num_fewshot == 0     # none, and not as many as a task has


@pytest.mark.parametrize('said, right, value', [
    ('The Eiffel Tower!', ['eiffel tower'], 1), ('', ['one'], 0), ('the', ['a'], 1),
    ('in Paris France', ['Paris', 'Lyon France'], 1 / 2),      # 1 of 3 words, 1 of 1: 2/4
    ('red red blue', ['red green'], 2 / 5)])                   # a word counts as often as in both
def test_f1_of_words_by_hand(said, right, value):
    for doc in (dict(answer=right), dict(answers=right), dict(answer=dict(aliases=right))):
        assert tasks.f1(doc, [said])['f1'] == pytest.approx(value)


def test_the_mean_of_a_list_is_over_the_metrics_that_count(monkeypatch):
    monkeypatch.setitem(harness.LISTS, 'two', [('a', 0, 'acc_norm'), ('ab', 0, None)])
    score = lambda value, kind='share': Score(kind, value, 0.03, [1, 0])
    scores = {'a acc': score(0.1), 'a acc_norm': score(0.5), 'ab acc': score(0.7),
              'ab perplexity': score(9.0, 'less')}
    means = harness.means_of(scores, ['two', 'a'])
    assert [*means] == ['mean of two'] and means['mean of two'].mean == pytest.approx(0.6)
    assert means['mean of two'].error == pytest.approx(0.03 / math.sqrt(2))
    assert not harness.means_of({'a acc_norm': score(0.5)}, ['two'])


def test_a_metric_is_a_share_by_its_own_documents_and_that_of_a_group_by_its_tasks():
    "SQuAD's F1 is of a hundred, and no number of one document; DROP's has the same name."
    samples = dict(squad=[['a'], ['b']], drop=[0.0, 1.0], coqa=[1.0])
    scores = harness.scores_of(dict(
        results={task: {'f1,none': 0.5} for task in (*samples, 'both', 'shares')},
        samples={task: [dict(doc_id=i, filter=how, f1=value) for i, value in enumerate(values)
                        for how, value in (('none', value), ('other', 5))]
                 for task, values in samples.items()},
        higher_is_better={}, group_subtasks=dict(both=['squad', 'drop'], shares=['drop', 'coqa'])))
    assert [score.kind for score in scores.values()] == ['score', *['share'] * 2, 'score', 'share']


def test_the_command(run, tmp_path, manager, monkeypatch, capsys):
    "Models times ways: what lm-eval says, what our own scorer says, and how a way differs."
    monkeypatch.setattr(harness, 'manager', lambda everything: manager)
    rows = {(row['run'], row['way'], row['measure']): row for row in written(
        'evaluate', tmp_path / 'e.csv', *run, '--tasks=local_choice,toy_assign/0-1',
        '--limit=10', '--n=20', '--window=1-2', '--solver=naive', '--K=1,3')}
    said = capsys.readouterr().out
    assert 'toy_assign/1, % of 20 (chance 25%)' in said
    assert 'local_choice acc, % of 10' in said and 'in (): one standard error' in said
    assert len(rows) == 2 * 3 * 3
    for (name, *asked), row in rows.items():        # through transformers as through our own
        other = rows['hf', *asked]
        assert all(row[key] == other[key] for key in ('mean', 'error', 'change', 'p'))
        if '--K=1' in row['way']:       # one evaluation changes nothing
            assert row['change'] == row['change_error'] == 0
    model, way = checkpoint.load_model(run[0]), Way(window='1-2', solver='naive', K=3)
    examples = few_shot('toy_assign', 20, shots=0, depth=1)
    plain = ask(model, BYTES, examples)
    with way.apply(model):
        looped = ask(model, BYTES, examples)
    change, row = scoring.compared(plain, looped), rows['ours', str(way), 'toy_assign/1']
    assert [float(row[key]) for key in ('mean', 'change', 'change_error', 'p')] == [
        looped.mean, *change[:3]]


def test_a_stopped_evaluation_goes_on_and_another_model_is_measured_anew(run, tmp_path, tiny,
                                                                        monkeypatch):
    measured = []

    def on_tasks(subject):
        measured.append(str(subject.way))
        if len(measured) == 3:
            raise KeyboardInterrupt
        return rows_file.on_tasks(subject)
    monkeypatch.setitem(rows_file.MEASURES, 'tasks', on_tasks)

    def evaluated():
        measured.clear()
        nanodepth('evaluate', [str(run[0]), '--tasks=toy_copy', '--n=8', '--device=cpu',
                               '--loop=1-1x2-1,1-1x3-1', f'--out={tmp_path / "e.csv"}'])
        return (tmp_path / 'e.csv').read_text()
    with pytest.raises(SystemExit):
        evaluated()
    with open(tmp_path / 'e.jsonl', 'a') as file:
        file.write('{"mark": "')           # it was being written when it was killed
    said = evaluated()
    assert measured == ['--loop=1-1x3-1'] and len(said.splitlines()) == 4
    assert evaluated() == said and measured == []       # all is known
    save_run(run[0], tiny(7, vocab_size=257, context=96, n_layer=3))
    with pytest.raises(SystemExit):
        evaluated()
    assert measured == ['as it is', '--loop=1-1x2-1', '--loop=1-1x3-1']


def test_a_note_is_on_the_disk_before_the_next_measure(run, data, tmp_path, monkeypatch):
    notes, there = tmp_path / 'notes.jsonl', []
    notes.write_text('{"ma')            # of a call that was killed there
    assert rows_file.notes_beside(tmp_path / 'notes.csv') == notes
    monkeypatch.setitem(rows_file.MEASURES, 'later', lambda subject: (
        there.append(notes.read_text().count('{"mark"')), [({}, dict(later=0.0))])[1])
    asked = rows_file.Asked(measures=('loss', 'later'), data=str(data), device='cpu')
    Subject(run[1], asked).noted([Way()], notes)
    assert there[0] > 0


def test_a_note_is_of_all_that_decides_a_measure(run, tmp_path, data, monkeypatch):
    "What was asked, a checkpoint's files, the data, and code: ours, yours, and that of Spans."
    def mark(path=run[1], **asked):
        asked = dict(models=[], data=str(data), device='cpu') | asked
        return Subject(path, evaluate.Options(**asked)).mark()

    def edit(file, *texts, **asked):
        file.parent.mkdir(parents=True, exist_ok=True)
        for text in texts:
            file.write_text(text)
            marks.append(mark(**asked))
    copying = dict(tasks='toy_copy', n=5)
    marks = [mark(), mark(run[0]), mark(batches=3), mark(dtype='bfloat16'), *(
        mark(**copying | more) for more in (dict(), dict(n=6), dict(seed=1), dict(shots=(1,))))]
    assert marks[:2] == [mark(), mark(f'{run[0]}/ckpt.pt')]
    for folder, weights in zip(run, ('ckpt.pt', 'model.safetensors')):
        edit(folder / 'chat_template.jinja', 'y', 'zz', path=folder)
        os.utime(folder / weights, ns=(0, 0))       # other weights of the same size
        marks.append(mark(folder))
    for folder in 'st':             # as from one archive: equal names, sizes and times
        shutil.copytree(run[0], tmp_path / folder)
        marks.append(mark(tmp_path / folder))
    for name in 'ab':
        shutil.copytree(data, tmp_path / 'mix' / name)
    edit(tmp_path / 'mix/mixture.json', '{"a": 0.9, "b": 0.1}', '{"a": 0.1, "b": 0.9}',
         data=str(tmp_path / 'mix'))
    edit(data / 'val.json', (data / 'val.json').read_text().replace('"fifth"', '"other"'))
    monkeypatch.setattr(package, '__file__', str(tmp_path / 'package/__init__.py'))
    monkeypatch.setattr(package, 'ROOT', tmp_path / 'book')
    monkeypatch.setattr(rows_file, 'EVALS', tmp_path / 'evals')
    helper = SimpleNamespace(__file__=str(tmp_path / 'mine/helper.py'))
    monkeypatch.setitem(sys.modules, 'helper', helper)      # of a measure of one's own
    for file in ('package/wrapping/solvers.py', 'book/training/plan.py', 'evals/_included',
                 'mine/helper.py'):
        edit(tmp_path / file, 'x = 1', 'x = 10')
    for version in '12':
        monkeypatch.setattr(rows_file, 'distributions', lambda: [
            SimpleNamespace(name='lm_eval', version=version)])
        marks.append(mark())
    monkeypatch.setattr(rows_file, 'BEGAN', 1)      # another process: code has been edited since
    assert len({*marks, mark()}) == len(marks) + 1 == 30


def test_all_models_get_rows_of_one_size(run, tmp_path, tiny, data, capsys):
    for name, size in dict(a=16, b=32).items():
        save_run(tmp_path / name, tiny(vocab_size=257, context=96),
                 config=dict(data=str(data), batch_size=size // 4, context=size))
    assert 'so that both answer the same' in refused(
        capsys, 'evaluate', tmp_path / 'a', tmp_path / 'b', '--batches=1', '--device=cpu',
        f'--out={tmp_path}/x.png')
    asked = Asked(data=str(data), device='cpu')
    first = Subject(tmp_path / 'a', asked)
    for path in (tmp_path / 'b', run[1]):
        other = Subject(path, asked, like=first)
        assert other.data() == first.data() == f'4 rows of 16 tokens a batch, 100% {data}'
    size = Subject(run[1], asked).data()
    assert size == Subject(tmp_path / 'b', asked, like=Subject(run[1], asked)).data()


def test_a_run_and_its_export_have_one_loss(run, data):
    first = Subject(run[0], Asked(data=str(data), device='cpu'))
    export = Subject(run[1], first.asked, like=first)
    assert export.tokenizer.starts and export.val.starts == []
    a, b = (scoring.data_scores(each.answer, each.val)['loss'].mean for each in (first, export))
    assert a == pytest.approx(b, rel=1e-6)


def test_what_lm_eval_cannot_be_shown_is_refused_before_the_first_way(tmp_path, tiny, manager,
                                                                     monkeypatch, capsys):
    monkeypatch.setattr(harness, 'manager', lambda everything: manager)
    monkeypatch.setattr(harness, 'evaluate', None)          # nothing is asked
    save_run(tmp_path / 'core', surgery(tiny(vocab_size=257, context=96), '1-1-1'))
    assert 'which runs one core or windows, and not' in refused(
        capsys, 'evaluate', tmp_path / 'core', '--tasks=local_choice', '--measures=',
        '--window=0-0', '--K=2', '--device=cpu', f'--out={tmp_path}/x.csv')


def test_a_sweep_of_several_measures_all_on_the_rows_of_the_first(tmp_path, tiny, data, capsys):
    runs = [save_run(tmp_path / name, tiny(vocab_size=257, context=64), data, **more)
            for name, more in (('a', {}), ('b', dict(config=dict(context=32, batch_size=4))))]
    rows = written('sweep', tmp_path / 's.csv', *runs, '--blocks=1', f'--data={data}')
    its = [[row['mean'] for row in where(rows, run=run, measure='loss')] for run in 'ab']
    assert its[0] == its[1] and len(its[0]) > 2
    assert f'the loss is measured on 4 rows of 16 tokens a batch, 100% {data}' in (
        capsys.readouterr().out)


def test_seeds_are_averaged(tmp_path, tiny, data, capsys, monkeypatch):
    shapes = {'looped-0': dict(order=[0, 1, 0, 1], n_layer=2), 'small': dict(n_layer=2),
              'looped-1': dict(order=[0, 1, 0, 1], n_layer=2), 'deep': dict(n_layer=4)}
    for seed, (name, fields) in enumerate(shapes.items()):
        save_run(tmp_path / name, tiny(seed, vocab_size=257, context=64, **fields), data)
    rows = written('evaluate', tmp_path / 'e.png', *map(tmp_path.joinpath, shapes), '--batches=2')
    seeds = np.array([row['mean'] for row in where(rows, group='looped', measure='loss')])
    said = capsys.readouterr().out
    assert f'| {seeds.mean():.3f} ({seeds.std(ddof=1) / 2 ** 0.5:.3f}) ' in said
    path = tmp_path / 'looped-1/ckpt.pt'
    state = torch.load(path)
    # it was stopped, or is another model, and is a seed of none
    for change in (dict(step=2), dict(order=[0, 1, 1, 1]),
                   dict(model_config=state['model_config'] | dict(norm_eps=0.1))):
        torch.save(state | change, path)
        alone = {row['group'] for row in written('evaluate', tmp_path / 'f.csv', *map(
            tmp_path.joinpath, shapes), '--batches=2')}
        assert {'looped-0', 'looped-1'} < alone
        assert 'looped-0, looped-1: not averaged as seeds of looped' in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, 'files_of', lambda path: [])
        assert 'was saved after this command had begun' in refused(
            capsys, 'evaluate', tmp_path / 'looped-1', f'--out={tmp_path}/g.csv')
    torch.save(state | dict(data=dict(val=['as it was'])), path)
    assert 'has changed since' in refused(capsys, 'evaluate', tmp_path / 'looped-1',
                                          f'--out={tmp_path}/g.csv')
    model = checkpoint.load_model(tmp_path / 'deep')
    scores = scoring.data_scores(model, Loader(data, 4, 16, 'val'), 2)
    [row] = where(rows, run='deep', measure='loss')     # what a forward costs is that of its rows
    assert row['mean'] == scores['loss'].mean and (tmp_path / 'e.png').exists()
    assert row['inference_flops'] == model.flops_per_token(context=16) // 3
    save_run(tmp_path / 'deep', model, 'elsewhere')
    written('evaluate', tmp_path / 'f.csv', tmp_path / 'deep', '--tasks=toy_copy', '--n=4')
    assert 'so its loss is left out' in capsys.readouterr().err


def test_shots_are_scores_of_their_own(run, tmp_path, monkeypatch):
    drawn, told = [], []
    monkeypatch.setattr(evaluate, 'show', lambda path, draw, points, *how: (
        drawn.extend(points), told.append(how[-2:])))
    rows = written('evaluate', tmp_path / 'e.png', run[0], '--n=6', '--tasks=toy_assign/1',
                   '--shots=0,2', '--x=shots', '--measures=log_prob')
    names = [f'toy_assign/1, {shots} shots{what}' for shots in (0, 2) for what in ('', ' log_prob')]
    assert [row['measure'] for row in rows] == names
    assert [point['x'] for point in drawn] == [0, 2]
    assert [point['toy_assign/1 log_prob (nats)'] for point in drawn] == [
        row['mean'] for row in rows if 'log_prob' in row['measure']]
    drawn.clear()           # a solver that takes an even K alone
    written('evaluate', tmp_path / 'k.png', run[0], '--n=4', '--tasks=toy_copy', '--measures=',
            '--window=1-2', '--solver=aitken', '--K=2,4', '--x=K')
    assert [point['x'] for point in drawn] == [None, 2, 4]
    written('evaluate', tmp_path / 'l.png', run[0], '--n=4', '--tasks=toy_copy', '--measures=',
            '--loop=3')
    assert told == [('examples before the question', None), ('steps K', None),
                    ('', {0: 'as it is', 1: '--loop=3'})]


def test_the_measure_that_extend_writes_is_a_row_for_each_depth(tiny, data, tmp_path, monkeypatch):
    "By hand, in another order too; and its notes are of all that it imports."
    text = (ROOT / 'docs/EXTEND.md').read_text()
    code = re.search(r'```python\n(# rank\.py\n.*?)```', text, flags=re.S)[1]
    model, file, found = tiny(vocab_size=257, n_layer=3), tmp_path / 'rank.py', []
    monkeypatch.setattr(rows_file, 'MEASURES', dict(rows_file.MEASURES))
    monkeypatch.setattr(sys, 'argv', [
        str(file), 'evaluate', save_run(tmp_path / 'run', model, data), '--measures=rank',
        '--device=cpu', '--loop=1-1x2-1', f'--out={tmp_path / "e.csv"}'])
    file.write_text('from helper import SIGN\n' + code.replace('rank=each', 'rank=SIGN * each'))
    monkeypatch.syspath_prepend(tmp_path)
    for sign in ('1', '-1'):
        (tmp_path / 'helper.py').write_text(f'SIGN = {sign}\n')
        runpy.run_path(str(file))
        del sys.modules['helper']
        found.append({(row['way'], row['measure']): row['mean']
                      for row in read_rows(tmp_path / 'e.csv')})
    assert found[1] == {key: -value for key, value in found[0].items()}
    tokens, wanted = Loader(data, 4, 16, 'val').batch(0)[0], {}
    for way, order in (('as it is', [0, 1, 2]), ('--loop=1-1x2-1', [0, 1, 1, 2])):
        for depth in range(len(order)):
            x = model.hidden(tokens, order=order[:depth + 1]).detach().flatten(0, 1).double()
            share = torch.linalg.eigvalsh(x.T @ x) / x.square().sum()
            wanted[way, f'rank, depth {depth}'] = 1 / share.square().sum().item()
    assert found[0] == pytest.approx(wanted, rel=1e-5)


def test_a_change_has_the_error_of_pairs():
    before, after = (Score('share', sum(right) / 5, None, right)
                     for right in ([1, 0, 0, 1, 0], [1, 1, 0, 1, 1]))
    change = scoring.compared(before, after)
    assert change.mean == pytest.approx(0.4) and change.p == 0.5    # two of two went up
    assert change.error == pytest.approx(torch.tensor([0., 1, 0, 0, 1]).std().item() / 5 ** 0.5)
    # a perplexity is no mean over its documents
    assert scoring.compared(Score('score', 9.0, None, [2.0, 4.0]),
                            Score('score', 7.0, None, [1.0, 3.0]))[1:] == (None, None, [])


def test_names_of_tasks():
    ours, theirs = parse_tasks('toy_assign/0-2,arc_easy,assign_math,toy')
    assert ours == {f'toy_assign/{depth}': ('toy_assign', depth) for depth in range(3)} | dict(
        assign_math=('assign_math', 0), toy_copy=('toy_copy', 0))
    assert theirs == ['arc_easy']


def test_a_sweep_screens_by_every_other_answer_and_judges_by_the_others(tmp_path, tiny, data):
    run = save_run(tmp_path / 'one', tiny(vocab_size=257, context=64), data)
    rows = written('sweep', tmp_path / 'sweep.csv', run, '--window=all2', '--solver=naive,rk',
                   '--K=2', '--batches=2', '--n=8', '--tasks=toy_assign/1')
    model, val = checkpoint.load_model(run), Loader(data, 4, 16, 'val')
    scores = scoring.data_scores(model, val, 2) | {
        'toy_assign/1': ask(model, BYTES, few_shot('toy_assign', 8, shots=0, depth=1, seed=0))}
    assert {*scores} == {'loss', 'fifth', 'toy_assign/1'}
    halves = [{name: half(score, part) for name, score in scores.items()} for part in (0, 1)]
    assert halves[0]['loss'].answers == scores['loss'].answers[::2]
    assert halves[1]['toy_assign/1'].mean == sum(scores['toy_assign/1'].answers[1::2]) / 4
    for part, its in zip(sweep.PARTS, halves):
        assert {row['measure']: row['mean'] for row in where(rows, part=part, way='as it is')} == {
            name: score.mean for name, score in its.items()}
    # a perplexity has no answers of which it is the mean
    assert half(Score('score', 9.0, None, [None, None]), 0) is None
    assert half(Score('share', 1.0, None, [1]), 1) is None


def test_luck_is_what_the_best_of_as_many_tries_finds():
    "Against every exchange of four questions, tried one by one."
    changes = [[[1, 1, 0, -1]], [[0, 1, 1, 1]]]
    best = [max(sum(s * c for s, c in zip(signs, lists[0])) / 4 for lists in changes)
            for signs in product((1, -1), repeat=4)]
    said = sweep.luck(changes, 'share', draws=40_000)
    mean, share = map(float, re.search(r'would gain (\S+), and as much or more in (\S+)%',
                                       said).groups())
    assert 'the best of 2 gains 75.0' in said
    assert mean == pytest.approx(100 * sum(best) / 16, abs=0.5)
    assert share == pytest.approx(100 * sum(b >= 0.75 for b in best) / 16, abs=1)
    assert sweep.luck([[[]]], 'nats') == ''
    assert sweep.luck([*changes, [[math.nan] * 4]], 'share', draws=40_000) == said     # no try
    # several measures of the same questions are no more luck
    eight = [[lists[0]] * 8 for lists in changes]
    assert sweep.luck(eight, 'share', draws=40_000) == said


def test_what_ways_are_ranked_by_and_what_a_gain_is():
    def row(measure, kind, data=''):
        return dict(measure=measure, kind=kind, data=data)
    rows = [row('loss', 'nats', 'x'), row('toy_assign/1', 'share'), row('b ter', 'less')]
    of_data, benchmarks = row('copy', 'share', 'x'), [row('b acc', 'share'), row('b norm', 'share')]
    assert sweep.ranked_by([rows[0], of_data]) == ['loss']
    assert sweep.ranked_by([*rows[:2], of_data]) == ['toy_assign/1']
    assert sweep.ranked_by([*rows, *benchmarks]) == ['toy_assign/1', 'b acc']
    with pytest.raises(Refused, match='b ter is no share of right answers'):
        sweep.ranked_by([*rows, of_data])
    assert [sweep.gain(row, 1.0) for row in rows] == [-1, 1, -1]


def test_windows_and_cells(tiny):
    assert sweep.windows_of(('all2', 'mid2', '0-0'), 4) == ('0-1', '1-2', '2-3', '0-0')
    asked = read(sweep.Options, ['run', '--window=1-2', '--solver=rk,heavy_ball', '--K=2,3',
                                 '--beta=0.3,0.5', '--cache=first,last'], ['models'])
    assert len(sweep.ways_of(asked, tiny())) == 2 * 2 * 2 * 2
    asked = read(sweep.Options, ['run', '--blocks=2,3', '--times=4'], ['models'])
    ways = sweep.ways_of(asked, tiny(order=[0, 1, 0, 1]))       # of a loop, its own order's
    assert [way.loop for way in ways][1::2] == [[0] + [1, 0] * 4 + [1], [0, 1, 0] * 4 + [1]]


def test_a_ways_row_says_what_that_way_is_and_costs(tiny):
    model = tiny(n_layer=4)
    for way, loop, runs in ((Way(), '4', 4), (Way(loop='1-2x3-1'), '1-2x3-1', 8),
                            (Way(window='1-2', K=3), '4', 8),
                            (Way(window='1-2', K=3, mode='layer'), '4', 8)):
        row = facts(dict(flops=5, inherited_flops=7), model, way, way.cost(model))
        assert (row['loop'], row['depth'], row['training_flops']) == (loop, runs, 12), str(way)
        assert row['inference_flops'] == model.flops_per_token([0] * runs) // 3, str(way)
    assert math.isnan(facts({}, model)['training_flops'])


@pytest.mark.parametrize('name, penalty', [('llama', 1.0), ('mistral', 2.0)])
def test_greedy_is_the_likeliest_token_and_ends_where_the_config_says(name, penalty, tmp_path,
                                                                      capsys):
    "In a family of ours and in another one, whatever penalty the folder asks for, which is said."
    model = family(name, eos_token_id=[7, 9], vocab_size=257)
    model.generation_config.repetition_penalty = penalty
    write_tokenizer('bytes', tmp_path, 64)
    model.save_pretrained(tmp_path)
    words, (_, opened) = AutoTokenizer.from_pretrained(tmp_path), checkpoint.open_any(tmp_path)
    theirs = as_theirs(opened) if is_ours(opened) else opened
    asked = [rows_file.answer_of(opened), theirs, words, str(tmp_path)]
    assert [Model(*asked, longest).max_length for longest in (20, 99, None)] == [20, 64, 64]
    assert ('a penalty on repetition' in capsys.readouterr().err) == (penalty != 1)
    Model(*asked, 20)._loglikelihood_tokens([((), [3] * 20, [5]), ((), [3] * 21, [5])])
    assert '1 of 2 prompts with an answer are longer than 20' in capsys.readouterr().err
    with pytest.raises(AssertionError, match='an answer has 21 tokens'):     # (then a line)
        Model(*asked, 20)._loglikelihood_tokens([((), [3], [5] * 21)])
    keep_tokenizer(tmp_path, tmp_path / 'run')          # and so says a run that began with it
    for path in (tmp_path, tmp_path / 'run'):
        theirs.generation_config = None
        Model(*asked[:3], path, 20)
        assert {7, 9} <= {*theirs.generation_config.eos_token_id}
    tokens = torch.tensor([[3, 4, 5]])
    said = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6,
                           do_sample=False)[0]
    assert len(said) > 3
    for i in range(3, len(said)):
        assert logits(model, said[None, :i])[0, -1].argmax() == said[i]


def test_a_sweep_judges_the_ways_that_gained_most_and_none_that_diverged(tmp_path, tiny,
                                                                         monkeypatch, capsys):
    answers = {'as it is': [1, 1, 0, 0] * 2, '--loop=1x2-3': [0] * 8, '--loop=3-1x2': [1] * 8,
               '--loop=1-1x2-2': [math.nan] * 8, '--loop=2-1x2-1': [1, 1, 1, 0] * 2}
    monkeypatch.setitem(rows_file.MEASURES, 'tasks', lambda subject: [
        ({}, dict(toy_copy=scoring.of_answers(answers[str(subject.way)]), beside=Score(
            'log_prob', 0.0, None, [0.0] * 8)))])       # by which nothing is ranked
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=96))
    rows = written('sweep', tmp_path / 's.csv', run, '--blocks=1', '--tasks=toy_copy', '--best=2')
    assert {row['way'] for row in rows if row['part'] == 'judge'} == {
        'as it is', '--loop=2-1x2-1', '--loop=3-1x2'}
    assert 'the best of 3 gains' in capsys.readouterr().out


def test_what_ranks_the_ways_must_judge_them_too(tmp_path, tiny, data, capsys):
    "One row of data has many answers, but one loss."
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=64),
                   config=dict(data=str(data), batch_size=1, context=16))
    assert 'too few answers' in refused(capsys, 'sweep', run, '--blocks=1', '--batches=1',
                                        '--device=cpu', f'--out={tmp_path / "s.csv"}')


def test_two_questions_have_two_files(tmp_path, tiny, monkeypatch):
    "And so have two runs of one name."
    monkeypatch.chdir(tmp_path)
    for place, task in (('a', 'toy_copy'), ('a', 'toy_assign/1'), ('b', 'toy_copy'),
                        ('x/c', 'toy_copy'), ('y/c', 'toy_copy')):
        run = save_run(tmp_path / place / 'run', tiny(vocab_size=257, context=64))
        nanodepth('evaluate', [run, f'--tasks={task}', '--n=3', '--device=cpu'])
    assert [len([*tmp_path.glob(f'out/evals/{place}-run*.csv')]) for place in 'abc'] == [2, 1, 2]
    assert (named_after(evaluate.Options(models=['run'])).partition('_')[0]
            == named_after(evaluate.Options(models=['out/run'])) == 'run')


def test_a_folder_has_one_name(tmp_path, monkeypatch):
    (tmp_path / 'a').mkdir()
    monkeypatch.chdir(tmp_path)
    assert {*map(rows_file.shortest, (Path('a/'), tmp_path / 'b/../a'))} == {Path('a')}
    assert rows_file.shortest(tmp_path.parent) == tmp_path.parent


EXAMPLES = [Example(prompt, options, 0) for prompt, options in (
    ('abcdefgh', ['ij', 'kl']), ('abcdefgx', ['ij', 'klm']), ('abcdefgh12', ['i', 'kl']),
    ('abc', ['d', 'e']))]


def by_hand(model, example):
    "Each option read behind its prompt in one forward, alone: what lm-eval does."
    values = []
    for option in example.options:
        prompt, answer = [256, *example.prompt.encode()], option.encode()
        chances = logits(model, torch.tensor([[*prompt, *answer[:-1]]])).log_softmax(-1)[0]
        values.append(sum(chances[len(prompt) - 1 + i, t].item() for i, t in enumerate(answer)))
    return values


def assert_one_score(model):
    "Alone or in a batch."
    for batch in (1, 64):
        for example, got in zip(EXAMPLES, log_likelihoods(model, BYTES, EXAMPLES, batch=batch)):
            assert got.tolist() == pytest.approx(by_hand(model, example), abs=2e-5)
            assert got.dtype == torch.float64           # a sum over many tokens


@pytest.mark.parametrize('way', [
    Way(), Way(loop=[0, 1, 1, 2, 3, 2]), Way(window='1-2', solver='naive', cache='last'),
    Way(window='1-2', K=6, decode='bypass'),
    Way(window='1-2', solver='euler', mode='layer'), Way(window='1-2', solver='anderson'),
    Way(loop=[0, Window([1, 2], 'anderson'), 3])], ids=str)
def test_a_question_has_one_score_whatever_stands_beside_it(tiny, way):
    model = tiny(vocab_size=257, context=64, n_kv_head=2, ln_scaling=True)
    with way.apply(model):
        assert_one_score(model)


def test_and_so_it_has_in_a_recurrent_model_and_in_other_families(gemma, tiny):
    assert_one_score(surgery(tiny(vocab_size=257, context=64), '1-2-1'))
    with Way(window='1-2', K=3).apply(gemma[1]):
        assert_one_score(Hooked(gemma[1]))
    rope = dict(rope_type='longrope', rope_theta=1e4, short_factor=[1.] * 4, long_factor=[3.] * 4)
    assert_one_score(Hooked(family('phi3', vocab_size=257, rope_parameters=rope,
                                   original_max_position_embeddings=10)))     # else: other angles


def test_an_answer_is_greedy_if_each_token_of_it_is_the_likeliest(tiny):
    model = tiny(vocab_size=257, context=64)
    one, two = model.generate(torch.tensor([[1, 2, 3]]), 2, temperature=0)[0, 3:].tolist()
    [(_, greedy)] = likelihoods.likelihoods(model, [[1, 2, 3]], [
        [[one], [one, two], [one, two - 1], [one - 1, two]]])
    assert greedy.tolist() == [True, True, False, False]


def test_no_forward_makes_more_logits_than_fit(gemma, tiny, tmp_path, monkeypatch):
    "A score those of its option, a loss those of a row; and the numbers are the same."
    write_noise(tmp_path / 'noise', [])
    val, answer, made = Loader(tmp_path / 'noise', 4, 32, 'val'), Hooked(gemma[1]), []
    plain = [v.tolist() for v in log_likelihoods(answer, BYTES, EXAMPLES)]
    loss = scoring.data_scores(lambda tokens: gemma[1](tokens).logits, val, 2)['loss'].mean
    hook = gemma[1].lm_head.register_forward_hook(lambda *parts: made.append(parts[-1].numel()))
    monkeypatch.setattr(likelihoods, 'LOGITS_AT_ONCE', 6 * 257)
    for got, wanted in zip(log_likelihoods(answer, BYTES, EXAMPLES), plain):
        assert got.tolist() == pytest.approx(wanted, abs=1e-5)
    assert made and max(made) <= 6 * 257
    model, made_of_ours = tiny(vocab_size=257, context=64), []      # those of options
    model.head.register_forward_hook(lambda *parts: made_of_ours.append(parts[-1].numel()))
    log_likelihoods(model, BYTES, EXAMPLES)
    assert 4 * 257 <= max(made_of_ours) <= 6 * 257
    assert scoring.data_scores(answer, val, 2)['loss'].mean == pytest.approx(loss, rel=1e-6)
    assert max(made) == 32 * 257
    hook.remove()


def test_what_is_not_a_number_is_no_accuracy(tiny, data):
    model, val = tiny(vocab_size=257, context=16), Loader(data, 4, 16, 'val')
    score = scoring.data_scores(lambda tokens: model(tokens) * math.nan, val, 2)['fifth']
    assert math.isnan(score.mean) and score.error is None and {*score.answers} == {None}


def test_the_loss_on_text_alone_and_the_log_probability_of_the_right_answer(tiny, tmp_path):
    n = np.arange(8000)                 # a third of the text does not count
    write_noise(tmp_path / 'data', ['text', 'copy'], mask=(n % 5 == 0) | (n % 3 > 0))
    save_run(tmp_path / 'run', tiny(vocab_size=257, context=64), tmp_path / 'data')
    asked = Asked(tasks='toy_copy', n=6, batches=2, device='cpu',
                  measures=('loss', 'text', 'log_prob'))
    subject = Subject(tmp_path / 'run', asked)
    scores = asked_of(subject)
    of_text = []
    for x, y, marks in map(subject.val.batch, range(2)):
        losses, _ = likelihoods.losses_of(subject.model, x, y)
        of_text += losses[marks % 128 == 1].tolist()
    assert scores['text'].mean == pytest.approx(np.mean(of_text), rel=1e-9)
    examples = subject.questions['toy_copy']
    values = log_likelihoods(subject.model, subject.tokenizer, examples)
    assert scores['toy_copy log_prob'].answers == [
        each[example.answer].item() for each, example in zip(values, examples)]
    plain = Subject(tmp_path / 'run', Asked(tasks='toy_copy', n=6, device='cpu'))
    assert not {'text', 'toy_copy log_prob'} & asked_of(plain).keys()


def test_a_masked_token_is_of_no_answer(tmp_path):
    n = np.arange(8000)                 # each third answer has two tokens, of which one is masked
    marks = np.select([n % 15 == 11, n % 5 == 0], [1, 129])
    write_dataset(tmp_path, 'val', 'bytes', n % 97, marks=marks, kinds=['a'],
                  mask=(n % 15 != 5) & (n % 15 != 11))
    val = Loader(tmp_path, 4, 15, 'val')
    knows = lambda tokens: 9.0 * torch.nn.functional.one_hot((tokens + 1) % 97, 257)
    assert scoring.data_scores(knows, val, 2)['a'].answers == [1] * 16
    guesses = lambda tokens: 0 * knows(tokens)
    assert scoring.data_scores(guesses, val, 2)['a'].mean < 0.1


def test_the_error_of_a_loss_is_that_of_a_mean_over_tokens(monkeypatch):
    "Rows with unequal numbers of targets: the error of a ratio, and the bootstrap's."
    rng = np.random.default_rng(0)
    counts = rng.integers(4, 30, 400)
    hard = rng.gamma(2, 0.5, 400) + (counts > 25)

    def score(counts):
        rows = torch.tensor(np.stack([hard * counts, counts], 1), dtype=torch.float64)
        monkeypatch.setattr(scoring, 'validate', lambda *_: iter([(0, list(rows), [])]))
        return scoring.data_scores(None, SimpleNamespace(kinds=[]))['loss']
    loss, mean = score(counts), (hard * counts).sum() / counts.sum()
    assert loss.mean == pytest.approx(mean) == np.mean(loss.answers)
    drawn = [(hard * counts)[i].sum() / counts[i].sum() for i in rng.integers(0, 400, (2000, 400))]
    assert loss.error == pytest.approx(np.std(drawn), rel=0.1)
    spread = (hard * counts - mean * counts).std(ddof=1) / counts.mean()
    assert loss.error == pytest.approx(spread / 20)
    assert score(np.full(400, 16)).answers == pytest.approx(hard)   # of equal rows, their means
