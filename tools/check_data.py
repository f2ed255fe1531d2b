"""Print what is in a dataset, check every checksum.

Usage:
    python nanodepth.py check_data data/toy
"""
import hashlib
import itertools
import json
from dataclasses import dataclass

from tqdm import tqdm

from common.errors import Refused
from common.files import read_json
from common.options import read
from data.tokenizer import get_tokenizer
from data.tokens import Dataset, how_to_prepare, mixture

SHOWN = 400     # tokens of the first shard that are printed


@dataclass
class Options:
    WORDS = ['folder']
    folder: str        # a dataset, or a mixture of several


def main(argv=None):
    options = read(Options, argv, __doc__)
    for (folder, _), split in itertools.product(mixture(options.folder), ('train', 'val')):
        data = Dataset(folder, split, context=None)
        shards = read_json(data.folder / f'{split}.json')['shards']
        for shard in tqdm(shards, desc=f'{split}: checking', leave=False):
            for ending, want in shard['sha256'].items():
                path = (data.folder / shard['file']).with_suffix(ending)
                with open(path, 'rb') as file:
                    if hashlib.file_digest(file, 'sha256').hexdigest() != want:
                        raise Refused(f'{path} is not what was written (wrong checksum); '
                                      f'{how_to_prepare(folder)}')
        text = get_tokenizer(data.tokenizer).decode(data.shards[0]['.bin'][:SHOWN].tolist())
        print(f'{folder}, {split}: {data.tokens:,} tokens of {data.tokenizer!r}, checksums right; '
              f'from {json.dumps(data.origin)}\n{text}\n')
