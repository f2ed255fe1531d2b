"""cost.py: Table 7's totals come out of the configs; memory is what autograd really keeps; the
plan needs no data."""
import re

import pytest
import torch
from conftest import ROOT, planned_flops

from nanodepth.__main__ import main as nanodepth
from nanodepth.engine import cost
from nanodepth.model import LM, ModelConfig
from nanodepth.retrofit import surgery
from nanodepth.train import Config, read_config


def dry(capsys, *argv):
    nanodepth('train', [*map(str, argv), '--dry_run'])
    return capsys.readouterr().out


# {name: [config and flags]} of the runs that docs/FIGURES.md gives commands for
RUNS = {name: command.split()[2:] for name, command in re.findall(
    r'^\| (\w+) \| `(python train.py [^`]*)` \|', (ROOT / 'docs/FIGURES.md').read_text(), re.M)}


@pytest.mark.parametrize('name', RUNS)
def test_every_run_of_the_table_can_be_planned_and_costed(name, capsys, monkeypatch, tiny):
    parent = tiny(n_layer=8)
    if 'retrofit' in name and not name.endswith('dense'):
        parent = surgery(parent, '2-4-2')
    monkeypatch.setattr(cost.checkpoint, 'load_model', lambda path: parent)
    changes = ['--vocab_size=257']
    if 'smollm' in name or 'retrofit' in name:          # at size: shorter, for the test's sake
        changes = ['--steps=2000', '--warmup_steps=20', '--decay_steps=300',
                   '--lr_decay_steps=300']
    assert read_config(RUNS[name]).steps >= 411
    said = dry(capsys, *RUNS[name], *changes)
    assert re.search(r'in all [\d,.]+ petaFLOPs; [\d,]+ steps', said)
    assert read_config(RUNS[name]).out_dir == f'out/{name}'


@pytest.mark.parametrize('name, petaflops', [
    ('360m_baseline', '613,527.488'), ('360m_ln_scaling', '613,527.488'),
    ('360m_midas', '476,147.897'), ('360m_lidas', '476,147.897'),
    ('360m_loop_4x8', '613,527.488'), ('360m_standard_8', '197,912.093'),
    ('1b7_baseline', '4,813,222.102'),
    ('1b7_lidas', '3,736,608.182'), ('1b7_loop_4_4x4_4', '4,813,222.102'),
    ('1b7_standard_12', '2,533,274.790')])
def test_table_7_comes_out_to_the_last_digit(name, petaflops, capsys):
    said = dry(capsys, *RUNS.get(f'smollm_{name}', [f'config/smollm_{name}.py']))
    assert (f'in all {petaflops} petaFLOPs' in said and ('growing saves 22.4%' in said)
            == ('midas' in name or 'lidas' in name))


def test_the_stages_are_those_of_the_paper_and_a_loop_of_the_cool_down_is_one(capsys):
    lines = dry(capsys, *RUNS['smollm_1b7_lidas_math_loop']).splitlines()
    stages = [[cell.strip() for cell in line.split('|')[1:4]] for line in lines[2:9]]
    assert stages == [['0 to 8,095', '4', '4'], ['8,095 to 24,285', '8', '8'],
                      ['24,285 to 48,570', '12', '12'], ['48,570 to 80,950', '16', '16'],
                      ['80,950 to 121,426', '20', '20'], ['121,426 to 170,000', '24', '24'],
                      ['170,000 to 200,000', '24', '28']]


def test_the_configs_of_a_size_differ_in_what_they_are_about_alone():
    "Values that are written out in each file must not drift apart."
    for size, about in (('360m', 'tokens'), ('1b7', 'tokens')):
        configs = [[str(path)] for path in sorted(ROOT.glob(f'config/smollm_{size}_*.py'))]
        configs += [argv for name, argv in RUNS.items() if name.startswith(f'smollm_{size}_')]
        found = [vars(read_config(argv)) for argv in configs]
        assert len(found) >= 10
        own = {'out_dir', 'n_layer', 'loop', 'grow', 'grow_block', 'ln_scaling', 'cooldown_loop',
               'cooldown_data'}
        for name in found[0].keys() - own:
            assert len({str(values[name]) for values in found}) == 1, name
        assert len({values['out_dir'] for values in found}) == len(found)


def test_hours_follow_from_the_machine(capsys):
    said = dry(capsys, ROOT / 'config/smollm_360m_baseline.py', '--gpus=64', '--gpu=A100',
               '--mfu=0.5')
    hours = 613_527.488e15 / (64 * 312e12 * 0.5) / 3600
    assert f'time: {hours:,.1f} hours on 64 A100 at 50% of 312 TFLOP/s' in said
    assert 'for 2 x 2,048 tokens at once on each of 64' in said


@pytest.mark.parametrize('fields', [dict(), dict(ln_scaling=True), dict(n_kv_head=2, head_dim=32),
                                    dict(order=[0, 1, 2, 1, 2, 3])])
def test_memory_is_what_autograd_keeps(fields):
    "Every tensor that the layers' forward saves, each storage once, against the formula."
    model = LM(ModelConfig(vocab_size=50, n_layer=4, n_embd=128, n_head=8, ffn_dim=352, context=64)
               if not fields else
               ModelConfig(**dict(vocab_size=50, n_layer=4, n_embd=128, n_head=8, ffn_dim=352,
                                  context=64) | fields))
    kept, own = {}, {p.untyped_storage().data_ptr() for p in (*model.parameters(),
            *model.buffers())}

    def keep(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = (t, t.untyped_storage().nbytes())
        return t
    x = torch.randn(4, 64, 128, requires_grad=True)
    own.add(x.untyped_storage().data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.run(x, model.order)
    found = sum(n for _, n in kept.values()) + x.nbytes
    wanted = 4 * 64 * len(model.order) * cost.kept_by_a_layer(model.config, 4)
    assert abs(found / wanted - 1) < 0.05


def test_parts_of_the_memory():
    model = LM(ModelConfig(vocab_size=50, n_layer=4, n_embd=64, n_head=4, context=16))
    n = model.num_params()
    alone = cost.memory(model, 64, depth=4)
    assert alone['weights'] == alone['gradients'] == 4 * n and alone['optimizer'] == 8 * n
    assert cost.memory(model, 64, depth=4, ranks=4)['ranks'] == 4 * n
    layers = sum(p.numel() for p in model.layers.parameters())
    assert cost.memory(model, 64, depth=4, optimizer='muon')['optimizer'] == 8 * n - 4 * layers
    assert cost.memory(model, 64, depth=8)['activations'] == 2 * alone['activations']


def test_a_recurrent_run_is_counted_step_by_step(tmp_path, capsys, data):
    from nanodepth.engine.checkpoint import describe, save
    from nanodepth.retrofit import recurrence_curriculum, sample_recurrence
    model = surgery(LM(ModelConfig(vocab_size=257, n_layer=4, n_embd=64, n_head=4, context=64)),
                    '1-2-1', mean=4, backprop_depth=2)
    save(tmp_path, **describe(model), optimizers=[], step=0, flops=0)
    said = dry(capsys, ROOT / 'config/retrofit.py', f'--init_from={tmp_path}', '--recurrence=4',
               '--backprop_depth=2', '--steps=20', '--warmup_steps=0',
               '--decay_steps=0', f'--data={data}', '--gpus=1', '--curriculum=0.5')
    total = (
        sum(model.flops_per_token(r=sample_recurrence(recurrence_curriculum(step, 20, 4, 0.5), step,
                                                      0)) for step in range(20)) * 32 * 64)
    assert f'in all {total / 1e15:,.3f} petaFLOPs' in said and '| 0 to 20' in said


def test_the_retrofits_partner_has_its_flops(tmp_path, data):
    from nanodepth.engine.checkpoint import describe, save
    parent = LM(ModelConfig(vocab_size=257, context=64, n_layer=8, n_embd=128,
                            n_head=4, head_dim=64))
    for name, model in (('dense', parent), ('cut', surgery(parent, '2-2-2', mean=4))):
        save(tmp_path / name, **describe(model), optimizers=[], step=0, flops=0)

    def flops(name, init_from, seed):
        return planned_flops(ROOT / f'config/{name}.py', f'--seed={seed}', f'--data={data}',
                             f'--init_from={tmp_path / init_from}')
    recurrent = [flops('retrofit', 'cut', seed) for seed in range(6)]       # each draws its own r
    assert sum(recurrent) / 6 == pytest.approx(flops('retrofit_dense', 'dense', 0), rel=0.02)


def test_what_cannot_be_is_said_in_a_line(capsys, tmp_path):
    path = ROOT / 'config/smollm_360m_baseline.py'
    for argv, words in ((['--gpus=7'],
                         'batch_size=512 on gpus=7 does not divide into grad_accum=4 pieces'),
                        ([f'--data={tmp_path}', '--vocab_size=none'], 'or say --vocab_size=N')):
        with pytest.raises(SystemExit):
            nanodepth('train', [str(path), '--dry_run', *argv])
        assert words in capsys.readouterr().err
