import hashlib
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.data import tokenizer as tokenizer_file, tokens as tokens_file
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.data.tokens import (Dataset, Loader, answers, draw, evaluate, measure, permute,
                                   shares, write_dataset)

# ------------------------------------------------------------------ tokenizers

TEXTS = ['', ' ', 'a', 'Hello, world! It\'s what they\'ve said; I\'ll go, you\'re 12th.',
         'def f(x):\n    return x**2  # 100%\n\n\n',
         'a   1 b  22\t333 \n 4', '   9', '12345678901234567890',
         'ten 10  20   30\n40\r\n  50\u00a060 \u2003 70',
          'naïve café Ωμέγα 東京 2024年 🙂🙃 ½ ² Ⅷ ٣٤',
         'tabs\t\tand  trailing   ', '\n\n  \n', 'x=1;y =2 ; z= 3', "don't can't '5 's 1's",
         '\x00\x01\xff']


def random_texts():
    rng = random.Random(0)
    alphabet = 'ab1 2\n\t.\'=é東½ \u00a0'
    return [''.join(rng.choice(alphabet) for _ in range(rng.randint(1, 60))) for _ in range(300)]


def test_bytes():
    enc = get_tokenizer('bytes')
    assert enc.n_vocab == 257 and enc.eot_token == 256
    for text in TEXTS:
        assert enc.encode(text) == list(text.encode())
        assert enc.decode(enc.encode(text)) == text
    assert enc.encode('a<|endoftext|>', allowed_special='all') == [97, 256]


def train_bpe(path, pre_tokenizer, specials=('<|endoftext|>', '<pad>')):
    tk = pytest.importorskip('tokenizers')
    reference = tk.Tokenizer(tk.models.BPE())
    reference.pre_tokenizer = pre_tokenizer(tk)
    reference.decoder = tk.decoders.ByteLevel()
    trainer = tk.trainers.BpeTrainer(vocab_size=700, special_tokens=list(specials),
                                     show_progress=False,
                                     initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet())
    corpus = [open(tokens_file.__file__, encoding='utf-8').read(), *TEXTS * 3,
              'a  1 the  2 in   33  ' * 50]
    reference.train_from_iterator(corpus, trainer)
    reference.save(str(path))
    return reference


SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
         r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PRE_TOKENIZERS = {
    'gpt2': lambda tk: tk.pre_tokenizers.ByteLevel(add_prefix_space=False),
    'cosmo2': lambda tk: tk.pre_tokenizers.Sequence(
        [tk.pre_tokenizers.Digits(individual_digits=True),
                                                     tk.pre_tokenizers.ByteLevel(
                                                         add_prefix_space=False)]),
    'runs of digits': lambda tk: tk.pre_tokenizers.Sequence(
        [tk.pre_tokenizers.Digits(individual_digits=False),
                                                             tk.pre_tokenizers.ByteLevel(
                                                                     add_prefix_space=False)]),
    'llama3': lambda tk: tk.pre_tokenizers.Sequence(
        [tk.pre_tokenizers.Split(tk.Regex(SPLIT), 'isolated'),
                                                     tk.pre_tokenizers.ByteLevel(
                                                         add_prefix_space=False, use_regex=False)])}


@pytest.mark.parametrize('name', PRE_TOKENIZERS)
def test_a_tokenizer_json_encodes_like_the_reference(tmp_path, name):
    reference = train_bpe(tmp_path / 'tokenizer.json', PRE_TOKENIZERS[name])
    enc = get_tokenizer(tmp_path)
    assert enc.n_vocab == reference.get_vocab_size()
    assert enc.encode_single_token('<|endoftext|>') == 0
    for text in [*TEXTS, *random_texts(), open(__file__, encoding='utf-8').read()]:
        want = reference.encode(text).ids
        assert enc.encode(text, allowed_special='all') == want, repr(text)
        assert enc.decode(want) == text
    # named in a document, a special token is plain text
    assert 0 not in enc.encode_ordinary('x<|endoftext|>')


def test_unknown_tokenizers_are_one_clear_line(monkeypatch):
    with pytest.raises(Refused, match="'byts' is not known: allowed are 'bytes'"):
        get_tokenizer('byts')

    def offline(name):
        raise ConnectionError('no network')
    monkeypatch.setattr(tokenizer_file.tiktoken, 'get_encoding', offline)
    with pytest.raises(Refused, match='could not download it'):
        get_tokenizer('gpt2')


# ------------------------------------------------------------------ the loader is a permutation

@pytest.mark.parametrize('n', [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_permute_is_a_permutation_and_the_key_matters(n):
    seen = [permute(i, n, draw(0, 'test')) for i in range(n)]
    assert sorted(seen) == list(range(n))
    if n > 100:
        assert seen != [permute(i, n, draw(1, 'test')) for i in range(n)]
        assert abs(np.corrcoef(np.arange(n), seen)[0, 1]) < 0.1         # not a shift, not a stretch


def test_draws_are_what_they_were():
    "A gold value: another platform or version must see the same data in the same order."
    assert (draw(0, 'epoch of dataset 0', 3)
            == int.from_bytes(hashlib.blake2b(b'0 epoch of dataset 0 3', digest_size=8).digest(),
                              'big') >> 1)
    assert [permute(i, 10, 12345) for i in range(10)] == GOLD


GOLD = [7, 1, 9, 6, 4, 5, 8, 3, 0, 2]


def make(folder, n, start=0, **kw):
    write_dataset(folder, 'train', 'bytes', (np.arange(n) + start) % 250, **kw)
    return folder


def test_an_epoch_visits_every_window_once(tmp_path):
    folder = make(tmp_path / 'd', 8 * 60 + 1)
    loader = Loader(folder, batch_size=6, context=8, seed=3)
    epochs = []
    for epoch in range(2):
        rows = torch.cat([loader.batch(epoch * 10 + step)[0] for step in range(10)])
        assert sorted(rows[:, 0].tolist()) == sorted(i * 8 % 250 for i in range(60))
        epochs.append(rows[:, 0].tolist())
    assert epochs[0] != epochs[1]
    tokens, targets = loader.batch(4)
    assert tokens.shape == targets.shape == (6, 8) and tokens.dtype == torch.int64
    assert torch.equal(targets, (tokens + 1) % 250)
    assert torch.equal(loader.batch(4)[0], tokens) and not torch.equal(loader.batch(5)[0], tokens)
    assert not torch.equal(Loader(folder, batch_size=6, context=8, seed=4).batch(4)[0], tokens)


def test_ranks_share_out_the_batch_of_one(tmp_path):
    folder = make(tmp_path / 'd', 2000)
    whole = Loader(folder, batch_size=8, context=8)
    for world in (2, 4):
        parts = [Loader(folder, batch_size=8, context=8, rank=r, world_size=world)
                 for r in range(world)]
        for step in (0, 7):
            assert torch.equal(torch.cat([p.batch(step)[0] for p in parts]), whole.batch(step)[0])
    with pytest.raises(Refused, match='batch_size=8 does not divide among 3 ranks'):
        Loader(folder, batch_size=8, context=8, world_size=3)


def test_a_mixture_is_exact_in_every_period_and_each_part_is_gone_through_in_turn(tmp_path):
    folders = ([make(tmp_path / name, n) for name, n in (('a', 8 * 900 + 1), ('b', 8 * 300 + 1),
                                                         ('c', 8 * 50 + 1))])
    loader = Loader(folders, batch_size=10, context=8, weights=[70, 24, 6])
    assert loader.quota == [700, 240, 60]
    for period in range(3):
        places = [loader.place(i) for i in range(period * 1000, (period + 1) * 1000)]
        assert [sum(d == k for d, _, _ in places) for k in range(3)] == [700, 240, 60]
        assert 0 < sum(d == 1 for d, _, _ in places[:100]) < 60         # spread over the period
    places = [loader.place(i) for i in range(5000)]
    for k, windows in ((0, 900), (1, 300), (2, 50)):
        for epoch in range(700 * 5 // windows - 1 if k == 0 else 2):
            assert sorted(w for d, e, w in places if (d, e) == (k, epoch)) == list(range(windows))


def test_shares_by_hand():
    assert shares([70, 15, 9, 6], 1000) == [700, 150, 90, 60]
    assert shares([1, 1, 1], 1000) == [334, 333, 333]
    assert sum(shares([0.1, 0.7, 3.3, 2.2], 1000)) == 1000


def test_several_shards_are_one_dataset(tmp_path):
    folder = make(tmp_path / 'd', 8 * 10 + 1)
    meta = json.loads((folder / 'train.json').read_text())
    more = (np.arange(8 * 5 + 1) + 100).astype('uint16').tobytes()
    (folder / 'train_001.bin').write_bytes(more)
    meta['shards'].append(dict(file='train_001.bin', tokens=8 * 5 + 1,
                               sha256={'.bin': hashlib.sha256(more).hexdigest()}))
    (folder / 'train.json').write_text(json.dumps(meta))
    data = Dataset(folder, 'train', context=8)
    assert len(data) == 15
    assert [int(data.window(i)[0][0]) for i in (0, 9, 10, 14)] == [0, 72, 100, 132]


def test_masked_rows_are_padded_and_count_only_where_the_mask_is_set(tmp_path):
    tokens = np.arange(1, 13)                               # two examples of six tokens
    mask = np.array([0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0])
    folder = tmp_path / 'd'
    write_dataset(folder, 'train', 'bytes', tokens, mask=mask, row=6)
    data = Dataset(folder, 'train', context=8)
    assert len(data) == 2
    row, targets, _ = data.window(1)
    assert row.tolist() == [7, 8, 9, 10, 11, 0, 0, 0]
    assert targets.tolist() == [-1, 9, -1, -1, -1, -1, -1, -1]
    assert data.window(0)[1].tolist() == [-1, -1, 4, 5, -1, -1, -1, -1]
    with pytest.raises(Refused, match='examples of 6 tokens do not fit a context of 4'):
        Dataset(folder, 'train', context=4)


# ------------------------------------------------------------------ bad data, one line each

def test_bad_data_is_named(tmp_path):
    folder = make(tmp_path / 'd', 500)
    with pytest.raises(Refused, match='there is no dataset at .*nowhere'):
        Loader(tmp_path / 'nowhere', 4, 8)
    with pytest.raises(Refused, match='no dataset at .*run: python .*prepare.py'):
        (tmp_path / 'e').mkdir()
        (tmp_path / 'e' / 'prepare.py').write_text('')
        Loader(tmp_path / 'e' / 'part', 4, 8)
    with pytest.raises(Refused, match='not one window of 1001'):
        Loader(folder, 4, 1000)
    with pytest.raises(Refused, match='token id .* in window .* past the vocabulary of 100'):
        loader = Loader(folder, 4, 8, vocab_size=100)
        [loader.batch(i) for i in range(15)]
    with pytest.raises(Refused, match='one positive number for each of the 1 datasets'):
        Loader(folder, 4, 8, weights=[1, 2])
    with pytest.raises(Refused, match='would never be drawn'):
        Loader([folder, folder], 4, 8, weights=[1, 1e6])
    other = make(tmp_path / 'f', 500)
    meta = json.loads((other / 'train.json').read_text())
    (other / 'train.json').write_text(json.dumps(meta | dict(tokenizer='gpt2')))
    with pytest.raises(Refused, match="'bytes', but .*'gpt2': one model reads one tokenizer"):
        Loader([folder, other], 4, 8)
    (folder / 'train_000.bin').write_bytes((folder / 'train_000.bin').read_bytes()[:-4])
    with pytest.raises(Refused, match='has 996 bytes, but train.json says 1,000'):
        Loader(folder, 4, 8)
    (folder / 'train_000.bin').unlink()
    with pytest.raises(Refused, match='train_000.bin is missing'):
        Loader(folder, 4, 8)


def test_a_dry_run_checks_the_checksums(data, capsys):
    line = [f'--data={data}', '--dry_run', '--gpus=1']
    nanodepth('train', line)
    said = capsys.readouterr().out
    assert f'{data}, val: 800 tokens of' in said and 'checksums right; it begins' in said
    raw = bytearray((data / 'val_000.bin').read_bytes())
    raw[100] ^= 1
    (data / 'val_000.bin').write_bytes(raw)
    with pytest.raises(SystemExit):
        nanodepth('train', line)
    assert 'val_000.bin is not what was written' in capsys.readouterr().err


def test_large_vocabularies_take_four_bytes(tmp_path, monkeypatch):
    class Big:
        n_vocab = 100_000
    monkeypatch.setattr(tokenizer_file, 'get_tokenizer', lambda name: Big)
    write_dataset(tmp_path, 'train', 'big', np.arange(70_000, 70_050))
    assert json.loads((tmp_path / 'train.json').read_text())['dtype'] == 'uint32'
    assert int(Dataset(tmp_path, 'train', 8).window(1)[0][0]) == 70_008


# ------------------------------------------------------------------ validation

def test_measure_by_hand(tmp_path, tiny):
    "Two kinds; an answer is a run of tokens that begins at +128, and all of it must be right."
    model = tiny(vocab_size=257)
    tokens = np.random.default_rng(0).integers(0, 256, 8 * 6 + 1)
    marks = np.zeros(len(tokens), int)
    for i, (kind, length) in enumerate([(1, 1), (2, 2), (1, 1), (2, 3), (1, 2), (2, 1)] * 2):
        marks[2 + 4 * i:2 + 4 * i + length] = kind
        marks[2 + 4 * i] += 128
    # let some answers be right: write the model's own choices into the text
    with torch.no_grad():
        for i in (0, 1, 3, 4, 7, 9):
            for t in range(2 + 4 * i, 2 + 4 * i + 3):
                start = (t - 1) // 8 * 8
                tokens[t] = model(torch.tensor(tokens[None, start:t]))[0, -1].argmax()
    write_dataset(tmp_path, 'val', 'bytes', tokens, marks=marks, kinds=['one', 'two'])
    loader = Loader(tmp_path, 2, 8, split='val')
    loss, kinds = measure(model, loader)
    x, y, m = (torch.tensor(a) for a in (tokens[:-1].reshape(6, 8), tokens[1:].reshape(6, 8),
                                         marks[1:].reshape(6, 8)))
    logits = model(x).detach()
    losses = F.cross_entropy(logits.transpose(1, 2), y, reduction='none')
    assert loss == pytest.approx(losses.mean().item(), rel=1e-5)
    assert evaluate(model, loader) == loss
    right = (logits.argmax(-1) == y).flatten().tolist()
    flat, results = m.flatten().tolist(), {1: [], 2: []}
    for t, mark in enumerate(flat):
        if mark >= 128:
            results[mark - 128].append(right[t])
        elif mark:
            results[mark][-1] = results[mark][-1] and right[t]
    for k, kind in ((1, 'one'), (2, 'two')):
        assert kinds[kind]['accuracy'] == pytest.approx(sum(results[k]) / len(results[k]))
        assert 0 < kinds[kind]['accuracy'] < 1
        assert kinds[kind]['loss'] == pytest.approx(losses[m % 128 == k].mean().item(), rel=1e-5)


def test_an_answer_that_a_row_cuts_off_is_nobodys():
    marks = torch.tensor([[0, 129, 1, 1], [1, 0, 130, 2], [2, 2, 129, 129]])
    wrong = torch.zeros(3, 4, dtype=torch.bool)
    wrong[1, 0] = wrong[2, 0] = wrong[2, 2] = True          # two tails, and one whole answer
    kind, right = answers(marks, wrong)
    assert kind.tolist() == [1, 2, 1, 1] and right.tolist() == [True, True, False, True]


def test_measure_without_marks_is_the_same_loss_and_leaves_the_mode(tmp_path, tiny):
    model = tiny(vocab_size=257).train()
    tokens = np.random.default_rng(0).integers(0, 256, 400)
    for name, marks in (('plain', None), ('marked', np.full(400, 129))):
        write_dataset(tmp_path / name, 'val', 'bytes', tokens, marks=marks,
                      kinds=['all'] if name == 'marked' else None)
    plain, marked = (measure(model, Loader(tmp_path / n, 4, 8, split='val'))
                     for n in ('plain', 'marked'))
    assert plain[0] == pytest.approx(marked[0], rel=1e-6) and plain[1] == {}
    assert marked[1]['all']['loss'] == pytest.approx(marked[0], rel=1e-6)
    assert model.training
    model.eval()        # a function from tokens to logits is measured like the model
    function = measure(lambda tokens: model(tokens), Loader(tmp_path / 'plain', 4, 8, split='val'))
    assert function[0] == pytest.approx(plain[0], rel=1e-6) and function[1] == {}
