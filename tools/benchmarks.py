"""The benchmarks: each is a function of a device that yields rows, (what, ratio, a quarter, three
quarters, note).

Usage:
    python nanodepth.py bench training memory       # bench.py runs them, twice
"""
import contextlib
import statistics
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from data.primitives import few_shot
from data.tokenizer import encode_document, get_tokenizer, write_tokenizer
from data.tokens import Loader, write_dataset
from engine import cost
from engine.cost import training_flops
from engine.hf import load_hf, save_hf
from engine.launch import World
from engine.measure import log_likelihoods
from engine.optimizers import make_optimizers
from engine.settings import Config, shape
from grow import growth_plan, lidas, untie
from model import LM, KVCache, ModelConfig
from probe import depth_score
from retrofit import sample_recurrence, surgery
from tools.peers import BATCH, PEERS, SHAPES, ours, peak, training_step
from tools.timing import against, clock, ratio, row, single
from train import take_step
from wrapper import looped

SMALL = dict(vocab_size=257, n_layer=8, n_embd=128, n_head=4, head_dim=64, context=64,
             tie_embeddings=False)


def multiplying(device):
    """The same matrix product in bfloat16 and in float32: how this machine takes what GPUs are
    made for."""
    a, b = torch.randn(352, 128), torch.randn(128, 352)
    pairs = {dtype: (a.to(dtype), b.to(dtype)) for dtype in (torch.bfloat16, torch.float32)}
    calls = {str(dtype)[6:]: lambda pair=pair: [pair[0] @ pair[1] for _ in range(20)]
             for dtype, pair in pairs.items()}
    yield row(EMULATED, against(device, 5, **calls), 'float32', 'bfloat16')


EMULATED = 'a matrix product in bfloat16, in float32'


def toy_run(make=make_optimizers, kind='muon'):
    """(model, optimizers, a step) of the run that `make` does, at its full depth: train.py's own
    step, on tokens that say nothing."""
    config, world = Config(optimizer=kind), World('cpu')
    model = LM(shape(config, vocab_size=257)).train()
    optimizers = make(model, config)
    tokens = torch.randint(257, (config.batch_size, config.context))
    batch = tokens, tokens, tokens.numel()
    return model, optimizers, lambda: take_step(config, world, model, optimizers, batch,
                                                contextlib.nullcontext)


def torchs_muon(model, config):
    optimizers = make_optimizers(model, config)
    mine = optimizers[0].param_groups[0]
    options = {name: mine[name] for name in ('lr', 'weight_decay', 'adjust_lr_fn')}
    return [torch.optim.Muon(mine['params'], **options), *optimizers[1:]]


def making(device):
    """A step as `make` takes it, its optimizer included, against torch's Muon and AdamW; and the
    optimizer's share of it."""
    model, optimizers, step = toy_run()
    steps = dict(ours=step, torch=toy_run(torchs_muon)[-1], adamw=toy_run(kind='adamw')[-1])
    inside = []

    def timed(take):
        return lambda: inside.append(clock(device, take))
    for optimizer in optimizers:
        optimizer.step = timed(optimizer.step)
    seconds = against(device, 12, **steps)
    # but for the first turn
    shares = [sum(inside[i * len(optimizers):][:len(optimizers)]) / s
              for i, s in enumerate(seconds['ours'], 1)]
    yield row("make's step, with torch's Muon", seconds, 'torch')
    yield row("make's step, with AdamW", seconds, 'adamw')
    yield single("make's step, the optimizer's share", statistics.median(shares),
                 f'{statistics.median(shares):.1%} of it')


def training(device):
    "A training step, forward, backward and AdamW, of each shape."
    for name in ('toy', '125m'):
        tokens = torch.randint(SHAPES[name]['vocab_size'], (BATCH[name], SHAPES[name]['context']),
                               device=device)
        for peer, make in PEERS.items():
            pair = dict(ours=ours(SHAPES[name]), **{peer: make(SHAPES[name])})
            steps = {who: training_step(model, loss, tokens) for who, (model, loss) in pair.items()}
            seconds = against(device, 30 if name == 'toy' else 3, **steps)
            speed = tokens.numel() / statistics.median(seconds['ours'])
            yield row(f'{name}: a step, {peer}', seconds, peer,
                      note=f'; {speed:,.0f} tokens a second')


MEASURED = ('30m', '125m')


def memory(device):
    "The peak of a training step, and what cost.py had predicted."
    for name in MEASURED:
        mine = peak(name, 'ours')
        with torch.device('meta'):
            model = LM(ModelConfig(**SHAPES[name]))
        wanted = sum(cost.memory(model, BATCH[name] * SHAPES[name]['context'],
                                 depth=SHAPES[name]['n_layer']).values())
        for peer in PEERS:
            theirs = peak(name, peer)
            yield single(f'{name}: peak memory, {peer}', theirs / mine,
                         f'ours {mine / 1e9:.2f} GB, {peer} {theirs / 1e9:.2f} GB')
        yield single(f'{name}: peak memory, predicted', wanted / mine,
                     f'measured {mine / 1e9:.2f} GB, cost.py {wanted / 1e9:.2f} GB')


def growing(device):
    """What of the FLOPs that growing saves is saved on the clock: a mean step by the paper's
    schedule against one at full depth."""
    config, block, fields = ModelConfig(**GROWN), 4, GROWN
    tokens = torch.randint(fields['vocab_size'], (2, fields['context']), device=device)
    step = lambda n: training_step(*ours(fields | dict(n_layer=n)), tokens)        # noqa: E731
    shares = {}
    for n in range(block, config.n_layer + 1, block):
        found = (against(device, 5, shallow=step(n), deep=step(config.n_layer))
                 if n < config.n_layer else dict(shallow=[1], deep=[1]))
        shares[n] = 1 / ratio(found['deep'], found['shallow'])[0]
    plan = growth_plan('lidas', config.n_layer, block, 850)
    ends = [first for first, _ in plan[1:]] + [1000]
    grown = sum((end - first) * shares[n] for (first, n), end in zip(plan, ends)) / 1000
    flops = training_flops(config, plan, 1000, 1) / training_flops(config, [(0, config.n_layer)],
            1000, 1)
    yield single('growing: time saved of FLOPs saved', (1 - grown) / (1 - flops),
                 f'{1 - grown:.1%} of the time, {1 - flops:.1%} of the FLOPs')


def looping(device):
    """A looped model's training step against an ordinary one's of the same depth: equal FLOPs,
    fewer weights."""
    fields, batch, block = SMALL, 32, 2
    n = fields['n_layer']
    tokens = torch.randint(fields['vocab_size'], (batch, fields['context']), device=device)
    step = lambda f: training_step(*ours(f), tokens)           # noqa: E731
    seconds = against(device, 7,
                      looped=step(fields | dict(n_layer=block,
                                                order=list(range(block)) * (n // block))),
                      deep=step(fields))
    yield row(f'{block} layers {n // block} times, {n} layers', seconds, 'deep', 'looped')


@torch.no_grad()
def generating(device):
    """Greedy text, token by token with a cache, against transformers' generate; and, where the
    weights are more than the processor's caches hold, against the least that a token can take: a
    matrix of as many numbers times a vector."""
    for name in ('toy', '125m'):
        model = ours(SHAPES[name])[0].to(device).eval()
        peer = PEERS['transformers'](SHAPES[name])[0].to(device).eval()
        prompt = torch.randint(SHAPES[name]['vocab_size'], (1, 16), device=device)
        n = 32
        mine = lambda n: model.generate(prompt, n, temperature=0)       # noqa: B023, E731
        seconds = against(device, 9, ours=lambda: mine(n), transformers=lambda: peer.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, min_new_tokens=n,
            do_sample=False, pad_token_id=0))
        yield row(f'{name}: {n} new tokens, transformers', seconds, 'transformers',
                  note=f'; {n / statistics.median(seconds["ours"]):,.0f} tokens a second')
        if name == '125m':
            C = SHAPES[name]['n_embd']
            weights, x = torch.randn(model.num_params() // C, C), torch.randn(1, C)
            seconds = against(device, 9, long=lambda: mine(n + 1), short=lambda: mine(1),
                              limit=lambda: F.linear(x, weights))
            token = [(a - b) / n for a, b in zip(seconds['long'], seconds['short'])]
            speed = weights.nbytes / statistics.median(seconds['limit'])
            yield row(f'{name}: a token, reading its weights',
                      dict(ours=token, reading=seconds['limit']), 'reading',
                      note=f'; {weights.nbytes / 1e9:.2f} GB at {speed / 1e9:.0f} GB/s')


def recompiling(device):
    """The first step after a growth, with compiled Blocks, against a step of the whole model
    compiled anew."""
    fields, batch, block = SMALL, 32, 2
    from torch._inductor import config as inductor
    inductor.force_disable_caches = True    # else the second run of this finds the first one's work
    tokens = torch.randint(fields['vocab_size'], (batch, fields['context']), device=device)
    step = lambda model: training_step(model, lambda tokens: model(tokens, tokens), tokens)
    model = LM(ModelConfig(**fields | dict(n_layer=2 * block))).to(device)
    for layer in model.layers:
        layer.compile()
    step(model)()
    grown = untie(model, lidas(2 * block, block))
    for layer in grown.layers:
        layer.compile()
    first = clock(device, step(grown))
    torch._dynamo.reset()
    whole = untie(grown, grown.order)
    whole.compile()
    anew = clock(device, step(whole))
    yield single('first step after growing, compiled anew', anew / first,
                 f'ours {first:.3g} s, anew {anew:.3g} s, once')


def scoring(device):
    """Five-shot questions: options that share the prompt's cache, against lm-eval's hf model on
    the same weights, and against no sharing."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    for name, n in (('toy', 24), ('30m', 12)):
        fields = SHAPES[name] | dict(vocab_size=257, context=1024)
        model, tokenizer = LM(ModelConfig(**fields)).to(device).eval(), get_tokenizer('bytes')
        examples = few_shot('assign_basic', n, shots=5)
        with tempfile.TemporaryDirectory() as folder:
            save_hf(model, folder)
            write_tokenizer('bytes', folder, fields['context'])
            peer = HFLM(pretrained=folder, device=str(device), dtype='float32', batch_size=32)
        asked = [Instance('loglikelihood', {}, (e.prompt, option), i) for e in examples
                 for i, option in enumerate(e.options)]
        calls = dict(ours=lambda: log_likelihoods(model, tokenizer, examples),
                     hf=lambda: peer.loglikelihood(asked, disable_tqdm=True),
                     separate=lambda: log_likelihoods(model, tokenizer, examples, share=False))
        theirs = torch.tensor([value for value, _ in calls['hf']()])
        assert torch.allclose(torch.cat([v.float() for v in calls['ours']()]), theirs,
                              atol=2e-2), 'the two do not score alike'
        seconds = against(device, 7, **calls)
        yield row(f'{name}: few-shot scoring, lm-eval hf', seconds, 'hf')
        yield row(f'{name}: few-shot scoring, no sharing', seconds, 'separate')


def recurring(device):
    """Steps with a random number of recurrences against what their FLOPs say, and the memory of
    many recurrences against few."""
    fields, batch, block = SMALL, 32, 2
    model = surgery(LM(ModelConfig(**fields)), f'{block // 2}-{block}-{block // 2}',
                    mean=4).to(device)
    drawn = [sample_recurrence(4, step, seed=0) for step in range(12)]
    share = statistics.mean(model.flops_per_token(r=r, backprop_depth=8)
                            for r in drawn) / model.flops_per_token(r=5, backprop_depth=8)
    tokens = torch.randint(fields['vocab_size'], (batch, fields['context']), device=device)

    def steps(rs):
        for r in rs:
            model(tokens, tokens, r=r, backprop_depth=8).backward()
            model.zero_grad()
    seconds = against(device, 3, drawn=lambda: steps(drawn), fixed=lambda: steps([5] * len(drawn)))
    yield row('random r, its FLOPs at fixed r',
              dict(drawn=seconds['drawn'], FLOPs=[s * share for s in seconds['fixed']]), 'FLOPs',
              'drawn')
    held = {}
    for r in (8, 32):           # what autograd holds on to, each tensor once
        kept = {}

        def keep(t):
            kept[t.untyped_storage().data_ptr()] = t                            # noqa: B023
            return t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model(tokens, tokens, r=r, backprop_depth=8)
        held[r] = sum(t.untyped_storage().nbytes() for t in kept.values())
    yield single('memory of r = 32 and of r = 8, backprop 8', held[8] / held[32],
                 f'{held[32] / 1e6:.1f} MB and {held[8] / 1e6:.1f} MB kept')


def loading(device):
    "Batches of the loader, keyed and exact, against windows drawn at random from one file."
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        for split in ('train', 'val'):
            write_dataset(folder, split, 'bytes',
                          np.random.default_rng(0).integers(0, 256, 4_000_000))
        loader, data = Loader(folder, 32, 1024), np.memmap(Path(folder) / 'train_000.bin', 'uint16',
                'r')
        steps = iter(range(10**9))

        def random():
            places = torch.randint(len(data) - 1024, (32,))
            return [
                torch.stack([torch.from_numpy(data[i + d:i + d + 1024].astype('int64'))
                             for i in places]) for d in (0, 1)]
        seconds = against(torch.device('cpu'), 15,
                          ours=lambda: [loader.batch(next(steps)) for _ in range(20)],
                          random=lambda: [random() for _ in range(20)])
        speed = 20 * 32 * 1024 / statistics.median(seconds['ours'])
    yield row('batches, random windows', seconds, 'random',
              note=f'; {speed / 1e6:,.0f}M tokens a second')


def tokenising(device):
    """A core that tokenises: tiktoken as corpus.py uses it, against the tokenizers package, with
    the same merges, learned here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [p.read_text(errors='replace')
             for p in sorted(Path(statistics.__file__).parent.glob('*.py'))][:150]
    peer = Tokenizer(models.BPE())
    peer.pre_tokenizer, peer.decoder = pre_tokenizers.ByteLevel(
        add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    peer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=16_384, initial_alphabet=alphabet, show_progress=False))
    with tempfile.TemporaryDirectory() as folder:
        peer.save(f'{folder}/tokenizer.json')
        mine = get_tokenizer(folder)
    assert all(encode_document(mine, t) == peer.encode(t).ids
               for t in texts[:20]), 'the two do not cut alike'
    seconds = against(torch.device('cpu'), 5,
                      ours=lambda: [encode_document(mine, t) for t in texts],
                      tokenizers=lambda: [peer.encode(t).ids for t in texts])
    speed = sum(map(len, texts)) / statistics.median(seconds['ours'])
    yield row('tokenising, tokenizers', seconds, 'tokenizers',
              note=f'; {speed / 1e6:.1f} MB a second')


# 120 million weights
OPENED = dict(vocab_size=49152, n_layer=8, n_embd=960, n_head=15, n_kv_head=5, ffn_dim=2560)
GROWN = SHAPES['125m']


def opening(device):
    """A Hugging Face folder opened here, against transformers, each until the first token is
    through."""
    from transformers import AutoModelForCausalLM

    tokens = torch.zeros(1, 1, dtype=torch.long)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_hf(LM(ModelConfig(**OPENED)), folder)
        seconds = against(torch.device('cpu'), 3, ours=lambda: load_hf(folder)(tokens),
                          transformers=lambda: AutoModelForCausalLM.from_pretrained(folder,
                                  dtype='auto')(tokens))
    yield row('a checkpoint opened, transformers', seconds, 'transformers')


# layers dominate, as in a real model
WRAPPED = dict(vocab_size=257, n_layer=12, n_embd=512, n_head=8, context=256)


@torch.no_grad()
def wrapping(device):
    """The middle four layers run three times, for a prompt, for 32 new tokens, and for new tokens
    of which only the prompt is looped: against what that comes to by the number of layers (two
    thirds more on 12; nothing for the last)."""
    fields, model = WRAPPED, LM(ModelConfig(**WRAPPED)).eval()
    n, deep = fields['context'] // 2, fields['n_layer']
    prompt = torch.randint(257, (1, n), device=device)

    def run(decode):
        if decode is None:
            return model(prompt)
        cache = KVCache(deep)
        model(prompt[:, :8], cache=cache)
        for i in range(32):
            model(prompt[:, i:i + 1], cache=cache)

    def run_looped(decode):
        with looped(model, method='rk', K=3, decode=decode or 'full'):
            run(decode)
    for decode, what in ((None, f'a prompt of {n}'), ('full', '32 tokens, all looped'),
                         ('bypass', '32 tokens, the prompt looped')):
        seconds = against(device, 7, looped=lambda: run_looped(decode), plain=lambda: run(decode))
        share = 1.0 if decode == 'bypass' else (deep + 8) / deep
        yield row(f'{what}, its layers',
                  dict(looped=seconds['looped'], layers=[s * share for s in seconds['plain']]),
                  'layers', 'looped')


@torch.no_grad()
def probing(device):
    """The depth score, whose interventions share what lies before them and go in batches, against
    one whole forward for each."""
    fields = SMALL
    model = LM(ModelConfig(**fields)).to(device).eval()
    tokens, ts = torch.randint(257, (4, min(32, fields['context'])), device=device), range(0,
            min(32, fields['context']) - 1, 4)

    def one_by_one():
        for s in range(fields['n_layer']):
            for t in ts:
                keep = (torch.arange(tokens.shape[1], device=device) > t)[:, None]
                model(tokens, tap=lambda depth, part, x, update: update * keep if depth == s
                      else update).float().softmax(-1)
    seconds = against(device, 3, ours=lambda: depth_score(model, tokens, boundaries=ts),
                      forwards=one_by_one)
    yield row(f'depth score, {len(ts)} boundaries, a forward for each', seconds, 'forwards')


BENCHMARKS = {f.__name__: f for f in (multiplying, making, training, memory, growing, looping,
                                      recompiling, recurring, generating, scoring,
                                      loading, tokenising, opening, wrapping, probing)}
