"""One GPU: an ordinary model, LIDAS, and for LIDAS's FLOPs a shorter run and four layers.

nanodepth compare config/compare_gpu.py --seeds=2-4, as often as needed: a call begins no run that
would end after nine minutes. config/gpu_baseline.py says how to make the data.
"""
from nanodepth.probe import depth_score

minutes = 9
batches = 6
measures = 'loss', 'text'
partners = False
arms = dict(
    ordinary='config/gpu_baseline.py',
    lidas='config/gpu_lidas.py',
    ordinary_equal='ordinary --flops=lidas',
    four_equal='ordinary --n_layer=4 --flops=lidas')
ways = dict.fromkeys(['ordinary', 'lidas', 'ordinary_equal'], ['--loop=2-2x2-4'])


def metric(model, loader):
    "Where the model's work reaches later bytes."
    tokens = loader.batch(0)[0][:4].to(model.norm.weight.device)
    return {'depth score': depth_score(model, tokens)[0]}
