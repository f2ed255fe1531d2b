"""The designs of config/ideas, each against the plain loop of the same layers and against ordinary
models. docs/IDEAS.md has the table.

nanodepth compare docs/results/compare_ideas.py --seeds=5: about 100 minutes a seed on one thread,
in out/compare_ideas.
"""
seeds = '5'
tasks = 'toy_assign/3-4'    # training has up to three aliases, so four are new
n = 500
seed = 7                    # of the questions
batches = 12
show = ('toy_assign/3 log_prob', 'toy_assign/4 log_prob', 'toy_assign/3', 'toy_assign/4', 'text')

_IDEAS = dict(deep='loop_2x4', ouro='loop_2x4', gates='loop_1_2x3_1', lora='loop_1_2x3_1',
              mixture='loop_1_2x3_1', settle='loop_1_2x3_1', halt='loop_2_2x4_2',
              postnorm='standard_4')         # {design: the same layers without it}

arms = dict(
    baseline='config/baseline.py',
    loop_2x4='config/loop_2x4.py',
    loop_1_2x3_1='config/loop_1_2x3_1.py',
    loop_2_2x4_2='config/baseline.py --n_layer=6 --loop=2-2x4-2',
    standard_4='config/baseline.py --n_layer=4',
    **{name: f'config/ideas/{name}.py' for name in _IDEAS},
    # ouro costs as much as deep. The others cost as much as the baseline, and postnorm half of it.
    baseline_deep='config/baseline.py --flops=deep',
    baseline_halt='config/baseline.py --flops=halt')

against = {name: ['baseline', plain] for name, plain in _IDEAS.items()}
against['deep'].append('baseline_deep')
against['ouro'].append('baseline_deep')
against['halt'].append('baseline_halt')
