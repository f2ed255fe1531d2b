"Test training/help.py: --help lists each setting as it is written in its class."
import re
from dataclasses import dataclass, fields

import pytest

from training.plan import Config
from training.settings import read


@dataclass
class Small:
    "A class of settings."
    # how large
    width: int = 8      # channels of a token
    name: str | None = None


@pytest.mark.parametrize('cls, expected', [
    (Small, ['  # how large', r'  --width: int = 8 +# channels of a token',
             r'  --name: str \| None = None']),
    (Config, [rf'  --{field.name}: .*' for field in fields(Config)])])
def test_help_lists_each_setting_with_its_comment(cls, expected, capsys):
    with pytest.raises(SystemExit):
        read(cls, ['--help'])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    found = [line for line in lines if any(re.fullmatch(pattern, line) for pattern in expected)]
    assert len(found) == len(expected) == len({*found})
