"""Command lines: how --help reads (what a file says of itself, and the default after every option
that has one), and one line for whatever is wrong.

Usage:
    parser = Parser(__doc__)
"""
import argparse
import sys
from pathlib import Path

from common.errors import Refused, check_choice, nearest, parse
from common.fields import check_bounds


class Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        text, default = action.help or '', action.default
        if default is None or default is False or default in ('', argparse.SUPPRESS) or (
                'default' in text):
            return text
        return f'{text} (default: %(default)s)'.lstrip()


class Parser(argparse.ArgumentParser):
    "Whatever a command line has wrong is Refused: one line, with the bounds of common/bounds.py."

    def __init__(self, about, **more):
        super().__init__(description=about, formatter_class=Help, allow_abbrev=False, **more)

    def error(self, message):
        raise Refused(message)

    def parse_args(self, args=None, namespace=None):
        for word in sys.argv[1:] if args is None else args:     # before what is missing is said
            if word == '--':
                break
            if word.startswith('--'):
                self.must_know(word)
        found, others = self.parse_known_args(args, namespace)
        if others and others[0].startswith('-'):
            self.must_know(others[0])
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

    def must_know(self, word):
        "Refuse an option that there is not."
        name = word.partition('=')[0]
        if name not in self._option_string_actions:
            known = [option.lstrip('-') for option in self._option_string_actions]
            raise Refused(f'there is no option {name}{nearest(name.lstrip("-"), known)} '
                          '(--help lists all)')
