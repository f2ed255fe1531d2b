"Text files as a dataset."
import json
import runpy

import pytest
import torch
from conftest import ROOT

from nanodepth.common.errors import Refused
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.data.tokens import Loader

text = runpy.run_path(str(ROOT / 'data/text/prepare.py'))


def test_documents_of_every_kind(tmp_path, capsys):
    datasets = pytest.importorskip('datasets')
    (tmp_path / 'a.txt').write_text('one file, one document')
    (tmp_path / 'b.jsonl').write_text('\n'.join(json.dumps(dict(text=f'row {i} ' * 9))
                                                for i in range(120)))
    datasets.Dataset.from_list([dict(text=f'parquet {i} ' * 9) for i in range(30)]).to_parquet(
        tmp_path / 'c.parquet')
    text['main']([*(str(tmp_path / n) for n in ('a.txt', 'b.jsonl', 'c.parquet')),
                  f'--out={tmp_path / "d"}'])
    assert f'{tmp_path / "d"}/val: 16 documents' in capsys.readouterr().out
    loader = Loader(str(tmp_path / 'd'), 8, 64)
    said = get_tokenizer('bytes').decode(torch.cat([loader.batch(step)[0] for step in range(
        len(loader))]).flatten().tolist())
    # the first went to validation
    assert 'row 7 ' in said and 'parquet 3 ' in said and 'one file' not in said
    for args, message in (([str(tmp_path / 'no.txt')], 'there is no'),
                          ([str(tmp_path / 'b.jsonl'), '--column=words'],
                           "no text in the column 'words'"),
                          ([str(tmp_path / 'a.txt')], '1 documents are too few'),
                          ([str(tmp_path / 'a.txt'), '--tokenizer=x'],
                           "tokenizer 'x' is not known")):
        with pytest.raises(Refused) as error:
            text['main']([*args, f'--out={tmp_path / "e"}'])
        assert message in str(error.value)


@pytest.mark.parametrize('row, found', [
    (dict(text='user: What is 2 + 2?\nassistant: 4, as the user knows.'),
     'What is 2 + 2?\n4, as the user knows.'),
    (dict(text='<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nThat.<|im_end|>'),
     'What?That.'),
    (dict(text='The user: a definition.'), 'The user: a definition.'),
    (dict(text='assistant: <think>well</think> 4'), None),
    (dict(text='assistant: 4', generator='DeepSeek-R1'), None),
    (dict(text='assistant: 4', generator='DeepSeek-V3', license='cc'), '4'),
])
def test_role_tags_and_reasoning_traces(row, found):
    assert text['chat'](row, 'text') == found
