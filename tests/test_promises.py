"""Numbers that were once wrong without a word: a test for each promise that they are right now."""
import importlib
import json
import math
import runpy
import typing
import weakref

import numpy as np
import pytest
import torch

from conftest import ROOT, flags, ranks, refused, save_run, write_noise
from families import tiny as family
from nanodepth import train as training
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import evaluate as evaluate_command, probe as probe_command
from nanodepth.common import options
from nanodepth.asking import likelihoods, scoring
from nanodepth.models.hf import Hooked
from nanodepth.asking.likelihoods import shares_prompts
from nanodepth.asking.scoring import Asked, Subject, log_likelihoods, measure
from nanodepth.asking.way import Way
from nanodepth.text.loader import Loader, begin_dataset, write_dataset
from nanodepth.text.primitives import Example
from nanodepth.text.tokenizer import get_tokenizer, write_tokenizer
from nanodepth.wrapper import looped

BYTES = get_tokenizer('bytes')
EXAMPLES = [Example(prompt, options, 0) for prompt, options in (
    ('abcdefgh', ['ij', 'kl']), ('abcdefgx', ['ij', 'klm']), ('abcdefgh12', ['i', 'kl']),
    ('abc', ['d', 'e']))]


def by_hand(model, example):
    "Each option read behind its prompt in one forward, alone: what lm-eval does."
    forward = lambda tokens: getattr(out := model(tokens), 'logits', out)
    values = []
    for option in example.options:
        prompt, answer = [256, *example.prompt.encode()], option.encode()
        with torch.no_grad():
            chances = forward(torch.tensor([[*prompt, *answer[:-1]]])).log_softmax(-1)[0]
        values.append(sum(chances[len(prompt) - 1 + i, t].item() for i, t in enumerate(answer)))
    return values


# ------------------------------------------------------------------------------------------- scores

@pytest.mark.parametrize('how', [
    dict(method='naive', K=3, cache='last'), dict(method='rk', K=6, decode='bypass'),
    dict(method='rk', K=3, decode=1), dict(method='anderson', K=3), None])
def test_a_question_has_one_score_whatever_stands_beside_it(tiny, how):
    model = tiny(vocab_size=257, context=64)
    with looped(model, (1, 2), **how) if how else Way().apply(model):
        for batch in (1, 64):
            for example, got in zip(EXAMPLES, log_likelihoods(model, BYTES, EXAMPLES, batch=batch)):
                assert got.tolist() == pytest.approx(by_hand(model, example), abs=2e-5)


@pytest.fixture(scope='module')
def gemma(tmp_path_factory):
    "A small Gemma 3 with windows of 8 tokens, whose tokenizer begins a text with a token."
    folder = tmp_path_factory.mktemp('gemma')
    model = family('gemma3_text', vocab_size=257, max_position_embeddings=512, sliding_window=8)
    model.save_pretrained(folder)
    write_tokenizer('bytes', folder, 512)
    return str(folder), model.eval()


def test_options_share_their_prompts_cache_in_other_families(gemma):
    model = Hooked(gemma[1])
    assert model.shares_prompts
    for way in (Way(), Way(window='1-2', method='rk', K=3), Way(loop='1-2x2-3')):
        with way.apply(gemma[1]):
            assert shares_prompts(model)
            for share in (True, False):
                values = log_likelihoods(model, BYTES, EXAMPLES, share=share)
                for example, got in zip(EXAMPLES, values):
                    assert got.tolist() == pytest.approx(by_hand(model, example), abs=2e-5)


def test_no_forward_makes_more_logits_than_fit(gemma, tmp_path, monkeypatch):
    "Neither a score nor a loss; and the numbers are the same."
    write_noise(tmp_path / 'noise', [])
    val = Loader(tmp_path / 'noise', 4, 32, split='val')
    made = []
    answer = Hooked(gemma[1])
    plain = [v.tolist() for v in log_likelihoods(answer, BYTES, EXAMPLES)]
    loss = measure(answer, val, 2)[0]
    hook = gemma[1].lm_head.register_forward_hook(lambda *parts: made.append(parts[-1].numel()))
    for module in (scoring, likelihoods):
        monkeypatch.setattr(module, 'LOGITS_AT_ONCE', 6 * 257)
    for got, wanted in zip(log_likelihoods(answer, BYTES, EXAMPLES), plain):
        assert got.tolist() == pytest.approx(wanted, abs=1e-5)
    assert measure(answer, val, 2)[0] == pytest.approx(loss, rel=1e-6)
    hook.remove()
    assert made and max(made) <= 6 * 257
    assert measure(lambda tokens: gemma[1](tokens).logits, val, 2)[0] == pytest.approx(loss)


def test_rows_of_others_begin_as_a_text_does(gemma, tmp_path):
    "The tokens that begin a text count in no loss, and a row that has them keeps its length."
    write_noise(tmp_path / 'noise', [])
    subject = Subject(gemma[0], Asked(data=str(tmp_path / 'noise'), batches=2, device='cpu'))
    plain = Loader(tmp_path / 'noise', 4, 511, split='val')
    losses = []
    for step in range(2):
        tokens, targets = plain.batch(step)
        with torch.no_grad():
            logits = gemma[1](torch.cat((torch.full((len(tokens), 1), 256), tokens), 1)).logits
        losses.append(torch.nn.functional.cross_entropy(logits[:, 1:].transpose(1, 2), targets))
    assert subject.scores(Way())['loss'].mean == pytest.approx(np.mean(losses), rel=1e-5)
    write_dataset(tmp_path / 'own', 'val', 'bytes', [256, 1, 2, 3, 4, 5, 6, 7, 8])
    tokens, targets, _ = Loader(tmp_path / 'own', 2, 4, split='val', starts=[256]).marked_batch(0)
    assert {(*t, *y) for t, y in zip(tokens.tolist(), targets.tolist())} == {
        (256, 1, 2, 3, 0, 1, 2, 3, 4, -1), (256, 4, 5, 6, 7, -1, 5, 6, 7, 8)}
    ours = save_run(tmp_path / 'ours', family_of_ours(), data=tmp_path / 'own')
    assert scoring.starts_of(ours) == [] and scoring.starts_of(gemma[0]) == [256]


def family_of_ours():
    from nanodepth.model import LM, ModelConfig
    return LM(ModelConfig(n_layer=2, n_embd=16, n_head=2, context=32))


def test_no_note_outlives_the_code_that_made_it(tiny, tmp_path, monkeypatch):
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=64))
    line = [run, '--tasks=toy_copy', '--n=20', '--window=1-2', '--method=naive', '--K=2',
            '--device=cpu', f'--out={tmp_path / "e.csv"}']
    nanodepth('evaluate', line)
    before = read_csv(tmp_path / 'e.csv')
    monkeypatch.setitem(SOLVERS, 'naive', lambda g, x, K: g(x) * 0)
    nanodepth('evaluate', line)
    assert read_csv(tmp_path / 'e.csv')[1]['mean'] != before[1]['mean']
    mark = Subject(run, Asked(tasks='toy_copy', device='cpu')).mark
    first = mark()
    real = Path.read_bytes
    changed = ROOT / 'nanodepth/looping/solvers.py'
    monkeypatch.setattr(Path, 'read_bytes',
                        lambda path: real(path) + b'#' * path.samefile(changed))
    scoring.written_code.cache_clear()
    assert mark() != first


def test_what_is_not_a_number_is_no_accuracy(tiny, data):
    model = tiny(vocab_size=257, context=16)
    val = Loader(data, 4, 16, split='val')

    def broken(tokens):
        return model(tokens) * math.nan
    assert math.isnan(measure(broken, val, 2)[1]['fifth']['accuracy'])
    score = scoring.data_scores(broken, val, 2)['fifth']
    assert math.isnan(score.mean) and score.error is None and {*score.answers} == {None}


def test_effective_parameters_count_what_the_wrapper_runs(tiny):
    model = tiny(n_layer=4)
    layer = sum(p.numel() for p in model.layers[0].parameters())
    for way, runs in ((Way(), 4), (Way(window='1-2', method='naive', K=3), 8),
                      (Way(loop='1-2x2-1'), 6)):
        assert evaluate_command.effective_params(model, way) == runs * layer


def test_a_lens_is_trained_on_rows_that_no_probe_looks_at(data, tiny, tmp_path, monkeypatch):
    "12 batches of 4: 40 examples take 10 of them."
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=16), data)
    trained = []
    real = probe_command.train_lens
    monkeypatch.setattr(probe_command, 'train_lens', lambda model, rows, *_, batches, **how: (
        trained.extend(rows.batch(step)[0] for step in batches),
        real(model, rows, 1, batches=batches))[1])
    looked = []
    monkeypatch.setattr(probe_command, 'quality', lambda model, lens, tokens: (
        looked.append(tokens), (torch.zeros(4), torch.zeros(4)))[1])
    line = [run, '--only=early_exit', f'--out={tmp_path / "p"}', '--device=cpu', '--n=2',
            '--batches=1', '--tasks=']
    nanodepth('probe', [*line, '--count=40'])
    rows = {tuple(row.tolist()) for row in torch.cat(trained)}
    assert len(rows) == 8 and not rows & {tuple(row.tolist()) for row in looked[0]}
    nanodepth('probe', [*line, '--count=48'])       # nothing is left, which the page says


# ------------------------------------------------------------------------------------- data and runs

def test_marks_go_by_name_where_datasets_number_them_otherwise(tmp_path, tiny):
    for name, kinds in (('a', ['copy', 'chain']), ('b', ['chain', 'new'])):
        write_noise(tmp_path / name, kinds)
    for order in ('ab', 'ba'):
        loader = Loader([tmp_path / name for name in order], 4, 16, split='val')
        counted = {kind: 0 for kind in loader.kinds}
        wanted = dict(counted)
        for i in range(48):
            d, _, window = loader.place(i)
            for mark in loader.sets[d].window(window)[2].tolist():
                wanted[loader.sets[d].kinds[mark % 128 - 1]] += 1
        for step in range(12):
            for mark in loader.marked_batch(step)[2].flatten().tolist():
                counted[loader.kinds[mark % 128 - 1]] += 1
        assert counted == wanted and all(counted.values())


def test_a_dataset_made_again_and_stopped_between_its_splits_is_none(tmp_path, monkeypatch):
    text = runpy.run_path(str(ROOT / 'data/text/prepare.py'))
    (tmp_path / 't.txt').write_text('\n\n'.join(f'paragraph {i} ' * 40 for i in range(60)))
    text['main']([str(tmp_path / 't.txt'), f'--out={tmp_path / "d"}'])
    begin_dataset(tmp_path / 'd', 'data/text/prepare.py')
    write_dataset(tmp_path / 'd', 'train', 'bytes', range(200))     # ... and killed
    with pytest.raises(ValueError, match='there is no dataset'):
        Loader(tmp_path / 'd', 2, 16, split='val')


@pytest.mark.parametrize('script', ['text', 'toy', 'sft'])
def test_every_prepare_forgets_both_splits_before_it_writes_one(script, tmp_path, monkeypatch):
    (tmp_path / 't.txt').write_text('\n\n'.join(f'paragraph {i} ' * 40 for i in range(60)))
    main = runpy.run_path(str(ROOT / f'data/{script}/prepare.py'))['main']
    line = [*([str(tmp_path / 't.txt')] if script == 'text' else []), f'--out={tmp_path / "d"}',
            *(['--documents=50', '--text=0'] if script == 'toy' else [])]
    main(line)
    names = main.__globals__ if script != 'sft' else vars(
        importlib.import_module('nanodepth.text.primitives'))

    def killed(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setitem(names, 'write_dataset', killed)
    with pytest.raises(KeyboardInterrupt):
        main(line)
    assert not [*(tmp_path / 'd').glob('*.json')]


def test_changed_shares_of_a_mixture_are_another_run(config, tmp_path):
    for name in 'ab':
        write_noise(tmp_path / 'mix' / name, [])
    (tmp_path / 'mix/mixture.json').write_text(json.dumps(dict(a=0.9, b=0.1)))
    c = config(data=str(tmp_path / 'mix'), steps=8, context=16)
    training.train(c)
    (tmp_path / 'mix/mixture.json').write_text(json.dumps(dict(a=0.1, b=0.9)))
    with pytest.raises(ValueError, match='shares of the data have changed'):
        training.train(c)


@pytest.mark.parametrize('setting, limit', [
    ('curriculum=25', 'from 0 to 1'), ('lr_floor=3', 'from 0 to 1'), ('head_dim=0', 'at least 2'),
    ('context=0', 'at least 1'), ('n_kv_head=0', 'at least 1'), ('beta2=1', 'from 0 to 0.9999')])
def test_a_slip_in_a_share_or_a_size_is_a_line(setting, limit, capsys):
    assert limit in refused(capsys, 'train', 'config/lidas.py', f'--{setting}')


def test_every_number_in_a_config_or_an_option_has_its_bounds():
    free = {'seed', 'grow_alpha', 'alpha', 'alphas', 'weights', 'data_weights', 'tol'}
    modules = [f'nanodepth.commands.{path.stem}' for path in (ROOT / 'nanodepth/commands').glob(
        '*.py')] + ['nanodepth.train', 'nanodepth.commands.cost', 'nanodepth.text.corpus']
    found = [vars(importlib.import_module(name)) for name in modules]
    found += [runpy.run_path(str(path)) for path in (ROOT / 'data').glob('*/prepare.py')]
    for names in found:
        for kind in filter(None, map(names.get, ('Config', 'Options'))):
            for name, hint in typing.get_type_hints(kind).items():
                inside = [part for choice in options.choices_of(hint)
                          for part in (choice, *typing.get_args(choice))]
                if int in inside or float in inside:
                    assert name in free | {*options.AT_LEAST} | {*options.SHARES}, (kind, name)


# ------------------------------------------------------------------------------------------- memory

@pytest.mark.parametrize('processes', [1, 2])
def test_a_growth_lets_go_of_the_old_model(config, processes):
    "Compiled, and under DDP: of the weights before a growth none is alive at the next step."
    c = config(n_layer=4, grow='lidas', grow_block=2, steps=10, decay_steps=2, compile=True,
               batch_size=4)
    if processes == 1:
        watch_growths()
        training.train(c)
        assert WATCHED == [0]
        return
    ended = ranks(flags(c), processes, before=refuse_leftovers)
    assert ended.returncode == 0, ended.stderr


WATCHED = []


def watch_growths(refuse=False):
    "Count the old weights that are alive when the step after a growth has its next batch."
    old = []
    untie, fetch = training.untie, training.fetch
    if hasattr(untie, 'watched'):
        return

    def noted(model, *more):
        old[:] = [weakref.ref(p) for p in model.parameters()]
        return untie(model, *more)

    def counted(*args):
        if old:
            alive = sum(each() is not None for each in old)
            WATCHED.append(alive)
            old.clear()
            if refuse and alive:
                raise ValueError(f'{alive} old weights are alive')
        return fetch(*args)
    noted.watched = True
    training.untie, training.fetch = noted, counted


def refuse_leftovers():
    watch_growths(refuse=True)
