"""lm-eval: a run of ours, looped or recurrent too, gives what lm-eval's own `hf` gives on its
export, and what our own scorer gives."""
import dataclasses
import json
import sys

import pytest
from conftest import ROOT

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import evaluate
from nanodepth.common.errors import Refused
from nanodepth.data import primitives
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.engine import checkpoint, measure
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


LOCAL = ['local_choice', 'local_text', 'local_rolling']


def test_an_export_scores_as_lm_evals_own_model(run, manager):
    from lm_eval.models.huggingface import HFLM
    ours, theirs = run
    expected = scored(HFLM(str(theirs), device='cpu', batch_size=4), manager, LOCAL)
    for path in run:            # our checkpoint with its loop, and the folder it was exported to
        lm = evaluate.open_model(path, device='cpu', batch_size=5)
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
    results = scored(evaluate.open_model(path, device='cpu', **how), manager, ['local_choice'])
    model = measure.set_depth(checkpoint.load_model(path), **how)
    docs = [sample['doc'] for sample in results['samples']['local_choice']]
    examples = [primitives.Example(doc['q'], doc['options'], doc['gold']) for doc in docs
                if len(doc['q']) < 80]
    values = iter(measure.log_likelihoods(model, get_tokenizer('bytes'), examples))
    for sample in results['samples']['local_choice']:
        if len(sample['doc']['q']) < 80:            # what is longer is cut by lm-eval
            theirs = [answer[0][0] for answer in sample['resps']]
            assert theirs == pytest.approx(next(values).tolist(), rel=1e-4)


def test_scores_that_are_not_numbers_are_refused(run, manager):
    lm = evaluate.open_model(run[0], device='cpu')
    lm.model.lm_head.register_forward_hook(lambda module, x, y: y * float('nan'))
    with pytest.raises(Refused, match='logits that are not numbers'):
        scored(lm, manager, ['local_choice'])


def test_the_primitives_score_as_primitives_py_does(run, manager):
    ours, _ = run
    results = scored(evaluate.open_model(ours, device='cpu'), manager,
                     ['primitive_toy_assign_d1', 'primitive_toy_copy'], limit=200)['results']
    model = checkpoint.load_model(ours)
    for task, name, depth in (('primitive_toy_assign_d1', 'toy_assign', 1),
                              ('primitive_toy_copy', 'toy_copy', 0)):
        examples = primitives.few_shot(name, 200, shots=0, depth=depth)
        accuracy, _ = measure.score(model, get_tokenizer('bytes'), examples)
        assert results[task]['acc,none'] == accuracy and 0.05 < accuracy < 0.95


def test_every_task_of_the_lists_is_there_and_the_papers_primitives_have_five_shots():
    manager = evaluate.manager(everything=True)
    names = {task for tasks in evaluate.LISTS.values() for task, _ in tasks}
    assert names <= set(manager.all_tasks) and len(evaluate.LISTS['depth']) == 16
    told = (ROOT / 'data/evals/README.md').read_text()
    for task, _ in evaluate.LISTS['depth']:
        assert f'`{task}`' in told, f'evals/README.md does not say whether {task} is stock or ours'
    docs = list(manager.load(['primitive_assign_code'])['tasks'].values())[0].test_docs()
    assert len(docs) == 1000 and docs[0]['prompt'].count('print(') == 6


def test_svamp_is_one_question():
    sys.path.insert(0, str(ROOT / 'data/evals'))
    import tasks
    from datasets import Dataset
    [doc] = tasks.svamp(Dataset.from_list([dict(Body='A. ', Question='B?', Answer=2.5)]))
    assert (doc['question'], doc['answer']) == ('A. B?', '2.5')


def test_the_command(run, tmp_path, capsys):
    ours, _ = run
    nanodepth('evaluate', [str(ours), '--tasks=primitive_toy_copy', '--limit=10',
                                '--device=cpu', f'--out={tmp_path / "e.json"}'])
    out = capsys.readouterr().out
    assert ('| primitive_toy_copy | 0     | acc    |' in out
            and f'numbers: {tmp_path / "e.json"}' in out)
    # what was measured before stays, once
    for more in (['--loop=1-1x3-1'], ['--loop=1-1x3-1'], []):
        nanodepth('evaluate', [str(ours), '--tasks=primitive_toy_copy', '--limit=10',
                                    '--device=cpu', f'--out={tmp_path / "e.json"}', *more])
    rows = json.loads((tmp_path / 'e.json').read_text())['rows']
    assert sorted(str(row['loop']) for row in rows) == ['1-1x3-1', 'None']
    capsys.readouterr()
    row = rows[0]
    assert row['task'] == 'primitive_toy_copy' and 0 <= row['value'] <= 1 and row['stderr'] >= 0
    for args, message in (([str(ours), '--tasks=primitive_toy_copi'],
                           "there is no task 'primitive_toy_copi'; did you mean "
                           "'primitive_toy_copy'?"),
                          ([str(ours), '--r=4'], 'r=4 is for models with a recurrent core'),
                          ([str(ours), '--loop=9'], "the loop '9' has 9 unique layers"),
                          ([str(tmp_path / 'no')], 'there is no checkpoint at'),
                          ([str(ours), '--tasks=arc_easy'],
                           "Couldn't reach 'allenai/ai2_arc'")):
        with pytest.raises(SystemExit) as stop:
            nanodepth('evaluate', [*args, '--device=cpu'])
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert stop.value.code == 2 and error.startswith('evaluate: ') and message in error, error


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
    monkeypatch.setitem(evaluate.LISTS, 'two', [('primitive_toy_copy', 2),
                                                ('primitive_toy_assign_d0', None)])
    evaluate.harness(None, 'two')
    assert seen['primitive_toy_copy'].config.num_fewshot == 2
    assert seen['primitive_toy_copy'].config.doc_to_text
    assert not seen['primitive_toy_assign_d0'].config.num_fewshot
