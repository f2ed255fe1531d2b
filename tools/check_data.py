"""What is in a dataset; every shard against its checksum.

Usage:
    python nanodepth.py check_data data/toy
"""
import argparse
import hashlib
import json

from tqdm import tqdm

from common.errors import Refused
from data.tokenizer import get_tokenizer
from data.tokens import Dataset, how_to_prepare, mixture


def main(argv=None):
    parser = argparse.ArgumentParser(
        description='Show what is in a dataset and check every shard against its checksum.')
    parser.add_argument('folder')
    parser.add_argument('--chars', type=int, default=400,
                        help='how much of the first window to print')
    args = parser.parse_args(argv)
    for folder, split in ((folder, split) for folder, _ in mixture(args.folder)
                          for split in ('train', 'val')):
        data = Dataset(folder, split, context=None)
        for shard in tqdm(data.meta['shards'], desc=f'{split}: checking', leave=False):
            for ending, want in shard['sha256'].items():
                path = (data.folder / shard['file']).with_suffix(ending)
                with open(path, 'rb') as file:
                    if hashlib.file_digest(file, 'sha256').hexdigest() != want:
                        raise Refused(f'{path} is not what was written (wrong checksum); '
                                      f'{how_to_prepare(folder)}')
        text = get_tokenizer(data.meta['tokenizer']).decode(
            data.shards[0]['.bin'][:args.chars].tolist())
        print(f'{folder}, {split}: {data.meta["tokens"]:,} tokens of '
              f'{data.meta["tokenizer"]!r}, checksums right; '
              f'from {json.dumps(data.meta["origin"])}\n{text}\n')
