"""Real questions: rows of the package become what lm-eval's own tasks read, with their prompts; a
checkpoint of 16 bits computes in what the device is fast at; the loss has a unit for each row."""
import json
import runpy

import pytest
import torch
from conftest import ROOT, asked_of, save_run, write_noise

from nanodepth.models import checkpoint
from nanodepth.models.hf import save_hf
from nanodepth.scoring.rows import Asked, Subject
from nanodepth.training.loader import Loader

pytest.importorskip('lm_eval')
LINES = {
    'PIQA/validation': [dict(question=question, options='A. cools \nB. burns',
                             answer='A. cools ') for question in ('ice box ', *'abcdefghijkl')],
    'CommonsenseQA/validation': [dict(question='Where?', options='\nA. a\nB. b\nC. c\nD. d\nE. e',
                                      answer='E. e'), dict(question='Where?', options='\nA. a?',
                                                           answer='A. a'),
                                 dict(question='Two?', options='\nA. a\nB. b\nC. a',
                                      answer='C. a')],       # not A, though it reads the same
    'OpenBookQA/test': [dict(question='Fog is ', options='A. wet\nB. dry\nC. hot\nD. red',
                             answer='B. dry')],
    'BoolQ/dev': [dict(question='is it', passage='It is.', answer='True')],
    'MMLU/test': [dict(question='1 + 1', options='A. 1\nB. 2\nC. 3\nD. 4', answer='B. 2')],
    'ASDiv/test': [dict(passage='Two and two.', question='How many?', answer='4 apples')],
    'NQ-open/test': [dict(question='who is it', answer=['The one']), dict(
        question='and now', answer=['Two', '2'])]}
# the prompt, and the right continuation, as lm-eval's own task of that name has them
WANTED = dict(
    piqa=('Question: ice box\nAnswer:', 'cools '),
    boolq=('It is.\nQuestion: is it?\nAnswer:', 'yes'),
    commonsense_qa=('Question: Where?\nA. a\nB. b\nC. c\nD. d\nE. e\nAnswer:', 'E'),
    openbookqa=('Fog is', 'dry'), mmlu=('1 + 1\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:', 'B'),
    asdiv=('Two and two.\nQuestion:How many?\nAnswer:', '4'),
    nq_open=('Q: who is it?\nA:', 'The one'))


def test_rows_become_the_tasks_of_lm_eval(tmp_path):
    from lm_eval.tasks import TaskManager
    for name, rows in LINES.items():
        path = tmp_path / f'data/{name}.jsonl'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('\n'.join(map(json.dumps, rows)))
    prepare = runpy.run_path(str(ROOT / 'data/evals/questions/prepare.py'))
    prepare['main']([f'{tmp_path}/data', f'{tmp_path}/tasks'])
    manager = TaskManager(include_path=str(tmp_path / 'tasks'), include_defaults=False)
    for name, (prompt, answer) in WANTED.items():
        [task] = manager.load([f'questions_{name}'])['tasks'].values()
        doc, *others = task.test_docs()
        assert len(others) == dict(piqa=12, nq_open=1, commonsense_qa=1).get(name, 0)
        if name == 'commonsense_qa':
            assert others[0]['answerKey'] == 'C'
        assert task.doc_to_text(doc) == prompt, name
        target = task.doc_to_target(doc)
        if isinstance(target, int):
            target = task.doc_to_choice(doc)[target]
        assert target == answer, name

    def with_shots(name, shots):
        task = manager.load([f'questions_{name}'])['tasks'][f'questions_{name}']
        task.set_config('num_fewshot', shots)
        task.set_fewshot_seed(1234)
        task.build_all_requests(rank=0, world_size=1)
        return task.instances
    for question in with_shots('piqa', 10):     # none stands among its own examples
        assert question.args[0].count(f'Question: {question.doc["goal"]}\n') == 1
    assert with_shots('nq_open', 1)[0].args[0] == (
        'Answer these questions:\n\nQ: and now?\nA: Two\nQ: who is it?\nA:')


@pytest.mark.parametrize('fast', [True, False])
def test_what_was_published_in_16_bits_computes_in_what_is_fast(fast, tiny, tmp_path, monkeypatch,
                                                                capsys):
    monkeypatch.setattr(checkpoint, 'fast_in_bfloat16', lambda device: fast)
    model = tiny(vocab_size=257, context=64)
    save_run(tmp_path / 'run', model)
    save_hf(model.bfloat16(), tmp_path / 'hf', tokenizer=str(tmp_path / 'run'))
    for path, dtype, wanted in (('hf', 'auto', 'bfloat16' if fast else 'float32'),
                                ('hf', 'float32', 'float32'), ('run', 'auto', 'float32'),
                                ('run', 'bfloat16', 'bfloat16')):
        asked = Asked(tasks='toy_copy', n=4, device='cpu', dtype=dtype)
        got = Subject(tmp_path / path, asked).model
        assert got.embed.weight.dtype == getattr(torch, wanted)
        assert got.cos.dtype == torch.float32           # positions keep their precision
        said = capsys.readouterr().err
        assert (f'computed in {wanted}' in said) == ((path, dtype) == ('hf', 'auto'))


@pytest.mark.parametrize('kinds, length, rows', [
    ([], 8000, 12), (['text'], 8000, 12), (['text'], 3 * 16 + 1, 3)])
def test_each_row_is_a_unit_of_a_loss_and_counts_once(kinds, length, rows, tiny, tmp_path):
    write_noise(tmp_path / 'noise', kinds, length)
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=64), tmp_path / 'noise')
    subject = Subject(run, Asked(batches=3, device='cpu'))
    score = asked_of(subject)['loss']
    val = Loader(tmp_path / 'noise', 4, 16, 'val')
    by_hand = {}
    for step in range(3):
        for tokens, targets, _ in zip(*val.batch(step)):
            with torch.no_grad():
                by_hand[tuple(tokens.tolist())] = subject.model(tokens[None], targets[None]).item()
    assert score.answers == pytest.approx([*by_hand.values()], rel=1e-5) and len(by_hand) == rows
    assert score.mean == pytest.approx(sum(by_hand.values()) / rows, rel=1e-5)
