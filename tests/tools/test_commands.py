"""Test the cost that is computed before a run begins: each run of docs/FIGURES.md can be planned
without its data, and costs what its log then records."""
import math
import re

import pytest
from helpers import ROOT, log_of, save_run

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import train as command
from nanodepth.common.options import read
from nanodepth.models.checkpoint import cost_of, spent_on, state_of
from nanodepth.models.hf import save_hf
from nanodepth.model import LM, ModelConfig
from nanodepth.report import logs
from nanodepth.retrofit import surgery
from nanodepth.train import train
from nanodepth.training.plan import Config


# {name: [config and flags]} of the runs that docs/FIGURES.md gives commands for
RUNS = {name: [f'config/{config}.py', *flags.split()] for name, config, flags in re.findall(
    r'^\| (\w+) \| (\w+) \| `(.*)` \|', (ROOT / 'docs/FIGURES.md').read_text(), re.M)}


@pytest.mark.parametrize('name', RUNS)
def test_dry_run_of_every_run_in_figures(name, capsys, monkeypatch, tiny):
    parent = tiny(n_layer=8, context=4096)
    if 'retrofit' in name and not name.endswith('dense'):
        parent = surgery(parent, '2-4-2')
    monkeypatch.setattr(command, 'open_path', lambda path, classes=(): ({}, parent))
    changes = ['--vocab_size=257']
    if 'smollm' in name or 'retrofit' in name:          # at size: shorter, for the test's sake
        changes = ['--steps=2000', '--warmup_steps=20', '--decay_steps=300']
    nanodepth('train', [*RUNS[name], *changes, '--dry_run'])
    assert re.search(r'in all [\d,.]+ petaFLOPs; [\d,]+ steps', capsys.readouterr().out)


def test_flops_of_a_retrofits_partner_are_the_mean(tmp_path, data):
    parent = LM(ModelConfig(n_layer=8, context=64, head_dim=64))
    save_run(tmp_path / 'dense', parent)

    def flops(name, *more):
        "Those of a token, over all steps."
        c = read(Config, [str(ROOT / f'config/{name}.py'), f'--data={data}',
                          f'--init_from={tmp_path / "dense"}', *more])
        return command.planned(c) / (c.batch_size * c.context)
    recurrent = [flops('retrofit', f'--seed={seed}') for seed in range(6)]
    assert len({*recurrent}) == 6           # each draws its own r
    assert sum(recurrent) / 6 == pytest.approx(flops('retrofit_dense'), rel=0.02)


@pytest.mark.parametrize('parent, fields', [
    ('', dict(grow='lidas', n_layer=6)), ('plain', dict(grow='lidas', n_layer=8)),
    ('', dict(n_layer=4, loop='1-2x3-1', cooldown_loop='1-2x4-1')),
    ('cut', dict(curriculum=0.5, backprop_depth=2))], ids=str)
def test_flops_planned_are_those_logged(parent, fields, config, recurrent, tiny, tmp_path):
    "What grows, loops of which one begins late, a core that draws its r in each step."
    save_run(tmp_path / 'plain', tiny(vocab_size=257, context=16))
    c = config(init_from=parent and str(tmp_path / parent), **fields)
    train(c)
    assert command.planned(c) == log_of(c)[-1]['flops'] > 0


def test_cost_of_a_published_parent_is_unknown(tmp_path, tiny, config):
    save_hf(tiny(vocab_size=257, n_layer=5), tmp_path / 'hf', tokenizer='bytes')
    nanodepth('cut', [str(tmp_path / 'hf'), '1-2-1', f'--out={tmp_path / "cut"}'])
    for name, parent in (('child', 'hf'), ('grandchild', 'child')):
        train(config(name, init_from=str(tmp_path / parent)), command.open_parent)
    states = {name: state_of(tmp_path / name) for name in ('hf', 'cut', 'child', 'grandchild')}
    assert all(math.isnan(cost_of(state)) for state in states.values())
    own = states['child']['flops']          # what was trained since then is known
    assert [spent_on(state) for state in states.values()] == [0, 0, own, 2 * own]
    assert logs.log_of(tmp_path / 'grandchild')[-1]['flops'] == 2 * own > 0


def test_dry_run_says_tokens_flops_and_minutes(capsys, data):
    model = LM(ModelConfig(vocab_size=257, head_dim=64, tie_embeddings=False))
    flops = 10_000_000 * 16 * 64 * model.flops_per_token(context=64)
    nanodepth('train', ['config/baseline.py', f'--data={data}', '--steps=10_000_000',
                        '--batch_size=16', '--dry_run'])
    said = capsys.readouterr().out
    assert (f'in all {flops / 1e15:,.3f} petaFLOPs; 10,000,000 steps of 16 x 64 = 1,024 tokens'
            in said)
    assert f'{flops / (0.4 * 989e12) / 60:,.1f} minutes on one H100' in said
