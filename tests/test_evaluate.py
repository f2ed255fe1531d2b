"""lm-eval: local tasks give what lm-eval's own `hf` model gives on the exported checkpoint, and
the primitives what primitives.py gives."""
import dataclasses
import json
import sys

import pytest
import torch
from conftest import ROOT

import nanodepth
from data import primitives
from data.tokenizer import get_tokenizer
from engine import checkpoint, hf, measure
from tools import adapters, evaluate

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
    nanodepth.main('export', [str(ours), str(tmp_path / 'hf')])
    return ours, tmp_path / 'hf'


def scored(model, manager, tasks, **options):
    return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0,
                                   **options)


LOCAL = ['local_choice', 'local_text', 'local_rolling']


def test_the_harness_gives_what_its_own_model_gives(run, manager):
    ours, theirs = run
    from lm_eval.models.huggingface import HFLM
    expected = scored(HFLM(str(theirs), device='cpu', batch_size=4), manager, LOCAL)
    for path in run:            # our checkpoint with its loop, and the folder it was exported to
        found = scored(evaluate.adapter()(str(path), device='cpu', batch_size=5), manager, LOCAL)
        for task in LOCAL:
            for a, b in zip(found['samples'][task], expected['samples'][task]):
                assert a['doc'] == b['doc']
                if task == 'local_text':
                    assert a['resps'] == b['resps'] and len(a['resps'][0][0]) <= 12
                elif task == 'local_choice':
                    assert [r[0][1] for r in a['resps']] == [r[0][1] for r in b['resps']]
                    assert [r[0][0] for r in a['resps']] == pytest.approx(
                        [r[0][0] for r in b['resps']], rel=1e-4)
                else:
                    assert a['resps'][0] == pytest.approx(b['resps'][0], rel=1e-4)
        assert found['results']['local_choice']['acc,none'] == expected['results']['local_choice'][
            'acc,none']
    texts = [s['resps'][0][0] for s in expected['samples']['local_text']]
    # they differ, and some were stopped
    assert len(set(texts)) > 2 and any('b' not in t and len(t) < 12 for t in texts)


def test_several_ends_and_special_tokens(tmp_path, tiny, manager):
    "As Llama 3 and Qwen 3 have them: any of a list ends a text, and none of them is printed."
    from lm_eval.models.huggingface import HFLM
    model = tiny(vocab_size=260, context=96, n_layer=2)
    with torch.no_grad():
        model.head.weight[256:259] *= 2         # likely
    hf.save_hf(model, tmp_path / 'x', tokenizer='bytes')
    spec = json.loads((tmp_path / 'x/tokenizer.json').read_text())
    spec['added_tokens'] += [spec['added_tokens'][0] | dict(id=257 + i, content=f'<|{name}|>')
                             for i, name in enumerate(('eot', 'other'))]
    (tmp_path / 'x/tokenizer.json').write_text(json.dumps(spec))
    config = json.loads((tmp_path / 'x/config.json').read_text())
    (tmp_path / 'x/config.json').write_text(json.dumps(config | dict(eos_token_id=[256, 257])))
    found, expected = ([s['resps'][0][0] for s in scored(m, manager,
                                                         ['local_text'])['samples']['local_text']]
                       for m in (evaluate.adapter()(str(tmp_path / 'x'), device='cpu'),
                                 HFLM(str(tmp_path / 'x'), device='cpu', batch_size=4)))
    assert found == expected and len(set(found)) > 2 and not any('<|' in text for text in found)
    assert adapters.ends(str(tmp_path / 'x'), get_tokenizer(tmp_path / 'x'))[1] == {256, 257}


def test_a_continuation_that_became_part_of_its_context(run):
    lm = evaluate.adapter()(str(run[0]), device='cpu')
    assert lm._loglikelihood_tokens([(None, [1, 2], []), (None, [], [3])])[0] == (0.0, True)


def test_model_arguments_as_text(run, manager):
    ours, _ = run
    evaluate.adapter()
    plain, looped = (scored('nanodepth', manager, ['local_choice'],
                            model_args=f'pretrained={ours},device=cpu{more}')['samples'][
                                'local_choice']
                     for more in ('', ',loop=1-1x3-1'))
    assert [s['resps'] for s in plain] != [s['resps'] for s in looped]
    model = checkpoint.load_model(ours)
    model.config.order = [0, 1, 1, 1, 2]
    enc, sample = get_tokenizer('bytes'), looped[3]
    row = [256, *enc.encode(sample['doc']['q'])]
    option = enc.encode(sample['doc']['options'][1])
    row = (row + option)[-97:]
    with torch.no_grad():
        values = model(torch.tensor([row[:-1]])).log_softmax(-1)[0, -len(option):].gather(-1,
                torch.tensor(option)[:, None]).sum().item()
    assert sample['resps'][1][0][0] == pytest.approx(values, rel=1e-4)


def test_the_primitives_score_as_primitives_py_does(run, manager):
    ours, _ = run
    found = scored(evaluate.adapter()(str(ours), device='cpu'), manager,
                   ['primitive_toy_assign_d1', 'primitive_toy_copy'], limit=200)
    model = checkpoint.load_model(ours)
    for task, name, depth in (('primitive_toy_assign_d1', 'toy_assign', 1),
                              ('primitive_toy_copy', 'toy_copy', 0)):
        examples = primitives.few_shot(name, 200, shots=0, depth=depth)
        accuracy, _ = measure.score(model, get_tokenizer('bytes'), examples)
        assert found['results'][task]['acc,none'] == accuracy and 0.05 < accuracy < 0.95


def test_every_task_of_the_lists_is_there_and_the_papers_primitives_have_five_shots():
    manager = evaluate.manager(everything=True)
    names = {task for tasks in evaluate.LISTS.values() for task, _ in tasks}
    assert names <= set(manager.all_tasks) and len(evaluate.LISTS['depth']) == 22
    told = (ROOT / 'data/evals/README.md').read_text()
    for task, _ in evaluate.LISTS['depth']:
        assert f'`{task}`' in told, f'evals/README.md does not say whether {task} is stock or ours'
    docs = list(manager.load(['primitive_assign_code'])['tasks'].values())[0].test_docs()
    assert len(docs) == 1000 and docs[0]['prompt'].count('print(') == 6


def test_local_files_of_ours(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / 'data/evals'))
    import tasks
    monkeypatch.setattr(tasks, 'HERE', tmp_path)
    with pytest.raises(FileNotFoundError,
                       match='AddSub.json is missing: put it there from the MAWPS repository'):
        tasks.mawps('AddSub')
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data/AddSub.json').write_text(
        json.dumps([dict(iIndex=1, sQuestion=' How many? ', lEquations=['X=1+2'],
                         lSolutions=[3.0])]))
    assert tasks.mawps('AddSub')['test'][0] == dict(question='How many?', answer='3')
    turn = [dict(question=q, answers=[dict(text=a)], orig_answer=dict(text=a))
            for q, a in (('Who?', 'Ann'), ('When?', 'The 3rd'))]
    (tmp_path / 'data/val_v0.2.json').write_text(
        json.dumps(dict(data=[dict(paragraphs=[dict(context='C', qas=turn)])])))
    docs = tasks.quac()['validation']
    assert docs[1]['history'] == 'Q: Who?\nA: Ann\n' and docs[0]['history'] == ''
    assert (tasks.free_answer(docs[1], ['3rd, of May'])['f1'] == pytest.approx(2 * 1 / (3 + 1))
            and tasks.free_answer(docs[1], ['a 3rd.'])['em'] == 1)
    from datasets import Dataset
    assert tasks.svamp(Dataset.from_list([dict(Body='A. ', Question='B?', Answer=2.5)]))[0][
        'question'] == 'A. B?'
    rows = tasks.english(
        Dataset.from_list([dict(id=f'{x}-1', answers=dict(text=['y'])) for x in ('english',
            'thai')]))
    assert len(rows) == 1 and rows[0]['all_answers'] == ['y']


def test_the_command(run, tmp_path, capsys):
    ours, _ = run
    nanodepth.main('evaluate', [str(ours), '--tasks=primitive_toy_copy', '--limit=10',
                                '--device=cpu', f'--out={tmp_path / "e.json"}'])
    out = capsys.readouterr().out
    assert ('| primitive_toy_copy | 0     | acc    |' in out
            and f'numbers: {tmp_path / "e.json"}' in out)
    # what was measured before stays, once
    for more in (['--loop=1-1x3-1'], ['--loop=1-1x3-1'], []):
        nanodepth.main('evaluate', [str(ours), '--tasks=primitive_toy_copy', '--limit=10',
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
                          ([str(ours), '--tasks=quac'], 'the data of quac could not be loaded'),
                          ([str(ours), '--tasks=arc_easy'],
                           'the data of arc_easy could not be loaded')):
        with pytest.raises(SystemExit) as stop:
            nanodepth.main('evaluate', [*args, '--device=cpu'])
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert stop.value.code == 2 and error.startswith('evaluate: ') and message in error, error


def test_without_lm_eval_it_says_so(run, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.split('.')[0] == 'lm_eval']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'lm_eval', None)
    # not what an earlier test has made
    monkeypatch.setattr(evaluate, 'adapter', evaluate.adapter.__wrapped__)
    with pytest.raises(SystemExit):
        nanodepth.main('evaluate', [str(run[0]), '--device=cpu'])
    assert 'this needs lm-eval (pip install "lm-eval[hf]")' in capsys.readouterr().err


def test_the_authors_form_of_gsm8k(tmp_path):
    "One fixed shot, their words, and the last number of what is said."
    import yaml

    from data.evals import tasks
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
