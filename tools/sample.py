"""Generate text from any checkpoint.

Usage:
    python nanodepth.py sample out/baseline  # continues prompts that suit the toy
    python nanodepth.py sample out/baseline --prompt='w7j6z1q3bwdzejhq?b' --temperature=0 --tokens=1
    python nanodepth.py sample out/baseline --loop=3-2x2-3  # with its middle layers run twice
"""
from dataclasses import dataclass, field

import torch

from common.options import read, word
from data.tokenizer import get_tokenizer, readable
from data.tokens import draw
from engine.checkpoint import load_model
from engine.measure import encode, set_depth
from engine.world import pick_device


@dataclass
class Options:
    run: str = word()                   # a folder that train.py wrote, or a Hugging Face checkpoint
    # may be given several times; \n is a line break
    prompt: list[str] = field(default_factory=list)
    tokens: int = 64                    # how many to add
    temperature: float = 0.7            # 0 takes the likeliest token each time
    top_k: int | None = None            # draw among the likeliest so many
    seed: int = 0                       # of every draw
    loop: str | None = None             # run the layers in another order, such as 3-2x2-3
    r: int | None = None                # how often a recurrent core runs
    device: str = 'auto'                # auto: cuda, else mps, else cpu


# How many tokens at most: after an answer comes a question, which no toy model learns to ask.
TOY_PROMPTS = {'JicDqySofUzgJicDqySofUzg': 24, 'w7j6z1q3?z': 1, 'w7j6z1q3bwdzejhq?d': 1,
               'w7j6z1q3bwdzejhqfdmbxhae?x': 1, 'def main(': 64}


def main(argv=None):
    options = read(Options, argv, __doc__)
    device = pick_device(options.device)
    model = load_model(options.run, device)
    tokenizer = get_tokenizer(options.run)
    set_depth(model, loop=options.loop, r=options.r)
    print(f'device {device}, {model.num_params():,} parameters, {len(model.order)} layers deep, '
          f'temperature {options.temperature}')
    for i, prompt in enumerate(options.prompt or TOY_PROMPTS):
        new = options.tokens if options.prompt else min(options.tokens, TOY_PROMPTS[prompt])
        prompt = prompt.replace('\\n', '\n')
        ids = encode(tokenizer, prompt, model)
        if len(ids) > model.config.context:
            print(f'(the prompt has {len(ids)} tokens: the model sees the last '
                  f'{model.config.context} of them)')
        generator = torch.Generator(device).manual_seed(draw(options.seed, 'sample', i))
        out = model.generate(torch.tensor([ids], device=device), new, top_k=options.top_k,
                             temperature=options.temperature, generator=generator)
        goes_on = readable(tokenizer, out[0, len(ids):].tolist())
        print(f'--- {prompt!r} goes on:\n{prompt}|{goes_on}')
