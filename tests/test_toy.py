"The toy data: every marked answer follows from what stands before it, by exactly as many steps as its kind says."
import json
import random
import re
import runpy
from collections import Counter

import numpy as np
import pytest
from conftest import ROOT

from tokens import Dataset

toy = runpy.run_path(str(ROOT / 'data/toy/prepare.py'), run_name='toy')
SIZE, KINDS, START = toy['SIZE'], toy['KINDS'], toy['START']


def documents(n, seed=0):
    rng = random.Random(seed)
    return [toy['document'](rng) for _ in range(n)]


def answers(tokens, marks):
    "(kind, the text before the answer, the answer as far as it is in the window)"
    text = ''.join(chr(t) if t < 256 else '' for t in tokens)
    for start in (i for i, m in enumerate(marks) if m >= START):
        end = start + 1
        while end < len(marks) and 0 < marks[end] < START:
            end += 1
        yield KINDS[marks[start] - START - 1], text[:start - 1], text[start - 1:end - 1]      # text lacks the first token


def hops(before, allowed):
    "Look the asked name up in the statements so far, at most `allowed` times."
    name = before[-3:]
    for _ in range(allowed):
        found = re.search(rf'{name}(\d\d|[A-Z][a-z][a-z])', before)
        name = found.group(1) if found else name
    return name


def test_documents_have_their_size_and_their_mix():
    docs = documents(2000)
    assert all(len(t) == len(k) == len(m) == SIZE and t[0] == 256 and max(t[1:]) < 128 for t, k, m in docs)
    kinds = Counter(next(answers(t, m))[0] for t, _, m in docs)
    for kind, share in (('copy', 0.25), ('depth 0', 0.5), ('depth 1', 0.25)):
        assert kinds[kind] / 2000 == pytest.approx(share, abs=0.04)


def test_every_answer_follows_by_as_many_steps_as_its_kind_says():
    counted = Counter()
    for tokens, _, marks in documents(500):
        for kind, before, answer in answers(tokens, marks):
            counted[kind] += 1
            if kind == 'copy':          # the word after the last appearance of the word before
                words = re.findall('[A-Z][a-z]+', before)
                follower = words[words.index(words[-1]) + 1]
                assert follower.startswith(answer)
            else:
                depth = int(kind[-1])
                assert hops(before, depth + 1).startswith(answer)
                assert not hops(before, depth).startswith(answer)
    assert counted['copy'] > 2000 and counted['depth 0'] > 2000 and counted['depth 1'] > 300


def test_what_counts_in_the_loss_can_be_known():
    "Every answer counts, and no word or value counts where it first appears, nor the letter that says which name is asked for."
    for tokens, mask, marks in documents(300):
        text = ''.join(chr(t) for t in tokens[1:])
        assert all(counts for counts, mark in zip(mask, marks) if mark)
        assert 0.3 < sum(mask) / SIZE < 0.95
        seen = set()
        for found in re.finditer(r'[A-Z][a-z]{2}|\d\d', text):
            span = mask[found.start() + 1:found.end() + 1]
            assert not any(span) or found.group() in seen
            seen.add(found.group())
            copying = text[3:4].isalpha()
            if found.group().isalpha() and not copying:
                assert not span[0]


def test_nothing_deeper_is_in_the_mix():
    for tokens, _, marks in documents(300):
        text = ''.join(chr(t) for t in tokens if t < 256)
        if text[3:4].isalpha():                                                 # copying
            continue
        statements = dict(reversed(re.findall(r'([A-Z][a-z]{2})(\d\d|[A-Z][a-z]{2})', text)))      # the first of each name
        for value in statements.values():
            if value in statements:                                             # an alias: its source has a number
                assert statements[value].isdigit()


def test_the_splits_share_nothing(tmp_path, monkeypatch):
    texts = [(f'file{i}.py', bytes([97 + i]) * 9000) for i in range(20)]
    monkeypatch.setitem(toy['main'].__globals__, 'library', lambda: iter(texts))
    for out in ('one', 'two'):
        toy['main'](['--documents=3000', '--out', str(tmp_path / out)])
    sets = {}
    for split in ('train', 'val'):
        assert (tmp_path / 'one' / f'{split}_000.bin').read_bytes() == (tmp_path / 'two' / f'{split}_000.bin').read_bytes()
        meta = json.loads((tmp_path / 'one' / f'{split}.json').read_text())
        assert meta['tokenizer'] == 'bytes' and re.match(r'\d+\.\d+', meta['origin']['python'])
        raw = np.fromfile(tmp_path / 'one' / f'{split}_000.bin', 'uint16')
        n = meta['origin']['documents'] * SIZE
        sets[split] = {tuple(row) for row in raw[:n].reshape(-1, SIZE)}, set(raw[n:].tolist()) - {256}
        share = (len(raw) - n) / len(raw)
        assert share == pytest.approx(0.1, abs=0.01) or split == 'val' and share < 0.1         # little text: all of it
    assert not sets['train'][0] & sets['val'][0] and not sets['train'][1] & sets['val'][1]
    data = Dataset(tmp_path / 'one', 'val', context=256)
    tokens, targets, marks = data.window(3)
    assert tokens[0] == 256 and tokens[128] == 256                 # whole documents in every window
    at = int(np.argmax(marks >= START))
    assert marks[at] > START + 1 and chr(targets[at]).isalnum()
    assert data.window(len(data) - 1)[2].tolist() == [START + 1] * 256     # text: every byte is an answer


def test_the_library_is_there_in_source_and_prose():
    name, text = next((n, t) for n, t in toy['library']() if n == 'ast.py')
    assert b'def parse(' in text and b'The `ast` module helps Python applications' in text
