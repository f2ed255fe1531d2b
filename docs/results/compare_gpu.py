"""One GPU: an ordinary model, LIDAS, and for LIDAS's FLOPs a shorter run and four layers, which
have never grown or have grown from two.

nanodepth compare docs/results/compare_gpu.py. A run takes three minutes on an H200, and the same
command goes on. config/gpu_baseline.py says how to make the data. The claims of docs/LOG.md are
judged by rows.csv, on seeds 2 and later, which are those of this file.
"""
from nanodepth.loop import in_order
from nanodepth.probe import depth_score
from nanodepth.report.contrasts import mean
from nanodepth.scoring.rows import data_scores

seeds = '2-4'
batches = 6
measures = 'loss', 'text'
show = 'text', 'aliases 3-5 right', 'text rise, layers 2-3 twice', 'depth score'
arms = dict(
    ordinary='config/gpu_baseline.py',
    lidas='config/gpu_lidas.py',
    ordinary_equal='config/gpu_baseline.py --flops=lidas',
    four_equal='config/gpu_baseline.py --n_layer=4 --flops=lidas',
    four_grown='config/gpu_lidas.py --n_layer=4 --flops=four_equal')


def metric(model, loader):
    """What the claims are judged by, beside the loss on text. `judged` is 1: seeds 0 and 1, which
    only chose the claims, are not trained by this file."""
    tokens = loader.batch(0)[0][:4].to(model.norm.weight.device)
    plain = data_scores(model, loader, batches, text=True)
    right = [plain[f'aliases {k}'].mean for k in range(6)]
    numbers = {'judged': 1.0, 'depth score': depth_score(model, tokens)[0],
               'aliases 1-2 right': mean(right[1:3]), 'aliases 3-5 right': mean(right[3:])}
    if len(model.layers) == 8:
        with in_order(model, [0, 1, 2, 3, 2, 3, 4, 5, 6, 7]):
            twice = data_scores(model, loader, batches, text=True)
        numbers['text rise, layers 2-3 twice'] = twice['text'].mean - plain['text'].mean
        numbers['layers 2-3 twice, aliases 2 right'] = twice['aliases 2'].mean
    return numbers
