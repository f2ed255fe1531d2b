"""Compare eleven models on toy A, with the questions and probes of the tables in docs/RESULTS.md.

    nanodepth compare docs/results/compare_toy.py --seeds=4-7

A seed takes 70 minutes on one thread. The results are in out/compare_toy, and
docs/results/page.csv has a line for each run and way.
"""
from nanodepth import probe
from nanodepth.model import spans_in
from nanodepth.commands.probe import rows_of
from nanodepth.report.contrasts import mean
from nanodepth.scoring.rows import data_scores
from nanodepth.training.loader import Loader

seeds = '8'
tasks = 'toy_assign/0-5'
seed = 7                # of the questions
batches = 12
against = dict(midas=['baseline', 'baseline_isoflops'], retrofit=['retrofit_dense'])

arms = dict(
    baseline='config/baseline.py',
    midas='config/lidas.py --grow=midas',
    lidas='config/lidas.py',
    # the baseline's own warm-up and cool-down
    baseline_isoflops='config/baseline.py --flops=lidas --warmup_steps=50 --decay_steps=120',
    late='config/lidas.py --grow_block=4 --grow_alpha=-2 --steps=715 --warmup_steps=50 '
         '--decay_steps=120',
    loop_2x4='config/loop_2x4.py',
    standard_2='config/baseline.py --n_layer=2',
    loop_1_2x3_1='config/loop_1_2x3_1.py',
    standard_4='config/baseline.py --n_layer=4',
    retrofit='config/retrofit.py --data=data/toy_deep --init_from={baseline}',
    retrofit_dense='config/retrofit_dense.py --data=data/toy_deep --init_from={baseline}')

_WRAPPED = ['--window=2-5 --solver=naive,euler,rk --K=4', '--window=2-5 --solver=rk --K=3']
ways = dict(
    baseline=['--loop=3-2x2-3', *_WRAPPED],
    lidas=['--loop=3-2x2-3', *_WRAPPED],
    loop_1_2x3_1=['--loop=1-2x4-1'],
    retrofit=['--r=1,2,3,4,8,16'])


def metric(model, loader):
    """Return numbers that show whether a model repeats something with each block of two layers. For
    the middle blocks 2-3 and 4-5, they are: how much more the attention of the second layer adds to
    the stream than the attention of the first; how the loss changes if two layers are swapped,
    inside a block or across a border; and how much more directly the second layer depends on each
    earlier layer."""
    if spans_in(model.order) or len(model.order) != 8:
        return {}
    val = Loader('data/toy', 32, 64, 'val', seed=1)
    tokens = rows_of(val, 20)
    norms = probe.residual_norms(model, tokens)
    share = norms['attn share'].tolist()
    effects = probe.future_effects(model, tokens, propagate=False).tolist()
    on = [mean([row[d] for row in effects[:d]]) for d in range(len(effects))]
    orders = probe.order_sweep(model, lambda m: dict(loss=data_scores(m, val, 2)['loss'].mean),
                               probe.reverse_block, [2])
    rise = {row['start']: row['loss'] - orders[0]['loss'] for row in orders[1:]}
    return {
        'depth score': probe.depth_score(model, tokens)[0],
        'stream growth': norms['stream'][-1] / norms['stream'][0],
        'attention cycle': mean([share[3], share[5]]) - mean([share[2], share[4]]),
        'reversed inside': mean([rise[2], rise[4]]),
        'reversed across': mean([rise[1], rise[3], rise[5]]),
        'local effects': mean([on[3], on[5]]) - mean([on[2], on[4]])}
