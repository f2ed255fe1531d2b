"""Generate text from any checkpoint. Without a prompt, it continues prompts that suit the toy.
    nanodepth sample out/baseline --prompt='w7j6z1q3bwdzejhq?b' --temperature=0 --tokens=1
    nanodepth sample out/baseline --loop=3-2x2-3    # with its middle layers run twice
"""
from dataclasses import dataclass
from typing import Literal

import torch

from nanodepth.common.options import read
from nanodepth.model import unrolled
from nanodepth.models.checkpoint import open_any, pick_device
from nanodepth.scoring.likelihoods import encode
from nanodepth.scoring.ways import Ways, in_way, one_way
from nanodepth.text.tokenizer import get_tokenizer, readable
from nanodepth.training.plan import seed_for


@dataclass(kw_only=True)
class Options(Ways):
    run: str                            # a folder that train.py wrote, or a Hugging Face checkpoint
    prompt: str | None = None           # \n is a line break; None: prompts that suit the toy
    tokens: int = 64                    # how many to add
    temperature: float = 0.7            # 0 takes the likeliest token each time
    top_k: int | None = None            # draw among this many of the likeliest tokens
    seed: int = 0                       # of every random draw
    device: str = 'auto'                # cuda, otherwise mps, otherwise cpu
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'      # auto: as in evaluate


# {prompt: the right continuation}. No more tokens are written than the right answer has, because
# the next question, which follows, cannot be predicted. Text has no right continuation.
TOY_PROMPTS = {'JicDqySofUzgJicDqySofUzg': 'JicDqySofUzgJicDqySofUzg', 'w7j6z1q3?z': '1',
               'w7j6z1q3bwdzejhq?d': '1', 'w7j6z1q3bwdzejhqfdmbxhae?x': '3', 'def main(': ''}


def main(argv=None):
    options = read(Options, argv, ['run'])
    device = pick_device(options.device)
    _, model = open_any(options.run, device, options.dtype, others=False)
    tokenizer = get_tokenizer(options.run)
    prompts = {options.prompt: ''} if options.prompt else TOY_PROMPTS
    with in_way(model, one_way(options)):
        print(f'device {device}, {model.num_params():,} parameters, '
              f'{len(unrolled(model.order))} layers deep, temperature {options.temperature}')
        for i, (prompt, right) in enumerate(prompts.items()):
            new = min(options.tokens, len(right) or options.tokens)
            prompt = prompt.replace('\\n', '\n')
            ids = encode(tokenizer, prompt)
            generator = torch.Generator(device).manual_seed(seed_for(options.seed, 'sample', i))
            out = model.generate(torch.tensor([ids], device=device), new, options.temperature,
                                 options.top_k, generator)
            wanted = f' (right: {right[:new]})' if right else ''
            print(f'--- {prompt!r} continues{wanted}:\n{prompt}|'
                  f'{readable(tokenizer, out[0, len(ids):].tolist())}')
