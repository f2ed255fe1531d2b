"""English and Python as JSON Lines, for the retrofit of docs/ATLAS.md: Python's library and
reference, the kernel's documentation, dictionaries and fortunes, from unpacked Debian packages.

    python docs/results/heal_text.py FOLDER OUT.jsonl       # `make claims` fetches the packages
"""
import gzip
import json
import sys
import sysconfig
from pathlib import Path

LEFT_OUT = {'site-packages', 'dist-packages', 'test', 'tests', 'pydoc_data', 'idle_test'}
AS_ONE = 20_000         # characters of a dictionary that are one document


def texts(folder):
    for path in sorted(Path(sysconfig.get_paths()['stdlib']).rglob('*.py')):
        if not LEFT_OUT & set(path.parts):
            yield path.read_text(encoding='utf-8', errors='ignore')
    seen = set()
    for path in sorted(folder.rglob('*.rst*')):
        if path.is_symlink() or not path.is_file() or 'translations' in path.parts:
            continue
        raw = gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else path.read_bytes()
        text = raw.decode(errors='ignore')
        if text not in seen:
            seen.add(text)
            yield text
    for name in ('gcide', 'foldoc', 'jargon'):
        text = gzip.open(folder / f'usr/share/dictd/{name}.dict.dz').read().decode(errors='ignore')
        now = ''
        for part in text.split('\n\n'):
            now += part + '\n\n'
            if len(now) > AS_ONE:
                yield now
                now = ''
        yield now
    for path in sorted((folder / 'usr/share/games/fortunes').rglob('*')):
        if path.is_file() and not path.is_symlink() and not path.suffix:
            yield path.read_text(errors='ignore')


with open(sys.argv[2], 'w', encoding='utf-8') as out:
    for text in filter(str.strip, texts(Path(sys.argv[1]))):
        out.write(json.dumps(dict(text=text)) + '\n')
