"""Nine minutes with a GPU: what this repo does there, beside what others do, in one table.

The idea: bench.py asks a CPU. Other questions matter on a GPU: how much of its arithmetic a step
uses (MFU, of world.PEAK_FLOPS), what compiling brings and costs, what memory a plan needs, whether
a killed run comes back. Each part runs in a process of its own, with a time limit, and prints its
rows as they come: one that fails stops no other.

Usage:
    make gpu                                    # all parts at the paper's 360M: docs/gpu.md
    python nanodepth.py gpu training generating                 # some
    python nanodepth.py gpu --tiny --device=cpu                 # a small model, without a GPU
"""
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from common import losses
from common.columns import columns
from common.files import ROOT
from common.options import read, words
from engine import checkpoint, cost
from engine.world import peak_flops, pick_device
from grow import lidas, untie
from model import LM, KVCache, ModelConfig
from report.logs import read_log
from retrofit import surgery
from tools.peers import (
    SHAPES,
    ours,
    random_recurrences,
    random_tokens,
    training_step,
    transformers,
)
from tools.timing import against, clock, known, processor, ratio
from wrapper import looped

SMALL = dict(vocab_size=257, n_layer=4, n_embd=64, n_head=2, ffn_dim=96, context=32)
QWEN3_4B = dict(vocab_size=151_936, n_layer=36, n_embd=2560, n_head=32, n_kv_head=8, head_dim=128,
                ffn_dim=9728, qk_norm=True, context=4096)
# What a part works on. turns: timed steps; steps: of a run of train.py, told `config`.
REAL = dict(shape=SHAPES['360m'] | dict(n_kv_head=5), batch=8, block=4, turns=10, wrapped=QWEN3_4B,
            new=128, config=[], steps=600)
TINY = dict(shape=SMALL, batch=2, block=1, turns=1, wrapped=SMALL, new=4, steps=12,
            config=['--n_embd=32', '--n_head=2', '--eval_batches=1', '--batch_size=2',
                    '--decay_steps=2', '--warmup_steps=2'])


def seconds(device, call, turns):
    "The median of some calls, after two warm-ups."
    return median([clock(device, call) for _ in range(turns + 2)][2:])


def free(device):
    gc.collect()
    if device.type == 'cuda':
        torch.cuda.empty_cache()


def over(device, call, other, share):
    "The ratio of two calls' times, over the expected ratio; and a note."
    times = against(device, 3, call=call, other=other)
    middle, low, high = ratio(times['call'], times['other'])
    return middle / share, f'{middle:.2f} of the time ({low:.2f} to {high:.2f})'


def compile_model(who, model):
    "As train.py compiles ours, layer by layer: a whole model of 32 takes minutes."
    if who == 'ours':
        losses.compile_piece(next(model.parameters()).device.type)
    for module in model.layers if who == 'ours' else model.model.layers:
        module.compile()


# ---------------------------------------------------------------------------------------- the parts

def training(size, device):
    "A step under bfloat16, ours and transformers', eager and compiled; memory beside the plan's."
    shape, cuda, peak, found = size['shape'], device.type == 'cuda', peak_flops(device), {}
    tokens = random_tokens(shape, size['batch'], device)
    with torch.device('meta'):
        flops = LM(ModelConfig(**shape)).flops_per_token()
    for who, make in dict(ours=ours, transformers=transformers).items():
        for form in ('eager', 'compiled'):
            free(device)        # of the one before, which is in circles with itself
            model, loss = make(shape)
            step = training_step(model, loss, tokens)
            if form == 'compiled':
                compile_model(who, model)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            found[who, form] = took = seconds(device, step, size['turns'])
            speed = tokens.numel() / took
            share = f'{flops * speed / peak:.1%}' if peak else 'unknown'
            yield f'a step, {who}, {form}', took, f's; {speed:,.0f} tokens a second, MFU {share}'
            if cuda:
                used = torch.cuda.max_memory_allocated()
                yield f'peak memory, {who}, {form}', used / 1e9, 'GB'
                if who == 'ours':
                    plan = sum(cost.memory(model, tokens.numel(), depth=shape['n_layer'], width=2,
                                           device='cuda').values())
                    yield f'predicted of measured, {form}', plan / used, cost.gigabytes(plan)
            del model, loss, step
    for form in ('eager', 'compiled'):
        times = found['transformers', form] / found['ours', form]
        yield f'a step, transformers over ours, {form}', times, 'times'


def growing(size, device):
    "Compiled Blocks through a growth: graphs made anew, and what the first deeper step costs."
    from torch._dynamo.utils import counters
    block, tokens = size['block'], random_tokens(size['shape'], size['batch'], device)

    def stepping(model):
        step = training_step(model, lambda tokens: model(tokens, tokens), tokens)
        compile_model('ours', model)        # behind that, which takes it to the device
        return step
    model = LM(ModelConfig(**size['shape'] | dict(n_layer=2 * block)))
    step = stepping(model)
    yield 'the first step, compiling', clock(device, step), 's'
    before, graphs = seconds(device, step, size['turns']), counters['stats']['unique_graphs']
    grown = stepping(untie(model, lidas(2 * block, block)))
    first = clock(device, grown)
    new = counters['stats']['unique_graphs'] - graphs
    yield 'graphs that a growth compiles', new, f'of {graphs} before'
    after = seconds(device, grown, size['turns'])
    yield ('the first step after a growth', first / after,
           f'of a later one; {before:.3g} s before, {after:.3g} s after')


def recurring(size, device):
    "Steps with a random number of recurrences against what their FLOPs say."
    block, shape = size['block'], size['shape']
    model = surgery(LM(ModelConfig(**shape | dict(n_layer=4 * block))), f'{block}-{block}-{block}',
                    mean=4).to(device)
    tokens = random_tokens(shape, size['batch'], device)
    yield 'random r over r = 5, time over FLOPs', *over(device, *random_recurrences(model, tokens))


class Room(KVCache.Slot):
    "A cache's slot of fixed length, written where a tensor says: what a captured graph needs."

    def __init__(self, kv, position):
        self.keys, self.values, self.position = kv.clone(), kv.clone(), position

    def update(self, k, v):
        self.keys.index_copy_(2, self.position, k)
        self.values.index_copy_(2, self.position, v)
        return self.keys, self.values


@torch.inference_mode()
def generate_captured(model, prompt, n):
    "Greedy text (1, T), by one graph for all tokens, which is captured on CUDA alone."
    c, device, length = model.config, prompt.device, prompt.shape[1] + n
    position = torch.zeros(1, dtype=torch.long, device=device)
    text = torch.zeros(1, length + 1, dtype=torch.long, device=device)
    text[:, :prompt.shape[1]] = prompt
    kv = torch.zeros(1, c.n_kv_head, length, c.head_dim, device=device,
                     dtype=model.embed.weight.dtype)
    cache = KVCache(0)
    cache.layers = [Room(kv, position) for _ in model.order]
    places = torch.arange(length, device=device)

    def one():
        rope, seen = (model.cos[position], model.sin[position]), (places <= position)[None]
        x = model.embed(text[:, position])
        for d, i in enumerate(model.order):
            x = model.layers[i](x, rope, None, d, cache, None, seen)
        token = model.head(model.norm(x)).argmax(-1)
        text.index_copy_(1, position + 1, token)
        position.add_(1)
    run = one
    if device.type == 'cuda':
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            one(), one()        # a capture needs a warm-up
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one()
        run = graph.replay
    position.zero_()
    for i in range(length - 1):         # the prompt goes the same way, a token at a time
        if i < prompt.shape[1]:
            text[:, i] = prompt[:, i]
        run()
    return text[:, :length]


def generating(size, device):
    "Greedy text, token by token, with and without a captured graph."
    torch.manual_seed(0)
    model, n = LM(ModelConfig(**size['shape'])).to(device).eval(), size['new']
    if device.type == 'cuda':
        model.bfloat16()
    prompt = random_tokens(size['shape'], 1, device)[:, :8]
    text = lambda: model.generate(prompt, n, temperature=0)             # noqa: E731
    captured = lambda: generate_captured(model, prompt, n)              # noqa: E731
    yield 'tokens a second', n / seconds(device, text, 3), 'without a graph'
    yield ('tokens a second, captured', (n + 8) / seconds(device, captured, 3),
           'with one, its capture and the prompt included')
    same = (captured() == text()).cumprod(1).float().mean().item()
    yield 'tokens in common', same, 'of the two texts, up to the first other one'


@torch.no_grad()
def wrapping(size, device):
    "Qwen 3 4B's shape, its middle four layers three times, against its layers' worth."
    shape = size['wrapped']
    with torch.device(device):
        model = LM(ModelConfig(**shape)).eval()
    model.to(torch.bfloat16 if device.type == 'cuda' else torch.float32)
    prompt = torch.randint(257, (1, shape['context'] // 2), device=device)

    def run_looped():
        with looped(model, window='mid4', method='rk', K=3):
            model(prompt)
    yield 'a looped prompt over its layers', *over(
        device, run_looped, lambda: model(prompt), (shape['n_layer'] + 8) / shape['n_layer'])


# ---- whole runs of train.py

def run(size, device, out, steps, *more):
    return [sys.executable, str(ROOT / 'train.py'), 'config/lidas.py', *size['config'],
            f'--device={device}', f'--out_dir={out}', f'--steps={steps}', *more]


def finished(command):
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip()[-3000:] or f'exit status {ended.returncode}')


def resuming(size, device):
    "A killed and resumed run against an uninterrupted one; and two uninterrupted ones."
    steps = max(12, size['steps'] // 4)
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / name for name in ('one', 'two', 'killed')]
        one, two, killed = (run(size, device, out, steps, f'--save_every={steps // 3}',
                                f'--decay_steps={steps // 6}', f'--warmup_steps={steps // 12}',
                                '--log_every=1') for out in outs)
        finished(one)
        finished(two)
        child = subprocess.Popen(killed, cwd=ROOT, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
        log = outs[2] / 'log.jsonl'
        while (child.poll() is None
               and not (log.exists() and log.read_text().count('\n') > steps // 2)):
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        stood = checkpoint.load(outs[2])['step']
        finished(killed)
        one, two, killed = (checkpoint.load(out)['model'] for out in outs)
    apart = lambda other: max((one[name].float() - other[name].float()).abs().max().item()
                              for name in one)                                  # noqa: E731
    yield ('killed and resumed, largest difference', apart(killed),
           f'from step {stood} of {steps}; 0: bit-equal')
    yield 'the same run twice, largest difference', apart(two), 'what the GPU itself allows'


def toy(size, device):
    "The run that `make` does."
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        finished(run(size, device, folder, size['steps']))
        took, last = time.perf_counter() - began, read_log(folder)[-1]
    skills = ', '.join(f'{kind} {k["accuracy"]:.0%}' for kind, k in last['kinds'].items()
                       if kind != 'text')
    yield 'the toy, from start to picture', took, f's; loss {last["val_loss"]:.3f}; {skills}'


PARTS = {f.__name__: f for f in (training, growing, recurring, generating, wrapping, resuming, toy)}
LIMIT = 240         # seconds of a part


@dataclass
class Options:
    # training, growing, recurring, generating, wrapping, resuming, toy; none: all of them
    names: list[str] = words(least=0)
    device: str = 'cuda'        # or another, by name
    tiny: bool = False          # a small model, to try it without a GPU
    out: Path | None = None     # write the table there too, such as docs/gpu.md
    rows: Path | None = None    # one part, in this process: its rows go to that file


# ------------------------------------------------------------------------------ one after the other

def in_a_process(name, args, folder):
    "A part's rows, as far as it came, and a row that says why it ended if it failed."
    path, why = Path(folder) / f'{name}.jsonl', None
    line = [sys.executable, str(ROOT / 'nanodepth.py'), 'gpu', name, f'--device={args.device}',
            f'--rows={path}', *['--tiny'] * args.tiny]
    child = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        said = child.communicate(timeout=LIMIT)[1].strip()
        if child.returncode:
            print(said[-4000:], file=sys.stderr)
            why = (said or f'exit status {child.returncode}').splitlines()[-1]
    except subprocess.TimeoutExpired:
        why = f'took more than {LIMIT} seconds'
    finally:
        with contextlib.suppress(ProcessLookupError):       # runs of train.py, too
            os.killpg(child.pid, signal.SIGKILL)
    rows = path.read_text().splitlines() if path.exists() else []
    return [*map(json.loads, rows), *([[name, 'failed', why[:150]]] if why else [])]


def measure(part, size, device, path=None):
    "A part's rows, each printed, and written to `path`, as soon as it is there."
    rows = []
    for what, value, note in part(size, device):
        rows.append([what, f'{value:.4g}', note])
        print(f'{part.__name__:12} {rows[-1][1]:>9}  {what}: {note}', flush=True)
        if path:
            with open(path, 'a') as file:
                print(json.dumps(rows[-1]), file=file)
    return rows


def main(argv=None):
    args = read(Options, argv, __doc__)
    names, device = known('part', args.names, PARTS), pick_device(args.device)
    if args.rows:
        if device.type == 'cuda':
            torch.set_float32_matmul_precision('high')
            # as train.py has it; a growing cache is another matter: world.pick_device
            torch.backends.cuda.enable_cudnn_sdp(names[0] in ('training', 'growing', 'recurring'))
        measure(PARTS[names[0]], TINY if args.tiny else REAL, device, args.rows)
        return
    machine = torch.cuda.get_device_name(device) if device.type == 'cuda' else processor()
    peak = peak_flops(device)
    peak = f'{peak / 1e12:,.0f} TFLOP/s' if peak else 'the peak, which is unknown here'
    head = (f'{machine}, torch {torch.__version__}, {time.strftime("%Y-%m-%d")}. MFU = '
            f'FLOPs a token x tokens a second / {peak}.')
    print(head)
    if {'resuming', 'toy'} & set(names) and not (ROOT / 'data/toy/train.json').exists():
        finished([sys.executable, str(ROOT / 'data/toy/prepare.py')])       # before it is timed
    with tempfile.TemporaryDirectory() as folder:
        rows = [[name, *row] for name in names for row in in_a_process(name, args, folder)]
    if args.out:
        table = columns([['part', 'what', 'measured', ''], *rows])
        args.out.write_text(f'# On a GPU\n\n`python nanodepth.py gpu`: {head}\n\n{table}\n')
        print(args.out)
    failed = [name for name, _, value, _ in rows if value == 'failed']
    if failed:
        print(f'failed: {", ".join(failed)}', file=sys.stderr)
        raise SystemExit(1)
