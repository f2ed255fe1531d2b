"""Options that many commands share, declared once, and a short way to declare a command's own.

Usage:
    parser = make_parser(__doc__, 'data', 'batches', 'device', out='out/loop.png',
                         block=(2, 'how many layers are repeated'), untie=(False, 'cut the ties'))
    parser.add_argument('runs', nargs='+', help=RUNS)
"""
from pathlib import Path

from common.errors import check_choice
from common.help import Parser

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


def picture(text):
    "The path of a picture: .png unless it says another, so that out/T1.5 and out/T1.0 are two."
    path = Path(text)
    known = not path.name or path.suffix in ('.png', '.pdf', '.svg', '.csv')
    return path if known else path.with_name(f'{path.name}.png')


def make_parser(about, *names, out=None, epilog=None, **own):
    """A parser with some of these options and with its own, name=(default, help). A default may
    also be a function of the text, such as a type (no default), False (a flag) or a list (the
    choices, the first by default). A text as `out` is the picture's path."""
    parser = Parser(about, epilog=epilog)
    if isinstance(out, str):
        parser.set_defaults(out=Path(out))
        out = picture, 'the picture, and the numbers beside it'
    own |= dict(out=out) if out else {}
    for name, (default, text) in ({name: OPTIONS[name] for name in names} | own).items():
        form = dict(type=type(default), default=default)
        if default is False:
            form = dict(action='store_true')
        elif callable(default):
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
