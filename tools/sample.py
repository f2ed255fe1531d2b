"""Generate text from any checkpoint.

Usage:
    python nanodepth.py sample out/baseline  # continues prompts that suit the toy
    python nanodepth.py sample out/baseline --prompt='w7j6z1q3bwdzejhq?b' --temperature=0 --tokens=1
    python nanodepth.py sample out/baseline --loop=3-2x2-3  # with its middle layers run twice
"""
import torch

from data.tokenizer import get_tokenizer, readable
from data.tokens import draw
from engine.checkpoint import load_model, set_depth
from engine.measure import encode
from engine.world import pick_device
from tools.options import RUN, make_parser

# How many tokens at most: after an answer comes a question, which no toy model learns to ask.
TOY_PROMPTS = {'JicDqySofUzgJicDqySofUzg': 24, 'w7j6z1q3?z': 1, 'w7j6z1q3bwdzejhq?d': 1,
               'w7j6z1q3bwdzejhqfdmbxhae?x': 1, 'def main(': 64}


def main(argv=None):
    parser = make_parser(__doc__, 'seed', 'loop', 'r', 'device', tokens=(64, 'how many to add'),
                         temperature=(0.7, '0 takes the likeliest token each time'),
                         top_k=(int, 'draw among the likeliest so many'))
    parser.add_argument('path', metavar='run', help=RUN)
    parser.add_argument('--prompt', action='append',
                        help='may be given several times; \\n is a line break')
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    model, tokenizer = load_model(args.path, device), get_tokenizer(args.path)
    set_depth(model, loop=args.loop, r=args.r)
    print(f'device {device}, {model.num_params():,} parameters, {len(model.order)} layers deep, '
          f'temperature {args.temperature}')
    for i, prompt in enumerate(args.prompt or TOY_PROMPTS):
        new = args.tokens if args.prompt else min(args.tokens, TOY_PROMPTS[prompt])
        prompt = prompt.replace('\\n', '\n')
        ids = encode(tokenizer, prompt, model)
        if len(ids) > model.config.context:
            print(f'(the prompt has {len(ids)} tokens: the model sees the last '
                  f'{model.config.context} of them)')
        generator = torch.Generator(device).manual_seed(draw(args.seed, 'sample', i))
        out = model.generate(torch.tensor([ids], device=device), new, temperature=args.temperature,
                             top_k=args.top_k, generator=generator)
        said = readable(tokenizer, out[0, len(ids):].tolist())
        print(f'--- {prompt!r} goes on:\n{prompt}|{said}')
