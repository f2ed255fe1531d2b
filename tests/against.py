"""What this tree computes beside what COMMIT did: every command here runs in both, on this machine,
and all that they leave is compared: weights, optimizers' states, logs but for their times, tables.

Usage: python tests/against.py a8c26fc [a word of the rows to run]
"""
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TINY = ('--steps=30 --warmup_steps=3 --decay_steps=6 --batch_size=4 --eval_batches=2 '
        '--eval_every=9 --log_every=1 --save_every=7 --device=cpu')
SMALL = f'{TINY} --n_embd=32 --n_head=2 --head_dim=none --context=32'
RUNS = {        # the folder: the command that writes it
    'baseline': f'train.py config/baseline.py {TINY}',
    'lidas': f'train.py config/lidas.py {TINY}',
    'midas': f'train.py config/lidas.py --grow=midas {SMALL}',
    'own_growth': f'train.py config/own_growth.py {SMALL}',
    'loop_2x4': f'train.py config/loop_2x4.py {TINY}',
    'loop_1_2x3_1': f'train.py config/loop_1_2x3_1.py {SMALL}',
    'adamw': f'train.py config/baseline.py --optimizer=adamw --lr=1e-3 --tie_embeddings=true '
             f'--ln_scaling=true --lr_shape=cosine {SMALL}',
    'muon': f'train.py config/baseline.py --muon_scaling=original --adamw_lr=1e-3 --n_kv_head=1 '
            f'--grad_accum=2 {SMALL}',
    'half': f'train.py config/baseline.py --dtype=bfloat16 {SMALL}',
    'cooldown': f'train.py config/baseline.py --n_layer=4 --cooldown_loop=1-2x2-1 '
                f'--cooldown_data=data/toy {SMALL}',
    'two': f'torchrun 2 train.py config/lidas.py {SMALL}',
    'more': f'train.py config/lidas.py --init_from=OUT/baseline {TINY}',
    'cut': '-m nanodepth cut OUT/baseline 2-2-2 --out=OUT/cut',
    'cut_add': '-m nanodepth cut OUT/baseline 2-3-2 --inject=add --start=zero --out=OUT/cut_add',
    'untied': '-m nanodepth cut OUT/loop_2x4 --untie --out=OUT/untied',
    'dense': '-m nanodepth cut OUT/baseline 2-2-2 --dense --out=OUT/dense',
    'retrofit': f'train.py config/retrofit.py --data=data/toy --init_from=OUT/cut {TINY}',
    'retrofit_two': 'torchrun 2 train.py config/retrofit.py --data=data/toy '
                    '--init_from=OUT/cut_add --curriculum_shape=1-sqrt --backprop_curriculum=0.5 '
                    f'--recompute=true {TINY}'}
ASKED = {       # the table: the command that writes it
    'evaluate.csv': '-m nanodepth evaluate OUT/baseline OUT/lidas OUT/loop_2x4 --device=cpu --n=8 '
                    '--batches=2 --tasks=toy_assign/0-2,toy_copy --measures=loss,text,log_prob',
    'windows.csv': '-m nanodepth evaluate OUT/lidas --window=mid4,2-5 --K=2,3 --batches=1 --n=4 '
                   '--method=naive,rk,euler --tasks=toy_assign/1 --device=cpu',
    'loops.csv': '-m nanodepth evaluate OUT/baseline --loop=3-2x2-3 --batches=1 --device=cpu',
    'r.csv': '-m nanodepth evaluate OUT/retrofit --r=1,2,4 --batches=1 --data=data/toy '
             '--device=cpu',
    'sweep.csv': '-m nanodepth sweep OUT/lidas --window=2-3,2-5 --K=2,3 --n=8 --batches=1 '
                 '--tasks=toy_assign/1 --device=cpu',
    'probe': '-m nanodepth probe OUT/baseline OUT/loop_2x4 OUT/retrofit --data=data/toy --count=4 '
             '--length=32 --n=4 --batches=1 --lens_steps=5 --device=cpu',
    'exported': '-m nanodepth export OUT/lidas OUT/exported',
    'exported_loop': '-m nanodepth export OUT/baseline OUT/exported_loop --loop=3-2x2-3',
    'raven': '-m nanodepth export OUT/retrofit OUT/raven'}
TIMES = 'seconds', 'tokens_per_s', 'mfu', 'memory_gb'


def run(tree, out, name, command):
    words = command.replace('OUT', str(out)).split()
    ranks = words[:1] == ['torchrun']
    argv = [sys.executable, *(['-m', 'torch.distributed.run', '--standalone',
                               f'--nproc_per_node={words[1]}', *words[2:]] if ranks else words)]
    if name in RUNS and 'cut' not in words:
        argv.append(f'--out_dir={out / name}')
    elif name in ASKED and 'export' not in words:
        argv.append(f'--out={out / name}')
    env = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(tree), HF_HUB_OFFLINE='1')
    done = subprocess.run(argv, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'{name} in {tree}: {done.stdout[-500:]}{done.stderr[-1500:]}')


def tensors(value, at=''):
    "{where: tensor} of what torch.save wrote."
    if isinstance(value, torch.Tensor):
        return {at: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(
        value, (list, tuple)) else ()
    found = {}
    for key, inside in items:
        found |= tensors(inside, f'{at}.{key}')
    return found


def contents(path):
    "{file: {where: value}} of all that can be compared below a path."
    found = {}
    for file in [path] if path.is_file() else sorted(path.rglob('*')):
        if file.suffix == '.pt':
            saved = torch.load(file, weights_only=True)
            found[file.name] = tensors({name: saved.get(name) for name in ('model', 'optimizers')})
        elif file.name == 'log.jsonl':
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            found[file.name] = {(i, key): value for i, line in enumerate(lines)
                                for key, value in line.items() if key not in TIMES}
        elif file.suffix == '.csv':
            rows = list(csv.DictReader(file.open()))
            found[file.name] = {(i, key): value for i, row in enumerate(rows)
                                for key, value in row.items()}
        elif file.suffix == '.safetensors':
            from safetensors.torch import load_file
            found[file.name] = load_file(file)
    return found


def same(a, b):
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return torch.equal(a, b) if both else a == b


def main(commit, word=''):
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / 'old'
        subprocess.run(['git', '-C', ROOT, 'worktree', 'add', '-q', '--detach', old, commit],
                       check=True)
        try:
            wrong = 0
            for tree in (ROOT, old):        # each makes its own data, which must be the same
                if not (tree / 'data/toy/train.json').exists():
                    run(tree, folder, '', 'data/toy/prepare.py')
            outs = {tree: Path(folder) / f'out_{i}' for i, tree in enumerate((old, ROOT))}
            for name, command in (RUNS | ASKED).items():
                if word not in name:
                    continue
                for tree, out in outs.items():
                    out.mkdir(exist_ok=True)
                    run(tree, out, name, command)
                was, now = (contents(out / name) for out in outs.values())
                assert was, f'{name} left nothing to compare'
                pairs = [(file, key, value, now.get(file, {}).get(key)) for file, its in was.items()
                         for key, value in its.items()]
                unlike = [(file, key, a, b) for file, key, a, b in pairs if not same(a, b)]
                wrong += len(unlike)
                print(f'{name:16} {len(pairs) - len(unlike):6} of {len(pairs):6} equal', flush=True)
                for file, key, a, b in unlike[:4]:
                    print('   ', file, key, *(x if not isinstance(x, torch.Tensor) else x.shape
                                              for x in (a, b)))
            print('all equal' if not wrong else f'{wrong} are not')
        finally:
            subprocess.run(['git', '-C', ROOT, 'worktree', 'remove', '--force', old])
    sys.exit(bool(wrong))


if __name__ == '__main__':
    main(*sys.argv[1:])
