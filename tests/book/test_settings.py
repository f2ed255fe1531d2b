"Test training/settings.py: settings are read from configs and from a command line."
import re
import zipfile

import pytest

from model import Refused
from training.plan import Config
from training.settings import read


@pytest.mark.parametrize('text, message', [
    ('--optimizer=adam', "optimizer=adam must be Union[Literal['muon', 'adamw'],"),
    ('--stepz=3', 'stepz is not a setting; did you mean steps?'),
    ('--steps=1.5', 'steps=1.5 must be int'), ('--metric=f', 'metric=f must be'),
    ('config/lida.py', 'there is no config config/lida.py'),
    ('def optimiser(model, c):\n    pass', 'did you mean optimizer? (a config may use _optimiser')])
def test_a_wrong_setting_is_refused_in_one_line(text, message, tmp_path):
    "The last row is a config, and the others are command lines."
    if ' ' in text:
        (tmp_path / 'c.py').write_text(text)
        text = str(tmp_path / 'c.py')
    with pytest.raises(Refused, match=re.escape(message)) as error:
        read(Config, [text])
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('line, settings', [
    ('--tie_embeddings=True --compile=false --wandb --n_kv_head=none',
     dict(tie_embeddings=True, compile=False, wandb=True, n_kv_head=None)),
    ('--data=a,b --out_dir=a=b --order=0,1,1,0 --lr 1 --steps=1e3',
     dict(data='a,b', out_dir='a=b', order=[0, 1, 1, 0], lr=1.0, steps=1000)),
    *((f'--steps=60 --decay_steps={text}', dict(decay_steps=n, warmup_steps=5)) for text, n in (
        ('0', 0), ('1', 1), ('7', 7), ('1e1', 10), ('0.5', 30), ('1.0', 60))),
    ('--steps=50 c.py --n_kv_head=none',
     dict(steps=50, lr=1.0, data=['a', 'b'], n_kv_head=None))])
def test_settings_get_the_types_of_their_fields(line, settings, tmp_path, monkeypatch):
    "The command line overrides a config, even if the config comes after an option."
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'c.py').write_text('steps = 2 * 20\nlr = 1\ndata = ("a", "b")\nn_kv_head = 2\n')
    c = read(Config, line.split())
    assert repr({name: getattr(c, name) for name in settings}) == repr(settings)


def test_an_archive_is_not_run_as_a_config(tmp_path):
    "A checkpoint is a zip, and Python would run the __main__.py in a zip."
    for name in ('ckpt.pt', 'ckpt.py'):
        with zipfile.ZipFile(tmp_path / name, 'w') as archive:
            archive.writestr('__main__.py', f'open({str(tmp_path / "ran")!r}, "w")')
        with pytest.raises((SyntaxError, ValueError)):
            read(Config, [str(tmp_path / name)])
    assert not (tmp_path / 'ran').exists()
