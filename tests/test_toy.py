"""The toy data: every marked answer follows from what stands before it, by exactly as many steps
as its kind says."""
import json
import random
import re
import runpy
from collections import Counter

import numpy as np
import pytest
from conftest import ROOT

from nanodepth.data.tokens import Dataset

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
        # text lacks the first token
        yield KINDS[marks[start] - START - 1], text[:start - 1], text[start - 1:end - 1]


def statements(text):
    "Name -> what it was given, in pairs up to the first question."
    return dict(re.findall('(.)(.)', text.split('?')[0]))


def hops(before, allowed):
    "Look the asked name up in the statements, at most `allowed` times."
    name = before[-1]
    for _ in range(allowed):
        name = statements(before).get(name, name)
    return name


def test_documents_have_their_size_and_their_mix():
    docs = documents(2000)
    assert all(len(t) == len(k) == len(m) == SIZE and t[0] == 256 and max(t[1:]) < 128
               for t, k, m in docs)
    deepest = Counter(max(kind for kind, *_ in answers(t, m)) for t, _, m in docs)
    assert deepest['copy'] / 2000 == pytest.approx(0.25, abs=0.04)
    for depth in range(4):
        assert deepest[f'depth {depth}'] / 2000 == pytest.approx(0.1875, abs=0.04)
    assert set(deepest) == set(KINDS[1:6])


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
                assert hops(before, depth + 1) == answer and answer.isdigit()
                assert hops(before, depth) != answer
                # no earlier answer makes the way shorter, or leaves fewer values
                assert before.count('?') == 1
    assert counted['copy'] > 1000 and all(counted[f'depth {d}'] > 60 for d in range(4))


def test_what_counts_in_the_loss_can_be_known():
    """Every answer counts, and neither statements do, nor questions, nor a word where it first
    appears."""
    for tokens, mask, marks in documents(300):
        text = ''.join(chr(t) for t in tokens[1:])
        assert all(counts for counts, mark in zip(mask, marks) if mark) and not mask[0]
        if text[0].isupper():
            seen = set()
            for found in re.finditer('[A-Z][a-z]{2}', text):
                assert not any(mask[found.start() + 1:found.end() + 1]) or found.group() in seen
                seen.add(found.group())
        else:
            n = len(text.split('?')[0])
            assert n % 8 == 0 and not any(mask[:n + 1])
            assert mask[n + 1:] == [i % 3 == 2 for i in range(SIZE - n - 1)]


def test_nothing_deeper_is_in_the_mix():
    for tokens, _, _ in documents(300):
        text = ''.join(chr(t) for t in tokens[1:])
        if text[0].islower():
            given = statements(text)
            assert all(hops(f'{text.split("?")[0]}?{name}', 4).isdigit() for name in given)
            assert len(given) in (4, 8, 12, 16) and len(set(given.values())) == len(given)


def test_the_splits_share_nothing(tmp_path, monkeypatch):
    texts = [(f'file{i}.py', bytes([97 + i]) * 9000) for i in range(20)]
    monkeypatch.setitem(toy['main'].__globals__, 'library', lambda: iter(texts))
    for out in ('one', 'two'):
        toy['main'](['--documents=3000', f'--out={tmp_path / out}'])
    sets = {}
    for split in ('train', 'val'):
        assert (tmp_path / 'one' / f'{split}_000.bin').read_bytes() == (tmp_path / 'two'
                / f'{split}_000.bin').read_bytes()
        meta = json.loads((tmp_path / 'one' / f'{split}.json').read_text())
        assert meta['tokenizer'] == 'bytes' and re.match(r'\d+\.\d+', meta['origin']['python'])
        raw = np.fromfile(tmp_path / 'one' / f'{split}_000.bin', 'uint16')
        n = meta['origin']['documents'] * SIZE
        sets[split] = {tuple(row) for row in raw[:n].reshape(-1, SIZE)}, set(raw[n:].tolist()) - {
            256}
        share = (len(raw) - n) / len(raw)
        # little text: all of it
        assert share == pytest.approx(0.1, abs=0.01) or split == 'val' and share < 0.1
    assert not sets['train'][0] & sets['val'][0] and not sets['train'][1] & sets['val'][1]
    data = Dataset(tmp_path / 'one', 'val', context=256)
    tokens, targets, marks = data.window(3)
    assert tokens[0] == 256 and tokens[64] == 256                 # whole documents in every window
    at = int(np.argmax(marks >= START))
    assert marks[at] > START + 1 and chr(targets[at]).isalnum()
    # text: every byte is an answer
    assert data.window(len(data) - 1)[2].tolist() == [START + 1] * 256


def test_the_library_is_there_in_source_and_prose():
    name, text = next((n, t) for n, t in toy['library']() if n == 'ast.py')
    assert b'def parse(' in text and b'The `ast` module helps Python applications' in text
