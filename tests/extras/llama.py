"""Files that `export` wrote for llama.cpp, run by llama.cpp itself: `make llama`, two minutes, not
in make test. It compares greedy text, its probabilities and tokens: for the published model as it
is, with layers 13 to 16 twice, with these damped, and with all 30 layers twice from shared weights.
And for a toy that is trained as a loop, which is written with shared weights, too."""
import json
import subprocess
import sys

import gguf
import pytest
import torch
from conftest import ROOT

from nanodepth.__main__ import main as nanodepth
from nanodepth.scoring.way import Way
from nanodepth.models.checkpoint import load_model
from nanodepth.text.tokenizer import get_tokenizer

PATH = str(ROOT / 'out/smollm2')
PROMPTS = ['The capital of France is', 'Water boils at', 'Once upon a time', 'def add(a, b):',
           'The opposite of hot is', 'In 1969, the first', 'My favourite food is',
           'The largest planet is', 'To make bread you need', 'Two plus two is']
TEXTS = ['In  1984, 12 x 7 is 84;\n\n  def f(x):\n\treturn x[1:20]', 'naïve ½ 東京']
TWICE = '13-4x2-13'


TOY = ROOT / 'out/llama/loop'


@pytest.fixture(scope='session')
def toy():
    "Two layers that run four times, trained on Python's documentation in SmolLM2's tokens."
    if not (TOY / 'done').exists():
        subprocess.run([sys.executable, 'train.py', 'config/loop_2x4.py', '--data=data/pydoc',
                        '--tie_embeddings=true', '--steps=150', f'--out_dir={TOY}'], cwd=ROOT,
                       check=True)
        (TOY / 'done').touch()
    return str(TOY)


@pytest.mark.parametrize('way', [{}, dict(loop=TWICE), dict(loop=TWICE, damp=True),
                                 dict(loop='30x2')], ids=str)
def test_llama_cpp_goes_on_as_we_do(way, tmp_path):
    go_on(PATH, Way(**way), [f'--{name}={value}' for name, value in way.items()], tmp_path)


def test_llama_cpp_runs_a_trained_loop_from_shared_weights(toy, tmp_path):
    texts = go_on(toy, Way(), [], tmp_path)
    assert len(set(texts[0])) > 8           # no word again and again, which any loop might write
    reader = gguf.GGUFReader(tmp_path / 'model.gguf')
    assert sum(t.name.endswith('attn_q.weight') for t in reader.tensors) == 2


def go_on(path, way, options, folder):
    "llama.cpp's text after each prompt, which must be ours, token by token."
    nanodepth('export', [path, str(folder / 'model.gguf'), '--dtype=float32', *options])
    words = get_tokenizer(path)
    prompts = [words.encode(prompt) for prompt in PROMPTS]
    (folder / 'prompts.json').write_text(json.dumps(dict(tokens=prompts, texts=TEXTS)))
    said = subprocess.run(['node', ROOT / 'tests/extras/llama.mjs', folder / 'model.gguf',
                           folder / 'prompts.json', '20'], cwd=ROOT / 'out/llama',
                          capture_output=True, text=True, check=True, timeout=600)
    theirs = json.loads(said.stdout)
    assert theirs['words'] == [words.encode(text) for text in TEXTS]
    model = load_model(path).float().eval()
    with way.apply(model), torch.no_grad():
        for prompt, more, likely in zip(prompts, theirs['more'], theirs['likely'], strict=True):
            tokens = model.generate(torch.tensor([prompt]), 20, temperature=0)
            ours = tokens[0, len(prompt):]
            # llama.cpp stops where a text ends, and does not say by which mark
            assert ours[:len(more)].tolist() == more
            ends = '<|im_end|>', '<|endoftext|>'
            assert len(more) == 20 or words.decode([ours[len(more)]]) in ends
            chances = model(tokens)[0, len(prompt) - 1:-1].softmax(-1)
            chances = chances.gather(-1, ours[:, None])[:len(more), 0]
            assert torch.allclose(torch.tensor(likely), chances, atol=1e-3)
    return theirs['more']
