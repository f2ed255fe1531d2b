"Tiny random models, one thread each: two workers share two cores."
import os
import sys
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ['HF_HUB_OFFLINE'] = '1'
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np      # noqa: E402
import pytest           # noqa: E402
import torch            # noqa: E402

from model import LM, ModelConfig       # noqa: E402
from tokens import write_dataset        # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def tiny():
    "tiny(**fields) -> an LM with weights large enough that every layer matters."
    def make(seed=0, std=0.2, **fields):
        torch.manual_seed(seed)
        fields = dict(vocab_size=50, n_layer=4, n_embd=32, n_head=4, context=32) | fields
        model = LM(ModelConfig(**fields))
        for p in model.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=std)
            else:
                torch.nn.init.uniform_(p, 0.5, 1.5)
        return model.eval()
    return make


@pytest.fixture
def data(tmp_path):
    "A small dataset of bytes with a pattern that can be learned: train and val in one folder."
    rng = np.random.default_rng(0)
    for split, n in (('train', 6000), ('val', 800)):
        tokens = np.cumsum(rng.integers(1, 4, n)) % 97
        marks = np.where(np.arange(n) % 5 == 0, 129, 0)
        write_dataset(tmp_path / 'data', split, 'bytes', tokens, marks=marks, kinds=['fifth'])
    return tmp_path / 'data'
