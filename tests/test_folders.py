"Any family's checkpoint written anew: looped, with its code, and in another order."
import json
import os
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip('transformers')
transformers.logging.set_verbosity_error()

from conftest import ROOT
from families import FAMILIES, tiny
from test_trust import refused

from nanodepth.__main__ import main as nanodepth
from nanodepth.engine import checkpoint
from nanodepth.engine.folders import save_looped, save_reordered
from nanodepth.loop import parse_loop
from nanodepth.wrapper import looped

ALL = bool(os.environ.get('FAMILIES'))
LOOPED = [*FAMILIES] if ALL else ['llama', 'qwen3', 'gemma3_text', 'mixtral', 'gpt2', 'bloom']
ORDERED = [*FAMILIES] if ALL else ['llama', 'qwen2_hybrid', 'smollm3', 'gpt2', 'deepseek_v3']
TOKENS = torch.randint(2, 97, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def folder(tmp_path):
    "folder(family): a tiny checkpoint of it on the disk, and the model."
    def make(name):
        model = tiny(name)
        model.save_pretrained(tmp_path / name)
        return str(tmp_path / name), model
    return make


def opened(path, model, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=model.config._attn_implementation, **options).float().eval()


def generate(model):
    return model.generate(TOKENS, max_new_tokens=6, do_sample=False,
                          attention_mask=torch.ones_like(TOKENS))


@pytest.mark.parametrize('name', LOOPED)
def test_a_looped_folder_computes_what_looped_does(folder, tmp_path, name):
    path, model = folder(name)
    settings = dict(window=(2, 4), method='rk', K=3, T=1.5, cache='exact')
    save_looped(path, tmp_path / 'out', **settings)
    theirs = opened(tmp_path / 'out', model, trust_remote_code=True)
    assert type(theirs).__name__ == f'Looped{type(model).__name__}'
    with looped(model, **settings):
        assert torch.equal(theirs(TOKENS).logits, model(TOKENS).logits)
        assert torch.equal(generate(theirs), generate(model))
    plain = opened(tmp_path / 'out', model)             # without trust: the plain model
    assert type(plain) is type(model) and torch.equal(plain(TOKENS).logits, model(TOKENS).logits)
    theirs.save_pretrained(tmp_path / 'again')          # and it can be saved again
    again = opened(tmp_path / 'again', model, trust_remote_code=True)
    assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)


def test_it_needs_nothing_of_ours(folder, tmp_path):
    path, model = folder('llama')
    nanodepth('export', [path, str(tmp_path / 'out'), '--window=mid4', '--K=3', '--decode=3'])
    settings = json.loads((tmp_path / 'out/config.json').read_text())['nanodepth']
    assert settings['decode'] == 3
    with looped(model, 'mid4', K=3):
        torch.save(model(TOKENS).logits, tmp_path / 'wanted.pt')
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained('out', trust_remote_code=True).eval()
logits = model(torch.tensor({TOKENS.tolist()})).logits
assert torch.equal(logits, torch.load('wanted.pt'))
assert not {{'wrapper', 'model', 'common', 'variants'}} & {{*sys.modules}}
"""
    env = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True,
                          text=True, env=env | dict(HF_MODULES_CACHE=str(tmp_path / 'modules')))
    assert done.returncode == 0, done.stderr
    said = (tmp_path / 'out/README.md').read_text()
    assert 'Layers 1 to 4 of 6' in said and 'trust_remote_code=True' in said


def test_a_run_of_ours_is_written_and_looped(tiny, tmp_path, capsys):      # noqa: F811
    model = tiny(vocab_size=257, n_layer=4, order=[0, 1, 2, 1, 2, 3])
    checkpoint.save(tmp_path / 'run', **checkpoint.describe(model), step=0)
    (tmp_path / 'run/run.json').write_text('{"tokenizer": "bytes"}')
    nanodepth('export', [str(tmp_path / 'run'), str(tmp_path / 'out'), '--window=2-3', '--K=2',
                              '--method=naive'])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out',
                                                               trust_remote_code=True)
    with looped(model, (2, 3), 'naive', 2):
        assert torch.allclose(theirs(TOKENS).logits, model(TOKENS), atol=1e-5)
    for name, *more in (['sample'], ['evaluate', '--tasks=toy_assign/1'], ['probe'], ['export'],
                        ['evaluate', '--tasks=primitive_toy_copy'], ['sweep', '--data=x'],
                        ['cut', '1-1-1', f'--out={tmp_path / "r"}']):
        said = refused(capsys, name, tmp_path / 'out', *more)
        assert 'loops its layers by code of its own' in said, name


@pytest.mark.parametrize('name', ORDERED)
def test_another_order_is_a_repeated_block(folder, tmp_path, name):
    path, model = folder(name)
    nanodepth('export', [path, str(tmp_path / 'out'), '--loop=2-2x2-2'])
    deeper = opened(tmp_path / 'out', model)
    with looped(model, (2, 3), 'naive', 2, cache='exact'):
        assert torch.equal(deeper(TOKENS).logits, model(TOKENS).logits)
        assert torch.equal(generate(deeper), generate(model))


def test_layers_of_several_kinds_keep_their_kinds(folder, tmp_path):
    path, model = folder('gemma3_text')
    save_reordered(path, tmp_path / 'out', parse_loop('2-2x2-2'))
    about = json.loads((tmp_path / 'out/config.json').read_text())
    kinds = model.config.layer_types
    assert about['layer_types'] == [kinds[i] for i in (0, 1, 2, 3, 2, 3, 4, 5)]


def test_what_cannot_be_written_is_a_line(folder, tmp_path, capsys):
    path, _ = folder('deepseek_v3')         # its first two layers have no experts, by their place
    said = refused(capsys, 'export', path, tmp_path / 'o', '--loop=1x2-5')
    assert 'as layer 2 of this order' in said or 'as layer 1 of this order' in said
    assert "window='9-12'" in refused(capsys, 'export', path, tmp_path / 'o', '--window=9-12')
    assert 'give the folder to write' in refused(capsys, 'export', path, '--K=3')


    assert not (tmp_path / 'o').exists()


def test_lm_evals_own_model_scores_a_looped_folder(tmp_path):
    huggingface = pytest.importorskip('lm_eval.models.huggingface')
    from nanodepth.data.tokenizer import write_tokenizer
    model = tiny('llama', vocab_size=257)
    model.save_pretrained(tmp_path / 'plain')
    write_tokenizer('bytes', tmp_path / 'plain', 64)
    save_looped(tmp_path / 'plain', tmp_path / 'out', window=(2, 4), method='rk', K=3)
    lm = huggingface.HFLM(pretrained=str(tmp_path / 'out'), trust_remote_code=True, device='cpu',
                          dtype='float32')
    tokens = list(b'two words')
    found = lm._loglikelihood_tokens([(('a', 'b'), tokens[:5], tokens[5:])], disable_tqdm=True)
    with looped(model, (2, 4), K=3):
        logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    want = sum(logits[i - 1, tokens[i]].item() for i in range(5, len(tokens)))
    assert found[0][0] == pytest.approx(want, abs=1e-4)
