"""Files that `export` wrote for llama.cpp, run by llama.cpp itself: `make llama`, two minutes, not
in make test. It compares greedy text and tokens, for the model as it is, with layers 13 to 16
twice, and with these damped."""
import json
import subprocess

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


@pytest.mark.parametrize('way', [Way(), Way(loop=TWICE), Way(loop=TWICE, damp=True)], ids=str)
def test_llama_cpp_goes_on_as_we_do(way, tmp_path):
    options = [] if not way.loop else [f'--loop={TWICE}', *(['--damp'] if way.damp else [])]
    nanodepth('export', [PATH, str(tmp_path / 'model.gguf'), '--dtype=float32', *options])
    words = get_tokenizer(PATH)
    prompts = [words.encode(prompt) for prompt in PROMPTS]
    (tmp_path / 'prompts.json').write_text(json.dumps(dict(tokens=prompts, texts=TEXTS)))
    said = subprocess.run(['node', ROOT / 'tests/llama.mjs', tmp_path / 'model.gguf',
                           tmp_path / 'prompts.json', '20'], cwd=ROOT / 'out/llama',
                          capture_output=True, text=True, check=True, timeout=600)
    theirs = json.loads(said.stdout)
    assert theirs['words'] == [words.encode(text) for text in TEXTS]
    model = load_model(PATH).float()
    with way.apply(model):
        for prompt, more in zip(prompts, theirs['more'], strict=True):
            ours = model.generate(torch.tensor([prompt]), 20, temperature=0)[0, len(prompt):]
            # llama.cpp stops where a text ends, and does not say by which mark
            assert ours[:len(more)].tolist() == more
            ends = '<|im_end|>', '<|endoftext|>'
            assert len(more) == 20 or words.decode([ours[len(more)]]) in ends
