"""Write a checkpoint as a Hugging Face folder, as it is or in another way of running. If its order
has Spans, such as a recurrent core or a window, the folder includes the code that opens it.
    nanodepth export out/lidas out/lidas_hf                     # for transformers
    nanodepth export out/smollm2 out/deeper --loop=8-4x2-18     # layers 8 to 11 run twice
"""
import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nanodepth.common.files import new_folder
from nanodepth.common.options import read
from nanodepth.common.origin import copy_licence
from nanodepth.model import require, spans_in, unrolled
from nanodepth.models.checkpoint import load_model
from nanodepth.models.hf import family_of, save_hf
from nanodepth.models.joined import save_joined
from nanodepth.models.raven import save_authors
from nanodepth.scoring.ways import Ways, in_way, one_way


@dataclass(kw_only=True)
class Options(Ways):
    run: str                                # a folder that train.py wrote, or a Hugging Face one
    target: str                             # the folder to write
    dtype: Literal['float32', 'bfloat16'] | None = None     # of the weights; None: unchanged
    authors: bool = False       # write a recurrent model in the format of the paper's authors


# A process without this package opens the folder: with transformers' own class, or with the code
# that the folder brings. So an edited model.py of ours cannot take part in the comparison.
OPEN = '''
import sys, torch
sys.modules['nanodepth'] = None
from transformers import AutoModelForCausalLM, GenerationConfig
folder, file = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
model.generation_config = GenerationConfig()
tokens, new = torch.load(file)
with torch.no_grad():
    logits = model.eval()(tokens).logits
text = model.generate(tokens[:, :4], attention_mask=torch.ones(1, 4), do_sample=False,
                      max_new_tokens=new, pad_token_id=0)
torch.save((type(model).__name__, logits, text), file)
'''


def main(argv):
    options = read(Options, argv, ['run', 'target'])
    with new_folder(options.target) as folder:
        model = load_model(options.run)
        with in_way(model, one_way(options)):
            print(f'{options.run}: {model.num_params():,} parameters, {len(model.layers)} layers, '
                  f'run {len(unrolled(model.order))} deep, {str(model.norm.weight.dtype)[6:]}')
            for p in model.parameters() if options.dtype else ():       # (not tables of positions)
                p.data = p.data.to(getattr(torch, options.dtype))
            is_plain = not spans_in(model.order) and family_of(model.config)
            write = save_authors if options.authors else save_hf if is_plain else save_joined
            order = ' '.join(map(str, unrolled(model.order)))
            write(model, folder, options.run, dict(parent=Path(options.run).name, order=order))
            copy_licence(options.run, folder)
            if not options.authors:
                check(model, folder)
    if options.authors:
        print(f"{options.target}: written in the authors' format, and not tried with their code")
    else:
        print(f'{options.target}: transformers.AutoModelForCausalLM.from_pretrained opens it'
              + ', with trust_remote_code=True' * (not is_plain))


@torch.no_grad()
def check(model, folder):
    """Open the folder with transformers in another process and compare the logits and, if the
    folder brings code, a text. Both compute in float32. A folder that differs is not kept."""
    if not importlib.util.find_spec('transformers'):
        print('transformers is not installed, so the folder was not compared with its model '
              '(pip install transformers)')
        return
    for p in model.parameters():
        p.data = p.data.float()
    context = model.config.context
    tokens = torch.randint(model.config.vocab_size, (1, min(16, context)),
                           generator=torch.Generator().manual_seed(0))
    new = min(10, context - 4)
    ours, our_text = model(tokens), model.generate(tokens[:, :4], new, temperature=0)
    with tempfile.TemporaryDirectory() as beside:
        file = Path(beside) / 'tokens.pt'
        torch.save((tokens, new), file)
        done = subprocess.run([sys.executable, '-I', '-c', OPEN, folder, file],
                              capture_output=True, text=True)
        why = (done.stderr.strip().splitlines() or ['?'])[-1]
        require(done.returncode == 0, f'transformers does not open it: {why}')
        name, theirs, their_text = torch.load(file)
    difference, largest = (theirs - ours).abs().max(), ours.abs().max()
    require(difference <= 1e-3 * largest, f'{name} of transformers computes other logits, which '
            f'differ by {difference:.2g}, so the folder was not kept. Is the Block of model.py '
            'still a Llama layer?')
    require(name != 'DepthForCausalLM' or torch.equal(our_text, their_text), f'{name} writes other '
            f'text: {their_text.tolist()}, and not {our_text.tolist()}')
    print(f'opened with {name}, its logits differ by at most {difference:.2g}; the largest is '
          f'{largest:.2g}')
