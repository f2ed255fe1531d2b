"""Compare models on one GPU: an ordinary model, LIDAS, and with LIDAS's FLOPs a shorter ordinary
run and two models of four layers, one of which has grown from two.

    nanodepth compare docs/results/compare_gpu.py

A run takes three minutes on an H200, and the same command continues a comparison that was stopped.
The docstring of config/gpu_baseline.py has the commands that make the data. The claims in
docs/LOG.md will be judged with the rows of seeds 2 and later.
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
    """Return the numbers with which the claims are judged, apart from the loss on text. `judged` is
    1, because this file does not train seeds 0 and 1, with which the claims were chosen."""
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
