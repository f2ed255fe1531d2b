"""How --help reads: what a file says of itself, and the default after every option that has one.

Usage:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
"""
import argparse


class Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        text, default = action.help or '', action.default
        if default is None or default is False or default in ('', argparse.SUPPRESS) or (
                'default' in text):
            return text
        return f'{text} (default: %(default)s)'.lstrip()
