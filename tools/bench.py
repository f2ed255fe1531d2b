"""Speed and memory, always as a ratio of two things measured in one run: a number of seconds means
little elsewhere.

The idea: a thing and its peer take turns, so that a busy machine slows both, and the ratio is taken
turn by turn: the peer's time over ours, so that above 1 we are faster. The median counts, with the
middle half of the turns beside it. The peers are a plain GPT of nanoGPT's form, transformers'
Llama, which is ours weight for weight, lm-eval, torch's Muon, and what arithmetic says. Each
benchmark runs in a process of its own: one that fails or takes too long stops no other.

A CPU is measured twice: as it is, and as an ordinary laptop, without what came after AVX2. On a GPU
steps are compiled too, and their note says how much of the GPU's arithmetic they use (MFU).

Usage:
    python nanodepth.py bench --out=docs/bench.md      # all of them, twice: 25 minutes
    python nanodepth.py bench training memory --capped=false     # some, as the machine is
    python nanodepth.py gpu --out=docs/gpu.md          # the same for a GPU, at the paper's 360M
"""
import gc
import os
import platform
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from unittest.mock import patch

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import losses
from common.columns import columns
from common.errors import Refused
from common.files import replace
from common.options import read, words
from data.primitives import few_shot
from data.tokenizer import get_tokenizer, write_tokenizer
from engine import cost
from engine.hf import save_hf
from engine.measure import log_likelihoods
from engine.optimizers import make_optimizers
from engine.world import has_compiler, peak_flops, pick_device
from grow import growth_plan, lidas, untie
from model import LM, KVCache, ModelConfig
from retrofit import sample_recurrence, surgery
from train import Config
from wrapper import looped

SHAPES = {
    'tiny': dict(vocab_size=257, n_layer=4, n_embd=32, n_head=2, ffn_dim=96, context=48),
    'toy': dict(vocab_size=257, n_layer=8, n_embd=128, n_head=4, ffn_dim=352, context=64),
    '30m': dict(vocab_size=49152, n_layer=8, n_embd=512, n_head=8, ffn_dim=1408, context=512),
    '125m': dict(vocab_size=49152, n_layer=12, n_embd=768, n_head=12, ffn_dim=2048, context=512),
    '360m': dict(vocab_size=49152, n_layer=32, n_embd=960, n_head=15, n_kv_head=5, ffn_dim=2560,
                 context=2048),
    # layers dominate, as in a real model
    'deep': dict(vocab_size=257, n_layer=12, n_embd=512, n_head=8, ffn_dim=1408, context=256),
    'qwen3_4b': dict(vocab_size=151_936, n_layer=36, n_embd=2560, n_head=32, n_kv_head=8,
                     head_dim=128, ffn_dim=9728, qk_norm=True, context=4096)}


@dataclass
class Size:
    "What the benchmarks work on."
    device: torch.device
    steps: list         # (shape, rows of a batch, timed turns) of training
    memory: list        # (shape, rows of a batch)
    grown: str          # shape
    texts: list         # shapes
    wrapped: str
    asked: list         # (shape, questions)


def size_of(device, tiny=False):
    if tiny:
        return Size(device, [('tiny', 2, 1)], [('tiny', 2)], 'tiny', ['tiny'], 'tiny',
                    [('tiny', 4)])
    if device.type == 'cuda':
        return Size(device, [('360m', 8, 10)], [('360m', 8)], '360m', ['360m'], 'qwen3_4b',
                    [('360m', 24)])
    return Size(device, [('toy', 32, 30), ('125m', 4, 3)], [('30m', 4), ('125m', 4)], '125m',
                ['toy', '125m'], 'deep', [('toy', 24), ('30m', 12)])


# ------------------------------------------------------------------------------------------- timing

def clock(device, call):
    "Seconds of one call, after whatever the GPU still had to do."
    wait = getattr(torch, device.type).synchronize
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def against(device, turns=5, **calls):
    "{name: seconds of each turn} of calls that take turns, the first turn not counted."
    rounds = [[clock(device, call) for call in calls.values()] for _ in range(turns + 1)]
    return dict(zip(calls, map(list, zip(*rounds[1:]))))


def ratio(peer, ours):
    "(median, quarter, three quarters) of the peer's time over ours: above 1, we are faster."
    ratios = sorted(p / m for p, m in zip(peer, ours))
    return median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]


def race(what, device, turns, calls, share=1, note=lambda seconds: ''):
    """A row for each peer, (what, ratio, its middle half, note): the first of the calls against
    the peer, or against a share of its time."""
    seconds = against(device, turns, **calls)
    ours, *peers = calls
    for peer in peers:
        seconds[peer] = [s * share for s in seconds[peer]]
        yield (f'{what}, {peer}', *ratio(seconds[peer], seconds[ours]),
               f'{ours} {median(seconds[ours]):.4g} s, {peer} {median(seconds[peer]):.4g} s'
               + note(median(seconds[ours])))


def single(name, value, note):
    return name, value, value, value, note


def tokens_per_second(n):
    return lambda seconds: f'; {n / seconds:,.0f} tokens a second'


# -------------------------------------------------------------------------------------------- peers

class PlainBlock(nn.Module):
    def __init__(self, C, n_head):
        super().__init__()
        self.n_head = n_head
        self.ln1 = nn.LayerNorm(C, bias=False)
        self.ln2 = nn.LayerNorm(C, bias=False)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.o = nn.Linear(C, C, bias=False)
        # as many weights as ours, which have 8/3 of the width three times
        self.up = nn.Linear(C, 4 * C, bias=False)
        self.down = nn.Linear(4 * C, C, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2)
                   for t in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)             # (B, H, T, hd)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x))))                      # (B, T, C)


class PlainGPT(nn.Module):
    def __init__(self, vocab_size, n_layer, n_embd, n_head, context, **_):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, n_embd)
        self.places = nn.Embedding(context, n_embd)
        self.layers = nn.ModuleList(PlainBlock(n_embd, n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight[:tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def loss_of(model, tokens):
    return model(tokens, tokens)


def ours(shape):
    "A model, and the function of tokens that is its loss."
    model = LM(ModelConfig(**shape))
    return model, partial(loss_of, model)


def plain(shape):
    model = PlainGPT(**shape)
    return model, partial(loss_of, model)


def transformers(shape):
    from transformers import LlamaConfig, LlamaForCausalLM
    s = shape
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=s['vocab_size'], num_hidden_layers=s['n_layer'], hidden_size=s['n_embd'],
        num_attention_heads=s['n_head'], num_key_value_heads=s.get('n_kv_head'),
        intermediate_size=s['ffn_dim'], max_position_embeddings=s['context'],
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None))
    return model, lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss


PEERS = dict(transformers=transformers, plain=plain)


def random_tokens(shape, batch, device='cpu'):
    return torch.randint(shape['vocab_size'], (batch, shape['context']), device=device)


def half(device):
    "bfloat16 on a GPU, as in training."
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda')


def compile_layers(model, device):
    "As train.py does it, layer by layer: a whole model of 32 takes minutes."
    losses.compile_piece(device.type)
    for layer in model.layers if hasattr(model, 'layers') else model.model.layers:
        layer.compile()


def training_step(model, loss, tokens, optimizers=None):
    "A function that does forward, backward and an update, on the tokens' device."
    model.to(tokens.device).train()
    optimizers = optimizers or [torch.optim.AdamW(model.parameters(), fused=True)]

    def step():
        with half(tokens.device):
            value = loss(tokens)
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return step


# --------------------------------------------------------------------------------------- benchmarks

def training(size):
    "A training step, forward, backward and AdamW; on a GPU also compiled, with its MFU."
    for name, batch, turns in size.steps:
        for form in ('eager', 'compiled') if size.device.type == 'cuda' else ('eager',):
            for peer in PEERS:
                yield from train_beside(peer, form, name, batch, turns, size.device)
                gc.collect()


def train_beside(peer, form, name, batch, turns, device):
    shape = SHAPES[name]
    tokens = random_tokens(shape, batch, device)
    with torch.device('meta'):
        flops = LM(ModelConfig(**shape)).flops_per_token() * tokens.numel()
    peak = peak_flops(device)

    def speed(seconds):
        used = f', MFU {flops / seconds / peak:.1%}' if peak else ''
        return tokens_per_second(tokens.numel())(seconds) + used
    calls = {}
    for who, make in (('ours', ours), (peer, PEERS[peer])):
        model, loss = make(shape)
        calls[who] = training_step(model, loss, tokens)
        if form == 'compiled':
            compile_layers(model, device)
    yield from race(f'{name}: a step, {form}', device, turns, calls, note=speed)


def optimizer(size):
    "The step that `make` takes, against torch's Muon and AdamW; and the optimizer's share of it."
    name = size.steps[0][0]
    tokens = random_tokens(SHAPES[name], 32, size.device)
    steps = {}
    inside = []
    whole = []
    for who in ('ours', "torch's Muon", 'AdamW'):
        config = Config(optimizer='adamw' if who == 'AdamW' else 'muon')
        model, loss = ours(SHAPES[name])
        optimizers = make_optimizers(model.to(size.device), config)
        if who == "torch's Muon":
            group = optimizers[0].param_groups[0]
            how = {key: group[key] for key in ('lr', 'weight_decay', 'adjust_lr_fn')}
            optimizers[0] = torch.optim.Muon(group['params'], **how)
        if who == 'ours':
            for each in optimizers:
                each.step = lambda take=each.step: inside.append(clock(size.device, take))
            n = len(optimizers)
        steps[who] = training_step(model, loss, tokens, optimizers)
    step = steps['ours']
    steps['ours'] = lambda: whole.append(clock(size.device, step))
    yield from race("make's step", size.device, 12, steps)
    parts = [sum(inside[i * n:(i + 1) * n]) / seconds for i, seconds in enumerate(whole)]
    share = median(parts[1:])           # the first turn does not count
    yield single("make's step, the optimizer's share", share, f'{share:.1%} of it')


def memory(size):
    "The peak of a training step, and what --dry_run predicts."
    for name, batch in size.memory:
        device = size.device.type
        fields = SHAPES[name]
        ours = apart(peak_of, name, batch, 'ours', device)
        with torch.device('meta'):
            model = LM(ModelConfig(**fields))
        wanted = cost.memory(model, batch * fields['context'], depth=fields['n_layer'],
                             device=device, width=2 if device == 'cuda' else 4)
        others = {peer: apart(peak_of, name, batch, peer, device) for peer in PEERS}
        for peer, theirs in (others | dict(predicted=sum(wanted.values()))).items():
            yield single(f'{name}: peak memory, {peer}', theirs / ours,
                         f'ours {ours / 1e9:.2f} GB, {peer} {theirs / 1e9:.2f} GB')


def peak_of(name, batch, who, device):
    "Bytes that two training steps need at most, above what Python and torch take."
    device = torch.device(device)

    def two_steps(shape, batch):
        model, loss = dict(PEERS, ours=ours)[who](shape)
        step = training_step(model, loss, random_tokens(shape, batch, device))
        step()
        step()
    two_steps(SHAPES['tiny'], 1)
    before = most_memory(device)
    two_steps(SHAPES[name], batch)
    return most_memory(device) - before


def most_memory(device):
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated()
    try:            # Linux hands ru_maxrss on from process to process, but not this
        lines = open('/proc/self/status').readlines()
        return next(int(line.split()[1]) for line in lines if line.startswith('VmHWM')) * 1024
    except OSError:
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss       # bytes on a Mac


def growing(size):
    "How much of the FLOPs that growing saves is saved in time, by the paper's schedule."
    shape = SHAPES[size.grown]
    block = SHAPES[size.grown]['n_layer'] // 4
    steps = 1000
    config = ModelConfig(**shape)
    tokens = random_tokens(shape, 2, size.device)
    plan = growth_plan('lidas', config.n_layer, block, 850)
    deep = training_step(*ours(shape), tokens)
    shares = {config.n_layer: 1}
    for _, n in plan[:-1]:
        shallow = training_step(*ours(shape | dict(n_layer=n)), tokens)
        seconds = against(size.device, 5, shallow=shallow, deep=deep)
        shares[n] = 1 / ratio(seconds['deep'], seconds['shallow'])[0]
    ends = [first for first, _ in plan[1:]] + [steps]
    grown = sum((end - first) * shares[n] for (first, n), end in zip(plan, ends)) / steps
    flops = (cost.training_flops(config, plan, steps, 1)
             / cost.training_flops(config, [(0, config.n_layer)], steps, 1))
    yield single('growing: time saved of FLOPs saved', (1 - grown) / (1 - flops),
                 f'{1 - grown:.1%} of the time, {1 - flops:.1%} of the FLOPs')


def recompiling(size):
    "The first step after a growth, with compiled Blocks, against the whole model compiled anew."
    if not has_compiler():
        return
    from torch._inductor import config as inductor
    inductor.force_disable_caches = True    # else the second run of this finds the first one's work
    shape = SHAPES['toy']
    tokens = random_tokens(shape, 32, size.device)

    def first_step(model, parts):
        model.to(size.device)
        for part in parts:
            part.compile()
        return clock(size.device, training_step(model, partial(loss_of, model), tokens))
    model = LM(ModelConfig(**shape | dict(n_layer=4)))
    first_step(model, model.layers)
    grown = untie(model, lidas(4, 2))
    first = first_step(grown, grown.layers)
    torch._dynamo.reset()
    whole = untie(grown, grown.order)
    anew = first_step(whole, [whole])
    yield single('first step after growing, compiled anew', anew / first,
                 f'ours {first:.3g} s, anew {anew:.3g} s, once')


def recurring(size):
    "Steps with a random number of recurrences against what their FLOPs say."
    shape = SHAPES[size.steps[0][0]] | dict(n_layer=8)
    model = surgery(LM(ModelConfig(**shape)), '2-4-2', mean=4).to(size.device)
    tokens = random_tokens(shape, size.steps[0][1], size.device)
    drawn = [sample_recurrence(4, step, seed=0) for step in range(12)]
    fixed = [5] * 12

    def steps(rs):
        for r in rs:
            with half(size.device):
                loss = model(tokens, tokens, r=r, backprop_depth=8)
            loss.backward()
            model.zero_grad()
    flops = {which: mean(model.flops_per_token(r=r, backprop_depth=8) for r in rs)
             for which, rs in (('drawn', drawn), ('fixed', fixed))}
    yield from race('random r', size.device, 3, {
        'drawn': partial(steps, drawn), 'its FLOPs at fixed r': partial(steps, fixed)},
        share=flops['drawn'] / flops['fixed'])


@torch.no_grad()
def generating(size):
    """Greedy text against transformers' generate; and a token against a matrix of as many numbers
    as the last model has, times a vector: reading the weights is what a token cannot do without."""
    n = 32
    for name in size.texts:
        model, peer = (make(SHAPES[name])[0].eval().to(size.device)
                       for make in (ours, transformers))
        if size.device.type == 'cuda':
            model, peer = model.bfloat16(), peer.bfloat16()
        prompt = random_tokens(SHAPES[name] | dict(context=16), 1, size.device)
        own = partial(model.generate, prompt, temperature=0)
        theirs = partial(peer.generate, prompt, attention_mask=torch.ones_like(prompt),
                         max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
        yield from race(f'{name}: {n} new tokens', size.device, 9,
                        dict(ours=partial(own, n), transformers=theirs), note=tokens_per_second(n))
    weights, width = model.embed.weight, model.config.n_embd
    matrix = torch.randn(model.num_params() // width, width).to(weights)
    x = torch.randn(1, width).to(weights)
    seconds = against(size.device, 9, reading=partial(F.linear, x, matrix),
                      long=partial(own, n + 1), short=partial(own, 1))
    token = [(long - short) / n for long, short in zip(seconds['long'], seconds['short'])]
    read_in = median(seconds['reading'])
    yield (f'{name}: a token, reading its weights', *ratio(seconds['reading'], token),
           f'ours {median(token):.4g} s, reading {read_in:.4g} s; {matrix.nbytes / 1e9:.2f} GB at '
           f'{matrix.nbytes / read_in / 1e9:.0f} GB/s')


@torch.no_grad()
def wrapping(size):
    """The middle four layers three times, for a prompt and for 32 tokens, of which all or only the
    prompt are looped: against what that comes to by the number of layers."""
    shape = SHAPES[size.wrapped]
    deep = shape['n_layer']
    half_context = shape['context'] // 2
    with torch.device(size.device):
        model = LM(ModelConfig(**shape)).eval()
    if size.device.type == 'cuda':
        model.bfloat16()
    prompt = random_tokens(shape | dict(context=half_context), 1, size.device)

    def decode():
        cache = KVCache(deep)
        model(prompt[:, :8], cache=cache)
        for i in range(min(32, half_context)):
            model(prompt[:, i:i + 1], cache=cache)

    def looped_run(run, how):
        with looped(model, method='rk', K=3, decode=how):
            run()
    for what, run, how in ((f'a prompt of {half_context}', partial(model, prompt), 'full'),
                           ('32 tokens, all looped', decode, 'full'),
                           ('32 tokens, the prompt looped', decode, 'bypass')):
        calls = {'looped': partial(looped_run, run, how), 'its layers': run}
        yield from race(what, size.device, 7, calls,
                        share=1 if how == 'bypass' else (deep + 8) / deep)


def scoring(size):
    "Five-shot questions: options share the prompt's cache, against lm-eval's hf, and no sharing."
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    for name, n in size.asked:
        fields = SHAPES[name] | dict(vocab_size=257, context=1024)
        model = LM(ModelConfig(**fields)).eval()
        tokenizer = get_tokenizer('bytes')
        examples = few_shot('assign_basic', n, shots=5)
        with tempfile.TemporaryDirectory() as folder:
            save_hf(model, folder)
            write_tokenizer('bytes', folder, fields['context'])
            peer = HFLM(pretrained=folder, device=str(size.device), dtype='float32', batch_size=32)
        model.to(size.device)
        asked = [Instance('loglikelihood', {}, (e.prompt, option), i) for e in examples
                 for i, option in enumerate(e.options)]
        own = partial(log_likelihoods, model, tokenizer, examples)
        calls = {'ours': own, 'lm-eval hf': partial(peer.loglikelihood, asked, disable_tqdm=True),
                 'no sharing': partial(own, share=False)}
        theirs = torch.tensor([value for value, _ in calls['lm-eval hf']()])
        assert torch.allclose(torch.cat(own()).float(), theirs, atol=2e-2), 'they differ'
        yield from race(f'{name}: few-shot scoring', size.device, 7, calls)
        del own, calls          # they hold both models


BENCHMARKS = {f.__name__: f for f in (optimizer, training, memory, growing, recompiling, recurring,
                                      generating, scoring, wrapping)}


# --------------------------------------------------------------------------- one after the other

# These limit a newer x86 processor to AVX2: one variable each for torch's own kernels, oneDNN and
# MKL.
LAPTOP = dict(ATEN_CPU_CAPABILITY='avx2', ONEDNN_MAX_CPU_ISA='AVX2', MKL_ENABLE_INSTRUCTIONS='AVX2')
LIMIT = 900         # seconds of a benchmark


def apart(call, *args, limit=None, **environment):
    "call(*args) in a new process with these environment variables."
    with patch.dict(os.environ, environment):
        pool = ProcessPoolExecutor(1, get_context('spawn'))
        work = pool.submit(call, *args)
    try:
        return work.result(limit)
    except TimeoutError:
        for process in pool._processes.values():
            process.kill()
        raise TimeoutError(f'it took more than {limit} seconds') from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def rows_of(name, device, tiny):
    torch.manual_seed(0)
    device = pick_device(device)
    if device.type == 'cuda':
        torch.set_float32_matmul_precision('high')
        # as train.py has it; a growing cache is another matter (world.pick_device)
        torch.backends.cuda.enable_cudnn_sdp(name in ('training', 'growing', 'recurring'))
    return list(BENCHMARKS[name](size_of(device, tiny)))


def measure(names, device, tiny=False, **environment):
    "[what, ratio, its middle half, note] of each benchmark, printed as it comes."
    rows = []
    for name in names:
        try:
            these = apart(rows_of, name, device, tiny, limit=LIMIT, **environment)
        except Exception as error:      # whatever ends one benchmark, the others go on
            last = [*str(error).splitlines(), type(error).__name__][0]
            print(f'{name}: failed: {error}', file=sys.stderr)
            these = [(name, float('nan'), 0, 0, f'failed: {last[:150]}')]
        for row_name, middle, low, high, note in these:
            print(f'{name:12} {middle:6.3f}  {row_name}: {note}', flush=True)
            spread = f'{low:.3f} to {high:.3f}' if low != high else ''
            rows.append([row_name, f'{middle:.3f}', spread, note])
    return rows


def beside(rows, capped):
    "Two ratios beside each other; the notes are those of the machine as it is."
    other = {row_name: cells for row_name, *cells in capped}
    return [[row_name, middle, spread, *other.get(row_name, ['', ''])[:2], note]
            for row_name, middle, spread, note in rows]


def processor():
    info = Path('/proc/cpuinfo')
    names = re.findall(r'model name\s*: (.*)', info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


@dataclass
class Options:
    # optimizer, training, memory, growing, recompiling, recurring, generating, scoring, wrapping;
    # none: all of them
    names: list[str] = words(least=0)
    device: str = 'cpu'         # or cuda
    capped: bool = True         # of a CPU: once more with AVX2 and nothing newer (x86)
    tiny: bool = False          # a small model, to see that everything works
    out: Path | None = None     # write the table there too, such as docs/bench.md


def main(argv=None):
    options = read(Options, argv, __doc__)
    for name in options.names:
        if name not in BENCHMARKS:
            raise Refused(f'there is no benchmark {name!r}: {", ".join(BENCHMARKS)}')
    names = options.names or list(BENCHMARKS)
    device = pick_device(options.device)
    machine = (f'{processor()} ({torch.backends.cpu.get_cpu_capability()}), '
               f'{torch.get_num_threads()} threads')
    if device.type == 'cuda':
        machine = torch.cuda.get_device_name(device)
    setting = f'{machine}, torch {torch.__version__}, Python {platform.python_version()}'
    print(setting)
    head = ['what, against what', 'ratio', 'half of the turns', 'medians']
    more = ''
    rows = measure(names, options.device, options.tiny)
    if options.capped and device.type == 'cpu' and platform.machine().lower() in ('x86_64',
                                                                                  'amd64'):
        print('\nonce more, with AVX2 and nothing newer')
        rows = beside(rows, measure(names, options.device, options.tiny, **LAPTOP))
        head[3:] = 'AVX2: ratio', 'half of the turns', 'medians, as it is'
        cap = ' '.join(f'{name}={value}' for name, value in LAPTOP.items())
        more = f'\nThe columns headed AVX2: the same machine with {cap}.'
    if options.out:
        title, command = ('On a GPU', 'gpu') if device.type == 'cuda' else ('Speed', 'bench')
        text = (f'# {title}\n\n`python nanodepth.py {command}` on {setting}, '
                f'{time.strftime("%Y-%m-%d")}. The ratio is what the peer takes of our time (or '
                'memory),\nturn by turn: above 1, we need less.'
                f'{more}\n\n{columns([head, *rows])}\n')
        replace(options.out, text.encode())
        print(options.out)
    if any(row[-1].startswith('failed') for row in rows):
        raise SystemExit(1)


def gpu(argv=None):
    "The command `gpu`: the same on a GPU."
    main(['--device=cuda', *(sys.argv[1:] if argv is None else argv)])
