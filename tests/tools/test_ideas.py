"Test that each file in config/ideas trains, resumes, branches, is scored and is exported."
import dataclasses
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, SMALL, left_by, log_of, logits, state_of, stop_at
from transformers import AutoModelForCausalLM

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands.train import planned
from nanodepth.common.options import read
from nanodepth.models.checkpoint import load_model
from nanodepth.models.joined import save_joined
from nanodepth.retrofit import surgery
from nanodepth.train import train
from nanodepth.training.plan import Config

pytestmark = pytest.mark.usefixtures('backward')


IDEAS = sorted((ROOT / 'config/ideas').glob('*.py'))
# two ways to run the trained model
ASKED = dict(ouro='--span=q:0.1,q:0.9', deep='--span=times:1,times:6',
             settle='--span=times:1,times:8', halt='--span=eps:0.0,eps:9.0')


@pytest.fixture(params=IDEAS, ids=lambda path: path.stem)
def idea(request, data, undrawn, tmp_path):
    "idea(name, **settings) returns the settings of a small run of a file."
    small = {name: value for name, value in SMALL.items() if name != 'n_layer'}
    small |= dict(context=32, batch_size=8)
    c = read(Config, [str(request.param)])

    def make(name, **settings):
        return dataclasses.replace(c, **small | dict(data=str(data), n_kv_head=1,
                                                     out_dir=str(tmp_path / name)) | settings)
    make.file = request.param
    return make


def test_an_idea_resumes_and_branches_to_the_last_bit(idea):
    whole, stopped = (idea(name, keep_every=8) for name in ('whole', 'stopped'))
    assert train(whole) == 0
    for step in (3, 4):
        stop_at(step)
        assert train(stopped) == signal.SIGTERM
    assert train(stopped) == 0
    assert left_by(stopped) == left_by(whole)
    trunk = Path(whole.out_dir) / 'ckpt-8.pt'       # a branch with the same settings equals the run
    branch = idea('branch', branch_from=str(trunk), keep_every=8)
    assert train(branch) == 0
    a, b = (state_of(c) for c in (whole, branch))
    assert all(torch.equal(a['model'][name], b['model'][name]) for name in a['model'])
    assert planned(whole) == a['flops'] and log_of(whole)[-1]['loss'] != log_of(whole)[1]['loss']


def test_an_idea_is_causal_cached_and_exported(idea, tmp_path):
    "A row does not depend on the other rows of its batch."
    c = idea('run')
    train(c)
    model = load_model(c.out_dir)
    for p in model.spans.parameters():              # as after much training
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, cache = model(tokens), {}
        pieces = [model(piece, cache=cache) for piece in tokens.split([5, 1, 10], dim=1)]
        assert torch.allclose(torch.cat(pieces, dim=1), plain, atol=1e-4)
        assert torch.allclose(model(tokens[:1]), plain[:1], atol=1e-5)
        changed = tokens.clone()
        changed[:, 9:] = 7
        assert torch.allclose(model(changed)[:, :9], plain[:, :9], atol=1e-5)
    save_joined(model, tmp_path / 'hf')
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / 'hf', trust_remote_code=True).eval()
    assert torch.allclose(logits(theirs, tokens), plain, atol=1e-5)
    mask = torch.ones_like(tokens[:, :6])
    text = theirs.generate(tokens[:, :6], attention_mask=mask, do_sample=False, max_new_tokens=8,
                           pad_token_id=0)
    assert torch.equal(text, model.generate(tokens[:, :6], 8, temperature=0))


def test_an_idea_is_scored_and_sampled(idea, capsys):
    "`nanodepth FILE.py COMMAND` runs the file first, so its Spans and its metric are known."
    c = idea('run')
    train(c)
    capsys.readouterr()
    name = idea.file.stem
    metric = ',metric' if c.metric else ''
    words = ['evaluate', c.out_dir, f'--measures=loss{metric}', '--device=cpu', ASKED.get(name, '')]
    nanodepth(None, [str(idea.file), *filter(None, words)])
    said = capsys.readouterr().out
    for way in ASKED.get(name, '').removeprefix('--span=').split(','):
        assert way in said
    nanodepth(None, [str(idea.file), 'sample', c.out_dir, '--device=cpu', '--tokens=4'])


def test_a_halting_core_stops_when_all_tokens_are_at_rest(tiny):
    """With a large eps one run is enough, so of 2 + 5 x 2 + 2 layers 8 do not run. With a cache all
    runs are computed, because later tokens read them, and the result is the same."""
    c = read(Config, ['config/ideas/halt.py'])
    model = surgery(tiny(n_layer=6, vocab_size=257), '2-2-2', c.core, r=5)
    torch.nn.init.normal_(model.order[2].adapter.weight, std=0.2)      # or the first run decides
    tokens = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(0))
    ran = []
    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    with torch.no_grad():
        for eps, layers in ((0.0, 14), (1e9, 6)):
            model.order[2].eps = eps
            ran.clear()
            alone = model(tokens)
            assert len(ran) == layers
            assert torch.equal(model(tokens, cache={}), alone) and len(ran) == layers + 14
    loader = SimpleNamespace(n_batches=1, context=12, batch=lambda i: (tokens,))
    numbers = c.metric(model, loader)
    assert numbers['runs'] == pytest.approx(1)
    whole = model.flops_per_token(context=12)       # backprop_depth is 8, so all five runs count
    model.order[2].r = 1
    assert numbers['FLOPs saved'] == pytest.approx(1 - model.flops_per_token(context=12) / whole)
