"""A way of running a model is one value: it does what it says, on every kind of model, costs what
it says, is undone at the end, and is refused in the same words everywhere."""
import pytest
import torch
from families import tiny as family
from test_trust import refused

from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.engine import checkpoint
from nanodepth.engine.ways import Way, Ways, read_ways
from nanodepth.loop import running
from nanodepth.retrofit import surgery
from nanodepth.wrapper import looped

TOKENS = torch.arange(24).view(2, 12)


def logits(model):
    with torch.no_grad():
        out = model(TOKENS)
    return getattr(out, 'logits', out)


def test_each_kind_of_model_runs_in_its_ways_and_is_restored(tiny):
    ours = tiny(n_layer=4)
    core = surgery(tiny(n_layer=5), '1-2-2', mean=2, inject='linear')
    theirs = family('gemma3_text')
    for model, way, by_hand, cost in (
            (ours, Way(), lambda: logits(ours), 4),
            (ours, Way(loop='1-2x3-1'), lambda: ours(TOKENS, order=[0, 1, 2, 1, 2, 1, 2, 3]), 8),
            (ours, Way(loop=[3, 0, 0]), lambda: ours(TOKENS, order=[3, 0, 0]), 3),
            (core, Way(r=5), lambda: core(TOKENS, r=5), 1 + 2 * 5 + 2),
            (theirs, Way(loop='2-2x3-2'), lambda: naive(theirs, (2, 3), 3), 10),
            (theirs, Way(window='2-3', method='naive', K=3), lambda: naive(theirs, (2, 3), 3), 10),
            (ours, Way(window='1-2', method='naive', K=3), lambda: naive(ours, (1, 2), 3), 8)):
        before = logits(model)
        with way.apply(model):
            inside = logits(model)
        assert torch.equal(inside, by_hand()) and torch.equal(logits(model), before), str(way)
        assert way.cost(model) == cost, str(way)


def naive(model, window, K):
    with looped(model, window, 'naive', K):
        return logits(model)


def test_costs_are_counted_evaluations(tiny):
    "How often the layers really run, for every method."
    model = tiny(n_layer=4)
    runs = []
    for layer in model.layers:
        layer.attn.register_forward_pre_hook(lambda *_: runs.append(1))
    for dials in (dict(window='1-2'), dict(window='0-2', method='heun', K=2), dict(K=5, T=2.0),
                  dict(window='1-2', method='rk4', K=1),
                  dict(window='2-3', method='anderson', K=4)):
        runs.clear()
        with Way(**dials).apply(model):
            logits(model)
        assert len(runs) == Way(**dials).cost(model), dials


def test_options_become_ways_as_users_type_them():
    given = lambda *argv: [str(way) for way in read_ways(read(Ways, argv and list(argv)))]
    assert given() == []
    assert given('--loop=2x2,1-2x3-1') == ['--loop=2x2', '--loop=1-2x3-1']
    assert given('--r=1,2,4') == ['--r=1', '--r=2', '--r=4']
    assert given('--window=mid4,0.5', '--K=2', '--T=1.5') == [
        '--window=mid4 --K=2 --T=1.5', '--window=0.5 --K=2 --T=1.5']
    assert given('--method=euler', '--alphas=0.5,0.25', '--K=2') == [
        '--method=euler --K=2 --alphas=0.5,0.25']
    assert len({*given('--beta=0.1234567,0.1234568')}) == 2        # two ways have two names
    for text in given('--window=mid4', '--decode=bypass,3', '--beta=0.3'):
        assert given(*text.split()) == [text]
    assert str(Way()) == 'as it is' and str(Way(loop=[0, 1, 0, 1])) == '--loop=2x2'
    with pytest.raises(Refused, match='--loop and --r are different ways'):
        given('--loop=2x2', '--r=2')
    with pytest.raises(Refused, match="a segment '2y'"):
        given('--loop=2y')
    with pytest.raises(Refused, match='r=0 is too small'):
        Way(r=0)


@pytest.mark.parametrize('command', ['sample', 'evaluate', 'export', 'probe'])
def test_every_command_refuses_in_the_same_words(command, tiny, tmp_path, capsys):
    plain = tiny(vocab_size=257, n_layer=4, context=64)
    for name, model in dict(run=plain, cut=surgery(plain, '1-2-1')).items():
        checkpoint.save(tmp_path / name, **checkpoint.describe(model))
        (tmp_path / name / 'run.json').write_text('{"tokenizer": "bytes"}')
    line = dict(sample=['--device=cpu'], export=[tmp_path / 'out'],
                evaluate=['--tasks=toy_copy', '--n=4', '--device=cpu',
                          f'--out={tmp_path / "e.csv"}'],
                probe=['--only=norms', '--examples=toy_copy', '--length=8', '--device=cpu',
                       f'--out={tmp_path / "p"}'])[command]
    for run, options, words in (
            ('run', ['--r=2'], 'r=2 is for models with a recurrent core'),
            ('cut', ['--loop=2x2'], '--loop=2x2 is for ordinary models'),
            ('run', ['--loop=3x2'], "the loop '3x2' has 3 unique layers, but the model has 4"),
            ('run', ['--loop=4x2', '--window=1-2'], '--loop and the wrapper are different ways')):
        assert words in refused(capsys, command, tmp_path / run, *line, *options)
    if command != 'probe':          # which takes no window
        for options, words in ((['--window=2-7'], 'within 0 to 3'),
                               (['--method=naive', '--T=2'], "'naive' has no option 'T'"),
                               (['--method=rkk'], "did you mean 'rk'?")):
            assert words in refused(capsys, command, tmp_path / 'run', *line, *options)
    if command != 'evaluate':
        assert 'this takes one way of running' in refused(capsys, command, tmp_path / 'run', *line,
                                                          '--loop=4x2,4x3')
