"""corpus.py on local files: byte-equal shards whatever happens, exact shares, odd documents, a
full disk."""
import json
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT

from nanodepth.common.errors import Refused
from nanodepth.data import corpus
from nanodepth.data.corpus import number
from nanodepth.data.sources import archived, chat
from nanodepth.data.tokenizer import LONGEST, encode_document, get_tokenizer
from nanodepth.data.tokens import Dataset, Loader

pytest.importorskip('datasets')
ODD = ['', None, '<|endoftext|> is text here', 'ä東🙂\u200d\x00\ufeff e\u0301 \U000e0041',
       ' ' * 110_000, '\u2028\r\n\t', 'a' * 110_000]
SOURCES = {'fineweb-edu-dedup': 5, 'cosmopedia-v2': 2, 'python-edu': 2, 'open-web-math': 2}


def write(path, texts):
    import pyarrow
    import pyarrow.parquet
    if path.suffix == '.parquet':
        pyarrow.parquet.write_table(pyarrow.table(dict(text=texts, id=list(range(len(texts))))),
                                    path, row_group_size=50)
    else:
        path.write_text(''.join(json.dumps(dict(text=t, id=i), ensure_ascii=i % 2 == 0) + '\n'
                                for i, t in enumerate(texts)))


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp('source'), random.Random(0)
    for name, files in SOURCES.items():
        (folder / name).mkdir()
        for i in range(files):
            texts = [' '.join(f'{draw.randrange(10**draw.randrange(1, 7))}'
                              for _ in range(draw.randrange(5, 120))) for _ in range(250)]
            texts = draw.sample(texts + (ODD if i == 0 else []),
                                len(texts) + (len(ODD) if i == 0 else 0))
            write(folder / name / f'train-{i:05d}.{"jsonl" if i % 2 else "parquet"}', texts)
    return folder


def command(source, out, *more):
    return [sys.executable, str(ROOT / 'data/smollm/prepare.py'), '--tokens=500K',
            f'--source={source}', '--tokenizer=bytes', f'--out={out}',
            '--val_every=50', '--workers=2', *more]


def contents(out):
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob('*')) if p.is_file()
            and p.name not in ('lock',)}


@pytest.fixture(scope='module')
def made(source, tmp_path_factory):
    out = tmp_path_factory.mktemp('made')
    done = subprocess.run(command(source, out, '--workers=1'), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_shares_are_exact_and_every_document_is_there_once(source, made):
    import pyarrow.parquet
    mixture = json.loads((made / 'mixture.json').read_text())
    assert mixture == dict(fineweb_edu=0.70, cosmopedia=0.15, python_edu=0.09, open_web_math=0.06)
    for name, share in mixture.items():
        data = Dataset(made / name, 'train', 8)
        sizes = [len(shard['.bin']) for shard in data.shards]
        assert data.tokens == sum(sizes)
        # validation is one shard, so that windows of any length fit
        val = json.loads((made / name / 'val.json').read_text())
        assert [shard['file'] for shard in val['shards']] == ['val.bin']
        # whole files, and as few as will do
        assert sum(sizes[:-1]) < round(500_000 * share) <= sum(sizes)
    # What is read back, split at the documents' beginnings, is a subset of the source's texts, each
    # once, in one split.
    texts = [t for p in (source / 'open-web-math').glob('*.parquet')
             for t in pyarrow.parquet.read_table(p)['text'].to_pylist()]
    texts += [json.loads(line)['text'] for p in (source / 'open-web-math').glob('*.jsonl')
              for line in p.read_text().splitlines()]
    known = {t.encode() for t in texts if t}
    found = {}
    for which in ('train', 'val'):
        stream = np.concatenate([s['.bin'] for s in Dataset(made / 'open_web_math', which,
                8).shards])
        starts = np.flatnonzero(stream == 256)
        found[which] = [bytes(d[1:].astype('uint8')) for d in np.split(stream, starts)[1:]]
    assert set(found['train']) <= known and len(set(found['train'])) == len(found['train'])
    assert (found['val'] and not set(found['val']) & set(found['train']) and set(found['val'])
            <= known)


def test_the_loader_reads_a_mixture_by_its_shares(made):
    loader = Loader(made, 100, 16, seed=0)
    drawn = [loader.place(i)[0] for i in range(5000)]
    assert [drawn.count(d) for d in range(4)] == [3500, 750, 450, 300]
    both = Loader([made, made / 'cosmopedia'], 4, 16, weights=[3, 1])
    assert sum(both.quota) == 1000 and both.quota[-1] == 250 and both.quota[0] == 525


def test_neither_the_number_of_processes_nor_being_killed_changes_a_byte(source, made, tmp_path):
    wanted, draw = contents(made), random.Random(1)
    kills = 0
    while True:
        process = subprocess.Popen(command(source, tmp_path, f'--workers={2 + kills % 2}'),
                                   stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            process.wait(timeout=2 + draw.random() if kills < 1 else 60)
            assert process.returncode == 0, process.stderr.read()
            break
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    found = contents(tmp_path)
    assert found.keys() == wanted.keys() and kills
    for name in wanted:
        assert found[name] == wanted[name], name


def test_a_full_disk_is_said_in_a_line_and_what_there_is_goes_on_to_some_tokens_and_to_more(source,
        made, tmp_path):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))         # noqa: E731
    done = subprocess.run(command(source, tmp_path), capture_output=True, text=True,
                          preexec_fn=limit)
    assert done.returncode == 2
    assert 'prepare.py: File too large' in done.stderr.splitlines()[-1]
    assert not list(tmp_path.rglob('*.tmp')) and not list(tmp_path.rglob('train.json'))
    for tokens in ('100K', '500K'):
        prepare(command(source, tmp_path, '--workers=1', f'--tokens={tokens}')[2:])
        meta = json.loads((tmp_path / 'cosmopedia/train.json').read_text())
        assert 0.15 * number(tokens) <= meta['tokens'] == sum(s['tokens'] for s in meta['shards'])
    assert contents(tmp_path) == contents(made)


def test_a_shard_that_is_gone_is_made_again(source, made, tmp_path):
    argv = command(source, tmp_path, '--workers=1')[2:]
    prepare([*argv, '--tokens=100K'])
    (tmp_path / 'fineweb_edu/train_00000.bin').unlink()
    prepare(argv)
    assert contents(tmp_path) == contents(made)


def prepare(argv):
    sources = runpy.run_path(str(ROOT / 'data/smollm/prepare.py'))['SMOLLM']
    corpus.prepare({'smollm': sources}, '', argv, out=None)


def run(argv):
    with pytest.raises(Refused) as error:
        prepare(argv)
    return str(error.value)


def test_what_cannot_be_is_said_in_a_line(source, made, tmp_path):
    base = ['--tokenizer=bytes', f'--out={tmp_path}']
    assert '--tokens=10Q is no number' in run(['--tokens=10Q', *base])
    (tmp_path / 'empty').mkdir()
    assert "in a folder (or by a name) with 'fineweb' in it, but nothing" in run(
        ['--tokens=1K', *base, f'--source={tmp_path / "empty"}'])
    assert 'GB are free' in run(['--tokens=900T', *base, f'--source={source}'])
    here = [*command(source, made)[2:], '--val_every=7']
    assert 'was begun with val_every=50, and now it is 7' in run(here)
    before = contents(made)
    prepare([*command(source, made)[2:], '--tokens=1K'])        # it has them already
    (tmp_path / 'bad/fineweb').mkdir(parents=True)
    (tmp_path / 'bad/fineweb/a.jsonl').write_text('{"words": "x"}\n')
    assert "a.jsonl: no text in the column 'text', but the columns words" in run(['--tokens=1K',
            '--workers=1', *base[:1], f'--out={tmp_path}/o', f'--source={tmp_path}/bad'])
    # an empty file has no rows, and a broken one is named
    (tmp_path / 'bad/fineweb/a.jsonl').write_text('')
    (tmp_path / 'bad/fineweb/b.parquet').write_bytes(b'PAR1 no more')
    assert 'b.parquet, after row 0:' in run(['--tokens=1K', '--workers=1', *base[:1],
                                              f'--out={tmp_path}/s', f'--source={tmp_path}/bad'])
    assert contents(made) == before


# ------------------------------------------------------------------------------------------- pieces

def test_a_long_document_has_the_tokens_that_it_has_in_one_piece():
    import tiktoken
    ranks = {bytes([i]): i for i in range(256)} | {pair.encode(): 256 + i
                                                   for i, pair in enumerate((' a', 'an', ' an',
            '\n\n', '  ', 'be', ' be'))}
    llama3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
              r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    draw = random.Random(0)
    text = ''.join(draw.choice(['an', ' be', ' 12', '!', '\n', '\n\n', '  ', ' ', '\t', "'s", 'ä',
                                '東', ' ?\n']) for _ in range(LONGEST))
    gpt2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    for pattern in (gpt2, llama3):
        tokenizer = tiktoken.Encoding('t', pat_str=pattern, mergeable_ranks=ranks,
                                      special_tokens={})
        assert (len(text) > LONGEST and encode_document(tokenizer, text)
                == tokenizer.encode_ordinary(text))
        # tiktoken alone runs out of stack on these
        for odd in (' ' * 2_000_000, '\n' * 2_000_000):
            assert tokenizer.decode(encode_document(tokenizer, odd)) == odd
    assert (get_tokenizer('bytes').decode(encode_document(get_tokenizer('bytes'), 'x<|endoftext|>'))
            == 'x<|endoftext|>')


def test_numbers_of_tokens():
    assert [number(t) for t in ('10B', '1.5M', '7k', '12')] == [10**10, 1_500_000, 7000, 12]


def test_a_file_in_the_archive_is_fetched_by_its_number(monkeypatch):
    import gzip
    import http.client
    import io
    import urllib.error
    asked = []

    def urlopen(url, timeout):
        asked.append(url)
        if url.endswith('gone'):
            raise urllib.error.HTTPError(url, 404, 'Not Found', {}, None)
        if len(asked) <= 2:
            raise [ConnectionResetError('once'), http.client.IncompleteRead(b'')][len(asked) - 1]
        return io.BytesIO(gzip.compress('print("ä")'.encode()))
    monkeypatch.setattr('urllib.request.urlopen', urlopen)
    monkeypatch.setattr(time, 'sleep', lambda s: None)
    assert archived(dict(blob_id='12ab')) == 'print("ä")' and asked[0].endswith('/content/12ab')
    assert (archived(dict(blob_id='gone')) is None and archived(dict(blob_id='x', text='here'))
            == 'here')
    assert (chat(dict(text='<|im_start|>user\nHi<|im_end|>\n')) == 'Hi'
            and chat(dict(text='a', generator='DeepSeek-R1')) is None)


@pytest.mark.parametrize('name, parts',
                         [('nemotron_20', 4), ('finemath_20', 4), ('retrofit_math', 1),
                          ('retrofit_heal', 1), ('retrofit_mix', 3)])
def test_the_mixtures_of_mathematics(name, parts):
    mixture = runpy.run_path(str(ROOT / 'data/math/prepare.py'))['MIXTURES'][name]
    assert len(mixture) == parts == len({s.name for s in mixture})
    shares = [s.share / sum(t.share for t in mixture) for s in mixture]
    if parts == 4:
        assert shares[-1] == pytest.approx(0.2) and shares[0] / shares[2] == pytest.approx(70 / 9)
    else:
        assert shares == pytest.approx([1 / parts] * parts)
