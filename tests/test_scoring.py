"""Scoring: one way of running, one score, one order of asking.

Promised: a way of running does what it says on every kind of model, costs what it says and is
undone; answers are scored as an option at a time would be, and what is not a number is no score;
lm-eval's own `hf` gives our scores on our exports; a change has the error of pairs; a sweep chooses
by one half and judges by the other; what was measured stands in the CSV before the next way.
"""
import json
import math
import re
import runpy
import sys
from types import SimpleNamespace

from docs.results.check import read_rows
import numpy as np
import pytest
import torch
from conftest import asked_of, logits, refused, ROOT, save_run, table_of, write_noise
from families import tiny as family

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import evaluate, sweep
from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth import wrapped
from nanodepth.model import Span
from nanodepth.models import checkpoint
from nanodepth.models.hf import Hooked
from nanodepth.report.tables import print_differences, where
from nanodepth.retrofit import surgery
from nanodepth.scoring import harness, likelihoods, rows as scoring
from nanodepth.scoring.data import parse_tasks
from nanodepth.scoring.likelihoods import log_likelihoods
from nanodepth.scoring.rows import Asked, MEASURES, of_questions, Score, score_of, Subject
from nanodepth.scoring.way import facts, in_way, in_words, Ways, ways_of
from nanodepth.text.primitives import Example, few_shot
from nanodepth.text.tokenizer import get_tokenizer, write_tokenizer
from nanodepth.text.tokens import write_dataset
from nanodepth.training.loader import Loader
from nanodepth.wrapper import SOLVERS, Window

lm_eval = pytest.importorskip('lm_eval')
from lm_eval.models.huggingface import HFLM
sys.path.insert(0, str(ROOT / 'data/evals'))
import tasks

pytestmark = pytest.mark.usefixtures('undrawn')

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
            (alibi, dict(window='2-3', solver='naive', K=3), lambda: in_window(alibi, (2, 3)), 10),
            (book, {}, lambda: in_window(ours, (1, 2), 'rk'), 8),
            (within, {}, lambda: logits(within, TOKENS), 1 + 2 * (3 + 1) + 1),
            (ours, {}, lambda: logits(ours, TOKENS), 4),
            (ours, dict(loop='1-2x3-1'), lambda: ours(TOKENS, order=[0, 1, 2, 1, 2, 1, 2, 3]), 8),
            (core, dict(r=5), lambda: logits(five, TOKENS), 1 + 2 * 5 + 2),
            (nested, dict(r=5), lambda: logits(five, TOKENS), 1 + 2 * 5 + 2),
            (core, dict(r=5, window='0-0', K=2), lambda: in_window(five, (0, 0), 'rk', 2), 14),
            (theirs, dict(window='2-3', K=2, mode='layer'), lambda: in_window(
                theirs, (2, 3), 'rk', 2, mode='layer'), 8),
            (ours, dict(window='1-2', solver='naive', K=3), lambda: in_window(ours, (1, 2)), 8)):
        before = logits(model, TOKENS)
        with in_way(model, way):
            inside, about = logits(model, TOKENS), facts({}, model, way)
        assert torch.equal(inside, by_hand()), way
        assert torch.equal(logits(model, TOKENS), before), way
        assert about['layers'] == cost, way
        if model is ours:       # as many layers, each once
            assert about['inference_flops'] == model.flops_per_token([0] * cost) // 3, way
    for model, way, message in ((core, dict(loop='2x2'), 'only a model of ours, without'),
                                (ours, dict(r=2), 'has no recurrent core to run r times'),
                                (core, dict(r=0), 'r=0 is too small'),
                                (theirs, dict(loop='2-2x3-2'), 'only a model of ours')):
        with pytest.raises(Refused, match=message), in_way(model, way):
            pass
    spent = facts(dict(flops=5, inherited_flops=7), ours, {})['training_flops']
    assert spent == 12 and math.isnan(facts({}, ours, {})['training_flops'])


def in_window(model, window, solver='naive', K=3, **how):
    with wrapped(model, window, solver, K, **how):
        return logits(model, TOKENS)


def test_options_become_ways_as_users_type_them():
    given = lambda *argv: [in_words(way) for way in ways_of(read(Ways, argv))][1:]
    assert given() == [] and in_words({}) == 'as it is'
    assert given('--loop=2x2,1-2x3-1') == ['--loop=2x2', '--loop=1-2x3-1']
    assert given('--r=1,2,4') == ['--r=1', '--r=2', '--r=4']
    assert given('--window=mid4,0.5', '--K=2', '--T=1.5') == [
        '--window=mid4 --K=2 --T=1.5', '--window=0.5 --K=2 --T=1.5']
    assert given('--window=mid4', '--K=3', '--beta=0.3', '--decode=bypass') == [
        '--window=mid4 --K=3 --beta=0.3 --decode=bypass']
    assert given('--solver=anderson', '--m=1,2', '--pin=true') == [
        '--solver=anderson --m=1 --pin=True', '--solver=anderson --m=2 --pin=True']
    # named twice, it is one way: else its rows would be taken for those of two seeds
    assert given('--window=mid4', '--K=2,2', '--T=1,1.0') == ['--window=mid4 --K=2 --T=1']


def test_of_questions_by_hand(monkeypatch):
    values = [torch.tensor([-1.0, -2.0]).double(), torch.tensor([-3.0, -5.0]).double()]
    monkeypatch.setattr(scoring, 'log_likelihoods', lambda *_: values)
    examples = [Example('', ('a', 'b'), 0), Example('', ('a', 'b'), 1)]
    assert of_questions(None, None, examples) == (
        Score('share', 0.5, 0.5, [1, 0], 0.5), Score('log_prob', -3.0, 2.0, [-1.0, -5.0]))
    values[0][1] = math.nan         # one that is not known makes the whole unknown
    assert math.isnan(of_questions(None, None, examples)[0].mean)


@pytest.fixture
def run(tmp_path, tiny):
    "A looped run of ours, and the same as a Hugging Face folder."
    model = tiny(vocab_size=257, context=96, n_layer=3, order=[0, 1, 1, 2])
    ours = tmp_path / 'ours'
    save_run(ours, model)
    nanodepth('export', [str(ours), str(tmp_path / 'hf')])
    return ours, tmp_path / 'hf'


CHAT = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.fixture
def local(manager, monkeypatch):
    "lm-eval knows the manager's tasks alone, and a list `two` of them."
    monkeypatch.setattr(harness, 'TaskManager', lambda **_: manager)
    monkeypatch.setitem(harness.LISTS, 'two', [('local_choice', 2, None),
                                               ('local_other', None, None)])
    harness.find.cache_clear()
    yield manager
    harness.find.cache_clear()


@pytest.mark.parametrize('asked, shots', [
    (dict(tasks='local_choice,local_text,local_rolling'), {}), (dict(tasks='local_other'), {}),
    (dict(tasks='local_other', chat=True), {}), (dict(tasks='two'), dict(local_choice=2)),
    (dict(tasks='two', shots=(0,)), dict(local_choice=0, local_other=0)),
    (dict(tasks='two', shots=(1,), limit=7), dict(local_choice=1, local_other=1))], ids=str)
def test_our_scores_are_those_of_lm_evals_own_model(asked, shots, run, local, monkeypatch):
    "Of a checkpoint of ours, with its loop, and of the folder to which it was exported."
    made, real = [], lm_eval.simple_evaluate
    monkeypatch.setattr(harness, 'simple_evaluate', lambda *args, **how: made.append(
        real(*args, **how)) or made[-1])
    about, chat = run[1] / 'tokenizer_config.json', asked.get('chat', False)
    about.write_text(json.dumps(json.loads(about.read_text()) | dict(chat_template=CHAT)))
    wanted, said, own = {}, {}, HFLM(str(run[1]), device='cpu', batch_size=4)
    for task in asked['tasks'].replace('two', 'local_choice,local_other').split(','):
        results = real(own, tasks=[task], task_manager=local, num_fewshot=shots.get(task),
                       apply_chat_template=chat, limit=asked.get('limit'), bootstrap_iters=0)
        wanted |= {f'{task} {key.partition(",")[0]}': value
                   for key, value in results['results'][task].items()
                   if ',none' in key and 'stderr' not in key}
        said |= results['samples']
    for path in run[chat:]:
        subject = Subject(path, Asked(device='cpu', measures=(), **asked))
        found = asked_of(subject)
        assert {*found} - {*wanted} == ({'mean of two'} if asked['tasks'] == 'two' else set())
        for name, value in wanted.items():
            assert found[name].mean == pytest.approx(value, rel=1e-4)
        for task, samples in said.items():
            for a, b in zip(made[-1]['samples'][task], samples, strict=True):
                assert a['doc'] == b['doc']
                if task == 'local_text':
                    assert a['resps'] == b['resps']
                else:           # log-likelihoods, and of a choice whether it is greedy: 0 or 1
                    assert np.array(a['resps'], float) == pytest.approx(
                        np.array(b['resps'], float), rel=1e-4)
    subject.model.head.register_forward_hook(lambda module, x, y: y * math.nan)
    with pytest.raises(Refused, match='logits that are not numbers'):
        asked_of(subject)


@pytest.mark.parametrize('kind', ['core', 'span', 'mistral'])
def test_lm_eval_asks_what_runs(kind, tiny, tmp_path, local):
    "A recurrent model, one with a Span of one's own, and one of another family in a window."
    path, way, context = tmp_path / kind, {}, 96
    if kind == 'mistral':
        model = family('mistral', vocab_size=257, max_position_embeddings=context)
        model.save_pretrained(path)
        write_tokenizer('bytes', path, context)
        model, way = checkpoint.load_model(path, others=True), dict(window='1-2', K=2)
    else:
        model = surgery(tiny(vocab_size=257, context=context), '1-2-1', r=3)
        if kind == 'span':
            model = tiny(vocab_size=257, context=context, order=[0, Twice([1, 2]), 3])
        save_run(path, model)
    subject = Subject(path, Asked(tasks='local_choice', measures=(), device='cpu'))
    found = asked_of(subject, way)['local_choice acc']
    docs = [*local.load(['local_choice'])['tasks']['local_choice'].test_docs()]
    starts = subject.tokenizer.starts if kind == 'mistral' else [256]
    with in_way(model, way):
        answer = Hooked(model) if kind == 'mistral' else model
        for doc, right in zip(docs, found.answers, strict=True):
            option = [by_hand(answer, ([*starts, *doc['q'].encode()])[-context - 1 + len(o):],
                              [*o.encode()])[0] for o in doc['options']]
            assert int(np.argmax(option) == doc['gold']) == right


class Twice(Span):
    times = 2


def test_a_prompt_that_is_too_long_is_read_from_its_end(tiny, tmp_path, local, capsys):
    save_run(tmp_path / 'run', tiny(vocab_size=257, context=96))
    subject = Subject(tmp_path / 'run', Asked(tasks='local_choice', device='cpu', max_length=20))
    lm = harness.Ours(subject)
    harness.say_once.cache_clear()
    long, short = lm._loglikelihood_tokens([((), [7, *[3] * 20], [5]), ((), [3] * 20, [5])])
    assert long == short
    assert 'more than 20 tokens are read from their end' in capsys.readouterr().err
    with pytest.raises(Refused, match='an answer has 21 tokens'):
        lm._loglikelihood_tokens([((), [3], [5] * 21)])


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


@pytest.mark.parametrize('said, right, value', [
    ('The Eiffel Tower!', ['eiffel tower'], 1), ('', ['one'], 0), ('the', ['a'], 1),
    ('in Paris France', ['Paris', 'Lyon France'], 1 / 2),      # 1 of 3 words, 1 of 1: 2/4
    ('red red blue', ['red green'], 2 / 5)])                   # a word counts as often as in both
def test_f1_of_words_by_hand(said, right, value):
    for doc in (dict(answer=right), dict(answers=right), dict(answer=dict(aliases=right))):
        assert tasks.f1(doc, [said])['f1'] == pytest.approx(value)


def test_metrics_of_lm_eval_become_scores(monkeypatch, run):
    """A metric is a share by its own documents, and that of a group by its value: SQuAD's F1 is of
    a hundred; DROP's has the same name. A list's mean is over the metrics that count."""
    samples = dict(squad=[['a'], ['b']], drop=[0.0, 1.0], coqa=[1.0])
    results = {task: {'f1,none': 0.5, 'f1_stderr,none': 0.03} for task in samples}
    results['drop'] |= {'ppl,none': 9.0}
    results['coqa']['f1_stderr,none'] = 0.0         # all of it is right
    monkeypatch.setattr(harness, 'simple_evaluate', lambda *_, **__: {
        'results': results | dict(both={'f1,none': 50.0}, shares={'f1,none': 0.7}), 'n-shot': {},
        'samples': {task: [dict(doc_id=i, filter=how, f1=value) for i, value in enumerate(values)
                           for how, value in (('none', value), ('other', 5))]
                    for task, values in samples.items()},
        'higher_is_better': dict(drop=dict(ppl=False)),
        'group_subtasks': dict(both=['squad', 'drop'], shares=['drop', 'coqa'])})
    monkeypatch.setitem(harness.LISTS, 'l', [('drop', None, None), ('coqa', 0, 'f1')])
    monkeypatch.setitem(harness.LISTS, 'm', [('drop', None, None), ('squad', 0, 'f1')])
    subject = Subject(run[0], Asked(measures=('log_prob',), tasks='toy_copy', n=2, device='cpu'))
    subject.theirs = [], None, ['l', 'm']
    scores = harness.lm_scores(subject)
    assert {name: score.kind for name, score in scores.items()} == {
        'squad f1': 'score', 'drop f1': 'share', 'drop ppl': 'less', 'coqa f1': 'share',
        'both f1': 'score', 'shares f1': 'share', 'mean of l': 'share'}
    assert scores['drop f1'].answers == [0.0, 1.0] and scores['squad f1'].answers == []
    assert scores['mean of l'][:3] == ('share', 0.5, pytest.approx(0.03 / 2))


def test_the_command(run, tmp_path, local, capsys):
    "Models times ways: what lm-eval says, what our own scorer says, and how a way differs."
    rows = {(row['run'], row['way'], row['measure']): row for row in written(
        'evaluate', tmp_path / 'e.csv', *run, '--tasks=local_choice,toy_assign/0-1',
        '--limit=10', '--n=20', '--window=1-2', '--solver=naive', '--K=1,3')}
    said = capsys.readouterr().out
    assert 'toy_assign/1, % of 20 (chance 25%)' in said
    assert 'local_choice acc, % of 10' in said and 'in (): one standard error' in said
    assert len(rows) == 2 * 3 * 3
    for (name, *asked), row in rows.items():        # an export and its parent
        other = rows['hf', *asked]
        assert all(row[key] == other[key] for key in ('mean', 'error', 'change', 'p', 'dtype'))
        if '--K=1' in row['way']:       # one evaluation changes nothing
            assert row['change'] == row['change_error'] == 0
    model, way = checkpoint.load_model(run[0]), dict(window='1-2', solver='naive', K=3)
    examples = few_shot('toy_assign', 20, shots=0, depth=1)
    plain, _ = of_questions(model, BYTES, examples)
    with in_way(model, way):
        looped, _ = of_questions(model, BYTES, examples)
    changes = np.subtract(looped.answers, plain.answers)
    row = rows['ours', in_words(way), 'toy_assign/1']
    assert [row['mean'], row['change']] == [looped.mean, pytest.approx(changes.mean())]
    assert row['change_error'] == pytest.approx(changes.std(ddof=1) / 20 ** 0.5)     # of pairs


def test_what_was_measured_stands_in_the_csv_before_the_next_way(run, tmp_path, monkeypatch):
    seen, real = [], evaluate.write_csv
    monkeypatch.setattr(evaluate, 'write_csv', lambda rows, out: (
        seen.append(len({row['way'] for row in rows})), real(rows, out))[1])
    written('evaluate', tmp_path / 'e.csv', run[0], '--tasks=toy_copy', '--n=8',
            '--loop=1-1x2-1,1-1x3-1')
    assert seen[:3] == [1, 2, 3]


def test_a_csv_of_others_is_not_written_over(run, tmp_path, capsys):
    (tmp_path / 'e.csv').write_text('name,grade\nAda,1\n')
    for command, more in (('evaluate', []), ('sweep', ['--window=1-2'])):
        assert 'it holds no rows of ours: choose another --out' in refused(
            capsys, command, run[0], '--tasks=toy_copy', '--n=8', '--device=cpu', *more,
            f'--out={tmp_path}/e.csv')
    assert (tmp_path / 'e.csv').read_text() == 'name,grade\nAda,1\n'


def test_all_models_get_rows_of_one_size(run, tmp_path, tiny, data, capsys):
    for name, size in dict(a=16, b=32).items():
        save_run(tmp_path / name, tiny(vocab_size=257, context=96),
                 config=dict(data=str(data), batch_size=size // 4, context=size))
    assert 'so that both answer the same' in refused(
        capsys, 'evaluate', tmp_path / 'a', tmp_path / 'b', '--batches=1', '--device=cpu',
        f'--out={tmp_path}/x.png')
    asked, of = Asked(data=str(data), device='cpu'), scoring.described
    first = Subject(tmp_path / 'a', asked)
    for path in (tmp_path / 'b', run[1]):
        other = Subject(path, asked, like=first)
        assert of(other.val) == of(first.val) == f'4 rows of 16 tokens a batch, 100% {data}'
    size = of(Subject(run[1], asked).val)
    assert size == of(Subject(tmp_path / 'b', asked, like=Subject(run[1], asked)).val)


def test_a_run_and_its_export_have_one_loss(run, data):
    first = Subject(run[0], Asked(data=str(data), device='cpu'))
    export = Subject(run[1], first.asked, like=first)
    assert export.tokenizer.starts and export.val.starts == []
    a, b = (scoring.data_scores(each.answer, each.val)['loss'].mean for each in (first, export))
    assert a == pytest.approx(b, rel=1e-6)


def test_seeds_are_averaged(tmp_path, tiny, data, capsys):
    shapes = {'looped-0': dict(order=[0, 1, 0, 1], n_layer=2), 'small': dict(n_layer=2),
              'looped-1': dict(order=[0, 1, 0, 1], n_layer=2), 'deep': dict(n_layer=4)}
    for seed, (name, fields) in enumerate(shapes.items()):
        save_run(tmp_path / name, tiny(seed, vocab_size=257, context=64, **fields), data)
    rows = written('evaluate', tmp_path / 'e.csv', *map(tmp_path.joinpath, shapes), '--batches=2')
    seeds = np.array([row['mean'] for row in where(rows, group='looped', measure='loss')])
    said = capsys.readouterr().out
    assert f'| {seeds.mean():.3f} ({seeds.std(ddof=1) / 2 ** 0.5:.3f}) ' in said
    path = tmp_path / 'looped-1/ckpt.pt'
    state = torch.load(path)
    torch.save(state | dict(data=dict(val=['as it was'])), path)
    assert 'has changed since' in refused(capsys, 'evaluate', tmp_path / 'looped-1',
                                          f'--out={tmp_path}/g.csv')
    model = checkpoint.load_model(tmp_path / 'deep')
    scores = scoring.data_scores(model, Loader(data, 4, 16, 'val'), 2)
    [row] = where(rows, run='deep', measure='loss')     # what a forward costs is that of its rows
    assert row['mean'] == scores['loss'].mean
    assert row['inference_flops'] == model.flops_per_token(context=16) // 3
    save_run(tmp_path / 'deep', model, 'elsewhere')
    written('evaluate', tmp_path / 'f.csv', tmp_path / 'deep', '--tasks=toy_copy', '--n=4')
    assert 'so its loss is left out' in capsys.readouterr().err


def test_rows_of_two_dtypes_are_not_paired(capsys):
    row = dict(way='as it is', measure='loss', kind='nats', mean=1.0, training_flops=1.0, data='x')
    rows = [row | dict(run=f'{name}-{seed}', group=name, seed=seed, dtype=dtype, mean=mean + seed)
            for seed in (0, 1) for name, dtype, mean in (
                ('a', 'float32', 1.0), ('b', 'bfloat16', 2.0), ('c', 'float32', 3.0 + seed / 9))]
    print_differences(rows, dict(b=['a'], c=['a']))
    of = {row['model']: row for row in table_of(capsys.readouterr().out, 'loss')}
    assert of['b']['so many seeds say'] == 'no seed with equal data and dtype'
    assert of['c']['difference'].startswith('+2.056')


def test_shots_are_scores_of_their_own(run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(evaluate, 'show', lambda path, draw, points, *_: drawn.extend(points))
    rows = written('evaluate', tmp_path / 'e.png', run[0], '--n=6', '--tasks=toy_assign/1',
                   '--shots=0,2', '--x=shots', '--measures=log_prob')
    names = [f'toy_assign/1, {shots} shots{what}' for shots in (0, 2) for what in ('', ' log_prob')]
    assert [row['measure'] for row in rows] == names
    name = 'toy_assign/1 log_prob (nats)'
    assert [(point['x'], point[name]) for point in drawn if name in point] == [
        (shots, row['mean']) for shots, row in zip((0, 2), rows[1::2])]
    drawn.clear()           # a solver that takes an even K alone
    written('evaluate', tmp_path / 'k.png', run[0], '--n=4', '--tasks=toy_copy', '--measures=',
            '--window=1-2', '--solver=aitken', '--K=2,4', '--x=K')
    assert [point['x'] for point in drawn] == [None, 2, 4]


MINE = re.search(r'```python\n(# mine\.py\n.*?)```', (ROOT / 'docs/EXTEND.md').read_text(),
                 flags=re.S)[1]


def test_the_span_solver_and_measure_that_extend_writes(tiny, data, tmp_path, monkeypatch):
    "In one file, which calls the commands, and which a config imports."
    mine = tmp_path / 'mine.py'
    mine.write_text(MINE)
    (tmp_path / 'again.py').write_text(
        'from mine import Again\nn_layer = 4\norder = [0, Again([1, 2]), 3]\n'
        f'data, out_dir = {str(data)!r}, {str(tmp_path / "run")!r}\n'
        'context, batch_size, steps, n_embd, n_head, head_dim = 16, 4, 6, 32, 2, 16\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(MEASURES, 'rank', None)         # it goes after this test
    monkeypatch.setitem(SOLVERS, 'norm_stab', None)
    for argv in (['train', str(tmp_path / 'again.py'), '--warmup_steps=1', '--decay_steps=1'],
                 ['evaluate', str(tmp_path / 'run'), '--measures=loss,rank', '--window=0-0',
                  '--solver=norm_stab', '--K=2', f'--out={tmp_path / "e.csv"}']):
        monkeypatch.setattr(sys, 'argv', [str(mine), *argv, '--device=cpu'])
        runpy.run_path(str(mine), run_name='__main__')
    rows = {(row['way'], row['measure']): row['mean'] for row in read_rows(tmp_path / 'e.csv')}
    model, val = checkpoint.load_model(tmp_path / 'run'), Loader(data, 4, 16, 'val')
    assert model.order[1].settings() == dict(share=0.5)
    x = model.hidden(val.batch(0)[0]).detach().flatten(0, 1).double()
    share = torch.linalg.eigvalsh(x.T @ x) / x.square().sum()
    assert rows['as it is', 'rank, depth 5'] == pytest.approx(1 / share.square().sum().item(),
                                                              rel=1e-5)
    with wrapped(model, '0-0', 'norm_stab', K=2):
        loss = scoring.data_scores(model, val, 8)['loss'].mean
    assert rows['--window=0-0 --solver=norm_stab --K=2', 'loss'] == loss != rows['as it is', 'loss']
    [deepest] = where(read_rows(tmp_path / 'e.csv'), measure='rank, depth 6')
    assert math.isnan(deepest['change'])        # there is no such depth in the model as it is


def test_a_perplexity_is_no_mean_over_its_documents(run, monkeypatch):
    answers = iter([Score('score', 9.0, None, [2.0, 4.0]), Score('score', 7.0, None, [1.0, 3.0]),
                    ])
    monkeypatch.setitem(MEASURES, 'mine', lambda *_: dict(ppl=next(answers)))
    subject = Subject(run[0], Asked(measures=('mine',), tasks='toy_copy', n=2, device='cpu'))
    _, [row, _] = [sorted(rows, key=lambda row: row['measure']) for rows in scoring.ask(
        subject, [{}, dict(loop='1-1x2-1')])]
    assert (row['measure'], row['change'], row['change_error'], row['p']) == ('ppl', -2, None, None)


def test_names_of_tasks():
    ours, theirs = parse_tasks('toy_assign/0-2,arc_easy,assign_math,toy')
    assert ours == {f'toy_assign/{depth}': ('toy_assign', depth) for depth in range(3)} | dict(
        assign_math=('assign_math', 0), toy_copy=('toy_copy', 0))
    assert theirs == ['arc_easy']


def test_a_sweep_screens_by_every_other_answer_and_judges_by_the_others(tmp_path, tiny, data):
    run = save_run(tmp_path / 'one', tiny(vocab_size=257, context=64), data)
    rows = written('sweep', tmp_path / 'sweep.csv', run, '--window=all2', '--solver=naive,rk',
                   '--K=2', '--batches=2', '--n=8', '--tasks=toy_assign/1')
    assert len({row['way'] for row in rows}) == 1 + 3 * 2
    model, val = checkpoint.load_model(run), Loader(data, 4, 16, 'val')
    scores = scoring.data_scores(model, val, 2) | {'toy_assign/1': of_questions(
        model, BYTES, few_shot('toy_assign', 8, shots=0, depth=1, seed=0))[0]}
    assert {*scores} == {'loss', 'fifth', 'toy_assign/1'}
    for offset, part in enumerate(('screen', 'judge')):
        assert {row['measure']: row['mean'] for row in where(rows, part=part, way='as it is')} == {
            name: pytest.approx(np.mean(score.answers[offset::2]))
            for name, score in scores.items()}
    row = dict(answers=[1], changes=[0])        # one answer chooses, and none judges
    assert sweep.half([row], 1) == [] != sweep.half([row | dict(p=1)], 0)


def test_what_ways_are_ranked_by():
    def row(measure, kind, data=''):
        return dict(measure=measure, kind=kind, data=data)
    rows = [row('loss', 'nats', 'x'), row('toy_assign/1', 'share'), row('b ter', 'less')]
    of_data, benchmarks = row('copy', 'share', 'x'), [row('b acc', 'share'), row('b norm', 'share')]
    assert sweep.ranked_by([rows[0], of_data]) == ['loss']
    assert sweep.ranked_by([*rows[:2], of_data]) == ['toy_assign/1']
    assert sweep.ranked_by([*rows, *benchmarks]) == ['toy_assign/1', 'b acc']


def test_the_ways_of_a_sweep(tiny):
    ways = lambda *argv: sweep.many_ways(read(sweep.Options, ['run', *argv], ['model']), tiny())
    assert [way['window'] for way in ways('--window=all2,mid2,0-0', '--K=2')[1:]] == [
        '0-1', '1-2', '2-3', '0-0']
    assert len(ways('--window=1-2', '--solver=rk,heavy_ball', '--K=2,3', '--beta=0.3,0.5',
                    '--cache=first,last')) == 1 + 16
    assert [way['loop'] for way in ways('--blocks=2,3', '--times=4')[1:]] == [
        '2x4-2', '1-2x4-1', '2-2x4', '3x4-1', '1-3x4']
    with pytest.raises(Refused, match='runs each layer once'):
        sweep.many_ways(read(sweep.Options, ['run', '--blocks=1'], ['model']),
                        tiny(order=[0, 1, 0, 1]))


def test_a_sweep_judges_the_ways_that_gained_most_and_none_that_diverged(tmp_path, tiny,
                                                                         monkeypatch, capsys):
    answers = {'as it is': [1, 1, 0, 0] * 2, '--loop=1x2-3': [0] * 8, '--loop=3-1x2': [1] * 8,
               '--loop=1-1x2-2': [math.nan] * 8, '--loop=2-1x2-1': [1, 1, 1, 0] * 2}
    monkeypatch.setattr(scoring, 'measured', lambda subject, way: dict(
        toy_copy=(score_of('share', answers[in_words(way)]), ''),
        beside=(Score('log_prob', 0.0, None, [0.0] * 8), '')))      # by which nothing is ranked
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=96))
    written('sweep', tmp_path / 's.csv', run, '--blocks=1', '--tasks=toy_copy', '--best=2')
    said = capsys.readouterr().out
    judged = table_of(said.partition('judged by')[2], 'toy_copy, % of 4')
    assert [row['way'] for row in judged] == ['as it is', '--loop=2-1x2-1', '--loop=3-1x2']
    assert '3 ways, 2 with a gain in toy_copy' in said


def test_what_ranks_the_ways_must_judge_them_too(tmp_path, tiny, data, capsys):
    "One row of data has many answers, but one loss."
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=64),
                   config=dict(data=str(data), batch_size=1, context=16))
    assert 'too few answers' in refused(capsys, 'sweep', run, '--blocks=1', '--batches=1',
                                        '--device=cpu', f'--out={tmp_path / "s.csv"}')


PROMPTS = [[256, *text] for text in (b'abcdefgh', b'abcdefgx', b'abcdefgh12', b'abc')]
OPTIONS = [[[*option] for option in its] for its in (
    (b'ij', b'kl'), (b'ij', b'klm'), (b'i', b'kl'), (b'd', b'e'))]


def by_hand(model, prompt, option):
    """(how likely an option is, is each token of it the likeliest), read behind its prompt in one
    forward, alone: what lm-eval does."""
    read = torch.tensor([[*prompt, *option[:-1]]])
    chances = logits(model, read).double().log_softmax(-1)[0, len(prompt) - 1:]
    return (sum(chances[i, t].item() for i, t in enumerate(option)),
            chances.argmax(-1).tolist() == option)


WINDOW = dict(window='1-2', K=3)
KINDS = dict(       # (the head of) a model that answers as it runs
    recurrent=lambda tiny: surgery(tiny(vocab_size=257, context=64), '1-2-1'),
    gemma=lambda tiny: family('gemma3_text', vocab_size=257, sliding_window=8),
    phi3=lambda tiny: family('phi3', vocab_size=257, original_max_position_embeddings=10,   # angles
                             rope_parameters=dict(rope_type='longrope', rope_theta=1e4,
                                                  short_factor=[1.] * 4, long_factor=[3.] * 4)))


@pytest.mark.parametrize('kind, way', [*(('ours', way) for way in (
    {}, dict(loop='1-1x2-2'), dict(window='1-2', solver='naive', cache='last'),
    dict(window='1-2', K=6, decode='bypass'), dict(window='1-2', solver='euler', mode='layer'),
    dict(window='1-2', solver='anderson'))), ('recurrent', {}), ('gemma', WINDOW), ('phi3', {})],
    ids=str)
def test_a_question_has_one_score_whatever_stands_beside_it(tiny, kind, way, monkeypatch):
    "Alone or in a batch, and if few logits fit at once; no forward makes more."
    ours = lambda tiny: tiny(vocab_size=257, context=64, n_kv_head=2, ln_scaling=True)
    model, made = KINDS.get(kind, ours)(tiny), []
    answer = model if hasattr(model, 'order') else Hooked(model)
    head = getattr(model, 'head', None) or model.lm_head
    with in_way(model, way):
        first, text = [], [*PROMPTS[3]]         # the likeliest tokens, and that they are
        for _ in range(2):
            first.append(logits(answer, torch.tensor([text + first]))[0, -1].argmax().item())
        options = [*OPTIONS[:3], [*OPTIONS[3], first[:1], first]]
        wanted = [[by_hand(answer, prompt, option) for option in its]
                  for prompt, its in zip(PROMPTS, options)]
        head.register_forward_hook(lambda *call: made.append(call[-1].numel()))
        for batch, most in ((1, 2 ** 26), (64, 2 ** 26), (64, 6 * 257)):
            monkeypatch.setattr(likelihoods, 'LOGITS_AT_ONCE', most)
            made.clear()
            found = likelihoods.likelihoods(answer, PROMPTS, options, batch)
            for its, (values, greedy) in zip(wanted, found):
                assert values.tolist() == pytest.approx([value for value, _ in its], abs=3e-5)
                assert greedy.tolist() == [each for _, each in its]
                assert values.dtype == torch.float64            # a sum over many tokens
        assert [each for _, each in wanted[3]] == [False, False, True, True]
        assert made and max(made) <= 6 * 257
        example = Example('abcdefgh', ['ij', 'kl'], 0)      # as text
        assert log_likelihoods(answer, BYTES, [example])[0].tolist() == pytest.approx(
            [value for value, _ in wanted[0]], abs=3e-5)


def test_no_loss_makes_more_logits_than_fit(tmp_path, monkeypatch):
    "Those of a row at least; and the numbers are the same."
    write_noise(tmp_path / 'noise', [])
    model, made = family('llama', vocab_size=257), []
    val, answer = Loader(tmp_path / 'noise', 4, 32, 'val'), Hooked(model)
    loss = scoring.data_scores(lambda tokens: model(tokens).logits, val, 2)['loss'].mean
    model.lm_head.register_forward_hook(lambda *parts: made.append(parts[-1].numel()))
    monkeypatch.setattr(likelihoods, 'LOGITS_AT_ONCE', 6 * 257)
    assert scoring.data_scores(answer, val, 2)['loss'].mean == pytest.approx(loss, rel=1e-6)
    assert max(made) == 32 * 257


def test_what_is_not_a_number_is_no_accuracy(tiny, data):
    model, val = tiny(vocab_size=257, context=16), Loader(data, 4, 16, 'val')
    score = scoring.data_scores(lambda tokens: model(tokens) * math.nan, val, 2)['fifth']
    assert math.isnan(score.mean) and all(map(math.isnan, score.answers))


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
