"""Speed and memory, always as a ratio of two things measured in one run: a number of seconds means
little elsewhere.

The idea: a thing and its peer take turns, so that a busy machine slows both, and the ratio is taken
turn by turn: the peer's time over ours, so that above 1 we are faster. The median counts, with the
middle half of the turns beside it. The peers are a plain GPT of nanoGPT's form, transformers'
Llama, which is ours weight for weight, torch's Muon, and what arithmetic says. Each benchmark runs
in a process of its own.

On a GPU steps are compiled too, and their note says how much of the GPU's arithmetic they use
(MFU).

Usage:
    nanodepth bench --out=docs/bench.md       # all of them, on what there is: 10 minutes
    nanodepth bench training memory           # some of them
"""
import gc
import platform
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanodepth.common import losses
from nanodepth.common.errors import check_choice
from nanodepth.common.files import replace
from nanodepth.common.options import read
from nanodepth.engine import cost
from nanodepth.engine.optimizers import make_optimizers
from nanodepth.engine.processes import peak_flops, pick_device
from nanodepth.model import LM, ModelConfig
from nanodepth.report.tables import columns
from nanodepth.train import Config

SHAPES = {
    'tiny': dict(vocab_size=257, n_layer=4, n_embd=32, n_head=2, ffn_dim=96, context=48),
    'toy': dict(vocab_size=257, n_layer=8, n_embd=128, n_head=4, ffn_dim=352, context=64),
    '30m': dict(vocab_size=49152, n_layer=8, n_embd=512, n_head=8, ffn_dim=1408, context=512),
    '125m': dict(vocab_size=49152, n_layer=12, n_embd=768, n_head=12, ffn_dim=2048, context=512),
    '360m': dict(vocab_size=49152, n_layer=32, n_embd=960, n_head=15, n_kv_head=5, ffn_dim=2560,
                 context=2048)}


def training_sizes(device, tiny):
    "[(shape, rows of a batch, timed turns)]"
    if tiny:
        return [('tiny', 2, 1)]
    return [('360m', 8, 10)] if device.type == 'cuda' else [('toy', 32, 30), ('125m', 4, 3)]


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


def race(what, device, turns, calls, note=lambda seconds: ''):
    "A row for each peer, (what, ratio, its middle half, note): the first of the calls against it."
    seconds = against(device, turns, **calls)
    ours, *peers = calls
    for peer in peers:
        yield (f'{what}, {peer}', *ratio(seconds[peer], seconds[ours]),
               f'{ours} {median(seconds[ours]):.4g} s, {peer} {median(seconds[peer]):.4g} s'
               + note(median(seconds[ours])))


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

def training(device, tiny):
    "A training step, forward, backward and AdamW; on a GPU also compiled, with its MFU."
    for name, batch, turns in training_sizes(device, tiny):
        for form in ('eager', 'compiled') if device.type == 'cuda' else ('eager',):
            for peer in PEERS:
                yield from train_beside(peer, form, name, batch, turns, device)
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


def optimizer(device, tiny):
    "The step that `make` takes, against torch's Muon and AdamW."
    name, *_ = training_sizes(device, tiny)[0]
    tokens = random_tokens(SHAPES[name], 32, device)
    steps = {}
    for who in ('ours', "torch's Muon", 'AdamW'):
        config = Config(optimizer='adamw' if who == 'AdamW' else 'muon')
        model, loss = ours(SHAPES[name])
        optimizers = make_optimizers(model.to(device), config)
        if who == "torch's Muon":
            group = optimizers[0].param_groups[0]
            how = {key: group[key] for key in ('lr', 'weight_decay', 'adjust_lr_fn')}
            optimizers[0] = torch.optim.Muon(group['params'], **how)
        steps[who] = training_step(model, loss, tokens, optimizers)
    yield from race("make's step", device, 12, steps)


def memory(device, tiny):
    "The peak of a training step, and what --dry_run predicts."
    sizes = [('360m', 8)] if device.type == 'cuda' else [('30m', 4), ('125m', 4)]
    for name, batch in [('toy', 4)] if tiny else sizes:
        fields = SHAPES[name]
        ours = apart(peak_of, name, batch, 'ours', device)
        with torch.device('meta'):
            model = LM(ModelConfig(**fields))
        wanted = cost.memory(model, batch * fields['context'], depth=fields['n_layer'],
                             device=device.type, width=2 if device.type == 'cuda' else 4)
        others = {peer: apart(peak_of, name, batch, peer, device) for peer in PEERS}
        for peer, theirs in (others | dict(predicted=sum(wanted.values()))).items():
            share = theirs / max(1, ours)
            yield (f'{name}: peak memory, {peer}', share, share, share,
                   f'ours {ours / 1e9:.2f} GB, {peer} {theirs / 1e9:.2f} GB')


def peak_of(name, batch, who, device):
    "Bytes that two training steps need at most, above what Python and torch take."
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


@torch.no_grad()
def generating(device, tiny):
    "Greedy text against transformers' generate."
    n = 32
    sizes = ['360m'] if device.type == 'cuda' else ['toy', '125m']
    for name in ['tiny'] if tiny else sizes:
        model, peer = (make(SHAPES[name])[0].eval().to(device) for make in (ours, transformers))
        if device.type == 'cuda':
            model, peer = model.bfloat16(), peer.bfloat16()
        prompt = random_tokens(SHAPES[name] | dict(context=16), 1, device)
        theirs = partial(peer.generate, prompt, attention_mask=torch.ones_like(prompt),
                         max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
        yield from race(f'{name}: {n} new tokens', device, 9, {
            'ours': partial(model.generate, prompt, n, temperature=0), 'transformers': theirs},
            note=tokens_per_second(n))


BENCHMARKS = {f.__name__: f for f in (optimizer, training, memory, generating)}


# --------------------------------------------------------------------------- one after the other

def apart(call, *args):
    "call(*args) in a new process."
    with ProcessPoolExecutor(1, get_context('spawn')) as pool:
        return pool.submit(call, *args).result()


def rows_of(name, device, tiny):
    torch.manual_seed(0)
    device = pick_device(device)
    if device.type == 'cuda':
        torch.set_float32_matmul_precision('high')
        # as train.py has it; a growing cache is another matter (world.pick_device)
        torch.backends.cuda.enable_cudnn_sdp(name == 'training')
    return list(BENCHMARKS[name](device, tiny))


def measure(names, device, tiny=False):
    "[what, ratio, its middle half, note] of each benchmark, printed as it comes."
    rows = []
    for name in names:
        for row_name, middle, low, high, note in apart(rows_of, name, device, tiny):
            print(f'{name:12} {middle:6.3f}  {row_name}: {note}', flush=True)
            spread = f'{low:.3f} to {high:.3f}' if low != high else ''
            rows.append([row_name, f'{middle:.3f}', spread, note])
    return rows


def processor():
    info = Path('/proc/cpuinfo')
    names = re.findall(r'model name\s*: (.*)', info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


@dataclass
class Options:
    WORDS = ['names']
    names: list[str] = field(default_factory=list)  # optimizer, training, memory, generating; all
    device: str = 'auto'        # auto: cuda, else mps, else cpu
    tiny: bool = False          # a small model, to see that everything works
    out: Path | None = None     # write the table there too, such as docs/bench.md


def main(argv=None):
    options = read(Options, argv, __doc__)
    for name in options.names:
        check_choice('benchmark', name, BENCHMARKS)
    names = options.names or list(BENCHMARKS)
    device = pick_device(options.device)
    machine = (f'{processor()} ({torch.backends.cpu.get_cpu_capability()}), '
               f'{torch.get_num_threads()} threads')
    if device.type == 'cuda':
        machine = torch.cuda.get_device_name(device)
    setting = f'{machine}, torch {torch.__version__}, Python {platform.python_version()}'
    print(setting)
    head = ['what, against what', 'ratio', 'half of the turns', 'medians']
    rows = measure(names, options.device, options.tiny)
    if options.out:
        today = time.strftime('%Y-%m-%d')
        text = (f'# Speed\n\n`nanodepth bench` on {setting}, {today}.\n'
                'The ratio is what the peer takes of our time (or memory), turn by turn: above 1, '
                f'we need less.\n\n{columns([head, *rows])}\n')
        replace(options.out, text.encode())
        print(options.out)
