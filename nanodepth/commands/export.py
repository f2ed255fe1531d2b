"""Write a checkpoint as a Hugging Face folder, as it is or run in another way. One whose order has
Spans, such as a recurrent core or a window, brings the code that transformers opens it by.
    nanodepth export out/lidas out/lidas_hf                     # for transformers
    nanodepth export out/smollm2 out/deeper --loop=8-4x2-18     # layers 8 to 11 run twice
"""
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nanodepth.common.files import new_folder
from nanodepth.common.options import read
from nanodepth.common.whose import copy_licence
from nanodepth.model import require, spans_in, unrolled
from nanodepth.models.checkpoint import load_model
from nanodepth.models.hf import family_of, save_hf
from nanodepth.models.joined import save_joined
from nanodepth.models.raven import save_authors
from nanodepth.scoring.way import Ways, in_way, one_way


@dataclass(kw_only=True)
class Options(Ways):
    run: str                                # a folder that train.py wrote, or a Hugging Face one
    target: str                             # the folder to write
    dtype: Literal['float32', 'bfloat16'] | None = None     # of the weights; None: as they are
    authors: bool = False       # a recurrent model in its authors' format, for their own code


# In a process of its own, without this package: a folder with code is opened once, here alone.
OPENED = '''
import sys, torch
sys.modules['nanodepth'] = None
from transformers import AutoModelForCausalLM, GenerationConfig
folder, file = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
model.generation_config = GenerationConfig()
tokens = torch.load(file)
with torch.no_grad():
    logits = model(tokens).logits.float()
text = model.generate(tokens[:, :4], attention_mask=torch.ones(1, 4), do_sample=False,
                      max_new_tokens=min(10, model.config.max_position_embeddings - 4),
                      pad_token_id=0)
torch.save((logits, text), file)
'''


def main(argv):
    options = read(Options, argv, ['run', 'target'])
    with new_folder(options.target) as folder:
        model = load_model(options.run)
        with in_way(model, one_way(options)):
            print(f'{options.run}: {model.num_params():,} parameters, {len(model.layers)} layers, '
                  f'run {len(unrolled(model.order))} deep, {str(model.norm.weight.dtype)[6:]}')
            for p in model.parameters() if options.dtype else ():       # (not the tables)
                p.data = p.data.to(getattr(torch, options.dtype))
            is_plain = not spans_in(model.order) and family_of(model.config)
            has_code = not is_plain and not options.authors
            write = save_authors if options.authors else save_joined if has_code else save_hf
            order = ' '.join(map(str, unrolled(model.order)))
            write(model, folder, options.run, dict(parent=Path(options.run).name, order=order))
            copy_licence(options.run, folder)
            if not options.authors:
                compare(model, folder, has_code)
    print(f'{options.target}: transformers.AutoModelForCausalLM.from_pretrained opens it'
          + ', with trust_remote_code=True' * bool(has_code) if not options.authors else
          f"{options.target}: for the authors' own code")


@torch.no_grad()
def compare(model, folder, has_code):
    "What was written is opened again. If it is another model, nothing is kept of it."
    n = min(16, model.config.context)
    tokens = torch.randint(model.config.vocab_size, (1, n),
                           generator=torch.Generator().manual_seed(0))
    ours, text = model(tokens).float(), model.generate(tokens[:, :4], min(
        10, model.config.context - 4), temperature=0)
    if has_code:
        with tempfile.TemporaryDirectory() as beside:
            file = Path(beside) / 'tokens.pt'
            torch.save(tokens, file)
            done = subprocess.run([sys.executable, '-I', '-c', OPENED, folder, file],
                                  capture_output=True, text=True)
            require(done.returncode == 0, 'transformers does not open it: '
                    + (done.stderr.strip().splitlines() or ['?'])[-1])
            theirs, said = torch.load(file)
    else:
        theirs = load_model(folder)(tokens).float()
    difference, largest = (theirs - ours).abs().max(), ours.abs().max()
    require(difference <= 1e-3 * largest, 'opened again, it is another model: its logits differ by '
            f'{difference:.2g}, so it was not kept')
    if has_code and model.norm.weight.dtype == torch.float32:   # (rounded, two may be as likely)
        require(torch.equal(said, text), 'transformers writes other text with it: '
                f'{said.tolist()}, and not {text.tolist()}')
    print(f'opened again, its logits differ by at most {difference:.2g}; the largest is '
          f'{largest:.2g}')
