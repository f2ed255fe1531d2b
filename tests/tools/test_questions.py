"""Test real questions: rows of a package become the questions that lm-eval's own tasks read, with
the same prompts. A checkpoint of 16 bits computes in the type in which the device is fast."""
import json
import runpy

import pytest
import torch
from helpers import ROOT, save_run

from nanodepth.models import checkpoint
from nanodepth.models.hf import save_hf
from nanodepth.scoring.rows import ScoreOptions, Subject

pytest.importorskip('lm_eval')
SAME = '\nA. a\nB. b\nC. c\nD. d\nE. a'         # E reads the same as A
# {task: (file, rows, the first one's prompt and right continuation as lm-eval's own task has them)}
QUESTIONS = dict(
    piqa=('PIQA/validation', [dict(question=question, options='A. cools \nB. burns',
                                   answer='A. cools ') for question in ('ice box ', *'abcdefgh')],
          'Question: ice box\nAnswer:', 'cools '),
    boolq=('BoolQ/dev', [dict(question='is it', passage='It is.', answer='True')],
           'It is.\nQuestion: is it?\nAnswer:', 'yes'),
    commonsense_qa=('CommonsenseQA/validation', [
        dict(question='Where?', options=SAME, answer='E. a'),
        dict(question='none of them, so it is left out', options=SAME, answer='A. a?')],
        f'Question: Where?{SAME}\nAnswer:', 'E'),
    openbookqa=('OpenBookQA/test', [dict(question='Fog is ', answer='B. dry',
                                         options='A. wet\nB. dry\nC. hot\nD. red')],
                'Fog is', 'dry'),
    mmlu=('MMLU/test', [dict(question='1 + 1', options='A. 1\nB. 2\nC. 3\nD. 4', answer='B. 2')],
          '1 + 1\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:', 'B'),
    asdiv=('ASDiv/test', [dict(passage='Two and two.', question='How many?', answer='4 apples')],
           'Two and two.\nQuestion:How many?\nAnswer:', '4'),
    nq_open=('NQ-open/test', [dict(question='who is it', answer=['The one']),
                              dict(question='and now', answer=['Two', '2'])],
             'Q: who is it?\nA:', 'The one'))


def test_questions_become_the_tasks_of_lm_eval(tmp_path):
    from lm_eval.tasks import TaskManager
    for file, rows, *_ in QUESTIONS.values():
        path = tmp_path / f'data/{file}.jsonl'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('\n'.join(map(json.dumps, rows)))
    prepare = runpy.run_path(str(ROOT / 'data/evals/questions/prepare.py'))
    prepare['main']([f'{tmp_path}/data', f'{tmp_path}/tasks'])
    manager = TaskManager(include_path=str(tmp_path / 'tasks'), include_defaults=False)
    tasks = {}
    for name, (_, rows, prompt, answer) in QUESTIONS.items():
        [tasks[name]] = manager.load([f'questions_{name}'])['tasks'].values()
        docs = list(tasks[name].test_docs())
        assert len(docs) == (1 if name == 'commonsense_qa' else len(rows))
        target = tasks[name].doc_to_target(docs[0])
        if isinstance(target, int):
            target = tasks[name].doc_to_choice(docs[0])[target]
        assert (tasks[name].doc_to_text(docs[0]), target) == (prompt, answer)
    for name, shots in (('piqa', 8), ('nq_open', 1)):
        tasks[name].set_config('num_fewshot', shots)
        tasks[name].set_fewshot_seed(1234)
        tasks[name].build_all_requests(rank=0, world_size=1)
    for question in tasks['piqa'].instances:        # none stands among its own examples
        assert question.args[0].count(f'Question: {question.doc["goal"]}\n') == 1
    assert tasks['nq_open'].instances[0].args[0] == (
        'Answer these questions:\n\nQ: and now?\nA: Two\nQ: who is it?\nA:')


@pytest.mark.parametrize('fast', [True, False])
def test_dtype_of_16_bits_is_kept_where_it_is_fast(fast, tiny, tmp_path, monkeypatch):
    "And only of what was published in them; positions keep their precision."
    monkeypatch.setattr(checkpoint, 'fast_in_bfloat16', lambda device: fast)
    model = tiny(vocab_size=257, context=64)
    save_run(tmp_path / 'run', model)
    save_hf(model.bfloat16(), tmp_path / 'hf', tokenizer=str(tmp_path / 'run'))
    for path, dtype, wanted in (('hf', 'auto', 'bfloat16' if fast else 'float32'),
                                ('hf', 'float32', 'float32'), ('run', 'auto', 'float32'),
                                ('run', 'bfloat16', 'bfloat16')):
        asked = ScoreOptions(tasks='toy_copy', n=4, device='cpu', dtype=dtype)
        got = Subject(tmp_path / path, asked).model
        assert (got.embed.weight.dtype, got.cos.dtype) == (getattr(torch, wanted), torch.float32)
