"Test nanodepth/extras: the page of `nanodepth play` computes what torch does."
import json
import re
import shutil
import subprocess

import pytest
import torch
from helpers import save_run
from tool_helpers import refused

from nanodepth.__main__ import main as nanodepth
from nanodepth.extras import play
from nanodepth.grow import lidas, untie
from nanodepth.loop import in_order
from nanodepth.models.checkpoint import load_model
from nanodepth.retrofit import core_of, surgery
from nanodepth.scoring.ways import in_way
from nanodepth.text.primitives import few_shot
from nanodepth.wrapper import Window


IN_NODE = """
globalThis.postMessage = message => said.push(message.answer ?? message.error);
globalThis.said = [];
const fs = require('fs');
require('vm').runInThisContext(fs.readFileSync('model.js', 'utf8') + `
ANSWERS.logits = asked => {
  const {model, stream} = reading(asked);
  return [...model.head(stream.slice(-model.n_embd))];
};`);
onmessage({data: {name: 'begin', body: JSON.parse(fs.readFileSync('about.json'))}});
for (const [name, body] of JSON.parse(fs.readFileSync('asked.json')))
  onmessage({data: {id: 1, name, body}});
fs.writeFileSync('said.json', JSON.stringify(said));
"""


@pytest.fixture
def runs(tiny, tmp_path):
    "A run that grew from 2 to 4 to 6 layers and kept its first two stages, and a recurrent run."
    models = [tiny(vocab_size=257, n_layer=2, context=64, n_kv_head=2)]
    for n in (2, 4):
        models.append(untie(models[-1], lidas(n, 2)))
        for p in models[-1].parameters():
            p.data += 0.1 * torch.randn_like(p)
    for model in models:
        save_run(tmp_path / 'run', model, config=dict(grow='lidas'), step=len(model.layers),
                 names=('ckpt.pt', f'ckpt-{len(model.layers)}.pt'))
    (tmp_path / 'run/log.jsonl').write_text('\n'.join(
        json.dumps(dict(step=n, flops=0, grown=dict(origin=lidas(n, 2)))) for n in (2, 4)))
    return [tmp_path / 'run', save_run(tmp_path / 'core', surgery(models[-1], '2-2-2', r=3))]


def about_in(page):
    "Return the JSON in a page."
    found = re.search(r'<script type="application/json" id="about">(.*?)</script>', page, re.S)
    return json.loads(found[1])


def widened(t):
    "Return the weights that a page has in 8 bits as numbers."
    scales, numbers = play.rounded(t)
    return (scales * numbers.float()).reshape(t.shape)


def as_on_the_page(path):
    "Return a model with the weights that a page has."
    model = load_model(path)
    states = widened(play.tensors_of(model).get('first_states', torch.zeros(1, 1)))
    for p in model.parameters():
        p.data = widened(p.data)
    if core := core_of(model):
        core.first_state = lambda run, e: states[run.start:run.start + e.shape[1]].expand_as(e)
    return model


@torch.no_grad()
@pytest.mark.skipif(not shutil.which('node'), reason='node is missing')
def test_the_page_computes_what_torch_does(runs, tmp_path):
    """Compare logits, texts, losses and right answers, in several orders, in windows, and with a
    core that runs r times."""
    page = play.page([str(run) for run in runs], 'toy_assign/3')
    about = about_in(page)
    models = {'run': as_on_the_page(runs[0]), 'core': as_on_the_page(runs[1])}
    ways = [('run', {}), ('run', dict(order=[0, 1, 1, 2, 5, 4])), ('core', dict(r=1)),
            ('core', {}), ('core', dict(r=7)),
            *(('run', dict(wrap=dict(window='2-5', **how))) for how in (
                dict(solver='rk', K=3), dict(solver='rk', K=2, beta=0.25, T=2),
                dict(solver='euler', K=2, T=1.5), dict(solver='naive', K=2)))]
    prompts = ['é (x):\n', *(q['prompt'] for q in about['questions']['toy_assign/2'][:3])]
    asked, wanted = [], []
    for name, how in ways:
        model = models[name]
        for prompt in prompts:
            body = dict(model=name, how=how, prompt=prompt)
            tokens = torch.tensor([[256, *prompt.encode()]])
            asked += [('logits', body), ('loss', body), *[('write', body)] * 4]
            if core := core_of(model):
                core.r = how.get('r', 3)
            with in_order(model, how.get('order', model.order)), in_way(model, how.get('wrap', {})):
                logits = model(tokens)[0]
                text = model.generate(tokens, 4, temperature=0)[0, -4:].tolist()
            loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
            wanted.append((logits[-1], loss, text))
    asked.append(('measure', dict(model='run', how={}, task='toy_assign/0', first=0, last=20)))
    for name, value in (('about', about), ('asked', asked)):
        (tmp_path / f'{name}.json').write_text(json.dumps(value))
    shutil.copy(play.FOLDER / 'model.js', tmp_path)
    subprocess.run(['node', '-e', IN_NODE], cwd=tmp_path, check=True)
    said = json.loads((tmp_path / 'said.json').read_text())
    for k, (logits, loss, text) in enumerate(wanted):
        found = said[6 * k:6 * k + 6]
        assert torch.allclose(torch.tensor(found[0]), logits, atol=1e-4), asked[6 * k]
        assert found[1] == pytest.approx(loss.item(), rel=1e-4)
        assert found[5] == ''.join(chr(i) if i < 256 else about['shown'][i] for i in text)
    right = 0
    for example in few_shot('toy_assign', 20, shots=0, depth=0):
        logits = models['run'](torch.tensor([[256, *example.prompt.encode()]]))[0, -1]
        right += logits[[ord(text) for text in example.options]].argmax() == example.answer
    assert said[-1] == dict(right=right, questions=20)


def test_the_page_has_the_stages_that_were_kept(runs):
    "If a stage is missing, the next one names its layers by those of the stage before."
    def ends():
        return [(len(model.layers), copies) for _, model, copies in play.stages_of(runs[0])]
    assert ends() == [(2, None), (4, lidas(2, 2)), (6, lidas(4, 2))]
    (runs[0] / 'ckpt-4.pt').unlink()
    assert ends() == [(2, None), (6, [lidas(2, 2)[i] for i in lidas(4, 2)])]


def test_the_page_has_all_runs_and_questions(runs, tmp_path):
    "A name with a < does not begin a tag."
    odd = tmp_path / '<!--'
    shutil.copytree(runs[1], odd)
    nanodepth('play', [*map(str, [*runs, odd]), f'--out={tmp_path / "page.html"}', '--open=false'])
    page = (tmp_path / 'page.html').read_text()
    about = about_in(page)
    assert [run['stages'] for run in about['runs']] == [['run, 2 layers', 'run, 4 layers', 'run'],
                                                       ['core'], ['<!--']] and '"<!--' not in page
    assert about['questions']['toy_assign/3'] == [
        vars(example) for example in few_shot('toy_assign', 100, shots=0, depth=3)]


def test_models_that_a_page_cannot_run_are_refused(runs, tiny, tmp_path, capsys, monkeypatch):
    line = [f'--out={tmp_path / "page.html"}', '--open=false']
    for fields in (dict(ln_scaling=True), dict(order=[0, Window([1, 2]), 3])):
        other = save_run(tmp_path / 'other', tiny(vocab_size=257, **fields))
        assert 'is not a plain toy' in refused(capsys, 'play', other, *line)
    monkeypatch.setattr(play, 'LARGEST', 1000)
    assert 'at most 1,000 parameters' in refused(capsys, 'play', runs[0], *line)
    assert not (tmp_path / 'page.html').exists()
