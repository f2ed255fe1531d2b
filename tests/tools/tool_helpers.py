"Functions that several files of tests of the package use."
import json
import re

import pytest

from nanodepth.__main__ import main as nanodepth
from nanodepth.report.tables import PLAIN, Row
from nanodepth.scoring.rows import scores_now
from nanodepth.scoring.ways import in_way


def byte_level_bpe(texts, size, specials, digits=True):
    """Return a tokenizer with some merges. With `digits`, each digit is a token, as SmolLM has it,
    and without it the tokenizer is of GPT-2's kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers as pre, trainers
    made, words = Tokenizer(models.BPE()), pre.ByteLevel(add_prefix_space=False)
    single = pre.Digits(individual_digits=True)
    made.pre_tokenizer = pre.Sequence([single, words]) if digits else words
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, show_progress=False,
        initial_alphabet=pre.ByteLevel.alphabet()))
    return made


def bpe(folder, swapped=''):
    """Write a tokenizer with 257 tokens, like `bytes`. The letters of `swapped` change places, two
    by two. Return its folder."""
    folder.mkdir(exist_ok=True)
    made = json.loads(byte_level_bpe(['abc'] * 3, 257, ['<|endoftext|>']).to_str())
    vocab = made['model']['vocab']
    for a, b in zip(swapped[::2], swapped[1::2]):
        vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / 'tokenizer.json').write_text(json.dumps(made))
    return str(folder)


def asked_of(subject, way={}):
    "Return {name: Score} of a Subject's model that runs in a way."
    with in_way(subject.model, way):
        return {name: score for name, (score, _) in scores_now(subject).items()}


def refused(capsys, name, *argv):
    "Return the line with which a command refuses. Its status must be 2."
    with pytest.raises(SystemExit) as end:
        nanodepth(name, [str(a) for a in argv])
    said = [line for line in capsys.readouterr().err.replace('\r', '\n').splitlines()
            if line.startswith(f'{name}: ') and '%|' not in line]
    assert end.value.code == 2 and len(said) == 1
    return said[0]


def table_of(said, measure):
    """Return the lines of a printed table that are about a measure, as {heading: cell}. A cell that
    repeats the line above is empty, and is filled in here."""
    lines = []
    for table in re.findall(r'(?:^\|.*\n)+', said, flags=re.M):
        heads, _, *rest = [[cell.strip() for cell in line.strip('|\n').split('|')]
                           for line in table.splitlines()]
        above = rest[0]
        for cells in rest:
            given = next(i for i, cell in enumerate(cells) if cell)
            above = above[:given] + cells[given:]
            lines.append(dict(zip(heads, above)))
    return [line for line in lines if line['measure'].partition(',')[0] == measure]


def row_of(**values):
    "Return a Row of a model's loss."
    row = dict(run='a-0', group='a', seed=0, steps=9, layers=4, params=7, inference_flops=1.0,
               dtype='float32', training_flops=1.0, tokens=1.0, way=PLAIN, measure='loss',
               kind='nats', mean=1.0, error=None, n=None, chance=None, change=0.0,
               change_error=None, p=None, data='x')
    return Row(**row | values)
