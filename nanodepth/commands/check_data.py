"""Print what is in a dataset, check every checksum.

Usage:
    nanodepth check_data data/toy
"""
import hashlib
import itertools
import json
from dataclasses import dataclass

from tqdm import tqdm

from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.data.tokens import Dataset, how_to_prepare, mixture

SHOWN = 400     # tokens of the first shard that are printed


@dataclass
class Options:
    WORDS = ['folder']
    folder: str        # a dataset, or a mixture of several


def main(argv=None):
    options = read(Options, argv, __doc__)
    for (folder, _), split in itertools.product(mixture(options.folder), ('train', 'val')):
        data = Dataset(folder, split, context=None)
        shards = tqdm(data.shards, desc=f'{split}: checking', leave=False)
        for shard, sums in zip(shards, data.checksums):
            for ending, want in sums.items():
                if hashlib.sha256(shard[ending]).hexdigest() != want:
                    raise Refused(f'{shard[ending].filename} is not what was written (wrong '
                                  f'checksum); {how_to_prepare(folder)}')
        text = get_tokenizer(data.tokenizer).decode(data.shards[0]['.bin'][:SHOWN].tolist())
        print(f'{folder}, {split}: {data.tokens:,} tokens of {data.tokenizer!r}, checksums right; '
              f'from {json.dumps(data.origin)}\n{text}\n')
