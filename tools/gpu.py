"""Nine minutes with a GPU: what this repo does there, beside what others do, in one table.

The idea: bench.py compares on a CPU. What matters on a GPU are other questions: how much of its
arithmetic a step uses, what compiling brings and costs, what memory a plan needs, whether a killed
run comes back. Each part runs in a process of its own, with a time limit, and says its rows as they
come: one that fails takes nothing else along.

Here: MFU = our FLOPs ledger's count a token (LM.flops_per_token) x tokens a second / the GPU's
dense bfloat16 peak (launch.PEAK_FLOPS), "unknown" where that table doesn't have the GPU.

Usage:
    make gpu                                    # all parts at the paper's 360M: docs/gpu.md
    python nanodepth.py gpu training generating               # some
    # the same code on a small model, where there is no GPU
    python nanodepth.py gpu --tiny --device=cpu
"""
import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from common.columns import columns
from common.errors import Refused
from common.files import ROOT
from engine import checkpoint, cost
from engine.launch import peak_flops, pick_device
from grow import lidas, untie
from model import LM, KVCache, ModelConfig
from retrofit import sample_recurrence, surgery
from tools.peers import SHAPES, ours, training_step, transformers
from tools.timing import against, clock, processor, ratio
from wrapper import looped

SMALL = dict(vocab_size=257, n_layer=4, n_embd=64, n_head=2, ffn_dim=96, context=32)
QWEN3_4B = dict(vocab_size=151_936, n_layer=36, n_embd=2560, n_head=32, n_kv_head=8, head_dim=128,
                ffn_dim=9728, qk_norm=True,
                context=4096)
# What a part works on. turns: timed steps; steps: of a run of train.py.
REAL = dict(shape=SHAPES['360m'] | dict(n_kv_head=5), batch=8, block=4, turns=10, wrapped=QWEN3_4B,
            new=128,
            config=['config/lidas.py'], steps=600)
TINY = dict(shape=SMALL, batch=2, block=1, turns=1, wrapped=SMALL, new=4,
            config=['config/lidas.py', '--n_embd=32', '--n_head=2', '--eval_batches=1',
                    '--batch_size=2'], steps=12)


def seconds(device, call, turns):
    "The median of some calls, after two that count for nothing."
    return statistics.median([clock(device, call) for _ in range(turns + 2)][2:])


def gigabytes(n):
    return f'{n / 1e9:.2f} GB'


def tokens_for(size, device, batch=None):
    shape = size['shape']
    return torch.randint(shape['vocab_size'], (batch or size['batch'], shape['context']),
                         device=device)


def compile_model(who, model):
    "As train.py compiles ours, Block by Block; transformers' whole."
    for module in model.layers if who == 'ours' else [model]:
        module.compile()


# ---------------------------------------------------------------------------------------- the parts

def training(size, device):
    """A step of AdamW under bfloat16: ours and transformers', eager and compiled; its memory
    beside the plan's."""
    tokens, shape = tokens_for(size, device), size['shape']
    peak, found = peak_flops(device), {}
    for who, make in dict(ours=ours, transformers=transformers).items():
        for form in ('eager', 'compiled'):
            model, loss = make(shape)
            step = training_step(model, loss, tokens)
            if form == 'compiled':
                compile_model(who, model)
            if device.type == 'cuda':
                torch.cuda.reset_peak_memory_stats()
            found[who, form] = took = seconds(device, step, size['turns'])
            speed = tokens.numel() / took
            flops = LM(ModelConfig(**shape)).flops_per_token() * speed
            share = f'MFU {flops / peak:.1%}' if peak else 'MFU unknown'
            yield f'a step, {who}, {form}', took, f's; {speed:,.0f} tokens a second, {share}'
            if device.type == 'cuda':
                used = torch.cuda.max_memory_allocated()
                yield f'peak memory, {who}, {form}', used / 1e9, 'GB'
                if who == 'ours':
                    plan = sum(cost.memory(model, tokens.numel(), depth=shape['n_layer'], width=2,
                                           device='cuda').values())
                    yield f'predicted of measured, {form}', plan / used, gigabytes(plan)
            del model, loss, step
    for form in ('eager', 'compiled'):
        yield f'a step, transformers over ours, {form}', found['transformers', form] / found['ours',
                form], 'times'


def growing(size, device):
    "Compiled Blocks through a growth: graphs made anew, and what the first deeper step costs."
    from torch._dynamo.utils import counters
    block, tokens = size['block'], tokens_for(size, device)

    def stepping(model):
        compile_model('ours', model)
        return training_step(model, lambda tokens: model(tokens, tokens), tokens)
    model = LM(ModelConfig(**size['shape'] | dict(n_layer=2 * block)))
    step = stepping(model)
    yield 'the first step, compiling', clock(device, step), 's'
    before, graphs = seconds(device, step, size['turns']), counters['stats']['unique_graphs']
    grown = stepping(untie(model, lidas(2 * block, block)))
    first = clock(device, grown)
    yield 'graphs that a growth compiles', counters['stats'][
        'unique_graphs'] - graphs, f'of {graphs} before'
    after = seconds(device, grown, size['turns'])
    yield ('the first step after a growth', first / after,
           f'of a later one; {before:.3g} s before, {after:.3g} s after')


def recurring(size, device):
    "Steps with a random number of recurrences against what their FLOPs say."
    block = size['block']
    model = surgery(LM(ModelConfig(**size['shape'] | dict(n_layer=4 * block))),
                    f'{block}-{block}-{block}', mean=4).to(device)
    tokens, drawn = tokens_for(size, device), [sample_recurrence(4, step, seed=0)
                                               for step in range(12)]

    def steps(rs):
        for r in rs:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
                loss = model(tokens, tokens, r=r, backprop_depth=8)
            loss.backward()
            model.zero_grad()
    times = against(device, 3, drawn=lambda: steps(drawn),
                          fixed=lambda: steps([5] * len(drawn)))
    flops = [statistics.mean(model.flops_per_token(r=r, backprop_depth=8) for r in rs)
             for rs in (drawn, [5])]
    middle, low, high = ratio(times['drawn'], times['fixed'])
    yield 'random r over r = 5, time over FLOPs', middle / (flops[0]
            / flops[1]), f'{middle:.2f} of the time ({low:.2f} to {high:.2f})'


class Room(KVCache.Slot):
    """A cache's slot of fixed length, written at a position that is a tensor: what a captured
    graph needs."""

    def __init__(self, kv, position):
        self.keys, self.values, self.position = *(torch.zeros_like(kv) for _ in 'kv'), position

    def update(self, k, v):
        for room, new in ((self.keys, k), (self.values, v)):
            room.index_copy_(2, self.position, new)
        return self.keys, self.values


@torch.inference_mode()
def generate_captured(model, prompt, n):
    """Greedy text (1, T) with one graph for all tokens: captured once on CUDA, called as it is
    elsewhere."""
    c, device, length = model.config, prompt.device, prompt.shape[1] + n
    position = torch.zeros(1, dtype=torch.long, device=device)
    token, text = prompt[:, :1].clone(), torch.zeros(1, length + 1, dtype=torch.long, device=device)
    kv = torch.zeros(1, c.n_kv_head, length, c.head_dim, device=device,
                     dtype=model.embed.weight.dtype)
    cache = KVCache(0)
    cache.layers = [Room(kv, position) for _ in model.order]
    places = torch.arange(length, device=device)

    def one():
        # (1, S)
        rope, seen = (model.cos[position], model.sin[position]), (places <= position)[None]
        x = model.embed(token)
        for d, i in enumerate(model.order):
            x = model.layers[i](x, rope, None, d, cache, None, seen)
        token.copy_(model.head(model.norm(x))[:, -1].argmax(-1, keepdim=True))
        text.index_copy_(1, position + 1, token)
        position.add_(1)
    run = one
    if device.type == 'cuda':
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            one(), one()        # a graph is captured of what has run before
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one()
        run = graph.replay
    position.zero_()
    for i in range(length - 1):         # the prompt goes the same way, a token at a time
        if i < prompt.shape[1]:
            token.copy_(prompt[:, i:i + 1])
        run()
    return torch.cat((prompt, text[:, prompt.shape[1]:length]), dim=1)


def generating(size, device):
    "Greedy text, token by token, with and without a captured graph."
    torch.manual_seed(0)
    model, n = LM(ModelConfig(**size['shape'])).to(device).eval(), size['new']
    if device.type == 'cuda':
        model.bfloat16()
    prompt = tokens_for(size, device, 1)[:, :8]
    plain = seconds(device, lambda: model.generate(prompt, n, temperature=0), 3)
    yield 'tokens a second', n / plain, 'without a graph'
    captured = seconds(device, lambda: generate_captured(model, prompt, n), 3)
    yield ('tokens a second, captured', (n + 8) / captured,
           'with one, its capture and the prompt included')
    same = generate_captured(model, prompt, n) == model.generate(prompt, n, temperature=0)
    yield 'tokens in common', same.cumprod(
        1).sum().item() / same.numel(), 'of the two texts, up to the first other one'


@torch.no_grad()
def wrapping(size, device):
    """Qwen 3 4B's shape, its middle four layers three times, by the anchored method: against its
    layers' worth."""
    with torch.device(device):
        model = (LM(ModelConfig(**size['wrapped'])).to(torch.bfloat16 if device.type == 'cuda'
                                                       else torch.float32).eval())
    prompt, deep = torch.randint(257, (1, size['wrapped']['context'] // 2),
                                 device=device), len(model.layers)

    def run_looped():
        with looped(model, window='mid4', method='rk', K=3):
            model(prompt)
    times = against(device, 3, looped=run_looped, plain=lambda: model(prompt))
    middle, low, high = ratio(times['looped'], times['plain'])
    yield ('a looped prompt over its layers', middle / ((deep + 8) / deep),
           f'{middle:.2f} of the plain time ({low:.2f} to {high:.2f})')


# ---- whole runs of train.py

def run(size, device, out, *more, steps=None):
    argv = [*size['config'], f'--device={device}', f'--out_dir={out}',
            f'--steps={steps or size["steps"]}', *more]
    return [sys.executable, str(ROOT / 'train.py'), *argv]


def finished(command):
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


def resuming(size, device):
    """A growing run killed -9 and gone on with, against one that was left alone; and two that
    were, since a GPU may differ with itself."""
    steps = max(12, size['steps'] // 4)
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / name for name in ('one', 'two', 'killed')]
        lines = [run(size, device, out, f'--save_every={steps // 3}', f'--decay_steps={steps // 6}',
                     f'--warmup_steps={steps // 12}',
                     '--log_every=1', steps=steps) for out in outs]
        finished(lines[0])
        finished(lines[1])
        child = subprocess.Popen(lines[2], cwd=ROOT, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
        log = outs[2] / 'log.jsonl'
        while (child.poll() is None
               and not (log.exists() and log.read_text().count('\n') > steps // 2)):
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        stood = checkpoint.load(outs[2])['step']
        finished(lines[2])
        one, two, killed = (checkpoint.load(out)['model'] for out in outs)

        def apart(a, b):
            return max((a[name].float() - b[name].float()).abs().max().item() for name in a)
        yield 'killed and resumed, largest difference', apart(one,
                killed), f'from step {stood} of {steps}; 0: bit-equal'
        yield 'the same run twice, largest difference', apart(one,
                two), 'what the GPU itself allows'


def toy(size, device):
    "The run that `make` does."
    with tempfile.TemporaryDirectory() as folder:
        more = [] if size['steps'] == 600 else ['--decay_steps=2', '--warmup_steps=2']
        began = time.perf_counter()
        finished(run(size, device, folder, *more))
        took = time.perf_counter() - began
        last = [json.loads(line) for line in (Path(folder) / 'log.jsonl').read_text().splitlines()][
            -1]
    skills = ', '.join(f'{kind} {k["accuracy"]:.0%}' for kind, k in last['kinds'].items()
                       if kind != 'text')
    yield 'the toy, from start to picture', took, f's; loss {last["val_loss"]:.3f}; {skills}'


PARTS = {f.__name__: f for f in (training, growing, recurring, generating, wrapping, resuming, toy)}
LIMIT = 240         # seconds of a part


# ------------------------------------------------------------------------------ one after the other

def in_a_process(name, args, folder):
    "A part's rows, as far as it came, and a row that says why it ended if it failed."
    path = Path(folder) / f'{name}.jsonl'
    line = [sys.executable, str(ROOT / 'nanodepth.py'), 'gpu', name, f'--device={args.device}',
            f'--rows={path}', *(['--tiny'] if args.tiny else [])]
    try:
        ended = subprocess.run(line, timeout=LIMIT, stderr=subprocess.PIPE, text=True)
        why = ((ended.stderr.strip().splitlines() or [f'exit status {ended.returncode}'])[-1]
               if ended.returncode else None)
    except subprocess.TimeoutExpired:
        why = f'took more than {LIMIT} seconds'
    rows = [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []
    return [*rows, *([[name, 'failed', why[:150]]] if why else [])]


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
    parser = argparse.ArgumentParser(description='Nine minutes with a GPU: one table.')
    parser.add_argument('names', nargs='*', help=f'of {", ".join(PARTS)}; none: all')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--tiny', action='store_true',
                        help='a small model, to try it without a GPU')
    parser.add_argument('--out', type=Path, help='write the table there too, such as docs/gpu.md')
    # one part, in this process, its rows to that file
    parser.add_argument('--rows', help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in PARTS]
    if unknown:
        parser.error(f'there is no part {unknown[0]!r}: {", ".join(PARTS)}')
    try:
        device = pick_device(args.device)
    except Refused as error:
        parser.error(str(error))
    if args.rows:
        if device.type == 'cuda':
            torch.set_float32_matmul_precision('high')
        measure(PARTS[args.names[0]], TINY if args.tiny else REAL, device, args.rows)
        return
    machine = torch.cuda.get_device_name(device) if device.type == 'cuda' else processor()
    peak = peak_flops(device)
    head = (f'{machine}, torch {torch.__version__}, {time.strftime("%Y-%m-%d")}. MFU = '
            'FLOPs a token x tokens a second / '
            f'{f"{peak / 1e12:,.0f} TFLOP/s" if peak else "the peak, which is unknown here"}.')
    print(head)
    with tempfile.TemporaryDirectory() as folder:
        rows = [[name, *row] for name in args.names or PARTS for row in in_a_process(name, args,
                folder)]
    if args.out:
        table = columns([['part', 'what', 'measured', ''], *rows])
        args.out.write_text(f'# On a GPU\n\n`python nanodepth.py gpu`: {head}\n\n{table}\n')
        print(args.out)
    failed = [name for name, *_, value, _ in rows if value == 'failed']
    if failed:
        print(f'failed: {", ".join(failed)}', file=sys.stderr)
        raise SystemExit(1)
