"""Datasets on disk: which folders they are, how they are made, whether they are whole. (Rows are
read by training/loader.py, and tokens.py writes them.)
Usage: about = check_dataset('data/toy', 'val')
"""
import json
import subprocess
import sys
from pathlib import Path

from nanodepth.common.errors import Refused
from nanodepth.common.files import hash_of, read_json
from nanodepth.training.settings import find


def folders_of(data):
    "The folders of a setting of data; of None there are none."
    return data if isinstance(data, list) else str(data).split(',') if data else []


def parts_of_mixture(folder):
    "{folder: its share} of what a mixture is made of; a dataset is made of itself."
    file = find(folder) / 'mixture.json'
    shares = json.loads(file.read_text()) if file.exists() else {'.': 1}
    return {find(folder) / name: share for name, share in shares.items()}


def make_toy_data(c):
    "The toy's data takes seconds to make. Other data is the user's own decision."
    is_used = 'data/toy' in folders_of(c.data) + folders_of(c.cooldown_data)
    if is_used and not (find('data/toy') / 'train.json').exists():
        subprocess.run([sys.executable, find('data/toy/prepare.py')], check=True)


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
