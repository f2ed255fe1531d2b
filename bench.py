"""Speed, always as a ratio of two things measured in one run: a number of seconds means little elsewhere.

The idea: what this repo claims to save, it measures. Each benchmark is a function that times a thing and its peer; they take
turns, so that a busy machine slows both, and the median of the turns counts (compiling is measured once).

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", Table 7 (FLOPs saved by growing; `growing` shows what of it
arrives on the clock).
Here: the toy's shape on a CPU, the paper's 360M shape on a GPU.

Usage:
    python bench.py                         # all of them: 2 minutes on two CPU cores
    python bench.py growing recompiling     # some
"""
import argparse
import statistics
import tempfile
import time

import torch

from grow import growth_plan, lidas, training_flops, untie
from launch import ConfigError, has_compiler, pick_device
from model import LM, ModelConfig
from primitives import few_shot, log_likelihoods
from retrofit import sample_recurrence, surgery
from tokenizer import get_tokenizer


def shape(device):
    "(a model's fields, sequences in a batch, layers in a block): the paper's 360M on a GPU, the toy's on anything else."
    if device.type == 'cuda':
        return dict(vocab_size=49152, n_layer=32, n_embd=960, n_head=15, n_kv_head=5, ffn_dim=2560, context=2048), 8, 4
    return dict(vocab_size=257, n_layer=8, n_embd=128, n_head=4, head_dim=64, context=64, tie_embeddings=False), 32, 2


def clock(device, call):
    "Seconds of one call, after whatever the GPU still had to do."
    wait = getattr(torch, device.type).synchronize
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def against(device, turns=5, **calls):
    "Median seconds of each call, in turns, the first turn not counted."
    seconds = {name: [clock(device, call)] for name, call in calls.items()}
    for _ in range(turns):
        for name, call in calls.items():
            seconds[name].append(clock(device, call))
    return {name: statistics.median(s[1:]) for name, s in seconds.items()}


def training_step(device, model, batch):
    "A function that does forward, backward and an update on random tokens."
    tokens = torch.randint(model.config.vocab_size, (batch, model.config.context), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def growing(device):
    "What the mean step of a grown run takes of an ordinary run's, by the paper's schedule, beside its share of the FLOPs."
    fields, batch, block = shape(device)
    config = ModelConfig(**fields)
    depths = range(block, config.n_layer + 1, block)
    seconds = {}
    for n in depths:                # one at a time, against the full depth: all at once would fill a GPU
        pair = {str(m): training_step(device, LM(ModelConfig(**fields | dict(n_layer=m))).to(device), batch) for m in (n, config.n_layer)}
        found = against(device, **pair)
        seconds[n] = found[str(n)] / found[str(config.n_layer)]
    plan = growth_plan('lidas', config.n_layer, block, 850)
    ends = [first for first, _ in plan[1:]] + [1000]
    grown = sum((end - first) * seconds[n] for (first, n), end in zip(plan, ends)) / 1000
    flops = training_flops(config, plan, 1000, 1) / training_flops(config, [(0, config.n_layer)], 1000, 1)
    full = found[str(config.n_layer)]
    return 'a mean step of a grown run', grown * full, 'a step at full depth', full, f'of the FLOPs: {flops:.3f}'


def looping(device):
    "A looped model's training step against an ordinary one's of the same depth: equal FLOPs, fewer weights."
    fields, batch, block = shape(device)
    n = fields['n_layer']
    deep = LM(ModelConfig(**fields)).to(device)
    looped = LM(ModelConfig(**fields | dict(n_layer=block, order=list(range(block)) * (n // block)))).to(device)
    seconds = against(device, looped=training_step(device, looped, batch), deep=training_step(device, deep, batch))
    return f'{block} layers {n // block} times', seconds['looped'], f'{n} layers', seconds['deep'], ''


def recompiling(device):
    "The first step after a growth, with compiled Blocks, against a step of the whole model compiled anew."
    fields, batch, block = shape(device)
    from torch._inductor import config as inductor
    inductor.force_disable_caches = True        # else the second run of this finds the first one's work
    model = LM(ModelConfig(**fields | dict(n_layer=2 * block))).to(device)
    for layer in model.layers:
        layer.compile()
    training_step(device, model, batch)()
    grown = untie(model, lidas(2 * block, block))
    for layer in grown.layers:
        layer.compile()
    first = clock(device, training_step(device, grown, batch))
    torch._dynamo.reset()
    whole = untie(grown, grown.order)
    whole.compile()
    return 'first step after growing', first, 'compiled anew', clock(device, training_step(device, whole, batch)), ''


def scoring(device):
    "The options of a question sharing the prompt's cache, against each with the whole prompt."
    fields, *_ = shape(device)
    model = LM(ModelConfig(**fields | dict(context=1024))).to(device).eval()
    examples, tokenizer = few_shot('copy_random', 8, shots=3), get_tokenizer('bytes')
    seconds = against(device, 3, shared=lambda: log_likelihoods(model, tokenizer, examples),
                      separate=lambda: log_likelihoods(model, tokenizer, examples, share=False))
    return 'shared cache', seconds['shared'], 'whole prompt each', seconds['separate'], ''


def recurring(device):
    "Steps with a random number of recurrences, against what their FLOPs say they take, by steps with a fixed one."
    fields, batch, block = shape(device)
    model = surgery(LM(ModelConfig(**fields)), f'{block // 2}-{block}-{block // 2}', mean=4).to(device)
    drawn = [sample_recurrence(4, step, seed=0) for step in range(12)]
    share = statistics.mean(model.flops_per_token(r=r, backprop_depth=8) for r in drawn) / model.flops_per_token(r=5, backprop_depth=8)

    def steps(rs):
        tokens = torch.randint(fields['vocab_size'], (batch, fields['context']), device=device)
        for r in rs:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
                loss = model(tokens, tokens, r=r)
            loss.backward()
            model.zero_grad()
    seconds = against(device, 3, drawn=lambda: steps(drawn), fixed=lambda: steps([5] * len(drawn)))
    return 'steps of random r', seconds['drawn'], 'their FLOPs at the speed of r = 5', seconds['fixed'] * share, ''


OPENED = dict(vocab_size=49152, n_layer=8, n_embd=960, n_head=15, n_kv_head=5, ffn_dim=2560)      # 120 million weights


def opening(device):
    "A Hugging Face folder opened here, against transformers, each until the first token is through."
    from transformers import AutoModelForCausalLM
    from hf import load_hf, save_hf
    tokens = torch.zeros(1, 1, dtype=torch.long)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_hf(LM(ModelConfig(**OPENED)), folder)
        seconds = against(torch.device('cpu'), 3, ours=lambda: load_hf(folder)(tokens),
                          theirs=lambda: AutoModelForCausalLM.from_pretrained(folder, dtype='auto')(tokens))
    return 'load_hf', seconds['ours'], 'transformers', seconds['theirs'], ''


WRAPPED = dict(vocab_size=257, n_layer=12, n_embd=512, n_head=8, context=256)            # layers dominate, as in a real model
QWEN3_4B = dict(vocab_size=151_936, n_layer=36, n_embd=2560, n_head=32, n_kv_head=8, head_dim=128, ffn_dim=9728, qk_norm=True, context=4096)


@torch.no_grad()
def wrapping(device, decode=None):
    """The middle four layers run three times, against what that comes to by the number of layers (two thirds more on 12, 22% more on the
    36 of a GPU's): for a prompt, or for 32 new tokens."""
    from model import KVCache
    from wrapper import looped
    fields = QWEN3_4B if device.type == 'cuda' else WRAPPED
    with torch.device(device):
        model = LM(ModelConfig(**fields)).to(torch.bfloat16 if device.type == 'cuda' else torch.float32).eval()
    n = fields['context'] // 2
    prompt, deep = torch.randint(257, (1, n), device=device), fields['n_layer']

    def run():
        if decode is None:
            return model(prompt)
        cache = KVCache(deep)
        model(prompt[:, :8], cache=cache)
        for i in range(32):
            model(prompt[:, i:i + 1], cache=cache)

    def run_looped():
        with looped(model, method='rk', K=3, decode=decode or 'full'):
            run()
    seconds = against(device, 7, looped=run_looped, plain=run)
    share = 1.0 if decode == 'bypass' else (deep + 8) / deep
    what = {None: f'a prompt of {n}', 'full': '32 tokens, all looped', 'bypass': '32 tokens, the prompt looped'}[decode]
    return what, seconds['looped'], f'{share:.2f} times without a loop', seconds['plain'] * share, ''


def decoding(device):
    "The same for new tokens, one by one."
    return wrapping(device, 'full')


def bypassing(device):
    "... of which only the prompt is looped: that should cost nothing."
    return wrapping(device, 'bypass')


@torch.no_grad()
def probing(device):
    "The depth score, whose interventions share what lies before them and go in batches, against one whole forward for each."
    from probe import depth_score
    fields, *_ = shape(device)
    model = LM(ModelConfig(**fields)).to(device).eval()
    tokens, ts = torch.randint(257, (4, min(32, fields['context'])), device=device), range(0, min(32, fields['context']) - 1, 4)

    def one_by_one():
        for s in range(fields['n_layer']):
            for t in ts:
                keep = (torch.arange(tokens.shape[1], device=device) > t)[:, None]
                model(tokens, tap=lambda depth, part, x, update: update * keep if depth == s else update).float().softmax(-1)
    seconds = against(device, 3, together=lambda: depth_score(model, tokens, boundaries=ts), one_by_one=one_by_one)
    return f'depth score, {len(ts)} boundaries', seconds['together'], 'a forward for each', seconds['one_by_one'], ''


BENCHMARKS = {f.__name__: f for f in (growing, looping, recompiling, scoring, recurring, opening, wrapping, decoding, bypassing, probing)}


def main(argv=None):
    parser = argparse.ArgumentParser(description='Measure speed, each thing against its peer.')
    parser.add_argument('names', nargs='*', help=f'of {", ".join(BENCHMARKS)}; none: all')
    parser.add_argument('--device', default='auto')
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f'there is no benchmark {unknown[0]!r}: {", ".join(BENCHMARKS)}')
    try:
        device = pick_device(args.device)
    except ConfigError as error:
        parser.error(str(error))
    print(f'device {device}, torch {torch.__version__}, {torch.get_num_threads()} threads')
    for name in args.names or BENCHMARKS:
        if name == 'recompiling' and not has_compiler():
            print('recompiling  left out: torch.compile needs a C++ compiler')
            continue
        try:
            what, mine, peer, theirs, note = BENCHMARKS[name](device)
        except ImportError as error:
            print(f'{name:12} left out: {error}')
            continue
        print(f'{name:12} {mine / theirs:6.3f} = {what}: {mine:.4f} s, by {peer}: {theirs:.4f} s  {note}', flush=True)


if __name__ == '__main__':
    import bench
    bench.main()
