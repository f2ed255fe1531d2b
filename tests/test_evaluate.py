"""lm-eval: a run of ours, looped or recurrent too, gives what lm-eval's own `hf` gives on its
export, and what our own scorer gives."""
import csv
import dataclasses
import json
import re
import sys

import pytest
import torch
from conftest import ROOT
from test_trust import refused

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.common.files import Notes
from nanodepth.data import primitives
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.data.tokens import Loader, measure as tokens_measure
from nanodepth.engine import checkpoint, harness, measure
from nanodepth.engine.examine import Asked, Examined
from nanodepth.engine.measure import Score
from nanodepth.engine.ways import Way
from nanodepth.retrofit import surgery

lm_eval = pytest.importorskip('lm_eval')
pytest.importorskip('accelerate')       # lm-eval's `hf` model wants it


@pytest.fixture
def run(tmp_path, tiny):
    "A looped run of ours, and the same as a Hugging Face folder."
    model = tiny(vocab_size=257, context=96, n_layer=3, order=[0, 1, 1, 2])
    ours = tmp_path / 'ours'
    checkpoint.save(ours, kind='lm', model=model.state_dict(),
                    model_config=dataclasses.asdict(model.config), config={}, flops=0)
    (ours / 'run.json').write_text(json.dumps(dict(tokenizer='bytes')))
    nanodepth('export', [str(ours), str(tmp_path / 'hf')])
    return ours, tmp_path / 'hf'


def scored(model, manager, tasks, **options):
    return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0,
                                   **options)


def opened(path, **how):
    "lm-eval's model of a checkpoint that runs in some way."
    batch_size = how.pop('batch_size', '8')
    found = harness.Harness(path, [[]], Asked(batch_size=batch_size), 'cpu')
    return found.lm(found.exported(Way(**how)))


LOCAL = ['local_choice', 'local_text', 'local_rolling']


def test_an_export_scores_as_lm_evals_own_model(run, manager):
    from lm_eval.models.huggingface import HFLM
    ours, theirs = run
    expected = scored(HFLM(str(theirs), device='cpu', batch_size=4), manager, LOCAL)
    for path in run:            # our checkpoint with its loop, and the folder it was exported to
        lm = opened(path, batch_size='5')
        results = scored(lm, manager, LOCAL)
        for task in LOCAL:
            for a, b in zip(results['samples'][task], expected['samples'][task]):
                assert a['doc'] == b['doc']
                if task == 'local_text':
                    assert a['resps'] == b['resps']
                elif task == 'local_choice':
                    assert [r[0][0] for r in a['resps']] == pytest.approx(
                        [r[0][0] for r in b['resps']], rel=1e-4)
                else:
                    assert a['resps'][0] == pytest.approx(b['resps'][0], rel=1e-4)


@pytest.mark.parametrize('kind, how', [
    ('looped', dict()), ('looped', dict(loop='1-1x3-1')), ('recurrent', dict()),
    ('recurrent', dict(r=3))])
def test_an_export_scores_as_our_own_scorer(run, tmp_path, manager, kind, how):
    "Ordinary, in another order, and with a core that runs more or less often."
    path = run[0]
    if kind == 'recurrent':
        model = checkpoint.load_model(path)
        model.config.order = None
        path = tmp_path / 'cut'
        checkpoint.save(path, **checkpoint.describe(surgery(model, '1-1-1', mean=2)), config={})
        (path / 'run.json').write_text(json.dumps(dict(tokenizer='bytes')))
    results = scored(opened(path, **how), manager, ['local_choice'])
    model = checkpoint.load_model(path)
    docs = [sample['doc'] for sample in results['samples']['local_choice']]
    examples = [primitives.Example(doc['q'], doc['options'], doc['gold']) for doc in docs
                if len(doc['q']) < 80]
    with Way(**how).apply(model):
        values = iter(measure.log_likelihoods(model, get_tokenizer('bytes'), examples))
    for sample in results['samples']['local_choice']:
        if len(sample['doc']['q']) < 80:            # what is longer is cut by lm-eval
            theirs = [answer[0][0] for answer in sample['resps']]
            assert theirs == pytest.approx(next(values).tolist(), rel=1e-4)


def test_scores_that_are_not_numbers_are_refused(run, manager):
    lm = opened(run[0])
    lm.model.lm_head.register_forward_hook(lambda module, x, y: y * float('nan'))
    with pytest.raises(Refused, match='logits that are not numbers'):
        scored(lm, manager, ['local_choice'])


def test_the_primitives_score_as_primitives_py_does(run, manager):
    ours, _ = run
    results = scored(opened(ours), manager,
                     ['primitive_toy_assign_d1', 'primitive_toy_copy'], limit=200)['results']
    model = checkpoint.load_model(ours)
    for task, name, depth in (('primitive_toy_assign_d1', 'toy_assign', 1),
                              ('primitive_toy_copy', 'toy_copy', 0)):
        examples = primitives.few_shot(name, 200, shots=0, depth=depth)
        accuracy, _ = measure.score(model, get_tokenizer('bytes'), examples)
        assert results[task]['acc,none'] == accuracy and 0.05 < accuracy < 0.95


def test_every_task_of_the_lists_is_there_and_the_papers_primitives_have_five_shots():
    manager = harness.manager(everything=True)
    names = {task for tasks in harness.LISTS.values() for task, _ in tasks}
    assert names <= set(manager.all_tasks) and len(harness.LISTS['depth']) == 16
    told = (ROOT / 'data/evals/README.md').read_text()
    for task, _ in harness.LISTS['depth']:
        assert f'`{task}`' in told, f'evals/README.md does not say whether {task} is stock or ours'
    docs = list(manager.load(['primitive_assign_code'])['tasks'].values())[0].test_docs()
    assert len(docs) == 1000 and docs[0]['prompt'].count('print(') == 6


def test_svamp_is_one_question():
    sys.path.insert(0, str(ROOT / 'data/evals'))
    import tasks
    from datasets import Dataset
    [doc] = tasks.svamp(Dataset.from_list([dict(Body='A. ', Question='B?', Answer=2.5)]))
    assert (doc['question'], doc['answer']) == ('A. B?', '2.5')


def rows_in(path):
    return list(csv.DictReader(open(path)))


def test_the_command(run, tmp_path, capsys):
    "Models times ways: what lm-eval says, what our own scorer says, and how a way differs."
    ours, theirs = run
    out = tmp_path / 'e.csv'
    nanodepth('evaluate', [str(ours), str(theirs), '--tasks=primitive_toy_copy,toy_assign/0-1',
                           '--limit=30', '--n=20', '--window=1-2', '--method=naive', '--K=1,3',
                           '--device=cpu', f'--out={out}'])
    said = capsys.readouterr().out
    assert 'toy_assign/1, % of 20 (chance 25%)' in said
    assert 'primitive_toy_copy acc, % of 30' in said
    rows = {(row['run'], row['way'], row['measure']): row for row in rows_in(out)}
    assert len(rows) == 2 * 3 * 3
    for (name, way, measure_), row in rows.items():     # through transformers as through our own
        other = rows['hf', way, measure_]
        assert [row[key] for key in ('mean', 'error', 'change', 'p')] == [
            other[key] for key in ('mean', 'error', 'change', 'p')]
        if '--K=1' in way:              # one evaluation changes nothing
            assert float(row['change']) == float(row['change_error']) == 0
    row = rows['ours', 'as it is', 'primitive_toy_copy acc']         # lm-eval's own error
    share = float(row['mean'])
    assert float(row['error']) == pytest.approx((share * (1 - share) / 29) ** 0.5)
    model = checkpoint.load_model(ours)
    examples = primitives.few_shot('toy_assign', 20, shots=0, depth=1)
    right = {}
    for way in (Way(), Way(window='1-2', method='naive', K=3)):
        with way.apply(model):
            right[str(way)] = torch.tensor(
                measure.ask(model, get_tokenizer('bytes'), examples).each, dtype=torch.float64)
    plain, looped = right.values()
    row = rows['ours', [*right][1], 'toy_assign/1']
    assert float(row['mean']) == looped.mean() and float(row['change']) == pytest.approx(
        (looped - plain).mean().item())
    assert float(row['change_error']) == pytest.approx((looped - plain).std().item() / 20 ** 0.5)
    assert (float(row['low']), float(row['high'])) == measure.interval(int(looped.sum()), 20)


def test_a_stopped_evaluation_goes_on_and_another_model_is_measured_anew(run, tmp_path, tiny,
                                                                        monkeypatch, capsys):
    measured = []
    real = Examined.scores

    def counted(self, way, part=0):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(str(way))
        return real(self, way, part)
    monkeypatch.setattr(Examined, 'scores', counted)
    line = [str(run[0]), '--tasks=toy_copy', '--n=8', '--loop=1-1x2-1,1-1x3-1', '--device=cpu',
            f'--out={tmp_path / "e.csv"}']
    with pytest.raises(SystemExit):
        nanodepth('evaluate', line)
    with open(tmp_path / 'e.jsonl', 'a') as file:
        file.write('{"of": {"model"')           # it was being written when it was killed
    del measured[:]
    nanodepth('evaluate', line)
    assert measured == ['--loop=1-1x3-1'] and len(rows_in(tmp_path / 'e.csv')) == 3
    said = capsys.readouterr().out
    del measured[:]
    nanodepth('evaluate', line)                 # all is known
    assert measured == [] and capsys.readouterr().out == said
    checkpoint.save(run[0], **checkpoint.describe(tiny(7, vocab_size=257, context=96, n_layer=3)))
    with pytest.raises(SystemExit):
        nanodepth('evaluate', line)
    assert measured == ['as it is', '--loop=1-1x2-1']
    capsys.readouterr()


def test_what_changes_a_score_changes_its_note(run, tmp_path, data):
    "The tokenizer, a chat template, the marks of the data, every number that is asked for."
    def mark(**asked):
        return Examined(run[1], Asked(**dict(data=str(data), device='cpu') | asked)).mark()
    marks = [mark(), mark(batches=3), mark(tasks='toy_copy', n=5), mark(tasks='toy_copy', n=6),
             mark(tasks='toy_copy', n=5, seed=1), mark(tasks='toy_copy', n=5, shots=(1,))]
    about = json.loads((run[1] / 'tokenizer_config.json').read_text())
    (run[1] / 'tokenizer_config.json').write_text(json.dumps(about | dict(chat_template='x')))
    marks.append(mark())
    path = data / 'val.json'
    path.write_text(path.read_text().replace('"fifth"', '"other"'))
    marks.append(mark())
    assert len({*marks}) == len(marks) and marks[-1] == mark()


def test_all_models_get_rows_of_one_size(run, tmp_path, tiny, data):
    for name, size in dict(a=16, b=32).items():
        checkpoint.save(tmp_path / name, **checkpoint.describe(tiny(vocab_size=257, context=96)),
                        config=dict(data=str(data), batch_size=size // 4, context=size))
        (tmp_path / name / 'run.json').write_text('{"tokenizer": "bytes"}')
    own = [Examined(tmp_path / name, Asked(device='cpu')).data() for name in 'ab']
    assert own[0] != own[1]                 # which evaluate refuses to compare
    first = Examined(tmp_path / 'a', Asked(data=str(data), device='cpu'))
    for path in (tmp_path / 'b', run[1]):
        other = Examined(path, Asked(data=str(data), device='cpu'), like=first)
        assert other.data() == first.data() == f'4 rows of 16 tokens a batch, 100% {data}'


def test_two_at_once_do_not_disturb_each_others_notes(tmp_path):
    one, two = Notes(tmp_path / 'n.jsonl'), Notes(tmp_path / 'n.jsonl')
    for i in range(20):
        one.get(dict(i=i), lambda: ['a' * 20_000])
        two.get(dict(i=-i - 1), lambda: ['b'])
    assert len(Notes(tmp_path / 'n.jsonl').known) == 40


def test_seeds_are_averaged_and_a_looped_model_stands_beside_its_partners(tmp_path, tiny, data,
                                                                          capsys):
    shapes = {'looped-0': dict(order=[0, 1, 0, 1], n_layer=2), 'small': dict(n_layer=2),
              'looped-1': dict(order=[0, 1, 0, 1], n_layer=2), 'deep': dict(n_layer=4)}
    for seed, (name, fields) in enumerate(shapes.items()):
        checkpoint.save(tmp_path / name, **checkpoint.describe(
            tiny(seed, vocab_size=257, context=64, **fields)), flops=100 + seed,
            config=dict(data=str(data), batch_size=4, context=16))
        (tmp_path / name / 'run.json').write_text(json.dumps(dict(tokenizer='bytes')))
    nanodepth('evaluate', [*(str(tmp_path / name) for name in shapes), '--batches=2',
                           '--device=cpu', f'--out={tmp_path / "e.png"}'])
    said = capsys.readouterr().out
    rows = {(row['run'], row['measure']): float(row['mean']) for row in rows_in(tmp_path / 'e.csv')}
    seeds = torch.tensor([rows['looped-0', 'loss'], rows['looped-1', 'loss']], dtype=torch.float64)
    assert f'| {seeds.mean():.3f} ± {seeds.std() / 2 ** 0.5:.3f} ' in said
    change = seeds.mean() - rows['small', 'loss']
    assert re.search(rf'minus small +\| equal parameters +\| +\| {change:+.3f}', said)
    assert re.search(r'minus deep +\| equal compute', said)
    val = Loader(str(data), 4, 16, split='val')
    model = checkpoint.load_model(tmp_path / 'deep')
    assert rows['deep', 'loss'] == tokens_measure(model, val, 2)[0]
    assert (tmp_path / 'e.png').stat().st_size > 10_000
    state = checkpoint.load(tmp_path / 'deep')
    state['config']['data'] = 'elsewhere'
    checkpoint.save(tmp_path / 'deep', **state)
    (tmp_path / 'elsewhere').mkdir()
    assert 'there is no dataset at elsewhere' in refused(capsys, 'evaluate', tmp_path / 'deep')
    nanodepth('evaluate', [str(tmp_path / 'deep'), '--tasks=toy_copy', '--n=4', '--device=cpu',
                           f'--out={tmp_path / "f.csv"}'])
    assert 'so its loss is left out' in capsys.readouterr().err
    assert 'give --data, so that both answer the same' in refused(
        capsys, 'evaluate', tmp_path / 'small', tmp_path / 'deep', '--tasks=toy_copy', '--n=4',
        f'--out={tmp_path / "g.csv"}')


def test_what_is_too_long_is_left_out_and_shots_are_scores_of_their_own(run, tmp_path, capsys):
    nanodepth('evaluate', [str(run[0]), '--tasks=toy_copy,toy_assign/1', '--n=6', '--shots=0,2,7',
                           '--device=cpu', f'--out={tmp_path / "e.png"}'])
    assert 'toy_assign/1, 7 shots is left out' in capsys.readouterr().err
    assert [row['measure'] for row in rows_in(tmp_path / 'e.csv')] == [
        'toy_copy, 0 shots', 'toy_assign/1, 0 shots', 'toy_assign/1, 2 shots']


def test_a_change_has_the_error_of_pairs():
    before, after = (Score('share', sum(right) / 5, None, right)
                     for right in ([1, 0, 0, 1, 0], [1, 1, 0, 1, 1]))
    change = measure.compared(before, after)
    assert change.mean == pytest.approx(0.4) and change.p == 0.5    # two of two went up
    assert change.error == pytest.approx(torch.tensor([0., 1, 0, 0, 1]).std().item() / 5 ** 0.5)
    # a perplexity is no mean over its documents
    assert measure.compared(Score('score', 9.0, None, [2.0, 4.0]),
                            Score('score', 7.0, None, [1.0, 3.0]))[1:] == (None, None)


def test_a_group_and_a_perplexity_have_no_error_of_their_change(run, manager, tmp_path,
                                                                monkeypatch):
    tasks = tmp_path / 'tasks'
    (tasks / 'g.yaml').write_text('group: local_group\ntask:\n  - local_choice\n  - local_other\n'
                                  'aggregate_metric_list:\n  - metric: acc\n    '
                                  'weight_by_size: true\n')
    (tasks / 'o.yaml').write_text((tasks / 'a.yaml').read_text().replace('local_choice',
                                                                         'local_other'))
    from lm_eval.tasks import TaskManager
    known = TaskManager(include_path=[str(tasks)], include_defaults=False)
    monkeypatch.setattr(harness, 'manager', lambda everything: known)
    examined = Examined(run[1], Asked(tasks='local_group,local_rolling', device='cpu'))
    plain, looped = (examined.scores(way) for way in (Way(), Way(window='1-2', K=2)))
    assert {*plain} == {'local_group acc', 'local_choice acc', 'local_other acc',
                        'local_rolling byte_perplexity (less is better)'}
    changes = {name: measure.compared(plain[name], looped[name]) for name in plain}
    assert [name.split()[0] for name, change in changes.items() if change.error is not None] == [
        'local_choice', 'local_other']
    nanodepth('evaluate', [str(run[1]), '--tasks=local_group,local_rolling', '--device=cpu',
                           f'--out={tmp_path / "g.csv"}'])
    rows = {row['measure']: row for row in rows_in(tmp_path / 'g.csv')}
    assert rows['local_choice acc']['low'] and not rows['local_group acc']['low']


def test_chat_templates_are_those_of_the_checkpoint(run):
    about = json.loads((run[1] / 'tokenizer_config.json').read_text())
    about['chat_template'] = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% "
        "if add_generation_prompt %}<assistant>{% endif %}")
    (run[1] / 'tokenizer_config.json').write_text(json.dumps(about))
    plain, chat = (Examined(run[1], Asked(tasks='primitive_toy_copy', limit=20, chat=on,
                                          device='cpu')).scores(Way()) for on in (False, True))
    assert plain['primitive_toy_copy acc'].mean != chat['primitive_toy_copy acc'].mean
    with pytest.raises(ValueError, match='tokenizer.chat_template is not set'):
        Examined(run[0], Asked(tasks='primitive_toy_copy', limit=2, chat=True,
                               device='cpu')).scores(Way())


def test_tasks_that_are_kept_score_as_fresh_ones(run):
    examined = harness.Harness(run[1], [['primitive_toy_copy']], Asked(limit=5), 'cpu')
    first = examined.scores(Way())
    kept, = examined.keep.values()
    assert examined.scores(Way()) == first and [*examined.keep.values()] == [kept]
    assert harness.Harness(run[1], [['primitive_toy_copy']], Asked(limit=5),
                           'cpu').scores(Way()) == first


@pytest.mark.parametrize('args, message', [
    (['--tasks=primitive_toy_copi'],
     "there is no task 'primitive_toy_copi'; did you mean 'primitive_toy_copy'?"),
    (['--tasks=toy_copy', '--r=4'], 'r=4 is for models with a recurrent core'),
    (['--tasks=toy_copy', '--loop=9'], "the loop '9' has 9 unique layers"),
    (['--tasks=toy_copy', '--loop=3x2', '--window=mid2'], '--loop and the wrapper are different'),
    (['--tasks=toy_copy', '--window=2-9'], 'within 0 to 3'),
    (['--tasks=toy_copy', '--method=naive', '--T=2'], "'naive' has no option 'T'"),
    (['--tasks=toy_copy', '--measures=los'], "did you mean 'loss'?"),
    (['--tasks=toy_copy', '--limit=3'], "--limit is for lm-eval's tasks"),
    (['--tasks=toy_assign/x'], 'the depth must be a whole number'),
    (['--tasks=primitive_toy_copy', '--shots=5'], '--shots is for our own tasks'),
    (['--tasks=looped,knowledge'], 'stands in two of looped, knowledge'),
    ([], 'does not say what it was trained on'),
    (['--tasks=arc_easy'], "Couldn't reach 'allenai/ai2_arc'")])
def test_what_is_refused(run, capsys, args, message):
    assert message in refused(capsys, 'evaluate', run[0], *args, '--device=cpu')


def test_the_authors_form_of_gsm8k(tmp_path):
    "One fixed shot, their words, and the last number of what is said."
    import yaml
    sys.path.insert(0, str(ROOT / 'data/evals'))
    import tasks
    shot, = tasks.fifteen_trees()
    assert '15 trees' in shot['question'] and shot['target'].endswith('6.')
    from lm_eval.api.task import ConfigurableTask
    text = (ROOT / 'data/evals/gsm8k_cot_sean.yaml').read_text()
    about = yaml.safe_load(text.replace('!function tasks.fifteen_trees', '[]'))
    about['fewshot_config']['samples'] = tasks.fifteen_trees
    asked = dict(question='How many?', answer='x #### 1,250')
    (tmp_path / 'test.json').write_text(json.dumps(asked))
    about |= dict(dataset_path='json', dataset_name=None,
                  dataset_kwargs=dict(data_files=dict(test=str(tmp_path / 'test.json'))))
    task = ConfigurableTask(config=about)
    doc = task.test_docs()[0]
    prompt = task.fewshot_context(doc, 1)
    assert prompt.startswith(f"Q: {shot['question']}\nA: Let's think step by step.")
    assert prompt.endswith("Q: How many?\nA: Let's think step by step.")
    assert task.doc_to_target(doc) == '1,250'
    task.build_all_requests(limit=1)
    task.instances[0].resps = ['3 and 2 make 5. So it is 1250.']
    task.apply_filters()
    found = task.process_results(doc, [task.instances[0].filtered_resps['flexible-extract']])
    assert found['exact_match'] == 1.0


def test_a_list_with_shots_keeps_the_tasks_own_questions(monkeypatch):
    "The harness takes a dict of name and shots for a task of its own making, without any."
    seen = {}

    def simple_evaluate(model, tasks, task_manager, **_):
        seen.update(task_manager.load(tasks)['tasks'])
    monkeypatch.setattr(lm_eval, 'simple_evaluate', simple_evaluate)
    monkeypatch.setitem(harness.LISTS, 'two', [('primitive_toy_copy', 2),
                                                ('primitive_toy_assign_d0', None)])
    harness.evaluate(None, ['two'], {})
    assert seen['primitive_toy_copy'].config.num_fewshot == 2
    assert seen['primitive_toy_copy'].config.doc_to_text
    assert not seen['primitive_toy_assign_d0'].config.num_fewshot
