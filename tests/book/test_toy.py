"Test data/toy/prepare.py: the toy data are those of all our numbers, and splits share nothing."
import hashlib
import runpy
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT, contents, shard_of

from training.loader import Loader


toy = runpy.run_path(str(ROOT / 'data/toy/prepare.py'), run_name='toy')
sys.modules['toy'] = SimpleNamespace(**toy)         # where other processes look for its functions


def test_the_toy_documents_never_change(monkeypatch):
    """Every number that we publish about the toy was measured with these documents. Documents after
    the first ones are drawn with other seeds."""
    digest = lambda made: hashlib.sha256(made.tobytes()).hexdigest()[:16]
    assert digest(toy['documents']('val', 300, 3, set())) == 'cba4b5b13947b3a1'
    monkeypatch.setitem(toy['documents'].__globals__, 'FIRST', 30)
    monkeypatch.setitem(toy['documents'].__globals__, 'PIECE', 20)
    assert digest(toy['documents']('train', 75, 5, set())) == 'd15063cef85fd48c'


def test_training_and_validation_share_no_document(tmp_path, monkeypatch, capsys):
    library = [bytes([97 + i]) * 9000 for i in range(20)]
    monkeypatch.setitem(toy['main'].__globals__, 'library', lambda: iter(library))
    toy['main'](['--documents=800', f'--out={tmp_path}'])
    assert capsys.readouterr().out.count('the library has no more') == 1
    documents, texts, shares, size = [], [], [], toy['SIZE']
    for split, n in (('train', 800), ('val', 4000)):
        shard = shard_of(Loader(tmp_path, 1, 256, split).datasets[0])
        documents.append({tuple(row) for row in shard['.bin'][:n * size].reshape(-1, size)})
        texts.append(shard['.bin'][n * size:])
        shares.append(len(texts[-1]) / len(shard['.bin']))
        assert shard['.mask'][n * size:].all()
    assert documents[0].isdisjoint(documents[1]) and {*texts[0]} & {*texts[1]} == {256}
    # the library is too small for the texts of both splits
    assert shares[0] == pytest.approx(0.1, abs=0.01) and shares[1] < 0.1
    # each byte of text is marked as an answer
    assert {*shard['.marks'][4000 * size:]} == {129}
    before = contents(tmp_path)
    with pytest.raises(SystemExit, match='another dataset'):
        toy['main'](['--documents=800', '--aliases=0-1', f'--out={tmp_path}'])
    assert contents(tmp_path) == before


