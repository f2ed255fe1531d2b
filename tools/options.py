"""Options that many commands share, declared once, and a short way to declare a command's own.

Usage:
    parser = make_parser(__doc__, 'data', 'batches', 'device', out='out/loop.png',
                         block=(2, 'how many layers are repeated'), untie=(False, 'cut the ties'))
    parser.add_argument('runs', nargs='+', help=RUNS)
"""
import argparse
import sys
from pathlib import Path

from common.bounds import check_bounds
from common.errors import Refused, check_choice, nearest, parse
from common.help import Help

RUN = 'a folder that train.py wrote, or a Hugging Face checkpoint'
RUNS = ('folders that train.py wrote, or Hugging Face checkpoints; NAME-SEED are averaged over '
        'their seeds')
OPTIONS = dict(
    data=(str, 'a dataset (default: what the run was trained on)'),
    batches=(8, 'batches of validation data for each measurement'),
    tasks=('', 'primitives to score too, with depth: assign_code/1,copy_words'),
    n=(200, 'examples of each task'),
    show=(str, 'what the picture shows, such as loss,assign_code/1 (default: all)'),
    loop=(str, 'run the layers in another order, such as 3-2x2-3'),
    r=(int, 'how often a recurrent core runs'),
    seed=(0, 'of every draw'),
    limit=(int, 'documents of each task: to try things, not to report them'),
    dtype=(['auto', 'float32', 'bfloat16', 'float16'], 'of the weights'),
    device=('auto', 'auto (cuda, else mps, else cpu), or one by name'),
)


class Parser(argparse.ArgumentParser):
    "Whatever a command line has wrong is Refused: one line, with the bounds of common/bounds.py."

    def error(self, message):
        raise Refused(message)

    def parse_args(self, args=None, namespace=None):
        found, others = self.parse_known_args(args, namespace)
        if others and others[0].startswith('-'):
            name, known = others[0].partition('=')[0].lstrip('-'), vars(found)
            raise Refused(f'there is no option --{name}{nearest(name, known)} (--help lists all)')
        if others:
            raise Refused(f'{others[0]}: one argument too many')
        return found

    def parse_known_args(self, args=None, namespace=None):
        words = []
        for word in sys.argv[1:] if args is None else args:     # a flag may be written as a setting
            name, equals, value = word.partition('=')
            if equals and getattr(self._option_string_actions.get(name), 'const', None) is True:
                wanted = parse(value)
                check_choice(name, wanted, (True, False))
                words += [name] * wanted
            else:
                words.append(word)
        found, others = super().parse_known_args(words, namespace)
        check_bounds(vars(found), '--')
        for action in self._actions:
            value = getattr(found, action.dest, None)
            # argparse takes '--' for nothing
            if action.option_strings and (value == [] or isinstance(value, list) and [] in value):
                raise Refused(f'--{action.dest}=-- is no value')
            if isinstance(value, Path) and not value.name:
                raise Refused(f'--{action.dest}={value} does not name a file or a folder')
        return found, others


def make_parser(about, *names, out=None, epilog=None, **own):
    """A parser with some of these options and with its own, name=(default, help). A default
    may also be a type (no default), False (a flag) or a list (the choices, the first by default). A
    text as `out` is the picture's path."""
    parser = Parser(description=about, epilog=epilog, allow_abbrev=False,
                    formatter_class=Help)
    if isinstance(out, str):
        out = Path(out), 'the picture, and the numbers beside it'
    own |= dict(out=out) if out else {}
    for name, (default, text) in ({name: OPTIONS[name] for name in names} | own).items():
        form = dict(type=type(default), default=default)
        if default is False:
            form = dict(action='store_true')
        elif isinstance(default, type):
            form = dict(type=default)
        elif isinstance(default, list):
            form = dict(choices=default, default=default[0])
        parser.add_argument(f'--{name}', help=text, **form)
    return parser


def pick_shown(option, text, kinds):
    "What an option such as --show=loss,copy names, or everything."
    names = text.split(',') if text else list(kinds)
    for name in names:
        check_choice(f'--{option}', name, kinds)
    return names
