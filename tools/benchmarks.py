"""The benchmarks: each yields rows, (what, ratio, a quarter, three quarters, note).

Usage:
    python nanodepth.py bench training memory       # bench.py runs them, twice
"""
import contextlib
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F

from data.primitives import few_shot
from data.tokenizer import encode_document, get_tokenizer, write_tokenizer
from data.tokens import Loader, write_dataset
from engine import cost
from engine.hf import load_hf, save_hf
from engine.measure import log_likelihoods
from engine.optimizers import make_optimizers
from engine.plan import shape
from engine.world import World
from grow import growth_plan, lidas, untie
from model import LM, KVCache, ModelConfig
from probe import depth_score
from retrofit import surgery
from tools.peers import (
    BATCH,
    PEERS,
    SHAPES,
    ours,
    peak,
    random_recurrences,
    random_tokens,
    training_step,
)
from tools.timing import against, clock, ratio, row, single
from train import Config, backward
from wrapper import looped

CPU = torch.device('cpu')
SMALL = dict(vocab_size=257, n_layer=8, n_embd=128, n_head=4, head_dim=64, context=64,
             tie_embeddings=False)
GROWN = SHAPES['125m']
# 120 million weights
OPENED = dict(vocab_size=49152, n_layer=8, n_embd=960, n_head=15, n_kv_head=5, ffn_dim=2560)
# layers dominate, as in a real model
WRAPPED = dict(vocab_size=257, n_layer=12, n_embd=512, n_head=8, context=256)
EMULATED = 'a matrix product in bfloat16, in float32'


def rate(n, unit='tokens', digits=0):
    "A note: so many a second."
    return lambda seconds: f'; {n / seconds:,.{digits}f} {unit} a second'


def race(what, turns, calls, note=lambda seconds: '', share=1):
    "A row for each peer: the first of some calls against it, or against a share of its time."
    seconds = against(CPU, turns, **calls)
    mine, *peers = calls
    for peer in peers:
        seconds[peer] = [s * share for s in seconds[peer]]
        yield row(f'{what}, {peer}', seconds, peer, mine, note)


def multiplying():
    "The same matrix product in bfloat16, which GPUs are made for, and in float32."
    def twenty(dtype):
        a, b = torch.randn(352, 128, dtype=dtype), torch.randn(128, 352, dtype=dtype)
        return lambda: [a @ b for _ in range(20)]
    return race('a matrix product in bfloat16', 5, {'bfloat16': twenty(torch.bfloat16),
                                                    'in float32': twenty(torch.float32)})


def toy_run(make=make_optimizers, kind='muon'):
    "(optimizers, a step as train.py takes it) of the run that `make` does, at its full depth."
    config, world = Config(optimizer=kind), World('cpu')
    model = LM(shape(config, vocab_size=257)).train()
    optimizers = make(model, config)
    tokens = torch.randint(257, (config.batch_size, config.context))
    weights = [p for optimizer in optimizers for group in optimizer.param_groups
               for p in group['params']]

    def step():
        backward(config, world, model, (tokens, tokens, tokens.numel()), 0, {})
        torch.nn.utils.clip_grad_norm_(weights, config.grad_clip).item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return optimizers, step


def torchs_muon(model, config):
    optimizers = make_optimizers(model, config)
    mine = optimizers[0].param_groups[0]
    options = {name: mine[name] for name in ('lr', 'weight_decay', 'adjust_lr_fn')}
    return [torch.optim.Muon(mine['params'], **options), *optimizers[1:]]


def making():
    "A step as `make` takes it, against torch's Muon and AdamW; and the optimizer's share of it."
    optimizers, step = toy_run()
    inside = []
    for optimizer in optimizers:
        optimizer.step = lambda take=optimizer.step: inside.append(clock(CPU, take))
    whole = []
    yield from race("make's step", 12, {'ours': lambda: whole.append(clock(CPU, step)),
                                        "with torch's Muon": toy_run(torchs_muon)[1],
                                        'with AdamW': toy_run(kind='adamw')[1]})
    n = len(optimizers)         # the first turn does not count
    share = median(sum(inside[i * n:][:n]) / s for i, s in enumerate(whole) if i)
    yield single("make's step, the optimizer's share", share, f'{share:.1%} of it')


def training():
    "A training step, forward, backward and AdamW, of each shape."
    for name, turns in (('toy', 30), ('125m', 3)):
        tokens = random_tokens(SHAPES[name], BATCH[name])
        for peer, make in PEERS.items():
            steps = {who: training_step(*make(SHAPES[name]), tokens)
                     for who, make in (('ours', ours), (peer, make))}
            yield from race(f'{name}: a step', turns, steps, rate(tokens.numel()))


def memory():
    "The peak of a training step, and what cost.py had predicted."
    for name in ('30m', '125m'):
        mine, fields = peak(name, 'ours'), SHAPES[name]
        with torch.device('meta'):
            model = LM(ModelConfig(**fields))
        wanted = sum(cost.memory(model, BATCH[name] * fields['context'],
                                 depth=fields['n_layer']).values())
        for peer, theirs in [*((peer, peak(name, peer)) for peer in PEERS), ('predicted', wanted)]:
            yield single(f'{name}: peak memory, {peer}', theirs / mine,
                         f'ours {mine / 1e9:.2f} GB, {peer} {theirs / 1e9:.2f} GB')


def growing():
    "How much of the FLOPs that growing saves is saved in time, by the paper's schedule."
    config, block, steps = ModelConfig(**GROWN), 4, 1000
    tokens = random_tokens(GROWN, 2)
    step = lambda n: training_step(*ours(GROWN | dict(n_layer=n)), tokens)        # noqa: E731
    plan = growth_plan('lidas', config.n_layer, block, 850)
    shares = {config.n_layer: 1}
    for _, n in plan[:-1]:
        seconds = against(CPU, 5, shallow=step(n), deep=step(config.n_layer))
        shares[n] = 1 / ratio(seconds['deep'], seconds['shallow'])[0]
    ends = [first for first, _ in plan[1:]] + [steps]
    grown = sum((end - first) * shares[n] for (first, n), end in zip(plan, ends)) / steps
    flops = (cost.training_flops(config, plan, steps, 1)
             / cost.training_flops(config, [(0, config.n_layer)], steps, 1))
    yield single('growing: time saved of FLOPs saved', (1 - grown) / (1 - flops),
                 f'{1 - grown:.1%} of the time, {1 - flops:.1%} of the FLOPs')


def looping():
    "A looped model's training step against one of the same depth: equal FLOPs, fewer weights."
    n, tokens = SMALL['n_layer'], random_tokens(SMALL, 32)
    two = SMALL | dict(n_layer=2, order=[0, 1] * (n // 2))
    return race(f'2 layers {n // 2} times', 7, {
        'looped': training_step(*ours(two), tokens),
        f'{n} layers': training_step(*ours(SMALL), tokens)})


@torch.no_grad()
def generating():
    """Greedy text against transformers' generate; and, where the weights are more than the
    processor's caches hold, a token against a matrix of as many numbers times a vector."""
    n = 32
    for name in ('toy', '125m'):
        model, peer = (make(SHAPES[name])[0].eval() for make in (ours, PEERS['transformers']))
        prompt = random_tokens(SHAPES[name] | dict(context=16), 1)
        mine = lambda n: model.generate(prompt, n, temperature=0)       # noqa: B023, E731
        theirs = lambda: peer.generate(                                 # noqa: B023, E731
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, min_new_tokens=n,
            do_sample=False, pad_token_id=0)
        calls = dict(ours=lambda: mine(n), transformers=theirs)
        yield from race(f'{name}: {n} new tokens', 9, calls, rate(n))
    C = model.config.n_embd
    weights, x = torch.randn(model.num_params() // C, C), torch.randn(1, C)
    seconds = against(CPU, 9, long=lambda: mine(n + 1), short=lambda: mine(1),
                      reading=lambda: F.linear(x, weights))
    seconds['ours'] = [(a - b) / n for a, b in zip(seconds['long'], seconds['short'])]
    speed = weights.nbytes / median(seconds['reading'])
    yield row(f'{name}: a token, reading its weights', seconds, 'reading',
              note=lambda _: f'; {weights.nbytes / 1e9:.2f} GB at {speed / 1e9:.0f} GB/s')


def recompiling():
    "The first step after a growth, with compiled Blocks, against the whole model compiled anew."
    from torch._inductor import config as inductor
    inductor.force_disable_caches = True    # else the second run of this finds the first one's work
    tokens = random_tokens(SMALL, 32)

    def first_step(model, parts):
        for part in parts:
            part.compile()
        return clock(CPU, training_step(model, lambda tokens: model(tokens, tokens), tokens))
    model = LM(ModelConfig(**SMALL | dict(n_layer=4)))
    first_step(model, model.layers)
    grown = untie(model, lidas(4, 2))
    first = first_step(grown, grown.layers)
    torch._dynamo.reset()
    whole = untie(grown, grown.order)
    anew = first_step(whole, [whole])
    yield single('first step after growing, compiled anew', anew / first,
                 f'ours {first:.3g} s, anew {anew:.3g} s, once')


def scoring():
    "Five-shot questions: options share the prompt's cache, against lm-eval's hf, and no sharing."
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    for name, n in (('toy', 24), ('30m', 12)):
        fields = SHAPES[name] | dict(vocab_size=257, context=1024)
        model, tokenizer = LM(ModelConfig(**fields)).eval(), get_tokenizer('bytes')
        examples = few_shot('assign_basic', n, shots=5)
        with tempfile.TemporaryDirectory() as folder:
            save_hf(model, folder)
            write_tokenizer('bytes', folder, fields['context'])
            peer = HFLM(pretrained=folder, device='cpu', dtype='float32', batch_size=32)
        asked = [Instance('loglikelihood', {}, (e.prompt, option), i) for e in examples
                 for i, option in enumerate(e.options)]
        own = lambda **how: log_likelihoods(model, tokenizer, examples, **how)  # noqa: B023, E731
        calls = {'ours': own, 'lm-eval hf': lambda: peer.loglikelihood(asked, disable_tqdm=True),
                 'no sharing': lambda: own(share=False)}
        theirs = torch.tensor([value for value, _ in calls['lm-eval hf']()])
        assert torch.allclose(torch.cat(own()).float(), theirs, atol=2e-2), 'they differ'
        yield from race(f'{name}: few-shot scoring', 7, calls)


def recurring():
    "Steps with a random r against what their FLOPs say; the memory of a large r against a small."
    model, tokens = surgery(LM(ModelConfig(**SMALL)), '1-2-1', mean=4), random_tokens(SMALL, 32)
    drawn, fixed, share = random_recurrences(model, tokens)
    yield from race('random r', 3, {'drawn': drawn, 'its FLOPs at fixed r': fixed}, share=share)
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


def loading():
    "Batches of the loader, keyed and exact, against windows drawn at random from one file."
    with tempfile.TemporaryDirectory() as folder:
        for split in ('train', 'val'):
            write_dataset(folder, split, 'bytes',
                          np.random.default_rng(0).integers(0, 256, 4_000_000))
        data = np.memmap(Path(folder) / 'train_000.bin', 'uint16', 'r')
        loader, steps = Loader(folder, 32, 1024), iter(range(10**9))

        def windows():
            places = torch.randint(len(data) - 1024, (32,))
            return [torch.stack([torch.from_numpy(data[i + d:i + d + 1024].astype('int64'))
                                 for i in places]) for d in (0, 1)]
        yield from race('batches', 15, {
            'ours': lambda: [loader.batch(next(steps)) for _ in range(20)],
            'random windows': lambda: [windows() for _ in range(20)]},
            rate(20 * 32 * 1024 / 1e6, 'million tokens'))


def tokenising():
    "tiktoken as corpus.py uses it, against the tokenizers package, with merges learned here."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [path.read_text(errors='replace')
             for path in sorted(Path(contextlib.__file__).parent.glob('*.py'))][:150]
    peer = Tokenizer(models.BPE())
    peer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    peer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    peer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=16_384, initial_alphabet=alphabet, show_progress=False))
    with tempfile.TemporaryDirectory() as folder:
        peer.save(f'{folder}/tokenizer.json')
        mine = get_tokenizer(folder)
    calls = dict(ours=lambda: [encode_document(mine, t) for t in texts],
                 tokenizers=lambda: [peer.encode(t).ids for t in texts])
    assert calls['ours']() == calls['tokenizers'](), 'the two do not cut alike'
    return race('tokenising', 5, calls, rate(sum(map(len, texts)) / 1e6, 'MB', 1))


def opening():
    "A Hugging Face folder opened, here and by transformers, until the first token is out."
    from transformers import AutoModelForCausalLM as Theirs

    tokens = torch.zeros(1, 1, dtype=torch.long)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_hf(LM(ModelConfig(**OPENED)), folder)
        yield from race('a checkpoint opened', 3, dict(
            ours=lambda: load_hf(folder)(tokens),
            transformers=lambda: Theirs.from_pretrained(folder, dtype='auto')(tokens)))


@torch.no_grad()
def wrapping():
    """The middle four layers three times, for a prompt and for 32 tokens of which all or only the
    prompt are looped: against what that comes to by the number of layers."""
    model, deep = LM(ModelConfig(**WRAPPED)).eval(), WRAPPED['n_layer']
    n = WRAPPED['context'] // 2
    prompt = random_tokens(WRAPPED | dict(context=n), 1)

    def decoded():
        cache = KVCache(deep)
        model(prompt[:, :8], cache=cache)
        for i in range(32):
            model(prompt[:, i:i + 1], cache=cache)

    def run_looped(run, decode):
        with looped(model, method='rk', K=3, decode=decode):
            run()
    for what, run, decode in ((f'a prompt of {n}', lambda: model(prompt), 'full'),
                              ('32 tokens, all looped', decoded, 'full'),
                              ('32 tokens, the prompt looped', decoded, 'bypass')):
        calls = {'looped': lambda: run_looped(run, decode), 'its layers': run}
        yield from race(what, 7, calls, share=1 if decode == 'bypass' else (deep + 8) / deep)


@torch.no_grad()
def probing():
    "The depth score, whose interventions share work, against one whole forward for each."
    model, T = LM(ModelConfig(**SMALL)).eval(), min(32, SMALL['context'])
    tokens, ts = random_tokens(SMALL | dict(context=T), 4), range(0, T - 1, 4)

    def one_by_one():
        for s in range(SMALL['n_layer']):
            for t in ts:
                keep = (torch.arange(T) > t)[:, None]
                model(tokens, tap=lambda depth, part, x, update: update * keep if depth == s
                      else update).float().softmax(-1)
    yield from race(f'depth score, {len(ts)} boundaries', 3, {
        'ours': lambda: depth_score(model, tokens, boundaries=ts),
        'a forward for each': one_by_one})


BENCHMARKS = {f.__name__: f for f in (multiplying, making, training, memory, growing, looping,
                                      recompiling, recurring, generating, scoring,
                                      loading, tokenising, opening, wrapping, probing)}
