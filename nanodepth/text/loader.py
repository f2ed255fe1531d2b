"""Datasets on disk: how they are made, and whether they are whole. (training/loader.py says which
folders they are, and reads rows; tokens.py writes them.)
Usage: about = check_dataset('data/toy', 'val')
"""
from pathlib import Path

from nanodepth.common.errors import Refused
from nanodepth.common.files import hash_of, read_json
from nanodepth.training.settings import find


def how_to_prepare(folder):
    "The command that makes a dataset: the prepare.py beside it or above it."
    if (Path(folder).parent / 'mixture.json').exists():
        return f'remove it, and repeat the command that made {Path(folder).parent}'
    for path in (Path(folder) / 'prepare.py').parents:
        if (path / 'prepare.py').exists():
            return f'run: python {path / "prepare.py"} (--help says how)'
    return (f'its config may say in its first lines how it is made; of your own text: python '
            f'{find("data/text/prepare.py")} FILES --out={folder}')


def check_dataset(folder, split, progress=iter):
    "What a split's JSON says of it. A shard that is not what was written is refused."
    about = read_json(Path(folder) / f'{split}.json')
    for shard in progress(about['shards']):
        for ending, want in shard['sha256'].items():
            path = (Path(folder) / shard['file']).with_suffix(ending)
            if hash_of(path) != want:
                raise Refused(f'{path} is not what was written (wrong checksum); '
                              f'{how_to_prepare(folder)}')
    return about
