"Test train.py: a training step does what the plan computes, and costs what the plan computes."
import json
import math
import re
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import by_layer, flags, log_of, ranks, ROOT, same, save_run, state_of, weights_of

from nanodepth import train as train_file
from nanodepth.common.options import read
from nanodepth.grow import states_of_copies, untie
from nanodepth.model import LM, ModelConfig, Refused, unrolled
from nanodepth.models.checkpoint import load_model
from nanodepth.retrofit import Core, core_of, sample_recurrence, surgery
from nanodepth.scoring.rows import data_scores
from nanodepth.text.tokens import write_dataset
from nanodepth.train import train
from nanodepth.training import loader as loader_file, machine
from nanodepth.training.checkpoint import load
from nanodepth.training.loader import Loader
from nanodepth.training.optimizers import Muon, load_states, make_optimizers, states_of
from nanodepth.training.plan import (Config, changes, first_n_layer, generator_for, model_config,
                                     plan, seed_for)

# 1, 2, 3, 4 layers from steps 0, 2, 7, 14
GROW = dict(grow='lidas', grow_block=1, n_layer=4, steps=30, decay_steps=5)
COOLS = '--cooldown_data=x --cooldown_loop=3-2x2-3'
CORE = '--recurrence=4 --backprop_depth=8 --curriculum=0.5'


def drawn_r(mean, step):
    return sample_recurrence(mean, generator_for(0, 'recurrence', step))


@pytest.mark.parametrize('words, step, said', [
    ('baseline', 0, dict(rate=1 / 50, data='data', batch=0, r=None)),
    ('baseline', 49, dict(rate=1.0)), ('baseline', 480, dict(rate=1.0)),
    ('baseline', 510, dict(rate=0.5, batch=510)),
    ('baseline', 599, dict(rate=1 - (119 / 120) ** 0.5)),
    ('baseline --lr_shape=cosine', 540, dict(rate=0.001 + 0.999 / 2)),
    ('baseline --lr_shape=constant', 599, dict(rate=1.0)),
    (f'baseline {COOLS}', 479, dict(data='data', batch=479)),
    (f'baseline {COOLS}', 480, dict(data='cooldown_data', batch=0)),
    (f'baseline {CORE}', 0, dict(r=drawn_r(1, 0), backprop_depth=1)),
    (f'baseline {CORE}', 599, dict(r=drawn_r(4, 599), backprop_depth=4))])
def test_plan_of_a_step(words, step, said):
    name, *settings = words.split()
    found = plan(read(Config, [f'config/{name}.py', *settings]), step)._asdict()
    if 'rate' in said:
        said['rate'] = pytest.approx(said['rate'], rel=1e-12)
    assert {key: found[key] for key in said} == said


@pytest.mark.parametrize('words, wanted', [
    ('baseline', []), ('loop_1_2x3_1', [(0, [0, 1, 2, 1, 2, 1, 2, 3], False)]),
    ('lidas --cooldown_loop=3-2x2-3', [
        (48, [0, 1, 0, 1], True), (144, [0, 1, 2, 1, 2, 3], True),
        (288, [0, 1, 2, 3, 2, 3, 4, 5], True), (480, [0, 1, 2, 3, 4, 3, 4, 5, 6, 7], False)]),
    ('lidas --grow=stack --grow_alpha=0', [
        (120, [0, 1, 0, 1], True), (240, [0, 1, 2, 3, 2, 3], True),
        (360, [0, 1, 2, 3, 4, 5, 4, 5], True)])])
def test_changes_of_a_run(words, wanted):
    name, *settings = words.split()
    assert changes(read(Config, [f'config/{name}.py', *settings])) == wanted


def slowly(c, model):
    "A training written out: what its steps log, and the weights in the end."
    optimizers, lines, flops = make_optimizers(model, c), [], 0
    for step in range(c.steps):
        now = plan(c, step)
        for change in changes(c):
            if change.step == step and change.copies:
                states = states_of(optimizers, model)
                model = untie(model, change.order)
                optimizers = make_optimizers(model, c)
                load_states(optimizers, model, {kind: states_of_copies(of_kind, change.order)
                                                for kind, of_kind in states.items()})
            elif change.step == step:
                model.order = change.order
        if core := core_of(model):
            core.r, core.backprop_depth = now.r, now.backprop_depth
            core.generators = [generator_for(c.seed, f'state of row {n}', step)
                               for n in range(c.batch_size)]
        data = Loader(getattr(c, now.data), c.batch_size, c.context, seed=c.seed)
        x, y, _ = data.batch(now.batch)
        loss = model(x, y)
        loss.backward()
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        gradients = [p.grad for group in groups for p in group['params']]
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        for g in gradients:
            g *= min(1, c.grad_clip / norm) if c.grad_clip else 1
        for group in groups:
            group['lr'] = group['peak'] * now.rate
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        flops += x.numel() * model.flops_per_token(context=c.context)
        if core:
            core.r = c.recurrence
        lines.append(dict(step=step + 1, loss=loss.item(), grad_norm=norm, lr=groups[0]['lr'],
                          flops=flops, n_layer=len(model.layers), depth=len(unrolled(model.order)),
                          tokens=x.numel() * (step + 1)))
    return lines, model.state_dict()


SLOWLY = dict(
    muon=dict(adamw_lr=1e-3, grad_clip=0.05), adamw=dict(optimizer='adamw', grad_accum=2),
    unclipped=dict(grad_clip=0.0, lr_shape='cosine'),
    grows=GROW,
    grows_a_checkpoint=dict(init_from='{data}/../four', grow='lidas', grow_from=4, n_layer=6,
                            steps=14),
    loops_and_cools=dict(n_layer=3, loop='1-1x2-1', cooldown_loop='1-1x3-1',
                         cooldown_data='{data}'),
    cut=dict(init_from='{data}/../four', cut='1-2-1', recurrence=3, backprop_depth=2),
    core=dict(init_from='{cut}', recurrence=3, backprop_depth=2, curriculum=0.5, optimizer='adamw'))


@pytest.mark.parametrize('name', SLOWLY)
def test_train_as_the_slow_form(name, config, placed, tiny, tmp_path):
    "Batches, orders, growth, gradients and their norm, rates, and what it says that it cost."
    save_run(tmp_path / 'four', tiny(vocab_size=257, n_layer=4, context=16))
    c = config(**placed(SLOWLY[name]))
    train(c)
    if c.init_from:
        model = load_model(c.init_from)
        model = surgery(model, c.cut, r=c.recurrence) if c.cut else model
    else:
        torch.manual_seed(seed_for(c.seed, 'init'))
        model = LM(model_config(c, first_n_layer(c), 257))
    lines, weights = slowly(c, model)
    for line, want in zip(log_of(c)[1:], lines, strict=True):
        assert {key: line[key] for key in want} == pytest.approx(want, rel=1e-4)
    for key, got in weights_of(c).items():
        assert torch.allclose(got, weights[key], atol=1e-5), key


def test_train_learns_and_leaves_files(config):
    "What it logs of the validation data is what evaluate says of its model."
    c = config(steps=40, decay_steps=10, lr=1e-2, eval_every=20)
    train(c)
    log, model = log_of(c), load_model(c.out_dir)
    assert [line['step'] for line in log] == list(range(41))
    losses = [line['val_loss'] for line in log if 'val_loss' in line]
    assert len(losses) == 3 and losses[-1] < losses[0] - 1
    assert abs(losses[0] - math.log(257)) < 0.1
    last = log[-1]
    assert last['tokens'] == 40 * 64 and last['flops'] == 40 * 64 * model.flops_per_token()
    scores = data_scores(model, Loader(c.data, c.batch_size, c.context, 'val'), c.eval_batches)
    assert last['val_loss'] == pytest.approx(scores['loss'].mean)
    assert last['kinds']['fifth']['accuracy'] == scores['fifth'].mean > 0
    about = json.loads((Path(c.out_dir) / 'run.json').read_text())
    assert about['tokenizer'] == 'bytes' and about['config']['lr'] == 1e-2
    assert about['data'] == [json.loads((Path(c.data) / 'train.json').read_text())['origin']]


def test_train_keeps_the_parents_tokenizer(config):
    "Its chat template and how its texts end may be others than those of the data."
    first = config('first')
    train(first)
    files = 'tokenizer.json', 'generation_config.json', 'chat_template.jinja'
    for name in files:
        Path(first.out_dir, name).write_text('of the first')
    Path(first.out_dir, 'ckpt.pt').rename(Path(first.out_dir, 'ckpt-4.pt'))
    c = config('second', init_from=f'{first.out_dir}/ckpt-4.pt')
    train(c)
    assert {Path(c.out_dir, name).read_text() for name in files} == {'of the first'}
    with pytest.raises(Refused, match='has ckpt-4.pt, but no ckpt.pt'):
        train(replace(c, out_dir=first.out_dir))


def test_train_grows_by_the_plan(config, data, capsys):
    c = config(**GROW, keep_stages=True, cooldown_data=str(data))
    train(c)
    log = log_of(c)
    grown = {line['step'] - 1: line['grown'] for line in log if 'grown' in line}
    assert [*grown] == [2, 7, 14]
    out = capsys.readouterr().out
    assert f'data is read {log[25]["passes"]:.2f} times' in out         # of its trunk
    said = re.search(r'([\d.e+]+) training FLOPs, ([\d.]+)% less', out)
    full = 30 * 64 * load_model(c.out_dir).flops_per_token()
    assert float(said[2]) == pytest.approx(100 * (1 - log[-1]['flops'] / full), abs=0.05)
    # keep_stages: each model as it was before it grew
    val = Loader(c.data, c.batch_size, c.context, 'val')
    for n, (step, event) in enumerate(grown.items(), 1):
        stage = load_model(f'{c.out_dir}/ckpt-{step}.pt')
        assert len(stage.layers) == n and event['before'] != event['after']
        loss = data_scores(stage, val, c.eval_batches)['loss']
        assert loss.mean == pytest.approx(event['before'], abs=1e-6)


def test_train_growth_keeps_optimizer_states(config):
    "Groups by depth are made anew. In AdamW's states a copy has counted its source's steps, too."
    c = config(**GROW, optimizer=by_layer)
    train(c)
    states = state_of(c)['optimizers']
    of_layers, rest = states['AdamW'], states['SGD']
    assert {state['step'].item() for state in of_layers.values()} == {30}
    assert len(of_layers) == 4 * 9 and len(rest) == 3


def by_depth(model, c):
    "AdamW for the first layers, SGD for the rest: at a growth a layer changes its kind."
    first = [p for layer in model.layers[:2] for p in layer.parameters()]
    rest = [p for p in model.parameters() if not any(p is q for q in first)]
    return [torch.optim.AdamW(first, c.lr), torch.optim.SGD(rest, c.lr, momentum=0.9)]


def test_train_growth_with_two_optimizers_leaves_no_old_model(config, monkeypatch):
    "At 1.7 billion weights an old model, with its states, would be 11 GB."
    update, of_layers = train_file.update, {}

    def noted(run, rate):
        now = len(run.model.layers)
        for layers, parameters in of_layers.items():
            assert layers == now or all(p() is None for p in parameters)
        of_layers[now] = [weakref.ref(p) for p in run.model.parameters()]
        return update(run, rate)
    monkeypatch.setattr(train_file, 'update', noted)
    assert train(config(**GROW | dict(grow_from=2), optimizer=by_depth)) == 0
    assert [*of_layers] == [2, 3, 4]


SMALLER = GROW | dict(batch_size=6, steps=12, decay_steps=2)
MASKED = dict(optimizer='adamw', steps=6)
RECURRENT = dict(optimizer='adamw', steps=3, warmup_steps=0, decay_steps=1, curriculum=0.5)
ALIKE = dict(       # a run's settings, into how many pieces two processes cut it, how near they are
    growing_in_pieces=(SMALLER, 3, 1e-4), masked_row_by_row=(MASKED, 2, 1e-5),
    a_core_in_pieces=(RECURRENT, 2, 3e-5),
    half=(dict(steps=4, warmup_steps=0, decay_steps=1, dtype='bfloat16'), 1, 1e-3))


@pytest.mark.parametrize('name', ALIKE)
def test_train_alike_in_pieces_and_ranks(name, config, recurrent, tmp_path):
    """The same tokens weigh the same, whoever computes them, and a first state is a function of a
    row's place in the batch."""
    fields, pieces, near = ALIKE[name]
    if name.startswith('masked'):           # pieces and ranks have unequal numbers of targets
        rng = np.random.default_rng(0)
        for split in ('train', 'val'):
            mask = rng.random(64 * 17) < np.repeat(rng.random(64), 17)
            mask[:17] = 0
            write_dataset(tmp_path / 'sft', split, 'bytes', rng.integers(0, 99, 64 * 17), mask=mask)
        fields = fields | dict(data=str(tmp_path / 'sft'))
    if fields is RECURRENT:
        fields = fields | recurrent
    one, other = config('one', **fields), config('other', **fields, grad_accum=pieces)
    train(one)
    ended = ranks(other)
    assert ended.returncode == 0, ended.stderr
    for a, b in zip(log_of(one), log_of(other), strict=True):
        for key in ('step', 'n_layer', 'r'):
            assert a.get(key) == b.get(key)
        for key in {'loss', 'grad_norm', 'val_loss'} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=near)
    a, b = weights_of(one), weights_of(other)
    assert all((a[name] - b[name]).norm() <= 20 * near * a[name].norm() for name in a)


def half(model, c):
    return [torch.optim.SGD([*model.parameters()][::2], c.lr)]


def twice(model, c):
    return 2 * [torch.optim.SGD(model.parameters(), c.lr)]


REFUSED = [             # what its settings do not say would be trained, or it would fail later
    (dict(eval_batches=-1), 'eval_batches=-1 is below 0'),
    (dict(warmup_steps=10), '10 steps of warm-up and 4 of decay are more than steps=12'),
    (dict(decay_steps=0, cooldown_loop='1-1x2'), 'a cool-down needs a decay'),
    (dict(grad_accum=3), 'batch_size=4 is not a multiple of 1 processes x grad_accum=3'),
    (dict(grow='lidas', grow_block=1, n_layer=9),
     '8 steps before the decay are too few for 9 stages'),
    (dict(grow='lidas', n_layer=4, loop='2-1x2'), 'grow and loop do not go together'),
    (dict(grow='lidas', init_from='{looped}', n_layer=4), 'a looped model does not grow'),
    (dict(grow='lidas', init_from='{scaled}', grow_from=3, n_layer=8), 'leave grow_from out'),
    (dict(cooldown_loop='3x2'), 'the loop 3x2 has 3 unique layers, but the model has 2'),
    (dict(recurrence=3), 'recurrence is for a core, and cut makes one'),
    (dict(order=[0, Core([1])]), 'a core is made by cut'),
    (dict(init=half), 'has no effect without grow'),
    (dict(order=[0, 1], n_layer=3), 'runs only some of n_layer=3 new layers'),
    (dict(cut='1-1-0', init_from='{looped}'), 'that runs each of its layers once'),
    (dict(cut='1-1-0', init_from='{cut}'), 'has a core already: --cut=none'),
    (dict(cut='1-2-1', init_from='{scaled}'), 'LN-scaling would give layers the scale of another'),
    (dict(grow_alpha=2.0), 'grow_alpha=2.0 has no effect without grow'),
    (dict(optimizer='adamw', adamw_lr=1e-4), 'adamw_lr=0.0001 has no effect without muon'),
    (dict(curriculum=0.5), 'curriculum=0.5 has no effect without recurrence'),
    (dict(init_from='{cut}', loop='2x2'), 'are not for a recurrent core'),
    (dict(init_from='{cut}', curriculum=25.0), 'a curriculum over 25 of the steps'),
    (dict(cooldown_data='nowhere'), 'there is no data in nowhere: see its config or prepare.py'),
    (dict(cooldown_data='{other}'), 'a model has one tokenizer, and these data'),
    (dict(optimizer=half), 'belongs in one group of one optimizer'),
    (dict(optimizer=twice), 'belongs in one group of one optimizer')]


@pytest.mark.parametrize('fields, line', REFUSED, ids=[line[:40] for _, line in REFUSED])
def test_train_refuses_before_the_work(fields, line, config, placed, tmp_path):
    with pytest.raises(Refused, match=re.escape(line)) as error:
        train(config('refused', **placed(fields)))
    assert '\n' not in str(error.value) and not (tmp_path / 'refused').exists()


def test_make_toy_data_where_it_is_read(config, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(loader_file, 'find', lambda path: tmp_path / path)
    monkeypatch.setattr(loader_file.subprocess, 'run', lambda argv, check: made.append(argv[1]))
    for data, cooldown_data in (('other', None), ('data/toy', None), ('other', ['data/toy'])):
        loader_file.make_toy_data(config(data=data, cooldown_data=cooldown_data))
    assert made == [ROOT / 'data/toy/prepare.py'] * 2        # and no script of the current folder


OWN = """
def lr_shape(c, step):
    return 0.5


def optimizer(model, c):
    import torch
    return [torch.optim.SGD(model.parameters(), c.lr)]
"""


def test_train_own_functions(config, tmp_path):
    "A growth, its beginning, a metric, a rate and an optimizer; files of a run hold no function."
    text, file = (ROOT / 'config/own_growth.py').read_text() + OWN, tmp_path / 'own.py'

    def own(text):
        file.write_text(text)
        return read(Config, [str(file), *flags(config(n_layer=4))])
    c = own(text)
    train(c)
    [grown] = [line['grown'] for line in log_of(c) if 'grown' in line]
    # a copy begins with zeros where it writes, so that the loss stays
    assert grown['before'] == grown['after'] and grown['origin'] == [0, 1, 0, 1]
    model, saved = load(c.out_dir)                      # which opens plain values only
    with torch.no_grad():
        val = Loader(c.data, c.batch_size, c.context, 'val')
        stream = c.metric(model, val)['stream'].item()
    last = log_of(c)[-1]
    assert last['metric']['stream'] == pytest.approx(stream) and last['lr'] == 0.5 * c.lr
    in_json = json.loads((Path(c.out_dir) / 'run.json').read_text())['config']
    for name in ('grow', 'init', 'metric', 'lr_shape', 'optimizer'):
        assert saved['config'][name] == in_json[name] and f'def {name}(' in in_json[name]
    train(own(text.replace('dict(stream=', 'dict(size=')))      # another metric will do
    for before, after, name in (('old):\n', 'old):\n    pass\n', 'init'),
                                ('range(n_layer - block, n_layer)', 'range(block)', 'grow'),
                                ('return 0.5', 'return 1 / 2', 'lr_shape'),
                                ('c.lr)', 'c.lr * 2)', 'optimizer')):
        with pytest.raises(Refused, match=f'holds a run with {name}=.def {name}'):
            train(own(text.replace(before, after)))


OWN_SPAN = """
from model import Span

_SHARE = 0.5


def _share():
    return _SHARE       # a comment


class Shares(Span):
    def forward(self, run, x):
        "Moves the stream by a share."
        return x + _share() * (run(x, self.items) - x)


n_layer = 3
order = [0, Shares([1]), 2]
"""


def test_an_edited_span_is_noticed_and_an_edited_comment_is_not(config, tmp_path):
    "With the function and the constant of its file that it uses."
    file = tmp_path / 'own.py'

    def own(text):
        file.write_text(text)
        return read(Config, [str(file), *flags(config(n_layer=3))])
    train(own(OWN_SPAN))
    for before, after in (('# a comment', ''), ('"Moves the stream by a share."', '"Other words."'),
                          ('def forward', 'def  forward')):
        assert train(own(OWN_SPAN.replace(before, after))) == 0
    for before, after in (('x + _share', 'x - _share'), ('= 0.5', '= 0.6'),
                          ('return _SHARE', 'return 2 * _SHARE')):
        with pytest.raises(Refused, match='holds a run with class Shares='):
            train(own(OWN_SPAN.replace(before, after)))


def rows_and_rank(model, loader):
    return dict(rows=len(loader.batch(0)[0]), rank=machine.process()[0])


def test_train_metric_of_each_process(config):
    c = config(n_layer=1, steps=2, decay_steps=0, metric=rows_and_rank)
    assert ranks(c).codes == [0, 0]
    assert tuple(log_of(c)[-1]['metric'].values()) == (c.batch_size / 2, 0.5)


@pytest.mark.parametrize('optimizer', ['muon', 'adamw'])
@pytest.mark.parametrize('tied', [True, False])
def test_make_optimizers_has_each_parameter_once(optimizer, tied):
    model = LM(ModelConfig(n_layer=2, n_embd=32, n_head=2, tie_embeddings=tied))
    optimizers = make_optimizers(model, Config(optimizer=optimizer, lr=1e-3, adamw_lr=1e-4,
                                               weight_decay=0.1, muon_scaling='original'))
    groups = [(type(o).__name__, g) for o in optimizers for g in o.param_groups]
    held = [id(p) for _, g in groups for p in g['params']]
    assert sorted(held) == sorted({id(p) for p in model.parameters()})
    for name, group in groups:
        assert name != 'Muon' or group['adjust_lr_fn'] == 'original'
        assert group['weight_decay'] == (0 if group['params'][0].dim() == 1 else 0.1)
        assert group['peak'] == (1e-4 if optimizer == 'muon' and name == 'AdamW' else 1e-3)
    assert [name for name, _ in groups].count('Muon') == (optimizer == 'muon')


@pytest.mark.parametrize('adjust', ['match_rms_adamw', 'original'])
def test_muon_as_torch(adjust, monkeypatch):
    """What each step changes and keeps, with the same random gradients, of which one is zero, and
    one parameter has none. For once torch iterates in float64."""
    monkeypatch.setattr(torch.Tensor, 'bfloat16', torch.Tensor.double)
    shapes = [(24, 16), (16, 24), (16, 16), (24, 16), (16, 24)]
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = [kind(params, lr=0.5, weight_decay=0.1, adjust_lr_fn=adjust)
                  for kind, params in ((Muon, ours), (torch.optim.Muon, theirs))]
    for step in range(3):
        before = [p.detach().clone() for p in (*ours, *theirs)]
        for p, q in zip(ours[1:], theirs[1:]):
            p.grad = torch.randn(p.shape) * (step > 0 or p is not ours[1])
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        moved = [(p - old).detach() for p, old in zip((*ours, *theirs), before)]
        for a, b in zip(moved[:5], moved[5:]):
            assert (a - b).norm() <= 1e-5 * b.norm()
    kept = [optimizer.state_dict()['state'] for optimizer in optimizers]
    assert kept[0].keys() == kept[1].keys() == {1, 2, 3, 4}
    assert all(same(kept[0][i], kept[1][i]) for i in kept[0])


def test_adamw_star_by_hand():
    """The authors' code; the third gradient is a spike, one entry never moves, and of the last one
    the squares are smaller than that of eps."""
    values = read(Config, ['config/adamw_star.py'])
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 0.3]))
    [optimizer] = values.optimizer(SimpleNamespace(parameters=lambda: [p]), values)
    for group in optimizer.param_groups:
        group.update(lr=0.1, peak=0.2, weight_decay=0.01)
    w, m, v = p.detach().double(), None, None
    for t, first in enumerate((0.1, 0.1, 5.0, 0.1), 1):
        p.grad = torch.tensor([first, 0.2 - 0.1 * t, 0.0, 5e-7])
        optimizer.step()
        g = p.grad.double()
        m = g if t == 1 else 0.9 * m + 0.1 * g
        v = g * g if t == 1 else 0.95 * v + 0.05 * g * g
        v = v.clamp(min=1e-12)
        rms = (g * g / v).mean().sqrt().item()
        steps = torch.atan2(m, v.sqrt() / math.sqrt(1 - 0.95 ** t))
        steps /= max(1.0, rms) * (1 - 0.9 ** t)
        w = w * (1 - 0.01 * 0.1 / 0.2) - 0.1 * steps
        assert p.tolist() == pytest.approx(w.tolist(), rel=1e-5) and (rms > 1.1) == (t == 3)
