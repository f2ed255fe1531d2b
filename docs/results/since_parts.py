"""Parts of SmolLM2 that claims of this year name (docs/ATLAS.md): the attention of an early layer
twice, and all matrices of the layers times 0.9. Minutes; `make claims` runs it.

The attention alone runs twice if a copy of the layer without its MLP runs first.
"""
import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from nanodepth.asking.scoring import Asked, Subject  # noqa: E402
from nanodepth.asking.way import Way  # noqa: E402

subject = Subject('out/smollm2', Asked(data='data/pydoc', batches=4, tasks='questions_piqa',
                                       limit=int(sys.argv[1]), dtype='float32'))
model = subject.model
MEASURES = {'loss', 'questions_piqa acc'}


def asked(name):
    found = {m: s.answers for m, s in subject.scores(Way()).items() if m in MEASURES}
    print(name, {m: round(float(np.mean(v)), 4) for m, v in found.items()}, flush=True)
    return found


with torch.no_grad():
    asked('as it is')
    each, depth = [], len(model.layers)
    for i in range(6):
        attention = copy.deepcopy(model.layers[i])
        attention.mlp.down.weight.zero_()
        model.layers.append(attention)
        model.config.order = [*range(i), depth, *range(i, depth)]
        each.append(asked(f'attention of {i} twice'))
        model.config.order = None
        del model.layers[depth]
    for p in model.layers.parameters():
        if p.dim() == 2:
            p.mul_(0.9)
    found = {'attention twice': {m: np.mean([e[m] for e in each], 0).tolist() for m in MEASURES},
             'weights at 0.9': asked('weights at 0.9')}
Path('out/claims/parts.json').write_text(json.dumps(found))
