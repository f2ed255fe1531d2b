"""Cells as the lines of a table, for a screen and for a Markdown file alike.

Usage:
    print(columns([['run', 'loss'], ['lidas', '0.702']]))
"""


def columns(lines):
    """Lines of cells, the first of them a heading, as a table that a Markdown file can hold as it
    is."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines = [lines[0], ['-' * width for width in widths], *lines[1:]]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, cells, widths)) + ' |' for cells in lines)
