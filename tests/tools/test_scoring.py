"""Test nanodepth/scoring: likelihoods, losses, lm-eval, the ways to run a model, evaluate and
sweep. Each score is compared with a slow form, or with lm-eval's own."""
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import tiny as family
from helpers import ROOT, log_of, logits, logits as logits_of, save_run, state_of, write_noise
from own_spans import GatedLoop, SlowCore
from tool_helpers import asked_of, byte_level_bpe, refused, row_of, table_of

from nanodepth import wrapped
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import evaluate, sweep
from nanodepth.common.options import read
from nanodepth.model import LM, ModelConfig, Refused, Span
from nanodepth.models import checkpoint
from nanodepth.models.checkpoint import state_of as state_of_any
from nanodepth.models.hf import answer_of, save_hf
from nanodepth.report.tables import print_table, read_rows, where
from nanodepth.retrofit import core_of, surgery
from nanodepth.scoring import harness, likelihoods, rows as scoring
from nanodepth.scoring.data import PrefixedLoader, parse_tasks, starts_of
from nanodepth.scoring.rows import (MEASURES, Score, ScoreOptions, Subject, data_scores,
                                    question_scores, score_of)
from nanodepth.scoring.ways import Ways, cost_columns, in_way, in_words, ways_of
from nanodepth.text.primitives import Example, few_shot
from nanodepth.text.tokenizer import get_tokenizer, write_tokenizer
from nanodepth.text.tokens import write_dataset
from nanodepth.train import train
from nanodepth.training.loader import Loader
from nanodepth.wrapper import SOLVERS, Window

lm_eval = pytest.importorskip('lm_eval')
from lm_eval.models.huggingface import HFLM
sys.path.insert(0, str(ROOT / 'data/evals'))
import tasks

pytestmark = pytest.mark.usefixtures('undrawn')


def test_rows_begin_as_in_the_training_of_the_checkpoint(gemma, tiny, tmp_path):
    """The tokens that begin a text count in no loss. Our own models are trained on windows, so
    their rows begin with no such token, although our exports begin a text with the end-of-text
    token."""
    write_noise(tmp_path / 'noise', [])
    theirs = tmp_path / 'theirs'
    shutil.copytree(gemma[0], theirs)
    for path in theirs.glob('*token*.json'):
        path.write_text(path.read_text().replace('<|endoftext|>', '<bos>'))
    asked = ScoreOptions(data=str(tmp_path / 'noise'), batches=2, device='cpu')
    subject, losses = Subject(theirs, asked), []
    plain = Loader(tmp_path / 'noise', 4, 511, 'val')
    for tokens, targets, _ in map(plain.batch, range(2)):
        logits = logits_of(gemma[1], F.pad(tokens, (1, 0), value=256))[:, 1:]
        losses.append(F.cross_entropy(logits.transpose(1, 2), targets))
    assert asked_of(subject)['loss'].mean == pytest.approx(np.mean(losses), rel=1e-5)
    ours = save_run(tmp_path / 'ours', tiny(n_layer=2, vocab_size=257, context=512),
                    data=tmp_path / 'noise')
    assert Subject(ours, asked, like=subject).val.starts == [256]       # the rows of the first one
    save_hf(tiny(n_layer=2), tmp_path / 'llama', tokenizer=theirs)
    nanodepth('cut', [str(tmp_path / 'llama'), '1-1-0', f'--out={tmp_path / "cut"}'])
    state = state_of_any(tmp_path / 'cut')
    for path, its_state, starts in (
            (gemma[0], {}, []), (ours, state_of_any(ours), []), (tmp_path / 'cut', state, [256]),
            (tmp_path / 'cut', state | dict(flops=1), []),
            (tmp_path / 'cut', state | dict(inherited_flops=1), [])):
        assert starts_of(path, its_state) == starts


@pytest.mark.parametrize('starts', [(7,), (3, 4)])
def test_starts_come_before_each_row_that_does_not_begin_with_them(starts, tmp_path):
    "A row that begins with them is padded at its end. What is added counts in no loss."
    rng, n = np.random.default_rng(0), len(starts)
    for split in ('train', 'val'):
        write_dataset(tmp_path, split, 'bytes', rng.integers(3, 9, 5000), kinds=['x'],
                      marks=rng.choice([0, 1, 129], 5000))
    plain, prefixed = (kind(tmp_path, 12, 7, seed=5) for kind in (Loader, PrefixedLoader))
    prefixed.starts, padded = starts, 0
    for step in range(20):
        for row, wanted in zip(zip(*prefixed.batch(step)), zip(*plain.batch(step)), strict=True):
            begins = wanted[0][:n].tolist() == [*starts]
            padded += begins
            for found, values, added in zip(row, wanted, (starts, [-1] * n, [0] * n)):
                values = values.tolist()
                if begins:
                    added = [0] * n if added == starts else added
                    assert found.tolist() == values + [*added]
                else:
                    assert found.tolist() == [*added] + values
    assert 0 < padded < 240


def test_losses_of_a_large_vocabulary():
    torch.manual_seed(0)
    logits = 30 + 0.01 * torch.randn(1, 4, 200_000)
    targets = torch.arange(4)[None]
    losses, _ = likelihoods.losses_of(lambda tokens: logits, targets, targets)
    exact = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize('fast', [True, False])
def test_a_model_in_16_bits_stays_so_if_the_device_is_fast_at_it(fast, tiny, tmp_path, monkeypatch):
    "This holds for published weights alone. Positions keep their precision."
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


TOKENS = torch.arange(24).view(2, 12)
BYTES = get_tokenizer('bytes')


def written(command, out, *argv):
    "Return the rows that a command writes."
    nanodepth(command, [*map(str, argv), '--device=cpu', f'--out={out}'])
    return read_rows(out.with_suffix('.csv'))


def in_window(model, window, solver='naive', K=3, **how):
    with wrapped(model, window, solver, K, **how):
        return logits(model, TOKENS)


def test_a_way_runs_what_it_names_and_is_undone(tiny):
    ours = tiny(n_layer=4)
    core, five = (surgery(tiny(n_layer=5), '1-2-2', r=r) for r in (2, 5))
    nested = surgery(tiny(n_layer=5), '1-2-2')
    nested.order = [0, Span(nested.order[1:])]
    for model in (core, five, nested):          # a new adapter takes nothing from the state
        torch.manual_seed(0)
        torch.nn.init.normal_(core_of(model).adapter.weight, std=0.1)
    theirs = family('gemma3_text')
    book = tiny(n_layer=4, order=[0, Window([1, 2], K=3), 3])
    within = tiny(n_layer=4, order=[0, Window([Window([1], K=3), 2], K=2), 3])
    for model, way, by_hand, cost in (
            (book, {}, lambda: in_window(ours, (1, 2), 'rk'), 8),
            (within, {}, lambda: logits(within, TOKENS), 1 + 2 * (3 + 1) + 1),
            (ours, {}, lambda: logits(ours, TOKENS), 4),
            (ours, dict(loop='1-2x3-1'), lambda: ours(TOKENS, order=[0, 1, 2, 1, 2, 1, 2, 3]), 8),
            (core, dict(r=5), lambda: logits(five, TOKENS), 1 + 2 * 5 + 2),
            (nested, dict(r=5), lambda: logits(five, TOKENS), 1 + 2 * 5 + 2),
            (core, dict(r=5, window='0-0', K=2), lambda: in_window(five, (0, 0), 'rk', 2), 14),
            (theirs, dict(window='2-3', solver='poly_blend', K=2, weights=(0.5, 0.25, 0.25)),
             lambda: in_window(theirs, (2, 3), 'poly_blend', 2, weights=(0.5, 0.25, 0.25)), 8),
            (theirs, dict(window='2-3', K=2, mode='layer'), lambda: in_window(
                theirs, (2, 3), 'rk', 2, mode='layer'), 8),
            (ours, dict(window='1-2', solver='naive', K=3), lambda: in_window(ours, (1, 2)), 8)):
        before = logits(model, TOKENS)
        with in_way(model, way):
            inside, about = logits(model, TOKENS), cost_columns({}, model, way)
        assert torch.equal(inside, by_hand()), way
        assert torch.equal(logits(model, TOKENS), before), way
        assert about['layers'] == cost, way
        if model is ours:       # the FLOPs are those of this many layers
            assert about['inference_flops'] == model.flops_per_token([0] * cost) // 3, way
    for model, loop in ((core, '2x2'), (theirs, '2-2x3-2')):
        with pytest.raises(Refused, match='only a model of ours'), in_way(model, dict(loop=loop)):
            pass
    spent = cost_columns(dict(flops=5, inherited_flops=7), ours, {})['training_flops']
    assert spent == 12 and math.isnan(cost_columns({}, ours, {})['training_flops'])


FOUR_LAYERS = LM(ModelConfig(vocab_size=9, n_layer=4, n_embd=8, n_head=1))


def typed(*argv):
    "Return the ways that options name, each as a user types it."
    return [in_words(way) for way in ways_of(read(Ways, argv))]


def swept(setting, *argv):
    "Return the values of one setting in the ways that a sweep tries on four layers."
    options = read(sweep.Options, ['run', *argv], ['model'])
    return [way[setting] for way in sweep.many_ways(options, FOUR_LAYERS)[1:]]


def ranked_by(*rows):
    return sweep.ranked_by([row_of(measure=measure, kind=kind, data=data)
                            for measure, kind, data in rows])


def judged(answers, changes, offset):
    "Return the number of answers in a half of a row."
    return [row.n for row in sweep.half([row_of(answers=answers, changes=changes)], offset)]


def f1(said, *right):
    values = {tasks.f1(doc, [said])['f1'] for doc in (
        dict(answer=right), dict(answers=right), dict(answer=dict(aliases=right)))}
    return [round(value, 6) for value in values]


LOSS, TOY, COPY = ('loss', 'nats', 'x'), ('toy_assign/1', 'share', ''), ('copy', 'share', 'x')


@pytest.mark.parametrize('function, arguments, value', [
    (typed, ['--loop=2x2,1-2x3-1'], ['as it is', '--loop=2x2', '--loop=1-2x3-1']),
    (typed, ['--window=mid4,0.5', '--K=2', '--T=1.5', '--decode=bypass'], [
        'as it is', '--window=mid4 --K=2 --T=1.5 --decode=bypass',
        '--window=0.5 --K=2 --T=1.5 --decode=bypass']),
    (typed, ['--solver=anderson', '--m=1,2', '--pin=true'], [
        'as it is', '--solver=anderson --m=1 --pin=True', '--solver=anderson --m=2 --pin=True']),
    # a way that is named twice is one way, or its rows would be taken for two seeds
    (typed, ['--window=mid4', '--K=2,2', '--T=1,1.0'], ['as it is', '--window=mid4 --K=2 --T=1']),
    (swept, ['window', '--window=all2,mid2,0-0', '--K=2'], ['0-1', '1-2', '2-3', '0-0']),
    (swept, ['loop', '--blocks=2,3', '--times=4'], ['2x4-2', '1-2x4-1', '2-2x4', '3x4-1', '1-3x4']),
    (swept, ['loop', '--loop=2x2-2,2-2x2'], ['2x2-2', '2-2x2']), (swept, ['r', '--r=2,3'], [2, 3]),
    (swept, ['beta', '--window=1-2', '--beta=0.3,0.5', '--cache=first,last'],
     [0.3, 0.3, 0.5, 0.5] * 2),
    (ranked_by, [LOSS, COPY], ['loss']),
    (ranked_by, [LOSS, TOY, COPY], ['toy_assign/1']),
    (ranked_by, [LOSS, TOY, ('b ter', 'less', ''), ('b acc', 'share', ''), ('b norm', 'share', '')],
     ['toy_assign/1', 'b acc']),
    (judged, [[1, 0, 1], [0, 0, 0], 0], [2]), (judged, [[1, 0, 1], [0, 0, 0], 1], [1]),
    (judged, [[1], [0], 1], []),                        # none is left to judge
    (parse_tasks, ['toy_assign/0-2,arc_easy,assign_math,toy'], (
        {f'toy_assign/{depth}': ('toy_assign', depth) for depth in range(3)} | dict(
            assign_math=('assign_math', 0), toy_copy=('toy_copy', 0)), ['arc_easy'])),
    (f1, ['The Eiffel Tower!', 'eiffel tower'], [1]), (f1, ['', 'one'], [0]),
    (f1, ['the', 'a'], [1]), (f1, ['in Paris France', 'Paris', 'Lyon France'], [0.5]),
    # a word counts as often as it is in both texts
    (f1, ['red red blue', 'red green'], [0.4])])
def test_small_function_by_hand(function, arguments, value):
    assert function(*arguments) == value


@pytest.fixture
def run(tmp_path, tiny):
    "A looped run of ours, and its export."
    model = tiny(vocab_size=257, context=96, n_layer=3, order=[0, 1, 1, 2])
    ours = tmp_path / 'ours'
    save_run(ours, model)
    nanodepth('export', [str(ours), str(tmp_path / 'hf')])
    return ours, tmp_path / 'hf'


CHAT = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.fixture
def local(manager, monkeypatch):
    "lm-eval knows only the tasks of `manager`, and a list `two` of them."
    monkeypatch.setattr(harness, 'TaskManager', lambda **_: manager)
    monkeypatch.setitem(harness.LISTS, 'two', [('local_choice', 2, None),
                                               ('local_other', None, None)])
    harness.find.cache_clear()
    yield manager
    harness.find.cache_clear()


@pytest.fixture
def results(monkeypatch):
    "A list to which each call of lm-eval adds its results."
    made, real = [], lm_eval.simple_evaluate

    def simple_evaluate(*args, **how):
        made.append(real(*args, **how))
        return made[-1]
    monkeypatch.setattr(harness, 'simple_evaluate', simple_evaluate)
    return made


@pytest.mark.parametrize('asked, shots', [
    (dict(tasks='local_choice,local_text,local_rolling'), {}), (dict(tasks='local_other'), {}),
    (dict(tasks='local_other', chat=True), {}), (dict(tasks='two'), dict(local_choice=2)),
    (dict(tasks='two', shots=(0,)), dict(local_choice=0, local_other=0)),
    (dict(tasks='two', shots=(1,), limit=7), dict(local_choice=1, local_other=1))], ids=str)
def test_scores_are_those_that_lm_eval_gives_its_own_model(asked, shots, run, local, results):
    "The checkpoint has a loop, and is also scored as an export."
    about, chat = run[1] / 'tokenizer_config.json', asked.get('chat', False)
    about.write_text(json.dumps(json.loads(about.read_text()) | dict(chat_template=CHAT)))
    wanted, said, own = {}, {}, HFLM(str(run[1]), device='cpu', batch_size=4)
    for task in asked['tasks'].replace('two', 'local_choice,local_other').split(','):
        theirs = lm_eval.simple_evaluate(
            own, tasks=[task], task_manager=local, num_fewshot=shots.get(task),
            apply_chat_template=chat, limit=asked.get('limit'), bootstrap_iters=0)
        wanted |= {f'{task} {key.partition(",")[0]}': value
                   for key, value in theirs['results'][task].items()
                   if ',none' in key and 'stderr' not in key}
        said |= theirs['samples']
    for path in run[chat:]:
        subject = Subject(path, ScoreOptions(device='cpu', measures=(), **asked))
        found = asked_of(subject)
        assert {*found} - {*wanted} == ({'mean of two'} if asked['tasks'] == 'two' else set())
        for name, value in wanted.items():
            assert found[name].mean == pytest.approx(value, rel=1e-4)
        for task, samples in said.items():
            for a, b in zip(results[-1]['samples'][task], samples, strict=True):
                assert a['doc'] == b['doc']
                if task == 'local_text':
                    assert a['resps'] == b['resps']
                else:           # a log-likelihood, and whether the option is the greedy text
                    assert np.array(a['resps'], float) == pytest.approx(
                        np.array(b['resps'], float), rel=1e-4)
    subject.model.head.register_forward_hook(lambda module, x, y: y * math.nan)
    with pytest.raises(Refused, match='logits that are not numbers'):
        asked_of(subject)


def test_a_generated_answer_ends_at_any_end_token_and_has_no_special_tokens(tiny, tmp_path):
    "generation_config.json may name several end tokens."
    byte_level_bpe(['abc'], 270, ['<|endoftext|>', '<end>', '<think>']).save(
        str(tmp_path / 'tokenizer.json'))
    words, model = get_tokenizer(tmp_path / 'tokenizer.json'), tiny(vocab_size=270)
    said = words.encode('a<think>b<end>c', allowed_special='all')
    (tmp_path / 'generation_config.json').write_text(json.dumps(dict(eos_token_id=[7, said[3]])))
    places = iter(said)
    model.head.register_forward_hook(
        lambda module, x, y: torch.nn.functional.one_hot(torch.tensor([next(places)]), 270))
    asked = SimpleNamespace(max_length=None, chat=False)
    ours = harness.Model(SimpleNamespace(model=model, answer=model, path=tmp_path, options=asked))
    question = SimpleNamespace(args=('x', dict(until=[], max_gen_toks=8)))
    assert ours.generate_until([question]) == ['ab']
    question.args[1].update(do_sample=True, temperature=0.7)
    with pytest.raises(Refused, match='a task wants texts that are drawn'):
        ours.generate_until([question])


@pytest.mark.parametrize('kind, way', [('core', dict(r=3)), ('mistral', dict(window='1-2', K=2))])
def test_lm_eval_scores_the_model_in_its_way(kind, way, tiny, tmp_path, local, results, capsys):
    "Of a prompt that is too long, the end is read."
    path, asked = tmp_path / kind, dict(tasks='local_choice', measures=(), device='cpu')
    if kind == 'mistral':
        family(kind, vocab_size=257, max_position_embeddings=96).save_pretrained(path)
        write_tokenizer('bytes', path, 96)
    else:
        save_run(path, surgery(tiny(vocab_size=257, context=96), '1-2-1'))
    subject = Subject(path, ScoreOptions(max_length=40, **asked))
    harness.say_once.cache_clear()
    asked_of(subject, way)
    assert 'longer than 40 tokens, only the end is read' in capsys.readouterr().err
    starts = subject.tokenizer.starts if kind == 'mistral' else [256]
    with in_way(subject.model, way):
        for sample in results[-1]['samples']['local_choice']:
            prompt = [*starts, *sample['doc']['q'].encode()]
            wanted = [by_hand(subject.answer, prompt[-41 + len(option):], [*option.encode()])[0]
                      for option in sample['doc']['options']]
            assert [value for [(value, _)] in sample['resps']] == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(Refused, match='an answer has 15 tokens'):
        asked_of(Subject(path, ScoreOptions(max_length=14, **asked)))


def test_gsm8k_has_the_prompt_and_the_answer_of_the_paper(tmp_path):
    "It has one fixed shot, and the last number of a text is the answer."
    (tmp_path / 'test.json').write_text('{"question": "How many?", "answer": "x #### 1,250"}')
    (tmp_path / 'local.yaml').write_text(
        f'include: {ROOT}/data/evals/gsm8k_cot_sean.yaml\ntask: local\ndataset_path: json\n'
        f'dataset_name: null\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/test.json\n')
    manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    task = manager.load(['local'])['tasks']['local']
    task.build_all_requests(limit=1)
    [instance] = task.instances
    [shot] = tasks.fifteen_trees()
    assert '15 trees' in shot['question'] and shot['target'].endswith('6.')
    asks = "Q: {}\nA: Let's think step by step."
    assert instance.args[0].startswith(asks.format(shot['question']))
    assert instance.args[0].endswith(asks.format('How many?'))
    instance.resps = ['3 and 2 make 5. So it is 1250.']
    task.apply_filters()
    last = instance.filtered_resps['flexible-extract']
    assert task.process_results(instance.doc, [last])['exact_match'] == 1.0


def test_metrics_of_lm_eval_become_scores(monkeypatch, run):
    """A metric is a share if the values of its documents are, and the metric of a group if its own
    value is. (SQuAD's F1 goes up to 100, and DROP's F1 has the same name.) The mean of a list is
    over the metrics that the list names."""
    samples = dict(squad=[['a'], ['b']], drop=[0.0, 1.0], coqa=[1.0])
    results = {task: {'f1,none': 0.5, 'f1_stderr,none': 0.03} for task in samples}
    results['drop'] |= {'ppl,none': 9.0}
    results['coqa']['f1_stderr,none'] = 0.0         # all answers are right
    monkeypatch.setattr(harness, 'simple_evaluate', lambda *_, **__: {
        'results': results | dict(both={'f1,none': 50.0}, shares={'f1,none': 0.7}), 'n-shot': {},
        'samples': {task: [dict(doc_id=i, filter=how, f1=value) for i, value in enumerate(values)
                           for how, value in (('none', value), ('other', 5))]
                    for task, values in samples.items()},
        'higher_is_better': dict(drop=dict(ppl=False), both=dict(f1=None)),     # parts disagree
        'group_subtasks': dict(both=['squad', 'drop'], shares=['drop', 'coqa'])})
    monkeypatch.setitem(harness.LISTS, 'l', [('drop', None, None), ('coqa', 0, 'f1')])
    monkeypatch.setitem(harness.LISTS, 'm', [('drop', None, None), ('squad', 0, 'f1')])
    subject = Subject(run[0], ScoreOptions(measures=('log_prob',), tasks='toy_copy', n=2,
                                           device='cpu'))
    subject.theirs = [], None, ['l', 'm']
    scores = harness.lm_scores(subject)
    assert {name: score.kind for name, score in scores.items()} == {
        'squad f1': 'score', 'drop f1': 'share', 'drop ppl': 'less', 'coqa f1': 'share',
        'both f1': 'score', 'shares f1': 'share', 'mean of l': 'share'}
    assert scores['drop f1'].answers == [0.0, 1.0] and scores['squad f1'].answers == []
    assert scores['mean of l'][:3] == ('share', 0.5, pytest.approx(0.03 / 2))


def test_evaluate_scores_a_run_and_its_export_alike(run, tmp_path, local, monkeypatch, capsys):
    "The CSV has the rows of a way before the next way begins. The error of a change is of pairs."
    write_noise(tmp_path / 'noise', ['text', 'copy'])
    ways_in_csv, write_csv = [], evaluate.write_csv

    def note_and_write(rows, out):
        ways_in_csv.append(len({row.way for row in rows}))
        return write_csv(rows, out)
    monkeypatch.setattr(evaluate, 'write_csv', note_and_write)
    rows = {(row['run'], row['way'], row['measure']): row for row in written(
        'evaluate', tmp_path / 'e.csv', *run, '--tasks=local_choice,toy_assign/0-1', '--limit=10',
        '--n=20', f'--data={tmp_path}/noise', '--batches=1', '--measures=loss,text,log_prob',
        '--window=1-2', '--solver=naive', '--K=1,3')}
    assert 'toy_assign/1, % of 20 (chance 25%)' in capsys.readouterr().out
    assert ways_in_csv[:3] == [1, 2, 3]
    assert {name for *_, name in rows} == {
        'loss', 'text', 'copy', 'local_choice acc', 'toy_assign/0', 'toy_assign/0 log_prob',
        'toy_assign/1', 'toy_assign/1 log_prob'} and len(rows) == 2 * 3 * 8
    for (name, way, measure), row in rows.items():
        other = rows['hf', way, measure]
        assert row['mean'] == pytest.approx(other['mean'], rel=1e-6)
        if row['kind'] != 'nats':
            assert all(row[key] == other[key] for key in ('mean', 'error', 'change', 'p', 'dtype'))
        if '--K=1' in way:              # one evaluation changes nothing
            assert row['change'] == 0 == (row['change_error'] or 0)
    model, examples = checkpoint.load_model(run[0]), few_shot('toy_assign', 20, shots=0, depth=1)
    plain, _ = question_scores(model, BYTES, examples)
    way = dict(window='1-2', solver='naive', K=3)
    with in_way(model, way):
        looped, _ = question_scores(model, BYTES, examples)
    changes = np.subtract(looped.answers, plain.answers)
    row = rows['ours', in_words(way), 'toy_assign/1']
    assert [row['mean'], row['change']] == [looped.mean, pytest.approx(changes.mean())]
    assert row['change_error'] == pytest.approx(changes.std(ddof=1) / 20 ** 0.5)


def test_evaluate_measures_what_the_run_logged(config):
    "It takes as many batches as the run did, unless --batches says otherwise."
    train(config())
    scores = asked_of(Subject(config().out_dir, ScoreOptions(device='cpu')))
    last = log_of(config())[-1]
    assert last['val_loss'] == pytest.approx(scores['loss'].mean)
    assert last['val_error'] == pytest.approx(scores['loss'].error, rel=1e-4)
    assert last['kinds']['fifth']['accuracy'] == scores['fifth'].mean


def test_evaluate_leaves_out_ways_that_a_model_does_not_have(run, tmp_path, tiny, capsys):
    "An ordinary model is scored without --r, and with the windows that all models get."
    save_run(tmp_path / 'core', surgery(tiny(vocab_size=257, context=96), '1-2-1'))
    asked = ['--tasks=toy_copy', '--measures=', '--n=2']
    rows = written('evaluate', tmp_path / 'e.csv', run[0], tmp_path / 'core', *asked, '--r=2,3',
                   '--also=--window=0-0 --K=2')
    for name, ways in ((Path(run[0]).name, []), ('core', ['--r=2', '--r=3'])):
        assert [row['way'] for row in where(rows, run=name)] == [
            'as it is', *ways, '--window=0-0 --K=2']
    rows = written('evaluate', tmp_path / 'e.csv', *run, *asked, '--span=q:1')
    assert {row['way'] for row in rows} == {'as it is'}
    said = capsys.readouterr().err
    assert 'no recurrent core, so it is scored without --r' in said
    assert 'has no Span, so it is scored without --span' in said


def test_loss_without_targets_is_not_a_number(run, data):
    "A loss of 0 would look perfect."
    val = Loader(data, 4, 16, 'val')
    batch = val.batch
    val.batch = lambda step: (batch(step)[0], torch.full_like(batch(step)[1], -1), batch(step)[2])
    scores = data_scores(checkpoint.load_model(run[0]), val, 2)
    assert math.isnan(scores['loss'].mean)


def test_evaluate_scores_all_models_on_rows_of_one_size(run, tmp_path, tiny, data, capsys):
    for name, size in dict(a=16, b=32).items():
        save_run(tmp_path / name, tiny(vocab_size=257, context=96),
                 config=dict(data=str(data), batch_size=size // 4, context=size))
    assert 'so that both answer the same' in refused(
        capsys, 'evaluate', tmp_path / 'a', tmp_path / 'b', '--batches=1', '--device=cpu',
        f'--out={tmp_path}/x.png')
    asked = ScoreOptions(data=str(data), device='cpu')
    for path, size in ((tmp_path / 'a', 'of 16'), (run[1], 'of 96')):
        first = Subject(path, asked)
        for other in (tmp_path / 'b', run[1]):
            for each in (first, Subject(other, asked, like=first)):
                assert re.fullmatch(rf'\d+ of \d+ rows {size} tokens, 4 a batch, 100% {data}',
                                    scoring.described(each.val, each.batches))


def test_evaluate_refuses_data_that_changed_and_leaves_out_missing_data(tmp_path, tiny, data,
                                                                        capsys):
    model = tiny(vocab_size=257, context=64)
    changed = save_run(tmp_path / 'changed', model, data)
    torch.save(state_of(changed) | dict(data=dict(val=['as it was'])), f'{changed}/ckpt.pt')
    assert 'has changed since' in refused(capsys, 'evaluate', changed, f'--out={tmp_path}/g.csv')
    left = save_run(tmp_path / 'left', model, 'elsewhere')
    rows = written('evaluate', tmp_path / 'f.csv', left, '--tasks=toy_copy', '--n=4')
    assert [row['measure'] for row in rows] == ['toy_copy']
    assert 'so its loss is left out' in capsys.readouterr().err


def test_a_difference_is_between_rows_of_equal_dtype_and_data(capsys):
    rows = [row_of(run=f'{name}-{seed}', group=name, seed=seed, dtype=dtype, mean=mean + seed)
            for seed in (0, 1) for name, dtype, mean in (
                ('a', 'float32', 1.0), ('b', 'bfloat16', 2.0), ('c', 'float32', 3.0 + seed / 9))]
    rows += [replace(row, run=f'd-{row.seed}', group='d', data='y') for row in rows
             if row.group == 'a']
    print_table(rows, dict(b=['a'], c=['a'], d=['a']))
    line_of = {line['model']: line for line in table_of(capsys.readouterr().out, 'loss')}
    for group in ('b', 'd'):
        assert line_of[group]['difference'] == 'no seed with equal data and dtype'
    assert line_of['c']['difference'].startswith('+2.056')


@pytest.mark.parametrize('words, drawn_at', [
    ('--shots=0,2 --x=shots', [0, 2]),
    ('--window=1-2 --solver=aitken --K=2,4 --x=K', [None, 2, 4])])      # aitken takes an even K
def test_evaluate_draws_scores_over_shots_or_a_setting(words, drawn_at, run, tmp_path, monkeypatch):
    points = []
    monkeypatch.setattr(evaluate, 'show', lambda path, draw, drawn, *_: points.extend(drawn))
    rows = written('evaluate', tmp_path / 'e.png', run[0], '--tasks=toy_assign/1', '--measures=',
                   '--n=6', *words.split())
    shares = [100 * row['mean'] for row in rows]
    assert [(point['x'], point['toy_assign/1 (%)']) for point in points] == [
        *zip(drawn_at, shares)]


AGAIN, MINE = (re.search(rf'```python\n(# {name}\.py\n.*?)```',
                         (ROOT / 'docs/EXTEND.md').read_text(), flags=re.S)[1]
               for name in ('again', 'mine'))


def test_the_code_in_extend_runs(tiny, data, tmp_path, monkeypatch):
    "It is a config with a Span, and a file with a solver and a measure that a command runs first."
    mine, again = tmp_path / 'mine.py', tmp_path / 'again.py'
    mine.write_text(MINE)
    again.write_text(AGAIN)
    monkeypatch.setitem(MEASURES, 'rank', None)         # removed after this test
    monkeypatch.setitem(SOLVERS, 'input_anchor', None)
    small = '--context=16 --batch_size=4 --steps=6 --n_embd=32 --n_head=2 --head_dim=16'
    for argv in ([again, 'train', again, *small.split(), f'--data={data}', '--device=cpu',
                  f'--out_dir={tmp_path / "run"}', '--warmup_steps=1', '--decay_steps=1'],
                 [mine, 'evaluate', tmp_path / 'run', '--measures=loss,rank', '--window=0-0',
                  '--solver=input_anchor', '--K=2', f'--out={tmp_path / "e.csv"}', '--device=cpu'],
                 [again, 'export', tmp_path / 'run', tmp_path / 'hf']):
        nanodepth(None, [*map(str, argv)])
    rows = {(row['way'], row['measure']): row for row in read_rows(tmp_path / 'e.csv')}
    model, val = checkpoint.load_model(tmp_path / 'run'), Loader(data, 4, 16, 'val')
    assert model.order[1].settings() == dict(times=2, share=0.5)
    x = model.hidden(val.batch(0)[0]).detach().flatten(0, 1).double()
    share = torch.linalg.eigvalsh(x.T @ x) / x.square().sum()
    assert rows['as it is', 'rank, depth 5']['mean'] == pytest.approx(
        1 / share.square().sum().item(), rel=1e-5)
    way = '--window=0-0 --solver=input_anchor --K=2'
    with wrapped(model, '0-0', 'input_anchor', K=2):
        loss = data_scores(model, val, 12)['loss'].mean
    assert rows[way, 'loss']['mean'] == loss != rows['as it is', 'loss']['mean']
    # the plain model has no such depth
    assert math.isnan(rows[way, 'rank, depth 6']['change'])


def test_the_change_of_a_perplexity_has_no_error(run, data, monkeypatch):
    "A perplexity is not a mean over documents."
    answers = iter([Score('score', 9.0, None, [2.0, 4.0]), Score('score', 7.0, None, [1.0, 3.0])])
    monkeypatch.setitem(MEASURES, 'mine', lambda *_: dict(ppl=next(answers)))
    subject = Subject(run[0], ScoreOptions(measures=('mine',), data=str(data), device='cpu'))
    _, [row] = scoring.score_ways(subject, [{}, dict(loop='1-1x2-1')])
    assert (row.measure, row.change, row.change_error, row.p) == ('ppl', -2, None, None)


def test_sweep_screens_with_one_half_and_judges_with_the_other(tmp_path, tiny, data, capsys):
    run = save_run(tmp_path / 'one', tiny(vocab_size=257, context=64), data)
    rows = written('sweep', tmp_path / 'sweep.csv', run, '--window=all2', '--solver=naive,rk',
                   '--K=2', '--batches=2', '--n=8', '--tasks=toy_assign/1')
    assert len({row['way'] for row in rows}) == 1 + 3 * 2
    model, val = checkpoint.load_model(run), Loader(data, 4, 16, 'val')
    scores = data_scores(model, val, 2) | {'toy_assign/1': question_scores(
        model, BYTES, few_shot('toy_assign', 8, shots=0, depth=1, seed=0))[0]}
    assert {*scores} == {'loss', 'fifth', 'toy_assign/1'}
    row = where(rows, measure='loss', way='as it is')[0]        # of rows of 16 tokens
    assert row['inference_flops'] == model.flops_per_token(context=16) // 3
    for offset, part in enumerate(('screen', 'judge')):
        assert {row['measure']: row['mean'] for row in where(rows, part=part, way='as it is')} == {
            name: pytest.approx(np.mean(score.answers[offset::2]))
            for name, score in scores.items()}
    assert 'too few answers' in refused(capsys, 'sweep', run, '--tasks=toy_copy', '--n=1',
                                        '--measures=', '--device=cpu', f'--out={tmp_path}/s.csv')


def test_sweep_judges_the_ways_that_gained_most(tmp_path, tiny, monkeypatch, capsys):
    "A way whose scores are nan is not judged."
    # the answers of the plain model, and with layer 0, 1, 2 or 3 run twice
    answers = iter([[1, 1, 0, 0] * 2, [0] * 8, [math.nan] * 8, [1, 1, 1, 0] * 2, [1] * 8])
    monkeypatch.setattr(scoring, 'scores_now', lambda subject: dict(
        toy_copy=(score_of('share', next(answers)), ''),
        beside=(Score('log_prob', 0.0, None, [0.0] * 8), '')))      # no way is ranked by this
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=96))
    written('sweep', tmp_path / 's.csv', run, '--blocks=1', '--tasks=toy_copy', '--best=2')
    said = capsys.readouterr().out
    judged = table_of(said.partition('judged with')[2], 'toy_copy')
    assert [row['way'] for row in judged] == ['as it is', '--loop=2-1x2-1', '--loop=3-1x2']
    assert '3 ways, 2 with a gain in toy_copy' in said


PROMPTS = [[256, *text] for text in (b'abcdefgh', b'abcdefgx', b'abcdefgh12', b'abc')]
OPTIONS = [[[*option] for option in its] for its in (
    (b'ij', b'kl'), (b'ij', b'klm'), (b'i', b'kl'), (b'd', b'e'))]


def by_hand(model, prompt, option):
    """Return the log-likelihood of an option after its prompt, and whether each token is the
    likeliest. Like lm-eval, this takes one forward pass for each option."""
    read = torch.tensor([[*prompt, *option[:-1]]])
    chances = logits(model, read).double().log_softmax(-1)[0, len(prompt) - 1:]
    return (sum(chances[i, t].item() for i, t in enumerate(option)),
            chances.argmax(-1).tolist() == option)


KINDS = dict(
    ours=lambda tiny: tiny(vocab_size=257, context=64, n_kv_head=2, ln_scaling=True),
    recurrent=lambda tiny: surgery(tiny(vocab_size=257, context=64), '1-2-1'),
    llama=lambda tiny: family('llama', vocab_size=257),
    gemma=lambda tiny: family('gemma3_text', vocab_size=257, sliding_window=8),
    phi3=lambda tiny: family('phi3', vocab_size=257, original_max_position_embeddings=10,   # angles
                             rope_parameters=dict(rope_type='longrope', rope_theta=1e4,
                                                  short_factor=[1.] * 4, long_factor=[3.] * 4)))


def count_logits(model):
    "Return a list to which each forward pass adds how many logits it computed."
    made, head = [], getattr(model, 'head', None) or model.lm_head
    head.register_forward_hook(lambda *call: made.append(call[-1].numel()))
    return made


@pytest.mark.parametrize('kind, way', [*(('ours', way) for way in (
    {}, dict(loop='1-1x2-2'), dict(window='1-2', solver='naive', cache='last'),
    dict(window='1-2', K=6, decode='bypass'), dict(window='1-2', solver='euler', mode='layer'),
    dict(window='1-2', solver='anderson'))), ('recurrent', {}),
    ('gemma', dict(window='1-2', K=3)), ('phi3', {})], ids=str)
def test_a_question_has_the_same_score_in_any_batch(tiny, kind, way, monkeypatch):
    "This holds even if only few logits may be computed at once, and no forward pass computes more."
    model = KINDS[kind](tiny)
    answer = answer_of(model)
    with in_way(model, way):
        first, text = [], [*PROMPTS[3]]         # the two likeliest tokens
        for _ in range(2):
            first.append(logits(answer, torch.tensor([text + first]))[0, -1].argmax().item())
        options = [*OPTIONS[:3], [*OPTIONS[3], first[:1], first]]
        wanted = [[by_hand(answer, prompt, option) for option in its]
                  for prompt, its in zip(PROMPTS, options)]
        made = count_logits(model)
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
        a, b = (value for value, _ in wanted[0])        # the same question as a text
        examples = [Example('abcdefgh', ['ij', 'kl'], right) for right in (0, 1)]
        share, log_prob = question_scores(answer, BYTES, examples)
        assert share == Score('share', 0.5, 0.5, [int(a > b), int(b > a)], 0.5)
        assert log_prob.answers == pytest.approx([a, b], abs=3e-5)
        assert log_prob[1:3] == pytest.approx([(a + b) / 2, abs(a - b) / 2], abs=3e-5)
    # one answer that is unknown makes the mean unknown
    sometimes = lambda tokens: logits(answer, tokens) * (math.nan if ord('k') in tokens else 1)
    share, _ = question_scores(sometimes, BYTES, [examples[0], Example('k', ['ij', 'kl'], 0)])
    assert math.isnan(share.mean)


def scores_slowly(answer, val, batches):
    """Return the sums of losses and the numbers of targets of all rows, and for each kind of answer
    its losses and its answers."""
    rows, losses, answers = [], {kind: [] for kind in val.kinds}, {kind: [] for kind in val.kinds}
    for tokens, targets, marks in (row for i in range(batches) for row in zip(*val.batch(i))):
        chances, of_row, before = logits(answer, tokens[None])[0].double().log_softmax(-1), [], 0
        for t, target in enumerate(targets.tolist()):
            begins, number = divmod(marks[t].item(), 128)
            kind = val.kinds[number - 1]
            if target != -1:
                of_row.append(-chances[t, target].item())
            if number:
                losses[kind].append(of_row[-1])
            if begins:
                answers[kind].append(1)
            if begins or number and number == before:
                answers[kind][-1] *= int(chances[t].argmax() == target)
            before = number if begins or number == before else 0
        rows.append((sum(of_row), len(of_row)))
    return np.array(rows).T, losses, answers


@pytest.mark.parametrize('kind, masked', [('ours', 0.2), ('llama', 0.2), ('function', 0)])
def test_scores_on_data_are_those_of_the_slow_form(kind, masked, tiny, tmp_path, monkeypatch):
    "A masked token is not part of an answer. The error of a loss is that of a mean over tokens."
    rng, n = np.random.default_rng(0), 12 * 16
    model = KINDS.get(kind, KINDS['ours'])(tiny)
    tokens = rng.integers(0, 256, n + 1)
    for t in range(1, 16):              # most tokens are those that the model expects
        rows = torch.tensor(tokens[:-1].reshape(12, 16))
        likeliest = logits(model, rows[:, :t])[:, -1].argmax(-1).numpy()
        tokens[t:-1:16] = np.where(rng.random(12) < 0.7, likeliest, tokens[t:-1:16])
    write_dataset(tmp_path, 'val', 'bytes', tokens, kinds=['text', 'one', 'two'],
                  marks=rng.choice([0, 1, 2, 2, 3, 130, 131], n + 1),
                  mask=rng.random(n + 1) >= masked)
    val = Loader(tmp_path, 4, 16, 'val')
    answer = (lambda tokens: model(tokens)) if kind == 'function' else answer_of(model)
    (sums, counts), losses, answers = scores_slowly(answer, val, 2)
    made = count_logits(model)
    monkeypatch.setattr(likelihoods, 'LOGITS_AT_ONCE', 2 * 16 * 257)
    scores = data_scores(answer, val, 2, pieces=2 if kind == 'ours' else 1, text=True)
    if kind == 'llama':
        assert max(made) == 2 * 16 * 257
    loss = scores['loss']
    assert loss.mean == pytest.approx(sums.sum() / counts.sum(), rel=1e-6)
    assert loss.mean == pytest.approx(np.mean(loss.answers))
    spread = (sums - loss.mean * counts).std(ddof=1) / counts.mean()
    assert loss.error == pytest.approx(spread / 8 ** 0.5, rel=1e-5)
    if not masked:
        assert loss.answers == pytest.approx(sums / 16, rel=1e-6)
    assert scores['text'].mean == pytest.approx(np.mean(losses['text']), rel=1e-6)
    for name in ('one', 'two'):
        assert scores[name].answers == answers[name] and 0 < scores[name].mean < 1
    unknown = data_scores(lambda tokens: logits(answer, tokens) * math.nan, val, 2)
    assert 'text' not in unknown and all(map(math.isnan, unknown['one'].answers))


TEXTS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


def test_span_option_sets_an_argument_of_a_span_and_undoes_it(tiny):
    "An argument that decides the shape of weights is refused, and so is an unknown one."
    model = tiny(order=[0, GatedLoop([1, SlowCore([2], r=2)]), 3])
    plain = model(TEXTS)
    with in_way(model, dict(span='strength:0.0')):
        assert torch.equal(model(TEXTS), model(TEXTS, order=[0, 3]))
    with in_way(model, dict(span='share:0.25', r=3)):
        inner = core_of(model)
        assert (inner.share, inner.r) == (0.25, 3)
        assert inner.adapter.weight.equal(model.spans[1].adapter.weight)
        assert not torch.equal(model(TEXTS), plain)
    assert torch.equal(model(TEXTS), plain)
    for text, message in (('times:3', 'times decides the shape of the weights of GatedLoop'),
                          ('rank:3', 'write --span=NAME:VALUE with an argument of a Span'),
                          ('r:3', r'for r, --r=VALUE'), ('share', 'write --span=NAME:VALUE'),
                          ('share:much', 'must be float')):
        with pytest.raises(Refused, match=message), in_way(model, dict(span=text)):
            pass
